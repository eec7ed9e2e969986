"""Responses that are kept: a chain of them is a conversation, and a response is a run of it.

Invariants: all there is to know of a response stands in the store, so its id means the same after a restart; going on from a
response is a fork at its reply, and with the same instructions shares all of its prefix.

    resp_<run>                      the reply that a run wrote
    resp_<conversation>_<message>   a prompt that was computed without a reply (`generate: false`)

    system (instructions) ── user ── reply 1 ── user ── reply 2        the same instructions: below the reply
    └ system (others) ── user' ── reply 1' ── user ── reply 3          others: the path again, below other instructions
"""

import contextlib
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from chatpage.errors import ChatpageError, InvalidRequestError, NotFoundError
from chatpage.events import FinishReason
from chatpage.server.openai.response_bodies import ResponseBody
from chatpage.server.openai.response_objects import (
    CANCELLED,
    COMPLETED,
    FAILED,
    IN_PROGRESS,
    INCOMPLETE,
    ReplyState,
    ResponseHead,
    TokenUsage,
    item_id,
)
from chatpage.server.openai.token_texts import token_texts
from chatpage.server.protocol import RunDelta, RunDone, RunMessage, RunSnapshot, SampleDone
from chatpage.server.views import RunRequest, UsageView
from chatpage.session import Session
from chatpage.session.running import title_of
from chatpage.store import ConversationId, NewNode, Node, NodeId, Role, Run, RunId, RunKind, RunStatus, UserId

ID_PREFIX = "resp_"
ECHO, NUM_ASKED = "response", "response_num_asked"  # in the extra of the last message that a request added
INSTRUCTIONS = "instructions"  # in the extra of a system prompt
INTERRUPTED = "The server was stopped while it wrote this; the text so far is kept, and can be continued on the page."


class PreviousNotFoundError(InvalidRequestError):
    """The response to go on from is not there."""

    code = "previous_response_not_found"
    param = "previous_response_id"


class ResponseNotFoundError(NotFoundError):
    """There is no such response, or its conversation does not have it any more."""

    code = "response_not_found"


@dataclass(frozen=True, slots=True)
class Stored:
    """A response as the store has it. `run` None: a prompt that was computed without a reply."""

    conversation_id: ConversationId
    path: tuple[Node, ...]  # up to the last message that was asked
    run: Run | None

    @property
    def id(self) -> str:
        if self.run is not None:
            return f"{ID_PREFIX}{self.run.id}"
        return f"{ID_PREFIX}{self.conversation_id}_{self.path[-1].id}"

    @property
    def reply_id(self) -> NodeId | None:
        return None if self.run is None else self.run.samples[0].node_id

    @property
    def items(self) -> tuple[Node, ...]:
        """The messages of its prompt, without the instructions."""
        return without_instructions(self.path)

    def head(self, session: Session) -> ResponseHead:
        asked = self.path[-1]
        created_at = asked.created_at if self.run is None else self.run.created_at
        reply_id = self.reply_id
        return ResponseHead(
            id=self.id,
            created_at=created_at // 1_000_000,
            model=asked.extra[ECHO]["model"],
            echo={name: value for name, value in asked.extra[ECHO].items() if name != "model"},
            item_id=None if reply_id is None else item_id(reply_id),
            texts=token_texts(session.tokenizer),
        )


async def find_response(session: Session, user_id: UserId, response_id: str) -> Stored:
    """Return a response of the user.

    Raises:
        ResponseNotFoundError: There is none.
    """
    store = session.store
    first, _, node = response_id.removeprefix(ID_PREFIX).partition("_")
    try:
        if not response_id.startswith(ID_PREFIX):
            raise NotFoundError("not an id of ours")
        run = None if node else await store.get_run.aio(user_id, RunId(first))
        conversation_id = ConversationId(first) if run is None else run.conversation_id
        path = await store.get_path.aio(user_id, conversation_id, leaf_id=NodeId(node) if run is None else run.parent_id)
        if not path or ECHO not in path[-1].extra or (run is not None and len(run.samples) != 1):
            raise NotFoundError("not made by a request for a response")
        if run is not None:
            await _check_not_deleted(session, user_id, run)
    except NotFoundError as error:
        raise ResponseNotFoundError(f"There is no response {response_id[:200]!r}.") from error
    return Stored(conversation_id, path, run)


async def _check_not_deleted(session: Session, user_id: UserId, run: Run) -> None:
    """Raises `NotFoundError` if the reply was deleted; one that failed before it said anything was never kept."""
    node_id = run.samples[0].node_id
    try:
        await session.store.get_node.aio(user_id, run.conversation_id, node_id)
    except NotFoundError:
        return
    await session.store.get_path.aio(user_id, run.conversation_id, leaf_id=node_id)


async def find_previous(session: Session, user_id: UserId, response_id: str) -> tuple[ConversationId, tuple[Node, ...]]:
    """Return the conversation of a response, and the path to its reply, which is whole.

    Raises:
        PreviousNotFoundError: There is no such response, or it has no reply.
    """
    try:
        stored = await find_response(session, user_id, response_id)
        if stored.run is None:
            return stored.conversation_id, stored.path
        if stored.run.status is RunStatus.RUNNING:
            async for _ in session.follow(user_id, stored.run.id):
                pass
        path = await session.store.get_path.aio(user_id, stored.conversation_id, leaf_id=stored.reply_id)
    except NotFoundError as error:
        raise PreviousNotFoundError(f"Previous response with id {response_id[:200]!r} not found.") from error
    return stored.conversation_id, path


