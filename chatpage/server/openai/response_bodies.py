"""What a request for a response carries."""

import secrets
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, StringConstraints

from chatpage.errors import InvalidParameterError
from chatpage.sampling_params import MAX_LOGPROBS, SamplingParams
from chatpage.server.openai.common import (
    NOTHING,
    Content,
    ModelName,
    OpenAIModel,
    RequestRole,
    as_role,
)
from chatpage.server.views import Id, RunParams, SamplingFields, Text
from chatpage.session.limits import MAX_DRAWN_SEED, SessionLimits
from chatpage.store import NewNode, Role

Json = dict[str, Any]
LOGPROBS = "message.output_text.logprobs"
ECHOED = (
    *("instructions", "max_output_tokens", "previous_response_id", "prompt_cache_key", "safety_identifier", "user"),
    *("metadata", "background", "store", "temperature", "top_p", "top_logprobs"),
)
Label = Annotated[str, StringConstraints(max_length=512)]


class InputMessage(OpenAIModel):
    """A message; an item of an earlier response can be sent as it was received, with its id and status."""

    asks_nothing: ClassVar[Mapping[str, tuple[Any, ...]]] = {"phase": (None,)}
    type: Literal["message"] | None = None
    role: RequestRole
    content: Content
    id: Id | None = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None

    def node(self) -> NewNode:
        return NewNode(role=Role(as_role(self.role)), text=self.content)


class TextFormat(OpenAIModel):
    """Text; schemas and grammars are not supported."""

    type: Literal["text"]


class TextOptions(OpenAIModel):
    """What kind of text is wanted."""

    asks_nothing: ClassVar[Mapping[str, tuple[Any, ...]]] = {"verbosity": (None, "medium")}
    nested: ClassVar[Mapping[str, type[OpenAIModel]]] = {"format": TextFormat}
    format: TextFormat | None = None


class ResponseStreamOptions(OpenAIModel):
    """How a stream is sent; all there is to choose is that nothing is added to it."""

    asks_nothing: ClassVar[Mapping[str, tuple[Any, ...]]] = {"include_obfuscation": (None, False)}


class ResponseBody(OpenAIModel, SamplingFields):
    """A request for a response: parameters of OpenAI, and those of sampling that it lacks."""

    asks_nothing: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **dict.fromkeys(("tools", "context_management", "background_options", "access_programs", "image"), NOTHING),
        **dict.fromkeys(("prompt_cache_options", "moderation", "conversation", "prompt"), NOTHING),
        **dict.fromkeys(("max_tool_calls", "prompt_cache_retention"), (None,)),
        "tool_choice": (None, "none", "auto"),
        "parallel_tool_calls": (None, True, False),
        "reasoning": (None, {}, {"effort": None}, {"effort": None, "summary": None}),
        "service_tier": (None, "auto", "default"),
        "truncation": (None, "disabled"),
    }
    reasons: ClassVar[Mapping[str, str]] = {"conversation": "a chain of responses is a conversation: use previous_response_id"}
    nested: ClassVar[Mapping[str, type[OpenAIModel]]] = {
        "input": InputMessage,
        "text": TextOptions,
        "stream_options": ResponseStreamOptions,
    }
    model: ModelName | None = None
    input: Text | Annotated[tuple[InputMessage, ...], Field(max_length=10_000)] | None = None
    instructions: Text | None = None
    previous_response_id: Id | None = None
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    store: bool | None = None
    background: bool | None = None
    generate: bool | None = Field(default=None, description="false: compute the prompt only, for a later response")
    max_output_tokens: int | None = Field(default=None, ge=1, lt=2**31)
    metadata: dict[Annotated[str, StringConstraints(max_length=64)], Label] | None = Field(default=None, max_length=16)
    include: tuple[Literal["message.output_text.logprobs"], ...] | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    text: TextOptions | None = None
    user: Label | None = None
    safety_identifier: Label | None = None
    prompt_cache_key: Label | None = None

    @property
    def is_stored(self) -> bool:
        return self.store is not False

    @property
    def has_logprobs(self) -> bool:
        return bool(self.include or self.top_logprobs)

    def check(self) -> None:
        """Raises `InvalidParameterError` for parameters that do not fit each other."""
        if self.stream_options is not None and self.stream is False:
            raise InvalidParameterError("stream_options needs stream to be true.")
        if self.has_logprobs and self.is_stored:
            raise InvalidParameterError("Log probabilities are not stored with a response: send store: false to get them.")
        if self.background and not self.is_stored:
            raise InvalidParameterError("A response in the background must be stored: leave one of background and store out.")
        if not self.input and (self.generate is not False or not self.instructions):
            raise InvalidParameterError("input has no message: send a text, or a list of at least one message.")

    def messages(self) -> list[NewNode]:
        """Return the messages that the request adds."""
        if isinstance(self.input, str):
            return [NewNode(role=Role.USER, text=self.input)] if self.input else []
        return [message.node() for message in self.input or ()]

    def echo(self) -> Json:
        """Return what the response repeats of its request."""
        fields: Json = {name: getattr(self, name) for name in ECHOED}
        return fields | {
            "background": bool(self.background),
            "store": self.is_stored,
            "temperature": 1.0 if self.temperature is None else self.temperature,
            "top_p": 1.0 if self.top_p is None else self.top_p,
            "top_logprobs": self.top_logprobs or 0,
            "metadata": self.metadata or {},
        }

    def run_params(self) -> RunParams:
        """Return the parameters of a stored run; those that a conversation could set otherwise are said."""
        given = {name: getattr(self, name) for name in SamplingFields.model_fields if getattr(self, name) is not None}
        return RunParams(**({"temperature": 1.0, "top_p": 1.0} | given), max_tokens=self.max_output_tokens)

    def sampling_params(self, limits: SessionLimits, stop: tuple[str, ...]) -> SamplingParams:
        """Return the parameters of a response that is not stored. Raises as `SamplingParams`."""
        params = self.run_params().model_dump(exclude_none=True)
        params |= {"max_tokens": limits.checked_max_tokens(self.max_output_tokens), "stop": stop}
        params.setdefault("seed", secrets.randbelow(MAX_DRAWN_SEED + 1))
        return SamplingParams(**params, logprobs=(self.top_logprobs or 0) if self.has_logprobs else None)
