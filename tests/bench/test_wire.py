"""The bench of the wire, at a small size: what it claims about a server holds."""

import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from chatpage.bench import wire
from chatpage.bench.serving import Serving
from chatpage.server import websocket
from tests.engine.engines import tiny_engine
from tests.server.serving import Served, with_server

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads numbers of processes from /proc")


def _serving(served: Served) -> Serving:
    return Serving(served.url, cast(Any, SimpleNamespace(pid=os.getpid())))


def test_one_socket_that_reads_nothing_is_closed_and_the_others_stream_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(websocket, "SEND_S", 0.5)
    monkeypatch.setattr(wire, "STUCK_S", 2.0)

    async def test(served: Served) -> None:
        found = await wire.measure_sockets(_serving(served), num_sockets=4, tokens=8)
        assert found["close code of the one"] == 1013
        assert found["tok/s, one reads nothing"] > 0
        assert found["memory grown, MiB"] < 200

    with_server(tmp_path, test, engine=tiny_engine(check_integrity=False))


def test_a_storm_leaves_nothing(tmp_path: Path) -> None:
    async def test(served: Served) -> None:
        found = await wire.measure_storm(_serving(served), seconds=2.0, per_s=40)
        assert found["stops"] > 0
        assert [found[f"{what} afterwards"] for what in ("blocks used", "sequences", "runs")] == [0, 0, 0]

    with_server(tmp_path, test, engine=tiny_engine(check_integrity=False))


def test_a_big_conversation_is_opened_and_searched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "BIG_NODES", 100)
    monkeypatch.setattr(wire, "SEARCHED_NODES", 5_000)
    small, big = wire.make_conversations(tmp_path)

    async def test(served: Served) -> None:
        found = await wire.measure_size(_serving(served), small, big)
        assert len(found) == 5
        assert found["opening the big one, ms"] > 0

    with_server(tmp_path, test, engine=tiny_engine(check_integrity=False))
