"""Frames that no client of ours would send: each gets a typed error or a close, and the server goes on."""

import asyncio
import contextlib
import json
import random
import socket
import string
from typing import Any
from urllib.parse import urlsplit

import httpx
from pydantic import BaseModel
from websockets.exceptions import ConnectionClosed

from chatpage.server.asyncapi import message_models
from chatpage.server.protocol import ClientMessage, ErrorMessage, Pong
from tests.server.serving import Served, Wire, dial

NUM_MESSAGES = 400
ODD_VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1.5, 2**63, -(2**63), 10**30, 1e308, "", " ", "x" * 300, "\x00", "\ud800", "\u202e", "é" * 50,
    [], [[]], {}, {"a": {}}, ["none"], [1, "2", None],
)  # fmt: skip


def _odd_message(chance: random.Random) -> str:
    """Return a message with the fields of a real one and odd values, some missing, some too many."""
    model: type[BaseModel] = chance.choice(message_models(ClientMessage))
    fields: dict[str, Any] = {name: chance.choice(ODD_VALUES) for name in model.model_fields if chance.random() < 0.8}
    if chance.random() < 0.9:
        fields["type"] = model.model_fields["type"].default
    if chance.random() < 0.2:
        fields["".join(chance.choices(string.printable, k=5))] = chance.choice(ODD_VALUES)
    if chance.random() < 0.3 and "params" in model.model_fields:
        fields["params"] = {chance.choice(["top_k", "stop", "logit_bias", "seed", "x"]): chance.choice(ODD_VALUES)}
    return json.dumps(fields)


def _odd_text(chance: random.Random) -> str:
    text = _odd_message(chance)
    match chance.randrange(4):
        case 0:
            return text[: chance.randrange(len(text))]
        case 1:
            at = chance.randrange(len(text))
            return text[:at] + chance.choice(string.printable) + text[at + 1 :]
        case 2:
            return chance.choice("[{") * chance.choice([1, 200, 5000, 100_000])
        case _:
            return text


async def _is_alive(wire: Wire, number: int) -> bool:
    """Whether the connection answers; whatever comes before is an error of the client's, and a close has a code."""
    with contextlib.suppress(ConnectionClosed):
        await wire.send("ping", t=number)
        while not isinstance(message := await wire.receive(), Pong) or message.t != number:
            if isinstance(message, ErrorMessage):
                assert message.code != "internal_error", message
        return True
    assert wire.socket.close_code in (1008, 1009, 1013)
    return False


def test_odd_messages_get_typed_errors(server: Served) -> None:
    async def test() -> None:
        chance = random.Random(11)
        async with dial(server) as wire:
            for number in range(NUM_MESSAGES):
                text = _odd_text(chance)
                await wire.socket.send(text.encode("utf-8", "surrogatepass") if chance.random() < 0.1 else text)
                if number % 20 == 0:
                    assert await _is_alive(wire, number)

    asyncio.run(test())


def test_a_message_in_many_fragments_is_one_message(server: Served) -> None:
    async def test() -> None:
        async with dial(server) as wire:
            text = json.dumps({"type": "ping", "t": 7})
            await wire.socket.send(list(text))
            assert await wire.until(Pong) == Pong(t=7)
            await wire.socket.send([b"\x00"] * 100)
            assert (await wire.until(ErrorMessage)).code == "invalid_message"

    asyncio.run(test())


def test_a_flood_of_questions_is_answered_or_closed(server: Served) -> None:
    """Whoever asks faster than answers can be sent is closed, before the questions fill the memory."""

    async def test() -> None:
        async with dial(server, max_queue=1) as wire:
            with contextlib.suppress(ConnectionClosed):
                for _ in range(5000):
                    await wire.send("plan", conversation_id="none", kind="reply", input="x" * 1000)
            await _is_alive(wire, 1)

    asyncio.run(test())
    assert httpx.get(f"{server.url}/health").status_code == 200


def test_bytes_that_are_no_websocket_end_that_connection_alone(server: Served) -> None:
    """Behind a proper handshake: reserved bits, unknown opcodes, control frames that are too long or cut, no mask, garbage."""
    address = urlsplit(server.url)
    assert address.hostname is not None
    hello = (
        f"GET /ws HTTP/1.1\r\nHost: {address.netloc}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
    ).encode()
    chance = random.Random(5)
    frames = [
        b"\xf1\x80\x00\x00\x00\x00",
        b"\x83\x80\x00\x00\x00\x00",
        b"\x89\xfe\x00\xff\x00\x00\x00\x00" + b"x" * 255,
        b"\x81\x05hello",
        b"\x80\x80\x00\x00\x00\x00",
        b"\x81\x82\x00\x00\x00\x00\xff\xfe",
        b"\x88\x81\x00\x00\x00\x00\x01",
        b"\x88\x82\x00\x00\x00\x00\x00\x00",
        b"\x81\xff\x7f\xff\xff\xff\xff\xff\xff\xff\x00\x00\x00\x00",
        b"\x09",
        *(chance.randbytes(chance.randint(1, 300)) for _ in range(40)),
    ]
    for frame in frames:
        with socket.create_connection((address.hostname, address.port or 80), timeout=30) as raw:
            raw.sendall(hello)
            answer = raw.recv(4096)
            assert answer.startswith(b"HTTP/1.1 101")
            raw.sendall(frame)
            raw.shutdown(socket.SHUT_WR)
            with contextlib.suppress(ConnectionError):
                while raw.recv(65536):
                    pass
    assert httpx.get(f"{server.url}/health").status_code == 200

    async def test() -> None:
        async with dial(server) as wire:
            assert await _is_alive(wire, 1)

    asyncio.run(test())
