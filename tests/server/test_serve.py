"""`chatpage serve` as a process: it loads, serves, survives its engine's death, and ends in order when told to."""

import asyncio
import gc
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner
from websockets.asyncio.client import connect

from chatpage.cli import app
from chatpage.errors import ConfigError
from chatpage.server.log_settings import LogFormat, LogLevel, LogSettings
from chatpage.server.protocol import PROTOCOL, RunCreated, RunDelta, RunDone
from chatpage.server.serve import open_socket
from chatpage.server.settings import ServeSettings
from chatpage.session import SessionLimits
from chatpage.store import LOCAL_USER, ConversationId, NodeId, NodeStatus, Store
from chatpage.store.store import take_lock
from tests.server.serving import LONG, Wire
from tests.sessions import Copy
from tests.tiny_models import tiny_llama_folder

LOAD_S = 120


def test_a_port_in_use_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(ConfigError, match="Cannot listen on"):
        open_socket(ServeSettings(port=taken.getsockname()[1]))


def test_an_open_address_without_keys_is_refused_before_the_model_is_loaded(tmp_path: Path) -> None:
    arguments = ["serve", "--host", "0.0.0.0", "--port", "0", "--data", str(tmp_path), "--model", str(tmp_path / "none")]
    result = CliRunner().invoke(app, arguments)
    assert isinstance(result.exception, ConfigError)
    assert "chatpage user add" in str(result.exception)


def test_a_second_server_on_the_same_data_is_refused_before_the_model_is_loaded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Both started: a stop sent to one did nothing to the runs of the other, whose replies it showed as written for ever."""
    arguments = ["serve", "--port", "0", "--data", str(tmp_path), "--model", str(tmp_path / "none")]
    with Store(tmp_path / "chatpage.db") as store:
        first = take_lock(store.path, "serve.lock")
        assert first is not None
        result = CliRunner().invoke(app, arguments)
        assert isinstance(result.exception, ConfigError)
        assert "Another server has the conversations in" in str(result.exception)
        gc.collect()
        assert "never retrieved" not in caplog.text, "a refused start ends in one line"
        first.close()
        assert not isinstance(CliRunner().invoke(app, arguments).exception, ConfigError)


@pytest.mark.skipif(sys.platform != "linux", reason="looks for child processes in /proc")
def test_the_server_outlives_its_engine_and_ends_in_order(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "chatpage", "serve", "--model", str(tiny_llama_folder()), "--port", "0"]
    command += ["--data", str(tmp_path), "--device", "cpu", "--dtype", "float32", "--kv-memory", "4MiB"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            url = _wait_for_url(process)
            chat_id, cut = asyncio.run(_kill_engine_while_it_streams(url, process.pid))
            last = asyncio.run(_start_run(url, chat_id))
            children = _children(process.pid)
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0
        finally:
            process.kill()
    deadline = time.monotonic() + 10
    while any(Path(f"/proc/{pid}").exists() for pid in children):
        assert time.monotonic() < deadline, "a process is still there"
        time.sleep(0.05)
    with Store(tmp_path / "chatpage.db") as store:
        for node_id in (cut, last):
            node = store.get_node(LOCAL_USER, ConversationId(chat_id), NodeId(node_id))
            assert node.status is NodeStatus.INTERRUPTED
            assert node.text


async def _kill_engine_while_it_streams(url: str, pid: int) -> tuple[str, str]:
    async with connect(url.replace("http", "ws") + "/ws", subprotocols=[PROTOCOL]) as socket, httpx.AsyncClient() as http:  # type: ignore[list-item]
        wire = Wire(socket)
        await wire.hello()
        chat = (await http.post(f"{url}/api/conversations", json={})).json()
        node_id = await _stream(wire, chat["id"])
        for child in _children(pid):
            os.kill(child, signal.SIGKILL)
        assert (await wire.until(RunDone)).status == "interrupted"
        assert (await http.get(f"{url}/health")).json() == {"status": "degraded", "engine": "starting", "saving": "ok"}
        deadline = time.monotonic() + LOAD_S
        while (await http.get(f"{url}/ready")).status_code != 200:
            assert time.monotonic() < deadline, "the engine did not come back"
            await asyncio.sleep(0.1)
        return chat["id"], node_id


async def _start_run(url: str, chat_id: str) -> str:
    async with connect(url.replace("http", "ws") + "/ws", subprotocols=[PROTOCOL]) as socket:  # type: ignore[list-item]
        wire = Wire(socket)
        await wire.hello()
        return await _stream(wire, chat_id)


async def _stream(wire: Wire, chat_id: str) -> str:
    """Start a run and return the id of its node when it has said something."""
    message_id = os.urandom(8).hex()
    fields = {"kind": "reply", "input": "Hello", "params": LONG | {"max_tokens": 400}}
    await wire.send("run.create", conversation_id=chat_id, client_msg_id=message_id, **fields)
    created: RunCreated = await wire.until(RunCreated, client_msg_id=message_id)
    while not any(text for text in wire.copies.get(created.run_id, Copy()).texts.values()):
        await wire.until(RunDelta)
    return created.node_ids[0]


def _wait_for_url(process: "subprocess.Popen[str]") -> str:
    assert process.stderr is not None
    lines = []
    for line in process.stderr:
        lines.append(line)
        if found := re.search(r"http://\S+", line):
            return found.group()
    raise AssertionError("".join(lines))


def _children(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").iterdir()
    pids = [int(child) for task in tasks for child in (task / "children").read_text().split()]
    assert pids, "no engine"
    return pids


def test_every_flag_arrives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A flag that is accepted and ignored would be worse than none."""
    found: list[ServeSettings] = []

    async def serve(_: object, settings: ServeSettings, **__: object) -> None:
        found.append(settings)

    monkeypatch.setattr("chatpage.server.serve.serve", serve)
    flags = "--max-running-runs 2 --max-queued-runs 3 --max-samples 4 --max-tokens 5 --require-login --secure-cookies"
    flags += " --server-running-runs 6 --server-queued-runs 7"
    logs = "--log-format json --log-level error --log-text"
    names = "--host ::1 --port 1 --allowed-host a --allowed-host b --allowed-origin https://c"
    result = CliRunner().invoke(app, ["serve", *f"{flags} {logs} {names}".split(), "--data", str(tmp_path)])
    assert result.exception is None
    assert found == [
        ServeSettings(
            host="::1",
            port=1,
            data_dir=tmp_path,
            allowed_hosts=("a", "b"),
            allowed_origins=("https://c",),
            require_login=True,
            secure_cookies=True,
            limits=SessionLimits(
                max_running_runs=2,
                max_queued_runs=3,
                max_samples=4,
                max_tokens=5,
                server_running_runs=6,
                server_queued_runs=7,
            ),
            logs=LogSettings(format=LogFormat.JSON, level=LogLevel.ERROR, with_text=True),
        )
    ]
