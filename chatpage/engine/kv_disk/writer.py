"""The thread that writes block files: behind everything else, never waited for by a step.

Invariants: what waits is bounded in bytes, the names of files among them; a block with a value that is no number is not
written. Beside running streams it rests most of the time, so that they hardly notice. After an error of the disk writing
pauses, a second at first and then ever longer, and is tried again: an outage is logged when it begins and when it ends, and
what was not written is not thought to be there. Who hands in blocks asks `has_room` first; a use that has no room is forgotten,
which costs no more than the age of some files.
"""

import contextlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import thread_time

import numpy as np
import numpy.typing as npt
import torch

from chatpage.engine.kv_disk.block_file import encode
from chatpage.engine.kv_disk.chain import Geometry, Name
from chatpage.engine.kv_disk.folder import Folder

MAX_WAITING_BYTES, MAX_WAITING_BYTES_BESIDE_STREAMS = 64 * 2**20, 2**20
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0
_BYTES_PER_PATH = 256
_NICENESS = 10
_REST = 15.0  # beside running streams: seconds for each second of work
_EXPONENTS: dict[torch.dtype, tuple[type[np.uint16] | type[np.uint32], int]] = {
    torch.bfloat16: (np.uint16, 0x7F80),
    torch.float16: (np.uint16, 0x7C00),
    torch.float32: (np.uint32, 0x7F800000),
}
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class BlockToWrite:
    """A copy of a block. `kv` is uint8 `[num_bytes]`, and nobody changes it any more."""

    path: Path
    geometry: Geometry
    parent: Name
    tokens: Sequence[int]
    kv: npt.NDArray[np.uint8]
    dtype: torch.dtype
    used_ns: int

    @property
    def num_bytes(self) -> int:
        return self.kv.nbytes


@dataclass(frozen=True, slots=True)
class Use:
    """A chain that was used: its blocks from the first on, and when."""

    paths: Sequence[Path]
    used_ns: int

    @property
    def num_bytes(self) -> int:
        return _BYTES_PER_PATH * len(self.paths)


