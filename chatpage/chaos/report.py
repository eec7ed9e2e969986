"""What a trial found, for people and for machines."""

import statistics
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from chatpage.chaos.findings import Violation


@dataclass(slots=True)
class Report:
    """The figures of a trial. `recoveries`: seconds from when its cause was gone until a request was answered, by fault."""

    seed: int
    num_users: int
    seconds: float = 0.0
    disk: str = ""
    counts: Counter[str] = field(default_factory=Counter)
    recoveries: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    skipped: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    num_rests: int = 0
    num_messages: int = 0
    peaks: Mapping[str, int] = field(default_factory=dict)
    violations: Sequence[Violation] = ()

    def to_dict(self) -> dict[str, Any]:
        return {
            "seed": self.seed,
            "users": self.num_users,
            "seconds": round(self.seconds, 1),
            "disk": self.disk,
            "counts": dict(sorted(self.counts.items())),
            "faults": {name: _figures(times) for name, times in sorted(self.recoveries.items())},
            "skipped": self.skipped,
            "notes": self.notes,
            "rests": self.num_rests,
            "messages_checked": self.num_messages,
            "peak_memory_bytes": dict(self.peaks),
            "violations": [violation.to_dict() for violation in self.violations],
        }

    def render(self) -> str:
        """Return it as lines of text."""
        lines = [f"{self.num_users} users for {self.seconds:.0f} s, seed {self.seed}, files on {self.disk}", ""]
        lines += [f"  {count:7,}  {name}" for name, count in sorted(self.counts.items())]
        lines += ["", "  fault         times  answered again after (median, most)"]
        for name, times in sorted(self.recoveries.items()):
            lines.append(f"  {name:<13} {len(times):5}  {statistics.median(times):6.2f} s {max(times):6.2f} s")
        lines += [f"  {name:<13} skipped: {why}" for name, why in sorted(self.skipped.items())]
        lines += [f"  {note}" for note in self.notes]
        memory = ", ".join(f"{name} {size / 2**20:,.0f} MiB" for name, size in self.peaks.items())
        lines += ["", f"  {self.num_messages:,} messages checked, {self.num_rests} rests, most memory: {memory}"]
        for violation in self.violations:
            lines += ["", *_violation(violation)]
        lines += ["", f"{len(self.violations)} violations"]
        return "\n".join(lines)


def _figures(times: Sequence[float]) -> dict[str, float]:
    return {"times": len(times), "median_s": round(statistics.median(times), 3), "max_s": round(max(times), 3)}


def _violation(violation: Violation) -> list[str]:
    finding = violation.finding
    lines = [f"VIOLATION after {violation.after_s} s, {finding.who}: {finding.kind}: {finding.text}", "  faults:"]
    lines += [f"    {line}" for line in violation.faults[-8:]]
    return lines + ["  actions:"] * bool(violation.actions) + [f"    {line}" for line in violation.actions]
