"""`chatpage serve`: engine, store, session and application, started in this order and ended in the other.

Invariants: what can be refused is refused without waiting for the model; whoever asks while it loads is told so; when the
server is told to end, sockets hear so, runs end as interrupted with their text stored, and no process is left.
"""

import asyncio
import contextlib
import logging
import signal
import socket
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI

from chatpage.engine.models.tokenizer import load_tokenizer
from chatpage.engine.process import ProcessEngine, keep_alive
from chatpage.errors import ConfigError
from chatpage.server.app import create_app
from chatpage.server.connections import KEEP_ALIVE_S, HttpProtocol, raise_descriptor_limit, report_exhaustion
from chatpage.server.draining import DRAIN_S, SHUTDOWN_S, Drain
from chatpage.server.purging import purge_daily
from chatpage.server.security import has_users
from chatpage.server.settings import ServeSettings
from chatpage.server.sockets import SocketProtocol
from chatpage.server.starting import answering_meanwhile
from chatpage.server.views import MAX_MESSAGE_BYTES
from chatpage.session import Session
from chatpage.store import Store, database_path
from chatpage.store.store import take_lock

logger = logging.getLogger(__name__)


async def serve(
    engine: ProcessEngine,
    settings: ServeSettings,
    *,
    extend: Callable[[FastAPI], None] | None = None,
    on_ready: Callable[[str], None] | None = None,
) -> None:
    """Serve until SIGINT or SIGTERM.

    Args:
        engine: Is started if that was not begun, started again whenever it ends, and closed.
        settings: Of the server.
        extend: Adds to the application, such as the page.
        on_ready: Called with the address once requests are answered.

    Raises:
        ConfigError: The address cannot be used, others could reach it and nobody could log in, or another server has the data.
        ModelError: As `Engine.load`.
        StoreError: The database cannot be opened.
    """
    raise_descriptor_limit()
    async with contextlib.AsyncExitStack() as ends:
        ends.push_async_callback(engine.close)
        store = ends.enter_context(Store(database_path(settings.data_dir)))
        ends.enter_context(_only_server_of(store))
        check_access(store, settings)
        listener = ends.enter_context(open_socket(settings))
        async with answering_meanwhile(listener):
            await engine.start()
            await ends.enter_async_context(_background(keep_alive(engine)))
            tokenizer = await asyncio.to_thread(load_tokenizer, Path(engine.info.tokenizer_path))
            session = Session(engine, store, tokenizer, settings.limits)
            ends.push_async_callback(session.close)
            await ends.enter_async_context(_background(purge_daily(store, settings.keep_deleted_days)))
            app = create_app(session, settings)
            if extend is not None:
                await asyncio.to_thread(extend, app)
        server = Server(app)
        if on_ready is not None:
            on_ready(url_of(listener))
        await server.serve([listener])


def check_access(store: Store, settings: ServeSettings) -> None:
    """Refuse to serve others without a way to tell them apart.

    Raises:
        ConfigError: A login or a key is needed, and nobody has either.
    """
    if settings.needs_users and not has_users(store):
        raise ConfigError(
            f"A server on {settings.host} with these settings needs users, and nobody has a password or an API key: make one "
            "with 'chatpage user add NAME' or 'chatpage key add NAME', or listen on 127.0.0.1."
        )


@contextlib.contextmanager
def _only_server_of(store: Store) -> Iterator[None]:
    """Keep other servers from the data: neither could stop the runs of the other, or tell its readers of them.

    Raises:
        ConfigError: There is one already.
    """
    lock = take_lock(store.path, "serve.lock")
    if lock is None:
        raise ConfigError(
            f"Another server has the conversations in {store.path.parent}: open that one, end it first, or give this one"
            " a folder of its own with --data."
        )
    with contextlib.closing(lock):
        yield


def open_socket(settings: ServeSettings) -> socket.socket:
    """Listen.

    Raises:
        ConfigError: The address cannot be used.
    """
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    try:
        return socket.create_server((settings.host, settings.port), family=family, backlog=2048)
    except OSError as error:
        raise ConfigError(f"Cannot listen on {settings.host} port {settings.port}: {error.strerror or error}.") from error


def url_of(listener: socket.socket) -> str:
    """Return the address of a listening socket."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


@contextlib.asynccontextmanager
async def _background(work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Do something meanwhile that has no end of its own."""
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


class Server(uvicorn.Server):
    """uvicorn with our settings, which leaves signals to whoever ends after it."""

    def __init__(self, app: FastAPI) -> None:
        self._drain: Drain = app.state.drain
        super().__init__(
            uvicorn.Config(
                app,
                http=HttpProtocol,
                ws=SocketProtocol,
                ws_max_size=MAX_MESSAGE_BYTES,
                ws_per_message_deflate=False,
                timeout_graceful_shutdown=SHUTDOWN_S,
                timeout_keep_alive=KEEP_ALIVE_S,
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
            )
        )

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn's; where no connection can be accepted for a while, one line says so."""
        report_exhaustion(asyncio.get_running_loop())
        await super().startup(sockets)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Take no more connections, say goodbye to those there are, and end. A second Ctrl-C skips the goodbye."""
        for server in self.servers:
            server.close()
        for listener in sockets or []:
            listener.close()
        goodbye = asyncio.create_task(self._drain.begin())
        deadline = asyncio.get_running_loop().time() + DRAIN_S
        while not goodbye.done() and not self.force_exit and asyncio.get_running_loop().time() < deadline:
            await asyncio.wait({goodbye}, timeout=0.1)
        goodbye.cancel()
        await asyncio.gather(goodbye, return_exceptions=True)
        await super().shutdown(sockets)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """End on SIGINT and SIGTERM; unlike uvicorn's, do not raise them again, since the engine is still to be closed."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        old = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in old.items():
                signal.signal(number, handler)
