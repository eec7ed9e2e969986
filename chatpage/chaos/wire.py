"""The wire between the users and the server: it keeps its address while servers come and go, and can be cut.

Invariant: a byte is passed on or its connection is broken; nothing is changed, and no end outlives the other.
"""

import asyncio
import contextlib
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit

_CHUNK = 2**16


class Wire:
    """Passes connections on to whichever server there is; without one they are refused."""

    def __init__(self) -> None:
        self._target: tuple[str, int] | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server | None = None

    @property
    def url(self) -> str:
        """Where users connect to."""
        assert self._server is not None
        host, port = self._server.sockets[0].getsockname()[:2]
        return f"http://{host}:{port}"

    @property
    def num_open(self) -> int:
        return len(self._writers)

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._pass, "127.0.0.1", 0)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._server is not None
        self._server.close()
        self.cut()
        await self._server.wait_closed()

    def lead_to(self, url: str | None) -> None:
        """Pass new connections on to a server, or (None) refuse them."""
        parts = urlsplit(url or "")
        self._target = None if url is None else (str(parts.hostname), int(parts.port or 80))

    def cut(self) -> int:
        """Break every connection in the middle of whatever it says; return how many there were."""
        cut = list(self._writers)
        for writer in cut:
            writer.transport.abort()
        return len(cut) // 2

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            if self._target is None:
                raise ConnectionRefusedError
            far_reader, far_writer = await asyncio.open_connection(*self._target)
        except OSError:
            writer.transport.abort()
            return
        ends = {writer, far_writer}
        self._writers |= ends
        try:
            ways = [asyncio.create_task(_copy(reader, far_writer)), asyncio.create_task(_copy(far_reader, writer))]
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)
        finally:
            self._writers -= ends
            for end in ends:
                end.close()
                with contextlib.suppress(OSError):
                    await end.wait_closed()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(_CHUNK):
            writer.write(data)
            await writer.drain()
