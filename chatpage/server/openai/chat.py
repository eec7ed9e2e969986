"""`/v1/chat/completions`.

Invariant: the prompt is the one that `render_prompt` makes of the messages, with the tokens of replies that are remembered, so
that the next turn of a conversation finds all of the turn before.
"""

import contextlib
import secrets
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import Response

from chatpage.chat_template import PLAIN_STOP
from chatpage.errors import InvalidParameterError
from chatpage.events import FinishReason, RequestStarted, SampleFinished, TokenDelta
from chatpage.prompt import Message, render_prompt
from chatpage.sampling_params import MAX_LOGPROBS, SamplingParams
from chatpage.server.openai.access import Caller, check_model, signature
from chatpage.server.openai.answers import JSON_OR_EVENTS, EventStream, Json, WholeAnswer
from chatpage.server.openai.common import (
    NOTHING,
    ChatMessage,
    ModelName,
    OpenAIModel,
    SamplingBody,
    StreamOptions,
    Variables,
    body_reader,
)
from chatpage.server.openai.generation import Gathered, Tally, generate
from chatpage.server.openai.replies import ReplyMemory
from chatpage.server.openai.token_texts import TokenTexts, token_texts
from chatpage.server.openai.variables import check_variables
from chatpage.server.rest import Chats
from chatpage.session import Session
from chatpage.store import UserId

router = APIRouter(tags=["openai"])


class ResponseFormat(OpenAIModel):
    """Text; schemas and grammars are not supported."""

    type: Literal["text"]


class ChatBody(SamplingBody):
    """A request for a reply to messages."""

    asks_nothing: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **dict.fromkeys(("tools", "functions", "audio", "prediction", "web_search_options", "moderation"), NOTHING),
        **dict.fromkeys(("function_call", "reasoning_effort", "verbosity", "user", "safety_identifier"), (None,)),
        **dict.fromkeys(("prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"), (None,)),
        "metadata": NOTHING,
        "tool_choice": (None, "none", "auto"),
        "parallel_tool_calls": (None, True, False),
        "modalities": (None, ["text"]),
        "service_tier": (None, "auto", "default"),
        "store": (None, False),
    }
    reasons: ClassVar[Mapping[str, str]] = {
        "store": "chat completions are never stored; use /v1/responses",
        "metadata": "chat completions are never stored; use /v1/responses",
    }
    nested: ClassVar[Mapping[str, type[OpenAIModel]]] = {
        "messages": ChatMessage,
        "stream_options": StreamOptions,
        "response_format": ResponseFormat,
    }
    model: ModelName
    messages: Annotated[tuple[ChatMessage, ...], Field(min_length=1, max_length=10_000)]
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    max_completion_tokens: int | None = Field(default=None, ge=1, lt=2**31)
    response_format: ResponseFormat | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: Variables | None = Field(default=None, max_length=16)

    def check(self) -> None:
        """Raises `InvalidParameterError` for parameters that do not fit each other."""
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidParameterError("top_logprobs needs logprobs to be true.")
        if self.stream_options is not None and not self.stream:
            raise InvalidParameterError("stream_options needs stream to be true.")
        limits = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(limits) > 1:
            raise InvalidParameterError("max_tokens and max_completion_tokens differ: send one of them.")
        if self.continue_final_message and self.add_generation_prompt in (None, True):
            raise InvalidParameterError("continue_final_message needs add_generation_prompt to be false.")
        if self.continue_final_message and self.messages[-1].role != "assistant":
            raise InvalidParameterError("continue_final_message needs a last message of the assistant.")

    def sampling_params(self, session: Session) -> SamplingParams:
        has_template = bool(session.tokenizer.chat_template)
        return self.sampling(
            session.limits,
            logprobs=(self.top_logprobs or 0) if self.logprobs else None,
            max_tokens=self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens,
            stop=() if has_template else PLAIN_STOP,
        )


