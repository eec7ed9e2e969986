"""What a file says, before it is stored: drafts of conversations, and careful reading of values from strangers.

Invariant: a draft holds values of the right types and within limits; the links between its nodes may be broken in any way.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from chatpage.store.conversations import MAX_TAG, MAX_TAGS
from chatpage.store.records import Json, NodeStatus, Role, clean_text

MAX_NODES = 200_000
MAX_MOMENT = 2**53  # microseconds; the largest whole number every JSON reader keeps


class BadRecordError(ValueError):
    """A record that cannot become a conversation; the message goes on: "it ..."."""


@dataclass(slots=True, kw_only=True)
class DraftNode:
    """One message of a file."""

    key: str  # unique within its conversation
    parent_key: str | None
    order: int  # among siblings
    role: Role
    text: str
    is_kept: bool = True  # False: it holds nothing; what hangs below it moves up
    created_at: int | None = None
    status: NodeStatus = NodeStatus.COMPLETE
    finish_reason: str | None = None
    model: str | None = None
    token_ids: Sequence[int] = ()
    params: Json = field(default_factory=dict)
    usage: Json = field(default_factory=dict)
    timing: Json = field(default_factory=dict)
    extra: Json = field(default_factory=dict)
    detail: str | None = None
    is_marked: bool = False  # by its user, to be kept


@dataclass(slots=True, kw_only=True)
class Draft:
    """One conversation of a file."""

    format: str
    source_id: str | None = None  # None: the content decides whether two drafts are the same conversation
    keeps_ids: bool = False  # the keys are ids of ours, kept if nothing else has them
    title: str = ""
    created_at: int | None = None
    updated_at: int | None = None
    is_pinned: bool = False
    tags: tuple[str, ...] = ()
    params: Json = field(default_factory=dict)
    nodes: list[DraftNode] = field(default_factory=list)
    current: str | None = None  # the node whose branch is shown
    shown: tuple[str, ...] = ()  # nodes that are shown among their siblings, wherever they are
    problems: list[str] = field(default_factory=list)

    def add(self, node: DraftNode) -> None:
        if len(self.nodes) >= MAX_NODES:
            raise BadRecordError(f"has more than {MAX_NODES} messages")
        self.nodes.append(node)


def as_map(value: object) -> Mapping[str, Any]:
    """Return the value if it is an object, else an empty one."""
    return value if isinstance(value, dict) else {}


def as_list(value: object) -> Sequence[Any]:
    """Return the value if it is a list, else an empty one."""
    return value if isinstance(value, list) else ()


def as_text(value: object) -> str:
    """Return the value if it is a string, else ""."""
    return clean_text(value) if isinstance(value, str) else ""


def as_name(value: object) -> str | None:
    """Return the value if it is a string of at most 200 characters that is not empty, else None."""
    return clean_text(value) if isinstance(value, str) and 0 < len(value) <= 200 else None


def as_key(value: object) -> str | None:
    """Return a string or whole number as a string, else None: some tools write ids as numbers."""
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value) if abs(value) < 2**63 else None
    return as_name(value)


def as_tags(value: object) -> tuple[str, ...]:
    """Return the usable strings of a list, 64 at most."""
    tags = (as_text(tag).strip() for tag in as_list(value))
    return tuple(dict.fromkeys(tag for tag in tags if 0 < len(tag) <= MAX_TAG))[:MAX_TAGS]


def as_moment(value: object) -> int | None:
    """Return a time as microseconds since 1970: from seconds or milliseconds as a number, or from an ISO or English date."""
    if isinstance(value, str):
        return _parse_date(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        seconds = float(value)
    except OverflowError:
        return None
    if not math.isfinite(seconds) or seconds <= 0:
        return None
    if seconds > 1e11:  # as seconds that would be after the year 5000
        seconds /= 1000
    moment = round(seconds * 1_000_000)
    return moment if moment < MAX_MOMENT else None


def _parse_date(text: str) -> int | None:
    if len(text) > 64:
        return None
    for parse in (datetime.fromisoformat, lambda t: datetime.strptime(t, "%B %d, %Y %I:%M%p")):
        try:
            moment = parse(text)
            return max(0, round((moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp() * 1_000_000)) or None
        except (ValueError, OverflowError):
            continue
    return None


def to_seconds(moment: int) -> float:
    """Return microseconds as seconds."""
    return moment / 1_000_000


def title_from(text: str) -> str:
    """Return the beginning of a message's first line, for a conversation that has no title."""
    line = text.strip().split("\n", 1)[0]
    return line if len(line) <= 60 else line[:59].rstrip() + "…"
