"""What a request for a response comes to, over HTTP and over the socket alike: a head, and states that follow.

Invariant: whatever can be refused is refused before the first state is yielded; a stored response goes on without its reader,
one that is not stored ends with him.
"""

import contextlib
import secrets
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from chatpage.chat_template import PLAIN_STOP
from chatpage.errors import ChatpageError
from chatpage.events import FinishReason, RequestFinished, RequestStarted, SampleFinished, TokenDelta, TokenLogprob
from chatpage.prompt import Message
from chatpage.server.openai.access import check_model
from chatpage.server.openai.generation import generate
from chatpage.server.openai.replies import ReplyMemory
from chatpage.server.openai.response_bodies import ResponseBody
from chatpage.server.openai.response_events import response_events
from chatpage.server.openai.response_objects import (
    COMPLETED,
    FAILED,
    INCOMPLETE,
    Json,
    ReplyState,
    ResponseHead,
    TokenUsage,
    item_id,
)
from chatpage.server.openai.response_store import (
    ID_PREFIX,
    PreviousNotFoundError,
    Stored,
    create_response,
    find_previous,
    instruct,
    new_conversation,
    place,
    stored_states,
    without_instructions,
)
from chatpage.server.openai.token_texts import token_texts
from chatpage.server.views import RunRequest
from chatpage.session import Session
from chatpage.session.paths import unsaved
from chatpage.session.prompts import Target
from chatpage.store import NewNode, Node, Role, RunKind, UserId

KEPT_CHAINS = 64


@dataclass(slots=True)
class Chains:
    """Responses that are not stored, and that a socket can still go on from; gone when it closes."""

    paths: OrderedDict[str, tuple[Node, ...]] = field(default_factory=OrderedDict)

    def keep(self, response_id: str, path: tuple[Node, ...]) -> None:
        self.paths[response_id] = path
        while len(self.paths) > KEPT_CHAINS:
            self.paths.popitem(last=False)


@dataclass(frozen=True, slots=True)
class Call:
    """A response that was accepted, and how it grows."""

    head: ResponseHead
    states: AsyncGenerator[ReplyState, None]

    def events(self, starting_after: int = -1) -> AsyncGenerator[dict[str, Any], None]:
        return _guarded(self.head, response_events(self.head, self.states, starting_after))

    async def whole(self) -> Json:
        last = ReplyState()
        async with contextlib.aclosing(self.states) as states:
            async for state in states:
                last = state
        return self.head.view(last)


@dataclass(frozen=True, slots=True)
class Visitor:
    """Who asks, and what is known of what he was told. `chains` None: by HTTP, where nothing but the store is remembered."""

    session: Session
    user_id: UserId
    replies: ReplyMemory
    chains: Chains | None = None


async def call(visitor: Visitor, body: ResponseBody) -> Call:
    """Accept a request for a response.

    Raises:
        InvalidRequestError: Parameters do not fit each other, or the prompt is impossible.
        PreviousNotFoundError, OverloadedError, EngineDeadError: As they say.
    """
    session, user_id, chains = visitor.session, visitor.user_id, visitor.chains
    body.check()
    check_model(session, body.model)
    is_local = chains is not None and body.previous_response_id in chains.paths
    if is_local and body.is_stored:
        raise PreviousNotFoundError(
            f"The response {body.previous_response_id!r} was not stored: go on from it with store: false."
        )
    if not body.is_stored:
        return await _unstored(visitor, body)
    if body.generate is False:
        return await _warmed(session, user_id, body)
    return stored_call(session, user_id, await create_response(session, user_id, body))


def stored_call(session: Session, user_id: UserId, stored: Stored) -> Call:
    """Return a response of the store as a call that goes on."""
    return Call(stored.head(session), stored_states(session, user_id, stored))


# -- computed, not answered ----------------------------------------------------------------------------------------------


async def _warmed(session: Session, user_id: UserId, body: ResponseBody) -> Call:
    """Compute a prompt, keep its messages, and answer nothing."""
    conversation_id, parent_id, news = await place(session, user_id, body)
    above: tuple[Node, ...] = ()
    if conversation_id is not None and parent_id is not None:
        above = await session.store.get_path.aio(user_id, conversation_id, leaf_id=parent_id)
    usage = await _prefill(session, user_id, (*above, *map(unsaved, news)))

    async def keep() -> Stored:
        where = conversation_id or await new_conversation(session, user_id, news)
        return Stored(where, (*above, *await session.add_messages(user_id, where, parent_id, news)), None)

    head = (await session.unbroken(keep())).head(session)
    return Call(head, _at_once(ReplyState(COMPLETED, usage=usage, completed_at=head.created_at)))


