"""The weights of a model of the llama family, packed for the C++ kernels straight from a GGUF file.

Invariant: packed weights are the only copy. Matrices are read, rearranged and dropped one after the other, so loading takes
little more memory than the result; 4-bit and 8-bit weights of the file keep their values to the bit.

All of them lie side by side in large regions of memory with huge pages behind them: a decode step reads every weight once, and
finding the memory of 4 KiB pages took an eighth of it.

GGUF files of llama and mistral have the rows of query and key heads in pairs (0 with 1, 2 with 3, ...), as the first llama
rotated them; everything here rotates halves (0 with head_dim / 2, ...), so those rows are put back:

    head of 8 rows in the file    0 4 1 5 2 6 3 7      packed    0 1 2 3 4 5 6 7
"""

from dataclasses import dataclass, replace
from typing import Literal

import torch

from chatpage.engine.models.gguf_tensors import GgufTensors
from chatpage.engine.models.llama_shape import LlamaShape
from chatpage_kernels.cpu import huge_pages
from chatpage_kernels.quantized_weights import PackedLinear, QuantizedRows, pack, quantize

MATRICES = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
_IN_PAIRS = frozenset({"llama", "mistral"})  # see above
_ROTARY_DIVISORS = "rope_freqs.weight"
_REGION_BYTES = 64 * 2**20
_ALIGNMENT = 64  # bytes of a cache line

Bits = Literal["as in the file", "int8", "int4"]
_NUM_BITS: dict[Bits, int] = {"int8": 8, "int4": 4}


@dataclass(frozen=True, slots=True, eq=False)
class LayerWeights:
    """Weights of one layer; see `chatpage_kernels.cpu.layers.Layer`."""

    input_norm: torch.Tensor
    qkv: PackedLinear
    output: PackedLinear
    mlp_norm: torch.Tensor
    gate_up: PackedLinear
    down: PackedLinear
    query_norm: torch.Tensor | None
    key_norm: torch.Tensor | None

    @property
    def matrices(self) -> tuple[PackedLinear, ...]:
        return (self.qkv, self.output, self.gate_up, self.down)


@dataclass(frozen=True, slots=True, eq=False)
class PackedModel:
    """A whole model.

    Args:
        shape: Its sizes.
        layers: In their order.
        embedding: [vocab_size, hidden_size]; the same object as `head` if they are tied.
        head: hidden_size -> vocab_size.
        final_norm: fp32 [hidden_size].
    """

    shape: LlamaShape
    layers: tuple[LayerWeights, ...]
    embedding: PackedLinear
    head: PackedLinear
    final_norm: torch.Tensor

    @property
    def _matrices(self) -> list[PackedLinear]:
        ends = [self.head] if self.embedding is self.head else [self.embedding, self.head]
        return [matrix for layer in self.layers for matrix in layer.matrices] + ends

    @property
    def num_bytes(self) -> int:
        return sum(matrix.num_bytes for matrix in self._matrices)

    @property
    def num_parameters(self) -> int:
        """Weights in matrices."""
        return sum(matrix.num_outputs * matrix.num_inputs for matrix in self._matrices)

    @property
    def formats(self) -> str:
        """The formats of layers and head, for people."""
        layers = sorted({matrix.format.name for layer in self.layers for matrix in layer.matrices})
        return f"{' and '.join(layers)} layers, {self.head.format.name} head"


def read_gguf(tensors: GgufTensors, shape: LlamaShape, *, model_type: str, bits: Bits = "as in the file") -> PackedModel:
    """Read and pack all weights of a file.

    Args:
        tensors: Of the file.
        shape: Of the model.
        model_type: Of its config; decides about the order of rows.
        bits: Of the layers' matrices. Embedding and head keep what the file has: at 4 bits the head's errors go straight into
            the choice of a token.

    Raises:
        BrokenModelError: A tensor is missing or has another shape than the model.
    """
    if _ROTARY_DIVISORS in tensors:  # how llama.cpp writes the scaled frequencies of llama 3
        shape = replace(shape, frequencies=shape.frequencies / tensors.vector(_ROTARY_DIVISORS))
    regions = _Regions()
    reader = _LayerReader(tensors, shape, model_type in _IN_PAIRS, bits, regions)
    layers = tuple(reader.read(index) for index in range(shape.num_layers))
    embedding = regions.place(pack(tensors.matrix("token_embd.weight")))
    head = regions.place(pack(tensors.matrix("output.weight"))) if "output.weight" in tensors else embedding
    return PackedModel(shape, layers, embedding, head, tensors.vector("output_norm.weight"))


