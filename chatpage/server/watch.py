"""Sees every request and socket pass: counts it, and logs a line when it has ended.

Invariant: what is counted and logged is the route that served it, never what the client wrote in a query or a header.
"""

import logging
import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from chatpage.server.logs import log_event
from chatpage.server.metrics import Metrics
from chatpage.server.security import user_seen

OTHER_ROUTE = "other"  # what no route of ours serves: pages that are mounted, and guesses
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
logger = logging.getLogger("chatpage.requests")


class RequestWatch:
    """The outermost part of the application."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await self._watch_request(scope, receive, send)
        elif scope["type"] == "websocket":
            await self._watch_socket(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    async def _watch_request(self, scope: Scope, receive: Receive, send: Send) -> None:
        status, began = 0, time.perf_counter()

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, watched)
        finally:
            method = scope["method"] if scope["method"] in _METHODS else OTHER_ROUTE
            self._metrics.requests.labels(method, _route(scope), str(status)).inc()
            _log("request", scope, began, method=method, status=status)

    async def _watch_socket(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_open, code, began = False, None, time.perf_counter()

        async def watched(message: Message) -> None:
            nonlocal is_open, code
            if message["type"] == "websocket.accept" and not is_open:
                is_open = True
                self._metrics.sockets.inc()
            elif message["type"] == "websocket.close":
                code = message.get("code", 1000)
            await send(message)

        async def heard() -> Message:
            nonlocal code
            message = await receive()
            if message["type"] == "websocket.disconnect" and code is None:
                code = message.get("code")
            return message

        try:
            await self._app(scope, heard, watched)
        finally:
            if is_open:
                self._metrics.sockets.dec()
            _log("socket", scope, began, code=code)


def _route(scope: Scope) -> str:
    return str(getattr(scope.get("route"), "path", OTHER_ROUTE))


def _log(event: str, scope: Scope, began: float, **fields: object) -> None:
    raw: bytes = scope.get("raw_path") or scope["path"].encode("utf-8", "replace")
    path = raw[:500].decode("ascii", "backslashreplace")
    milliseconds = round((time.perf_counter() - began) * 1e3, 1)
    log_event(logger, logging.INFO, event, path=path, user=user_seen(scope), ms=milliseconds, **fields)
