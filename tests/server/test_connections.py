"""Clients that hold connections instead of using them: each is gone after a while, and the others are served meanwhile."""

import asyncio
import contextlib
import json
import os
import re
import resource
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI
from starlette.responses import StreamingResponse

from chatpage.server import connections, security
from tests.server.serving import Served, serving

LIMIT_S = 30.0  # that a test waits for what should take a fraction of a second
CHUNK = b"x" * 65_536


@pytest.fixture
def strict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    """A server that waits for nobody for long, with an answer that has no end."""
    monkeypatch.setattr(connections, "HEAD_S", 0.4)
    monkeypatch.setattr(connections, "STALLED_S", 0.4)
    monkeypatch.setattr(connections, "LINGER_S", 0.2)
    monkeypatch.setattr(security, "BODY_S", 0.4)

    async def chunks() -> AsyncIterator[bytes]:
        while True:
            yield CHUNK
            await asyncio.sleep(0)

    def extend(app: FastAPI) -> None:
        async def endless() -> StreamingResponse:
            return StreamingResponse(chunks())

        app.add_api_route("/endless", endless)

    with serving(tmp_path, extend=extend) as served:
        yield served


def dial_raw(served: Served) -> socket.socket:
    url = httpx.URL(served.url)
    return socket.create_connection((url.host, url.port or 80), timeout=LIMIT_S)


def post(path: str, length: int) -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {length}\r\n\r\n".encode()


def trickle(line: socket.socket, data: bytes) -> bytes:
    """Send a byte now and then until the server has had enough, and return what it said."""
    done = threading.Event()

    def send() -> None:
        with contextlib.suppress(OSError):
            for byte in data:
                if done.wait(0.05):
                    return
                line.sendall(bytes([byte]))

    sender = threading.Thread(target=send)
    sender.start()
    said = b""
    with contextlib.suppress(ConnectionError):
        while received := line.recv(65536):
            said += received
    done.set()
    sender.join()
    return said


def until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not is_so():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.01)


def assert_alone(served: Served) -> None:
    """Nothing is left of the connections of a test, and the server serves."""
    until(lambda: not served.server.server_state.connections)
    assert httpx.get(f"{served.url}/health").status_code == 200


def test_a_head_that_trickles_is_not_waited_for(strict: Served) -> None:
    """The classic: thousands of connections that never come to their first blank line cost the attacker nothing."""
    head = b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + b"X-Slow: and so on\r\n" * 1000
    with dial_raw(strict) as line:
        assert trickle(line, head).startswith(b"HTTP/1.1 408 ")
    assert_alone(strict)


def test_a_handshake_of_a_websocket_that_trickles_is_not_waited_for(strict: Served) -> None:
    head = b"GET /ws HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n" + b"X: y\r\n" * 1000
    with dial_raw(strict) as line:
        assert trickle(line, head).startswith(b"HTTP/1.1 408 ")
    assert_alone(strict)


def test_a_connection_that_says_nothing_is_closed(strict: Served) -> None:
    with dial_raw(strict) as line:
        assert line.recv(100).startswith(b"HTTP/1.1 408 ")
        assert line.recv(100) == b""
    assert_alone(strict)


def test_the_second_request_of_a_connection_has_no_more_time_than_the_first(strict: Served) -> None:
    with dial_raw(strict) as line:
        line.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        said = b""
        while b'"ok"' not in said:
            received = line.recv(65536)
            assert received, said
            said += received
        assert b"408" in trickle(line, b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + b"X: y\r\n" * 1000)
    assert_alone(strict)


@pytest.mark.parametrize("path", ["/api/conversations", "/api/import", "/v1/chat/completions"])
def test_a_body_that_trickles_is_not_waited_for(strict: Served, path: str) -> None:
    with dial_raw(strict) as line:
        line.sendall(post(path, 100_000))
        said = trickle(line, b" " * 100_000)
    assert said.startswith(b"HTTP/1.1 408 ")
    assert json.loads(said.partition(b"\r\n\r\n")[2])["error"]["code"] == "too_slow"
    assert_alone(strict)


def test_a_body_that_nobody_reads_holds_nothing(strict: Served) -> None:
    """The answer was sent at once, and then the rest of the body was taken, byte by byte, for ever."""
    with dial_raw(strict) as line:
        line.sendall(post("/nowhere", 100_000))
        assert trickle(line, b" " * 100_000).startswith(b"HTTP/1.1 404 ")
    assert_alone(strict)


