"""What one user was told, to be held against what is there.

Invariant: an entry is only as certain as its user can be. A text whose end was told has to be there as it was; of one that was
still being written, what is there and what was heard begin alike; a change whose answer got lost may have happened or not.

    heard     [ The cat sat on the m ]
    stored    [ The cat sat on         ]     cut by a crash: fine if the rest came within the last second or so
    stored    [ The dog sat on         ]     never
"""

import bisect
import contextlib
import math
from collections import defaultdict
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field

from chatpage.chaos.findings import Finding
from chatpage.client import ServerError

Key = tuple[str, ...]  # what is known, such as ("title", conversation_id)
UNCERTAIN = frozenset({"internal_error", "store_error", "http_error", "invalid_answer", "server_error"})


@dataclass(slots=True)
class Told:
    """A message as its user knows it. `heard`: how long it was at which moment, oldest first."""

    conversation_id: str
    text: str = ""
    run_id: str | None = None  # that wrote into it last, as far as the user knows
    is_final: bool = False
    may_be_gone: bool = False
    began: float = 0.0
    heard: list[tuple[int, float]] = field(default_factory=list)

    def seconds_lost(self, stored: str) -> float:
        """Return how much time of what was heard is missing at the end of `stored`."""
        if len(stored) >= len(self.text) or not self.heard:
            return 0.0
        first = bisect.bisect_right(self.heard, (len(stored), math.inf))
        return self.heard[-1][1] - self.heard[min(first, len(self.heard) - 1)][1]


class Ledger:
    """What one user knows.

    Args:
        who: Name of the user.
        marker: A word that stands in everything the user says, and nowhere else.
    """

    def __init__(self, who: str, marker: str) -> None:
        self.who = who
        self.marker = marker
        self.messages: dict[str, Told] = {}
        self._possible: defaultdict[Key, set[Hashable]] = defaultdict(set)

    # -- messages --------------------------------------------------------------------------------------------------

    def said(self, conversation_id: str, node_id: str, text: str) -> None:
        """A message of the user's own is stored."""
        self.messages[node_id] = Told(conversation_id, text, is_final=True)

    def begins(self, conversation_id: str, node_id: str, now: float, run_id: str | None = None) -> Told:
        """A reply is being written, or goes on from what it had."""
        told = self.messages.setdefault(node_id, Told(conversation_id))
        told.is_final, told.began, told.run_id = False, now, run_id
        told.heard = [(len(told.text), now)]
        return told

    def hears(self, run_id: str, node_id: str, text: str, now: float, max_lost_s: float) -> Finding | None:
        """Take the whole text of a reply as its run tells it; what an older run tells of it is old."""
        told = self.messages[node_id]
        if told.run_id != run_id:
            return None
        if told.is_final:  # it was read meanwhile
            return None if told.text.startswith(text) else self.compare(node_id, text, is_ended=True)
        is_shorter = len(text) < len(told.text)
        finding = self.compare(node_id, text, is_ended=is_shorter, max_lost_s=max_lost_s)
        told.heard = [*(() if is_shorter else told.heard), (len(text), now)]
        told.text = text
        return finding

    def ends(self, run_id: str, node_id: str, text: str) -> Finding | None:
        """The end of a reply, and so all of its text, is known to be stored."""
        told = self.messages[node_id]
        if told.run_id != run_id:
            return None
        finding = self.compare(node_id, text, is_ended=True)
        told.text, told.is_final, told.heard = text, True, []
        return finding

    def settles(self, node_id: str, stored: str, max_lost_s: float) -> Finding | None:
        """A reply that was being written has ended with this text."""
        told = self.messages[node_id]
        finding = self.compare(node_id, stored, is_ended=True, max_lost_s=max_lost_s)
        told.text, told.is_final, told.heard = stored, True, []
        return finding

    def compare(self, node_id: str, stored: str, *, is_ended: bool, max_lost_s: float = math.inf) -> Finding | None:
        """Hold what is stored against what was told; None if it fits, or nothing is known.

        Args:
            is_ended: The stored text does not grow any more.
            max_lost_s: Most seconds of an unfinished reply that may be missing.
        """
        told = self.messages.get(node_id)
        if told is None or told.text == stored:
            return None
        if told.is_final:
            return Finding("text changed", self.who, f"message {node_id}: {_difference(told.text, stored)}")
        if not (told.text.startswith(stored) or stored.startswith(told.text)):
            return Finding("text changed", self.who, f"unfinished message {node_id}: {_difference(told.text, stored)}")
        if is_ended and (lost := told.seconds_lost(stored)) > max_lost_s:
            missing = len(told.text) - len(stored)
            return Finding("text lost", self.who, f"message {node_id}: the last {missing} characters, {lost:.1f} s of it")
        return None

    # -- everything else -------------------------------------------------------------------------------------------

    def knows(self, key: Key, value: Hashable) -> None:
        """Something is so."""
        self._possible[key] = {value}

    @contextlib.contextmanager
    def changing(self, key: Key, value: Hashable) -> Iterator[None]:
        """Something is being changed by what happens in the block."""
        before = set(self._possible[key])
        self._possible[key] = before | {value}
        try:
            yield
        except ServerError as error:
            if error.server_code not in UNCERTAIN:
                self._possible[key] = before
            raise
        if len(before) <= 1:  # else an earlier change whose answer got lost may still come about
            self._possible[key] = {value}

    def compare_value(self, key: Key, value: Hashable) -> Finding | None:
        possible = self._possible.get(key)
        if not possible or value in possible:
            return None
        return Finding(
            f"{key[0]} changed", self.who, f"{' '.join(key[1:])}: {value!r} instead of {sorted(map(repr, possible))}"
        )

    def keys(self, kind: str) -> list[Key]:
        """Return the keys of a kind."""
        return [key for key in self._possible if key[0] == kind]


def _difference(told: str, stored: str) -> str:
    same = next((i for i, (a, b) in enumerate(zip(told, stored, strict=False)) if a != b), min(len(told), len(stored)))
    return (
        f"told {len(told)} characters, stored {len(stored)}, alike up to {same}: "
        f"...{told[max(same - 20, 0) : same + 30]!r} became ...{stored[max(same - 20, 0) : same + 30]!r}"
    )
