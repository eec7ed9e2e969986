"""Finds the runs of blocks that several sequences of one step hold in common, over any tree of forks.

Invariant: a shared run `[lo, hi)` lies in blocks that all its members' tables name at the same places, and each of its keys
is visible (causally) to every query row of every member. It is derived from the block ids of this step alone: ref counts
also count holders that do not run now.

Sorted by their block ids, sequences that begin alike stand side by side, so the tree of forks is the tree of intervals of
equal prefixes (the "LCP intervals" of a suffix array). With a block size of 16:

    sequence   blocks        |--- shared by 0 1 2 3 ---|- by 0 1 -|
    0          4 9 2 7 | ..   4 9 [0, 32)               2 7 [32, 64)
    1          4 9 2 7 | ..
    2          4 9 5   | ..                            |- by 2 3 -|
    3          4 9 5   | ..                             5 [32, 48)
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.integer]


@dataclass(frozen=True, slots=True)
class SharedRun:
    """The keys `[lo, hi)` that the sequences `members` hold in the same blocks."""

    members: IntArray
    lo: int
    hi: int


@dataclass(slots=True)
class _Fork:
    """An interval of the sorted order whose tables agree in their first `num_blocks` blocks."""

    num_blocks: int
    first: int
    end: int
    children: list["_Fork"]


def find_shared_runs(
    block_tables: IntArray,
    num_visible: IntArray,
    *,
    block_size: int,
    align: int,
    is_worth_it: Callable[[IntArray, int, int], bool],
) -> list[SharedRun]:
    """List the shared runs of a step, outer forks before the forks inside them.

    Args:
        block_tables: [num_seqs, max_blocks] block ids.
        num_visible: [num_seqs] keys that every query row of the sequence sees; 0 leaves the sequence out.
        block_size: Tokens per block.
        align: Runs end at multiples of this many tokens.
        is_worth_it: Called with (members, lo, hi); a run it declines is left to the forks inside it, which then start at lo.
    """
    num_blocks = num_visible // block_size
    candidates = num_blocks.nonzero()[0]
    if len(candidates) < 2 or len(set(block_tables[candidates, 0].tolist())) == len(candidates):
        return []
    lengths = num_blocks[candidates]
    tables = block_tables[:, : lengths.max()].take(candidates, 0)
    # Cut to its visible blocks, with an end that is no block id, a table stands among those that begin alike and parts none.
    tables[np.arange(tables.shape[1]) >= lengths[:, None]] = -1
    by_bytes = tables.view(np.dtype((np.void, tables.shape[1] * tables.itemsize)))[:, 0].argsort(kind="stable")
    order = candidates[by_bytes]
    common = _common_blocks(tables.take(by_bytes, 0), lengths[by_bytes])
    runs: list[SharedRun] = []
    pending = [(fork, 0) for fork in _forks(common.tolist())]
    for fork, lo in pending:  # grows while it is walked: breadth first, so outer forks come first
        hi = fork.num_blocks * block_size // align * align
        members = np.sort(order[fork.first : fork.end])
        shared = hi > lo and is_worth_it(members, lo, hi)
        if shared:
            runs.append(SharedRun(members, lo, hi))
        pending += [(child, hi if shared else lo) for child in fork.children]
    # Neither order may depend on the numbers of the blocks, or a shuffled pool would change the last bits of a result.
    return sorted(runs, key=lambda run: (run.lo, int(run.members[0])))


def _common_blocks(tables: IntArray, lengths: IntArray) -> IntArray:
    """Count the leading blocks that each sorted table has in common with the one before it; [num_seqs - 1]."""
    differs = np.ones((len(tables) - 1, tables.shape[1] + 1), bool)  # equal tables differ behind their ends
    np.not_equal(tables[1:], tables[:-1], out=differs[:, :-1])
    common: IntArray = np.minimum(differs.argmax(1), np.minimum(lengths[1:], lengths[:-1]))
    return common


def _forks(common: list[int]) -> Iterator[_Fork]:
    """Yield the outermost forks of the sorted order, with their forks inside; `common` is as from `_common_blocks`."""
    open_forks: list[_Fork] = []
    for at, num_blocks in enumerate([*common, 0]):
        first, last_closed = at, None
        while open_forks and open_forks[-1].num_blocks > num_blocks:
            closed = open_forks.pop()
            closed.end = at + 1
            first = closed.first
            if open_forks and open_forks[-1].num_blocks >= num_blocks:
                open_forks[-1].children.append(closed)
            elif num_blocks > 0:
                last_closed = closed  # becomes a child of the fork opened below
            else:
                yield closed
        if num_blocks > 0 and (not open_forks or open_forks[-1].num_blocks < num_blocks):
            open_forks.append(_Fork(num_blocks, first, 0, [last_closed] if last_closed else []))