def test_a_client_that_takes_nothing_of_its_answer_is_cut_off(strict: Served) -> None:
    with dial_raw(strict) as line:
        line.sendall(b"GET /endless HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert line.recv(100).startswith(b"HTTP/1.1 200 ")
        assert_alone(strict)


def test_a_slow_reader_that_goes_on_reading_is_served(strict: Served) -> None:
    with dial_raw(strict) as line:
        line.sendall(b"GET /endless HTTP/1.1\r\nHost: localhost\r\n\r\n")
        size, began = 0, time.monotonic()
        while time.monotonic() - began < 3 * connections.STALLED_S:
            size += len(line.recv(2**20))
            time.sleep(0.01)
        assert size > len(CHUNK)


def test_hundreds_of_slow_connections_keep_nobody_out(strict: Served) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(300):
            stack.enter_context(dial_raw(strict)).sendall(b"GET / HT")
        began = time.monotonic()
        assert httpx.get(f"{strict.url}/health", timeout=LIMIT_S).status_code == 200
        until(lambda: len(strict.server.server_state.connections) <= 1)
        assert time.monotonic() - began < LIMIT_S
    assert_alone(strict)


# -- out of file descriptors -----------------------------------------------------------------------------------------

PROGRAM = """
    import logging, sys, tempfile
    from pathlib import Path
    from tests.server.serving import serving

    logging.basicConfig()
    with serving(Path(sys.argv[1])) as served:
        print(served.url, flush=True)
        sys.stdin.read()
"""


@pytest.fixture
def child(tmp_path: Path) -> Iterator[tuple[str, "subprocess.Popen[str]", Path]]:
    """A server in a process of its own, whose limits can be changed."""
    root = Path(__file__).parents[2]
    places = [str(root), str(root / "kernels"), str(root / "ui")]
    code = f"import sys; sys.path[:0] = {places!r}\n{textwrap.dedent(PROGRAM)}"
    log = tmp_path / "log"
    with (
        log.open("w") as errors,
        subprocess.Popen(
            [sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True
        ) as process,
    ):
        assert process.stdout is not None
        assert process.stdin is not None
        url = process.stdout.readline().strip()
        assert re.match(r"http://", url), log.read_text()
        yield url, process, log
        process.stdin.close()
        assert process.wait(60) == 0, log.read_text()[-3000:]


def limit_descriptors(process: "subprocess.Popen[str]", spare: int) -> None:
    """Leave a process so many file descriptors beside those it has."""
    _, hard = resource.prlimit(process.pid, resource.RLIMIT_NOFILE)
    num_open = len(os.listdir(f"/proc/{process.pid}/fd"))
    resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (num_open + spare, hard))


def is_served(url: str) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return httpx.get(f"{url}/health", timeout=2).status_code == 200
    return False


@pytest.mark.skipif(sys.platform != "linux", reason="changes the limits of another process")
def test_a_server_out_of_file_descriptors_says_so_and_serves_again_when_there_are_some(
    child: tuple[str, "subprocess.Popen[str]", Path],
) -> None:
    """Accepting must not end for good because it once could not be done; asyncio wrote thousands of lines a second about it."""
    url, process, log = child
    port = int(url.rpartition(":")[2])
    limit_descriptors(process, spare=3)
    with contextlib.ExitStack() as stack:
        for _ in range(12):
            stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=LIMIT_S))
        until(lambda: "No file descriptor is left" in log.read_text())
        assert process.poll() is None
    until(lambda: is_served(url))
    made = httpx.post(f"{url}/api/conversations", json={}, timeout=LIMIT_S)
    if made.status_code != 201:  # a file that is needed once, such as the database or a module, could not be opened
        assert made.json()["error"]["code"].startswith(("store_", "overloaded")), made.text
    limit_descriptors(process, spare=100)
    assert httpx.post(f"{url}/api/conversations", json={}, timeout=LIMIT_S).status_code == 201
    assert log.read_text().count("No file descriptor is left") == 1


@pytest.mark.skipif(sys.platform != "linux", reason="changes the limits of another process")
def test_connections_beyond_what_leaves_room_for_files_are_refused_at_once(
    child: tuple[str, "subprocess.Popen[str]", Path],
) -> None:
    url, process, log = child
    port = int(url.rpartition(":")[2])
    _, hard = resource.prlimit(process.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (200, hard))
    room = max(200 - 128, 100)
    with contextlib.ExitStack() as stack:
        kept = [stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=LIMIT_S)) for _ in range(room)]
        until(lambda: len(os.listdir(f"/proc/{process.pid}/fd")) >= room)
        more = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=LIMIT_S))
        assert more.recv(1000).startswith(b"HTTP/1.1 503 ")
        kept[0].sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert kept[0].recv(1000).startswith(b"HTTP/1.1 200 "), "who was there before is served"
    until(lambda: is_served(url))
    assert "A connection was refused" in log.read_text()
