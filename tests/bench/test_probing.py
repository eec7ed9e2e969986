"""Two users who probe each other: no cached token, in memory, on disk and after a restart, while each finds their own."""

import random
import sys
from pathlib import Path

import pytest

from chatpage.bench.probing import Answer, Finding, probe
from chatpage_kernels.cpu import build
from tests.tiny_models import tiny_llama_folder

TINY = ["--device", "cpu", "--dtype", "float32", "--kv-memory", "8MiB"]


@pytest.mark.skipif(sys.platform != "linux", reason="looks for child processes in /proc")
def test_what_another_has_cached_is_found_by_nobody_else_in_memory_or_after_a_restart(tmp_path: Path) -> None:
    """A probe that finds a shared prefix tells what somebody else asked. The speed is looked at by the bench."""
    build.start()
    build.wait(200)  # a server that changes to the compiled kernels on the way saves blocks that the next one cannot use
    arguments = ["--model", str(tiny_llama_folder()), *TINY]
    findings = probe(tmp_path, arguments, times=3, num_tokens=100, chance=random.Random(2))
    assert [finding.place for finding in findings] == ["in memory", "after a restart"]
    for finding in findings:
        assert finding.num_leaked_tokens == 0
        assert (len(finding.others), len(finding.nobodys)) == (3, 3)
        assert all(answer.cached_tokens >= 99 for answer in finding.own), "Ann's own prompts were not cached: nothing is shown"


def test_a_difference_is_told_from_noise() -> None:
    def answers(*milliseconds: float) -> list[Answer]:
        return [Answer(value / 1e3, 0) for value in milliseconds]

    slow, same, fast = answers(100, 102, 98, 101), answers(99, 103, 100, 101), answers(10, 11, 9, 10)
    assert "within noise" in Finding("here", same, slow, fast).line()
    assert "beyond noise" in Finding("here", fast, slow, fast).line()
    assert Finding("here", fast, slow, fast).ratio == pytest.approx(0.1, rel=0.02)
