"""The end of a server that is told to end while clients listen.

Invariants: nothing that was written is lost on the way: runs end first, with their text stored, then every socket hears all of
it, then that the server restarts, then its close with 1012. No client can hold up the end: each step has a limit of its own.

    SIGTERM ──> no new connections ──> runs end, streams hear it ──> "restarting" ──> 1012     within DRAIN_S
                                                                 └─> endless streams end       within SHUTDOWN_S
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Iterator
from typing import Protocol

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from chatpage.session import Session

DRAIN_S = 3.0  # for runs to be stored, and for clients to take what was written
GRACE_S = 0.5  # for streams to send how they ended; what is still open then never ends by itself
SHUTDOWN_S = 2  # for requests that are being answered
RETRY_AFTER_MS = 1000
SERVICE_RESTART = 1012
logger = logging.getLogger(__name__)


class Drainable(Protocol):
    """A socket that can say goodbye."""

    async def drain(self) -> None:
        """Send all that was written for it, say that the server restarts, and close with 1012."""


class Drain:
    """Knows what is open; one per application."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._sockets: set[Drainable] = set()
        self._num_requests = 0
        self._is_over = asyncio.Event()

    @property
    def has_begun(self) -> bool:
        """Whether the server is ending."""
        return self._session.admission.is_closed

    @contextlib.contextmanager
    def open(self, socket: Drainable) -> Iterator[None]:
        """Count a socket as open meanwhile."""
        self._sockets.add(socket)
        try:
            yield
        finally:
            self._sockets.remove(socket)

    @contextlib.contextmanager
    def answering(self) -> Iterator[None]:
        """Count a request as open meanwhile."""
        self._num_requests += 1
        try:
            yield
        finally:
            self._num_requests -= 1

    async def begin(self) -> None:
        """End runs and sockets; then let go of requests that would stream for ever. Whoever calls it sets the limit of time."""
        try:
            await self._session.drain()
            outcomes = await asyncio.gather(*(socket.drain() for socket in self._sockets), return_exceptions=True)
            for outcome in outcomes:
                if isinstance(outcome, Exception):
                    logger.error("A socket could not be told that the server ends", exc_info=outcome)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(GRACE_S):
                    while self._num_requests:
                        await asyncio.sleep(0.01)
        finally:
            self._is_over.set()

    async def wait_until_over(self) -> None:
        await self._is_over.wait()


class DrainEnds:
    """Ends streams that never end by themselves, such as those of a page: once `Drain` is over their client counts as gone.

    Only waiting for a disconnect is cut short, never the reading of a body.
    """

    def __init__(self, app: ASGIApp, drain: Drain) -> None:
        self._app = app
        self._drain = drain

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        has_body = has_started = has_ended = False

        async def heard() -> Message:
            nonlocal has_body
            message = await (_first(receive(), self._drain.wait_until_over()) if has_body else receive())
            has_body = has_body or (message["type"] == "http.request" and not message.get("more_body", False))
            return message

        async def watched(message: Message) -> None:
            nonlocal has_started, has_ended
            has_started = has_started or message["type"] == "http.response.start"
            has_ended = has_ended or (message["type"] == "http.response.body" and not message.get("more_body", False))
            await send(message)

        with self._drain.answering():
            await self._app(scope, heard, watched)
        if has_started and not has_ended:  # the client hears that the stream ended, not that the connection broke
            await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _first(message: Awaitable[Message], over: Awaitable[None]) -> Message:
    """Return the message, or that the client is gone if the drain is over first."""
    receiving, ending = asyncio.ensure_future(message), asyncio.ensure_future(over)
    try:
        await asyncio.wait({receiving, ending}, return_when=asyncio.FIRST_COMPLETED)
        return receiving.result() if receiving.done() else {"type": "http.disconnect"}
    finally:
        for task in (receiving, ending):
            task.cancel()
        await asyncio.gather(receiving, ending, return_exceptions=True)
