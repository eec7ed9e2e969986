"""A minute of chaos: users, faults of every kind, and nothing lost, mixed up or left behind.

`python -m chatpage.chaos` does it for as long as one likes.
"""

import sys

import pytest

from chatpage.chaos.faults import FAULTS
from chatpage.chaos.trial import Plan, run
from tests.tiny_models import tiny_llama_folder

ARGUMENTS = ("--device", "cpu", "--dtype", "float32", "--kv-memory", "1MiB", "--kv-disk-size", "8MiB")
GENEROUS_S = 120.0  # the machine may be busy with other tests; what is measured here is what holds, not how fast


@pytest.mark.timeout(900)
@pytest.mark.skipif(sys.platform != "linux", reason="mounts as Linux does, and looks into /proc")
def test_nothing_is_lost_mixed_up_or_left_behind() -> None:
    plan = Plan(
        seconds=40.0,
        rounds=1,
        num_users=6,
        seed=7,
        pause_s=0.7,
        recovery_s=GENEROUS_S,
        max_lost_s=GENEROUS_S,
        disk_bytes=64 * 2**20,
        arguments=["--model", str(tiny_llama_folder()), *ARGUMENTS],
    )
    report = run(plan)
    assert not report.violations, report.render()
    assert report.counts["tokens heard"] > 100
    assert report.num_messages > 20
    assert report.num_rests >= 1
    assert set(report.recoveries) | set(report.skipped) == set(FAULTS)
