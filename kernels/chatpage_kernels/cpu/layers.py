"""All layers of a llama-like model in one C++ call (layers.cpp), over packed weights and buffers that stay where they are.

Invariant: addresses are taken once, when `CpuLayers` is made; it holds every tensor they belong to. A step changes only the
rows of `hidden`, which are both its input and its output:

    layers.hidden[:n] = embeddings;  layers.run(n, slots, positions, [attention_call]);  logits = head(layers.hidden[:n])

Attention calls are those of `CpuKernels`: their query is `layers.query[:n]`, their output `layers.attended[:n]`.
"""

from collections.abc import Sequence
from ctypes import POINTER, Structure, byref, c_int32, c_void_p
from dataclasses import dataclass

import torch

from chatpage_kernels.cpu.library import AttentionCall, Library
from chatpage_kernels.cpu.linear import DTYPES, CpuLinear, LinearCall
from chatpage_kernels.cpu.rotary import CpuRotary, RotaryCall
from chatpage_kernels.quantized_weights import PackedLinear

_OUT_OF_MEMORY, _OUTSIDE_CACHE = 1, 3  # Status of abi.h


class LayerCall(Structure):
    """A layer, see layers.h."""

    _fields_ = (
        *((name, LinearCall) for name in ("qkv", "output", "gate_up", "down")),
        ("rotary", RotaryCall),
        ("attention", c_int32),
    )


class StepCall(Structure):
    """A step, see layers.h."""

    _fields_ = (
        ("attention", POINTER(AttentionCall)),
        ("slots", c_void_p),
        ("positions", c_void_p),
        ("num_rows", c_int32),
        ("num_threads", c_int32),
    )


@dataclass(frozen=True, slots=True, eq=False)
class Layer:
    """Weights and caches of one layer.

    Args:
        input_norm: fp32 [hidden_size].
        qkv: hidden_size -> (num_q_heads + 2 * num_kv_heads) * head_dim.
        output: num_q_heads * head_dim -> hidden_size.
        mlp_norm: fp32 [hidden_size].
        gate_up: hidden_size -> intermediate_size, gated.
        down: intermediate_size -> hidden_size.
        key_cache: [num_blocks, block_size, num_kv_heads, head_dim] fp32 or bf16, in the layout of the C++ kernels.
        value_cache: Of key_cache's shape and dtype.
        query_norm: fp32 [head_dim] or None.
        key_norm: Likewise.
        attention: Which of a step's attention calls is this layer's.
    """

    input_norm: torch.Tensor
    qkv: PackedLinear
    output: PackedLinear
    mlp_norm: torch.Tensor
    gate_up: PackedLinear
    down: PackedLinear
    key_cache: torch.Tensor
    value_cache: torch.Tensor
    query_norm: torch.Tensor | None = None
    key_norm: torch.Tensor | None = None
    attention: int = 0