async def _prefill(session: Session, user_id: UserId, path: tuple[Node, ...]) -> TokenUsage:
    rendered = await session.prompts.render(Target(path, None), None, {}, add_generation_prompt=False)
    usage = TokenUsage(len(rendered.prompt.token_ids), 0, 0)
    async with contextlib.aclosing(generate(session, user_id, [rendered.prompt.token_ids], prefill_only=True)) as events:
        async for _, event in events:
            if isinstance(event, RequestFinished):
                usage = TokenUsage(event.usage.prompt_tokens, event.usage.cached_tokens, 0)
    return usage


async def _at_once(state: ReplyState) -> AsyncGenerator[ReplyState, None]:
    yield state


# -- not stored ----------------------------------------------------------------------------------------------------------


async def _unstored(visitor: Visitor, body: ResponseBody) -> Call:
    session, user_id, chains = visitor.session, visitor.user_id, visitor.chains
    history: tuple[Node, ...] = ()
    if body.previous_response_id is not None:
        known = None if chains is None else chains.paths.get(body.previous_response_id)
        history = known or (await find_previous(session, user_id, body.previous_response_id))[1]
    path = _recall(
        visitor,
        (*map(unsaved, instruct(body.instructions)), *without_instructions(history), *map(unsaved, body.messages())),
    )
    response_id, model = f"{ID_PREFIX}{secrets.token_hex(16)}", session.engine.info.model
    is_warming = body.generate is False
    head = ResponseHead(
        id=response_id,
        created_at=float(int(time.time())),
        model=model,
        echo=body.echo(),
        item_id=None if is_warming else item_id(secrets.token_hex(16)),
        texts=token_texts(session.tokenizer),
    )

    def keep(reply: NewNode | None) -> None:
        if chains is not None:
            chains.keep(response_id, path if reply is None else (*path, unsaved(reply)))

    if is_warming:
        usage = await _prefill(session, user_id, path)
        keep(None)
        return Call(head, _at_once(ReplyState(COMPLETED, usage=usage, completed_at=head.created_at)))
    return Call(head, _generated(visitor, body, path, keep))


def _recall(visitor: Visitor, path: tuple[Node, ...]) -> tuple[Node, ...]:
    """Return the path, with the tokens of replies that the client sent back as text, where they are remembered."""
    model = visitor.session.engine.info.model
    known = visitor.replies.recall(visitor.user_id, _messages(path))
    return tuple(
        node if node.num_tokens or message.token_ids is None else unsaved(_reply(message.content, message.token_ids, model))
        for node, message in zip(path, known, strict=True)
    )


def _messages(path: tuple[Node, ...]) -> list[Message]:
    return [Message(str(node.role), node.text) for node in path]


def _reply(text: str, token_ids: Sequence[int], model: str) -> NewNode:
    return NewNode(role=Role.ASSISTANT, text=text, token_ids=token_ids, model=model)


async def _generated(
    visitor: Visitor, body: ResponseBody, path: tuple[Node, ...], keep: Callable[[NewNode], None]
) -> AsyncGenerator[ReplyState, None]:
    """Yield a response as the engine writes it; `keep` is given the whole reply."""
    session, user_id = visitor.session, visitor.user_id
    params = body.sampling_params(session.limits, () if session.tokenizer.chat_template else PLAIN_STOP)
    target = session.prompts.find_target(RunRequest.model_construct(conversation_id="", kind=RunKind.REPLY), path)
    rendered = await session.prompts.render(target, None, {})
    text, tokens = "", list[TokenLogprob]()
    finished: SampleFinished | None = None
    async with contextlib.aclosing(generate(session, user_id, [rendered.prompt.token_ids], params)) as events:
        async for _, event in events:
            match event:
                case RequestStarted():
                    yield ReplyState()
                case TokenDelta():
                    text += event.text
                    tokens += event.logprobs
                    yield ReplyState(text=text, tokens=tokens)
                case SampleFinished():
                    finished = event
                    visitor.replies.keep(user_id, _messages(path), event)
                case RequestFinished(usage=usage):
                    assert finished is not None, "a sample ends before its request"
                    keep(_reply(text, finished.token_ids, session.engine.info.model))
                    yield ReplyState(
                        INCOMPLETE if finished.finish_reason is FinishReason.LENGTH else COMPLETED,
                        text,
                        tokens,
                        TokenUsage(usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens),
                        completed_at=float(int(time.time())),
                    )


async def _guarded(head: ResponseHead, events: AsyncGenerator[dict[str, Any], None]) -> AsyncGenerator[dict[str, Any], None]:
    """Yield the events; what goes wrong after the first is the end of the response, not of the connection."""
    number: int | None = None
    try:
        async with contextlib.aclosing(events):
            async for event in events:
                number = event["sequence_number"]
                yield event
    except ChatpageError as error:
        if number is None:
            raise
        failed = head.view(ReplyState(FAILED, error=str(error)))
        yield {"type": "response.failed", "sequence_number": number + 1, "response": failed}
