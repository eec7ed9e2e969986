"""Block tables: adopting, growing, copy-on-write, committing, forking, freeing."""

import random

import numpy as np
import pytest

from chatpage.engine.block_pool import BlockCopy, BlockState, OutOfBlocks
from chatpage.engine.block_table import BlockTable, blocks_needed_to_admit
from tests.engine.memory import ALICE, BOB, BlockMemory


def test_a_sequence_takes_blocks_as_it_grows() -> None:
    memory = BlockMemory(block_size=4)
    table = memory.start([1])
    lengths = []
    for length in range(1, 10):
        memory.compute(table, list(range(length)))
        lengths.append(len(table.ids))
    assert lengths == [1, 1, 1, 1, 2, 2, 2, 2, 3]
    memory.assert_the_pool_is_whole_again()


def test_a_hit_is_held_before_anything_is_allocated() -> None:
    """An allocation for the new tokens once evicted the very blocks that had been found for the old ones."""
    memory = BlockMemory(num_blocks=3, block_size=2)
    hits = memory.cache([1, 2, 3, 4])
    table = memory.start([1, 2, 3, 4, 5])
    assert memory.pool.num_cached_free == 0
    memory.compute(table, [1, 2, 3, 4, 5])
    assert table.block_ids[:2] == hits
    memory.assert_the_pool_is_whole_again()


def test_a_cached_tail_that_nobody_holds_is_continued_in_place() -> None:
    memory = BlockMemory(block_size=4)
    block_ids = memory.cache([1, 2, 3])
    table = memory.start([1, 2, 3, 4])
    assert table.blocks_needed(4) == 0
    assert memory.compute(table, [1, 2, 3, 4]) == []
    assert table.block_ids == block_ids
    memory.assert_the_pool_is_whole_again()


def test_a_block_used_in_part_is_copied_because_others_can_find_its_other_rows() -> None:
    memory = BlockMemory(block_size=4)
    (block,) = memory.cache([1, 2, 3])
    table = memory.start([1, 2, 9])
    assert table.blocks_needed(3) == 1
    (copy,) = memory.compute(table, [1, 2, 9])
    assert (copy.src, copy.num_rows) == (block, 2)
    assert table.block_ids == (copy.dst,)
    assert memory.num_found([1, 2, 3]) == 3
    memory.assert_the_pool_is_whole_again()


def test_a_full_block_used_in_part_keeps_its_descendants() -> None:
    memory = BlockMemory(block_size=2)
    tokens = [1, 2, 3, 4, 5]
    memory.cache(tokens)
    table = memory.start([1, 2, 3, 9])
    assert memory.compute(table, [1, 2, 3, 9])[0].num_rows == 1
    assert (memory.num_found(tokens), memory.num_found([1, 2, 3, 9])) == (5, 4)
    memory.assert_the_pool_is_whole_again()


def test_a_copy_source_is_pinned_until_the_copy_ran() -> None:
    memory = BlockMemory(num_blocks=3, block_size=4)
    table = memory.run([1, 2, 3])
    fork = memory.fork(table, 3)
    memory.copies = fork.prepare(4)
    source = table.block_ids[0]
    assert memory.copies == [BlockCopy(source, fork.block_ids[0], 3)]
    memory.free(table)
    assert memory.pool.state(source) is BlockState.USED
    memory.pool.release(memory.copies.pop().src)
    assert memory.pool.state(source) is BlockState.CACHED
    memory.assert_the_pool_is_whole_again()


def test_forks_share_every_block_and_copy_one_partial_block_at_most() -> None:
    """n samples of a prompt hold the prompt once, plus a tail block each."""
    memory = BlockMemory(num_blocks=64, block_size=4)
    prompt = list(range(18))
    leader = memory.run(prompt)
    siblings = [memory.fork(leader, 18) for _ in range(7)]
    assert memory.pool.num_used == 5
    copies = [copy for i, s in enumerate((leader, *siblings)) for copy in memory.compute(s, [*prompt, 100 + i])]
    assert all(copy.num_rows == 2 for copy in copies)
    assert (len(copies), memory.pool.num_used) == (7, 4 + 8)
    memory.assert_the_pool_is_whole_again()


