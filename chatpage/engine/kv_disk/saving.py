"""Which blocks go to disk, and when they are copied: the side of saving that belongs to the engine's thread.

Invariant: only full blocks that the prefix tree finds under their exact tokens are copied, a bounded number between two steps;
a full block is immutable, so what was copied is what was computed. A block evicted before its turn is not saved, nothing waits.

A chain is the tokens of a sequence that ended. It is walked from its root, and every block that is not on disk yet is handed to
the writer. What a chain ends with, its partial block, is saved only when the engine closes.
"""

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt

from chatpage.engine.block_pool import BlockCopy, BlockPool
from chatpage.engine.kv_cache import KvCache
from chatpage.engine.kv_disk.chain import Geometry, Name, next_name, root_name
from chatpage.engine.kv_disk.folder import Folder, used_time
from chatpage.engine.kv_disk.writer import BlockToWrite, Use, Writer
from chatpage.engine.prefix_tree import PrefixTree, RootKey

MAX_CHAINS = 1024
_MAX_BATCH_BYTES = 8 * 2**20


@dataclass(slots=True)
class _Chain:
    """A sequence of tokens to save, when it was used, and how far that is done: the names of its root and first blocks."""

    root: RootKey
    tokens: Sequence[int]
    used_ns: int
    names: list[Name] = field(default_factory=list)

    @property
    def num_blocks(self) -> int:
        return len(self.names) - 1


