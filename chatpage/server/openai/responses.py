"""`/v1/responses` over HTTP.

Invariant: a stored response belongs to the server: its client may go and come back, and cancelling it is a request of its own.
"""

import contextlib
from collections.abc import AsyncGenerator
from typing import Annotated, Literal

from fastapi import APIRouter, Query, Request
from starlette.responses import JSONResponse, Response

from chatpage.errors import InvalidParameterError
from chatpage.server.openai.access import Caller
from chatpage.server.openai.answers import JSON_OR_EVENTS, EventStream, Json, WholeAnswer
from chatpage.server.openai.common import body_reader
from chatpage.server.openai.response_bodies import ResponseBody
from chatpage.server.openai.response_calls import Visitor, call, stored_call
from chatpage.server.openai.response_objects import ReplyState, input_item
from chatpage.server.openai.response_store import Stored, delete_response, find_response
from chatpage.server.rest import Chats
from chatpage.session import Session
from chatpage.store import RunStatus, UserId

MAX_ITEMS = 100
router = APIRouter(tags=["openai"])


@router.post("/v1/responses", response_class=Response, responses=JSON_OR_EVENTS)
async def create(
    *, request: Request, user: Caller, session: Chats, body: Annotated[ResponseBody, body_reader(ResponseBody)]
) -> Response:
    """Answer messages, as a new conversation or from an earlier response on."""
    if body.stream and body.generate is False:
        raise InvalidParameterError("A prompt that is only computed has no stream: leave one of stream and generate out.")
    visitor = Visitor(session, user, request.app.state.replies)
    if body.stream:
        return EventStream(_events(visitor, body), is_typed=True)

    async def work() -> Json:
        accepted = await call(visitor, body)
        return accepted.head.view(ReplyState()) if body.background else await accepted.whole()

    return WholeAnswer(work)


async def _events(visitor: Visitor, body: ResponseBody) -> AsyncGenerator[Json, None]:
    async with contextlib.aclosing((await call(visitor, body)).events()) as events:
        async for event in events:
            yield event


@router.get("/v1/responses/{response_id}", response_class=Response, responses=JSON_OR_EVENTS)
async def retrieve(
    *,
    request: Request,
    user: Caller,
    session: Chats,
    response_id: str,
    stream: bool = False,
    starting_after: Annotated[int | None, Query(ge=0, lt=2**53)] = None,
    include_obfuscation: Literal["false"] | None = None,
) -> Response:
    """Return a response as it is, or stream it from where the client is."""
    _check_query(request, "stream", "starting_after", "include_obfuscation")
    if not stream and (starting_after is not None or include_obfuscation is not None):
        raise InvalidParameterError("starting_after and include_obfuscation belong to stream=true.")
    stored = await find_response(session, user, response_id)
    if not stream:
        return JSONResponse(await _current(session, user, stored))
    events = stored_call(session, user, stored).events(-1 if starting_after is None else starting_after)
    return EventStream(events, is_typed=True)


@router.post("/v1/responses/{response_id}/cancel", response_class=Response, responses=JSON_OR_EVENTS)
async def cancel(*, user: Caller, session: Chats, response_id: str) -> Response:
    """Stop a response; its text so far stays. One that has ended is left as it is."""
    stored = await find_response(session, user, response_id)
    if stored.run is not None:
        await session.cancel_run(user, stored.run.id)
    return JSONResponse(await stored_call(session, user, stored).whole())


@router.delete("/v1/responses/{response_id}")
async def delete(*, user: Caller, session: Chats, response_id: str) -> dict[str, str | bool]:
    """Hide a response with what it asked and what follows it; on the page this can be undone."""
    stored = await find_response(session, user, response_id)
    await delete_response(session, user, stored)
    return {"id": stored.id, "object": "response", "deleted": True}


@router.get("/v1/responses/{response_id}/input_items", response_class=Response, responses=JSON_OR_EVENTS)
async def list_input_items(
    *,
    request: Request,
    user: Caller,
    session: Chats,
    response_id: str,
    limit: Annotated[int, Query(ge=1, le=MAX_ITEMS)] = 20,
    order: Literal["asc", "desc"] = "desc",
    after: str | None = None,
) -> Response:
    """List the messages that a response answered, those of earlier responses included."""
    _check_query(request, "limit", "order", "after")
    items = [input_item(node) for node in (await find_response(session, user, response_id)).items]
    if order == "desc":
        items.reverse()
    if after is not None:
        start = next((i + 1 for i, item in enumerate(items) if item["id"] == after), None)
        if start is None:
            raise InvalidParameterError(f"after is {after[:200]!r}, which is no item of this response.")
        items = items[start:]
    shown = items[:limit]
    return JSONResponse(
        {
            "object": "list",
            "data": shown,
            "first_id": shown[0]["id"] if shown else None,
            "last_id": shown[-1]["id"] if shown else None,
            "has_more": len(items) > len(shown),
        }
    )


async def _current(session: Session, user_id: UserId, stored: Stored) -> Json:
    """Return a response as it is at this moment; one that is being written has no output yet."""
    if stored.run is not None and stored.run.status is RunStatus.RUNNING:
        return stored.head(session).view(ReplyState())
    return await stored_call(session, user_id, stored).whole()


def _check_query(request: Request, *known: str) -> None:
    """Raises `InvalidParameterError` for a query that would be passed over."""
    if unknown := sorted(set(request.query_params) - set(known)):
        raise InvalidParameterError(f"The query parameter {unknown[0][:100]!r} is not supported.")
