"""Requests that no conversation keeps: prompts go straight to the engine.

Invariants: such a request counts among the runs of its user from its beginning to its end; whoever stops reading, at whatever
stage, stops it, and its blocks are given back within a step.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

from chatpage.engine.client import EngineClient
from chatpage.errors import ChatpageError, EngineDeadError, EngineStepError, RestartingError
from chatpage.events import (
    Event,
    FinishReason,
    RequestFailed,
    RequestFinished,
    SampleFinished,
    TokenDelta,
    TokenLogprob,
)
from chatpage.sampling_params import SamplingParams
from chatpage.session import Session
from chatpage.store import UserId

Tagged = tuple[int, Event]  # number of the prompt, and an event of it


class GenerationError(ChatpageError):
    """A request was accepted and then failed in the engine."""

    code = EngineStepError.code


async def generate(
    session: Session,
    user_id: UserId,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams | None = None,
    *,
    prefill_only: bool = False,
) -> AsyncGenerator[Tagged, None]:
    """Yield the events of one or more prompts of one request.

    Raises:
        OverloadedError: The user has too much going on.
        RestartingError: The server is ending, before it began or meanwhile.
        InvalidRequestError: The engine does not accept a prompt or the parameters.
        EngineDeadError: The engine is gone.
        GenerationError: It failed on the way.
    """
    ticket = session.admission.enter(user_id)
    try:
        await ticket.wait()
        streams = [_stream(session.engine, user_id, prompt, params, prefill_only=prefill_only) for prompt in prompts]
        async with contextlib.aclosing(_merged(streams, session.admission.wait_until_closed())) as events:
            async for tagged in events:
                _check(tagged[1])
                yield tagged
    finally:
        ticket.leave()


async def _stream(
    engine: EngineClient, user_id: UserId, prompt: Sequence[int], params: SamplingParams | None, *, prefill_only: bool
) -> AsyncGenerator[Event, None]:
    request_id = await engine.add_request(prompt, params, cache_salt=user_id, prefill_only=prefill_only)
    async with contextlib.aclosing(engine.stream(request_id)) as events:
        async for event in events:
            yield event


async def _merged(
    streams: Sequence[AsyncGenerator[Event, None]], end: Coroutine[Any, Any, None]
) -> AsyncGenerator[Tagged, None]:
    """Yield from all streams as events come; closing it closes them, and so does `end` when it returns."""
    ending = asyncio.ensure_future(end)
    waiting = {asyncio.ensure_future(_next(stream)): number for number, stream in enumerate(streams)}
    try:
        while waiting:
            done, _ = await asyncio.wait({*waiting, ending}, return_when=asyncio.FIRST_COMPLETED)
            if ending in done:
                raise RestartingError("The server is restarting; what it did not write any more can be asked for again.")
            for task in done:
                number, event = waiting.pop(task), task.result()
                if event is not None:
                    waiting[asyncio.ensure_future(_next(streams[number]))] = number
                    yield number, event
    finally:
        for task in (ending, *waiting):
            task.cancel()
        await asyncio.gather(ending, *waiting, return_exceptions=True)
        for stream in streams:
            await stream.aclose()


async def _next(stream: AsyncGenerator[Event, None]) -> Event | None:
    return await anext(stream, None)


@dataclass(slots=True)
class Tally:
    """The token counts of a request, over its prompts; each prompt counts once, however many samples it has."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0

    def add(self, event: Event) -> None:
        match event:
            case RequestFinished(usage=usage):
                self.prompt_tokens += usage.prompt_tokens
                self.cached_tokens += usage.cached_tokens
                self.completion_tokens += usage.completion_tokens

    def view(self) -> dict[str, object]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


@dataclass(slots=True)
class Gathered:
    """All of one sample, for answers that are sent as a whole."""

    parts: list[str] = field(default_factory=list)
    tokens: list[TokenLogprob] = field(default_factory=list)
    finished: SampleFinished | None = None

    def add(self, event: TokenDelta | SampleFinished) -> None:
        if isinstance(event, SampleFinished):
            self.finished = event
        else:
            self.parts.append(event.text)
            self.tokens += event.logprobs

    @property
    def text(self) -> str:
        return "".join(self.parts)


def _check(event: Event) -> None:
    match event:
        case RequestFailed(code=EngineDeadError.code):
            raise EngineDeadError(event.message)
        case RequestFailed():
            raise GenerationError(event.message)
        case SampleFinished(finish_reason=FinishReason.ERROR | FinishReason.ABORT):
            raise GenerationError(event.detail or "The request was stopped by the server.")
