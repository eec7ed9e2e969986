"""How answers leave: as a whole or as server-sent events, and only as long as somebody listens.

Invariants: the work behind an answer ends when its client goes away, before the first byte and after; what fails before the
first byte is an error with its status, what fails later is the last event of the stream.
"""

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping
from typing import Any

from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from chatpage.errors import ChatpageError
from chatpage.server.openai.errors import error_body
from chatpage.server.problems import INTERNAL_CODE, INTERNAL_TEXT, status_of

JSON_OR_EVENTS: dict[int | str, dict[str, Any]] = {  # for the documentation of an endpoint
    200: {"description": "The answer", "content": {"application/json": {}, "text/event-stream": {}}}
}
SEND_S = 60.0  # that a client may take nothing, before its request is given up
Json = Mapping[str, Any]
logger = logging.getLogger(__name__)


class WholeAnswer(Response):
    """Sends what `work` returns; if the client leaves meanwhile, `work` is cancelled."""

    media_type = "application/json"

    def __init__(self, work: Callable[[], Awaitable[Json]]) -> None:
        super().__init__()
        self._work = work

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def answer() -> None:
            await JSONResponse(await self._work())(scope, receive, send)

        await until_disconnect(receive, answer())


class EventStream(Response):
    """Sends events as they come; if the client leaves, or takes nothing for long, they are closed.

    Args:
        events: What to send; the first one before the headers go out.
        is_typed: With the `type` of each as the name of the event, and without `[DONE]` at the end.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[Json, None], *, is_typed: bool = False) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self._events = events
        self._is_typed = is_typed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await until_disconnect(receive, self._stream(send))

    async def _stream(self, send: Send) -> None:
        headers = [(name, value) for name, value in self.raw_headers if name != b"content-length"]
        async with contextlib.aclosing(self._events) as events:
            first = await anext(events, None)
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            if first is not None:
                await self._send(send, self._frame(first))
            async with contextlib.aclosing(_with_failure(events, is_typed=self._is_typed)) as rest:
                async for event in rest:
                    await self._send(send, self._frame(event))
        await self._send(send, "" if self._is_typed else "data: [DONE]\n\n", is_last=True)

    def _frame(self, event: Json) -> str:
        name = f"event: {event['type']}\n" if self._is_typed else ""
        return f"{name}data: {json.dumps(event, ensure_ascii=False, separators=(',', ':'))}\n\n"

    async def _send(self, send: Send, frame: str, *, is_last: bool = False) -> None:
        async with asyncio.timeout(SEND_S):
            await send({"type": "http.response.body", "body": frame.encode(), "more_body": not is_last})


async def _with_failure(events: AsyncGenerator[Json, None], *, is_typed: bool) -> AsyncGenerator[Json, None]:
    """Yield the events, and as the last one what went wrong, if something did."""
    number = 0
    try:
        async for event in events:
            number = event.get("sequence_number", number)
            yield event
        return
    except ChatpageError as error:
        body = error_body(status_of(error), error.code, str(error))
    except Exception:
        logger.exception("A request failed while it was answered")
        body = error_body(500, INTERNAL_CODE, INTERNAL_TEXT)
    yield {**body, "type": "error", "sequence_number": number + 1} if is_typed else {"error": body}


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Do the work of a request whose body was read; cancel it if the client goes away first."""
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        task.cancel()
        watch.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)
    if not task.cancelled():
        task.result()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