class _Regions:
    """Memory with huge pages, filled from its beginning; what is left of the last region is never touched."""

    def __init__(self) -> None:
        self._free = torch.empty(0, dtype=torch.uint8)

    def place(self, packed: PackedLinear) -> PackedLinear:
        """Return the same weights in this memory."""
        size = packed.data.nbytes
        if len(self._free) < size + _ALIGNMENT:
            self._free = torch.empty(max(size + _ALIGNMENT, _REGION_BYTES), dtype=torch.uint8)
            huge_pages.advise(self._free)
        start = -self._free.data_ptr() % _ALIGNMENT
        data = self._free[start : start + size].view(packed.data.shape)
        self._free = self._free[start + size :]
        return replace(packed, data=data.copy_(packed.data))


class _LayerReader:
    def __init__(self, tensors: GgufTensors, shape: LlamaShape, is_in_pairs: bool, bits: Bits, regions: _Regions) -> None:
        self._tensors, self._bits, self._is_in_pairs, self._regions = tensors, bits, is_in_pairs, regions
        self._num_heads = {"attn_q": shape.num_q_heads, "attn_k": shape.num_kv_heads}

    def read(self, index: int) -> LayerWeights:
        block = f"blk.{index}."
        return LayerWeights(
            input_norm=self._tensors.vector(f"{block}attn_norm.weight"),
            qkv=self._pack(block, "attn_q", "attn_k", "attn_v"),
            output=self._pack(block, "attn_output"),
            mlp_norm=self._tensors.vector(f"{block}ffn_norm.weight"),
            gate_up=self._pack(block, "ffn_gate", "ffn_up", is_gated=True),
            down=self._pack(block, "ffn_down"),
            query_norm=self._optional(f"{block}attn_q_norm.weight"),
            key_norm=self._optional(f"{block}attn_k_norm.weight"),
        )

    def _pack(self, block: str, *names: str, is_gated: bool = False) -> PackedLinear:
        matrices = [self._matrix(block, name) for name in names]
        biases = [self._bias(block, name, matrix.num_outputs) for name, matrix in zip(names, matrices, strict=True)]
        has_bias = any(f"{block}{name}.bias" in self._tensors for name in names)
        packed = pack(*matrices, is_gated=is_gated, bias=torch.cat(biases) if has_bias else None)
        return self._regions.place(packed)

    def _matrix(self, block: str, name: str) -> QuantizedRows:
        rows = self._tensors.matrix(f"{block}{name}.weight")
        if self._bits in _NUM_BITS and rows.format.bits != _NUM_BITS[self._bits]:
            rows = quantize(rows.dequantize(), _NUM_BITS[self._bits])
        order = self._order(name, rows.num_outputs)
        return rows if order is None else rows.take(order)

    def _bias(self, block: str, name: str, num_outputs: int) -> torch.Tensor:
        bias = self._optional(f"{block}{name}.bias")
        if bias is None:
            return torch.zeros(num_outputs)
        order = self._order(name, num_outputs)
        return bias if order is None else bias[order]

    def _order(self, name: str, num_rows: int) -> torch.Tensor | None:
        """Return which row of the file comes where; None if they stay."""
        if not self._is_in_pairs or name not in self._num_heads:
            return None
        return torch.arange(num_rows).view(self._num_heads[name], -1, 2).transpose(1, 2).flatten()

    def _optional(self, name: str) -> torch.Tensor | None:
        return self._tensors.vector(name) if name in self._tensors else None
