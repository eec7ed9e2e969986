"""Matrices of a GGUF file become packed weights with their values, without passing through fp32."""

from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFReader, GGUFWriter, dequantize
from gguf import quantize as quantize_blocks

from chatpage_kernels.gguf_blocks import from_gguf_blocks
from chatpage_kernels.quantized_weights import Format, pack

KEPT = [GGMLQuantizationType.Q4_0, GGMLQuantizationType.Q4_1, GGMLQuantizationType.Q8_0]


def _matrix(num_outputs: int = 40, num_inputs: int = 256) -> np.ndarray:
    return np.random.default_rng(0).standard_normal((num_outputs, num_inputs)).astype(np.float32)


@pytest.mark.parametrize("kind", KEPT)
def test_a_files_blocks_keep_their_values(kind: GGMLQuantizationType, tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "small.gguf", "llama")
    writer.add_tensor("weight", quantize_blocks(_matrix(), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    (tensor,) = GGUFReader(tmp_path / "small.gguf").tensors
    num_inputs, num_outputs = (int(n) for n in tensor.shape)
    rows = from_gguf_blocks(tensor.data, tensor.tensor_type, (num_outputs, num_inputs))
    expected = torch.from_numpy(dequantize(tensor.data, kind))
    assert rows.format is Format[kind.name]
    assert torch.equal(rows.dequantize(), expected)
    assert torch.equal(pack(rows).unpack().dequantize()[:num_outputs], expected)


@pytest.mark.parametrize("kind", [GGMLQuantizationType.Q5_0, GGMLQuantizationType.Q5_1, GGMLQuantizationType.F16])
def test_other_types_become_8_bits(kind: GGMLQuantizationType) -> None:
    raw = quantize_blocks(_matrix(), kind)
    expected = torch.from_numpy(dequantize(raw, kind).astype(np.float32)).view(40, 8, 32)
    rows = from_gguf_blocks(raw, kind, (40, 256))
    errors = (rows.dequantize().view(40, 8, 32) - expected).abs().amax(2)
    assert rows.format is Format.Q8_0
    assert bool((errors <= expected.abs().amax(2) / 254 * 1.002).all())


@pytest.mark.parametrize("kind", [GGMLQuantizationType.Q4_K, GGMLQuantizationType.Q6_K])
def test_k_quants_become_8_bits(kind: GGMLQuantizationType) -> None:
    """The gguf package reads these but does not write them: blocks of random codes with a scale of 1/1024."""
    block_size, block_bytes = GGML_QUANT_SIZES[kind]
    raw = np.random.default_rng(0).integers(0, 256, (8, 512 // block_size, block_bytes), dtype=np.uint8)
    scale = np.array([2.0**-10], dtype=np.float16).view(np.uint8)
    if kind is GGMLQuantizationType.Q4_K:
        raw[:, :, 0:2] = raw[:, :, 2:4] = scale
    else:
        raw[:, :, -2:] = scale
    raw = raw.reshape(8, -1)
    expected = torch.from_numpy(dequantize(raw, kind)).view(8, 16, 32)
    errors = (from_gguf_blocks(raw, kind, (8, 512)).dequantize().view(8, 16, 32) - expected).abs().amax(2)
    assert bool((errors <= expected.abs().amax(2) / 254 * 1.002 + 1e-6).all())


def test_a_file_may_be_closed_afterwards() -> None:
    raw = quantize_blocks(_matrix(), GGMLQuantizationType.Q4_1)
    rows = from_gguf_blocks(raw, GGMLQuantizationType.Q4_1, (40, 256))
    before = rows.dequantize()
    raw[:] = 0
    assert torch.equal(rows.dequantize(), before)


def test_bytes_of_another_shape_are_refused() -> None:
    raw = quantize_blocks(_matrix(), GGMLQuantizationType.Q4_1)
    with pytest.raises(ValueError, match="6400 bytes are not a Q4_1 matrix of 41 x 256"):
        from_gguf_blocks(raw, GGMLQuantizationType.Q4_1, (41, 256))
