"""A fault that cannot be caused here is named, with the reason, and never passed over."""

import random
from pathlib import Path

from chatpage.chaos.disks import Disk
from chatpage.chaos.faults import FAULTS, Faults
from chatpage.chaos.findings import Findings
from chatpage.chaos.victim import Victim
from chatpage.chaos.wire import Wire


def faults_on(disk: Disk | str) -> Faults:
    victim = Victim(Path("nowhere"), (), Wire(), "key")
    return Faults(victim, disk, random.Random(0), Findings(), lambda: None)


def test_on_a_file_system_of_its_own_everything_can_happen() -> None:
    faults = faults_on(Disk(Path("nowhere"), "ext4", is_real=True))
    assert faults.possible(list(FAULTS)) == list(FAULTS)
    assert faults.skipped == {}


def test_without_one_the_faults_of_disks_are_skipped_with_why() -> None:
    faults = faults_on("mount: only root can do that")
    assert set(faults.possible(list(FAULTS))) == set(FAULTS) - {"full_disk", "slow_disk"}
    assert faults.skipped.keys() == {"full_disk", "slow_disk"}
    assert "only root" in faults.skipped["full_disk"]


def test_memory_is_never_slow() -> None:
    faults = faults_on(Disk(Path("nowhere"), "tmpfs", is_real=False))
    assert faults.possible(["slow_disk", "full_disk"]) == ["full_disk"]
    assert faults.skipped.keys() == {"slow_disk"}


def test_only_what_was_wanted_is_skipped() -> None:
    faults = faults_on("mount: only root can do that")
    assert faults.possible(["cut"]) == ["cut"]
    assert faults.skipped == {}
