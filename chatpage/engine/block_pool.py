"""The blocks of the KV cache: who holds each, and which one is handed out next.

Invariant: every block is in exactly one state, and `BlockPool` alone changes its ref count.

    blank        ref count 0, holds nothing anybody could find       in the free queue, at the head
    cached free  ref count 0, a node of the prefix tree names it     in the free queue, behind the blank ones
    used         ref count > 0                                       not in the free queue

    free queue   head  [ blank, last freed first | cached free, least recently used first ]  tail

`allocate` takes the head: a blank block that was just freed (its memory is still warm) before any cached one, and of those
the one that was not needed for longest. Cached free is not used: it counts as available.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NewType, Protocol

BlockId = NewType("BlockId", int)


class BlockState(StrEnum):
    """Where a block stands."""

    BLANK = "blank"
    CACHED = "cached"  # free, and the prefix tree can still find what it holds
    USED = "used"


class OutOfBlocks(Exception):
    """More blocks are needed than are available; nothing was changed.

    Internal: the scheduler answers it by waiting or preempting, so it is no `ChatpageError`.
    """

    def __init__(self, num_needed: int, num_available: int) -> None:
        super().__init__(f"{num_needed} blocks are needed, {num_available} are available")
        self.num_needed = num_needed
        self.num_available = num_available


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """Copy the first `num_rows` rows of block `src` into block `dst`, in every layer, before the step writes anything."""

    src: BlockId
    dst: BlockId
    num_rows: int


class CacheIndex(Protocol):
    """What the pool asks of the prefix tree."""

    def keep(self, block_id: BlockId) -> bool:
        """Tell whether a lookup will find `block_id`, whose last holder just gave it back."""

    def evict(self, block_id: BlockId) -> None:
        """Make `block_id` impossible to find: it is about to be overwritten."""


class BlockPool:
    """All blocks, their ref counts, and the free queue.

    Args:
        num_blocks: How many blocks the KV cache has.
        block_size: Tokens per block.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        assert num_blocks > 0, f"a pool of {num_blocks} blocks"
        assert block_size > 0, f"blocks of {block_size} tokens"
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._ref_counts = [0] * num_blocks
        # Free block -> whether it is cached. Blank blocks stand before cached ones.
        self._free: OrderedDict[BlockId, bool] = OrderedDict((BlockId(i), False) for i in range(num_blocks))
        self._num_cached_free = 0
        self._index: CacheIndex | None = None

    def attach(self, index: CacheIndex) -> None:
        """Let `index` keep freed blocks findable; there is one index, attached while every block is blank."""
        assert self._index is None, "the pool has an index already"
        assert self.num_blank == self.num_blocks, "an index must be attached before any block is handed out"
        self._index = index

    @property
    def num_available(self) -> int:
        """Blocks `allocate` can hand out: blank and cached free."""
        return len(self._free)

    @property
    def num_cached_free(self) -> int:
        return self._num_cached_free

    @property
    def num_blank(self) -> int:
        return len(self._free) - self._num_cached_free

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free)

    def ref_count(self, block_id: BlockId) -> int:
        return self._ref_counts[block_id]

    def state(self, block_id: BlockId) -> BlockState:
        if self._ref_counts[block_id]:
            return BlockState.USED
        return BlockState.CACHED if self._free[block_id] else BlockState.BLANK

    def num_cached_free_in(self, block_ids: Iterable[BlockId]) -> int:
        """Count the distinct blocks of `block_ids` that are cached free.

        Admission needs it: acquiring those hits takes them out of `num_available`.
        """
        ref_counts = self._ref_counts
        return sum(not ref_counts[block_id] for block_id in set(block_ids))

    def allocate(self) -> BlockId:
        """Take the head of the free queue, with ref count 1; a cached block is evicted from the index first.

        Raises:
            OutOfBlocks: Every block is used.
        """
        if not self._free:
            raise OutOfBlocks(1, 0)
        block_id, is_cached = self._free.popitem(last=False)
        if is_cached:
            assert self._index is not None
            self._num_cached_free -= 1
            self._index.evict(block_id)
        self._ref_counts[block_id] = 1
        return block_id

    def acquire(self, block_id: BlockId) -> None:
        """Add one holder to a used or cached free block."""
        self.acquire_all((block_id,))

    def acquire_all(self, block_ids: Iterable[BlockId]) -> None:
        """Add one holder to each block, once per mention."""
        ref_counts = self._ref_counts
        for block_id in block_ids:
            if not ref_counts[block_id]:
                assert self._free[block_id], f"block {block_id} is blank: there is nothing in it to share"
                del self._free[block_id]
                self._num_cached_free -= 1
            ref_counts[block_id] += 1

    def release(self, block_id: BlockId) -> None:
        """Take one holder from a block; after the last it is cached free if the index can find it, else blank.

        Raises:
            AssertionError: The block has no holder (a double free).
        """
        self.release_all((block_id,))

    def release_all(self, block_ids: Iterable[BlockId]) -> None:
        """Take one holder from each block, in this order: the first one freed is the first one evicted."""
        ref_counts = self._ref_counts
        for block_id in block_ids:
            count = ref_counts[block_id] - 1
            assert count >= 0, f"block {block_id} is free already"
            ref_counts[block_id] = count
            if not count:
                self._enqueue(block_id)

    def _enqueue(self, block_id: BlockId) -> None:
        if self._index is not None and self._index.keep(block_id):
            self._free[block_id] = True
            self._num_cached_free += 1
        else:
            self._free[block_id] = False
            self._free.move_to_end(block_id, last=False)

    def make_blank(self, block_id: BlockId) -> None:
        """Move a cached free block to the blank ones: the index can no longer find it."""
        assert self._free[block_id], f"block {block_id} is blank already"
        self._free[block_id] = False
        self._free.move_to_end(block_id, last=False)
        self._num_cached_free -= 1

    def check_integrity(self, num_holders: Sequence[int]) -> None:
        """Prove that states, counters and queue agree with each other and with the holders.

        Args:
            num_holders: Per block, how many holders the caller knows of.

        Raises:
            AssertionError: They disagree; the message names the block.
        """
        for i, count in enumerate(self._ref_counts):
            assert count == num_holders[i], f"block {i} has ref count {count} but {num_holders[i]} holders"
            assert (count == 0) == (i in self._free), f"block {i} with ref count {count} is on the wrong side of the free queue"
        assert all(0 <= block_id < self.num_blocks for block_id in self._free), (
            "the free queue names a block that does not exist"
        )
        flags = list(self._free.values())
        assert flags == sorted(flags), "a blank block stands behind a cached one in the free queue"
        assert sum(flags) == self._num_cached_free, f"{sum(flags)} cached free blocks, counted as {self._num_cached_free}"
        assert self.num_blank + self.num_cached_free + self.num_used == self.num_blocks, "the pool is not whole"
