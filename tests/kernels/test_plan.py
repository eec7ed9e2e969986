"""A plan gives every query row each key it sees exactly once, and its cuts never depend on who else is in the step."""

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch

from chatpage_kernels import AttentionPlan, Tile, plan_attention
from chatpage_kernels.plan import Split
from tests.kernels.steps import Step, make_step, random_step

TILE = Tile(max_rows=16, kv_tokens=16, num_workers=16, split_tokens=64, item_cost=16, merge_cost=1)
EAGER = Tile(max_rows=16, kv_tokens=4, num_workers=64, split_tokens=8, item_cost=0, merge_cost=0)


def _plan(step: Step, tile: Tile = TILE, **options: Any) -> AttentionPlan:
    tables = (step.query_start_loc, step.seq_lens, step.block_tables)
    return plan_attention(*tables, block_size=step.block_size, num_q_heads=6, num_kv_heads=2, tile=tile, **options)


def _items_of_rows(plan: AttentionPlan) -> dict[int, list[list[int]]]:
    items: dict[int, list[list[int]]] = {}
    for item in plan.items.tolist():
        for row in plan.row_index[item[0] : item[0] + item[1]].tolist():
            items.setdefault(row, []).append(item)
    return items


def _ranges(plan: AttentionPlan) -> list[tuple[list[int], int, int]]:
    return [(plan.row_index[start : start + num].tolist(), lo, hi) for start, num, _, lo, hi, *_ in plan.items.tolist()]


