"""The folder of block files: private, written atomically, kept under a size by removing what was used longest ago.

Invariants: a file under its final name was written whole; everything lies below one folder of our own, `kv-v1`, which only its
owner can read; a file that is found damaged is removed. A part of the disk stays free for what matters more than a cache.
Several processes may share a folder: each file is published by one rename, and the files themselves are the index (the time of
the last change is the time of the last use).

    DIR/kv-v1/3f/3f09...e1-77ab...02.safetensors      block 77ab...02, full or partial, which follows block 3f09...e1

So the blocks that follow one, the ways a conversation went on, stand side by side.
"""

import contextlib
import errno
import itertools
import os
import shutil
import stat
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from io import RawIOBase
from pathlib import Path

from chatpage.engine.kv_disk.block_file import DamagedFile
from chatpage.engine.kv_disk.chain import Name

SUBFOLDER = "kv-v1"
_WHOLE, _PARTIAL = ".safetensors", ".tmp"
_OLD_PARTIAL_S = 3600.0
_MAX_CHILDREN = 8  # looked at behind one block, those used last
_SLACK = 16  # the folder is counted anew after so many parts of the limit were written; so much is kept free for others
_RESERVED_SHARE, _MAX_RESERVED = 8, 2**30  # one part in so many of the disk, at most so many bytes, is left to others
_USE_STEP_NS = 1_000  # a block counts as used that much before the block it hangs on, so that leaves go first
_OUT_OF_RESOURCES = {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EINTR}
_OPEN_FLAGS = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)


