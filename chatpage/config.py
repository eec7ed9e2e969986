"""Engine settings, frozen, read in one place: flags over `CHATPAGE_*` variables over a TOML file over defaults.

Invariant: an `EngineConfig` that exists has only known keys and values in range; what depends on the machine or the model
(a device that is absent, a context that is too long) is checked when the engine loads.
"""

import difflib
import os
import re
import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from platformdirs import user_config_path
from pydantic import BeforeValidator, Field, ValidationError
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from chatpage.errors import ConfigError

DEFAULT_MODEL = "default"
DEFAULT_KV_DISK_SIZE = 8 * 2**30
CONFIG_FILE_VARIABLE = "CHATPAGE_CONFIG"
_OTHER_VARIABLES = {CONFIG_FILE_VARIABLE, "CHATPAGE_CACHE_DIR"}  # read elsewhere

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(|k|m|g|t)(?:i?b)?", re.IGNORECASE)
_UNITS = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}


def parse_size(value: object) -> object:
    """Turn "2GiB", "512M" or "1.5g" into bytes; other values pass through to the field's own check.

    Raises:
        ValueError: The text is not a size.
    """
    if isinstance(value, bool):
        raise ValueError(f"{value!r} is not a size; write a number of bytes or something like 512M or 2GiB")
    if not isinstance(value, str):
        return value
    match = _SIZE.fullmatch(value.strip())
    if match is None:
        raise ValueError(f"{value!r} is not a size; write a number of bytes or something like 512M or 2GiB")
    return int(float(match[1]) * _UNITS[match[2].lower()])


def parse_folder(value: object) -> object:
    """Turn "off" into None and "~" into the user's home; other values pass through to the field's own check.

    Raises:
        ValueError: The text is empty, or names the home of nobody.
    """
    if value == "off":
        return None
    if not isinstance(value, str | Path):
        return value
    if not str(value).strip():
        raise ValueError("an empty text is no folder; write off for none")
    try:
        return Path(value).expanduser()
    except RuntimeError as error:
        raise ValueError(str(error)) from error


Bytes = Annotated[int, BeforeValidator(parse_size)]


class EngineConfig(BaseSettings):
    """How to load a model and how much memory and parallelism to give it."""

    model_config = SettingsConfigDict(
        env_prefix="CHATPAGE_", frozen=True, extra="forbid", protected_namespaces=(), env_ignore_empty=True
    )

    model: str = Field(DEFAULT_MODEL, description="'default', a hub id, a local folder, or a .gguf file")
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    quantization: Literal["auto", "none", "int8", "int4"] = Field(
        "auto", description="bits of weights on a CPU; 'auto' keeps those of a GGUF file, 'none' widens them"
    )
    kv_memory: Bytes | None = Field(None, gt=0, description="bytes of KV cache, such as 2GiB; default: a share of free memory")
    block_size: int = Field(16, ge=1, le=256, description="tokens per KV block")
    kv_disk: Annotated[Path | None, BeforeValidator(parse_folder)] = Field(
        None, description="folder for KV that outlives the process, or off (default: off; serve: kv beside the conversations)"
    )
    kv_disk_size: Bytes | None = Field(None, gt=0, description="bytes that --kv-disk may take (default: 8GiB)")
    max_batched_tokens: int = Field(512, ge=1, description="token budget of one step")
    max_num_seqs: int = Field(64, ge=1, le=1024, description="sequences that run at once")
    max_model_len: int | None = Field(None, ge=2, description="longest sequence in tokens; default: the model's own limit")
    threads: int | None = Field(None, ge=1, le=1024, description="CPU threads; default: torch's choice")
    kept_tips: int = Field(32, ge=0, description="prompts whose last logits are kept, so that regenerating computes nothing")
    cascade: bool = Field(True, description="read a prefix that sequences share once for all of them, where that is faster")
    check_integrity: bool = Field(False, description="verify the block memory after every step (slow; for debugging)")

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return (init_settings, env_settings)

    @classmethod
    def load(cls, *, config_file: Path | None = None, **flags: Any) -> Self:
        """Merge flags, environment and the TOML file into one frozen config.

        Args:
            config_file: A TOML file; default: `$CHATPAGE_CONFIG`, else `config.toml` in the user's config folder if it exists.
            flags: Field values; None means "not given".

        Raises:
            ConfigError: The file cannot be read, a key is unknown, or a value is out of range; all of them are named.
        """
        _check_variables()
        given = {name: value for name, value in flags.items() if value is not None}
        try:
            from_environment = cls(**given).model_dump(exclude_unset=True)
            return cls(**{**_read_config_file(config_file), **from_environment})
        except ValidationError as error:
            raise ConfigError(_describe(error)) from error


def _check_variables() -> None:
    """Refuse a misspelt variable, which would be ignored without a word."""
    known = {f"CHATPAGE_{name}".upper() for name in EngineConfig.model_fields} | _OTHER_VARIABLES
    for name in os.environ:
        if name.startswith("CHATPAGE_") and name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {close[0]}?" if close else f"known are {', '.join(sorted(known))}."
            raise ConfigError(f"The variable {name} is no setting: {hint}")


def _read_config_file(path: Path | None) -> dict[str, Any]:
    named = path or (Path(os.environ[CONFIG_FILE_VARIABLE]) if os.environ.get(CONFIG_FILE_VARIABLE) else None)
    file = named or user_config_path("chatpage") / "config.toml"
    if named is None and not file.is_file():
        return {}
    try:
        with file.open("rb") as stream:
            return tomllib.load(stream)
    except OSError as error:
        raise ConfigError(f"Cannot read the config file {file}: {error.strerror}.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"The config file {file} is not valid TOML: {error}.") from error


def _describe(error: ValidationError) -> str:
    lines = []
    for problem in error.errors():
        name = ".".join(str(part) for part in problem["loc"])
        if problem["type"] == "extra_forbidden":
            lines.append(f"{name}: unknown setting; known are {', '.join(EngineConfig.model_fields)}")
        else:
            lines.append(f"{name}: {problem['msg']} (got {problem['input']!r})")
    return "Invalid settings. " + "; ".join(lines) + "."
