"""HTTP connections that cost too much are ended: those that are slow on purpose, and those there is no room for.

Invariants: a connection without a whole request head, or one that takes nothing of its answer, is gone after a bounded time;
the number of connections leaves the process enough file descriptors for everything else.

    accepted ── HEAD_S for the first head ──> request ──> answer ── STALLED_S without progress ──> cut
       └── no room: 503 at once                  └── body: see `BodyLimit`; not read to its end: LINGER_S, then cut
"""

import asyncio
import logging
import sys
import time
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

if sys.platform != "win32":
    import resource

HEAD_S = 15.0  # from the first moment, or the first byte of a further request, to the end of its head
STALLED_S = 60.0  # that a client may take nothing while its answer waits
KEEP_ALIVE_S = 20  # without a request; longer than clients keep a connection, or one would be closed just as it is used again
LINGER_S = 2.0  # for an answer to arrive before the rest of a body is refused
WANTED_DESCRIPTORS = 65_536
_RESERVED = 128  # descriptors for database, engine, files and logs
_PAUSE_S = 60.0  # between two lines about the same
_BUSY = b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
_TIMEOUT = b"HTTP/1.1 408 Request Timeout\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
logger = logging.getLogger(__name__)


def raise_descriptor_limit() -> None:
    """Let this process have as many files and sockets open as its owner allows; often far fewer is the default."""
    if sys.platform == "win32":
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = WANTED_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, WANTED_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def max_connections() -> int:
    """Return how many connections may be open at once."""
    if sys.platform == "win32":
        return WANTED_DESCRIPTORS - _RESERVED
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return WANTED_DESCRIPTORS
    return max(soft - _RESERVED, soft // 2)


class _Report:
    """Tells now and then of something that happens again and again."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._num = 0
        self._told_at: float | None = None

    def note(self) -> None:
        self._num += 1
        now = time.monotonic()
        if self._told_at is None or now - self._told_at >= _PAUSE_S:
            logger.warning("%s Up to now: %d.", self._text, self._num)
            self._told_at = now


_refusals = _Report("A connection was refused: as many are open as the limit of file descriptors allows (ulimit -n).")
_failures = _Report("No file descriptor is left for a new connection (ulimit -n); it is tried again in a second.")


def report_exhaustion(loop: asyncio.AbstractEventLoop) -> None:
    """Say in one line that no connection can be accepted; asyncio would log thousands a second, and hardly do anything else."""

    def handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if "out of system resource" in context["message"]:
            _failures.note()
        else:
            loop.default_exception_handler(context)

    loop.set_exception_handler(handle)


class HttpProtocol(H11Protocol):
    """One connection of uvicorn's, with limits."""

    _head_timer: asyncio.TimerHandle | None = None
    _stalled_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > max_connections():
            _refusals.note()
            self._end(_BUSY)
            return
        self._head_timer = self.loop.call_later(HEAD_S, self._end, _TIMEOUT)

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_head_timer()
        self._cancel_stalled_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        super().data_received(data)
        has_part_of_a_head = self.conn.their_state is h11.IDLE and bool(self.conn.trailing_data[0])
        if not has_part_of_a_head:
            self._cancel_head_timer()
        elif self._head_timer is None:
            self._head_timer = self.loop.call_later(HEAD_S, self._end, _TIMEOUT)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stalled_timer = self.loop.call_later(STALLED_S, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._cancel_stalled_timer()

    def on_response_complete(self) -> None:
        is_read = self.conn.their_state is not h11.SEND_BODY
        super().on_response_complete()
        if not is_read:  # whoever trickles the rest of a body would keep the connection for ever
            self.loop.call_later(LINGER_S, self.transport.close)

    def _end(self, answer: bytes) -> None:
        self._head_timer = None
        if not self.transport.is_closing():
            self.transport.write(answer)
            self.transport.close()

    def _cancel_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _cancel_stalled_timer(self) -> None:
        if self._stalled_timer is not None:
            self._stalled_timer.cancel()
            self._stalled_timer = None
