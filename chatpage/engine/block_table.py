"""The blocks of one sequence, in order; what it may write, and what it lets others find.

Invariant: the table holds one reference per entry. The committed tokens `[0, num_committed)` are computed and immutable; only
slots behind them are written, and only in a tail that nobody else holds and in which nobody can find a row behind them.

    block size 4, ids [2, 7, 5]   prepare(10) made slots [6, 10) writable, 2 of them in the partial tail, 2 in a new block

       position   0 1 2 3 | 4 5 6 7 | 8 9 . .
                  block 2 | block 7 | block 5
                  committed    |prepared | free rows of the tail

    fork(6) of it holds [2, 7]. Whoever writes position 6 first finds block 7 shared: it takes a new block 9, asks for
    BlockCopy(7, 9, num_rows=2), and holds [2, 9, ...]. The other one is then the last holder, and writes in place.
"""

from array import array
from collections.abc import Iterable, Sequence
from typing import cast

import numpy as np
import numpy.typing as npt

from chatpage.engine.block_pool import BlockCopy, BlockId, BlockPool, OutOfBlocks
from chatpage.engine.prefix_tree import Node, PrefixMatch, PrefixTree, RootKey


class BlockTable:
    """The block table of one sequence; forks share its blocks.

    One step of a sequence: `prepare`, run the copies, release their sources, compute, `commit`. Fork, adopt and free happen
    between steps: a block that still waits for its copy must not be copied again.

    Args:
        pool: Owner of the blocks.
        tree: Where committed tokens are published; made for the same pool.
        root: Under which model and salt they are published.
    """

    __slots__ = ("_is_freed", "_parent", "_pool", "_tree", "ids", "num_committed", "root")

    def __init__(self, pool: BlockPool, tree: PrefixTree, root: RootKey) -> None:
        self._pool = pool
        self._tree = tree
        self.root = root
        # numpy can view it without a copy; no view may outlive the step, or the array cannot grow.
        self.ids: array[int] = array("i")
        self.num_committed = 0
        self._parent = tree.root(root)  # the node of the last full committed block, else the root
        self._is_freed = False

    @property
    def num_slots(self) -> int:
        """Positions that have a slot, written or not."""
        return len(self.ids) * self._pool.block_size

    @property
    def is_freed(self) -> bool:
        return self._is_freed

    @property
    def is_findable(self) -> bool:
        """Whether what is committed from now on can be found by others; not after the tree forgot our root."""
        return self._parent.is_attached

    @property
    def block_ids(self) -> tuple[BlockId, ...]:
        return tuple(self._block_ids)

    @property
    def _block_ids(self) -> Sequence[BlockId]:
        return cast("Sequence[BlockId]", self.ids)

    def rows_of(self, index: int) -> int:
        """Count the committed rows of this sequence in its block number `index`."""
        size = self._pool.block_size
        return min(max(self.num_committed - index * size, 0), size)

    def adopt(self, match: PrefixMatch) -> None:
        """Hold every block of a match that was just made under this root, as the committed tokens of an empty table."""
        self._check_live()
        assert not self.ids, "only an empty table adopts"
        size = self._pool.block_size
        num_full = match.num_tokens // size
        assert len(match.block_ids) == -(-match.num_tokens // size), f"{match} has too many or too few blocks"
        parent = self._tree.node_of(match.block_ids[num_full - 1]) if num_full else self._tree.root(self.root)
        assert parent is not None, f"block {match.block_ids[num_full - 1]} was matched but is not in the tree any more"
        self._pool.acquire_all(match.block_ids)
        self.ids = array("i", match.block_ids)
        self.num_committed = match.num_tokens
        self._parent = parent

    def blocks_needed(self, num_tokens_after: int) -> int:
        """Count the blocks `prepare` would take from the pool now, the one for a copy-on-write included."""
        num_new = -(-num_tokens_after // self._pool.block_size) - len(self.ids)
        must_copy, may_trim = self._tail_needs(num_tokens_after)
        return _num_needed(max(num_new, 0), must_copy, may_trim, self._pool.num_available)

    def prepare(self, num_tokens_after: int) -> list[BlockCopy]:
        """Make the slots `[num_committed, num_tokens_after)` writable, or change nothing.

        A tail that others hold, or in which others can find rows behind ours, is not written: a new block takes its place. If
        nothing is left for that, and we are its only holder, the rows behind ours are only cached: they are evicted instead.

        Returns:
            Copies to run before anything of this step is written, at most one. The reference to each source goes over to the
            caller, who gives it back with `pool.release(copy.src)` after the copy ran (or was given up).

        Raises:
            OutOfBlocks: Fewer than `blocks_needed(num_tokens_after)` are available.
        """
        self._check_live()
        assert num_tokens_after >= self.num_committed, f"{num_tokens_after} tokens wanted, {self.num_committed} committed"
        must_copy, may_trim = self._tail_needs(num_tokens_after)
        num_new = max(-(-num_tokens_after // self._pool.block_size) - len(self.ids), 0)
        if not must_copy and not num_new:
            return []
        num_needed = _num_needed(num_new, must_copy, may_trim, self._pool.num_available)
        if num_needed > self._pool.num_available:
            raise OutOfBlocks(num_needed, self._pool.num_available)
        copies = self._free_the_tail(is_copied=num_needed > num_new) if must_copy else []
        self.ids.extend(self._pool.allocate() for _ in range(num_new))
        return copies

    def commit(self, token_ids: Sequence[int], num_computed: int) -> None:
        """Record that the tokens `token_ids[:num_computed]` are computed in our slots, and let others find them.

        The partial tail is published as it grows, unless another block has the same tokens: then that one is found, and ours
        is published by the next commit that differs. A block that fills and is in the tree already, because another sequence
        computed the same, is given back and replaced by that one. Cost: O(new tokens), rounded up to whole blocks.

        Args:
            token_ids: The tokens of the sequence; those committed before are not looked at again.
            num_computed: How many of them have their KV in this table; at most what was prepared.
        """
        self._check_live()
        assert self.num_committed <= num_computed <= self.num_slots, (
            f"{num_computed} tokens computed, {self.num_committed} committed, {self.num_slots} slots"
        )
        size = self._pool.block_size
        while self.num_committed < num_computed:
            index = self.num_committed // size
            start = index * size
            end = min(start + size, num_computed)
            if self._parent.is_attached:
                self._publish(index, tuple(token_ids[start:end]))
            self.num_committed = end

    def fork(self, num_tokens: int) -> "BlockTable":
        """Share the blocks of the committed tokens `[0, num_tokens)`; nothing is copied before one of the two writes."""
        self._check_live()
        assert 0 <= num_tokens <= self.num_committed, f"fork at {num_tokens} of {self.num_committed} committed tokens"
        size = self._pool.block_size
        child = BlockTable(self._pool, self._tree, self.root)
        child.ids = self.ids[: -(-num_tokens // size)]
        child.num_committed = num_tokens
        child._parent = self._parent_at(num_tokens // size)
        self._pool.acquire_all(child._block_ids)
        return child

    def free(self) -> None:
        """Give back every block, tail first, so that cached leaves are evicted before the blocks they hang on."""
        self._check_live()
        self._is_freed = True
        self._pool.release_all(reversed(self._block_ids))
        self.ids = array("i")
        self.num_committed = 0

    def slot(self, position: int) -> int:
        """Return the slot of one position: block id * block size + offset."""
        index, offset = divmod(position, self._pool.block_size)
        return self.ids[index] * self._pool.block_size + offset

    def slot_mapping(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        """Return the slots of the positions `[start, stop)`, int64 `[stop - start]`."""
        assert 0 <= start <= stop <= self.num_slots, f"slots [{start}, {stop}) of {self.num_slots}"
        size = self._pool.block_size
        first = start // size
        ids = np.array(self.ids[first : -(-stop // size)], dtype=np.int64)
        slots = (ids[:, None] * size + np.arange(size)).ravel()
        return slots[start - first * size : stop - first * size]

    def check_integrity(self) -> None:
        """Prove that the entries are a path of the tree, as far as the tree can find them.

        Raises:
            AssertionError: They are not; the message names the block.
        """
        parent = self._tree.root(self.root)
        for i, block_id in enumerate(self._block_ids):
            assert self._pool.ref_count(block_id) > 0, f"block {block_id} is in a table but free"
            node, num_rows = self._tree.node_of(block_id), self.rows_of(i)
            if node is None:
                assert num_rows < self._pool.block_size or not self._parent.is_attached, (
                    f"full block {block_id} is not in the tree"
                )
                continue
            assert self._parent.is_attached, f"block {block_id} can be found, but its table was forgotten"
            assert node.parent is parent, f"block {block_id} does not follow the block before it in the tree"
            assert 0 < num_rows <= len(node.tokens), (
                f"block {block_id}: {num_rows} rows committed, {len(node.tokens)} in the tree"
            )
            parent = node
        if self._parent.is_attached:
            num_full = self.num_committed // self._pool.block_size
            last = self._tree.node_of(self._block_ids[num_full - 1]) if num_full else self._tree.root(self.root)
            assert self._parent is last, "a table publishes under a node that is not its last full block"

    def _check_live(self) -> None:
        assert not self._is_freed, "the block table was freed"

    def _tail_needs(self, num_tokens_after: int) -> tuple[bool, bool]:
        """Tell whether the partial tail must be copied before it is written, and whether its other rows could go instead."""
        index, num_rows = divmod(self.num_committed, self._pool.block_size)
        if not num_rows or num_tokens_after == self.num_committed:
            return False, False
        tail = BlockId(self.ids[index])
        if self._pool.ref_count(tail) > 1:
            return True, False
        has_rows_behind = self._tree.num_rows(tail) > num_rows
        return has_rows_behind, has_rows_behind

    def _free_the_tail(self, *, is_copied: bool) -> list[BlockCopy]:
        index, num_rows = divmod(self.num_committed, self._pool.block_size)
        tail = BlockId(self.ids[index])
        if not is_copied:
            self._tree.trim(tail, num_rows)
            return []
        copy = BlockCopy(tail, self._pool.allocate(), num_rows)
        self.ids[index] = copy.dst
        return [copy]

    def _parent_at(self, num_full: int) -> Node:
        """Return the node under which a sequence that shares our first `num_full` full blocks publishes the next one."""
        if not self._parent.is_attached or num_full == self.num_committed // self._pool.block_size:
            return self._parent  # a fork of what was forgotten is forgotten too
        if not num_full:
            return self._tree.root(self.root)
        node = self._tree.node_of(self._block_ids[num_full - 1])
        assert node is not None, f"full block {self.ids[num_full - 1]} is not in the tree"
        return node

    def _publish(self, index: int, tokens: tuple[int, ...]) -> None:
        block_id = BlockId(self.ids[index])
        other = self._tree.publish(self._parent, block_id, tokens)
        if len(tokens) < self._pool.block_size:
            return
        if other is not None:
            self._pool.acquire(other.block_id)
            self.ids[index] = other.block_id
            self._pool.release(block_id)
        node = self._tree.node_of(BlockId(self.ids[index]))
        assert node is not None
        self._parent = node


def blocks_needed_to_admit(pool: BlockPool, tree: PrefixTree, match: PrefixMatch, num_tokens_after: int) -> int:
    """Count the blocks `prepare(num_tokens_after)` would take right after a new table adopted `match`, changing nothing.

    The sequence can enter if this is at most `pool.num_available - pool.num_cached_free_in(match.block_ids)`.
    """
    num_new = max(-(-num_tokens_after // pool.block_size) - len(match.block_ids), 0)
    num_rows = match.num_tokens % pool.block_size
    if not num_rows or num_tokens_after <= match.num_tokens:
        return num_new
    tail = match.block_ids[-1]
    is_shared = pool.ref_count(tail) > 0
    must_copy = is_shared or tree.num_rows(tail) > num_rows
    num_available = pool.num_available - pool.num_cached_free_in(match.block_ids)
    return _num_needed(num_new, must_copy, must_copy and not is_shared, num_available)


def pin(pool: BlockPool, tree: PrefixTree, root: RootKey, token_ids: Sequence[int]) -> BlockTable:
    """Hold what is cached of `token_ids`, so that it is not evicted; `free()` of the table unpins it."""
    table = BlockTable(pool, tree, root)
    table.adopt(tree.match(root, token_ids))
    return table


def count_holders(pool: BlockPool, tables: Iterable[BlockTable], copies: Iterable[BlockCopy] = ()) -> list[int]:
    """Count per block the table entries and pending copy sources that hold it."""
    counts = [0] * pool.num_blocks
    for table in tables:
        for block_id in table.ids:
            counts[block_id] += 1
    for copy in copies:
        counts[copy.src] += 1
    return counts


def _num_needed(num_new: int, must_copy: bool, may_trim: bool, num_available: int) -> int:
    if must_copy and not (may_trim and num_new + 1 > num_available):
        return num_new + 1
    return num_new
