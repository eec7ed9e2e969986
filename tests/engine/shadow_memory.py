"""A model of what the block memory must do: every row that is written, kept beside it and compared after every operation.

`rows[block, offset]` holds (token, position, hash of all tokens up to here, cache salt included) as the engine would have
written it. Every row that nobody may read (blank blocks, unfilled rows) is poisoned with NaN after every operation. So a table
that reads a row of another sequence, of another user, of an older owner of the block, or one that was never computed, differs.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import pytest

from chatpage.engine.accounting import check_integrity, memory_report
from chatpage.engine.block_pool import BlockCopy, BlockId, BlockPool, BlockState, OutOfBlocks
from chatpage.engine.block_table import BlockTable, blocks_needed_to_admit, pin
from chatpage.engine.prefix_tree import PrefixTree, RootKey

ROOTS = (RootKey("model", "alice"), RootKey("model", "bob"))
ALPHABET = (-1, -2, 3)  # hash(-1) == hash(-2) in CPython, so collisions happen all the time
_MODULUS = 2**50 - 27


@dataclass(eq=False)
class ShadowSequence:
    """A live sequence: its table, its tokens, and the rows they should have."""

    table: BlockTable
    tokens: list[int]
    num_committed: int
    is_forgotten: bool = False  # the tree was cleared under it: what it computes is not found any more
    expected: npt.NDArray[np.float64] = field(default_factory=lambda: np.empty((0, 3)))

    def extend(self, tokens: Iterable[int]) -> None:
        self.tokens.extend(tokens)
        self.expected = np.concatenate(
            [self.expected, expected_rows(self.table.root, self.tokens, len(self.expected), self.hash)]
        )

    @property
    def hash(self) -> int:
        """Hash of the tokens whose rows are known."""
        return int(self.expected[-1, 2]) if len(self.expected) else _seed(self.table.root)


@dataclass(frozen=True)
class Work:
    """What one sequence does in a step: how many tokens, how many of them get computed, or whether it is aborted midway."""

    index: int
    new_tokens: tuple[int, ...]
    num_tokens: int
    num_given_up: int = 0
    is_aborted: bool = False


class ShadowMemory:
    """The operations of an engine on a block memory, each checked against the rows."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.pool = BlockPool(num_blocks, block_size)
        self.tree = PrefixTree(self.pool)
        self.rows = np.full((num_blocks, block_size, 3), np.nan)
        self.sequences: list[ShadowSequence] = []
        self.pins: list[tuple[BlockTable, list[int]]] = []
        self.seen: Counter[str] = Counter()  # what the operations met, so that a driver can prove it met everything

    def add(self, root: RootKey, tokens: Sequence[int], limit: int) -> None:
        """Admit a sequence if it fits, after checking that what is found in the cache is what was asked for."""
        match = self.tree.match(root, tokens, limit)
        assert match.num_tokens <= limit
        self._check_rows(match.block_ids, root, tokens[: match.num_tokens])
        room = self.pool.num_available - self.pool.num_cached_free_in(match.block_ids)
        needed = blocks_needed_to_admit(self.pool, self.tree, match, len(tokens) + 1)
        if needed > room:
            self.seen["refused"] += 1
            return
        table = BlockTable(self.pool, self.tree, root)
        table.adopt(match)
        assert (table.blocks_needed(len(tokens) + 1), self.pool.num_available) == (needed, room)
        sequence = ShadowSequence(table, [], match.num_tokens)
        sequence.extend(tokens)
        self.sequences.append(sequence)
        self.seen["hit" if match.num_tokens else "miss"] += 1

    def fork(self, index: int, num_tokens: int) -> None:
        parent = self.sequences[index]
        child = ShadowSequence(parent.table.fork(num_tokens), parent.tokens[:num_tokens], num_tokens, parent.is_forgotten)
        child.expected = parent.expected[:num_tokens]
        self.sequences.append(child)

    def free(self, index: int) -> None:
        self.sequences.pop(index).table.free()

    def pin(self, root: RootKey, tokens: Sequence[int]) -> None:
        table = pin(self.pool, self.tree, root, tokens)
        self.pins.append((table, list(tokens[: table.num_committed])))

    def unpin(self, index: int) -> None:
        self.pins.pop(index)[0].free()

    def forget(self, root: RootKey | None) -> None:
        """Clear one root, or all."""
        if root is None:
            self.tree.clear()
        else:
            self.tree.forget(root)
        for sequence in self.sequences:
            sequence.is_forgotten |= root in (None, sequence.table.root)

    def step(self, works: Sequence[Work], *, frees_before_sources: bool = False) -> None:
        """Prepare all, then copy, release sources, write, commit; aborted sequences are freed between prepare and copy."""
        planned: list[tuple[ShadowSequence, Work, int, list[BlockCopy]]] = []
        for work in works:
            sequence = self.sequences[work.index]
            if sequence.num_committed == len(sequence.tokens):
                sequence.extend(work.new_tokens)
            after = min(sequence.num_committed + work.num_tokens, len(sequence.tokens))
            copies = self._prepare(sequence, after)
            if copies is not None:
                planned.append((sequence, work, after, copies))
        pending = [copy for _, _, _, copies in planned for copy in copies]
        check_integrity(self.pool, self.tree, self._tables(), pending)
        self._abort([(s, copies) for s, work, _, copies in planned if work.is_aborted], frees_before_sources)
        planned = [plan for plan in planned if not plan[1].is_aborted]
        self._run_copies([copy for _, _, _, copies in planned for copy in copies])
        for sequence, _, after, _ in planned:
            slots = sequence.table.slot_mapping(sequence.num_committed, after)
            self._flat[slots] = sequence.expected[sequence.num_committed : after]
        published = [s for s, work, after, _ in planned if self._commit(s, max(after - work.num_given_up, s.num_committed))]
        for sequence in published:
            found = self.tree.match(sequence.table.root, sequence.tokens[: sequence.num_committed])
            assert found.num_tokens == sequence.num_committed, "a computed token cannot be found"

    def check(self) -> None:
        """Poison what nobody may read, then read everything that somebody may."""
        check_integrity(self.pool, self.tree, self._tables())
        self._poison()
        for sequence in self.sequences:
            table, length = sequence.table, sequence.num_committed
            assert table.num_committed == length
            read = self._flat[table.slot_mapping(0, length)]
            assert np.array_equal(read, sequence.expected[:length]), f"{table.block_ids} reads foreign or poisoned rows"
            if not sequence.is_forgotten:
                num_full = length - length % self.pool.block_size
                assert self.tree.match(table.root, sequence.tokens[:length]).num_tokens >= num_full
        for table, tokens in self.pins:
            self._check_rows(table.block_ids, table.root, tokens)
        self._check_report()

    def finish(self) -> None:
        """Give everything back: the pool is whole again."""
        while self.sequences:
            self.free(len(self.sequences) - 1)
        while self.pins:
            self.unpin(0)
        self.check()
        assert self.pool.num_available == self.pool.num_blocks
        self.tree.clear()
        self.check()
        assert self.pool.num_blank == self.pool.num_blocks

    @property
    def _flat(self) -> npt.NDArray[np.float64]:
        return self.rows.reshape(-1, 3)

    def _tables(self) -> list[BlockTable]:
        return [sequence.table for sequence in self.sequences] + [table for table, _ in self.pins]

    def _prepare(self, sequence: ShadowSequence, after: int) -> list[BlockCopy] | None:
        table, pool = sequence.table, self.pool
        before = (table.block_ids, pool.num_available, pool.num_cached_free)
        needed, num_nodes = table.blocks_needed(after), self.tree.num_nodes
        if needed > pool.num_available:
            self.seen["out of blocks"] += 1
            with pytest.raises(OutOfBlocks, match=f"{needed} blocks are needed, {pool.num_available} are available"):
                table.prepare(after)
            assert before == (table.block_ids, pool.num_available, pool.num_cached_free)
            return None
        copies = table.prepare(after)
        assert pool.num_available == before[1] - needed
        assert all(copy.num_rows == sequence.num_committed % pool.block_size for copy in copies)
        self.seen["copy"] += len(copies)
        self.seen["evict"] += pool.num_cached_free < before[2]
        self.seen["trim"] += needed == 0 and not copies and self.tree.num_nodes < num_nodes
        return copies

    def _abort(self, aborted: list[tuple[ShadowSequence, list[BlockCopy]]], frees_before_sources: bool) -> None:
        sources = [copy.src for _, copies in aborted for copy in copies]
        if not frees_before_sources:
            self.pool.release_all(sources)
        for sequence, _ in aborted:
            self.free(self.sequences.index(sequence))
            self.seen["abort"] += 1
        if frees_before_sources:
            self.pool.release_all(sources)

    def _run_copies(self, copies: list[BlockCopy]) -> None:
        """Copy as a device does: all at once, in no order, so that a copy may not read what another one writes."""
        taken = [self.rows[copy.src, : copy.num_rows].copy() for copy in copies]
        for copy, rows in zip(copies, taken, strict=True):
            self.rows[copy.dst] = np.nan
            self.rows[copy.dst, : copy.num_rows] = rows
        self.pool.release_all([copy.src for copy in copies])

    def _commit(self, sequence: ShadowSequence, num_computed: int) -> bool:
        """Commit, and tell whether something new should be found now."""
        before, is_new = sequence.table.block_ids, num_computed > sequence.num_committed
        sequence.table.commit(sequence.tokens, num_computed)
        sequence.num_committed = num_computed
        self.seen["dedupe"] += before != sequence.table.block_ids
        return is_new and not sequence.is_forgotten

    def _poison(self) -> None:
        readable = np.array([self.tree.num_rows(BlockId(i)) for i in range(self.pool.num_blocks)])
        size = self.pool.block_size
        for table, length in [(s.table, s.num_committed) for s in self.sequences] + [
            (t, len(tokens)) for t, tokens in self.pins
        ]:
            for i, block_id in enumerate(table.ids):
                readable[block_id] = max(readable[block_id], min(length - i * size, size))
        self.rows[np.arange(size) >= readable[:, None]] = np.nan

    def _check_rows(self, block_ids: Sequence[BlockId], root: RootKey, tokens: Sequence[int]) -> None:
        read = self.rows[list(block_ids)].reshape(-1, 3)[: len(tokens)]
        assert np.array_equal(read, expected_rows(root, tokens, 0, _seed(root))), (
            f"{block_ids} holds other rows than were found"
        )

    def _check_report(self) -> None:
        names = {str(i): table for i, table in enumerate(self._tables())}
        report = memory_report(self.pool, self.tree, names, bytes_per_block=1)
        is_used = np.array([self.pool.state(BlockId(i)) is BlockState.USED for i in range(self.pool.num_blocks)])
        is_filled = ~np.isnan(self.rows[:, :, 0])
        assert report.rows_held == is_filled[is_used].sum()
        assert report.rows_cached == is_filled[~is_used].sum()
        lengths = [s.num_committed for s in self.sequences] + [len(tokens) for _, tokens in self.pins]
        assert report.rows_without_sharing == sum(lengths)


def expected_rows(root: RootKey, tokens: Sequence[int], start: int, seed: int) -> npt.NDArray[np.float64]:
    """Return the rows of `tokens[start:]`; `seed` is the hash of what comes before them."""
    rows = np.empty((len(tokens) - start, 3))
    for i, token in enumerate(tokens[start:]):
        seed = (seed * 31 + token + 7) % _MODULUS
        rows[i] = token, start + i, seed
    return rows


def _seed(root: RootKey) -> int:
    return ROOTS.index(root) + 1