class Saver:
    """Copies blocks of ended sequences and hands them to the writer.

    Args:
        known: Files that are on disk as far as this engine knows.
    """

    def __init__(
        self, cache: KvCache, pool: BlockPool, tree: PrefixTree, *, folder: Folder, writer: Writer, known: set[Path]
    ) -> None:
        self._cache = cache
        self._pool = pool
        self._tree = tree
        self._folder = folder
        self._writer = writer
        self._known = known
        self._geometry: Geometry | None = None
        self._waiting: deque[_Chain] = deque(maxlen=MAX_CHAINS)
        self._recent: deque[_Chain] = deque(maxlen=MAX_CHAINS)
        self._num_errors = 0  # of the writer, when we looked last

    @property
    def has_work(self) -> bool:
        return (bool(self._waiting) or self._has_lost_some) and not self._writer.is_paused

    @property
    def _has_lost_some(self) -> bool:
        """Whether the disk had an error since the chains were looked at, so that blocks of any of them may be missing."""
        return self._num_errors != self._writer.num_errors

    def offer(self, root: RootKey, tokens: Sequence[int]) -> None:
        """Save these tokens, as far as they are computed, when there is time; nobody changes `tokens` any more."""
        chain = _Chain(root, tokens, time.time_ns())
        self._waiting.append(chain)
        self._recent.append(chain)

    def advance(self, max_bytes: int) -> bool:
        """Copy at most `max_bytes` (but one block at least); True if anything was done."""
        batch = max(1, min(max_bytes, _MAX_BATCH_BYTES) // self._cache.bytes_per_block)
        if not self.has_work or not self._writer.has_room(batch * self._cache.bytes_per_block):
            return False
        if self._has_lost_some:
            self._begin_again()
        if not self._waiting:
            return True
        chain = self._waiting[0]
        if self._save_some(chain, batch) < batch:
            self._waiting.popleft()
            self._touch(chain)
        return True

    def save_all(self, deadline: float) -> None:
        """Save what was used last first, partial blocks included, until `deadline` (of `time.monotonic`)."""
        self._waiting.clear()
        self._writer.retry_now()
        batch = max(1, _MAX_BATCH_BYTES // self._cache.bytes_per_block)
        for chain in reversed(self._recent):
            chain.names.clear()  # what was not there yet, or evicted on disk since, is looked at again
            num_saved = batch
            while num_saved == batch:
                if not self._wait_for_room(batch, deadline):
                    return
                num_saved = self._save_some(chain, batch)
            self._save_tail(chain)
            self._touch(chain)

    # -- inside ----------------------------------------------------------------------------------------------------

    def _wait_for_room(self, batch: int, deadline: float) -> bool:
        while not self._writer.has_room(batch * self._cache.bytes_per_block):
            if (left := deadline - time.monotonic()) <= 0:
                return False
            self._writer.wait_for_room(left)
        return time.monotonic() < deadline and not self._writer.is_paused

    def _begin_again(self) -> None:
        """Look at every recent chain again after an error of the disk."""
        self._num_errors = self._writer.num_errors
        for chain in self._recent:
            chain.names.clear()
        self._waiting = deque(self._recent, maxlen=MAX_CHAINS)

    def _save_some(self, chain: _Chain, batch: int) -> int:
        """Hand in the next blocks of a chain that are not on disk, `batch` at most; fewer means that its end was reached."""
        geometry = geometry_of(self._cache, chain.root)
        if geometry != self._geometry:  # another backend has taken over: the names so far are of another layout
            self._geometry = geometry
            chain.names.clear()
        if not chain.names:
            chain.names.append(root_name(geometry, chain.root.cache_salt))
        match = self._tree.match(chain.root, chain.tokens)
        found: list[int] = []
        for index in range(chain.num_blocks, match.num_tokens // geometry.block_size):
            parent = chain.names[-1]
            chain.names.append(next_name(parent, self._tokens_of(chain, index)))
            if self._folder.place(*chain.names[-2:]) not in self._known:
                found.append(index)
                if len(found) == batch:
                    break
        if found:
            copies = self._cache.read_blocks([match.block_ids[index] for index in found])
            for index, kv in zip(found, copies, strict=True):
                self._write(chain, index, self._tokens_of(chain, index), kv)
        return len(found)

    def _save_tail(self, chain: _Chain) -> None:
        """Save the rows of a partial block that is the end of its branch, alone: what lies behind them is of somebody else."""
        size = self._pool.block_size
        match = self._tree.match(chain.root, chain.tokens)
        num_full, num_rows = divmod(match.num_tokens, size)
        if not num_rows or chain.num_blocks != num_full or self._tree.num_rows(match.block_ids[-1]) != num_rows:
            return
        source, tokens = match.block_ids[-1], chain.tokens[num_full * size : match.num_tokens]
        if self._folder.place(chain.names[-1], next_name(chain.names[-1], tokens)) in self._known:
            return
        self._pool.acquire(source)
        if self._pool.num_available:
            scratch = self._pool.allocate()
            self._cache.clear_block(scratch)
            self._cache.copy([BlockCopy(source, scratch, num_rows)])
            kv = self._cache.read_blocks([scratch])[0]
            self._pool.release(scratch)
            chain.names.append(next_name(chain.names[-1], tokens))
            self._write(chain, num_full, tokens, kv)
        self._pool.release(source)

    def _write(self, chain: _Chain, index: int, tokens: Sequence[int], kv: npt.NDArray[np.uint8]) -> None:
        """Hand in block number `index` of a chain, whose names reach that far."""
        assert self._geometry is not None
        parent, name = chain.names[index : index + 2]
        path = self._folder.place(parent, name)
        self._known.add(path)
        used_ns = used_time(chain.used_ns, index)
        self._writer.write(BlockToWrite(path, self._geometry, parent, tokens, kv, self._cache.dtype, used_ns))

    def _touch(self, chain: _Chain) -> None:
        paths = [self._folder.place(parent, name) for parent, name in pairwise(chain.names)]
        self._writer.touch(Use(paths, chain.used_ns))

    def _tokens_of(self, chain: _Chain, index: int) -> Sequence[int]:
        size = self._pool.block_size
        return chain.tokens[index * size : (index + 1) * size]


def geometry_of(cache: KvCache, root: RootKey) -> Geometry:
    """Describe the blocks of a cache as they are now."""
    return Geometry(root.model_id, cache.layout, cache.block_size, cache.bytes_per_block)
