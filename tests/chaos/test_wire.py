"""The wire passes bytes on, leads wherever the server is, and breaks when it is cut."""

import asyncio
from urllib.parse import urlsplit

from chatpage.chaos.wire import Wire


async def _echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(100):
        writer.write(data.upper())
    writer.close()


async def _connect(wire: Wire) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    parts = urlsplit(wire.url)
    return await asyncio.open_connection(parts.hostname, parts.port)


async def _open_echo() -> tuple[asyncio.Server, str]:
    server = await asyncio.start_server(_echo, "127.0.0.1", 0)
    return server, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def _is_broken(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
    """Whether nothing more comes, and no byte came before."""
    try:
        writer.write(b"anybody?")
        return not await reader.read(1)
    except OSError:
        return True
    finally:
        writer.close()


async def _say(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, text: bytes) -> bytes:
    writer.write(text)
    return await reader.readexactly(len(text))


def test_bytes_pass_until_the_wire_is_cut() -> None:
    async def run() -> None:
        server, url = await _open_echo()
        async with server, Wire() as wire:
            wire.lead_to(url)
            reader, writer = await _connect(wire)
            assert await _say(reader, writer, b"hello") == b"HELLO"
            assert wire.cut() == 1
            assert await _is_broken(reader, writer)
            again = await _connect(wire)
            assert await _say(*again, b"again") == b"AGAIN"
            again[1].close()

    asyncio.run(asyncio.wait_for(run(), 30))


def test_without_a_server_connections_are_refused() -> None:
    async def run() -> None:
        async with Wire() as wire:
            assert await _is_broken(*await _connect(wire))

    asyncio.run(asyncio.wait_for(run(), 30))


def test_a_client_that_leaves_is_gone_from_the_server_too() -> None:
    async def run() -> None:
        server, url = await _open_echo()
        async with server, Wire() as wire:
            wire.lead_to(url)
            reader, writer = await _connect(wire)
            assert await _say(reader, writer, b"hello") == b"HELLO"
            assert wire.num_open == 2
            writer.close()
            while wire.num_open:
                await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(run(), 30))
