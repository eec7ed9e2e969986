"""Taking turns, failures, medians, ratios."""

import pytest

from chatpage.bench.measuring import Outcome, Results, measure, ratio_to_best
from chatpage.bench.peers.interface import CannotError
from chatpage.bench.peers.process import Played
from chatpage.bench.workloads import Material
from chatpage.errors import EngineStepError


class _Scripted:
    """An engine that answers what it was told to, and notes when it was asked."""

    def __init__(self, name: str, answers: list[Played | Exception], calls: list[tuple[str, str, int]]) -> None:
        self.name = name
        self._answers = iter(answers)
        self._calls = calls

    def play(self, workload: str, material: Material) -> Played:
        self._calls.append((self.name, workload, material.prompt[0]))
        answer = next(self._answers)
        if isinstance(answer, Exception):
            raise answer
        return answer


class _Materials:
    """Gives every seed a prompt of its own."""

    def __init__(self) -> None:
        self.seeds: list[str] = []

    def __call__(self, name: str, seed: str) -> Material:
        self.seeds.append(seed)
        return Material([len(self.seeds)])


def _speeds(*values: float) -> list[Played | Exception]:
    return [Played({"decode tok/s": value}, foreign=0.0) for value in values]


def test_engines_take_turns_within_every_repetition_on_the_same_new_prompts() -> None:
    """One engine after the other would blame the last one for what the machine did meanwhile."""
    calls: list[tuple[str, str, int]] = []
    engines = [_Scripted("a", _speeds(1, 2, 3, 4), calls), _Scripted("b", _speeds(5, 6, 7, 8), calls)]
    materials = _Materials()
    told: list[str] = []
    results = measure(engines, ["W1", "W2"], materials, repeat=2, report=told.append)
    assert calls == [
        ("a", "W1", 1), ("b", "W1", 1), ("a", "W1", 2), ("b", "W1", 2),
        ("a", "W2", 3), ("b", "W2", 3), ("a", "W2", 4), ("b", "W2", 4),
    ]  # fmt: skip
    assert len(set(materials.seeds)) == 4
    assert told[:2] == ["W1, 1 of 2: a", "W1, 1 of 2: b"]
    assert results.outcomes["W2"]["b"].numbers == {"decode tok/s": [7, 8]}


def test_an_engine_that_fails_once_has_no_number_of_that_workload_and_the_others_go_on() -> None:
    calls: list[tuple[str, str, int]] = []
    broken = _Scripted("b", [*_speeds(5), EngineStepError("it burned"), *_speeds(7, 8, 9)], calls)
    engines = [_Scripted("a", _speeds(1, 2, 3, 4, 5, 6), calls), broken]
    results = measure(engines, ["W1", "W2"], _Materials(), repeat=3)
    assert results.outcomes["W1"]["b"].numbers == {}
    assert results.outcomes["W1"]["b"].reason == "failed: it burned"
    assert results.outcomes["W1"]["a"].numbers == {"decode tok/s": [1, 2, 3]}
    assert results.outcomes["W2"]["b"].numbers == {"decode tok/s": [7, 8, 9]}
    assert [call[:2] for call in calls].count(("b", "W1")) == 2


def test_what_an_engine_cannot_do_is_asked_once_and_what_it_can_do_of_it_is_kept() -> None:
    calls: list[tuple[str, str, int]] = []
    part = Played({"cold s": 1.0}, "keeps nothing", 0.0)
    engines = [_Scripted("a", [CannotError("has no fork")], calls), _Scripted("b", [part, part], calls)]
    results = measure(engines, ["W7"], _Materials(), repeat=2)
    assert (results.outcomes["W7"]["a"].reason, results.outcomes["W7"]["a"].numbers) == ("has no fork", {})
    assert (results.outcomes["W7"]["b"].reason, results.outcomes["W7"]["b"].numbers) == ("keeps nothing", {"cold s": [1, 1]})


@pytest.mark.parametrize(
    ("foreign", "is_busy"),
    [([0.0, 0.0, 0.9], False), ([0.0, 0.9, 0.9], True), ([0.9], True), ([0.04] * 3, False), ([None, None], False)],
)
def test_a_figure_is_marked_when_others_were_busy_in_half_of_its_repetitions(
    foreign: list[float | None], is_busy: bool
) -> None:
    assert Outcome(foreign=foreign).is_busy is is_busy


def _results(number: str, **values: list[float]) -> Results:
    return Results({"W1": {name: Outcome({number: numbers} if numbers else {}) for name, numbers in values.items()}})


def test_the_ratio_is_to_the_best_of_the_others_and_above_one_when_we_are_better() -> None:
    rates = _results("decode tok/s", ours=[10.0, 30.0, 20.0], slow=[1.0], fast=[99.0, 10.0, 9.0])
    assert ratio_to_best(rates, "W1", "decode tok/s", "ours") == (2.0, "fast")
    times = _results("first token ms", ours=[50.0], slow=[400.0], fast=[100.0])
    assert ratio_to_best(times, "W1", "first token ms", "ours") == (2.0, "fast")
    lost = _results("first token ms", ours=[50.0], fast=[25.0])
    assert ratio_to_best(lost, "W1", "first token ms", "ours") == (0.5, "fast")


def test_there_is_no_ratio_without_a_number_on_both_sides_nor_of_zero_nor_of_counts() -> None:
    assert ratio_to_best(_results("ms", ours=[1.0], other=[]), "W1", "ms", "ours") is None
    assert ratio_to_best(_results("ms", ours=[], other=[1.0]), "W1", "ms", "ours") is None
    assert ratio_to_best(_results("copied bytes", ours=[0.0], other=[1.0]), "W1", "copied bytes", "ours") is None
    assert ratio_to_best(_results("computed tokens", ours=[1.0], other=[2.0]), "W1", "computed tokens", "ours") is None


def test_what_there_is_after_every_workload_is_handed_over() -> None:
    """A bench takes an hour, and whoever ends it early wants what it had."""
    seen: list[list[str]] = []
    engine = _Scripted("a", _speeds(1, 2), [])
    measure([engine], ["W1", "W2"], _Materials(), repeat=1, checkpoint=lambda results: seen.append(list(results.outcomes)))
    assert seen == [["W1"], ["W1", "W2"]]


def test_engines_are_compared_by_the_first_tokens_they_took() -> None:
    played = [Played({"decode tok/s": 1.0}, first_ids=ids) for ids in ((1, 2, 3), (1, 2, 9), ())]
    engines = [_Scripted(name, [one], []) for name, one in zip("abc", played, strict=True)]
    results = measure(engines, ["W1"], _Materials(), repeat=1)
    assert results.num_same_ids("a", "a") == 3
    assert results.num_same_ids("a", "b") == 2
    assert results.num_same_ids("a", "c") is None
