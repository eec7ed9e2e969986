"""Takes the measurements: engine after engine, repetition after repetition, and what they give together.

Invariants: one engine works at a time, and the engines take turns within every repetition, so a machine that slows down slows
all of them. A workload that failed on an engine once has no numbers of it at all.

    W1 repetition 1: chatpage, openvino, ...   W1 repetition 2: chatpage, openvino, ...   ...   W2 repetition 1: ...
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from chatpage.bench import machine
from chatpage.bench.peers.interface import CannotError
from chatpage.bench.peers.process import Played
from chatpage.bench.workloads import Material
from chatpage.errors import EngineStepError

BUSY_SHARE = 0.05  # of the machine, taken by other processes: more makes a measurement a busy one
START = "START"


class Engine(Protocol):
    """An engine under test."""

    name: str

    def play(self, workload: str, material: Material) -> Played:
        """Play a workload once."""


@dataclass(frozen=True, slots=True)
class Spread:
    """A number over the repetitions."""

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.values)


@dataclass(slots=True)
class Outcome:
    """What a workload gave on one engine.

    Args:
        numbers: One value per repetition.
        foreign: Per repetition, the share of the machine that other processes took; None where it is unknown.
        reason: Why there are no (other) numbers.
    """

    numbers: dict[str, list[float]] = field(default_factory=dict)
    foreign: list[float | None] = field(default_factory=list)
    reason: str = ""

    @property
    def is_busy(self) -> bool:
        """Whether the machine was busy in half of the repetitions or more, so that a median does not help."""
        busy = [share for share in self.foreign if share is not None and share > BUSY_SHARE]
        return bool(busy) and 2 * len(busy) >= len(self.foreign)

    def spread(self, number: str) -> Spread | None:
        values = self.numbers.get(number)
        return Spread(tuple(values)) if values else None

    def take(self, played: Played) -> None:
        for number, value in played.numbers.items():
            self.numbers.setdefault(number, []).append(value)
        self.foreign.append(played.foreign)
        self.reason = played.reason

    def fail(self, reason: str) -> None:
        self.numbers.clear()
        self.reason = reason


@dataclass(slots=True)
class Results:
    """Everything that was measured: by workload, then by engine; and the first tokens that each engine took greedily."""

    outcomes: dict[str, dict[str, Outcome]] = field(default_factory=dict)
    first_ids: dict[str, tuple[int, ...]] = field(default_factory=dict)

    def spread(self, workload: str, engine: str, number: str) -> Spread | None:
        outcome = self.outcomes.get(workload, {}).get(engine)
        return None if outcome is None else outcome.spread(number)

    def num_same_ids(self, engine: str, other: str) -> int | None:
        """How many of the first greedy tokens two engines have in common, if both were run greedily."""
        if not (self.first_ids.get(engine) and self.first_ids.get(other)):
            return None
        pairs = zip(self.first_ids[engine], self.first_ids[other], strict=False)
        return next((i for i, (a, b) in enumerate(pairs) if a != b), len(self.first_ids[engine]))


def measure(
    engines: Sequence[Engine],
    workloads: Sequence[str],
    material_of: Callable[[str, str], Material],
    *,
    repeat: int,
    patience_s: float = 0.0,
    report: Callable[[str], None] = lambda _: None,
    checkpoint: Callable[[Results], None] = lambda _: None,
) -> Results:
    """Run every workload `repeat` times on every engine, taking turns.

    Args:
        engines: In the order of their turns.
        workloads: Their names.
        material_of: Makes the prompts of a workload from its name and a seed that is new in every repetition.
        repeat: How often.
        patience_s: How long to wait before each measurement for other processes to be quiet.
        report: Is told what is about to be measured.
        checkpoint: Is given what there is after every workload.
    """
    results = Results()
    for workload in workloads:
        results.outcomes[workload] = {engine.name: Outcome() for engine in engines}
        for repetition in range(repeat):
            material = material_of(workload, f"{workload} number {repetition}")
            for engine in engines:
                outcome = results.outcomes[workload][engine.name]
                if outcome.reason and not outcome.numbers:
                    continue
                report(f"{workload}, {repetition + 1} of {repeat}: {engine.name}")
                machine.wait_until_quiet(BUSY_SHARE, patience_s)
                _play(engine, workload, material, outcome, results)
        checkpoint(results)
    return results


def ratio_to_best(results: Results, workload: str, number: str, ours: str) -> tuple[float, str] | None:
    """How many times better `ours` is than the best of the others, and which that is; None without both, or without a meaning.

    Above 1 we are better: more tokens per second, or less time, memory and bytes.
    """
    mine = results.spread(workload, ours, number)
    others = {name: results.spread(workload, name, number) for name in results.outcomes.get(workload, {}) if name != ours}
    medians = {name: spread.median for name, spread in others.items() if spread is not None}
    if mine is None or not medians or "tokens" in number:
        return None
    is_rate = number.endswith("tok/s")
    best = (max if is_rate else min)(medians, key=lambda name: medians[name])
    better, worse = (mine.median, medians[best]) if is_rate else (medians[best], mine.median)
    return (better / worse, best) if worse else None


def _play(engine: Engine, workload: str, material: Material, outcome: Outcome, results: Results) -> None:
    try:
        played = engine.play(workload, material)
    except CannotError as reason:
        outcome.fail(str(reason))
    except EngineStepError as error:
        outcome.fail(f"failed: {error}")
    else:
        outcome.take(played)
        if played.first_ids and workload == "W1":
            results.first_ids[engine.name] = played.first_ids