class CpuLayers:
    """The layers of one model, ready to run.

    Attributes:
        hidden: fp32 [max_rows, hidden_size]; a step's input and output.
        query: [max_rows, num_q_heads, head_dim] of the caches' dtype; what attention reads.
        attended: Of query's shape; what attention writes.
    """

    def __init__(
        self, library: Library, layers: Sequence[Layer], table: torch.Tensor, *, max_rows: int, norm_epsilon: float = 1e-5
    ) -> None:
        """Take the addresses of weights, caches and buffers.

        Args:
            library: A loaded library.
            layers: At least one.
            table: From `rotary_table`.
            max_rows: Rows of the largest step.
            norm_epsilon: Of all norms.

        Raises:
            OSError: The library was built from other sources.
            ValueError: Weights and caches do not fit together.
        """
        library.check("chatpage_layers_abi", LayerCall, StepCall)
        self._run = library.bind("chatpage_layers", POINTER(LayerCall), c_int32, POINTER(StepCall))
        self._kept = (tuple(layers), table)
        self._linear, self._rotary = CpuLinear(library), CpuRotary(library)
        first, head_dim = layers[0], layers[0].key_cache.shape[3]
        if first.key_cache.dtype not in DTYPES:
            raise ValueError(f"the caches are {first.key_cache.dtype}; linear layers read fp32 and bf16")
        self.hidden = torch.zeros(max_rows, first.qkv.num_inputs)
        self.query = torch.zeros(max_rows, first.output.num_inputs // head_dim, head_dim, dtype=first.key_cache.dtype)
        self.attended = torch.zeros_like(self.query)
        self._qkv = torch.zeros(max_rows, first.qkv.width)
        self._gated = torch.zeros(max_rows, first.gate_up.width)
        self._no_ids = torch.zeros(max_rows, dtype=torch.int64)
        self._calls = (LayerCall * len(layers))(*(self._prepare(layer, table, norm_epsilon) for layer in layers))

    def _prepare(self, layer: Layer, table: torch.Tensor, epsilon: float) -> LayerCall:
        _check_widths(layer, self.hidden.shape[1], self.query.shape[1:], self._qkv.shape[1], self._gated.shape[1])
        prepare, attended = self._linear.prepare, self.attended.flatten(1)
        rotary = self._rotary.prepare(
            self._qkv, self.query, layer.key_cache, layer.value_cache,
            slot_mapping=self._no_ids, positions=self._no_ids, table=table,
            query_norm=layer.query_norm, key_norm=layer.key_norm, norm_epsilon=epsilon,
        )  # fmt: skip
        return LayerCall(
            prepare(self.hidden, layer.qkv, self._qkv, norm_weight=layer.input_norm, norm_epsilon=epsilon),
            prepare(attended, layer.output, self.hidden, residual=self.hidden),
            prepare(self.hidden, layer.gate_up, self._gated, norm_weight=layer.mlp_norm, norm_epsilon=epsilon),
            prepare(self._gated, layer.down, self.hidden, residual=self.hidden),
            rotary,
            layer.attention,
        )

    def run(self, num_rows: int, slots: torch.Tensor, positions: torch.Tensor, attention: Sequence[AttentionCall]) -> None:
        """Run all layers on the first rows of `hidden`, in place.

        Args:
            num_rows: Rows of this step, at most max_rows.
            slots: int64 [num_rows]; below 0: not written to the caches.
            positions: int64 [num_rows].
            attention: A call for each kind of layer, over `query` and `attended`; each layer puts its own caches in.

        Raises:
            ValueError: There are too many rows, or a slot or position is out of range: nothing was written to the caches.
            MemoryError: There is no memory for a layer's scratch.
        """
        if not 0 < num_rows <= len(self.hidden) or len(slots) != num_rows or len(positions) != num_rows:
            raise ValueError(
                f"{num_rows} rows, {len(slots)} slots and {len(positions)} positions; at most {len(self.hidden)} of each"
            )
        if (
            slots.dtype != torch.int64
            or positions.dtype != torch.int64
            or not (slots.is_contiguous() and positions.is_contiguous())
        ):
            raise ValueError(f"slots are {slots.dtype} and positions {positions.dtype}; they must be int64, contiguous")
        calls = (AttentionCall * len(attention))(*attention)
        threads = torch.get_num_threads()
        step = StepCall(calls, slots.data_ptr(), positions.data_ptr(), num_rows, threads)
        status = self._run(self._calls, len(self._calls), byref(step))
        if status == _OUTSIDE_CACHE:
            raise ValueError("a slot lies outside the cache or a position outside the table; nothing was written")
        if status == _OUT_OF_MEMORY:
            raise MemoryError("there is no memory for a layer's scratch")
        if status:
            raise RuntimeError(f"a layer in C++ failed with status {status}")


def _check_widths(layer: Layer, hidden: int, heads: torch.Size, qkv: int, gated: int) -> None:
    """Hold a layer to the widths of the first."""
    attended = heads[0] * heads[1]
    for name, packed, num_inputs, width in (
        ("qkv", layer.qkv, hidden, qkv),
        ("output", layer.output, attended, hidden),
        ("gate_up", layer.gate_up, hidden, gated),
        ("down", layer.down, gated, hidden),
    ):
        actual, expected = (packed.num_inputs, packed.width, packed.is_gated), (num_inputs, width, name == "gate_up")
        if actual != expected:
            raise ValueError(f"{name} has (inputs, width, is gated) {actual}; it must be {expected}")
    for name, norm in (("input_norm", layer.input_norm), ("mlp_norm", layer.mlp_norm)):
        if norm.shape != (hidden,) or norm.dtype != torch.float32 or not norm.is_contiguous():
            raise ValueError(f"{name} is {tuple(norm.shape)} {norm.dtype}; it must be fp32 ({hidden},)")
