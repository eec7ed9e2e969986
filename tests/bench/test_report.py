"""The bench command: takes turns, medians, table and file."""

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from chatpage.bench import report
from chatpage.bench.counters import Counter
from chatpage.bench.workloads import TITLES
from chatpage.errors import ContextLengthError, InvalidRequestError
from tests.engine.engines import assert_whole, tiny_engine


class _Scripted:
    """A runner that gives prepared numbers and notes when it was called."""

    def __init__(self, name: str, values: list[float], calls: list[str]) -> None:
        self.name = name
        self._values = iter(values)
        self._calls = calls

    def warm_up(self) -> None:
        self._calls.append(f"{self.name} warm-up")

    def run(self, name: str, seed: str) -> dict[str, float]:
        self._calls.append(f"{self.name} {name} {seed}")
        return {"decode tok/s": next(self._values)}


def _console() -> Console:
    return Console(file=io.StringIO(), width=160)


def _text(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_runners_take_turns_and_get_the_same_new_prompts() -> None:
    calls: list[str] = []
    runners: list[report.Runner] = [_Scripted("a", [1, 2, 3, 4], calls), _Scripted("b", [5, 6, 7, 8], calls)]
    results = report.measure(runners, ["W1", "W2"], repeat=2, console=_console())
    assert [call[0] for call in calls] == ["a", "b"] * 4
    assert [call[2:] for call in calls[::2]] == [call[2:] for call in calls[1::2]]
    assert len({call[2:] for call in calls}) == 4
    assert results["W2"]["b"]["decode tok/s"] == [7, 8]


def test_the_table_shows_medians_and_how_many_times_better_we_are() -> None:
    results = {
        "W1": {"ours": {"decode tok/s": [10.0, 30.0, 20.0]}, "theirs": {"decode tok/s": [5.0, 5.0, 99.0]}},
        "W2": {"ours": {"first token ms": [50.0]}, "theirs": {"first token ms": [100.0]}},
        "W7": {"ours": {"copied bytes": [0.0]}, "theirs": {"copied bytes": [4096.0]}},
    }
    console = _console()
    console.print(report.render_times(results, ["ours", "theirs"]))
    lines = [line.split() for line in _text(console).splitlines() if line.strip()]
    assert lines[1][-3:] == ["20", "5", "4.0x"]
    assert lines[2][-3:] == ["50", "100", "2.0x"]
    assert lines[3][-3:] == ["0", "4,096", "-"]


@pytest.mark.timeout(600)
def test_every_workload_runs_on_both_and_is_written_down(tmp_path: Path) -> None:
    engine = tiny_engine(kv_memory=2**22, block_size=16, max_batched_tokens=512, check_integrity=False)
    console = _console()
    results = report.run_times(engine, console, tuple(TITLES), repeat=1, is_quick=True, json_file=tmp_path / "bench.json")
    assert_whole(engine)
    ours, theirs = ({name: by[runner] for name, by in results.items()} for runner in ("chatpage", "transformers"))
    for name in TITLES:
        assert ours[name].keys() == theirs[name].keys()
        assert all(
            value > 0 for number, values in ours[name].items() if number.endswith(("tok/s", " ms", " s")) for value in values
        )
    assert ours["W3"]["computed tokens"] == [28]
    assert ours["W6"]["computed tokens"] == [0]
    assert theirs["W6"]["computed tokens"] == [150]
    assert ours["W4"]["cold computed tokens"] == [150]
    assert ours["W4"]["warm computed tokens"] == [0]
    assert 290 <= ours["W5"]["cold computed tokens"][0] <= 100 + 8 * 25  # some questions begin with the same letters
    assert ours["W7"]["copied bytes"] == [0]
    assert theirs["W7"]["copied bytes"] == [400 * 2 * 2 * 2 * 16 * 4]
    assert ours["W8"]["computed tokens"] == [28]
    assert theirs["W8"]["computed tokens"] == [428]
    assert json.loads((tmp_path / "bench.json").read_text(encoding="utf-8"))["times"] == results
    assert "W5 8 chats on one system prompt" in _text(console)


def test_a_context_too_small_for_a_workload_is_refused_before_anything_runs() -> None:
    engine = tiny_engine(kv_memory=2**21, check_integrity=False)
    with pytest.raises(ContextLengthError, match="needs 4200 tokens, the engine takes 2048"):
        report.run_times(engine, _console(), ["W7"], repeat=1, is_quick=False, json_file=None)


def test_counters_fail_when_one_is_off(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    engine = tiny_engine(kv_memory=2**20)
    counted = [Counter("good", "0", "0", True), Counter("bad", "0", "7", False)]
    monkeypatch.setattr(report, "count_all", lambda _: counted)
    console = _console()
    assert not report.run_counters(engine, console, json_file=tmp_path / "c.json")
    assert "NO" in _text(console)
    assert [row["ok"] for row in json.loads((tmp_path / "c.json").read_text(encoding="utf-8"))["counters"]] == [True, False]


def test_a_file_that_cannot_be_written_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "count_all", lambda _: [])
    with pytest.raises(InvalidRequestError, match="Cannot write /no/such"):
        report.run_counters(tiny_engine(kv_memory=2**20), _console(), json_file=Path("/no/such/file.json"))
