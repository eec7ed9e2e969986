"""How much memory this process may still take: of the machine, of its control groups, or of a GPU.

Invariant: every number is what the kernel or the driver says now; nothing is assumed that can be asked.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import torch

_CGROUP_ROOT = Path("/sys/fs/cgroup")
_MEMINFO = Path("/proc/meminfo")


def available_memory(device: torch.device) -> int:
    """Return the bytes that can still be allocated on `device` without swapping."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free)
    return min(_machine_memory(), *_cgroup_memory(_CGROUP_ROOT, _own_cgroup()))


def _machine_memory() -> int:
    if _MEMINFO.exists():
        for line in _MEMINFO.read_text().splitlines():
            name, _, value = line.partition(":")
            if name == "MemAvailable":
                return int(value.split()[0]) * 1024
    # Without /proc (macOS) only the size of the memory is known; half of it is a careful guess at what is available.
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def _own_cgroup() -> str:
    """Path of this process below the root of the (version 2) hierarchy."""
    file = Path("/proc/self/cgroup")
    lines = file.read_text().splitlines() if file.exists() else []
    return next((line[3:] for line in lines if line.startswith("0::")), "/")


def _cgroup_memory(root: Path, path: str) -> Iterator[int]:
    """Yield what each control group from `path` up to `root` leaves; a group without a limit yields nothing.

    The page cache counts as used by a group but is given back on demand, so the inactive part of it is added.
    """
    own = root / path.strip("/")
    for group in (own, *own.parents):
        if not group.is_relative_to(root):
            break
        limit, used = _number(group / "memory.max"), _number(group / "memory.current")
        if limit is not None and used is not None:
            yield max(0, limit - used + _inactive_file(group / "memory.stat"))
    # Version 1 keeps memory in a hierarchy of its own; "no limit" is a huge number there, which the minimum ignores.
    limit, used = _number(root / "memory/memory.limit_in_bytes"), _number(root / "memory/memory.usage_in_bytes")
    if limit is not None and used is not None:
        yield max(0, limit - used + _inactive_file(root / "memory/memory.stat"))
    yield 2**62


def _number(file: Path) -> int | None:
    try:
        text = file.read_text().strip()
    except OSError:
        return None  # no such controller here
    return int(text) if text.isdigit() else None  # "max" means no limit


def _inactive_file(file: Path) -> int:
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return 0
    return next((int(value) for name, _, value in (line.partition(" ") for line in lines) if name == "inactive_file"), 0)
