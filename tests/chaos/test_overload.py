"""A crowd that asks for far more than there is: who is served is served whole, who is not is told when, and nothing stays."""

import asyncio
import sys
from pathlib import Path

import pytest

from chatpage.chaos.crowd import Account, Stream
from chatpage.chaos.overload import BY_THE_CLOCK, OverloadReport, Plan, judge, run
from tests.tiny_models import tiny_llama_folder

ARGUMENTS = ("--device", "cpu", "--dtype", "float32", "--kv-memory", "1MiB", "--kv-disk", "off")
MIB = 2**20


@pytest.mark.timeout(600)
@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_a_crowd_is_refused_honestly_and_leaves_nothing(tmp_path: Path) -> None:
    plan = Plan(
        seconds=8.0,
        calm_s=2.0,
        num_sockets=40,
        num_polite=4,
        num_users=6,
        num_streams=4,
        num_queued=4,
        max_tokens=24,
        arguments=["--model", str(tiny_llama_folder()), *ARGUMENTS],
    )
    report = asyncio.run(run(tmp_path / "data", plan))
    wrong = [violation for violation in report.violations if violation.finding.kind not in BY_THE_CLOCK]
    assert not wrong, report.render()
    assert report.crowd.told_s, report.render()
    assert report.crowd.streams
    assert all(stream.num_tokens == plan.max_tokens for stream in report.crowd.streams)
    counted = len(report.crowd.streams) + len(report.crowd.told_s) + report.crowd.num_left
    assert counted <= report.crowd.num_asked


def a_report() -> OverloadReport:
    """A report of an overload in which all went well."""
    report = OverloadReport(Plan(num_sockets=10), calm_s=10.0, crowd_s=10.0)
    report.calm.streams += [Stream(0.0, 1.0, 2.0, 11)] * 20
    report.crowd = Account(num_asked=200, told_s=[1.0] * 180, tellings=[1], most_told=1, pongs_s=[0.01] * 10, num_pings=10)
    report.crowd.streams += [Stream(0.0, 1.0, 2.5, 11)] * 20
    report.ttft_before, report.normal_after_s = [0.1, 0.1], 0.2
    report.memory, report.calm_memory = {"server": [200 * MIB] * 8}, {"server": 190 * MIB}
    return report


def kinds(report: OverloadReport) -> set[str]:
    return {finding.kind for finding in judge(report)}


def test_what_went_well_is_not_complained_about() -> None:
    assert kinds(a_report()) == set()
    assert "0 violations" in a_report().render()


def test_streams_that_the_crowd_slowed_below_half_are_seen() -> None:
    report = a_report()
    report.crowd.streams[:] = [Stream(0.0, 1.0, 3.5, 11)] * 20
    assert kinds(report) == {"slow"}


def test_memory_that_grows_with_the_crowd_is_seen() -> None:
    report = a_report()
    report.memory["server"] = [200 * MIB + i * 10 * MIB for i in range(8)]
    assert kinds(report) == {"memory"}


def test_who_waits_as_told_for_nothing_is_seen() -> None:
    report = a_report()
    report.crowd.most_told = 30
    assert kinds(report) == {"starved"}


def test_a_server_that_stays_slow_is_seen() -> None:
    report = a_report()
    report.normal_after_s = None
    assert kinds(report) == {"latency"}


def test_pings_without_answers_are_seen() -> None:
    report = a_report()
    report.crowd.num_pings = 100
    assert kinds(report) == {"ping"}
