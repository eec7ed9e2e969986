"""Sharing finds every run of blocks that sequences of a step hold in common, and nothing else."""

import numpy as np
import pytest
from numpy.typing import NDArray

from chatpage_kernels.sharing import IntArray, find_shared_runs


def _find(
    tables: list[list[int]], visible: list[int], *, block_size: int = 1, align: int = 1
) -> set[tuple[tuple[int, ...], int, int]]:
    width = max(map(len, tables))
    padded = np.array([[*table, *[-1] * (width - len(table))] for table in tables], np.int32)
    return _as_set(padded, np.array(visible), block_size=block_size, align=align)


def _as_set(tables: IntArray, visible: IntArray, *, block_size: int, align: int) -> set[tuple[tuple[int, ...], int, int]]:
    runs = find_shared_runs(tables, visible, block_size=block_size, align=align, is_worth_it=lambda *_: True)
    return {(tuple(sorted(run.members.tolist())), run.lo, run.hi) for run in runs}


def _by_hand(tables: NDArray[np.int32], visible: NDArray[np.int64]) -> set[tuple[tuple[int, ...], int, int]]:
    """Walk the forks block by block, as the definition says."""
    runs = set()
    open_runs = [(tuple(np.flatnonzero(visible > 0).tolist()), 0)]
    while open_runs:
        members, start = open_runs.pop()
        by_block: dict[int, list[int]] = {}
        for i in members:
            by_block.setdefault(int(tables[i, start]), []).append(i)
        for group in by_block.values():
            end = start + 1
            while len(group) > 1 and all(visible[i] > end for i in group) and len({int(tables[i, end]) for i in group}) == 1:
                end += 1
            if len(group) > 1:
                runs.add((tuple(group), start, end))
                rest = tuple(i for i in group if visible[i] > end)
                open_runs.append((rest, end))
    return runs


def test_nested_forks_are_runs_inside_runs() -> None:
    tables = [[4, 9, 2, 7], [4, 9, 2, 7], [4, 9, 5, 1], [4, 9, 5, 8]]
    assert _find(tables, [64] * 4, block_size=16) == {((0, 1, 2, 3), 0, 32), ((0, 1), 32, 64), ((2, 3), 32, 48)}


def test_a_sequence_that_sees_little_does_not_part_those_that_see_more() -> None:
    """Four equal prompts come together: one computes its second block in this step, three have moved on past it."""
    tables = [[3, 1, 2], [3, 1, 2], [3, 1, 2], [3, 1, 2]]
    assert _find(tables, [2, 1, 3, 3]) == {((0, 1, 2, 3), 0, 1), ((0, 2, 3), 1, 2), ((2, 3), 2, 3)}


def test_equal_blocks_at_other_places_are_not_shared() -> None:
    assert _find([[1, 2, 3], [4, 2, 3]], [3, 3]) == set()


def test_a_sequence_without_visible_keys_is_left_out() -> None:
    assert _find([[1, 2], [1, 2]], [2, 0]) == set()


def test_runs_end_at_multiples_of_the_alignment() -> None:
    assert _find([[1, 2, 3, 4], [1, 2, 3, 5]], [64, 64], block_size=16, align=32) == {((0, 1), 0, 32)}


def test_a_declined_run_is_left_to_the_forks_inside_it() -> None:
    tables = np.array([[1, 2], [1, 2], [1, 3]], np.int32)
    runs = find_shared_runs(tables, np.full(3, 2), block_size=1, align=1, is_worth_it=lambda members, *_: len(members) == 2)
    assert [(sorted(run.members.tolist()), run.lo, run.hi) for run in runs] == [([0, 1], 0, 2)]


@pytest.mark.parametrize("seed", range(200))
def test_runs_equal_a_walk_by_hand(seed: int) -> None:
    rng = np.random.default_rng(seed)
    tables = rng.integers(0, 2, (rng.integers(1, 9), 6)).astype(np.int32)
    visible = rng.integers(0, 7, len(tables))
    assert _as_set(tables, visible, block_size=1, align=1) == _by_hand(tables, visible)
