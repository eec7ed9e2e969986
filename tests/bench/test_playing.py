"""What the workloads do with an engine, on one that generates nothing but keeps the clock."""

from collections.abc import Sequence

import pytest

from chatpage.bench.peers.interface import CannotError, Fork, Job, Peer, Run, Sample, Setup
from chatpage.bench.playing import ROWS, Player, checked, step_s
from chatpage.bench.workloads import TITLES, Material, Sizes
from chatpage.errors import EngineStepError

SIZES = Sizes().scaled(0.01)


class _Clockwork(Peer):
    """An engine whose every token takes a second, and which forks only short prompts."""

    name = "clockwork"

    def __init__(self, setup: Setup | None = None) -> None:
        del setup
        self.seen: list[str] = []
        self.token = 5

    def facts(self) -> dict[str, str]:
        return {}

    def run(self, jobs: Sequence[Job]) -> Run:
        self.seen.append(f"run {sum(job.n for job in jobs)} x {jobs[0].max_tokens}")
        samples = [_sample(job.max_tokens, self.token) for job in jobs for _ in range(job.n)]
        return Run(jobs[0].max_tokens, samples, len(jobs[0].prompt))

    def remember(self, prompt: Sequence[int]) -> None:
        self.seen.append(f"remember {len(prompt)}")

    def forget(self) -> None:
        self.seen.append("forget")

    def fork(self, prompt: Sequence[int]) -> Fork:
        if len(prompt) > 9:
            raise CannotError("forks short prompts only")
        return Fork(0.001, 7)


def _sample(num_tokens: int, token: int = 5) -> Sample:
    return Sample([token] * num_tokens, [float(i + 1) for i in range(num_tokens)])


def _material() -> Material:
    prompt = list(range(10))
    return Material(prompt, [1, 2], chats=[[*prompt, i] for i in range(8)], second_chats=[[*prompt, 8 + i] for i in range(8)])


@pytest.mark.parametrize("workload", sorted(TITLES))
def test_every_workload_gives_numbers_or_a_reason_and_leaves_nothing_cached(workload: str) -> None:
    peer = _Clockwork()
    numbers, reason = Player(peer, SIZES, vocab_size=10).play(workload, _material())
    assert bool(numbers) != bool(reason)
    assert (peer.seen[0], peer.seen[-1]) == ("forget", "forget")


def test_speed_counts_the_steps_after_the_first_token() -> None:
    player = Player(_Clockwork(), Sizes(decode_out=5), vocab_size=10)
    assert player.play("W1", _material()) == ({"decode tok/s": 1.0}, "")
    assert player.first_ids == [5] * 5


def test_samples_are_run_cold_and_then_on_a_prompt_that_is_remembered() -> None:
    peer = _Clockwork()
    numbers, _ = Player(peer, Sizes(sample_out=4), vocab_size=10).play("W4", _material())
    assert peer.seen == ["forget", "run 8 x 4", "remember 10", "run 8 x 4", "forget"]
    assert numbers["cold tok/s"] == numbers["warm tok/s"] == 8.0


def test_steps_are_timed_with_1_to_16_rows() -> None:
    peer = _Clockwork()
    numbers, _ = Player(peer, Sizes(step_out=4), vocab_size=10).play("STEP", _material())
    assert list(numbers.values()) == [1000.0] * len(ROWS)
    assert [call for call in peer.seen if call.startswith("run")] == [f"run {rows} x 4" for rows in ROWS]


def test_a_part_that_an_engine_cannot_do_does_not_take_the_other_part_with_it() -> None:
    class Forgetful(_Clockwork):
        def remember(self, prompt: Sequence[int]) -> None:
            raise CannotError("keeps nothing")

    numbers, reason = Player(Forgetful(), SIZES, vocab_size=10).play("W4", _material())
    assert reason == "keeps nothing"
    assert {name.split()[0] for name in numbers} == {"cold"}


def test_an_engine_that_ends_early_is_not_fast() -> None:
    """An end-of-text that is not ignored makes the shortest run the best one."""
    jobs = [Job([1], 4, n=2)]
    with pytest.raises(EngineStepError, match=r"asked for \[4, 4\] tokens, it generated \[4, 3\]"):
        checked(Run(1.0, [_sample(4), _sample(3)]), jobs, vocab_size=10)
    with pytest.raises(EngineStepError, match="not in the vocabulary"):
        checked(Run(1.0, [_sample(4), _sample(4, token=10)]), jobs, vocab_size=10)
    with pytest.raises(EngineStepError, match="without telling which"):
        checked(Run(1.0, [_sample(4), Sample([], [1.0] * 4)]), jobs, vocab_size=10)


def test_an_engine_that_generates_nonsense_has_no_number() -> None:
    peer = _Clockwork()
    peer.token = -1
    with pytest.raises(EngineStepError):
        Player(peer, SIZES, vocab_size=10).play("W1", _material())


def test_a_step_is_timed_while_all_samples_take_part() -> None:
    """A batch that fills slowly and empties early has cheaper steps at both ends."""
    early = Sample([5] * 4, [1.0, 2.0, 5.0, 8.0])
    late = Sample([5] * 4, [5.0, 8.0, 9.0, 10.0])
    assert step_s(Run(10.0, [early, late])) == 3.0
    with pytest.raises(CannotError, match="side by side"):
        step_s(Run(10.0, [_sample(2), Sample([5, 5], [7.0, 8.0])]))
