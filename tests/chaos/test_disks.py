"""A file system of its own is filled for real, and nothing of it stays."""

import errno
import os
import sys

import pytest

from chatpage.chaos.disks import Disk, small_disk

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="mounts as Linux does")


def mounts() -> str:
    with open("/proc/mounts", encoding="utf-8") as file:
        return file.read()


def test_nothing_can_be_written_to_a_full_disk_and_everything_after(disk: Disk) -> None:
    before = disk.path / "before"
    before.write_bytes(b"x")
    with disk.full(), pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
        (disk.path / "more").write_bytes(b"x" * 4096)
    assert before.read_bytes() == b"x"
    (disk.path / "more").write_bytes(b"x" * 4096)


def test_a_busy_disk_is_written_to_all_the_while_and_left_clean(disk: Disk) -> None:
    with disk.busy() as seconds:
        while len(seconds) < 2:
            disk.flush_s(1)
    assert not list(disk.path.glob("flood*"))


def test_nothing_stays_mounted() -> None:
    with small_disk(2**23) as disk:
        if isinstance(disk, str):
            pytest.skip(f"no file system can be mounted here: {disk}")
        assert str(disk.path) in mounts()
    assert str(disk.path) not in mounts()
    assert not disk.path.exists()
