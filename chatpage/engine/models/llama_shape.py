"""What the fused runner must know of a model of the llama family, taken from its config.

Invariant: a `LlamaShape` exists only for a model whose layers are exactly RMSNorm, attention with rotary embeddings, RMSNorm
and a gated SiLU network; `why_unsupported` says of any other what is different about it.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from chatpage_kernels.quantized_weights import GROUP

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

FAMILY = frozenset({"llama", "mistral", "qwen2", "qwen3"})
_ROPE_TYPES = frozenset({"default", "linear", "llama3", "yarn"})  # the frequencies do not depend on the length of a batch
_MISTRAL_WINDOW = frozenset({"mistral"})  # every layer has the window, without saying so in layer_types


@dataclass(frozen=True, slots=True, eq=False)
class LlamaShape:
    """Sizes and constants of a model.

    Args:
        num_q_heads: Heads of queries in each layer.
        num_kv_heads: Heads of keys and of values.
        head_dim: Width of each.
        norm_epsilon: Of all norms.
        windows: Of each layer: tokens that a query sees, itself included; 0 means all.
        frequencies: fp32 [head_dim / 2], radians per position.
        rotary_factor: Of all cosines and sines (YaRN).
    """

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    norm_epsilon: float
    windows: tuple[int, ...]
    frequencies: torch.Tensor
    rotary_factor: float

    @property
    def num_layers(self) -> int:
        return len(self.windows)


def why_unsupported(config: "PreTrainedConfig") -> str:
    """Say what keeps a model from the fused runner; empty if nothing does."""
    if config.model_type not in FAMILY:
        return f"{config.model_type} is not of the llama family"
    if config.hidden_act != "silu":
        return f"its activation is {config.hidden_act}, not silu"
    if getattr(config, "mlp_bias", False):
        return "its feed-forward layers have a bias"
    rope_type = config.rope_parameters.get("rope_type", "default")
    if rope_type not in _ROPE_TYPES or config.rope_parameters.get("partial_rotary_factor", 1.0) != 1.0:
        return f"its rotary embedding ({rope_type}) is of a kind it does not compute"
    head_dim = _head_dim(config)
    widths = (config.hidden_size, config.intermediate_size, config.num_attention_heads * head_dim)
    if head_dim % 2 or any(width % GROUP for width in widths):
        return f"its widths {widths} are no multiples of {GROUP}, or its heads of {head_dim} cannot be halved"
    return ""


def read_shape(config: "PreTrainedConfig", *, max_len: int) -> LlamaShape:
    """Return the shape of a model for which `why_unsupported` has nothing to say.

    Args:
        config: Of the model.
        max_len: Its longest sequence; a window of this size changes nothing.
    """
    frequencies, factor = _rotary(config)
    return LlamaShape(
        num_q_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=_head_dim(config),
        norm_epsilon=config.rms_norm_eps,
        windows=_windows(config, max_len),
        frequencies=frequencies,
        rotary_factor=factor,
    )


def _head_dim(config: "PreTrainedConfig") -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _windows(config: "PreTrainedConfig", max_len: int) -> tuple[int, ...]:
    window = int(getattr(config, "sliding_window", None) or 0)
    if window >= max_len:
        window = 0
    num_layers = int(config.num_hidden_layers)
    if config.model_type in _MISTRAL_WINDOW:
        return (window,) * num_layers
    kinds = getattr(config, "layer_types", None) or ("full_attention",) * num_layers
    return tuple(window if kind == "sliding_attention" else 0 for kind in kinds)


def _rotary(config: "PreTrainedConfig") -> tuple[torch.Tensor, float]:
    """Return the frequencies and the factor of cosines and sines."""
    kind = config.rope_parameters.get("rope_type", "default")
    if kind != "default":
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        frequencies, factor = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
        return frequencies.float(), float(factor)
    head_dim = _head_dim(config)
    return config.rope_parameters["rope_theta"] ** -(torch.arange(0, head_dim, 2) / head_dim), 1.0