@dataclass(frozen=True, slots=True)
class Usage:
    """What lies in the folder."""

    num_files: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A block in the folder: when it was used last, and what it takes."""

    used_ns: int
    num_bytes: int
    path: Path


class Folder:
    """The files below `path`, of at most `limit` bytes together.

    Args:
        on_evicted: Called with files that were removed to stay under the limit.
    """

    def __init__(self, path: Path, limit: int, on_evicted: Callable[[list[Path]], None] | None = None) -> None:
        self.path = path / SUBFOLDER
        self.limit = limit
        self._on_evicted = on_evicted
        self.num_evicted = 0
        self._counted = Usage(0, 0)
        self._written_since = Usage(0, 0)
        self._numbers = itertools.count()
        self._lock = threading.Lock()

    def make(self) -> None:
        """Make the folder, readable by its owner alone.

        Raises:
            OSError: It cannot be made, or belongs to somebody else.
        """
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        if hasattr(os, "geteuid") and self.path.lstat().st_uid != os.geteuid():
            raise PermissionError(errno.EPERM, "it belongs to another user", str(self.path))
        if self.path.is_symlink():
            raise NotADirectoryError(errno.ENOTDIR, "it is a link", str(self.path))
        self.path.chmod(0o700)

    @property
    def usage(self) -> Usage:
        """What was there when it was counted last, and what was written since."""
        with self._lock:
            counted, written = self._counted, self._written_since
        return Usage(counted.num_files + written.num_files, counted.num_bytes + written.num_bytes)

    # -- names -----------------------------------------------------------------------------------------------------

    def place(self, parent: Name, name: Name) -> Path:
        """Return the place of the block `name` that follows `parent`."""
        digits = parent.hex()
        return self.path / digits[:2] / f"{digits}-{name.hex()}{_WHOLE}"

    def has(self, path: Path) -> bool:
        """Whether something has this name; it may still turn out to be damaged."""
        with contextlib.suppress(OSError):
            os.lstat(path)
            return True
        return False

    def children_of(self, parent: Name) -> list[Path]:
        """Return the blocks that follow `parent`, a few of them, those used last first."""
        digits = parent.hex()
        found: list[tuple[int, str]] = []
        for entry in _scan(self.path / digits[:2]):
            if entry.name.startswith(digits) and entry.name.endswith(_WHOLE):
                with contextlib.suppress(OSError):
                    found.append((entry.stat(follow_symlinks=False).st_mtime_ns, entry.path))
        return [Path(path) for _, path in sorted(found, reverse=True)[:_MAX_CHILDREN]]

    # -- files -----------------------------------------------------------------------------------------------------

    def read(self, path: Path, max_size: int) -> bytearray | None:
        """Return the bytes of a file, or None if there is none.

        Raises:
            DamagedFile: It is no regular file, is larger than any of ours, or cannot be read.
        """
        try:
            descriptor = os.open(path, _OPEN_FLAGS)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            if error.errno in _OUT_OF_RESOURCES:
                return None
            raise DamagedFile(f"it cannot be opened: {error.strerror}") from error
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode) or status.st_size > max_size:
                raise DamagedFile("it is no file of ours")
            with open(descriptor, "rb", buffering=0, closefd=False) as stream:
                data = bytearray(status.st_size)
                if _read_into(stream, data) < len(data):
                    raise DamagedFile("it ends early")
                return data
        except OSError as error:
            raise DamagedFile(f"it cannot be read: {error.strerror}") from error
        finally:
            os.close(descriptor)

    def write(self, path: Path, parts: Iterable[bytes | memoryview], used_ns: int) -> bool:
        """Publish a file whole, last used at `used_ns`; False if the folder is full of what was used later.

        Raises:
            OSError: The disk is full, cannot be written, or is gone; nothing has the name then.
        """
        parts = list(parts)
        size = sum(memoryview(part).nbytes for part in parts)
        if not self._make_room(size, used_ns):
            return False
        path.parent.mkdir(mode=0o700, exist_ok=True)  # but not the folder itself: if that has gone, it stays gone
        partial = path.parent / f"{os.getpid()}-{next(self._numbers)}-{path.name[:8]}{_PARTIAL}"
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o600)
        try:
            try:
                with open(descriptor, "wb", buffering=0, closefd=False) as stream:
                    for part in parts:
                        _write_all(stream, part)
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            os.utime(partial, ns=(used_ns, used_ns))
            if path.is_dir():
                self.remove(path)
            os.replace(partial, path)
        except BaseException:
            with contextlib.suppress(OSError):
                partial.unlink()
            raise
        with self._lock:
            written = self._written_since
            self._written_since = Usage(written.num_files + 1, written.num_bytes + size)
        return True

    def remove(self, path: Path) -> None:
        """Remove what lies at one of our names, whatever it is; it does not matter if it cannot be."""
        try:
            path.unlink(missing_ok=True)
        except OSError:
            shutil.rmtree(path, ignore_errors=True)

    def touch(self, paths: Sequence[Path], used_ns: int) -> list[Path]:
        """Note that a chain was used at a time, its first block last; return those that are not there."""
        missing = []
        for depth, path in enumerate(paths):
            used = used_time(used_ns, depth)
            try:
                if os.lstat(path).st_mtime_ns < used:
                    os.utime(path, ns=(used, used))
            except OSError:
                missing.append(path)
        return missing

    # -- the limit -------------------------------------------------------------------------------------------------

    def count(self, room: int = 0, used_ns: int | None = None, missing: int = 0) -> bool:
        """Count what lies there, remove what crashed writers left, and what is over the limit less `room` bytes.

        With `missing`, so many bytes are removed at least. With `used_ns`, nothing that was used later than that makes room:
        False if there is not enough then.
        """
        self._remove_old_partials()
        files = self.files()
        total = sum(file.num_bytes for file in files)
        most = min(self.limit - max(self.limit // _SLACK, room), total - missing)
        removed = 0
        while total > most and removed < len(files) and (used_ns is None or files[removed].used_ns <= used_ns):
            self.remove(files[removed].path)
            total -= files[removed].num_bytes
            removed += 1
        if self._on_evicted is not None:
            self._on_evicted([file.path for file in files[:removed]])
        with self._lock:
            self.num_evicted += removed
            self._counted = Usage(len(files) - removed, total)
            self._written_since = Usage(0, 0)
        return total <= most

    def files(self) -> list[StoredFile]:
        """Return every block that lies there, the one used longest ago first."""
        found = []
        for entry in self._entries():
            with contextlib.suppress(OSError):  # another process removed it
                if entry.name.endswith(_WHOLE):
                    status = entry.stat(follow_symlinks=False)
                    found.append(StoredFile(status.st_mtime_ns, status.st_size, Path(entry.path)))
        return sorted(found, key=lambda file: file.used_ns)

    def clear(self) -> None:
        """Remove every file of a block; a process that uses the folder goes on."""
        for file in self.files():
            self.remove(file.path)

    def _make_room(self, size: int, used_ns: int) -> bool:
        if size > self.limit:
            raise OSError(errno.EFBIG, f"a block of {size:,} bytes does not fit below --kv-disk-size", str(self.path))
        missing = self._missing_on_disk(size)
        if not missing and self._written_since.num_bytes + size <= self.limit // _SLACK:
            return True
        if self.count(size, used_ns, missing):
            return True
        if missing and not self._counted.num_files:
            raise OSError(errno.ENOSPC, "what is left of the disk is kept free for others", str(self.path))
        return False

    def _missing_on_disk(self, size: int) -> int:
        """Return how many bytes of ours must go so that enough of the disk stays free when so many come; a few more, if any."""
        disk = shutil.disk_usage(self.path)
        reserved = min(disk.total // _RESERVED_SHARE, _MAX_RESERVED)
        return size + reserved + reserved // _SLACK - disk.free if disk.free < size + reserved else 0

    def _remove_old_partials(self) -> None:
        old = time.time() - _OLD_PARTIAL_S
        for entry in self._entries():
            with contextlib.suppress(OSError):
                if entry.name.endswith(_PARTIAL) and entry.stat(follow_symlinks=False).st_mtime < old:
                    os.unlink(entry.path)

    def _entries(self) -> Iterator["os.DirEntry[str]"]:
        for shard in _scan(self.path):
            if len(shard.name) == 2 and shard.is_dir(follow_symlinks=False):
                yield from _scan(shard.path)


def used_time(used_ns: int, depth: int) -> int:
    """Return when block number `depth` of a chain that was used at `used_ns` counts as used: its last block goes first."""
    return used_ns - depth * _USE_STEP_NS


def _scan(path: str | Path) -> list["os.DirEntry[str]"]:
    try:
        with os.scandir(path) as entries:
            return list(entries)
    except OSError:
        return []


def _read_into(stream: RawIOBase, data: bytearray) -> int:
    view, total = memoryview(data), 0
    while total < len(data):
        count = stream.readinto(view[total:])
        if not count:
            break
        total += count
    return total


def _write_all(stream: RawIOBase, part: bytes | memoryview) -> None:
    view = memoryview(part).cast("B")
    while view.nbytes:
        view = view[stream.write(view) or 0 :]
