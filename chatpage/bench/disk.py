"""How much do streams lose while KV is saved and loaded beside them? `python -m chatpage.bench.disk --model ...`.

Two streams run. Each round takes, in turn and with a stretch of nothing else around each:

    nothing   goes on: how much the streams vary by themselves, and how far the other lines may be trusted
    saving    a conversation of 4,000 tokens has ended, and its blocks go to disk: until the last one is there
    loading   it was forgotten, and is asked for again: until all of it has come back from the disk, not from the memory
              that the machine has for files

The speed of the streams meanwhile, for `--window` seconds at most, is compared with that in the stretches before and after, and
so is their speed in the whole window, if the save or load takes a part of it only.
"""

import argparse
import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from chatpage.bench.peers.chatpage import drop_from_memory
from chatpage.bench.workloads import Prompts
from chatpage.config import EngineConfig
from chatpage.engine.core import Engine
from chatpage.events import RequestFailed, RequestFinished, RequestId, RequestStarted, TokenDelta
from chatpage.sampling_params import SamplingParams

NUM_STREAMS, STREAM_PROMPT, STREAM_TOKENS = 2, 64, 6000
NUM_TOKENS, TURN = 4000, 28
NUM_COMMON = 4  # blocks that all conversations may begin with, which are on disk already
STRETCH_S, LOOK_S = 2.0, 0.1
LIMIT_S = 300.0
KINDS = ("nothing", "saving", "loading")


@dataclass(frozen=True, slots=True)
class Stretch:
    """What the streams did in a stretch of time."""

    seconds: float
    num_tokens: int
    longest_step_s: float

    @property
    def tok_s(self) -> float:
        return self.num_tokens / self.seconds


@dataclass(slots=True)
class Taken:
    """The stretches of a kind. Ratios: 1 is no loss."""

    stretches: list[Stretch] = field(default_factory=list)
    ratios: list[float] = field(default_factory=list)
    window_ratios: list[float] = field(default_factory=list)
    longest_alone_s: list[float] = field(default_factory=list)

    def take(self, before: Stretch, during: Stretch, rest: Stretch, after: Stretch) -> None:
        alone = _tok_s(before, after)
        window = _tok_s(during, rest)
        self.stretches.append(during)
        self.ratios.append(during.tok_s / alone)
        self.window_ratios.append(window / alone)
        self.longest_alone_s.append(max(before.longest_step_s, after.longest_step_s))

    def to_dict(self) -> dict[str, float]:
        return {
            "seconds": statistics.median(stretch.seconds for stretch in self.stretches),
            "tok_s": statistics.median(stretch.tok_s for stretch in self.stretches),
            "ratio": statistics.median(self.ratios),
            "lowest_ratio": min(self.ratios),
            "window_ratio": statistics.median(self.window_ratios),
            "longest_step_ms": 1e3 * statistics.median(stretch.longest_step_s for stretch in self.stretches),
            "longest_step_alone_ms": 1e3 * statistics.median(self.longest_alone_s),
        }


def _tok_s(*stretches: Stretch) -> float:
    return sum(stretch.num_tokens for stretch in stretches) / sum(stretch.seconds for stretch in stretches)