@dataclass(frozen=True, slots=True)
class ChatCall:
    """One request that was read, and what it needs to be answered."""

    session: Session
    user_id: UserId
    body: ChatBody
    replies: ReplyMemory
    id: str
    created: int

    @property
    def texts(self) -> TokenTexts:
        return token_texts(self.session.tokenizer)

    def head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, **signature(self.session)}

    async def whole(self) -> Json:
        messages, token_ids = await self._render()
        tally = Tally()
        samples = [Gathered() for _ in range(self.body.n or 1)]
        events = generate(self.session, self.user_id, [token_ids], self.body.sampling_params(self.session))
        async with contextlib.aclosing(events):
            async for _, event in events:
                tally.add(event)
                if isinstance(event, TokenDelta | SampleFinished):
                    samples[event.sample].add(event)
                if isinstance(event, SampleFinished):
                    self._remember(messages, event)
        choices = [self._choice(index, sample) for index, sample in enumerate(samples)]
        return {**self.head("chat.completion"), "choices": choices, "usage": tally.view()}

    async def chunks(self) -> AsyncGenerator[Json, None]:
        messages, token_ids = await self._render()
        tally = Tally()
        options = self.body.stream_options
        usage = {"usage": None} if options is not None and options.include_usage else {}
        head = {**self.head("chat.completion.chunk"), **usage}
        events = generate(self.session, self.user_id, [token_ids], self.body.sampling_params(self.session))
        async with contextlib.aclosing(events):
            async for _, event in events:
                tally.add(event)
                match event:
                    case RequestStarted():
                        for index in range(self.body.n or 1):
                            yield {**head, "choices": [_delta(index, {"role": "assistant", "content": ""})]}
                    case TokenDelta(sample=index, text=text, logprobs=tokens) if text or tokens:
                        logprobs = {"content": self.texts.chat_view(tokens), "refusal": None} if tokens else None
                        yield {**head, "choices": [_delta(index, {"content": text}, logprobs=logprobs)]}
                    case SampleFinished(sample=index):
                        self._remember(messages, event)
                        yield {**head, "choices": [_delta(index, {}, finished=event)]}
        if usage:
            yield {**head, "choices": [], "usage": tally.view()}

    async def _render(self) -> tuple[list[Message], Sequence[int]]:
        body = self.body
        messages = [message.message() for message in body.messages]
        variables = body.chat_template_kwargs or {}
        check_variables(variables)
        is_open = bool(body.continue_final_message)
        add_generation_prompt = body.add_generation_prompt is not False and not is_open
        recalled = self.replies.recall(self.user_id, messages)
        prompt = await self.session.prompts.run(
            lambda tokenizer: render_prompt(
                tokenizer,
                recalled,
                add_generation_prompt=add_generation_prompt,
                continue_final=is_open,
                template_variables=variables,
            )
        )
        return messages, prompt.token_ids

    def _remember(self, messages: Sequence[Message], finished: SampleFinished) -> None:
        if not self.body.continue_final_message and self.body.add_generation_prompt is not False:
            self.replies.keep(self.user_id, messages, finished)

    def _choice(self, index: int, sample: Gathered) -> Json:
        assert sample.finished is not None
        logprobs = {"content": self.texts.chat_view(sample.tokens), "refusal": None} if self.body.logprobs else None
        return {
            "index": index,
            "message": {"role": "assistant", "content": sample.text, "refusal": None, "annotations": []},
            "logprobs": logprobs,
            **ending(sample.finished),
        }


@router.post("/v1/chat/completions", response_class=Response, responses=JSON_OR_EVENTS)
async def create_chat_completion(
    *, request: Request, user: Caller, session: Chats, body: Annotated[ChatBody, body_reader(ChatBody)]
) -> Response:
    """Answer messages; nothing is stored."""
    body.check()
    check_model(session, body.model)
    call = ChatCall(
        session, user, body, request.app.state.replies, id=f"chatcmpl-{secrets.token_hex(16)}", created=int(time.time())
    )
    return EventStream(call.chunks()) if body.stream else WholeAnswer(call.whole)


def ending(finished: SampleFinished) -> dict[str, Any]:
    """Return how a choice ended; `stop_reason` as vLLM has it: the stop string, if one matched."""
    reason = "length" if finished.finish_reason is FinishReason.LENGTH else "stop"
    return {"finish_reason": reason, "stop_reason": finished.stop if isinstance(finished.stop, str) else None}


def _delta(index: int, delta: Json, *, logprobs: Json | None = None, finished: SampleFinished | None = None) -> dict[str, Any]:
    end = {"finish_reason": None} if finished is None else ending(finished)
    return {"index": index, "delta": delta, "logprobs": logprobs, **end}
