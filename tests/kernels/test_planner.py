"""Planner: a plan that grew with its sequences covers what a new one would."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from chatpage_kernels import Tile, planner, reference
from chatpage_kernels.plan import AttentionPlan
from chatpage_kernels.planner import Planner
from tests.kernels.steps import Heads, Step, make_step, make_tensors

BLOCK = 4
TILE = Tile(max_rows=8, kv_tokens=4, num_workers=6, split_tokens=8, item_cost=1, merge_cost=1)
HEADS = Heads(4, 2, 8)


def new_planner(window: int = 0) -> Planner:
    return Planner(block_size=BLOCK, num_q_heads=HEADS.num_q, num_kv_heads=HEADS.num_kv, window=window)


def ask(plans: Planner, step: Step, tile: Tile = TILE) -> AttentionPlan:
    return plans.plan(step.query_start_loc, step.seq_lens, step.block_tables, tile=tile)


def decode(lens: list[int], room: int, forks: dict[int, tuple[int, int]] | None = None) -> Step:
    """One row for each sequence, whose tables have blocks for `room` tokens more."""
    step = make_step([(length + room, 1) for length in lens], block_size=BLOCK, forks=forks)
    return replace(step, seq_lens=np.array(lens, np.int32))


def later(step: Step, num_tokens: int = 1) -> Step:
    return replace(step, seq_lens=(step.seq_lens + num_tokens).astype(np.int32))


def keys_seen(plan: AttentionPlan) -> dict[int, list[int]]:
    """The keys that each row reads, in order; a key that is read twice is there twice."""
    seen: dict[int, list[int]] = {row: [] for row in range(plan.num_tokens)}
    for start, count, _, lo, hi, full_lo, full_hi, _ in plan.items.tolist():
        assert lo // TILE.kv_tokens * TILE.kv_tokens <= full_lo <= full_hi <= hi
        for row in plan.row_index[start : start + count].tolist():
            seen[row] += range(lo, hi)
    return {row: sorted(keys) for row, keys in seen.items()}


@pytest.mark.parametrize("forks", [None, {1: (0, 5), 2: (0, 5), 3: (2, 6)}])
def test_a_plan_grows_with_its_sequences(forks: dict[int, tuple[int, int]] | None) -> None:
    step = decode([22, 25, 31, 40], 20, forks)
    plans = new_planner()
    first = ask(plans, step)
    for _ in range(15):
        step = later(step)
        plan = ask(plans, step)
        assert plan is first
        assert keys_seen(plan) == {row: list(range(length)) for row, length in enumerate(step.seq_lens.tolist())}
        assert plan.row_positions.tolist() == (step.seq_lens - 1).tolist()
        tensors = make_tensors(step, HEADS)
        outputs = [
            reference.paged_attention(tensors.query, tensors.key_cache, tensors.value_cache, p, scale=0.3)
            for p in (plan, ask(new_planner(), step))
        ]
        torch.testing.assert_close(outputs[0], outputs[1], rtol=1e-5, atol=1e-6)


def test_mask_free_ranges_grow_as_a_new_plan_has_them() -> None:
    """Kernels on a GPU read past the tile that has become whole without a mask: it must be as if planned anew."""
    step = decode([2], 20)
    plans = new_planner()
    ask(plans, step)
    for _ in range(8):
        step = later(step)
        assert ask(plans, step).items.tolist() == ask(new_planner(), step).items.tolist()


def test_new_blocks_at_the_ends_of_tables_do_not_end_a_plan() -> None:
    step = decode([7, 22], 20)
    plans = new_planner()
    first = ask(plans, step)
    tables = step.block_tables.copy()
    tables[0, 2] = 61  # the block of token 8, which comes next
    grown = ask(plans, replace(later(step), block_tables=tables))
    assert grown is first
    assert grown.block_tables.tolist() == tables.tolist()


def changed_block(step: Step) -> Step:
    tables = step.block_tables.copy()
    tables[1, 0] = tables.max() + 1
    return replace(later(step), block_tables=tables)


@pytest.mark.parametrize(
    "change",
    [
        lambda step: step,
        lambda step: later(step, 2),
        lambda step: replace(step, seq_lens=step.seq_lens + np.array([1, 0], np.int32)),
        changed_block,
        lambda step: replace(later(step), block_tables=np.pad(step.block_tables, ((0, 0), (0, 1)), constant_values=-1)),
        lambda step: replace(later(step), query_start_loc=np.array([0, 2, 3], np.int32)),
    ],
    ids=["same lengths", "two tokens", "one sequence only", "another block", "wider tables", "a longer query"],
)
def test_any_other_step_is_planned_anew(change: object) -> None:
    step = decode([20, 22], 8)
    plans = new_planner()
    first = ask(plans, step)
    assert callable(change)
    other = change(step)
    plan = ask(plans, other)
    assert plan is not first
    assert plan.items.tolist() == ask(new_planner(), other).items.tolist()


def test_another_tile_or_a_window_is_planned_anew() -> None:
    step = decode([20, 22], 8)
    plans = new_planner()
    first = ask(plans, step)
    assert ask(plans, later(step), replace(TILE, max_rows=4)) is not first
    windowed = new_planner(window=6)
    first = ask(windowed, step)
    plan = ask(windowed, later(step))
    assert plan is not first
    assert keys_seen(plan) == {0: list(range(15, 21)), 1: list(range(17, 23))}


def test_a_plan_does_not_grow_for_ever() -> None:
    """Its ranges were cut for other lengths: after a while they would be uneven."""
    step = decode([20], 200)
    plans = new_planner()
    seen = {id(plan): plan for plan in (ask(plans, later(step, i)) for i in range(150))}
    assert len(seen) == -(-150 // (planner._MAX_GROWTH + 1))


def test_a_planner_that_does_not_share_lets_every_row_read_all_its_keys_itself() -> None:
    step = decode([40, 40, 40], room=8, forks={1: (0, 32), 2: (0, 32)})
    apart = Planner(block_size=BLOCK, num_q_heads=HEADS.num_q, num_kv_heads=HEADS.num_kv, share=False)
    assert ask(new_planner(), step).items.numpy()[:, 1].max() == 3
    assert ask(apart, step).items.numpy()[:, 1].max() == 1
