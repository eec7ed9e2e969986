"""The messages of `chatpage.v1`, the websocket protocol: JSON objects told apart by `type`.

Invariant: a message that exists is whole and within limits. Unknown keys, wrong types and values out of range are errors, on
both sides; nothing is guessed. This module is the protocol's one definition: server, client and `/asyncapi.yaml` use it.

Order and repetition:
- `seq` counts the events of a run from 1. Adjacent deltas may be merged and then carry the last `seq` of the merged ones, so it
  may jump; it never repeats and never goes back.
- `run.snapshot` *replaces* what a client has of a run, whatever its `seq`; `run.delta` appends.
- `version` counts the changes of a conversation. A `tree.patch` applies to a copy that stands at `version - 1`, except when its
  first op is `reset`, which replaces the copy.
- `run.create` sent again, with the same `client_msg_id`, answers with the run it started before; another message with an id
  that was used before is a `conflict`. Ids are of a user, not of a client: use UUIDs.
"""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, StringConstraints, TypeAdapter, ValidationError, model_validator
from pydantic_core import from_json

from chatpage.errors import InvalidRequestError
from chatpage.sampling_params import MAX_SAMPLES
from chatpage.server.views import (
    MAX_ID,
    BreakView,
    ChoiceView,
    ConversationView,
    Count,
    ErrorView,
    Id,
    KvStats,
    LimitsView,
    Model,
    ModelView,
    NodeView,
    PrefixView,
    RunRequest,
    SampleView,
    Text,
    UsageView,
)
from chatpage.store.records import RunKind, RunStatus

PROTOCOL = "chatpage.v1"


class InvalidMessageError(InvalidRequestError):
    """A message is not one of the protocol. `ref` is the message's own reference, if it could be read."""

    code = "invalid_message"

    def __init__(self, message: str, ref: str | None = None) -> None:
        super().__init__(message)
        self.ref = ref


class MalformedJsonError(InvalidMessageError):
    """A message is not JSON, or not a JSON object."""

    code = "invalid_json"


class UnknownTypeError(InvalidMessageError):
    """A message has no `type`, or one that this version does not know."""

    code = "unknown_type"


# -- from the client -----------------------------------------------------------------------------------------------------


class ClientBase(Model):
    """A message to the server; an error about it carries its `ref`."""

    ref: Id | None = None


class Hello(ClientBase):
    """First message. `token`: an API key, where neither cookie, header nor subprotocol carried one."""

    type: Literal["hello"] = "hello"
    client_id: Id
    token: Annotated[str, StringConstraints(max_length=1000)] | None = None


class _Topic(ClientBase):
    conversation_id: Id | None = None
    run_id: Id | None = None
    kv: Literal[True] | None = None

    @model_validator(mode="after")
    def _names_one(self) -> Self:
        if sum(topic is not None for topic in (self.conversation_id, self.run_id, self.kv)) != 1:
            raise ValueError("name one of conversation_id, run_id and kv")
        return self


class Subscribe(_Topic):
    """Follow a run, a conversation (tree.patch, run.created), or the block memory (kv.stats).

    `after_seq`: the last `seq` of the run, or `version` of the conversation, that the client has; without it, everything.
    """

    type: Literal["subscribe"] = "subscribe"
    after_seq: Count | None = None


class Unsubscribe(_Topic):
    """Stop following."""

    type: Literal["unsubscribe"] = "unsubscribe"


class Ping(ClientBase):
    """Answered by `pong` with the same `t`."""

    type: Literal["ping"] = "ping"
    t: float


class RunCreate(ClientBase, RunRequest):
    """Start a run; answered by `run.created`. The connection follows the run from then on."""

    type: Literal["run.create"] = "run.create"
    client_msg_id: Id


class RunCancel(ClientBase):
    """Stop a run, or one sample of it; the text so far stays."""

    type: Literal["run.cancel"] = "run.cancel"
    run_id: Id
    sample: int | None = Field(default=None, ge=0, lt=MAX_SAMPLES)


class PrefixWarm(ClientBase):
    """Compute the path to a message, and a draft of the next one, before it is sent. A newer one replaces an older one."""

    type: Literal["prefix.warm"] = "prefix.warm"
    conversation_id: Id
    parent_id: Id | None = None
    draft: Text | None = None


class Plan(ClientBase, RunRequest):
    """Ask what a run would cost; answered by `plan.result`. Changes nothing."""

    type: Literal["plan"] = "plan"


ClientMessage = Annotated[
    Hello | Subscribe | Unsubscribe | Ping | RunCreate | RunCancel | PrefixWarm | Plan, Field(discriminator="type")
]


# -- from the server -----------------------------------------------------------------------------------------------------


class Welcome(Model):
    """Answer to `hello`."""

    type: Literal["welcome"] = "welcome"
    version: str
    protocol: str = PROTOCOL
    user_id: Id
    limits: LimitsView
    model: ModelView


class RunCreated(Model):
    """A run exists and its nodes are stored. `prefix` is missing while a message it follows is still being written."""

    type: Literal["run.created"] = "run.created"
    run_id: Id
    conversation_id: Id
    kind: RunKind
    parent_id: Id | None = None
    input_node_id: Id | None = None
    node_ids: tuple[Id, ...]
    client_msg_id: Id | None = None
    seed: int | None = None
    prefix: PrefixView | None = None
    prefix_break: BreakView | None = None


DeltaEntry = tuple[Count, str, Count] | tuple[Count, str, Count, float]


class RunDelta(Model):
    """New text. Each entry: sample, text, number of tokens, and the sum of their log probabilities if those were asked for."""

    type: Literal["run.delta"] = "run.delta"
    run_id: Id
    seq: Count
    d: tuple[DeltaEntry, ...]


