"""The flags that several commands share: the engine's, and the sampling parameters.

Invariant: a flag has the name, help and default of the field it sets; nothing is stated twice.
"""

import functools
import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import typer

from chatpage.config import EngineConfig
from chatpage.sampling_params import SamplingParams

_ENGINE_FLAGS: dict[str, Any] = {
    "model": str,
    "device": str,
    "dtype": str,
    "quantization": str,
    "kv_memory": str,
    "kv_disk": str,
    "kv_disk_size": str,
    "block_size": int,
    "max_batched_tokens": int,
    "max_num_seqs": int,
    "max_model_len": int,
    "threads": int,
}
_SAMPLING_FLAGS: dict[str, tuple[Any, str]] = {
    "n": (int, "samples drawn from one prompt"),
    "max_tokens": (int, "most tokens to generate per sample"),
    "temperature": (float, "0 takes the most likely token"),
    "top_p": (float, "keep the smallest set of tokens with this probability"),
    "top_k": (int, "keep the k most likely tokens; 0 keeps all"),
    "min_p": (float, "drop tokens less likely than this share of the most likely one"),
    "seed": (int, "repeat the samples of an earlier run"),
    "stop": (list[str], "a string that ends a sample; may be given several times"),
    "logprobs": (int, "report log probabilities, with this many alternatives"),
}
_NAMES = {"n": ("-n", "--samples")}


def with_engine_flags(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the engine's flags; it receives one `EngineConfig` as `config`."""
    parameters = [_flag(name, kind, _engine_help(name)) for name, kind in _ENGINE_FLAGS.items()]
    parameters.append(_flag("config_file", Path, "a TOML file with these settings", ("--config",)))

    def call(given: dict[str, Any]) -> dict[str, Any]:
        return {"config": EngineConfig.load(**given)}

    return _extend(command, "config", parameters, call)


def with_sampling_flags(*names: str, **defaults: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the sampling flags `names`; it receives one `SamplingParams` as `params`.

    Args:
        names: Fields of `SamplingParams`.
        defaults: Values where a command differs from the defaults of `SamplingParams`.
    """
    plain = SamplingParams(**defaults)

    def call(given: dict[str, Any]) -> dict[str, Any]:
        chosen = {name: value for name, value in given.items() if value is not None and value != []}
        return {"params": SamplingParams(**{**defaults, **chosen})}

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        parameters = []
        for name in names:
            kind, text = _SAMPLING_FLAGS[name]
            default = getattr(plain, name)
            help_text = text if default is None or default == () else f"{text} (default: {default})"
            parameters.append(_flag(name, kind, help_text, _NAMES.get(name, ())))
        return _extend(command, "params", parameters, call)

    return decorate


def _extend(
    command: Callable[..., None],
    replaced: str,
    parameters: Sequence[inspect.Parameter],
    call: Callable[[dict[str, Any]], dict[str, Any]],
) -> Callable[..., None]:
    """Put `parameters` in the place of the argument `replaced`, which `call` makes of their values."""
    names = [parameter.name for parameter in parameters]

    @functools.wraps(command)
    def wrapper(**kwargs: Any) -> None:
        given = {name: kwargs.pop(name) for name in names}
        command(**kwargs, **call(given))

    own = [p for p in inspect.signature(command).parameters.values() if p.name != replaced]
    wrapper.__signature__ = inspect.Signature([*own, *parameters])  # type: ignore[attr-defined]
    wrapper.__annotations__ = {p.name: p.annotation for p in (*own, *parameters)}
    return wrapper


def _flag(name: str, kind: Any, help_text: str, names: tuple[str, ...] = ()) -> inspect.Parameter:
    option = typer.Option(*(names or ("--" + name.replace("_", "-"),)), help=help_text, show_default=False)
    annotation = Annotated[kind | None, option]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _engine_help(name: str) -> str:
    field = EngineConfig.model_fields[name]
    parts = [field.description or name]
    if get_origin(field.annotation) is Literal:
        parts = [f"{name}: {', '.join(map(str, get_args(field.annotation)))}"]
    if field.default is not None:
        parts.append(f"(default: {field.default})")
    return " ".join(parts)