class Writer:
    """Writes what it is given, in order.

    Args:
        folder: Where to.
        on_missing: Called with files that were thought to be there and are not, on this thread or that of the caller.
    """

    def __init__(self, folder: Folder, on_missing: Callable[[list[Path]], None]) -> None:
        self._folder = folder
        self._on_missing = on_missing
        self._waiting: deque[BlockToWrite | Use] = deque()
        self._waiting_bytes = 0
        self._changed = threading.Condition()
        self._deadline: float | None = None  # set when it is to end
        self._is_beside_streams = False
        self._num_flushes = 0  # that wait
        self._pause_s = 0.0  # more: the last write failed
        self._retry_at = 0.0
        self.num_written = 0
        self.num_errors = 0
        self._thread = threading.Thread(target=self._run, name="chatpage-kv-disk-write", daemon=True)
        self._thread.start()

    @property
    def is_failed(self) -> bool:
        """Whether the last write was an error."""
        return self._pause_s > 0

    @property
    def is_paused(self) -> bool:
        """Whether nothing is written for now, because of an error."""
        return self.is_failed and time.monotonic() < self._retry_at

    def retry_now(self) -> None:
        """End the pause early: there will be no other chance."""
        self._retry_at = 0.0

    def has_room(self, num_bytes: int) -> bool:
        """Whether so many bytes may be handed in now; any number may when nothing waits."""
        with self._changed:
            most = MAX_WAITING_BYTES_BESIDE_STREAMS if self._is_beside_streams else MAX_WAITING_BYTES
            return not self._waiting or self._waiting_bytes + num_bytes <= most

    def note_streams(self, *, are_running: bool) -> None:
        """Rest between two blocks while streams run; they have the cores first."""
        if are_running != self._is_beside_streams:
            with self._changed:
                self._is_beside_streams = are_running
                self._changed.notify_all()

    def write(self, block: BlockToWrite) -> None:
        """Hand in a block."""
        self._put(block)

    def touch(self, use: Use) -> None:
        """Note the use of a chain, once what was handed in before is written."""
        if self.has_room(use.num_bytes):
            self._put(use)

    def wait_for_room(self, timeout: float) -> None:
        """Wait until something was written, for so many seconds at most."""
        with self._changed:
            if self._waiting:
                self._changed.wait(timeout)

    def flush(self) -> None:
        """Wait until everything handed in is written, or was given up."""
        with self._changed:
            self._num_flushes += 1
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._waiting)
            self._num_flushes -= 1

    def close(self, deadline: float) -> None:
        """Write what waits until `deadline` (of `time.monotonic`), drop the rest, and end the thread."""
        with self._changed:
            self._deadline = deadline
            self._changed.notify_all()
        # A disk that hangs must not hang the program: the thread is a daemon.
        self._thread.join(max(0.0, deadline - time.monotonic()) + 1.0)

    def _put(self, work: BlockToWrite | Use) -> None:
        if self.is_paused:
            self._give_up(work)
            return
        with self._changed:
            if self._deadline is not None:
                return
            self._waiting.append(work)
            self._waiting_bytes += work.num_bytes
            self._changed.notify_all()

    def _give_up(self, work: BlockToWrite | Use) -> None:
        if isinstance(work, BlockToWrite):
            self._on_missing([work.path])

    # -- on the thread ---------------------------------------------------------------------------------------------

    def _run(self) -> None:
        with contextlib.suppress(OSError, AttributeError):  # Linux has a priority per thread
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        self._folder.count()
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._deadline is not None)
                is_late = self._deadline is not None and time.monotonic() >= self._deadline
                if is_late or not self._waiting:
                    self._waiting.clear()
                    self._changed.notify_all()
                    return
                work = self._waiting[0]
            began = thread_time()
            self._do(work)
            rest_s = _REST * (thread_time() - began)
            with self._changed:
                self._waiting.popleft()
                self._waiting_bytes -= work.num_bytes
                self._changed.notify_all()
                self._changed.wait_for(self._is_in_a_hurry, rest_s)

    def _is_in_a_hurry(self) -> bool:
        return not self._is_beside_streams or self._num_flushes > 0 or self._deadline is not None

    def _do(self, work: BlockToWrite | Use) -> None:
        if self.is_paused:
            self._give_up(work)
            return
        if not isinstance(work, BlockToWrite):
            if missing := self._folder.touch(work.paths, work.used_ns):
                self._on_missing(missing)
            return
        if self._folder.has(work.path) or not _is_finite(work):
            return
        try:
            parts = encode(work.geometry, work.parent, work.tokens, work.kv.data)
            if self._folder.write(work.path, parts, work.used_ns):
                self.num_written += 1
                self._note_success()
            else:
                self._on_missing([work.path])
        except OSError as error:
            self._give_up(work)
            self._note_error(error)

    def _note_success(self) -> None:
        if self.is_failed:
            logger.warning("KV is saved in %s again.", self._folder.path)
            self._pause_s = 0.0

    def _note_error(self, error: OSError) -> None:
        """Pause; the next error in a row pauses twice as long."""
        self.num_errors += 1
        if not self.is_failed:
            reason = error.strerror or error
            logger.warning(
                "KV cannot be saved in %s: %s. It is tried again and again; everything else goes on.", self._folder.path, reason
            )
        self._pause_s = min(max(FIRST_PAUSE_S, 2 * self._pause_s), LONGEST_PAUSE_S)
        self._retry_at = time.monotonic() + self._pause_s


def _is_finite(block: BlockToWrite) -> bool:
    """Whether every value is a number; looked at by this thread alone, since those of torch would take the cores of a step."""
    if block.dtype not in _EXPONENTS:
        return bool(torch.isfinite(torch.from_numpy(block.kv).view(block.dtype)).all())
    kind, exponent = _EXPONENTS[block.dtype]
    bits = np.bitwise_and(block.kv.view(kind), kind(exponent))  # all ones: NaN or infinity
    return bool(bits.max() != exponent)
