"""Takes quantised matrices from the blocks of a GGUF file.

Q4_0, Q4_1 and Q8_0 keep their bytes. Every other type that the gguf package can read (Q4_K, Q5_0, Q6_K, ...) is dequantised
by it, some rows at a time, and quantised to 8 bits: finer than what it comes from, at 1.06 bytes per weight.

    Q4_1  | scale fp16 | min fp16 | 16 bytes: input i low, 16 + i high |
    Q4_0  | scale fp16 | 16 bytes |
    Q8_0  | scale fp16 | 32 x int8 |
"""

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize

from chatpage_kernels.quantized_weights import GROUP, Format, QuantizedRows, quantize

_ROWS_AT_ONCE = 4096
_KEPT = {
    GGMLQuantizationType.Q4_0: Format.Q4_0,
    GGMLQuantizationType.Q4_1: Format.Q4_1,
    GGMLQuantizationType.Q8_0: Format.Q8_0,
}


def from_gguf_blocks(raw: np.ndarray, kind: GGMLQuantizationType, shape: tuple[int, int]) -> QuantizedRows:
    """Read a matrix without an fp32 copy of it.

    Args:
        raw: The tensor's bytes, uint8 of any shape, or floats for F32 and F16; may be a read-only memory map.
        kind: The tensor's type.
        shape: (num_outputs, num_inputs); num_inputs is a multiple of 32. GGUF writes it the other way round.

    Raises:
        ValueError: The bytes are not those of the shape, or num_inputs is not a multiple of 32.
    """
    num_outputs, num_inputs = shape
    block_size, block_bytes = GGML_QUANT_SIZES[kind]
    expected = num_outputs * num_inputs // block_size * block_bytes
    if raw.nbytes != expected or num_inputs % max(block_size, GROUP):
        raise ValueError(
            f"{raw.nbytes} bytes are not a {kind.name} matrix of {num_outputs} x {num_inputs}: that has {expected} bytes"
        )
    rows = np.ascontiguousarray(raw).view(np.uint8).reshape(num_outputs, -1)
    if kind not in _KEPT:
        return _requantize(rows, kind)
    format_ = _KEPT[kind]
    # Copied once: the tensors below are views of it, and a file's own bytes are not ours to keep.
    blocks = torch.from_numpy(rows.reshape(num_outputs, num_inputs // GROUP, block_bytes).copy())
    num_halves = format_.num_halves
    halves = blocks[:, :, : 2 * num_halves].contiguous().view(torch.float16)
    codes = blocks[:, :, 2 * num_halves :]
    if format_ is Format.Q8_0:
        codes = codes ^ 128
    return QuantizedRows(format_, codes, halves[:, :, 0], halves[:, :, 1] if num_halves == 2 else None)


def _requantize(rows: np.ndarray, kind: GGMLQuantizationType) -> QuantizedRows:
    parts = []
    for first in range(0, len(rows), _ROWS_AT_ONCE):
        values = dequantize(rows[first : first + _ROWS_AT_ONCE], kind)
        parts.append(quantize(torch.from_numpy(np.array(values, np.float32)), 8))  # F32 comes as a view of the file
    return QuantizedRows(Format.Q8_0, torch.cat([p.codes for p in parts]), torch.cat([p.scales for p in parts]))
