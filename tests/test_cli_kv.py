"""`chatpage kv`, and where the server keeps KV."""

import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from chatpage import cli_serve
from chatpage.cli import app
from chatpage.cli_kv import with_kv_disk
from chatpage.config import EngineConfig
from chatpage.engine.kv_disk.folder import Folder
from chatpage.errors import ConfigError


def _run(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["kv", *arguments])
    if result.exception is not None:
        raise result.exception
    return result.stdout


def _fill(path: Path) -> Folder:
    folder = Folder(path, 10**6)
    folder.make()
    for i in range(3):
        folder.write(folder.place(bytes(24), bytes([i]) * 24), [bytes(1000)], 10**18 + i * 60 * 10**9)
    return folder


def test_info_counts_what_lies_there(tmp_path: Path) -> None:
    _fill(tmp_path)
    lines = _run("info", "--kv-disk", str(tmp_path)).splitlines()
    assert re.fullmatch(r"free there\t[\d,]+", lines.pop(3))
    assert lines == [
        f"folder\t{tmp_path}/kv-v1",
        "blocks\t3",
        "bytes\t3,000 of 8,589,934,592",
        "oldest use\t2001-09-09 01:46 UTC",
        "latest use\t2001-09-09 01:48 UTC",
    ]


def test_a_folder_that_is_not_there_is_empty(tmp_path: Path) -> None:
    assert "blocks\t0" in _run("info", "--data", str(tmp_path / "none"))
    assert not (tmp_path / "none").exists()


def test_clear_removes_every_block_of_the_server(tmp_path: Path) -> None:
    folder = _fill(tmp_path / "kv")
    assert _run("clear", "--data", str(tmp_path)) == f"3 blocks removed, 3,000 bytes, from {tmp_path / 'kv' / 'kv-v1'}\n"
    assert folder.files() == []


def test_the_server_keeps_kv_beside_its_conversations_unless_told_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert EngineConfig.load().kv_disk is None
    assert with_kv_disk(EngineConfig.load(), tmp_path).kv_disk == tmp_path / "kv"
    assert with_kv_disk(EngineConfig.load(kv_disk="off"), tmp_path).kv_disk is None
    assert with_kv_disk(EngineConfig.load(kv_disk="~/cache"), tmp_path).kv_disk == Path.home() / "cache"
    monkeypatch.setenv("CHATPAGE_KV_DISK", "off")
    assert with_kv_disk(EngineConfig.load(), tmp_path).kv_disk is None


def test_the_flags_reach_the_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[EngineConfig] = []

    class NoEngine:
        def __init__(self, config: EngineConfig) -> None:
            seen.append(config)

        def begin(self) -> None: ...
        async def close(self) -> None: ...

    async def serve(*_: object, **__: object) -> None: ...

    monkeypatch.setattr("chatpage.engine.process.ProcessEngine", NoEngine)
    monkeypatch.setattr("chatpage.server.serve.serve", serve)
    monkeypatch.setattr(cli_serve, "_import_page", lambda: None)
    for flags in ([], ["--kv-disk", "off"], ["--kv-disk", str(tmp_path / "x"), "--kv-disk-size", "2GiB"]):
        result = CliRunner().invoke(app, ["serve", "--data", str(tmp_path), *flags])
        assert result.exit_code == 0
    assert [config.kv_disk for config in seen] == [tmp_path / "kv", None, tmp_path / "x"]
    assert [config.kv_disk_size for config in seen] == [None, None, 2 * 2**30]


@pytest.mark.parametrize(("setting", "value"), [("kv_disk", ""), ("kv_disk", "~nobody-here/x"), ("kv_disk_size", 0)])
def test_a_wrong_setting_is_named(setting: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=setting):
        EngineConfig.load(**{setting: value})
