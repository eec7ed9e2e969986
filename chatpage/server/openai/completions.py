"""`/v1/completions`: text or token ids go on as they are, without a chat template.

Choices are numbered as OpenAI does: sample k of prompt i of a request for n samples is choice `i * n + k`.
"""

import contextlib
import secrets
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from fastapi import APIRouter
from pydantic import Field
from starlette.responses import Response

from chatpage.errors import InvalidParameterError
from chatpage.events import RequestStarted, SampleFinished, TokenDelta
from chatpage.sampling_params import MAX_LOGPROBS, MAX_SAMPLES, SamplingParams
from chatpage.server.openai.access import Caller, check_model, signature
from chatpage.server.openai.answers import JSON_OR_EVENTS, EventStream, Json, WholeAnswer
from chatpage.server.openai.chat import ending
from chatpage.server.openai.common import ModelName, OpenAIModel, SamplingBody, StreamOptions, body_reader
from chatpage.server.openai.generation import Gathered, Tally, generate
from chatpage.server.openai.token_texts import TokenTexts, token_texts
from chatpage.server.rest import Chats
from chatpage.server.views import Text, TokenId
from chatpage.session import Session
from chatpage.store import UserId

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

DEFAULT_MAX_TOKENS = 16  # as OpenAI and vLLM have it
TokenIds = Annotated[tuple[TokenId, ...], Field(min_length=1)]
Prompt = (
    Text | Annotated[tuple[Text, ...], Field(min_length=1)] | TokenIds | Annotated[tuple[TokenIds, ...], Field(min_length=1)]
)
router = APIRouter(tags=["openai"])


class CompletionBody(SamplingBody):
    """A request to go on with one or more prompts."""

    asks_nothing: ClassVar[Mapping[str, tuple[Any, ...]]] = {"best_of": (None, 1), "suffix": (None, ""), "user": (None,)}
    reasons: ClassVar[Mapping[str, str]] = {"best_of": "ask for n samples and choose", "suffix": "text is only continued"}
    nested: ClassVar[Mapping[str, type[OpenAIModel]]] = {"stream_options": StreamOptions}
    model: ModelName
    prompt: Prompt
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    echo: bool | None = None

    @property
    def prompts(self) -> Sequence[str | Sequence[int]]:
        if isinstance(self.prompt, str) or isinstance(self.prompt[0], int):
            return [self.prompt]
        return self.prompt

    def check(self) -> None:
        """Raises `InvalidParameterError` for parameters that do not fit each other."""
        if self.stream_options is not None and not self.stream:
            raise InvalidParameterError("stream_options needs stream to be true.")
        if self.echo and self.logprobs is not None:
            raise InvalidParameterError("echo gives the prompt without log probabilities: leave one of echo and logprobs out.")
        if (num_choices := len(self.prompts) * (self.n or 1)) > MAX_SAMPLES:
            raise InvalidParameterError(f"The request asks for {num_choices} choices; at most {MAX_SAMPLES} are allowed.")

    def sampling_params(self, session: Session) -> SamplingParams:
        limit = session.limits.max_tokens
        default = DEFAULT_MAX_TOKENS if limit is None else min(DEFAULT_MAX_TOKENS, limit)
        max_tokens = default if self.max_tokens is None else self.max_tokens
        return self.sampling(session.limits, logprobs=self.logprobs, max_tokens=max_tokens, stop=())


@dataclass(frozen=True, slots=True)
class CompletionCall:
    """One request that was read, and what it needs to be answered."""

    session: Session
    user_id: UserId
    body: CompletionBody
    id: str
    created: int

    @property
    def num_samples(self) -> int:
        return self.body.n or 1

    @property
    def texts(self) -> TokenTexts:
        return token_texts(self.session.tokenizer)

    @property
    def head(self) -> dict[str, Any]:
        return {"id": self.id, "object": "text_completion", "created": self.created, **signature(self.session)}

    async def whole(self) -> Json:
        token_ids, shown = await self._read_prompts()
        tally = Tally()
        samples = [Gathered() for _ in range(len(token_ids) * self.num_samples)]
        events = generate(self.session, self.user_id, token_ids, self.body.sampling_params(self.session))
        async with contextlib.aclosing(events):
            async for number, event in events:
                tally.add(event)
                if isinstance(event, TokenDelta | SampleFinished):
                    samples[number * self.num_samples + event.sample].add(event)
        choices = [self._choice(index, sample, shown[index // self.num_samples]) for index, sample in enumerate(samples)]
        return {**self.head, "choices": choices, "usage": tally.view()}

    async def chunks(self) -> AsyncGenerator[Json, None]:
        token_ids, shown = await self._read_prompts()
        tally, n = Tally(), self.num_samples
        offsets = [0] * (len(token_ids) * n)  # characters of tokens sent, per choice
        options = self.body.stream_options
        usage = {"usage": None} if options is not None and options.include_usage else {}
        head = {**self.head, **usage}
        events = generate(self.session, self.user_id, token_ids, self.body.sampling_params(self.session))
        async with contextlib.aclosing(events):
            async for number, event in events:
                tally.add(event)
                match event:
                    case RequestStarted():  # with an empty text too: the client sees that the prompt is being computed
                        for index in range(number * n, (number + 1) * n):
                            yield {**head, "choices": [_chunk(index, shown[number])]}
                    case TokenDelta(text=text, logprobs=tokens) if text or tokens:
                        index = number * n + event.sample
                        logprobs = self.texts.completion_view(tokens, offsets[index]) if tokens else None
                        offsets[index] += sum(len(self.texts.text_of(token.token_id)) for token in tokens)
                        yield {**head, "choices": [_chunk(index, text, logprobs=logprobs)]}
                    case SampleFinished(sample=sample):
                        yield {**head, "choices": [_chunk(number * n + sample, "", finished=event)]}
        if usage:
            yield {**head, "choices": [], "usage": tally.view()}

    async def _read_prompts(self) -> tuple[list[Sequence[int]], list[str]]:
        """Return the tokens of each prompt, and of each what is shown of it."""

        def read(tokenizer: "PreTrainedTokenizerBase") -> tuple[list[Sequence[int]], list[str]]:
            token_ids: list[Sequence[int]] = []
            shown = []
            for prompt in self.body.prompts:
                ids = tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
                text = prompt if isinstance(prompt, str) else tokenizer.decode(ids)
                token_ids.append(ids)
                shown.append(str(text) if self.body.echo else "")
            return token_ids, shown

        return await self.session.prompts.run(read)

    def _choice(self, index: int, sample: Gathered, shown: str) -> Json:
        assert sample.finished is not None
        logprobs = None if self.body.logprobs is None else self.texts.completion_view(sample.tokens, 0)
        return {"index": index, "text": shown + sample.text, "logprobs": logprobs, **ending(sample.finished)}


@router.post("/v1/completions", response_class=Response, responses=JSON_OR_EVENTS)
async def create_completion(
    *, user: Caller, session: Chats, body: Annotated[CompletionBody, body_reader(CompletionBody)]
) -> Response:
    """Go on with prompts; nothing is stored."""
    body.check()
    check_model(session, body.model)
    call = CompletionCall(session, user, body, id=f"cmpl-{secrets.token_hex(16)}", created=int(time.time()))
    return EventStream(call.chunks()) if body.stream else WholeAnswer(call.whole)


def _chunk(index: int, text: str, *, logprobs: Json | None = None, finished: SampleFinished | None = None) -> dict[str, Any]:
    end = {"finish_reason": None} if finished is None else ending(finished)
    return {"index": index, "text": text, "logprobs": logprobs, **end}
