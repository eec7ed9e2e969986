"""What the machine does while something is measured: memory of a process, and how busy all other processes are.

Read from /proc, so it is known on Linux only; elsewhere everything here is None.
"""

import os
import platform
import time
from collections.abc import Iterable
from pathlib import Path

_PROC = Path("/proc")
_MIB = 1024  # in kB
_IDLE, _IOWAIT, _GUEST = 3, 4, 8  # fields of the first line of /proc/stat
_POLL_S = 0.5


def resident_mib(pid: int) -> float | None:
    return _status_mib(pid, "VmRSS:")


def peak_mib(pid: int) -> float | None:
    """The most memory that a process had since `reset_peak`."""
    return _status_mib(pid, "VmHWM:")


def reset_peak(pid: int) -> bool:
    """Let the peak begin at what a process has now; False if that cannot be done."""
    try:
        (_PROC / str(pid) / "clear_refs").write_text("5")
    except OSError:
        return False
    return True


class OthersWatch:
    """How much of all processors other processes took since it was made."""

    def __init__(self, pids: Iterable[int]) -> None:
        self._pids = {*pids, os.getpid()}
        self._busy_s = busy_s()
        self._own_s = self._own()
        self._started = time.perf_counter()

    def share(self, started: Iterable[int] = ()) -> float | None:
        """Return a share of the machine, from 0 to 1.

        Args:
            started: Processes that began since and are no others either.
        """
        busy, own = busy_s(), self._own(started)
        if busy is None or own is None or self._busy_s is None or self._own_s is None:
            return None
        seconds = max(time.perf_counter() - self._started, 1e-9) * (os.cpu_count() or 1)
        return min(1.0, max(0.0, (busy - self._busy_s - own + self._own_s) / seconds))

    def _own(self, started: Iterable[int] = ()) -> float | None:
        parts = [cpu_s(pid) for pid in (*self._pids, *started)]
        return None if None in parts else sum(part for part in parts if part is not None)


def wait_until_quiet(share: float, patience_s: float) -> None:
    """Wait until other processes take at most `share` of the machine, but no longer than `patience_s`."""
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline:
        watch = OthersWatch(())
        time.sleep(_POLL_S)
        seen = watch.share()
        if seen is None or seen <= share:
            return


def busy_s() -> float | None:
    """Seconds that all processors together were busy since the machine started, stolen time included."""
    try:
        fields = (_PROC / "stat").read_text().partition("\n")[0].split()[1:]
    except OSError:
        return None
    ticks = sum(int(field) for i, field in enumerate(fields[:_GUEST]) if i not in (_IDLE, _IOWAIT))
    return ticks / os.sysconf("SC_CLK_TCK")


def cpu_s(pid: int) -> float | None:
    """Seconds of CPU that a process used."""
    try:
        fields = (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def describe() -> dict[str, str]:
    """Say what machine this is."""
    facts = {"system": platform.platform(), "processors": str(os.cpu_count())}
    try:
        lines = (_PROC / "cpuinfo").read_text().splitlines()
        memory = (_PROC / "meminfo").read_text().split()[1]
    except OSError:
        return facts | {"processor": platform.processor() or platform.machine()}
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    name = names[0] if names else platform.machine()
    return facts | {"processor": name, "memory": f"{int(memory) / 2**20:.1f} GiB"}


def _status_mib(pid: int, key: str) -> float | None:
    try:
        lines = (_PROC / str(pid) / "status").read_text().splitlines()
    except OSError:
        return None
    values = [int(line.split()[1]) for line in lines if line.startswith(key)]
    return values[0] / _MIB if values else None
