"""What the block memory holds, in exact numbers, and the proof that it is whole.

Invariant: a block counts once however many sequences hold it, and blank + cached + used blocks are all the blocks.

    block size 4, two sequences of 6 and 7 tokens that share block 2

       block 2  [x x x x]  held twice     4 rows shared
       block 7  [x x . .]  held once      2 rows private, 2 wasted       rows held 9, without sharing 13
       block 5  [x x x .]  held once      3 rows private, 1 wasted       blocks used 3, without sharing 4
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from chatpage.engine.block_pool import BlockCopy, BlockId, BlockPool, BlockState
from chatpage.engine.block_table import BlockTable, count_holders
from chatpage.engine.prefix_tree import PrefixTree


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """The block memory at one moment between two steps. A row is the KV of one token over all layers."""

    num_blocks: int
    block_size: int
    bytes_per_block: int
    blocks_used: int
    blocks_cached: int  # free, but what they hold can still be found
    blocks_blank: int
    blocks_shared: int  # used by more than one holder
    rows_held: int  # filled rows of used blocks, each once
    rows_shared: int  # rows that at least two sequences read
    rows_cached: int  # filled rows of cached blocks
    rows_without_sharing: int  # filled rows if every sequence had its own copy: the sum of their lengths
    blocks_without_sharing: int  # blocks if every sequence had its own

    @property
    def rows_private(self) -> int:
        """Filled rows of used blocks that at most one sequence reads."""
        return self.rows_held - self.rows_shared

    @property
    def rows_wasted(self) -> int:
        """Rows of used blocks that hold nothing: at most block size - 1 per tip, plus what is prepared for the next step."""
        return self.blocks_used * self.block_size - self.rows_held

    @property
    def blocks_available(self) -> int:
        return self.blocks_cached + self.blocks_blank

    @property
    def bytes_total(self) -> int:
        return self.num_blocks * self.bytes_per_block

    @property
    def bytes_held(self) -> int:
        return self.blocks_used * self.bytes_per_block

    @property
    def bytes_without_sharing(self) -> int:
        return self.blocks_without_sharing * self.bytes_per_block

    @property
    def utilization(self) -> float:
        """Share of the rows of used blocks that hold a token, 1.0 if no block is used."""
        return self.rows_held / (self.blocks_used * self.block_size) if self.blocks_used else 1.0


@dataclass(frozen=True, slots=True)
class BlockInfo:
    """One block of the block map."""

    block_id: BlockId
    ref_count: int
    state: BlockState
    num_rows: int  # filled rows: readable by a holder or found by a lookup
    holders: tuple[str, ...]  # names of the tables that hold it, in the order given


def memory_report(pool: BlockPool, tree: PrefixTree, tables: Mapping[str, BlockTable], bytes_per_block: int) -> MemoryReport:
    """Count what is held, shared, cached and wasted.

    Args:
        pool: The block pool.
        tree: Its prefix tree.
        tables: Every live block table, pins included, by the name of its holder.
        bytes_per_block: Bytes of one block over all layers, keys and values.
    """
    most_rows, second_rows = _rows_read(pool, tables.values())
    filled = [max(tree.num_rows(BlockId(i)), most_rows[i]) for i in range(pool.num_blocks)]
    is_used = [pool.ref_count(BlockId(i)) > 0 for i in range(pool.num_blocks)]
    return MemoryReport(
        num_blocks=pool.num_blocks,
        block_size=pool.block_size,
        bytes_per_block=bytes_per_block,
        blocks_used=pool.num_used,
        blocks_cached=pool.num_cached_free,
        blocks_blank=pool.num_blank,
        blocks_shared=sum(pool.ref_count(BlockId(i)) > 1 for i in range(pool.num_blocks)),
        rows_held=sum(rows for rows, used in zip(filled, is_used, strict=True) if used),
        rows_shared=sum(second_rows),
        rows_cached=sum(rows for rows, used in zip(filled, is_used, strict=True) if not used),
        rows_without_sharing=sum(table.num_committed for table in tables.values()),
        blocks_without_sharing=sum(len(table.ids) for table in tables.values()),
    )


def num_freeable_blocks(pool: BlockPool, table: BlockTable) -> int:
    """Count the blocks that freeing `table` would make available now: those only it holds."""
    return sum(pool.ref_count(block_id) == 1 for block_id in table.block_ids)


def block_map(pool: BlockPool, tree: PrefixTree, tables: Mapping[str, BlockTable]) -> tuple[BlockInfo, ...]:
    """Describe every block, in the order of their ids, with the names of its holders."""
    holders: list[list[str]] = [[] for _ in range(pool.num_blocks)]
    for name, table in tables.items():
        for block_id in table.ids:
            holders[block_id].append(name)
    most_rows, _ = _rows_read(pool, tables.values())
    return tuple(
        BlockInfo(
            block_id=block_id,
            ref_count=pool.ref_count(block_id),
            state=pool.state(block_id),
            num_rows=max(tree.num_rows(block_id), most_rows[block_id]),
            holders=tuple(holders[block_id]),
        )
        for block_id in map(BlockId, range(pool.num_blocks))
    )


def check_integrity(pool: BlockPool, tree: PrefixTree, tables: Iterable[BlockTable], copies: Iterable[BlockCopy] = ()) -> None:
    """Prove that pool, prefix tree and block tables agree; costs O(blocks), for tests and debugging.

    Args:
        pool: The block pool.
        tree: Its prefix tree.
        tables: Every live block table, pins included.
        copies: Copies whose sources were not released yet.

    Raises:
        AssertionError: Something is wrong; the message names the block.
    """
    tables, copies = list(tables), list(copies)
    pool.check_integrity(count_holders(pool, tables, copies))
    tree.check_integrity({copy.src for copy in copies})
    for table in tables:
        table.check_integrity()


def _rows_read(pool: BlockPool, tables: Iterable[BlockTable]) -> tuple[list[int], list[int]]:
    """Per block, the rows of it that its first and its second hungriest reader reads.

    Readers of a block all begin at its first row, so the second number is how many rows at least two of them read.
    """
    most, second = [0] * pool.num_blocks, [0] * pool.num_blocks
    for table in tables:
        for i, block_id in enumerate(table.ids):
            rows = table.rows_of(i)
            most[block_id], second[block_id] = max(most[block_id], rows), max(second[block_id], min(most[block_id], rows))
    return most, second
