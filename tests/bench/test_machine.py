"""What is read of the machine: memory, and how busy the others are."""

import os
import sys
from collections.abc import Iterator

import pytest

from chatpage.bench import machine

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="read from /proc")


def test_a_peak_begins_again_when_it_is_reset() -> None:
    big = bytearray(200 * 2**20)
    big[::4096] = b"x" * len(big[::4096])
    before = machine.peak_mib(os.getpid())
    del big
    assert before is not None
    if not machine.reset_peak(os.getpid()):
        pytest.skip("this system lets nobody reset a peak")
    after = machine.peak_mib(os.getpid())
    assert after is not None
    assert after < before - 150


def test_memory_of_a_process_that_is_gone_is_unknown() -> None:
    nobody = 2**22 + 1  # more than Linux gives
    assert machine.resident_mib(nobody) is None
    assert machine.cpu_s(nobody) is None
    assert not machine.reset_peak(nobody)


def _clock(monkeypatch: pytest.MonkeyPatch, *, busy: list[float], own: dict[int, list[float]]) -> None:
    """Let processors and processes have used these seconds when they are asked, while one second passes."""
    readings: Iterator[float] = iter(busy)
    parts = {pid: iter(values) for pid, values in own.items()}
    moments = iter([0.0, 1.0])
    monkeypatch.setattr(machine, "busy_s", lambda: next(readings))
    monkeypatch.setattr(machine, "cpu_s", lambda pid: next(parts[pid]))
    monkeypatch.setattr("chatpage.bench.machine.os.cpu_count", lambda: 2)
    monkeypatch.setattr("chatpage.bench.machine.time.perf_counter", lambda: next(moments))


def test_what_the_measured_process_and_the_bench_use_is_not_foreign(monkeypatch: pytest.MonkeyPatch) -> None:
    _clock(monkeypatch, busy=[100.0, 102.0], own={os.getpid(): [1.0, 1.1], 77: [5.0, 6.4]})
    share = machine.OthersWatch([77]).share()
    assert share == pytest.approx(0.25)  # 0.5 of 2 seconds


def test_a_process_that_started_meanwhile_can_be_one_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """To load a model takes all processors, and must not make its own start a busy one."""
    _clock(monkeypatch, busy=[100.0, 102.0], own={os.getpid(): [1.0, 1.0], 77: [1.5]})
    assert machine.OthersWatch([]).share([77]) == pytest.approx(0.25)


def test_the_share_of_others_is_never_negative(monkeypatch: pytest.MonkeyPatch) -> None:
    """The two files are not read at one moment."""
    _clock(monkeypatch, busy=[100.0, 101.0], own={os.getpid(): [1.0, 2.02]})
    assert machine.OthersWatch([]).share() == 0.0


def test_patience_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "busy_s", iter(range(0, 10**6, 100)).__next__)
    monkeypatch.setattr(machine, "_POLL_S", 0.01)
    machine.wait_until_quiet(0.05, 0.1)


def test_the_machine_is_described() -> None:
    facts = machine.describe()
    assert facts["processor"]
    assert int(facts["processors"]) == os.cpu_count()
