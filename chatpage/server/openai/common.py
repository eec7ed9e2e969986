"""What the bodies of this surface have in common.

Invariant: a parameter is served or refused, never passed over. What this server does not do may still be sent with the value
that asks for nothing (`"tools": []`, `"tool_choice": "none"`), since client libraries do; those values are in `asks_nothing`.
"""

import json
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BeforeValidator, Field, StringConstraints
from pydantic_core import InitErrorDetails, PydanticCustomError, ValidationError

from chatpage.errors import InvalidParameterError
from chatpage.prompt import Message
from chatpage.sampling_params import MAX_SAMPLES, MAX_STOP_STRINGS, SamplingParams
from chatpage.server.openai.errors import UNSUPPORTED_VALUE, unsupported
from chatpage.server.views import MAX_ID, Model, SamplingFields, Text
from chatpage.session.limits import SessionLimits

NOTHING: tuple[Any, ...] = (None, [], {})
StopString = Annotated[str, StringConstraints(min_length=1, max_length=1000)]
Variables = dict[Annotated[str, StringConstraints(max_length=100)], bool | int | float | str]
_TEXT_TYPES = ("text", "input_text", "output_text")


class OpenAIModel(Model):
    """A body, or a part of one.

    `asks_nothing`: parameters of OpenAI that are refused unless they have one of these values; `reasons`: why, where there is
    more to say; `nested`: fields that hold such models, or lists of them.
    """

    asks_nothing: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    reasons: ClassVar[Mapping[str, str]] = {}
    nested: ClassVar[Mapping[str, "type[OpenAIModel]"]] = {}


BodyT = TypeVar("BodyT", bound=OpenAIModel)


def read_body(model: type[BodyT], data: Any) -> BodyT:
    """Check what `json.loads` made of a body.

    Raises:
        ValidationError: Everything that is wrong with it.
    """
    problems: list[InitErrorDetails] = []
    kept = _drop_what_asks_nothing(model, data, (), problems)
    if problems:
        raise ValidationError.from_exception_data(model.__name__, problems)
    try:
        text = json.dumps(kept)
    except RecursionError as error:
        raise PydanticCustomError("too_deep", "The body is nested too deeply") from error
    return model.model_validate_json(text)  # strict models take lists and enums from JSON only


def body_reader(model: type[BodyT]) -> BeforeValidator:
    """Return what reads the body of an endpoint."""
    return BeforeValidator(lambda data: data if isinstance(data, bytes) else read_body(model, data))


def _drop_what_asks_nothing(
    model: type[OpenAIModel], data: Any, loc: tuple[int | str, ...], problems: list[InitErrorDetails]
) -> Any:
    if isinstance(data, list) and loc:
        return [
            _drop_what_asks_nothing(model, one, (*loc, i), problems) if isinstance(one, dict) else one
            for i, one in enumerate(data)
        ]
    if not isinstance(data, dict):
        return data
    kept = {}
    for name, value in data.items():
        place = (*loc, name)
        if name in model.nested:
            kept[name] = _drop_what_asks_nothing(model.nested[name], value, place, problems)
        elif name not in model.asks_nothing:
            kept[name] = value
        elif not any(type(value) is type(known) and value == known for known in model.asks_nothing[name]):
            why = model.reasons.get(name, "this server does not do that")
            problems.append({"type": unsupported(name, why), "loc": place, "input": value})
    return kept


def _join_parts(value: Any) -> Any:
    """Turn content parts into the text they make, a line each as vLLM does; parts that are no text are refused."""
    if not isinstance(value, list):
        return value
    texts = []
    for part in value:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in _TEXT_TYPES:
            raise PydanticCustomError(
                UNSUPPORTED_VALUE, "A content part of type {kind} is not supported: send text parts only", {"kind": repr(kind)}
            )
        unknown = sorted(part.keys() - {"type", "text", "annotations", "logprobs"})
        if unknown or not isinstance(part.get("text"), str) or part.get("annotations") or part.get("logprobs"):
            raise PydanticCustomError(UNSUPPORTED_VALUE, "A text part has a type and a text, and nothing else is read", {})
        texts.append(part["text"])
    return "\n".join(texts)


class TextPart(Model):
    """A part of a message; for the documentation, since messages are read as a whole."""

    type: Literal["text", "input_text", "output_text"]
    text: Text


Content = Annotated[Text, BeforeValidator(_join_parts, json_schema_input_type=Text | tuple[TextPart, ...])]
RequestRole = Literal["system", "developer", "user", "assistant"]


def as_role(role: str) -> str:
    """Return the role as templates know it: a developer is who a system was before."""
    return "system" if role == "developer" else role


class ChatMessage(OpenAIModel):
    """One message; what a client got in an answer can be sent back as it is."""

    asks_nothing = dict.fromkeys(("name", "tool_calls", "function_call", "refusal", "audio", "annotations"), NOTHING)
    role: RequestRole
    content: Content

    def message(self) -> Message:
        return Message(as_role(self.role), self.content)


class StreamOptions(OpenAIModel):
    """How a stream is sent."""

    asks_nothing: ClassVar[Mapping[str, tuple[Any, ...]]] = {"include_obfuscation": (None, False)}
    include_usage: bool | None = None


class SamplingBody(OpenAIModel, SamplingFields):
    """Parameters of sampling under the names of OpenAI and, where it has none, of vLLM."""

    n: int | None = Field(default=None, ge=1, le=MAX_SAMPLES)
    max_tokens: int | None = Field(default=None, ge=1, lt=2**31)
    top_k: int | None = Field(default=None, ge=-1, lt=2**31, description="-1 and 0 keep all")
    stop: StopString | tuple[StopString, ...] | None = Field(default=None, max_length=1000)

    def sampling(
        self, limits: SessionLimits, *, logprobs: int | None, max_tokens: int | None, stop: tuple[str, ...]
    ) -> SamplingParams:
        """Return the parameters for the engine.

        Args:
            limits: Of the user.
            logprobs: How many alternatives of each token are wanted; None: no log probabilities at all.
            max_tokens: Most tokens of a sample, if the body or its endpoint has a limit.
            stop: Stop strings where the body has none.

        Raises:
            InvalidParameterError: A value does not fit the others, or a limit.
        """
        given = {name: getattr(self, name) for name in SamplingFields.model_fields if getattr(self, name) is not None}
        if self.stop is not None:
            stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        if len(stop) > MAX_STOP_STRINGS:
            raise InvalidParameterError(f"stop has {len(stop)} strings; at most {MAX_STOP_STRINGS} are allowed.")
        n = 1 if self.n is None else self.n
        limits.check_samples(n)
        given |= {"top_k": max(0, self.top_k or 0), "max_tokens": limits.checked_max_tokens(max_tokens)}
        return SamplingParams(**given, n=n, stop=stop, logprobs=logprobs)


ModelName = Annotated[str, StringConstraints(min_length=1, max_length=MAX_ID)]
