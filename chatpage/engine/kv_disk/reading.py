"""The threads that read block files and prove them.

Invariant: what comes out is a block of the chain that was asked for, with exactly the tokens that were asked for; anything else
is a miss, and a damaged file is gone afterwards.
"""

import logging
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from chatpage.engine.kv_disk.block_file import Block, DamagedFile, decode, max_file_size
from chatpage.engine.kv_disk.chain import Geometry, Name, next_name
from chatpage.engine.kv_disk.folder import Folder

_NUM_THREADS = 2  # a checksum takes longer than reading, and nobody else computes while a prompt waits
logger = logging.getLogger(__name__)


class Reader:
    """Reads blocks in the background."""

    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        self._pool = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="chatpage-kv-disk-read")
        self.num_damaged = 0

    def read_full(self, geometry: Geometry, parent: Name, name: Name, tokens: Sequence[int]) -> "Future[Block | None]":
        """Read the full block `name`, which holds `tokens` behind `parent`; None if it is not there or damaged."""
        return self._pool.submit(self._read_full, geometry, parent, name, tuple(tokens))

    def read_closest(self, geometry: Geometry, parent: Name, tokens: Sequence[int]) -> "Future[Block | None]":
        """Read the block behind `parent` that begins most like `tokens`, as far as it does; None if none does."""
        return self._pool.submit(self._read_closest, geometry, parent, tuple(tokens))

    def close(self) -> None:
        """End the threads after the file they are at; nobody waits for them."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _read_full(self, geometry: Geometry, parent: Name, name: Name, tokens: tuple[int, ...]) -> Block | None:
        path = self._folder.place(parent, name)
        block = self._read(geometry, parent, path)
        if block is not None and block.tokens != tokens:
            self._discard(path, "it holds other tokens")
            return None
        return block

    def _read_closest(self, geometry: Geometry, parent: Name, tokens: tuple[int, ...]) -> Block | None:
        best, most = None, 0
        for path in self._folder.children_of(parent):
            block = self._read(geometry, parent, path)
            if block is None:
                continue
            if path != self._folder.place(parent, next_name(parent, block.tokens)):
                self._discard(path, "it holds other tokens")
                continue
            num_common = _num_common(block.tokens, tokens)
            if num_common > most:
                best, most = Block(block.tokens[:num_common], block.kv), num_common
        return best

    def _read(self, geometry: Geometry, parent: Name, path: Path) -> Block | None:
        try:
            data = self._folder.read(path, max_file_size(geometry))
            return None if data is None else decode(geometry, parent, data)
        except DamagedFile as error:
            self._discard(path, str(error))
            return None

    def _discard(self, path: Path, reason: str) -> None:
        self.num_damaged += 1
        logger.warning("The file %s was removed: %s. What it held is computed again.", path.name, reason)
        self._folder.remove(path)


def _num_common(a: Sequence[int], b: Sequence[int]) -> int:
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return min(len(a), len(b))