class RunSnapshot(Model):
    """The run as it stands at `seq`; replaces what the client has of it."""

    type: Literal["run.snapshot"] = "run.snapshot"
    run_id: Id
    seq: Count
    samples: tuple[SampleView, ...]


class SampleDone(Model):
    """One sample ended."""

    type: Literal["sample.done"] = "sample.done"
    run_id: Id
    seq: Count
    sample: Count
    finish_reason: str
    detail: str | None = None
    usage: UsageView
    ttft_ms: float | None = None
    tok_s: float | None = None
    sum_logprob: float | None = None


class RunDone(Model):
    """The run ended and everything about it is stored; nothing of it follows."""

    type: Literal["run.done"] = "run.done"
    run_id: Id
    seq: Count
    status: RunStatus
    usage: UsageView | None = None
    error: ErrorView | None = None


class ResetOp(Model):
    """Forget the copy and take this."""

    op: Literal["reset"] = "reset"
    conversation: ConversationView
    nodes: tuple[NodeView, ...]
    choices: tuple[ChoiceView, ...]


class NodeOp(Model):
    """Add a message, or replace the one with its id."""

    op: Literal["node"] = "node"
    node: NodeView


class RemoveOp(Model):
    """Hide messages."""

    op: Literal["remove"] = "remove"
    node_ids: tuple[Id, ...]


class ChooseOp(Model):
    """Show another child."""

    op: Literal["choose"] = "choose"
    child_id: Id
    parent_id: Id | None = None


class ConversationOp(Model):
    """Title, tags and the like as they are now."""

    op: Literal["conversation"] = "conversation"
    conversation: ConversationView


TreeOp = Annotated[ResetOp | NodeOp | RemoveOp | ChooseOp | ConversationOp, Field(discriminator="op")]


class TreePatch(Model):
    """A conversation changed."""

    type: Literal["tree.patch"] = "tree.patch"
    conversation_id: Id
    version: Count
    ops: tuple[TreeOp, ...]


class PlanResult(Model):
    """What a run would cost now. `is_pending`: a message on its path is still being written, so the count may grow."""

    type: Literal["plan.result"] = "plan.result"
    ref: Id | None = None
    prefix: PrefixView
    prefix_break: BreakView | None = None
    max_model_len: int
    is_pending: bool = False


class ErrorMessage(Model):
    """A message could not be served.

    `ref`: the `ref` or `client_msg_id` of that message. `retry_after_ms`: when to send it again, if it can succeed as it is;
    for a run that was refused as `overloaded` a place is kept at that moment.
    """

    type: Literal["error"] = "error"
    code: str
    message: str
    ref: str | None = None
    retryable: bool = False
    retry_after_ms: Count | None = None


class Restarting(Model):
    """Last message before the server closes with 1012: all that was written has been sent and stored; connect again soon."""

    type: Literal["restarting"] = "restarting"
    retry_after_ms: Count


class Pong(Model):
    """Answer to `ping`."""

    type: Literal["pong"] = "pong"
    t: float


ServerMessage = Annotated[
    Welcome
    | RunCreated
    | RunDelta
    | RunSnapshot
    | SampleDone
    | RunDone
    | TreePatch
    | PlanResult
    | KvStats
    | ErrorMessage
    | Restarting
    | Pong,
    Field(discriminator="type"),
]
RunMessage = RunDelta | RunSnapshot | SampleDone | RunDone
ConversationMessage = TreePatch | RunCreated

_CLIENT: TypeAdapter[Any] = TypeAdapter(ClientMessage)
_SERVER: TypeAdapter[Any] = TypeAdapter(ServerMessage)


# -- reading -------------------------------------------------------------------------------------------------------------


def parse_client_message(text: str | bytes) -> ClientMessage:
    """Read one message of a client.

    Raises:
        MalformedJsonError: It is not a JSON object, or is nested too deep.
        UnknownTypeError: Its `type` is missing or unknown.
        InvalidMessageError: A field is missing, unknown, of the wrong type or out of range.
    """
    return _parse(_CLIENT, text)  # type: ignore[no-any-return]


def parse_server_message(text: str | bytes) -> ServerMessage:
    """Read one message of a server. Raises as `parse_client_message` does."""
    return _parse(_SERVER, text)  # type: ignore[no-any-return]


def _parse(adapter: TypeAdapter[Any], text: str | bytes) -> Any:
    try:
        return adapter.validate_json(text)
    except ValidationError as error:
        problems = error.errors(include_url=False, include_input=False)
    ref = _ref_of(text)
    kinds = {problem["type"] for problem in problems}
    if kinds & {"json_invalid", "json_type", "model_attributes_type", "dict_type"} and len(problems) == 1:
        raise MalformedJsonError(f"The message is not a JSON object: {problems[0]['msg']}.", ref)
    if kinds & {"union_tag_invalid", "union_tag_not_found"} and not problems[0]["loc"]:
        raise UnknownTypeError(f"The type of the message is missing or unknown: {problems[0]['msg'][:300]}.", ref)
    lines = [f"{'.'.join(map(str, problem['loc'][1:])) or 'message'}: {problem['msg']}" for problem in problems[:3]]
    more = f"; and {len(problems) - 3} more" if len(problems) > 3 else ""
    raise InvalidMessageError(
        f"{problems[0]['loc'][0] if problems[0]['loc'] else 'message'}: {'; '.join(lines)[:600]}{more}.", ref
    )


def _ref_of(text: str | bytes) -> str | None:
    """Return what the error should refer to, if the message lets itself be read that far."""
    try:
        value = from_json(text)
    except ValueError:
        return None
    if not isinstance(value, dict):
        return None
    ref = value.get("ref") or value.get("client_msg_id")
    return ref if isinstance(ref, str) and len(ref) <= MAX_ID else None
