"""What each workload does with an engine, and the numbers it yields. This runs in the process of the engine.

Invariant: every run that is timed generated exactly the tokens it was asked for, of the model's vocabulary; if not, it has no
numbers.
"""

from collections.abc import Callable, Iterator, Sequence

from chatpage.bench.peers.interface import CannotError, Job, Peer, Run
from chatpage.bench.workloads import NUM_SAMPLES, Material, Sizes
from chatpage.errors import EngineStepError

Numbers = dict[str, float]
ROWS = (1, 2, 4, 8, 16)
NUM_FIRST_IDS = 16


class Player:
    """Plays workloads on one engine; keeps the first tokens of the last greedy run, to compare engines by."""

    def __init__(self, peer: Peer, sizes: Sizes, vocab_size: int) -> None:
        self._peer = peer
        self._sizes = sizes
        self._vocab_size = vocab_size
        self.first_ids: list[int] = []

    def warm_up(self, material: Material) -> None:
        """Run once what is slow the first time."""
        self._run([Job(material.prompt[-40:], 8)])
        self._run([Job(material.prompt[-40:], 8, n=NUM_SAMPLES, temperature=1.0)])

    def play(self, name: str, material: Material) -> tuple[Numbers, str]:
        """Play a workload once; return its numbers, and why some are missing, if the engine cannot do a part of it."""
        script: Callable[[Material], Iterator[Numbers]] = getattr(self, f"_{name.lower()}")
        numbers: Numbers = {}
        self._peer.forget()
        try:
            for part in script(material):
                numbers |= part
        except CannotError as reason:
            return numbers, str(reason)
        finally:
            self._peer.forget()
        return numbers, ""

    def _w1(self, given: Material) -> Iterator[Numbers]:
        run = self._run([Job(given.prompt, self._sizes.decode_out)])
        sample = run.samples[0]
        self.first_ids = sample.ids[:NUM_FIRST_IDS]
        yield {"decode tok/s": (len(sample.times) - 1) / (sample.times[-1] - sample.times[0])}

    def _w2(self, given: Material) -> Iterator[Numbers]:
        run = self._run([Job(given.prompt, 1)])
        yield {"first token ms": run.ttft_s * 1e3, "prefill tok/s": len(given.prompt) / run.ttft_s}

    def _w3(self, given: Material) -> Iterator[Numbers]:
        self._peer.remember(given.prompt)
        yield _first_token(self._run([Job([*given.prompt, *given.turn], 1)]))

    def _w4(self, given: Material) -> Iterator[Numbers]:
        job = Job(given.prompt, self._sizes.sample_out, n=NUM_SAMPLES, temperature=1.0)
        yield _wall("cold", self._run([job]))
        self._peer.remember(given.prompt)
        yield _wall("warm", self._run([job]))

    def _w5(self, given: Material) -> Iterator[Numbers]:
        for state, chats in (("cold", given.chats), ("warm", given.second_chats)):
            if state == "warm":
                self._peer.remember(given.prompt)
            jobs = [Job(chat, self._sizes.sample_out, temperature=1.0, seed=i) for i, chat in enumerate(chats)]
            yield _wall(state, self._run(jobs))

    def _w6(self, given: Material) -> Iterator[Numbers]:
        self._run([Job(given.prompt, 8, temperature=1.0)])
        self._peer.remember(given.prompt)
        yield _first_token(self._run([Job(given.prompt, 1, temperature=1.0, seed=2)]))

    def _w7(self, given: Material) -> Iterator[Numbers]:
        fork = self._peer.fork(given.prompt)
        yield {"fork us": fork.seconds * 1e6, "copied bytes": float(fork.num_bytes)}

    def _w8(self, given: Material) -> Iterator[Numbers]:
        resumed = self._peer.resume(given.prompt, given.turn)
        yield {"first token ms": resumed.first_s * 1e3, "cold first token ms": resumed.cold_s * 1e3}
        if resumed.computed_tokens is not None:
            yield {"computed tokens": float(resumed.computed_tokens)}

    def _step(self, given: Material) -> Iterator[Numbers]:
        for rows in ROWS:
            self._peer.remember(given.prompt)
            jobs = [Job(given.prompt, self._sizes.step_out, temperature=1.0, seed=i) for i in range(rows)]
            yield {f"{rows} {'row' if rows == 1 else 'rows'} ms": step_s(self._run(jobs)) * 1e3}

    def _run(self, jobs: Sequence[Job]) -> Run:
        return checked(self._peer.run(jobs), jobs, self._vocab_size)


def checked(run: Run, jobs: Sequence[Job], vocab_size: int) -> Run:
    """Return a run that did what was asked.

    Raises:
        EngineStepError: It generated something else.
    """
    expected = [job.max_tokens for job in jobs for _ in range(job.n)]
    seen = [len(sample.times) for sample in run.samples]
    if seen != expected:
        raise EngineStepError(f"asked for {expected} tokens, it generated {seen}")
    if any(not 0 <= token < vocab_size for sample in run.samples for token in sample.ids):
        raise EngineStepError("it generated tokens that are not in the vocabulary")
    if any(not sample.ids for sample in run.samples if len(sample.times) > 1):
        raise EngineStepError("it generated tokens without telling which")
    return run


def step_s(run: Run) -> float:
    """Seconds of a decode step in which all samples took part: from when the last one has begun to when the first one ends.

    sample 0   | . . . . . . |
    sample 1       | . . . . . . |
                   ^ 5 steps ^
    """
    latest = max(run.samples, key=lambda sample: sample.times[0])
    start, end = latest.times[0], min(sample.times[-1] for sample in run.samples)
    inside = [moment for moment in latest.times if start < moment <= end]
    if not inside:
        raise CannotError("its requests do not run side by side long enough to time a step")
    return (inside[-1] - start) / len(inside)


def _first_token(run: Run) -> Numbers:
    return {"first token ms": run.ttft_s * 1e3} | _computed("computed tokens", run)


def _wall(state: str, run: Run) -> Numbers:
    numbers = {f"{state} s": run.wall_s, f"{state} tok/s": run.num_tokens / run.wall_s}
    return numbers | _computed(f"{state} computed tokens", run)


def _computed(name: str, run: Run) -> Numbers:
    return {} if run.computed_tokens is None else {name: float(run.computed_tokens)}
