"""A real server for tests, on a thread with its own event loop, and a client that keeps to the protocol."""

import asyncio
import contextlib
import json
import threading
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed

from chatpage.engine.core import Engine
from chatpage.server.app import create_app
from chatpage.server.protocol import (
    PROTOCOL,
    ErrorMessage,
    RunCreated,
    RunDelta,
    RunDone,
    RunSnapshot,
    SampleDone,
    ServerMessage,
    Welcome,
    parse_server_message,
)
from chatpage.server.serve import Server, open_socket, url_of
from chatpage.server.settings import ServeSettings
from chatpage.store import LOCAL_USER, Conversation, Node, NodeId
from tests.sessions import Copy, Desk, open_desk

TIMEOUT_S = 60.0
SHORT = {"max_tokens": 8, "ignore_eos": True, "temperature": 0.0}
LONG = {"max_tokens": 100, "ignore_eos": True, "temperature": 0.0}


@dataclass(slots=True)
class Served:
    """A server that runs, and what is behind it; the store may be used from any thread."""

    url: str
    desk: Desk
    server: Server
    loop: asyncio.AbstractEventLoop

    @property
    def ws_url(self) -> str:
        return self.url.replace("http://", "ws://") + "/ws"

    def conversation(self, **options: Any) -> Conversation:
        return self.desk.store.create_conversation(LOCAL_USER, **options)

    def node(self, conversation_id: str, node_id: str) -> Node:
        tree = self.desk.store.get_tree(LOCAL_USER, conversation_id).tree  # type: ignore[arg-type]
        return tree.nodes[NodeId(node_id)]


@contextlib.contextmanager
def serving(
    folder: Path,
    *,
    settings: ServeSettings | None = None,
    listen: str = "127.0.0.1",
    port: int = 0,
    engine: Engine | None = None,
    prepare: Callable[[Desk], None] | None = None,
    extend: Callable[[FastAPI], None] | None = None,
) -> Iterator[Served]:
    """Serve; at the end, every block has been given back.

    Args:
        settings: As if for the application alone; the socket always listens on `listen`.
        prepare: Called on the server's loop before it serves.
        extend: Adds to the application, such as the page.
    """
    started, found, errors = threading.Event(), [], []
    settings = settings or ServeSettings()

    async def run() -> None:
        async with open_desk(folder, engine=engine) as desk:
            if prepare is not None:
                prepare(desk)
            with open_socket(ServeSettings(host=listen, port=port)) as listener:
                app = create_app(desk.session, settings)
                if extend is not None:
                    extend(app)
                server = Server(app)
                found.append(Served(url_of(listener), desk, server, asyncio.get_running_loop()))
                started.set()
                await server.serve([listener])

    def main() -> None:
        try:
            asyncio.run(run())
        except BaseException as error:  # noqa: BLE001 - raised again on the test's thread
            errors.append(error)
        finally:
            started.set()

    thread = threading.Thread(target=main)
    thread.start()
    started.wait(TIMEOUT_S)
    try:
        if found:
            yield found[0]
    finally:
        if found:
            found[0].server.should_exit = True
        thread.join(TIMEOUT_S)
    assert not thread.is_alive(), "the server did not end"
    if errors:
        raise errors[0]


@dataclass(slots=True)
class Wire:
    """A client of `chatpage.v1`: sends and reads messages, and keeps the runs it hears of."""

    socket: ClientConnection
    copies: dict[str, Copy] = field(default_factory=dict)

    async def send(self, type: str, **fields: Any) -> None:
        await self.socket.send(json.dumps({"type": type, **fields}))

    async def receive(self) -> ServerMessage:
        message = parse_server_message(await asyncio.wait_for(self.socket.recv(), TIMEOUT_S))
        if isinstance(message, RunSnapshot | RunDelta | SampleDone | RunDone):
            self.copies.setdefault(message.run_id, Copy()).take(message)
        return message

    async def until(self, kind: type[Any], **wanted: Any) -> Any:
        """Read up to the next message of a kind."""
        while True:
            message = await self.receive()
            if isinstance(message, ErrorMessage) and kind is not ErrorMessage:
                raise AssertionError(f"{message.code}: {message.message}")
            if isinstance(message, kind) and all(getattr(message, key) == value for key, value in wanted.items()):
                return message

    async def close_code(self) -> int:
        """Read until the server closes, and return its code."""
        with contextlib.suppress(ConnectionClosed):
            while True:
                await self.receive()
        assert self.socket.close_code is not None
        return self.socket.close_code

    async def hello(self, **fields: Any) -> Welcome:
        await self.send("hello", client_id="test", **fields)
        welcome: Welcome = await self.until(Welcome)
        return welcome

    async def reply(self, conversation: Conversation, text: str = "Hello", **fields: Any) -> RunCreated:
        """Ask for a reply and return when it was created."""
        message_id = fields.pop("client_msg_id", uuid.uuid4().hex)
        fields = {"kind": "reply", "input": text, "params": SHORT, **fields}
        await self.send("run.create", conversation_id=conversation.id, client_msg_id=message_id, **fields)
        created: RunCreated = await self.until(RunCreated, client_msg_id=message_id)
        return created

    async def first_texts(self, run: RunCreated) -> None:
        """Read until every sample of a run has said something."""
        while len(texts := self.copies.get(run.run_id, Copy()).texts) < len(run.node_ids) or not all(texts.values()):
            await self.receive()

    async def until_error(self, ref: str) -> ErrorMessage:
        """Read up to the error about a message."""
        error: ErrorMessage = await self.until(ErrorMessage, ref=ref)
        return error

    async def finish(self, run: RunCreated) -> Copy:
        """Read a run to its end."""
        while run.run_id not in self.copies or self.copies[run.run_id].end is None:
            await self.until(RunDone)
        return self.copies[run.run_id]


@contextlib.asynccontextmanager
async def dial(served: Served, *, hello: bool = True, **options: Any) -> AsyncIterator[Wire]:
    """Connect, and say hello."""
    options = {"subprotocols": [PROTOCOL], "compression": None, **options}
    async with connect(served.ws_url, **options) as socket:
        wire = Wire(socket)
        if hello:
            await wire.hello()
        yield wire


def with_server(folder: Path, test: Callable[[Served], Coroutine[Any, Any, None]], **options: Any) -> None:
    """Run the client's side of a test beside a server."""
    with serving(folder, **options) as served:
        asyncio.run(asyncio.wait_for(test(served), TIMEOUT_S))
