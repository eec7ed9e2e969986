"""Accounting: exact numbers, a shared block counted once."""

import pytest

from chatpage.engine.accounting import block_map, check_integrity, memory_report, num_freeable_blocks
from chatpage.engine.block_pool import BlockState
from tests.engine.memory import BlockMemory


def test_a_shared_block_counts_once() -> None:
    """A server that added up its requests reported more memory held than it had, and stopped admitting."""
    memory = BlockMemory(num_blocks=8, block_size=4)
    first = memory.run([1, 2, 3, 4, 5, 6])
    second = memory.fork(first, 4)
    memory.compute(second, [1, 2, 3, 4, 7, 8, 9])
    report = memory_report(memory.pool, memory.tree, {"a": first, "b": second}, bytes_per_block=100)
    assert (report.blocks_used, report.blocks_cached, report.blocks_blank, report.blocks_shared) == (3, 0, 5, 1)
    assert (report.rows_held, report.rows_shared, report.rows_private, report.rows_wasted) == (9, 4, 5, 3)
    assert (report.rows_without_sharing, report.blocks_without_sharing) == (13, 4)
    assert (report.bytes_total, report.bytes_held, report.bytes_without_sharing) == (800, 300, 400)
    assert report.utilization == 9 / 12
    memory.assert_the_pool_is_whole_again()


def test_rows_are_shared_only_as_far_as_two_sequences_read_them() -> None:
    memory = BlockMemory(block_size=4)
    tables = {"a": memory.run([1, 2, 3, 4])}
    tables["b"] = memory.fork(tables["a"], 1)
    tables["c"] = memory.fork(tables["a"], 3)
    report = memory_report(memory.pool, memory.tree, tables, bytes_per_block=1)
    assert (report.rows_held, report.rows_shared, report.rows_private) == (4, 3, 1)
    memory.assert_the_pool_is_whole_again()


def test_cached_blocks_are_available_and_their_rows_are_told() -> None:
    memory = BlockMemory(num_blocks=8, block_size=4)
    memory.cache([1, 2, 3, 4, 5])
    report = memory_report(memory.pool, memory.tree, {}, bytes_per_block=1)
    assert (report.blocks_used, report.blocks_cached, report.blocks_available) == (0, 2, 8)
    assert (report.rows_held, report.rows_cached, report.utilization) == (0, 5, 1.0)
    memory.assert_the_pool_is_whole_again()


def test_waste_is_less_than_a_block_per_tip() -> None:
    memory = BlockMemory(num_blocks=64, block_size=4)
    leader = memory.run(list(range(10)))
    tables = {str(i): memory.fork(leader, 10) for i in range(8)}
    for i, table in enumerate(tables.values()):
        memory.compute(table, [*range(10), 100 + i])
    memory.free(leader)
    report = memory_report(memory.pool, memory.tree, tables, bytes_per_block=1)
    assert report.rows_held == 8 + 8 * 3
    assert report.rows_wasted <= 8 * 3
    memory.assert_the_pool_is_whole_again()


def test_freeing_a_sequence_gives_back_what_only_it_holds() -> None:
    memory = BlockMemory(num_blocks=16, block_size=2)
    first = memory.run([1, 2, 3, 4, 5])
    second = memory.fork(first, 4)
    memory.compute(second, [1, 2, 3, 4, 6, 7, 8])
    for table, expected in ((first, 1), (second, 4)):
        assert num_freeable_blocks(memory.pool, table) == expected
        before = memory.pool.num_available
        memory.free(table)
        assert memory.pool.num_available == before + expected
    memory.assert_the_pool_is_whole_again()


def test_the_block_map_tells_state_rows_and_holders_of_every_block() -> None:
    memory = BlockMemory(num_blocks=4, block_size=4)
    memory.cache([9, 9])
    first = memory.run([1, 2, 3])
    blocks = block_map(memory.pool, memory.tree, {"first": first, "fork": memory.fork(first, 2)})
    assert [block.block_id for block in blocks] == [0, 1, 2, 3]
    by_state = {state: [block for block in blocks if block.state is state] for state in BlockState}
    (used,), (cached,) = by_state[BlockState.USED], by_state[BlockState.CACHED]
    assert (used.ref_count, used.num_rows, used.holders) == (2, 3, ("first", "fork"))
    assert (cached.ref_count, cached.num_rows, cached.holders) == (0, 2, ())
    assert [block.num_rows for block in by_state[BlockState.BLANK]] == [0, 0]
    memory.assert_the_pool_is_whole_again()


def test_integrity_fails_when_a_holder_is_missing() -> None:
    memory = BlockMemory(block_size=2)
    table = memory.run([1])
    with pytest.raises(AssertionError, match=f"block {table.ids[0]} has ref count 1 but 0 holders"):
        check_integrity(memory.pool, memory.tree, [])
    memory.assert_the_pool_is_whole_again()


def test_integrity_fails_when_the_sorted_children_are_out_of_step() -> None:
    memory = BlockMemory(block_size=2)
    memory.cache([1])
    memory.cache([2])
    root = memory.tree._nodes[0]
    assert root is not None
    assert root.parent is not None
    ordered = root.parent.ordered
    ordered.reverse()
    with pytest.raises(AssertionError, match="out of step"):
        check_integrity(memory.pool, memory.tree, [])
    ordered.reverse()
    memory.assert_the_pool_is_whole_again()
