"""What an engine must do to be measured: generate, keep a prompt, fork one, go on after a restart.

Invariant: an engine gets exact token ids and a number of tokens to generate, never text, and runs past end-of-text; what it
cannot do raises `CannotError` with the reason, and is never measured as something else.
"""

import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar


class CannotError(Exception):
    """This engine has no way to do what a workload asks; the message says why."""


@dataclass(frozen=True, slots=True)
class Setup:
    """What every engine is given when it starts.

    Args:
        settings: The `EngineConfig` of the bench, as plain values.
        model: Folder of `config.json` and the tokenizer.
        weights: The files of the weights, all derived from the same source.
        threads: CPU threads to compute with.
        cache: Folder for converted weights; what is in it is complete.
        scratch: Folder that is removed after the bench.
    """

    settings: dict[str, Any]
    model: Path
    weights: tuple[Path, ...]
    threads: int
    cache: Path
    scratch: Path

    @property
    def gguf(self) -> Path | None:
        return self.weights[0] if self.weights[0].suffix == ".gguf" else None


@dataclass(frozen=True, slots=True)
class Job:
    """One request: a prompt and how to go on from it. At temperature 0 the most likely token is taken."""

    prompt: Sequence[int]
    max_tokens: int
    n: int = 1
    temperature: float = 0.0
    seed: int = 1


@dataclass(slots=True)
class Sample:
    """What one sample generated, and when, in seconds from the start of the run: one time per token."""

    ids: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)

    def take(self, ids: Sequence[int], now: float) -> None:
        self.ids += ids
        self.times += [now] * len(ids)


@dataclass(frozen=True, slots=True)
class Run:
    """What came of some jobs that were handed over together: `n` samples of the first job, then those of the second, ...

    Args:
        computed_tokens: Prompt tokens that were computed, if the engine tells.
    """

    wall_s: float
    samples: list[Sample]
    computed_tokens: int | None = None

    @property
    def ttft_s(self) -> float:
        """Time to first token, on average over the samples."""
        return sum(sample.times[0] for sample in self.samples) / len(self.samples)

    @property
    def num_tokens(self) -> int:
        return sum(len(sample.times) for sample in self.samples)


@dataclass(frozen=True, slots=True)
class Fork:
    """A conversation was forked in `seconds`; that copied `num_bytes`."""

    seconds: float
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Resumed:
    """A prompt was computed (`cold_s`); after a restart its next turn had its first token after `first_s`."""

    cold_s: float
    first_s: float
    computed_tokens: int | None


class Peer(ABC):
    """An engine with a loaded model, alone in its process."""

    name: ClassVar[str]

    @abstractmethod
    def __init__(self, setup: Setup) -> None:
        """Load the model."""

    @classmethod
    def prepare(cls, setup: Setup) -> None:
        """Convert the weights if this engine needs them in another form; runs once, before anything is timed."""
        del setup

    @property
    def pid(self) -> int:
        """The process that computes."""
        return os.getpid()

    @property
    def ready_s(self) -> float | None:
        """Seconds from the start of the process that computes until it was ready, if that process is not this one."""
        return None

    @property
    def max_len(self) -> int | None:
        """Longest sequence in tokens, if it is less than what the model can take."""
        return None

    @abstractmethod
    def facts(self) -> dict[str, str]:
        """Versions, weights and flags, for the report."""

    @abstractmethod
    def run(self, jobs: Sequence[Job]) -> Run:
        """Run jobs that arrive together, to their end."""

    def remember(self, prompt: Sequence[int]) -> None:
        """See to it that `prompt` is in memory, in this engine's own way; one with a prefix cache runs it for a token."""
        self.run([Job(prompt, 1)])

    def forget(self) -> None:  # noqa: B027 - some have no way
        """Drop what is cached, if that can be asked for; prompts are new in every repetition anyway."""

    def fork(self, prompt: Sequence[int]) -> Fork:
        """Compute `prompt`, then fork it; only the fork is timed."""
        del prompt
        raise CannotError("has no fork of a conversation, only a cache of prefixes")

    def resume(self, prompt: Sequence[int], turn: Sequence[int]) -> Resumed:
        """Compute `prompt`, restart, go on with `turn`. An engine that saves nothing computes all of it again."""
        run = self.run([Job([*prompt, *turn], 1)])
        return Resumed(run.ttft_s, run.ttft_s, run.computed_tokens)

    def close(self) -> None:  # noqa: B027 - most start nothing
        """End what the engine started."""
