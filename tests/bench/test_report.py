"""What the bench shows: table, notes, file; and the counters."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from chatpage.bench import report
from chatpage.bench.counters import Counter
from chatpage.bench.measuring import Outcome, Results
from chatpage.errors import InvalidRequestError
from tests.engine.engines import tiny_engine


def _console() -> Console:
    return Console(file=io.StringIO(), width=160)


def _text(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def _facts(**settings: Any) -> report.Facts:
    engines = {"chatpage": {"version": "1"}, "fast": {"version": "2"}, "odd": {"version": "3"}}
    defaults: dict[str, Any] = {
        "machine": {"threads": "2"},
        "model": "m",
        "repeat": 3,
        "is_quick": False,
        "engines": engines,
        "absent": {},
    }
    return report.Facts(**defaults | settings)


def _results() -> Results:
    quiet: list[float | None] = [0.0] * 3
    busy: list[float | None] = [0.5] * 3
    return Results(
        {
            "W1": {
                "chatpage": Outcome({"decode tok/s": [10.0, 30.0, 20.0]}, quiet),
                "fast": Outcome({"decode tok/s": [5.0, 5.0, 99.0]}, busy),
                "odd": Outcome(reason="failed: it burned"),
            },
            "W7": {
                "chatpage": Outcome({"copied bytes": [0.0]}, quiet),
                "fast": Outcome({"copied bytes": [4096.0]}, quiet),
                "odd": Outcome(reason="has no fork"),
            },
        },
        {"chatpage": (1, 2, 3), "fast": (1, 2, 4)},
    )


def test_the_table_shows_medians_extremes_marks_and_the_ratio_to_the_best() -> None:
    console = _console()
    report.show(_results(), _facts(), console)
    lines = [line.split() for line in _text(console).splitlines() if line.strip()]
    assert lines[1] == ["W1", "decode,", "one", "stream"]
    assert lines[2] == ["decode", "tok/s", "20", "~5", "-", "4.00x", "fast"]
    assert lines[3] == ["10", "to", "30", "5", "to", "99"]
    assert lines[5] == ["copied", "bytes", "0", "4,096", "-", "-"]


def test_what_the_table_cannot_say_is_said_below_it() -> None:
    text = "\n".join(report.notes(_results(), _facts(absent={"vllm": "not installed: pip install vllm"})))
    assert "~ taken while other processes had more than 5%" in text
    assert "fast took the same first 2 of 3 tokens in W1." in text
    assert "W1 -: odd failed: it burned." in text
    assert "W7 -: odd has no fork." in text
    assert "vllm: not installed: pip install vllm." in text


def test_the_file_holds_every_value_how_it_was_taken_and_the_ratios(tmp_path: Path) -> None:
    report.write_files(_results(), _facts(), json_file=tmp_path / "b.json", chart_file=tmp_path / "b.svg")
    written = json.loads((tmp_path / "b.json").read_text(encoding="utf-8"))
    speed = written["times"]["W1"]["chatpage"]["numbers"]["decode tok/s"]
    assert speed == {"median": 20, "min": 10, "max": 30, "values": [10, 30, 20]}
    assert written["times"]["W1"]["fast"]["busy"] is True
    assert written["times"]["W1"]["fast"]["others' share of the processors"] == [0.5] * 3
    assert written["times"]["W7"]["odd"]["reason"] == "has no fork"
    assert written["ratios"] == {"W1": {"decode tok/s": {"ratio": 4.0, "best": "fast"}}, "W7": {}}
    assert written["engines"]["fast"] == {"version": "2"}
    assert (tmp_path / "b.svg").read_text(encoding="utf-8").startswith("<svg")


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
