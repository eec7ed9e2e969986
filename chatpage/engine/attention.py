"""Carries the attention of a transformers model to our kernels.

transformers calls the function registered as "chatpage" once per layer. What it must know about the step travels in a context
variable, never in arguments, because models differ in what they pass on. No mask is registered under that name, so models
build none. Invariant: outside a `paged_attention` block the hook refuses to run, and inside it every value an
attention layer passes is either honoured or refused.
"""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from chatpage.engine.batch import Batch
from chatpage.engine.kv_cache import KvCache, LayerKind, LayerSpec
from chatpage_kernels.plan import AttentionPlan

# Not a name that transformers treats in a special way: no "flash", "sdpa", "flex_attention", "/" or "paged|" in it.
IMPLEMENTATION = "chatpage"

# Given to every layer, and without effect on its result here: the step itself says where tokens and keys are.
_WITHOUT_EFFECT = frozenset(
    {
        "position_ids",
        "use_cache",
        "cache_position",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "logits_to_keep",
        "return_dict",
        "deterministic",
    }
)


class UnsupportedAttentionError(Exception):
    """A layer asks for an attention that is not the kernels'; internal: the guards turn it into an `UnsupportedModelError`."""


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """What one layer asks for.

    Args:
        layer: Index of the layer.
        scale: Factor of the scores.
        window: Tokens a query sees, itself included; 0 means all.
        softcap: If not 0, scores become `softcap * tanh(score / softcap)`.
        sinks: [num_q_heads] logits that join each softmax and attend to nothing.
    """

    layer: int
    scale: float
    window: int
    softcap: float
    sinks: torch.Tensor | None


class AttentionStep(Protocol):
    """Answers the attention calls of one forward pass."""

    def attend(self, call: AttentionCall, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Return `[T, num_q_heads, value_dim]` for query `[T, num_q_heads, head_dim]`, key and value `[T, num_kv_heads, *]`."""


_current: ContextVar[AttentionStep | None] = ContextVar("chatpage_attention_step", default=None)


class PagedStep:
    """Attention over the KV cache; plans are made once per step and kind of layer, when the first of its kind asks."""

    def __init__(self, batch: Batch, kv_cache: KvCache) -> None:
        self._batch = batch
        self._kv_cache = kv_cache
        self._plans: dict[LayerKind, AttentionPlan] = {}

    def attend(self, call: AttentionCall, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        backend = self._kv_cache.backend
        key_cache, value_cache = self._kv_cache.layers[call.layer]
        dtype = key_cache.dtype
        backend.write_kv(key.to(dtype), value.to(dtype), key_cache, value_cache, self._batch.slot_mapping)
        return backend.paged_attention(
            query.to(dtype),
            key_cache,
            value_cache,
            self._plan(call, num_q_heads=query.shape[1], num_kv_heads=key.shape[1]),
            scale=call.scale,
            softcap=call.softcap,
            sinks=call.sinks,
        )

    def _plan(self, call: AttentionCall, *, num_q_heads: int, num_kv_heads: int) -> AttentionPlan:
        kind = LayerKind(num_q_heads, num_kv_heads, call.window, has_sinks=call.sinks is not None)
        if kind not in self._plans:
            self._plans[kind] = self._kv_cache.plan(self._batch, kind)
        return self._plans[kind]


class RecordingStep:
    """Writes down what every layer asks for and answers with zeros; `layers` has the calls in their order."""

    def __init__(self) -> None:
        self.layers: list[tuple[int, LayerSpec]] = []

    def attend(self, call: AttentionCall, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        spec = LayerSpec(key.shape[1], key.shape[2], value.shape[2], call.window)
        self.layers.append((call.layer, spec))
        return query.new_zeros(*query.shape[:2], value.shape[2])


@contextlib.contextmanager
def attention_step(step: AttentionStep) -> Iterator[None]:
    """Answer the hook's calls with `step` inside the block."""
    token = _current.set(step)
    try:
        yield
    finally:
        _current.reset(token)


def register() -> str:
    """Make the hook known to transformers (again is harmless) and return the name to load models with."""
    from transformers import AttentionInterface

    AttentionInterface.register(IMPLEMENTATION, hook)
    return IMPLEMENTATION


def hook(  # noqa: PLR0917 - transformers passes these by position
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    scaling: float | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Attend for one layer of a transformers model.

    Args:
        module: The attention module; its `layer_idx` says which layer it is.
        query: [1, num_q_heads, T, head_dim].
        key: [1, num_kv_heads, T, head_dim], the keys of this step's tokens.
        value: [1, num_kv_heads, T, value_dim].
        attention_mask: None; a model that builds a mask of its own says something the kernels would not hear.
        scaling: Factor of the scores; default `head_dim ** -0.5`.
        options: What else the model passes to its layers.

    Returns:
        [1, T, num_q_heads, value_dim], and no attention weights.

    Raises:
        UnsupportedAttentionError: The layer passes something that the kernels do not do.
    """
    step = _current.get()
    assert step is not None, "a model that uses the chatpage attention ran outside an attention step"
    call = _read_call(module, attention_mask, scaling if scaling is not None else query.shape[-1] ** -0.5, options)
    output = step.attend(call, query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1))
    return output.to(query.dtype)[None], None


def _read_call(
    module: torch.nn.Module, attention_mask: torch.Tensor | None, scale: float, options: dict[str, Any]
) -> AttentionCall:
    layer = getattr(module, "layer_idx", None)
    if not isinstance(layer, int):
        raise UnsupportedAttentionError("an attention layer has no index")
    if attention_mask is not None:
        raise UnsupportedAttentionError("it gives its attention a mask of its own")
    is_causal = options.pop("is_causal", None)
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    if not is_causal:
        raise UnsupportedAttentionError("its attention also looks at later tokens (it is not causal)")
    if options.pop("dropout", 0.0):
        raise UnsupportedAttentionError("its attention drops weights at random")
    window, softcap, sinks = (options.pop(name, None) for name in ("sliding_window", "softcap", "s_aux"))
    for name, option in options.items():
        if option is not None and name not in _WITHOUT_EFFECT:
            raise UnsupportedAttentionError(f"its attention takes {name!r}, which the kernels do not know")
    return AttentionCall(layer, float(scale), window or 0, float(softcap or 0.0), sinks)