@pytest.mark.parametrize("at", range(10))
def test_a_fork_can_start_at_any_token(at: int) -> None:
    memory = BlockMemory(block_size=4)
    tokens = list(range(9))
    table = memory.run(tokens)
    fork = memory.fork(table, at)
    assert (fork.num_committed, fork.block_ids) == (at, table.block_ids[: -(-at // 4)])
    memory.compute(fork, [*tokens[:at], 50, 51, 52, 53, 54])
    assert memory.num_found([*tokens[:at], 50, 51, 52, 53, 54]) == at + 5
    assert memory.num_found(tokens) == 9
    memory.assert_the_pool_is_whole_again()


def test_the_last_holder_of_a_shared_tail_writes_in_place() -> None:
    memory = BlockMemory(block_size=4)
    table = memory.run([1, 2])
    fork = memory.fork(table, 2)
    assert len(memory.compute(table, [1, 2, 3])) == 1
    assert memory.compute(fork, [1, 2, 4]) == []
    memory.assert_the_pool_is_whole_again()


def test_the_last_holder_does_not_overwrite_rows_that_others_can_find() -> None:
    memory = BlockMemory(block_size=4)
    table = memory.run([1, 2, 3])
    fork = memory.fork(table, 2)
    memory.free(table)
    assert len(memory.compute(fork, [1, 2, 9])) == 1
    assert memory.num_found([1, 2, 3]) == 3
    memory.assert_the_pool_is_whole_again()


def test_a_full_pool_gives_up_cached_rows_rather_than_refuse_its_only_sequence() -> None:
    """A request that fills the whole cache found all but one token of itself cached in part of a block: copying that
    block needs one block more than there are, so it waited for ever, alone.
    """
    memory = BlockMemory(num_blocks=2, block_size=4)
    memory.cache(list(range(8)))
    match = memory.tree.match(ALICE, [0, 1, 2, 3, 4, 5, 9])
    assert match.num_tokens == 6
    assert blocks_needed_to_admit(memory.pool, memory.tree, match, 8) == 0
    table = memory.start([0, 1, 2, 3, 4, 5, 9])
    assert table.blocks_needed(8) == 0
    assert memory.compute(table, [0, 1, 2, 3, 4, 5, 9, 9]) == []
    assert memory.num_found([0, 1, 2, 3, 4, 5, 6, 7]) == 6
    memory.assert_the_pool_is_whole_again()


def test_giving_up_cached_rows_gives_up_what_follows_them() -> None:
    memory = BlockMemory(num_blocks=3, block_size=2)
    memory.cache([1, 2, 3, 4, 5, 6])
    table = memory.start([1, 9])
    assert table.num_committed == 1
    assert memory.compute(table, [1, 9, 9, 9, 9, 9]) == []
    assert memory.num_found([1, 2, 3, 4, 5, 6]) == 1
    memory.assert_the_pool_is_whole_again()


def test_prepare_that_does_not_fit_changes_nothing() -> None:
    memory = BlockMemory(num_blocks=3, block_size=2)
    table, cached = memory.run([1]), memory.cache([7, 7])
    fork = memory.fork(table, 1)
    before = (table.block_ids, fork.block_ids, memory.pool.num_available)
    with pytest.raises(OutOfBlocks, match="4 blocks are needed, 2 are available"):
        fork.prepare(8)
    memory.check()
    assert (table.block_ids, fork.block_ids, memory.pool.num_available) == before
    assert memory.tree.match(ALICE, [7, 7]).block_ids == cached
    memory.assert_the_pool_is_whole_again()


@pytest.mark.parametrize("block_size", [1, 2, 4])
def test_blocks_needed_is_what_prepare_takes(block_size: int) -> None:
    draw = random.Random(block_size)
    for _ in range(300):
        memory = BlockMemory(num_blocks=32, block_size=block_size)
        for _ in range(3):
            memory.cache([draw.randrange(2) for _ in range(draw.randrange(1, 8))])
        tokens = [draw.randrange(2) for _ in range(draw.randrange(1, 10))]
        match = memory.tree.match(ALICE, tokens)
        expected = blocks_needed_to_admit(memory.pool, memory.tree, match, len(tokens) + 1)
        free_hits = memory.pool.num_cached_free_in(match.block_ids)
        available = memory.pool.num_available
        table = memory.start(tokens)
        assert (table.blocks_needed(len(tokens) + 1), memory.pool.num_available) == (expected, available - free_hits)
        memory.copies = table.prepare(len(tokens) + 1)
        assert memory.pool.num_available == available - free_hits - expected
        memory.check()
        for copy in memory.copies:
            memory.pool.release(copy.src)
        memory.copies = []
        memory.assert_the_pool_is_whole_again()


def test_every_committed_token_of_a_live_sequence_is_found_by_others() -> None:
    memory = BlockMemory(block_size=4)
    table = memory.start([0])
    tokens = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]
    for length in range(1, 11):
        memory.compute(table, tokens[:length])
        assert memory.tree.match(ALICE, tokens).num_tokens == length
    memory.assert_the_pool_is_whole_again()


def test_two_sequences_that_compute_the_same_end_up_on_the_same_full_blocks() -> None:
    memory = BlockMemory(block_size=2)
    first, second = memory.start([1]), memory.start([1])
    tokens = [1, 2, 3, 4, 5]
    for length in range(1, 6):
        memory.compute(first, tokens[:length])
        memory.compute(second, tokens[:length])
    assert first.block_ids[:2] == second.block_ids[:2]
    assert first.block_ids[2] != second.block_ids[2]
    assert memory.pool.num_used == 4
    memory.assert_the_pool_is_whole_again()


def test_a_tail_that_another_block_covers_is_not_cached_twice() -> None:
    memory = BlockMemory(block_size=4)
    first, second = memory.start([1]), memory.start([1])
    memory.compute(first, [1, 2, 3])
    memory.compute(second, [1, 2])
    memory.free(second)
    assert memory.pool.num_cached_free == 0
    memory.assert_the_pool_is_whole_again()


def test_a_tail_that_lost_its_twin_is_published_when_it_differs() -> None:
    memory = BlockMemory(block_size=4)
    first, second = memory.start([1]), memory.start([1])
    memory.compute(first, [1, 2])
    memory.compute(second, [1, 2])
    memory.compute(second, [1, 2, 3])
    memory.compute(first, [1, 2, 4])
    assert (memory.num_found([1, 2, 3]), memory.num_found([1, 2, 4])) == (3, 3)
    memory.assert_the_pool_is_whole_again()


def test_an_abandoned_step_publishes_nothing_and_leaks_nothing() -> None:
    memory = BlockMemory(block_size=2)
    table = memory.run([1, 2, 3])
    assert table.prepare(9) == []
    memory.free(table)
    assert memory.num_found([1, 2, 3, 4]) == 3
    assert memory.pool.num_cached_free == 2
    memory.assert_the_pool_is_whole_again()


def test_a_step_may_compute_less_than_was_prepared() -> None:
    memory = BlockMemory(block_size=2)
    table = memory.start([1, 2, 3, 4, 5])
    table.prepare(5)
    table.commit([1, 2, 3, 4, 5], 2)
    memory.check()
    fork = memory.fork(table, 2)
    assert (fork.block_ids, len(table.ids)) == (table.block_ids[:1], 3)
    assert table.prepare(6) == []
    table.commit([1, 2, 7, 8, 9, 10], 6)
    assert memory.num_found([1, 2, 7, 8, 9, 10]) == 6
    memory.assert_the_pool_is_whole_again()


def test_more_than_was_prepared_cannot_be_committed() -> None:
    memory = BlockMemory(block_size=2)
    table = memory.run([1, 2])
    with pytest.raises(AssertionError, match="3 tokens computed, 2 committed, 2 slots"):
        table.commit([1, 2, 3], 3)
    memory.assert_the_pool_is_whole_again()


def test_a_pinned_prefix_is_not_evicted_until_it_is_unpinned() -> None:
    memory = BlockMemory(num_blocks=4, block_size=2)
    preset = [1, 2, 3]
    memory.cache(preset)
    pinned = memory.pin(preset)
    memory.cache([7, 7, 7, 7], BOB)
    assert memory.num_found(preset) == 3
    memory.free(pinned)
    memory.cache([8] * 8, BOB)
    assert memory.num_found(preset) == 0
    memory.assert_the_pool_is_whole_again()


def test_a_freed_table_cannot_be_used() -> None:
    memory = BlockMemory()
    table = memory.run([1, 2])
    memory.free(table)
    assert table.is_freed
    for use in (table.free, lambda: table.prepare(3), lambda: table.commit([1], 0), lambda: table.fork(0)):
        with pytest.raises(AssertionError, match="was freed"):
            use()
    memory.assert_the_pool_is_whole_again()


def test_slots_follow_a_scattered_table() -> None:
    memory = BlockMemory(num_blocks=8, block_size=4)
    table, neighbour = memory.start([]), memory.start([], BOB)
    for length in (4, 8, 11):
        memory.compute(neighbour, list(range(length)))
        memory.compute(table, list(range(length)))
    expected = [table.ids[p // 4] * 4 + p % 4 for p in range(11)]
    assert [table.slot(p) for p in range(11)] == expected
    for start in range(12):
        for stop in range(start, 12):
            slots = table.slot_mapping(start, stop)
            assert slots.dtype == np.int64
            assert slots.tolist() == expected[start:stop]
    assert table.block_ids == (1, 3, 5)
    memory.assert_the_pool_is_whole_again()


def test_block_ids_are_a_view_for_numpy() -> None:
    memory = BlockMemory(block_size=2)
    table = memory.run([1, 2, 3])
    view = np.frombuffer(table.ids, dtype=np.int32)
    assert view.tolist() == list(table.block_ids)
    del view
    memory.assert_the_pool_is_whole_again()


def test_only_an_empty_table_adopts() -> None:
    memory = BlockMemory(block_size=2)
    table = memory.run([1, 2])
    with pytest.raises(AssertionError, match="only an empty table adopts"):
        table.adopt(memory.tree.match(ALICE, [1, 2]))
    memory.assert_the_pool_is_whole_again()


def test_a_match_that_went_stale_is_not_adopted() -> None:
    memory = BlockMemory(block_size=2)
    memory.cache([1, 2])
    match = memory.tree.match(ALICE, [1, 2])
    memory.tree.clear()
    table = memory.track(BlockTable(memory.pool, memory.tree, ALICE))
    with pytest.raises(AssertionError, match="not in the tree any more"):
        table.adopt(match)
    memory.check()
    memory.assert_the_pool_is_whole_again()
