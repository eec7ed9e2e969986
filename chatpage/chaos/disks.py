"""A small file system of its own, to be filled and slowed without harm to any other.

Invariant: when the block is left, nothing is mounted and nothing of it lies anywhere.
"""

import contextlib
import errno
import os
import shutil
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_CHUNKS = (2**22, 2**16, 2**12)
_FLOOD_BYTES = 2**21


@dataclass(frozen=True, slots=True)
class Disk:
    """A mounted file system. `is_real`: blocks lie on a disk, so writing them takes time."""

    path: Path
    kind: str
    is_real: bool

    @property
    def folder(self) -> Path:
        """Where files of the trial go."""
        return self.path / "data"

    @contextlib.contextmanager
    def full(self) -> Iterator[None]:
        """Leave not a byte free as long as the block runs."""
        ballast = self.path / "ballast"
        try:
            _fill(ballast)
            yield
        finally:
            ballast.unlink(missing_ok=True)

    @contextlib.contextmanager
    def busy(self, num_writers: int = 2) -> Iterator[list[float]]:
        """Write and flush without end as long as the block runs; the list gets the seconds that each flush took."""
        seconds: list[float] = []
        end = threading.Event()
        writers = [threading.Thread(target=_flood, args=(self.path / f"flood{i}", end, seconds)) for i in range(num_writers)]
        try:
            for writer in writers:
                writer.start()
            yield seconds
        finally:
            end.set()
            for writer in writers:
                writer.join()

    def flush_s(self, times: int = 5) -> float:
        """Return the median seconds that a small write and its flush take."""
        with tempfile.TemporaryFile(dir=self.path) as file:
            return statistics.median(_flush(file.fileno(), b"x" * 4096) for _ in range(times))


@contextlib.contextmanager
def small_disk(num_bytes: int) -> Iterator[Disk | str]:
    """Mount an ext4 in a file, else a tmpfs; where neither is allowed, hand out why."""
    with tempfile.TemporaryDirectory(prefix="chatpage-chaos-") as folder:
        place, image = Path(folder) / "disk", Path(folder) / "image"
        place.mkdir()
        with image.open("wb") as file:
            file.truncate(num_bytes)
        make = ["mkfs.ext4", "-q", "-F", "-m", "0", str(image)]
        reason = _run(make) or _run(["mount", "-o", "loop", str(image), str(place)])
        if reason is None:
            disk = Disk(place, "ext4", is_real=True)
        elif _run(["mount", "-t", "tmpfs", "-o", f"size={num_bytes}", "chaos", str(place)]) is None:
            disk = Disk(place, "tmpfs", is_real=False)
        else:
            yield reason
            return
        try:
            yield disk
        finally:
            if _run(["umount", str(place)]) is not None:
                _run(["umount", "-l", str(place)])  # somebody still looks into it; it goes when they end


def _run(command: list[str]) -> str | None:
    """Run a command; return why it failed, or None."""
    program = shutil.which(command[0], path=os.environ.get("PATH", "") + ":/usr/sbin:/sbin")
    if program is None:
        return f"there is no {command[0]}"
    done = subprocess.run([program, *command[1:]], capture_output=True, text=True, check=False)
    return None if done.returncode == 0 else (done.stderr.strip() or f"{command[0]} failed").splitlines()[-1]


def _fill(path: Path) -> None:
    with path.open("wb", buffering=0) as file:
        size = 0
        for chunk in _CHUNKS:
            with contextlib.suppress(_NoSpace):
                while True:
                    _allocate(file.fileno(), size, chunk)
                    size += chunk


class _NoSpace(Exception):
    """The file system is full."""


def _allocate(descriptor: int, offset: int, size: int) -> None:
    try:
        os.posix_fallocate(descriptor, offset, size)
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise _NoSpace from error
        raise


def _flood(path: Path, end: threading.Event, seconds: list[float]) -> None:
    with path.open("wb", buffering=0) as file:
        while not end.is_set():
            os.lseek(file.fileno(), 0, os.SEEK_SET)
            with contextlib.suppress(OSError):  # the disk may be full as well
                seconds.append(_flush(file.fileno(), os.urandom(_FLOOD_BYTES)))
    path.unlink()


def _flush(descriptor: int, data: bytes) -> float:
    began = time.perf_counter()
    os.write(descriptor, data)
    os.fsync(descriptor)
    return time.perf_counter() - began
