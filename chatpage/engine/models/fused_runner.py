"""Runs a model of the llama family over packed weights on a CPU: one call into C++ for all layers of a step.

The activations are fp32 between the layers and 8 bits inside their products, keys and values are bfloat16. A row's products
depend on that row alone, to the bit, however the step is made up. Attention is cut into items by the whole step, so chunks and
neighbours can change the last bits of a row there; rounding to 8 bits then turns some of them into a whole code, and the logits
differ by up to what that rounding costs anyway, as those of any half type do. The same steps give the same bits; where every
token must be independent of its neighbours, `--dtype float32` is the way.

Invariant: weights, caches and buffers stay where they are, so their addresses are taken once per KV cache and a step passes
its own arrays only.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from chatpage.engine.batch import Batch
from chatpage.engine.kv_cache import KvCache, LayerKind, LayerSpec
from chatpage.engine.models.packed_weights import LayerWeights, PackedModel
from chatpage_kernels.cpu.kernels import CpuKernels, PreparedAttention
from chatpage_kernels.cpu.layers import CpuLayers, Layer
from chatpage_kernels.cpu.library import Library
from chatpage_kernels.cpu.linear import CpuLinear
from chatpage_kernels.rotary import rotary_table

KV_DTYPE = torch.bfloat16
_LEAST_ROWS = 64


@dataclass(slots=True)
class _Bound:
    """The layers over one KV cache, and the attention of the last step for each window."""

    kv_cache: KvCache
    layers: CpuLayers
    prepared: dict[int, PreparedAttention] = field(default_factory=dict)


class FusedRunner:
    """A `ModelRunner` around packed weights.

    Args:
        model: The weights.
        library: The C++ kernels.
        model_id: See `ModelRunner.model_id`.
        max_model_len: Longest sequence in tokens.
        eos_token_ids: Tokens with which the model ends an answer.

    Raises:
        OSError: The library was built from other sources.
    """

    def __init__(
        self, model: PackedModel, library: Library, *, model_id: str, max_model_len: int, eos_token_ids: frozenset[int]
    ) -> None:
        self._model, self._library = model, library
        self._model_id, self._max_model_len, self._eos_token_ids = model_id, max_model_len, eos_token_ids
        shape = model.shape
        self._table = rotary_table(shape.frequencies, max_model_len, shape.rotary_factor)
        self._layer_specs = tuple(LayerSpec(shape.num_kv_heads, shape.head_dim, shape.head_dim, w) for w in shape.windows)
        self._windows = tuple(dict.fromkeys(shape.windows))  # a plan for each
        self._scale = shape.head_dim**-0.5
        self._kernels, self._linear = CpuKernels(library), CpuLinear(library)
        self._bound: _Bound | None = None

    @property
    def layer_specs(self) -> Sequence[LayerSpec]:
        return self._layer_specs

    @property
    def vocab_size(self) -> int:
        return self._model.head.num_outputs

    @property
    def max_model_len(self) -> int:
        return self._max_model_len

    @property
    def eos_token_ids(self) -> frozenset[int]:
        return self._eos_token_ids

    @property
    def model_id(self) -> str:
        return self._model_id

    def forward(self, batch: Batch, kv_cache: KvCache) -> torch.Tensor:
        """Compute a step: write the KV of its tokens, return the logits `[num_logit_rows, vocab_size]` float32.

        Raises:
            MemoryError: There is no memory for the scratch of a layer.
        """
        kv_cache.begin_step(batch)
        self._library.use_own_threads()  # whichever thread does the steps
        assert kv_cache.backend.name == "cpp", f"the KV cache has the layout of {kv_cache.backend.name}, not of the C++ kernels"
        num_rows = batch.num_tokens
        bound = self._bind_to(kv_cache, num_rows)
        layers = bound.layers
        self._linear.embed(batch.input_ids, self._model.embedding, layers.hidden[:num_rows])
        prepared = [self._prepare(batch, bound, window) for window in self._windows]
        layers.run(num_rows, batch.slot_mapping, batch.positions, [attention.call for attention in prepared])
        return self._logits(layers.hidden[batch.logit_rows])

    def _bind_to(self, kv_cache: KvCache, num_rows: int) -> _Bound:
        """Return the layers bound to a KV cache, with room for the rows of a step."""
        if self._bound is not None and self._bound.kv_cache is kv_cache and len(self._bound.layers.hidden) >= num_rows:
            return self._bound
        self._bound = None  # its buffers go before the new ones come
        layers = CpuLayers(
            self._library,
            [self._bind(i, weights, kv_cache) for i, weights in enumerate(self._model.layers)],
            self._table,
            max_rows=max(_LEAST_ROWS, 1 << (num_rows - 1).bit_length()),
            norm_epsilon=self._model.shape.norm_epsilon,
        )
        self._bound = _Bound(kv_cache, layers)
        return self._bound

    def _bind(self, index: int, weights: LayerWeights, kv_cache: KvCache) -> Layer:
        key_cache, value_cache = kv_cache.layers[index]
        return Layer(
            input_norm=weights.input_norm,
            qkv=weights.qkv,
            output=weights.output,
            mlp_norm=weights.mlp_norm,
            gate_up=weights.gate_up,
            down=weights.down,
            key_cache=key_cache,
            value_cache=value_cache,
            query_norm=weights.query_norm,
            key_norm=weights.key_norm,
            attention=self._windows.index(self._model.shape.windows[index]),
        )

    def _prepare(self, batch: Batch, bound: _Bound, window: int) -> PreparedAttention:
        """Return the attention of a step; a plan that only grew has its call already."""
        shape, kv_cache, layers = self._model.shape, bound.kv_cache, bound.layers
        plan = kv_cache.plan(batch, LayerKind(shape.num_q_heads, shape.num_kv_heads, window))
        last = bound.prepared.get(window)
        if last is not None and last.plan is plan:
            return last
        rows = slice(batch.num_tokens)
        prepared = self._kernels.prepare(
            layers.query[rows], layers.attended[rows], *kv_cache.layers[0], plan, scale=self._scale
        )
        bound.prepared[window] = prepared
        return prepared

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        model = self._model
        logits = torch.empty(len(hidden), model.head.num_outputs)
        if len(hidden):
            self._linear.linear(hidden, model.head, logits, norm_weight=model.final_norm, norm_epsilon=model.shape.norm_epsilon)
        return logits
