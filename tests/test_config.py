"""Settings: flags over variables over the file over defaults; anything unknown or impossible is named."""

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from chatpage import config as config_module
from chatpage.config import EngineConfig, parse_size
from chatpage.errors import ConfigError


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Neither variables nor a config file of whoever runs the tests."""
    for name in (config_module.CONFIG_FILE_VARIABLE, *(f"CHATPAGE_{field.upper()}" for field in EngineConfig.model_fields)):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(config_module, "user_config_path", lambda name: tmp_path / "home" / name)


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_defaults_need_nothing() -> None:
    config = EngineConfig.load()
    assert config.model == config_module.DEFAULT_MODEL
    assert (config.device, config.dtype, config.block_size, config.kv_memory) == ("auto", "auto", 16, None)


def test_flags_win_over_variables_over_the_file_over_defaults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write(tmp_path / "a.toml", "block_size = 32\nmax_num_seqs = 8\nthreads = 3\n")
    monkeypatch.setenv("CHATPAGE_BLOCK_SIZE", "64")
    monkeypatch.setenv("CHATPAGE_MAX_NUM_SEQS", "16")
    config = EngineConfig.load(config_file=file, block_size=128)
    assert (config.block_size, config.max_num_seqs, config.threads, config.kept_tips) == (128, 16, 3, 32)


def test_a_flag_of_none_was_not_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHATPAGE_THREADS", "2")
    assert EngineConfig.load(threads=None).threads == 2


def test_an_empty_variable_was_not_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHATPAGE_KV_MEMORY", "")
    assert EngineConfig.load().kv_memory is None


def test_the_file_is_named_by_flag_then_by_variable_then_found_at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "home" / "chatpage" / "config.toml", "block_size = 1\n")
    assert EngineConfig.load().block_size == 1
    monkeypatch.setenv(config_module.CONFIG_FILE_VARIABLE, str(write(tmp_path / "b.toml", "block_size = 2\n")))
    assert EngineConfig.load().block_size == 2
    assert EngineConfig.load(config_file=write(tmp_path / "c.toml", "block_size = 3\n")).block_size == 3


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1", 1),
        ("2GiB", 2**31),
        ("2 GB", 2**31),
        ("512M", 2**29),
        ("1.5g", 3 * 2**29),
        (" 12 kib ", 12 * 2**10),
        ("1t", 2**40),
        ("1B", 1),
    ],
)
def test_sizes_are_written_as_people_write_them(text: str, size: int) -> None:
    assert parse_size(text) == size
    assert EngineConfig.load(kv_memory=text).kv_memory == size


@pytest.mark.parametrize("value", ["", "lots", "-1", "1e9", "2 GX", "1,5G", True])
def test_what_is_no_size_is_refused_with_an_example(value: object) -> None:
    with pytest.raises(ConfigError, match="is not a size; write a number of bytes or something like 512M or 2GiB"):
        EngineConfig.load(kv_memory=value)


@pytest.mark.parametrize(
    ("settings", "parts"),
    [
        ({"block_size": 0}, ["block_size", "greater than or equal to 1", "got 0"]),
        ({"block_size": 257}, ["block_size", "less than or equal to 256"]),
        ({"device": "tpu"}, ["device", "'auto', 'cpu' or 'cuda'", "got 'tpu'"]),
        ({"kv_memory": 0}, ["kv_memory", "greater than 0"]),
        ({"max_model_len": 1}, ["max_model_len", "greater than or equal to 2"]),
        ({"threads": 0}, ["threads"]),
        ({"max_num_seqs": "many"}, ["max_num_seqs", "valid integer", "got 'many'"]),
        ({"block_size": 0, "threads": 0}, ["block_size", "threads"]),
        ({"blocksize": 16}, ["blocksize: unknown setting; known are model, device,"]),
    ],
    ids=str,
)
@pytest.mark.parametrize("source", ["flags", "file"])
def test_every_wrong_setting_is_named(settings: dict[str, Any], parts: list[str], source: str, tmp_path: Path) -> None:
    file = write(tmp_path / "a.toml", "".join(f"{name} = {value!r}\n" for name, value in settings.items()))
    given: dict[str, Any] = settings if source == "flags" else {"config_file": file}
    with pytest.raises(ConfigError) as caught:
        EngineConfig.load(**given)
    assert all(part in str(caught.value) for part in parts)


def test_a_wrong_variable_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHATPAGE_MAX_BATCHED_TOKENS", "0")
    with pytest.raises(ConfigError, match=r"max_batched_tokens: .*greater than or equal to 1 \(got '0'\)"):
        EngineConfig.load()


def test_a_named_file_must_be_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    missing = tmp_path / "missing.toml"
    with pytest.raises(ConfigError, match=r"Cannot read the config file .*missing\.toml: No such file"):
        EngineConfig.load(config_file=missing)
    monkeypatch.setenv(config_module.CONFIG_FILE_VARIABLE, str(missing))
    with pytest.raises(ConfigError, match="Cannot read the config file"):
        EngineConfig.load()
    with pytest.raises(ConfigError, match=r"Cannot read the config file .*: Is a directory"):
        EngineConfig.load(config_file=tmp_path)


@pytest.mark.parametrize("data", [b"block_size = \n", b"\xff\xfe"])
def test_a_file_that_is_not_toml_is_named(tmp_path: Path, data: bytes) -> None:
    file = tmp_path / "bad.toml"
    file.write_bytes(data)
    with pytest.raises(ConfigError, match=r"The config file .*bad\.toml is not valid TOML"):
        EngineConfig.load(config_file=file)


def test_a_config_never_changes() -> None:
    config = EngineConfig.load()
    with pytest.raises(ValidationError, match="frozen"):
        config.block_size = 32
    assert config.block_size == 16


def test_a_misspelt_variable_is_an_error_with_the_right_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHATPAGE_KV_MEMORI", "1GiB")
    with pytest.raises(ConfigError, match="did you mean CHATPAGE_KV_MEMORY"):
        EngineConfig.load()