async def create_response(session: Session, user_id: UserId, body: ResponseBody) -> Stored:
    """Start a response and return once it is stored. Raises as `Session.create_run`, and `PreviousNotFoundError`."""
    return await session.unbroken(_create_response(session, user_id, body))


async def _create_response(session: Session, user_id: UserId, body: ResponseBody) -> Stored:
    conversation_id, parent_id, news = await place(session, user_id, body)
    is_new = conversation_id is None
    conversation_id = conversation_id or await new_conversation(session, user_id, news)
    request = RunRequest.model_construct(
        conversation_id=conversation_id, parent_id=parent_id, kind=RunKind.REPLY, params=body.run_params()
    )
    try:
        created = await session.create_run(user_id, request, news=news)
    except ChatpageError:
        if is_new:  # nobody asked for a conversation
            await session.store.discard_empty_conversation.aio(user_id, conversation_id)
        raise
    return await find_response(session, user_id, f"{ID_PREFIX}{created.run_id}")


async def new_conversation(session: Session, user_id: UserId, news: Sequence[NewNode]) -> ConversationId:
    """Make a conversation for messages, named after the first of the user."""
    title = next((title_of(new.text) for new in news if new.role is Role.USER), "")
    return (await session.create_conversation(user_id, title=title)).id


async def place(
    session: Session, user_id: UserId, body: ResponseBody
) -> tuple[ConversationId | None, NodeId | None, list[NewNode]]:
    """Return where the messages of a request belong, and all that must be added there."""
    conversation_id: ConversationId | None = None
    path: tuple[Node, ...] = ()
    if body.previous_response_id is not None:
        conversation_id, path = await find_previous(session, user_id, body.previous_response_id)
    news = body.messages()
    parent_id: NodeId | None = path[-1].id if path else None
    if instructions_of(path) != (body.instructions or None) or not path:
        news = [*instruct(body.instructions), *map(_copy, without_instructions(path)), *news]
        parent_id = None
    if not news:
        raise InvalidRequestError("There is nothing new to compute: send an input.")
    asked = {ECHO: body.echo() | {"model": session.engine.info.model}, NUM_ASKED: max(1, len(body.messages()))}
    news[-1] = replace(news[-1], extra={**news[-1].extra, **asked})
    return conversation_id, parent_id, news


def instruct(instructions: str | None) -> list[NewNode]:
    """Return instructions as the message that they are to the model."""
    return [NewNode(role=Role.SYSTEM, text=instructions, extra={INSTRUCTIONS: True})] if instructions else []


def instructions_of(path: Sequence[Node]) -> str | None:
    return path[0].text if path and path[0].extra.get(INSTRUCTIONS) else None


def without_instructions(path: tuple[Node, ...]) -> tuple[Node, ...]:
    return path[1:] if instructions_of(path) is not None else path


def _copy(node: Node) -> NewNode:
    return NewNode(role=node.role, text=node.text, token_ids=node.token_ids, model=node.model, finish_reason=node.finish_reason)


async def stored_states(session: Session, user_id: UserId, stored: Stored) -> AsyncGenerator[ReplyState, None]:
    """Yield a response as it grows, from wherever it is now."""
    if stored.run is None:
        yield ReplyState(COMPLETED, completed_at=float(stored.path[-1].created_at // 1_000_000))
        return
    state, finish_reason = ReplyState(), ""
    async with contextlib.aclosing(session.follow(user_id, stored.run.id)) as messages:
        async for message in messages:
            finish_reason = _finish_reason(message) or finish_reason
            state = _grown(state, message, finish_reason)
            if isinstance(message, RunDone):
                state = replace(state, completed_at=await _completed_at(session, user_id, stored.run.id))
            yield state


def _grown(state: ReplyState, message: RunMessage, finish_reason: str) -> ReplyState:
    match message:
        case RunSnapshot():
            return replace(state, text=message.samples[0].text)
        case RunDelta():
            return replace(state, text=state.text + "".join(entry[1] for entry in message.d))
        case RunDone():
            error = None if message.error is None else message.error.message
            status = _status(message.status, finish_reason)
            if status == FAILED and error is None:
                error = INTERRUPTED
            return replace(state, status=status, usage=_usage(message.usage), error=error)
    return state


def _finish_reason(message: RunMessage) -> str | None:
    match message:
        case RunSnapshot():
            return message.samples[0].finish_reason
        case SampleDone():
            return message.finish_reason
    return None


def _status(status: RunStatus, finish_reason: str) -> str:
    match status:
        case RunStatus.COMPLETE:
            return INCOMPLETE if finish_reason == FinishReason.LENGTH else COMPLETED
        case RunStatus.ABORTED:
            return CANCELLED
        case RunStatus.RUNNING:
            return IN_PROGRESS
    return FAILED


def _usage(usage: UsageView | None) -> TokenUsage | None:
    if usage is None:
        return None
    return TokenUsage(usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens)


async def _completed_at(session: Session, user_id: UserId, run_id: RunId) -> float | None:
    finished_at = (await session.store.get_run.aio(user_id, run_id)).finished_at
    return None if finished_at is None else float(finished_at // 1_000_000)


async def delete_response(session: Session, user_id: UserId, stored: Stored) -> None:
    """Hide what a response asked, its reply, and what follows it; a conversation that is empty then, too."""
    first = stored.path[-stored.path[-1].extra[NUM_ASKED]]
    await session.delete_node(user_id, stored.conversation_id, first.id)
    tree = await session.tree(user_id, stored.conversation_id)
    reset: Any = tree.ops[0]
    if all(node.role is Role.SYSTEM for node in reset.nodes):
        await session.delete_conversation(user_id, stored.conversation_id)
