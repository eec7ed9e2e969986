"""A soak tells what grows from what does not, and does not judge the warm-up."""

from dataclasses import replace
from pathlib import Path

from chatpage.chaos.soak import ALLOWED, Moment, SoakReport, trends

MIB = 2**20
STEADY = [
    Moment(
        at_s=60.0 * i,
        server_memory_bytes=400 * MIB + i % 3 * MIB,
        engine_memory_bytes=900 * MIB,
        server_files=40 + i % 2,
        engine_files=20,
        server_threads=12,
        engine_threads=9,
        database_bytes=8 * MIB,
        kv_bytes=50 * MIB,
        generated_tokens=1000 * i,
    )
    for i in range(120)
]


def grows(series: list[Moment]) -> set[str]:
    found = trends(series)
    assert len(found) == len(ALLOWED)
    return {trend.name for trend in found if not trend.is_flat}


def test_what_only_goes_up_and_down_is_flat() -> None:
    assert grows(STEADY) == set()


def test_a_leak_of_memory_is_seen_with_its_speed() -> None:
    series = [replace(moment, server_memory_bytes=400 * MIB + i * MIB) for i, moment in enumerate(STEADY)]
    assert grows(series) == {"server_memory_bytes"}
    [trend] = [trend for trend in trends(series) if trend.name == "server_memory_bytes"]
    assert round(trend.per_hour / MIB) == 60


def test_handles_that_are_never_closed_are_seen() -> None:
    series = [replace(moment, engine_files=20 + i // 4) for i, moment in enumerate(STEADY)]
    assert grows(series) == {"engine_files"}


def test_a_cache_that_fills_at_first_is_no_leak() -> None:
    series = [replace(moment, kv_bytes=min(i, 10) * 20 * MIB) for i, moment in enumerate(STEADY)]
    assert grows(series) == set()


def test_the_series_is_written_as_it_is(tmp_path: Path) -> None:
    SoakReport(2, series=STEADY[:3]).write_csv(tmp_path / "series.csv")
    lines = (tmp_path / "series.csv").read_text().splitlines()
    assert lines[0].startswith("at_s,server_memory_bytes")
    assert len(lines) == 4
    assert lines[2].startswith(f"60.0,{401 * MIB}")


def test_too_few_moments_say_nothing() -> None:
    assert trends(STEADY[:7]) == []