def _assert_covers(step: Step, plan: AttentionPlan, window: int) -> None:
    """Every key that a row sees comes from exactly one of its items, through a table that has the row's own block there."""
    items = _items_of_rows(plan)
    for seq, length in enumerate(step.seq_lens.tolist()):
        first, end = step.query_start_loc[seq : seq + 2].tolist()
        for row in range(first, end):
            position = length - end + row
            assert plan.row_positions[row] == position
            seen = Counter[int]()
            for _, _, table, lo, hi, full_lo, full_hi, _ in items[row]:
                visible = range(max(lo, position - window + 1 if window else 0), min(hi, position + 1))
                seen.update(visible)
                blocks = {key // step.block_size for key in visible}
                assert all(step.block_tables[table, block] == step.block_tables[seq, block] for block in blocks)
                assert full_lo >= full_hi or (full_lo >= max(lo, visible.start) and full_hi <= visible.stop)
            assert seen == Counter(range(max(0, position - window + 1) if window else 0, position + 1))


def _assert_merges(plan: AttentionPlan) -> None:
    """Partial results are written once and merged once, in the order of their keys; other rows are written directly."""
    writer: dict[int, tuple[list[int], int]] = {}
    for item in plan.items.tolist():
        rows = plan.row_index[item[0] : item[0] + item[1]].tolist() if item[7] >= 0 else []
        assert not writer.keys() & range(item[7], item[7] + len(rows))
        writer |= {item[7] + k: (item, row) for k, row in enumerate(rows)}
    assert sorted(writer) == sorted(plan.merge_parts.tolist()) == list(range(plan.num_parts))
    assert plan.num_merges.tolist() == [len(plan.merge_rows)]
    indptr = plan.merge_indptr.tolist()
    for row, first, end in zip(plan.merge_rows.tolist(), indptr[:-1], indptr[1:], strict=True):
        parts = [writer[part] for part in plan.merge_parts[first:end].tolist()]
        assert {owner for _, owner in parts} == {row}
        assert [item[3] for item, _ in parts] == sorted(item[3] for item, _ in parts)
    direct = [row for row, items in _items_of_rows(plan).items() if any(item[7] < 0 for item in items)]
    assert all(len(_items_of_rows(plan)[row]) == 1 for row in direct)
    assert sorted(direct + plan.merge_rows.tolist()) == list(range(plan.num_tokens))


@pytest.mark.parametrize("split", ["balanced", "fixed", "none"])
@pytest.mark.parametrize("window", [0, 13])
@pytest.mark.parametrize("seed", range(40))
def test_every_row_gets_each_key_it_sees_once(seed: int, window: int, split: Split) -> None:
    rng = np.random.default_rng(seed)
    step = random_step(rng, block_size=int(rng.choice([1, 4, 16])), max_seqs=6, max_blocks=6)
    plan = _plan(step, EAGER if seed % 2 else TILE, window=window, split=split, has_sinks=seed % 5 == 0)
    _assert_covers(step, plan, window)
    _assert_merges(plan)
    lengths = [hi - lo for _, lo, hi in _ranges(plan)]
    assert plan.num_items.tolist() == [len(lengths)]
    assert lengths == sorted(lengths, reverse=True), "long items go first, or they end last"
    full = plan.items[:, 5:7]
    assert not (full % plan.tile.kv_tokens).any()
    assert (
        (plan.items[:, 1] * plan.group_size).max(-1).values <= max(plan.tile.max_rows, plan.group_size) if len(full) else True
    )


def test_samples_of_one_prompt_read_it_once() -> None:
    step = make_step([(1500 + i, 1) for i in range(4)], block_size=16, forks=dict.fromkeys((1, 2, 3), (0, 93)))
    ranges = _ranges(_plan(step, split="none"))
    assert sorted(ranges[0][0]) == [0, 1, 2, 3]
    assert ranges[0][1:] == (0, 1488)
    assert sorted(ranges[1:]) == [([i], 1488, 1500 + i) for i in range(4)]


def test_forks_of_forks_share_at_each_level() -> None:
    """Eight samples: all have 512 tokens in common, and two halves of four have 256 more."""
    forks = {i: (0, 48 if i < 4 else 32) for i in range(1, 5)} | dict.fromkeys((5, 6, 7), (4, 48))
    forks |= dict.fromkeys((1, 2, 3), (0, 48))
    step = make_step([(800, 1)] * 8, block_size=16, forks=forks)
    shared = sorted(
        (lo, hi, sorted(rows)) for rows, lo, hi in _ranges(_plan(step, Tile(64, 16), split="none")) if len(rows) > 1
    )
    assert shared == [(0, 512, list(range(8))), (512, 768, [0, 1, 2, 3]), (512, 768, [4, 5, 6, 7])]


def test_a_short_shared_run_is_not_worth_an_item() -> None:
    step = make_step([(40, 1), (40, 1)], block_size=16, forks={1: (0, 1)})
    assert sorted(_ranges(_plan(step))) == [([0], 0, 40), ([1], 0, 40)]


def test_sharing_can_be_switched_off() -> None:
    step = make_step([(1500, 1), (1500, 1)], block_size=16, forks={1: (0, 90)})
    assert all(len(rows) == 1 for rows, _, _ in _ranges(_plan(step, share=False)))


def test_a_holder_without_rows_in_this_step_makes_no_sharing() -> None:
    """A finished reply still held the blocks: a planner that looked at ref counts shared them with one row, or with nobody."""
    step = make_step([(600, 1), (600, 0), (600, 0)], block_size=16, forks={1: (0, 30), 2: (0, 30)})
    assert _ranges(_plan(step, split="none")) == [([0], 0, 600)]


def test_a_prompt_computed_in_this_step_is_shared_by_those_that_wait_for_it() -> None:
    """Sequence 0 computes the tokens [0, 256) that the others, one block further each, read in the same step."""
    step = make_step([(256, 256), (272, 16), (272, 16)], block_size=16, forks={1: (0, 16), 2: (0, 16)})
    plan = _plan(step, Tile(1024, 16), split="none")
    assert (list(range(256, 288)), 0, 256) in [(sorted(rows), lo, hi) for rows, lo, hi in _ranges(plan)]
    _assert_covers(step, plan, 0)


def test_a_run_wholly_outside_the_window_is_not_read() -> None:
    """Sliding-window models met short shared prefixes: a row past them must neither read them nor lose its own keys."""
    step = make_step([(400, 1), (100, 1), (100, 1)], block_size=16, forks={1: (0, 4), 2: (0, 4)})
    plan = _plan(step, EAGER, window=50, split="none")
    assert all(rows != [0] or lo >= 350 for rows, lo, _ in _ranges(plan))
    _assert_covers(step, plan, 50)


def test_a_long_context_is_cut_so_that_all_workers_have_work() -> None:
    ranges = _ranges(_plan(make_step([(4096, 1)], block_size=16)))
    assert len(ranges) == 8
    assert {hi - lo for _, lo, hi in ranges} == {512}


@pytest.mark.parametrize("seed", range(20))
def test_fixed_splits_do_not_depend_on_batch_mates(seed: int) -> None:
    """A reply must not change with its neighbours: the same pieces in the same order, shared or not."""
    step = random_step(np.random.default_rng(seed), block_size=8, max_seqs=6, max_blocks=12)
    together = _items_of_rows(_plan(step, EAGER, split="fixed"))
    for seq in np.flatnonzero(np.diff(step.query_start_loc)):
        first, end = step.query_start_loc[seq : seq + 2].tolist()
        rows = np.array([0, end - first], np.int32)
        alone = Step(rows, step.seq_lens[seq : seq + 1], step.block_tables[seq : seq + 1], step.block_size)
        for row, items in _items_of_rows(_plan(alone, EAGER, split="fixed")).items():
            position = int(step.seq_lens[seq]) - (end - first) + row
            cuts = [sorted((item[3], min(item[4], position + 1)) for item in each) for each in (items, together[first + row])]
            assert cuts[0] == cuts[1]


def test_an_empty_step_has_no_items() -> None:
    step = make_step([(40, 0), (8, 0)], block_size=16)
    plan = _plan(step)
    assert (plan.num_tokens, len(plan.items), plan.num_parts, plan.merge_indptr.tolist()) == (0, 0, 0, [0])


def test_a_plan_keeps_its_own_copy_of_the_tables() -> None:
    """The engine reuses its arrays for the next step while this one may still run on a GPU."""
    step = make_step([(40, 1)], block_size=16)
    plan = _plan(step)
    before = plan.block_tables.clone()
    step.block_tables[:] = 99
    assert torch.equal(plan.block_tables, before)


def test_every_array_starts_at_a_multiple_of_16_bytes() -> None:
    """Triton compiles again for arguments that are not."""
    plan = _plan(make_step([(601, 1), (333, 3), (77, 5)], block_size=16))
    tensors = [getattr(plan, name) for name in plan.__slots__ if isinstance(getattr(plan, name), torch.Tensor)]
    assert len(tensors) == 9
    assert all(tensor.dtype == torch.int32 and tensor.data_ptr() % 16 == 0 for tensor in tensors)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seq_lens": np.array([2, 30], np.int32)}, "more rows than its length"),
        ({"seq_lens": np.array([40], np.int32)}, "do not belong together"),
        ({"seq_lens": np.array([40, 400], np.int32)}, "needs 25 blocks"),
        ({"block_tables": np.array([[0, 1, 2], [3, -1, -1]], np.int32)}, "ends before its sequence"),
        ({"num_q_heads": 5}, "no multiple"),
        ({"window": -1}, "below 0"),
    ],
)
def test_arrays_that_describe_no_step_are_refused(change: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {
        "query_start_loc": np.array([0, 3, 4], np.int32),
        "seq_lens": np.array([40, 30], np.int32),
        "block_tables": np.array([[0, 1, 2], [3, 4, -1]], np.int32),
        "block_size": 16,
        "num_q_heads": 6,
        "num_kv_heads": 2,
        "tile": TILE,
    }
    with pytest.raises(ValueError, match=message):
        plan_attention(**arguments | change)
