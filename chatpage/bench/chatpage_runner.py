"""The workloads on chatpage.

Invariant: a cold run finds nothing in the cache, because the cache is cleared before it.
"""

import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from chatpage.bench.workloads import NUM_SAMPLES, Prompts, Sizes
from chatpage.engine.core import Engine
from chatpage.errors import EngineStepError
from chatpage.events import RequestFailed, RequestFinished, RequestId, RequestStarted, TokenDelta, Usage
from chatpage.sampling_params import SamplingParams

Numbers = dict[str, float]


class Watch:
    """Runs requests to their end and notes when their tokens came, in seconds from the start."""

    def __init__(self, engine: Engine, prompts: Sequence[Sequence[int]], params: SamplingParams) -> None:
        self.first: dict[RequestId, float] = {}
        self.usage: dict[RequestId, Usage] = {}
        self.num_tokens = 0
        self.rows_held = 0
        self.rows_without_sharing = 0
        started = time.perf_counter()
        for prompt in prompts:
            engine.add_request(prompt, params)
        while engine.has_work:
            for event in engine.step():
                self._take(event, time.perf_counter() - started)
        self.wall_s = time.perf_counter() - started

    def _take(self, event: object, now: float) -> None:
        if isinstance(event, TokenDelta):
            self.first.setdefault(event.request_id, now)
            self.num_tokens += len(event.token_ids)
        elif isinstance(event, RequestFinished):
            self.usage[event.request_id] = event.usage
        elif isinstance(event, RequestFailed):
            raise EngineStepError(event.message)
        else:
            assert isinstance(event, RequestStarted) or self.first, f"{event} came before any token"

    @property
    def ttft_s(self) -> float:
        return sum(self.first.values()) / len(self.first)

    @property
    def decode_tok_s(self) -> float:
        """Of one stream."""
        return (self.num_tokens - 1) / (self.wall_s - self.ttft_s)

    @property
    def computed_prompt_tokens(self) -> int:
        return sum(usage.computed_prompt_tokens for usage in self.usage.values())


class ChatpageRunner:
    """Runs one workload after the other on a loaded engine."""

    name = "chatpage"

    def __init__(self, engine: Engine, prompts: Prompts, sizes: Sizes) -> None:
        self._engine = engine
        self._prompts = prompts
        self._sizes = sizes

    def warm_up(self) -> None:
        self._watch([self._prompts.chat("a warm-up", 40)], _greedy(8))

    def run(self, name: str, seed: str) -> Numbers:
        """Run a workload once; `seed` makes its prompts new."""
        self._engine.clear_cache()
        numbers: Numbers = getattr(self, f"_{name.lower()}")(seed)
        return numbers

    def _w1(self, seed: str) -> Numbers:
        watch = self._watch([self._prompts.chat(seed, self._sizes.decode_in)], _greedy(self._sizes.decode_out))
        return {"decode tok/s": watch.decode_tok_s}

    def _w2(self, seed: str) -> Numbers:
        watch = self._watch([self._prompts.chat(seed, self._sizes.prompt)], _greedy(1))
        return {"first token ms": watch.ttft_s * 1e3, "prefill tok/s": self._sizes.prompt / watch.ttft_s}

    def _w3(self, seed: str) -> Numbers:
        prompt = self._prompts.chat(seed, self._sizes.prompt)
        self._watch([prompt], _greedy(1))
        turn = self._prompts.turn("And what came after that?", self._sizes.next_turn)
        watch = self._watch([[*prompt, *turn]], _greedy(1))
        return {"first token ms": watch.ttft_s * 1e3, "computed tokens": watch.computed_prompt_tokens}

    def _w4(self, seed: str) -> Numbers:
        prompt = self._prompts.chat(seed, self._sizes.prompt)
        numbers: Numbers = {}
        for state in ("cold", "warm"):
            watch = self._watch([prompt], _sampled(NUM_SAMPLES, self._sizes.sample_out))
            numbers |= _wall(state, watch)
        return numbers

    def _w5(self, seed: str) -> Numbers:
        system = self._prompts.system(seed, self._sizes.system)
        numbers: Numbers = {}
        for state in ("cold", "warm"):
            chats = self._prompts.questions(system, self._sizes.question, is_second=state == "warm")
            numbers |= _wall(state, self._watch(chats, _sampled(1, self._sizes.sample_out)))
        return numbers

    def _w6(self, seed: str) -> Numbers:
        prompt = self._prompts.chat(seed, self._sizes.prompt)
        self._watch([prompt], _sampled(1, 8))
        watch = self._watch([prompt], _sampled(1, 1))
        return {"first token ms": watch.ttft_s * 1e3, "computed tokens": watch.computed_prompt_tokens}

    def _w7(self, seed: str) -> Numbers:
        prompt = self._prompts.chat(seed, self._sizes.fork)
        source = self._engine.add_request(prompt, _greedy(1))
        while self._engine.has_work:
            self._engine.step()
        copied = self._engine.stats().copied_bytes
        started = time.perf_counter()
        branch = self._engine.fork(source, _greedy(1), num_tokens=len(prompt))
        seconds = time.perf_counter() - started
        numbers = {"fork us": seconds * 1e6, "copied bytes": float(self._engine.stats().copied_bytes - copied)}
        self._engine.abort(branch)
        self._engine.step()
        return numbers

    def _w8(self, seed: str) -> Numbers:
        prompt = self._prompts.chat(seed, self._sizes.fork)
        turn = self._prompts.turn("And what came after that?", self._sizes.next_turn)
        with tempfile.TemporaryDirectory(prefix="chatpage-bench-") as name:
            first = self._fresh_engine(Path(name))
            cold = Watch(first, [prompt], _greedy(1))
            first.close(save_s=60.0)
            _drop_from_memory(Path(name))
            second = self._fresh_engine(Path(name))
            watch = Watch(second, [[*prompt, *turn]], _greedy(1))
            second.close(save_s=0.0)
        return {
            "first token ms": watch.ttft_s * 1e3,
            "cold first token ms": cold.ttft_s * 1e3,
            "computed tokens": watch.computed_prompt_tokens,
        }

    def _fresh_engine(self, kv_disk: Path) -> Engine:
        """Make an engine with nothing in memory, as after a restart whose model is loaded."""
        info = self._engine.info()
        num_blocks = (self._sizes.fork + 2 * self._sizes.next_turn) // info.block_size + 8
        changes = {"kv_disk": kv_disk, "kv_memory": num_blocks * info.bytes_per_block}
        return Engine(self._engine.config.model_copy(update=changes), self._engine.model)

    def _watch(self, prompts: Sequence[Sequence[int]], params: SamplingParams) -> Watch:
        return Watch(self._engine, prompts, params)


def _drop_from_memory(folder: Path) -> None:
    """Let the machine forget what it keeps of the files, so that they are read from the disk, as after a reboot."""
    if not hasattr(os, "posix_fadvise"):
        return
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def _wall(state: str, watch: Watch) -> Numbers:
    return {
        f"{state} s": watch.wall_s,
        f"{state} tok/s": watch.num_tokens / watch.wall_s,
        f"{state} computed tokens": watch.computed_prompt_tokens,
    }


def _greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)


def _sampled(n: int, max_tokens: int) -> SamplingParams:
    return SamplingParams(n=n, temperature=1.0, seed=1, max_tokens=max_tokens, ignore_eos=True)
