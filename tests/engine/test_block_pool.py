"""The block pool: states, ref counts, and the order in which free blocks are handed out."""

import pytest

from chatpage.engine.block_pool import BlockId, BlockPool, BlockState, OutOfBlocks
from tests.engine.memory import BlockMemory


class FakeIndex:
    """An index that remembers the blocks it was told to keep."""

    def __init__(self, *kept: BlockId) -> None:
        self.kept = set(kept)
        self.evicted: list[BlockId] = []

    def keep(self, block_id: BlockId) -> bool:
        return block_id in self.kept

    def evict(self, block_id: BlockId) -> None:
        self.kept.remove(block_id)
        self.evicted.append(block_id)


def a_pool(num_blocks: int, *kept: int) -> tuple[BlockPool, FakeIndex]:
    pool, index = BlockPool(num_blocks, 4), FakeIndex(*map(BlockId, kept))
    pool.attach(index)
    return pool, index


def allocate(pool: BlockPool, count: int) -> list[BlockId]:
    return [pool.allocate() for _ in range(count)]


def assert_whole(pool: BlockPool) -> None:
    pool.check_integrity([0] * pool.num_blocks)
    assert pool.num_available == pool.num_blocks


def test_a_new_pool_is_blank() -> None:
    pool, _ = a_pool(3)
    assert (pool.num_blank, pool.num_cached_free, pool.num_used) == (3, 0, 0)
    assert pool.state(BlockId(0)) is BlockState.BLANK
    assert_whole(pool)


def test_allocated_blocks_are_distinct_and_used_once() -> None:
    pool, _ = a_pool(3)
    blocks = allocate(pool, 3)
    assert sorted(blocks) == [0, 1, 2]
    assert [pool.ref_count(block) for block in blocks] == [1, 1, 1]
    assert pool.state(blocks[0]) is BlockState.USED
    pool.release_all(blocks)
    assert_whole(pool)


def test_an_empty_pool_says_so_with_the_numbers_and_changes_nothing() -> None:
    pool, _ = a_pool(1)
    block = pool.allocate()
    with pytest.raises(OutOfBlocks, match="1 blocks are needed, 0 are available"):
        pool.allocate()
    pool.check_integrity([1])
    pool.release(block)
    assert_whole(pool)


def test_a_block_is_free_only_after_its_last_holder() -> None:
    pool, _ = a_pool(1)
    block = pool.allocate()
    pool.acquire(block)
    pool.release(block)
    assert pool.state(block) is BlockState.USED
    pool.release(block)
    assert pool.state(block) is BlockState.BLANK
    assert_whole(pool)


def test_a_double_free_raises_and_the_queue_still_has_the_block_once() -> None:
    """A block freed twice by two paths stood twice in the free queue of an engine, and two requests got it."""
    pool, _ = a_pool(2)
    block = pool.allocate()
    pool.release(block)
    with pytest.raises(AssertionError, match=f"block {block} is free already"):
        pool.release(block)
    assert sorted(allocate(pool, 2)) == [0, 1]
    pool.release_all([BlockId(0), BlockId(1)])
    assert_whole(pool)


def test_a_blank_block_cannot_be_acquired() -> None:
    pool, _ = a_pool(1)
    with pytest.raises(AssertionError, match="block 0 is blank"):
        pool.acquire(BlockId(0))
    assert_whole(pool)


def test_blank_blocks_are_reused_last_freed_first() -> None:
    pool, _ = a_pool(4)
    first, second, *_ = blocks = allocate(pool, 4)
    pool.release(first)
    pool.release(second)
    assert allocate(pool, 2) == [second, first]
    pool.release_all(blocks)
    assert_whole(pool)


def test_cached_blocks_are_evicted_after_all_blank_ones_and_least_recently_used_first() -> None:
    pool, index = a_pool(4, 0, 1, 2)
    blocks = allocate(pool, 4)
    pool.release_all([BlockId(2), BlockId(0), BlockId(3), BlockId(1)])
    assert (pool.num_blank, pool.num_cached_free) == (1, 3)
    assert allocate(pool, 4) == [3, 2, 0, 1]
    assert index.evicted == [2, 0, 1]
    pool.release_all(blocks)
    assert_whole(pool)


def test_a_cached_block_that_was_used_again_moves_to_the_end_of_the_queue() -> None:
    pool, index = a_pool(2, 0, 1)
    blocks = allocate(pool, 2)
    pool.release_all([BlockId(0), BlockId(1)])
    pool.acquire(BlockId(0))
    pool.release(BlockId(0))
    assert pool.allocate() == 1
    assert index.evicted == [1]
    pool.acquire(BlockId(0))
    pool.release_all(blocks)
    assert_whole(pool)


def test_cached_free_blocks_are_available_until_they_are_acquired() -> None:
    pool, _ = a_pool(2, 0, 1)
    pool.release_all(allocate(pool, 2))
    assert (pool.num_available, pool.num_cached_free_in([BlockId(0), BlockId(0), BlockId(1)])) == (2, 2)
    pool.acquire(BlockId(1))
    assert (pool.num_available, pool.num_cached_free_in([BlockId(0), BlockId(1)])) == (1, 1)
    pool.release(BlockId(1))
    assert_whole(pool)


def test_a_block_that_the_index_forgot_is_blank_and_next() -> None:
    pool, index = a_pool(2, 0, 1)
    pool.release_all(allocate(pool, 2))
    index.kept.remove(BlockId(1))
    pool.make_blank(BlockId(1))
    assert pool.state(BlockId(1)) is BlockState.BLANK
    assert pool.allocate() == 1
    assert index.evicted == []
    pool.release(BlockId(1))
    assert_whole(pool)


def test_integrity_names_the_block_whose_holders_do_not_add_up() -> None:
    pool, _ = a_pool(2)
    block = pool.allocate()
    with pytest.raises(AssertionError, match=f"block {block} has ref count 1 but 0 holders"):
        pool.check_integrity([0, 0])
    pool.release(block)
    assert_whole(pool)


def test_integrity_holds_through_a_real_tree() -> None:
    memory = BlockMemory(num_blocks=4, block_size=2)
    memory.cache([1, 2, 3])
    assert (memory.pool.num_blank, memory.pool.num_cached_free) == (2, 2)
    memory.assert_the_pool_is_whole_again()
