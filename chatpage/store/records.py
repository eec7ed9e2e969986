"""What the store hands out: ids, states, and frozen records of conversations, nodes and runs.

Invariant: a record is a value. It shows one moment of the database and never changes; a change is a call on the store, which
answers with new records. Times are whole microseconds since 1970; token ids are kept packed as little-endian int32.
"""

import secrets
import struct
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NewType

from chatpage.errors import InvalidRequestError

if TYPE_CHECKING:
    from chatpage.store.tree import Tree

NodeId = NewType("NodeId", str)
ConversationId = NewType("ConversationId", str)
RunId = NewType("RunId", str)
UserId = NewType("UserId", str)
PresetId = NewType("PresetId", str)
ApiKeyId = NewType("ApiKeyId", str)

Json = Mapping[str, Any]
NO_JSON: Json = MappingProxyType({})
LOCAL_USER = UserId("local")  # whoever uses a server bound to loopback, where no login is needed


class Role(StrEnum):
    """Who speaks in a node."""

    SYSTEM = "system"
    USER = "user"
    ASSISTANT = "assistant"
    TOOL = "tool"


class NodeStatus(StrEnum):
    """How far a node's text is. Only `STREAMING` text grows; the others may be continued, `COMPLETE` only if length cut it."""

    STREAMING = "streaming"
    COMPLETE = "complete"
    INTERRUPTED = "interrupted"  # the process ended while it streamed
    ABORTED = "aborted"  # stopped by its owner
    ERROR = "error"


class RunKind(StrEnum):
    """What a user asked the engine for."""

    REPLY = "reply"
    REGENERATE = "regenerate"
    CONTINUE = "continue"
    FORK = "fork"


class RunStatus(StrEnum):
    """How a run ended, or that it has not."""

    RUNNING = "running"
    COMPLETE = "complete"
    INTERRUPTED = "interrupted"
    ABORTED = "aborted"
    ERROR = "error"


def new_id() -> str:
    """Return 128 random bits as 32 hex digits."""
    return secrets.token_hex(16)


def now() -> int:
    """Return the time in microseconds since 1970."""
    return time.time_ns() // 1000


def pack_tokens(token_ids: Sequence[int]) -> bytes:
    """Pack token ids, [num_tokens] ints, into 4 * num_tokens bytes of little-endian int32.

    Raises:
        InvalidRequestError: An id is not a whole number below 2**31, or is negative.
    """
    try:
        packed = struct.pack(f"<{len(token_ids)}i", *token_ids)
    except struct.error:
        packed = None
    if packed is None or (token_ids and min(token_ids) < 0):
        raise InvalidRequestError(f"Token ids must be whole numbers between 0 and {2**31 - 1}.")
    return packed


def unpack_tokens(packed: bytes) -> tuple[int, ...]:
    """Undo `pack_tokens`."""
    return struct.unpack(f"<{len(packed) // 4}i", packed)


def clean_text(text: str) -> str:
    """Replace lone surrogates, which JSON can smuggle in and no UTF-8 file can hold, by U+FFFD."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace") if _has_surrogates(text) else text


def _has_surrogates(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return True
    return False


@dataclass(frozen=True, slots=True)
class Node:
    """One message. `parent_id` is the parent as stored; a `Tree` knows the parent that counts."""

    id: NodeId
    parent_id: NodeId | None
    role: Role
    text: str
    token_bytes: bytes = field(repr=False)
    status: NodeStatus
    created_at: int  # orders siblings, with the id where two are equal
    finish_reason: str | None = None
    model: str | None = None
    params: Json = field(default_factory=dict)
    usage: Json = field(default_factory=dict)
    timing: Json = field(default_factory=dict)
    extra: Json = field(default_factory=dict)  # what only the origin of the node understands, such as a speaker's name
    detail: str | None = None  # why it ended early, for people
    is_kept: bool = False  # marked by its user, in the conversation it was read from

    @property
    def token_ids(self) -> tuple[int, ...]:
        return unpack_tokens(self.token_bytes)

    @property
    def num_tokens(self) -> int:
        return len(self.token_bytes) // 4


@dataclass(frozen=True, slots=True, kw_only=True)
class NewNode:
    """A node to be added; its id, parent and time come from the store."""

    role: Role
    text: str = ""
    token_ids: Sequence[int] = ()
    status: NodeStatus = NodeStatus.COMPLETE
    finish_reason: str | None = None
    model: str | None = None
    params: Json = field(default_factory=dict)
    extra: Json = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Conversation:
    """A conversation without its nodes. `version` rises with every change a reader could see."""

    id: ConversationId
    owner_id: UserId
    title: str
    version: int
    created_at: int
    updated_at: int
    is_pinned: bool = False
    tags: tuple[str, ...] = ()
    params: Json = field(default_factory=dict)
    preset_id: PresetId | None = None
    forked_from: ConversationId | None = None
    source: str | None = None  # the format it was imported from
    deleted_at: int | None = None


@dataclass(frozen=True, slots=True)
class ConversationTree:
    """A conversation with all its visible nodes, read in one moment."""

    conversation: Conversation
    tree: "Tree[Node]"


@dataclass(frozen=True, slots=True)
class TreeChange:
    """What one change did to one conversation: enough to patch a copy that stood at `conversation.version - 1`."""

    conversation: Conversation
    nodes: tuple[Node, ...] = ()  # added, restored or changed
    removed: tuple[NodeId, ...] = ()
    choices: Mapping[NodeId | None, NodeId] = field(
        default_factory=dict
    )  # parent (None: the root level) to the child now shown


@dataclass(frozen=True, slots=True)
class Sample:
    """One sample of a run; everything else about it stands in its node."""

    sample: int
    node_id: NodeId
    num_prefix_tokens: int = 0  # tokens the node had when the run began
    sum_logprob: float | None = None


@dataclass(frozen=True, slots=True)
class Run:
    """One user action on the engine."""

    id: RunId
    user_id: UserId
    conversation_id: ConversationId
    parent_id: NodeId | None  # the node the samples hang below
    kind: RunKind
    status: RunStatus
    samples: tuple[Sample, ...]
    created_at: int
    params: Json = field(default_factory=dict)
    usage: Json = field(default_factory=dict)
    client_msg_id: str | None = None
    input_node_id: NodeId | None = None
    error_code: str | None = None
    error_message: str | None = None
    finished_at: int | None = None


@dataclass(frozen=True, slots=True)
class Preset:
    """A system prompt and parameters under a name."""

    id: PresetId
    owner_id: UserId
    name: str
    system_prompt: str
    params: Json
    created_at: int
    updated_at: int


@dataclass(frozen=True, slots=True)
class User:
    """Someone who owns conversations. Without a password there is no login by password."""

    id: UserId
    name: str
    password_hash: str | None = field(repr=False)
    created_at: int


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A key without its secret, which is shown once and never stored."""

    id: ApiKeyId
    user_id: UserId
    name: str
    created_at: int
    last_used_at: int | None = None
