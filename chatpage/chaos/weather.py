"""Which faults there were, and what they explain.

Invariant: nothing is explained by a fault that was over for longer than `GRACE_S`.
"""

import math
import time
from dataclasses import dataclass, field

GRACE_S = 15.0
REFUSALS = frozenset(
    {
        *("conflict", "not_found", "invalid_request", "invalid_parameter", "context_length_exceeded", "overloaded"),
        *("unknown_request", "import_file"),
    }
)
DISK_FAULTS = frozenset({"full_disk", "slow_disk"})


@dataclass(slots=True)
class Spell:
    """One fault. `end` is infinite while it lasts."""

    kind: str
    begin: float
    end: float = math.inf


@dataclass(slots=True)
class Weather:
    """The faults of a trial.

    Args:
        max_lost_s: Seconds of an unfinished reply that a crash may take.
    """

    max_lost_s: float
    spells: list[Spell] = field(default_factory=list)

    def begin(self, kind: str) -> Spell:
        spell = Spell(kind, time.monotonic())
        self.spells.append(spell)
        return spell

    def explains(self, code: str, *, is_retryable: bool) -> bool:
        """Whether an error is what users must expect now."""
        recent = {spell.kind for spell in self._since(time.monotonic() - GRACE_S)}
        if code in REFUSALS or (is_retryable and recent):
            return True
        return code in ("store_full", "store_read_only") and bool(recent & DISK_FAULTS)

    def explains_interruption(self, since: float) -> bool:
        """Whether a reply that began then may have been interrupted."""
        return bool(
            {spell.kind for spell in self._since(since)} & {"kill_server", "kill_engine", "drain", "poison_down", "full_disk"}
        )

    def most_lost_s(self, since: float) -> float:
        """Return the seconds at its end that a reply which began then may have lost."""
        kinds = {spell.kind for spell in self._since(since)}
        if "full_disk" in kinds:
            return math.inf
        return self.max_lost_s if kinds & {"kill_server", "poison_down"} else 0.0

    def _since(self, moment: float) -> list[Spell]:
        return [spell for spell in self.spells if spell.end >= moment]