class Bench:
    """Streams on one engine, and a disk beside them."""

    def __init__(self, engine: Engine, folder: Path, prompts: Prompts, window_s: float) -> None:
        self._engine = engine
        self._folder = folder
        self._prompts = prompts
        self._window_s = window_s
        self._streams: set[RequestId] = set()
        self._num_tokens = 0
        self._started: set[RequestId] = set()
        self._ended: set[RequestId] = set()

    def play(self, number: int, taken: dict[str, Taken]) -> None:
        """Play one round."""
        prompt = self._prompts.chat(f"conversation {number}", NUM_TOKENS)
        asked = [*prompt, *self._prompts.turn("And what came after that?", TURN)]
        self._stream(f"saving {number}")
        wanted = self._num_saved + NUM_TOKENS // self._engine.config.block_size - NUM_COMMON
        before = self._steps_for(STRETCH_S)
        ended = self._engine.add_request(prompt, SamplingParams(max_tokens=1, ignore_eos=True))
        self._steps_until(lambda: ended in self._ended)
        during = self._steps_until(self._now_and_then(lambda: self._num_saved >= wanted), most_s=self._window_s)
        rest = self._steps_for(self._window_s - during.seconds)
        self._steps_until(self._now_and_then(lambda: self._num_saved >= wanted))
        after = self._steps_for(STRETCH_S)
        taken["saving"].take(before, during, rest, after)
        self._end_streams()

        self._engine.clear_cache()
        drop_from_memory(self._folder)
        self._stream(f"loading {number}")
        first = self._steps_for(STRETCH_S)
        during = self._steps_for(self._window_s)
        before = self._steps_for(STRETCH_S)
        taken["nothing"].take(first, during, Stretch(0.0, 0, 0.0), before)
        again = self._engine.add_request(asked, SamplingParams(max_tokens=1, ignore_eos=True))
        during = self._steps_until(lambda: again in self._started, most_s=self._window_s)
        self._engine.abort(again)
        rest = self._steps_for(self._window_s - during.seconds)
        taken["loading"].take(before, during, rest, self._steps_for(STRETCH_S))
        self._end_streams()
        self._engine.clear_cache()

    def _stream(self, name: str) -> None:
        for i in range(NUM_STREAMS):
            params = SamplingParams(max_tokens=STREAM_TOKENS, ignore_eos=True, seed=i)
            self._streams.add(self._engine.add_request(self._prompts.chat(f"{name} {i}", STREAM_PROMPT), params))
        self._settle()

    def _end_streams(self) -> None:
        for stream in self._streams:
            self._engine.abort(stream)
        self._streams.clear()
        self._settle()

    @property
    def _num_saved(self) -> int:
        stats = self._engine.stats().disk
        assert stats is not None
        assert stats.is_saving, "the disk has an error"
        return stats.saved_blocks

    def _now_and_then(self, is_over: Callable[[], bool]) -> Callable[[], bool]:
        """Look only ten times a second: counting what is in the memory takes as long as a step."""
        looked = time.perf_counter()

        def look() -> bool:
            nonlocal looked
            if time.perf_counter() < looked + LOOK_S:
                return False
            looked = time.perf_counter()
            return is_over()

        return look

    def _settle(self) -> None:
        """Go on until nothing is saved any more."""
        before = -1
        while before != (now := self._num_saved):
            before = now
            self._steps_for(0.5)

    def _steps_for(self, seconds: float) -> Stretch:
        end = time.perf_counter() + seconds
        return self._steps_until(lambda: time.perf_counter() >= end)

    def _steps_until(self, is_over: Callable[[], bool], *, most_s: float = math.inf) -> Stretch:
        began = before = time.perf_counter()
        first, longest = self._num_tokens, 0.0
        while not is_over() and before - began < most_s:
            self._step()
            now = time.perf_counter()
            longest, before = max(longest, now - before), now
            if now - began > LIMIT_S:
                raise TimeoutError(f"it did not come about within {LIMIT_S:.0f} s")
        return Stretch(max(before - began, 1e-9), self._num_tokens - first, longest)

    def _step(self) -> None:
        for event in self._engine.step():
            match event:
                case TokenDelta() if event.request_id in self._streams:
                    self._num_tokens += len(event.token_ids)
                case RequestStarted():
                    self._started.add(event.request_id)
                case RequestFinished() if event.request_id not in self._streams:
                    self._ended.add(event.request_id)
                case RequestFailed():
                    raise RuntimeError(event.message)


def measure(config: EngineConfig, *, rounds: int, window_s: float) -> dict[str, Taken]:
    """Play some rounds; `config` has a folder for the disk that is used by nobody else."""
    assert config.kv_disk is not None, "there is no disk without a folder"
    engine = Engine.load(config)
    bench = Bench(engine, config.kv_disk, Prompts(engine.tokenizer), window_s)
    taken = {kind: Taken() for kind in KINDS}
    try:
        bench.play(0, {kind: Taken() for kind in KINDS})  # what is slow the first time
        for number in range(rounds):
            bench.play(number + 1, taken)
            print(f"round {number + 1} of {rounds}", file=sys.stderr, flush=True)
    finally:
        engine.close(save_s=0.0)
    return taken


def table(taken: dict[str, Taken], window_s: float) -> str:
    """Return the findings as lines of text."""
    window = f"in {window_s:g} s"
    lines = [f"{'medians':8} {'seconds':>8} {'tok/s':>7} {'ratio':>7} {'lowest':>7} {window:>8} {'longest step, ms':>20}"]
    for kind, found in taken.items():
        got = found.to_dict()
        speeds = f"{got['seconds']:8.2f} {got['tok_s']:7.1f} {got['ratio']:7.3f} {got['lowest_ratio']:7.3f}"
        steps = f"{got['longest_step_ms']:.1f} ({got['longest_step_alone_ms']:.1f} alone)"
        lines.append(f"{kind:8} {speeds} {got['window_ratio']:8.3f} {steps:>20}")
    return "\n".join(lines)


def main() -> None:
    """Measure, and print what was found."""
    parser = argparse.ArgumentParser(prog="python -m chatpage.bench.disk", description=__doc__)
    parser.add_argument("--model", help="as for chatpage serve")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--window", type=float, default=5.0, help="seconds that a save or load falls into")
    parser.add_argument("--folder", type=Path, help="on the disk to be measured (default: for temporary files)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers there, too")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="chatpage-disk-", dir=given.folder) as folder:
        config = EngineConfig.load(model=given.model, kv_disk=Path(folder) / "kv")
        taken = measure(config, rounds=given.rounds, window_s=given.window)
    print(table(taken, given.window))
    if given.json is not None:
        given.json.write_text(json.dumps({kind: found.to_dict() for kind, found in taken.items()}, indent=1) + "\n")


if __name__ == "__main__":
    main()
