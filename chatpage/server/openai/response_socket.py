"""`/v1/responses` as a socket: OpenAI's WebSocket mode.

    client   response.create {stream_id?, ...}      a request as over HTTP; `stream` is implied
             response.retrieve {response_id, starting_after?, stream_id?}      ours: the events of a stored response, from there
    server   the events of the stream, with the `stream_id` of their request; error {status, error{code, message, param, type}}

Requests of one `stream_id` (or of none) are one lane and served one after another; lanes run side by side.

Invariants: the reader never waits for the client, so pings and the end are always seen. What is not stored ends with the
socket, and can be gone on from on it alone; stored responses go on without it. A client that takes nothing for `SEND_S` is
closed with 1013.
"""

import asyncio
import contextlib
import json
import logging
import math
from collections import deque
from typing import Any, Literal

from pydantic import Field, ValidationError
from starlette.websockets import WebSocket, WebSocketDisconnect, WebSocketState

from chatpage.errors import ChatpageError, InvalidParameterError, InvalidRequestError, OverloadedError, RestartingError
from chatpage.server.draining import SERVICE_RESTART, Drain
from chatpage.server.openai.access import find_user
from chatpage.server.openai.common import OpenAIModel, read_body
from chatpage.server.openai.errors import describe, error_body
from chatpage.server.openai.replies import ReplyMemory
from chatpage.server.openai.response_bodies import ResponseBody
from chatpage.server.openai.response_calls import Call, Chains, Visitor, call, stored_call
from chatpage.server.openai.response_store import find_response
from chatpage.server.problems import INTERNAL_CODE, INTERNAL_TEXT, ForbiddenError, UnauthorizedError, retry_after_s, status_of
from chatpage.server.revoking import REASON, Revoker, credential_of
from chatpage.server.views import Id
from chatpage.session import Session
from chatpage.store import UserId

OUTBOX = 16  # events
MAX_LANES = 64
MAX_WAITING = 32  # requests of a lane
SEND_S = 10.0  # without the client taking a byte
TRY_AGAIN_LATER, POLICY_VIOLATION = 1013, 1008
Event = dict[str, Any]
logger = logging.getLogger(__name__)


class SocketCreate(ResponseBody):
    """A request for a response, on a lane."""

    type: Literal["response.create"]
    stream_id: Id | None = None


class SocketRetrieve(OpenAIModel):
    """Asks for the events of a stored response after those that the client has."""

    type: Literal["response.retrieve"]
    response_id: Id
    starting_after: int | None = Field(default=None, ge=0, lt=2**53)
    stream_id: Id | None = None


Ask = SocketCreate | SocketRetrieve
_KINDS: dict[str, type[SocketCreate] | type[SocketRetrieve]] = {
    "response.create": SocketCreate,
    "response.retrieve": SocketRetrieve,
}


async def serve_responses(socket: WebSocket) -> None:
    """Endpoint of the socket; refuses a wrong key before it accepts."""
    try:
        user = await find_user(socket)
    except (UnauthorizedError, ForbiddenError):
        await socket.close(POLICY_VIOLATION)
        return
    await socket.accept()
    state = socket.app.state
    drain: Drain = state.drain
    responses = ResponseSocket(socket, state.session, user.id, state.replies)
    revoker: Revoker = state.revoker
    with drain.open(responses), revoker.watching(responses, credential_of(state.auth, socket, user)):
        await responses.serve()


