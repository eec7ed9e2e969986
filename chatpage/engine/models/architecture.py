"""What can be said about an architecture before its weights are read: whether it can be served, and how long it may get.

Invariant: a refusal names the architecture and the reason. What cannot be seen here (a model that ignores the hook, a mask of
its own) is found by the probe in `guards`, on the loaded model.
"""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Self, cast

from chatpage.errors import BrokenModelError, ConfigError, ModelNotFoundError, UnsupportedModelError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_PLAIN_LAYERS = frozenset({"full_attention", "sliding_attention", "chunked_attention"})
_STATEFUL_LAYERS = frozenset({"linear_attention", "mamba", "conv", "recurrent", "hybrid", "hybrid_sliding"})
_ALIBI_TYPES = frozenset({"bloom", "mpt"})
_LENGTH_FIELDS = ("max_position_embeddings", "n_positions", "n_ctx", "max_sequence_length", "max_seq_len", "seq_length")
_LENGTH_DEPENDENT_ROPE = frozenset({"dynamic", "longrope"})


def read_config(folder: Path) -> "PreTrainedConfig":
    """Read the `config.json` of a model.

    Raises:
        ModelNotFoundError: The folder holds no model.
        BrokenModelError: The file is damaged.
        UnsupportedModelError: transformers does not know the architecture.
    """
    from transformers import CONFIG_MAPPING, AutoConfig

    file = folder / "config.json"
    if not file.is_file():
        raise ModelNotFoundError(
            f"{folder} holds no model: it has no config.json. Name a folder that has one, or a .gguf file."
        )
    try:
        settings = json.loads(file.read_text())
        model_type = settings["model_type"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BrokenModelError(f"{file} is damaged or names no model_type ({type(error).__name__}: {error}).") from error
    if model_type not in CONFIG_MAPPING:
        needs_code = " It brings its own code, which chatpage never runs." if "auto_map" in settings else ""
        raise UnsupportedModelError(f"{model_type}: this version of transformers does not know the architecture.{needs_code}")
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:
        raise BrokenModelError(f"{file} has settings that {model_type} does not accept: {error}") from error
    return config


class WrittenConfig(SimpleNamespace):
    """A `config.json` that transformers itself wrote, with every setting in it, as far as the fused runner asks for them.

    To make the real thing, transformers imports a good part of torch that is needed for nothing else: a second at each start.
    """

    model_type: str

    def get_text_config(self) -> Self:
        return self

    def to_json_string(self) -> str:
        return json.dumps(vars(self), sort_keys=True)


def read_written_config(folder: Path) -> "PreTrainedConfig":
    """Read the `config.json` in a folder of `gguf_files.convert_settings`; see `WrittenConfig`.

    Raises:
        BrokenModelError: The file is damaged.
    """
    file = folder / "config.json"
    try:
        config = WrittenConfig(**json.loads(file.read_text()))
        if not isinstance(config.model_type, str):
            raise TypeError("its model_type is no text")
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise BrokenModelError(f"{file} is damaged ({type(error).__name__}: {error}): delete the folder.") from error
    return cast("PreTrainedConfig", config)


def check_architecture(config: "PreTrainedConfig") -> None:
    """Refuse what paged attention cannot serve.

    Raises:
        UnsupportedModelError: With the name of the architecture and the reason.
    """
    if (reason := _reason_against(config)) is not None:
        raise refusal(config, reason)


def refusal(config: "PreTrainedConfig", reason: str) -> UnsupportedModelError:
    """Return the error that refuses a model for `reason`."""
    return UnsupportedModelError(f"{config.model_type} cannot be served with paged attention: {reason}. Choose another model.")


def max_model_len(config: "PreTrainedConfig", requested: int | None) -> int:
    """Return the longest sequence the model may be used for, in tokens.

    That is its context length, with two cuts. `dynamic` and `longrope` rotary embeddings compute their frequencies from the
    longest sequence of the whole batch once it passes the original length, so a long neighbour would change everybody's
    output: such a model ends at its original length. Chunked attention (llama4) is plain attention up to the first chunk only.

    Raises:
        ConfigError: `requested` is longer, or the model states no length and none is requested.
    """
    text = config.get_text_config()
    stated = [int(value) for name in _LENGTH_FIELDS if isinstance(value := getattr(text, name, None), int) and value > 0]
    limits = stated[:1] + _rope_limits(text) + _chunk_limits(text)
    if requested is None:
        if not limits:
            raise ConfigError(f"{config.model_type} does not state its context length: give --max-model-len.")
        return min(limits)
    if limits and requested > min(limits):
        raise ConfigError(
            f"max_model_len is {requested}, but {config.model_type} is exact up to {min(limits)} tokens only "
            f"(it states {stated[0] if stated else 'no length'}). Lower it."
        )
    return requested


def _reason_against(config: "PreTrainedConfig") -> str | None:
    from transformers import AutoModelForCausalLM

    text = config.get_text_config()
    if config.is_encoder_decoder:
        return "it is an encoder-decoder"
    if type(config) not in AutoModelForCausalLM._model_mapping:
        return "transformers has no causal language model for it"
    if getattr(text, "add_cross_attention", False):
        return "it has cross-attention to an encoder"
    if config.model_type in _ALIBI_TYPES or getattr(text, "alibi", False):
        return "its positions (ALiBi) live in the attention mask, which paged attention never sees"
    if getattr(text, "num_kv_shared_layers", 0):
        return f"{text.num_kv_shared_layers} of its layers read the keys and values of other layers"
    return _reason_against_layers(text, AutoModelForCausalLM._model_mapping[type(config)])


def _reason_against_layers(text: "PreTrainedConfig", model_class: object) -> str | None:
    kinds = set(getattr(text, "layer_types", None) or ())
    if stateful := sorted(kinds & _STATEFUL_LAYERS):
        return f"it has layers of kind {', '.join(stateful)}, which keep a running state instead of keys and values"
    if getattr(model_class, "_is_stateful", False):
        return "it is recurrent: its layers keep a running state instead of keys and values"
    if other := sorted(kinds - _PLAIN_LAYERS):
        return f"it has layers of kind {', '.join(other)}, which are not plain attention over all earlier tokens"
    return None


def _rope_limits(text: "PreTrainedConfig") -> list[int]:
    parameters: dict[str, Any] = getattr(text, "rope_parameters", None) or {}
    kinds = [value for value in parameters.values() if isinstance(value, dict)] or [parameters]
    return [
        int(kind.get("original_max_position_embeddings") or text.max_position_embeddings)
        for kind in kinds
        if kind.get("rope_type") in _LENGTH_DEPENDENT_ROPE
    ]


def _chunk_limits(text: "PreTrainedConfig") -> list[int]:
    size = getattr(text, "attention_chunk_size", None)
    return [int(size)] if size and "chunked_attention" in (getattr(text, "layer_types", None) or ()) else []
