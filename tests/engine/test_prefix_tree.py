"""The prefix tree: what is found, what is not, and in which order it goes."""

import gc
import random

import pytest

from chatpage.engine.block_pool import BlockState
from chatpage.engine.prefix_tree import NO_MATCH, PrefixMatch, RootKey
from tests.engine.memory import ALICE, BOB, BlockMemory


def test_nothing_is_found_in_an_empty_tree() -> None:
    memory = BlockMemory()
    assert memory.tree.match(ALICE, [1, 2, 3]) == NO_MATCH
    memory.assert_the_pool_is_whole_again()


@pytest.mark.parametrize("num_tokens", [3, 4, 5, 7, 8, 9])
def test_a_prefix_is_found_token_by_token_around_every_block_border(num_tokens: int) -> None:
    """Lengths k*B-1, k*B and k*B+1 are where others lost or doubled a block."""
    memory = BlockMemory(block_size=4)
    tokens = list(range(num_tokens))
    block_ids = memory.cache(tokens)
    for cut in range(num_tokens + 1):
        match = memory.tree.match(ALICE, [*tokens[:cut], 99, 98])
        assert match == PrefixMatch(tuple(block_ids[: -(-cut // 4)]), cut)
    memory.assert_the_pool_is_whole_again()


def test_a_limit_inside_a_full_block_uses_it_in_part() -> None:
    """The engine needs the logits of the last token, so it must compute at least that one."""
    memory = BlockMemory(block_size=4)
    tokens = list(range(8))
    block_ids = memory.cache(tokens)
    assert memory.tree.match(ALICE, tokens, limit=7) == PrefixMatch(block_ids, 7)
    assert memory.tree.match(ALICE, tokens, limit=4) == PrefixMatch(block_ids[:1], 4)
    assert memory.tree.match(ALICE, tokens, limit=0) == NO_MATCH
    memory.assert_the_pool_is_whole_again()


def test_the_child_with_the_longest_common_prefix_wins() -> None:
    memory = BlockMemory(num_blocks=64, block_size=4)
    draw = random.Random(0)
    cached = [[draw.randrange(3) for _ in range(4)] for _ in range(12)]
    for tokens in cached:
        memory.cache(tokens)
    for _ in range(200):
        wanted = [draw.randrange(3) for _ in range(4)]
        longest = max(next((i for i in range(4) if a[i] != wanted[i]), 4) for a in cached)
        assert memory.num_found(wanted) == longest
    memory.assert_the_pool_is_whole_again()


def test_of_equally_long_matches_the_one_that_can_be_continued_in_place_is_taken() -> None:
    memory = BlockMemory(block_size=4)
    parent = memory.run([1, 2])
    fork = memory.fork(parent, 2)
    assert memory.compute(fork, [1, 2, 3]) != []
    assert memory.tree.match(ALICE, [1, 2, 9]).block_ids == parent.block_ids
    memory.assert_the_pool_is_whole_again()


def test_matching_does_not_make_a_block_recently_used() -> None:
    """A probe that is not admitted must not push others out of the cache."""
    memory = BlockMemory(num_blocks=2, block_size=2)
    memory.cache([1, 2])
    memory.cache([3, 4])
    memory.tree.match(ALICE, [1, 2])
    memory.run([5, 6])
    assert (memory.num_found([1, 2]), memory.num_found([3, 4])) == (0, 2)
    memory.assert_the_pool_is_whole_again()


def test_tokens_with_colliding_hashes_do_not_hit() -> None:
    """Keys made of hashes let one user craft a prompt that read another's KV; here tokens decide.

    CPython hashes -1 and -2 alike, and so does the dict that indexes the children.
    """
    memory = BlockMemory(block_size=2)
    assert hash((-1, -1)) == hash((-2, -2))
    memory.cache([-1, -1])
    assert memory.num_found([-2, -2]) == 0
    memory.cache([-2, -2])
    assert memory.num_found([-2, -2]) == 2
    assert memory.tree.match(ALICE, [-1, -1]).block_ids != memory.tree.match(ALICE, [-2, -2]).block_ids
    memory.assert_the_pool_is_whole_again()


@pytest.mark.parametrize("other", [BOB, RootKey("other weights", "alice")])
def test_nothing_is_found_across_users_or_weights(other: RootKey) -> None:
    """A probe of another user learns nothing from the number of cached tokens; a renamed model never reuses old KV."""
    memory = BlockMemory(block_size=4)
    tokens = list(range(10))
    memory.cache(tokens, ALICE)
    assert memory.num_found(tokens, other) == 0
    mine, theirs = memory.run(tokens, ALICE), memory.run(tokens, other)
    assert not set(mine.block_ids) & set(theirs.block_ids)
    memory.assert_the_pool_is_whole_again()


def test_only_committed_tokens_are_found() -> None:
    """A stopped run once published tokens whose KV was never computed."""
    memory = BlockMemory(block_size=4)
    table = memory.start([1, 2, 3, 4, 5, 6])
    table.prepare(6)
    assert memory.num_found([1, 2, 3, 4, 5, 6]) == 0
    table.commit([1, 2, 3, 4, 5, 6], 5)
    assert memory.num_found([1, 2, 3, 4, 5, 6]) == 5
    memory.free(table)
    assert memory.num_found([1, 2, 3, 4, 5, 6]) == 5
    memory.assert_the_pool_is_whole_again()


def test_leaves_are_evicted_before_the_blocks_they_hang_on() -> None:
    memory = BlockMemory(num_blocks=3, block_size=2)
    tokens = [1, 2, 3, 4, 5, 6]
    memory.cache(tokens)
    found = []
    for other in (7, 8, 9):
        memory.run([other, other])
        found.append(memory.num_found(tokens))
    assert found == [4, 2, 0]
    memory.assert_the_pool_is_whole_again()


def test_forgetting_one_root_leaves_the_other() -> None:
    memory = BlockMemory(block_size=2)
    memory.cache([1, 2, 3], ALICE)
    memory.cache([1, 2, 3], BOB)
    memory.tree.forget(ALICE)
    memory.check()
    assert (memory.num_found([1, 2, 3], ALICE), memory.num_found([1, 2, 3], BOB)) == (0, 3)
    assert memory.pool.num_cached_free == 2
    memory.assert_the_pool_is_whole_again()


def test_blocks_in_use_survive_a_clear_but_are_not_found_nor_published_any_more() -> None:
    memory = BlockMemory(block_size=2)
    table = memory.run([1, 2, 3])
    block_ids = table.block_ids
    memory.tree.clear()
    memory.check()
    assert table.block_ids == block_ids
    fork = memory.fork(table, 1)
    memory.compute(table, [1, 2, 3, 4, 5])
    memory.compute(fork, [1, 9, 9])
    assert memory.num_found([1, 2, 3, 4, 5]) == 0
    memory.free(table, fork)
    assert memory.pool.num_cached_free == 0
    memory.assert_the_pool_is_whole_again()


def test_an_empty_table_made_before_a_clear_publishes_what_it_adopts_after() -> None:
    memory = BlockMemory(block_size=2)
    early = memory.start([])
    memory.tree.clear()
    early.adopt(memory.tree.match(ALICE, [1, 2]))
    memory.compute(early, [1, 2])
    assert memory.num_found([1, 2]) == 2
    memory.assert_the_pool_is_whole_again()


def test_salts_that_went_out_of_use_leave_nothing_behind() -> None:
    memory = BlockMemory(num_blocks=2, block_size=2)
    for user in range(50):
        memory.cache([1, 2, 3], RootKey("model", f"user {user}"))
    gc.collect()
    assert len(memory.tree._roots) == 1
    memory.assert_the_pool_is_whole_again()


def test_a_copy_source_that_outlives_its_sequence_is_forgotten_rather_than_stranded() -> None:
    """A step was given up after its sequences were freed: the tail still waited for its copy while the blocks before it
    were free already, ahead of it in the free queue.
    """
    memory = BlockMemory(num_blocks=8, block_size=2)
    table = memory.run([1, 2, 3])
    fork = memory.fork(table, 3)
    memory.copies = fork.prepare(4)
    memory.free(fork, table)
    source = memory.copies.pop().src
    memory.pool.release(source)
    memory.check()
    assert memory.pool.state(source) is BlockState.BLANK
    assert memory.num_found([1, 2, 3]) == 2
    memory.assert_the_pool_is_whole_again()


def test_the_block_before_a_pending_copy_source_can_be_evicted() -> None:
    memory = BlockMemory(num_blocks=3, block_size=2)
    table = memory.run([1, 2, 3])
    fork = memory.fork(table, 3)
    memory.copies = fork.prepare(4)
    memory.free(fork, table)
    other = memory.run([7, 7, 7], BOB)
    assert memory.num_found([1, 2, 3]) == 0
    memory.pool.release(memory.copies.pop().src)
    memory.free(other)
    memory.assert_the_pool_is_whole_again()