class ResponseSocket:
    """A client on its socket."""

    def __init__(self, socket: WebSocket, session: Session, user_id: UserId, replies: ReplyMemory) -> None:
        self._socket = socket
        self._session = session
        self._user_id = user_id
        self._visitor = Visitor(session, user_id, replies, Chains())
        self._lanes: dict[str | None, deque[Ask]] = {}  # those that are being served; what waits in each
        self._tasks: set[asyncio.Task[None]] = set()
        self._outbox: asyncio.Queue[Event | None] = asyncio.Queue(OUTBOX)  # None: nothing follows, close
        self._goodbye = asyncio.Event()  # nothing more is sent

    async def serve(self) -> None:
        """Serve until either side closes; nothing of the socket is left afterwards."""
        writer = asyncio.create_task(self._write())
        try:
            await self._read()
        finally:
            self._goodbye.set()
            tasks = [writer, *self._tasks]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def drain(self) -> None:
        """Let every lane come to its end, which is an error by now, say that the server restarts, and close with 1012."""
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._outbox.put(_error_event(RestartingError(), None))
        await self._outbox.put(None)
        await self._goodbye.wait()

    async def revoke(self) -> None:
        """Close: whoever came in with this login or key may not stay."""
        await self._close(REASON, POLICY_VIOLATION)

    # -- in --------------------------------------------------------------------------------------------------------

    async def _read(self) -> None:
        while True:
            frame = await self._socket.receive()
            if frame["type"] == "websocket.disconnect":
                return
            if len(self._tasks) > 2 * MAX_LANES:  # answers to what was wrong, which nobody takes
                await self._close("too many answers wait to be read")
                return
            self._take(frame.get("text"))

    def _take(self, text: str | None) -> None:
        lane: str | None = None
        try:
            data = _parse(text)
            lane = data["stream_id"] if isinstance(data.get("stream_id"), str) else None
            if data.get("type") == "response.steer":
                self._spawn(self._outbox.put(_steer_failed(data)))
                return
            ask = _read_ask(data)
            self._queue(ask)
        except (ChatpageError, ValidationError) as error:
            self._spawn(self._outbox.put(_error_event(error, lane)))

    def _queue(self, ask: Ask) -> None:
        """Put a request into its lane; a lane that stands still is served."""
        waiting = self._lanes.get(ask.stream_id)
        if waiting is None:
            if len(self._lanes) >= MAX_LANES:
                raise OverloadedError(f"{MAX_LANES} lanes of this connection are busy; wait until one has ended.")
            self._lanes[ask.stream_id] = deque([ask])
            self._spawn(self._serve_lane(ask.stream_id))
        elif len(waiting) >= MAX_WAITING:
            raise OverloadedError(f"{MAX_WAITING} requests wait in this lane; wait until one has ended, or use another.")
        else:
            waiting.append(ask)

    async def _serve_lane(self, lane: str | None) -> None:
        waiting = self._lanes[lane]
        while waiting:
            await self._answer(waiting.popleft())
        del self._lanes[lane]

    async def _answer(self, ask: Ask) -> None:
        try:
            accepted, after = await self._accept(ask)
            async with contextlib.aclosing(accepted.events(after)) as events:
                async for event in events:
                    await self._outbox.put(event if ask.stream_id is None else {**event, "stream_id": ask.stream_id})
        except ChatpageError as error:
            await self._outbox.put(_error_event(error, ask.stream_id))
        except Exception:
            logger.exception("A request on a socket failed")
            await self._outbox.put(_error_event(None, ask.stream_id))

    async def _accept(self, ask: Ask) -> tuple[Call, int]:
        if isinstance(ask, SocketRetrieve):
            stored = await find_response(self._session, self._user_id, ask.response_id)
            after = -1 if ask.starting_after is None else ask.starting_after
            return stored_call(self._session, self._user_id, stored), after
        if ask.background:
            raise InvalidParameterError("background has no meaning on a socket: stored responses go on without it.")
        if ask.stream is False:
            raise InvalidParameterError("On a socket every response is a stream: leave stream out.")
        return await call(self._visitor, ask), -1

    # -- out -------------------------------------------------------------------------------------------------------

    def _spawn(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _write(self) -> None:
        while True:
            event = await self._outbox.get()
            if event is None:
                await self._close("restarting", SERVICE_RESTART)
                self._goodbye.set()
                return
            try:
                async with asyncio.timeout(SEND_S):
                    await self._socket.send_text(json.dumps(event, ensure_ascii=False, separators=(",", ":")))
            except TimeoutError:
                await self._close(f"nothing was read for {SEND_S:g} s")
                return
            except WebSocketDisconnect:
                return  # the reader sees it too

    async def _close(self, reason: str, code: int = TRY_AGAIN_LATER) -> None:
        if self._socket.application_state is WebSocketState.CONNECTED:
            with contextlib.suppress(WebSocketDisconnect):  # the client was faster
                await self._socket.close(code, reason)


def _parse(text: str | None) -> dict[str, Any]:
    try:
        data = json.loads(text or "")
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError("A message must be JSON, sent as text.") from error
    if not isinstance(data, dict):
        raise InvalidRequestError("A message must be a JSON object.")
    return data


def _read_ask(data: dict[str, Any]) -> Ask:
    kind = data.get("type")
    if not isinstance(kind, str) or kind not in _KINDS:
        raise InvalidRequestError(f"The type of a message must be {' or '.join(_KINDS)}, not {str(kind)[:100]!r}.")
    return read_body(_KINDS[kind], data)


def _error_event(error: Exception | None, lane: str | None) -> Event:
    more: dict[str, Any] = {} if lane is None else {"stream_id": lane}
    match error:
        case ValidationError():
            code, message, param = describe(error.errors())
            status, body = 400, error_body(400, code, message[:1000], param)
        case ChatpageError():
            status = status_of(error)
            body = error_body(status, error.code, str(error), getattr(error, "param", None))
            if (wait_s := retry_after_s(error)) is not None:
                more["headers"] = {"Retry-After": str(math.ceil(wait_s))}  # those that it would have over HTTP
        case _:
            status, body = 500, error_body(500, INTERNAL_CODE, INTERNAL_TEXT)
    return {"type": "error", "status": status, "error": body, **more}


def _steer_failed(data: dict[str, Any]) -> Event:
    """Return the answer to an attempt to steer, which is part of the protocol and not of this server."""
    message = "Responses cannot be steered here: cancel the response, and go on from it."
    return {
        "type": "response.steer.failed",
        "sequence_number": 0,
        "error": {"code": "steering_not_supported", "message": message, "type": "invalid_request_error"},
        "steer": {"input": data.get("input"), "previous_response_id": data.get("previous_response_id")},
    }
