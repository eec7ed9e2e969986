"""What a process takes, read from outside.

Invariant: a process that has just ended is no error; there is nothing to read then.
"""

import contextlib
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Taken:
    """What a process holds now, and the most memory it ever held."""

    memory_bytes: int
    peak_bytes: int
    num_files: int
    num_threads: int


def taken_by(pid: int) -> Taken | None:
    """Look at a process; None if it is gone."""
    try:
        status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        num_files = len(list(Path(f"/proc/{pid}/fd").iterdir()))
    except OSError:
        return None
    if "VmRSS" not in status:  # it has ended and waits to be noticed
        return None
    kilobytes = {name: int(status[name].split()[0]) for name in ("VmRSS", "VmHWM")}
    return Taken(kilobytes["VmRSS"] * 1024, kilobytes["VmHWM"] * 1024, num_files, int(status["Threads"]))


def is_engine(pid: int) -> bool:
    """Whether a child of a server is its engine, not what multiprocessing keeps beside it."""
    with contextlib.suppress(OSError):
        return b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False
