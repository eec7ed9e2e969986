"""What went wrong, and what its user did before."""

import time
from collections import deque
from dataclasses import asdict, dataclass, field
from typing import Any

NUM_ACTIONS = 50


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that must never be. `who`: the user it happened to, or "server"."""

    kind: str
    who: str
    text: str


class Journal:
    """The last things a user did."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._lines: deque[str] = deque(maxlen=NUM_ACTIONS)

    def note(self, line: str) -> None:
        self._lines.append(f"{time.monotonic() - self._began:8.2f} s  {line}")

    @property
    def lines(self) -> tuple[str, ...]:
        return tuple(self._lines)


@dataclass(frozen=True, slots=True)
class Violation:
    """A finding, with what went on before it."""

    finding: Finding
    after_s: float
    actions: tuple[str, ...]
    faults: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self.finding) | {"after_s": self.after_s, "actions": self.actions, "faults": self.faults}


@dataclass(slots=True)
class Findings:
    """Collects violations; each is noted once."""

    journals: dict[str, Journal] = field(default_factory=dict)
    faults: Journal = field(default_factory=Journal)
    violations: list[Violation] = field(default_factory=list)
    _known: set[Finding] = field(default_factory=set)
    _began: float = field(default_factory=time.monotonic)

    def add(self, *findings: Finding) -> None:
        for finding in findings:
            if finding in self._known:
                continue
            self._known.add(finding)
            journal = self.journals.get(finding.who)
            actions = journal.lines if journal else ()
            after_s = round(time.monotonic() - self._began, 1)
            self.violations.append(Violation(finding, after_s, actions, self.faults.lines))
