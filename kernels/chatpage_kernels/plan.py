"""Turns the block tables of a step into attention work items, once a step, for all layers and all backends.

Invariant: for every query row, the KV ranges of the items that hold it cover each key the row sees exactly once. An item is a
rectangle, query rows x `[kv_lo, kv_hi)` of one block table, with a mask at its edges; decode, extend, prefill and
shared-prefix (cascade) attention are the same items with other rows.

Two forks of a 64-token prefix decode one token each, sequence 1 at position 70 and sequence 2 at position 65:

    keys         0                              64          71
    item 0       [ rows 1, 2 ------------------- )                   the shared run, read once (cascade)
    item 1                                      [ row 1 ---- )
    item 2                                      [ row 2 - )
    merge        row 1 = items 0 + 1, row 2 = items 0 + 2, by log-sum-exp

Inside an item, `[full_lo, full_hi)` is visible to all its rows, so a kernel needs masks only outside it:

    kv_lo   full_lo                full_hi   kv_hi
      |-masked-|------ no masks ------|-masked-|       full_lo and full_hi are multiples of the KV tile
"""

from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from chatpage_kernels.sharing import SharedRun, find_shared_runs

Split = Literal["balanced", "fixed", "none"]
IntArray = NDArray[np.integer]

ITEM_FIELDS = ("row_start", "num_rows", "table", "kv_lo", "kv_hi", "full_lo", "full_hi", "part")
_ROW_START, _NUM_ROWS, _TABLE, _LO, _HI, _MIN_POS, _MAX_POS = range(7)  # columns of a job
_ALIGN = 4  # int32 words: every array of a plan starts at a multiple of 16 bytes


@dataclass(frozen=True, slots=True)
class Tile:
    """The size of a backend's work items, and what they cost, measured in reads of one key by one item.

    Args:
        max_rows: Query rows x heads of a group that one item holds.
        kv_tokens: KV tile; the mask-free range of an item, splits and shared runs are aligned to it.
        num_workers: Programs (item x KV head) that should exist so that the machine is busy; balanced splits aim at it.
        split_tokens: Shortest KV range that balanced splits cut, and the length of a fixed split.
        item_cost: Cost of one more item.
        merge_cost: Cost of one more partial result of one row.
    """

    max_rows: int
    kv_tokens: int
    num_workers: int = 8
    split_tokens: int = 256
    item_cost: int = 16
    merge_cost: int = 4


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """The work items of one step; int32 tensors on the device of the kernels.

    Args:
        items: [num_items, 8]: row_start, num_rows, table, kv_lo, kv_hi, full_lo, full_hi, part, longest first. The rows of an
            item are `row_index[row_start : row_start + num_rows]`. `part` is -1 if the item's result is the final one of all
            its rows, else row k of the item writes the partial result `part + k`.
        num_items: [1], the number of items, for programs launched on a fixed grid.
        row_index: [>= num_tokens] query rows; the first num_tokens entries are 0, 1, 2, ...
        row_positions: [num_tokens] absolute position of each query row.
        block_tables: [num_seqs, max_blocks] block ids, a copy.
        merge_rows: [num_merges] query rows that are merged from partial results.
        merge_indptr: [num_merges + 1]; `merge_parts[merge_indptr[i] : merge_indptr[i + 1]]` belong to `merge_rows[i]`.
        merge_parts: [num_parts] partial results, of each row in the order of their keys.
        num_merges: [1], the number of merged rows, for programs launched on a fixed grid.
        num_parts: Number of partial results (each num_q_heads wide).
        window: Keys that a row sees, itself included; 0 means all.
        block_size: Tokens per block.
        group_size: Query heads per KV head.
        tile: The tile it was planned for.
        has_sinks: Every row is merged, so that the sinks can join.
    """

    items: torch.Tensor
    num_items: torch.Tensor
    row_index: torch.Tensor
    row_positions: torch.Tensor
    block_tables: torch.Tensor
    merge_rows: torch.Tensor
    merge_indptr: torch.Tensor
    merge_parts: torch.Tensor
    num_merges: torch.Tensor
    num_parts: int
    window: int
    block_size: int
    group_size: int
    tile: Tile
    has_sinks: bool

    @property
    def num_tokens(self) -> int:
        return self.row_positions.shape[0]


def plan_attention(
    query_start_loc: IntArray,
    seq_lens: IntArray,
    block_tables: IntArray,
    *,
    block_size: int,
    num_q_heads: int,
    num_kv_heads: int,
    tile: Tile,
    window: int = 0,
    share: bool = True,
    split: Split = "balanced",
    has_sinks: bool = False,
    device: str | torch.device = "cpu",
) -> AttentionPlan:
    """Plan the attention of one step.

    Query row j of sequence i has position `seq_lens[i] - q_len_i + j` and sees its own key and those before it, at most
    `window` of them if `window` is not 0.

    Args:
        query_start_loc: [num_seqs + 1] first query row of each sequence, from 0; a sequence without rows is skipped.
        seq_lens: [num_seqs] KV length after this step's tokens.
        block_tables: [num_seqs, max_blocks] block ids; what lies past a sequence's length is not read.
        block_size: Tokens per block.
        num_q_heads: Query heads, a multiple of num_kv_heads.
        num_kv_heads: KV heads.
        tile: The backend's item size and costs.
        window: Sliding window in tokens; 0 means none.
        share: Let one item serve all sequences that hold the same blocks, where that pays.
        split: "balanced" cuts long ranges so that all workers have something to do. "fixed" cuts at multiples of
            `tile.split_tokens` and shares whole pieces only, so a row's sums never depend on its batch mates. "none".
        has_sinks: Attention sinks will be given: every row is merged.
        device: Where the kernels run.

    Raises:
        ValueError: The arrays do not describe a step; the message has the numbers.
    """
    _check(query_start_loc, seq_lens, block_tables, block_size=block_size, heads=(num_q_heads, num_kv_heads), window=window)
    group_size = num_q_heads // num_kv_heads
    step = _Step(query_start_loc, seq_lens, max(1, tile.max_rows // group_size), window)
    piece = -(-tile.split_tokens // tile.kv_tokens) * tile.kv_tokens
    runs = _find_runs(step, block_tables, block_size, tile, piece if split == "fixed" else tile.kv_tokens) if share else []
    row_index, jobs = _make_jobs(step, runs)
    if split != "none":
        workers = tile.num_workers / num_kv_heads
        jobs = _split_fixed(jobs, piece) if split == "fixed" else _split_balanced(jobs, piece, tile.kv_tokens, workers)
    jobs = jobs[(jobs[:, _LO] - jobs[:, _HI]).argsort(kind="stable")]
    parts, num_parts, merges = _assign_parts(jobs, row_index, step.num_rows, merge_all=has_sinks)
    items = _items(jobs, parts, tile.kv_tokens, window)
    counts = (np.array([len(items)]), np.array([len(merges[0])]))
    arrays = _to_device([items, row_index, step.positions, block_tables, *merges, *counts], device)
    return AttentionPlan(
        items=arrays[0],
        row_index=arrays[1],
        row_positions=arrays[2],
        block_tables=arrays[3],
        merge_rows=arrays[4],
        merge_indptr=arrays[5],
        merge_parts=arrays[6],
        num_items=arrays[7],
        num_merges=arrays[8],
        num_parts=num_parts,
        window=window,
        block_size=block_size,
        group_size=group_size,
        tile=tile,
        has_sinks=has_sinks,
    )


class _Step:
    """The rows of a step: `lens`, `first_pos`, `row_start` per sequence, `positions` per row."""

    def __init__(self, query_start_loc: IntArray, seq_lens: IntArray, rows_per_item: int, window: int) -> None:
        self.lens: IntArray = query_start_loc[1:] - query_start_loc[:-1]
        self.row_start = query_start_loc[:-1]
        self.num_rows = int(query_start_loc[-1])
        self.first_pos = seq_lens - self.lens
        self.positions = np.repeat(self.first_pos - self.row_start, self.lens) + np.arange(self.num_rows)
        self.rows_per_item = rows_per_item
        self.window = window

    def num_items_of(self, num_rows: IntArray) -> IntArray:
        """Items that hold so many rows of one range."""
        return -(-num_rows // self.rows_per_item)


def _check(
    query_start_loc: IntArray,
    seq_lens: IntArray,
    block_tables: IntArray,
    *,
    block_size: int,
    heads: tuple[int, int],
    window: int,
) -> None:
    num_seqs = len(seq_lens)
    if query_start_loc.shape != (num_seqs + 1,) or block_tables.shape[:1] != (num_seqs,) or block_tables.ndim != 2:
        shapes = f"{query_start_loc.shape}, {seq_lens.shape} and {block_tables.shape}"
        raise ValueError(f"query_start_loc, seq_lens and block_tables do not belong together: their shapes are {shapes}")
    if heads[0] % heads[1] or window < 0:
        raise ValueError(f"{heads[0]} query heads are no multiple of {heads[1]} KV heads, or the window {window} is below 0")
    lens = query_start_loc[1:] - query_start_loc[:-1]
    wrong = (lens < 0) | (lens > seq_lens)
    if num_seqs and (query_start_loc[0] != 0 or wrong.any()):
        raise ValueError(f"query_start_loc must start at 0 and give no sequence more rows than its length {seq_lens[wrong]}")
    last_blocks = (seq_lens - 1) // block_size
    if num_seqs and last_blocks.max() >= block_tables.shape[1]:
        raise ValueError(f"a sequence of {seq_lens.max()} tokens needs {last_blocks.max() + 1} blocks; the tables have fewer")
    if num_seqs and ((block_tables[np.arange(num_seqs), last_blocks] < 0) & (lens > 0)).any():
        raise ValueError("a block table ends before its sequence does: it has a block id below 0")


def _find_runs(step: _Step, block_tables: IntArray, block_size: int, tile: Tile, align: int) -> list[SharedRun]:
    is_decode = step.num_rows == len(step.lens) and step.lens.max(initial=0) <= 1

    def is_worth_it(members: IntArray, lo: int, hi: int) -> bool:
        if is_decode:
            num_rows = apart = len(members)
        else:
            lens = step.lens[members]
            num_rows, apart = int(lens.sum()), int(step.num_items_of(lens).sum())
        together = -(-num_rows // step.rows_per_item)
        first_seen = max(lo, int(step.first_pos[members].min()) - step.window + 1) if step.window else lo
        # A declined run costs no item and no partial result: its keys become part of items that exist anyway.
        return (apart - together) * (hi - first_seen) > together * tile.item_cost + num_rows * tile.merge_cost

    num_visible = (step.first_pos + 1) * (step.lens > 0)
    return find_shared_runs(block_tables, num_visible, block_size=block_size, align=align, is_worth_it=is_worth_it)


def _make_jobs(step: _Step, runs: list[SharedRun]) -> tuple[IntArray, IntArray]:
    """Return (row_index, jobs): the items before splits, [n, 7], of the shared runs and of what each sequence has alone."""
    own_lo = np.zeros(len(step.lens), np.int64)
    for run in runs:
        own_lo[run.members] = run.hi
    own_rows, own_jobs = np.arange(step.num_rows), _own_jobs(step, own_lo)
    if not runs:
        return own_rows, own_jobs
    rows, shared_jobs = _shared_jobs(step, runs)
    return np.concatenate((own_rows, rows)), np.concatenate((shared_jobs, own_jobs))


def _own_jobs(step: _Step, own_lo: IntArray) -> IntArray:
    if step.lens.max(initial=0) <= step.rows_per_item:
        seq = step.lens.nonzero()[0]
        num_rows, first, row_start = step.lens[seq], step.first_pos[seq], step.row_start[seq]
    else:
        counts = step.num_items_of(step.lens)
        seq = np.repeat(np.arange(len(counts)), counts)
        skipped = _ranges(np.zeros_like(counts), counts) * step.rows_per_item
        num_rows = np.minimum(step.rows_per_item, step.lens[seq] - skipped)
        first, row_start = step.first_pos[seq] + skipped, step.row_start[seq] + skipped
    lo = np.maximum(own_lo[seq], first - step.window + 1) if step.window else own_lo[seq]
    return _table([row_start, num_rows, seq, lo, first + num_rows, first, first + num_rows - 1])[lo < first + num_rows]


def _shared_jobs(step: _Step, runs: list[SharedRun]) -> tuple[IntArray, IntArray]:
    """Return the rows of all shared runs, run after run, and their jobs; rows count on from those of the step."""
    lo, hi = np.array([run.lo for run in runs]), np.array([run.hi for run in runs])
    members = np.concatenate([run.members for run in runs])
    lens = step.lens[members]
    rows = _ranges(step.row_start[members], lens)
    run_of_row = np.repeat(np.repeat(np.arange(len(runs)), [len(run.members) for run in runs]), lens)
    if step.window:
        is_in_sight = step.positions[rows] - step.window + 1 < hi[run_of_row]
        rows, run_of_row = rows[is_in_sight], run_of_row[is_in_sight]
    num_rows = np.bincount(run_of_row, minlength=len(runs))
    num_cuts = step.num_items_of(num_rows)
    run = np.repeat(np.arange(len(runs)), num_cuts)
    skipped = _ranges(np.zeros_like(num_cuts), num_cuts) * step.rows_per_item
    first = (num_rows.cumsum() - num_rows)[run] + skipped
    jobs = np.empty((len(run), 7), np.int64)
    if len(run):
        positions = step.positions[rows]
        jobs[:, _ROW_START] = step.num_rows + first
        jobs[:, _NUM_ROWS] = np.minimum(step.rows_per_item, num_rows[run] - skipped)
        jobs[:, _TABLE] = np.array([run.members[0] for run in runs])[run]
        jobs[:, _MIN_POS] = np.minimum.reduceat(positions, first)
        jobs[:, _MAX_POS] = np.maximum.reduceat(positions, first)
        jobs[:, _LO] = np.maximum(lo[run], jobs[:, _MIN_POS] - step.window + 1) if step.window else lo[run]
        jobs[:, _HI] = hi[run]
    return rows, jobs


def _split_balanced(jobs: IntArray, min_tokens: int, kv_tokens: int, workers: float) -> IntArray:
    """Cut ranges that are long for the step into pieces of equal length."""
    lengths = jobs[:, _HI] - jobs[:, _LO]
    target = max(min_tokens, int(lengths.sum() / workers))
    if not len(jobs) or lengths.max() * 4 <= target * 5:
        return jobs
    num = np.where(lengths * 4 > target * 5, -(-lengths // target), 1)
    base = jobs[:, _LO] // kv_tokens * kv_tokens
    return _cut(jobs, base, -(-(jobs[:, _HI] - base) // (num * kv_tokens)) * kv_tokens)


def _split_fixed(jobs: IntArray, piece: int) -> IntArray:
    """Cut at the multiples of `piece`, wherever a range starts."""
    return _cut(jobs, jobs[:, _LO] // piece * piece, np.full(len(jobs), piece))


def _cut(jobs: IntArray, base: IntArray, piece: IntArray) -> IntArray:
    num = -(-(jobs[:, _HI] - base) // piece)
    cut = np.repeat(jobs, num, 0)
    start = np.repeat(base, num) + _ranges(np.zeros_like(num), num) * np.repeat(piece, num)
    cut[:, _LO] = np.maximum(cut[:, _LO], start)
    cut[:, _HI] = np.minimum(cut[:, _HI], start + np.repeat(piece, num))
    return cut


def _assign_parts(
    jobs: IntArray, row_index: IntArray, num_rows: int, *, merge_all: bool
) -> tuple[IntArray, int, tuple[IntArray, IntArray, IntArray]]:
    """Return (part of each job, number of parts, (merge_rows, merge_indptr, merge_parts)); parts count in job order."""
    rows = row_index[_ranges(jobs[:, _ROW_START], jobs[:, _NUM_ROWS])]
    uses = np.bincount(rows, minlength=num_rows)
    is_partial = np.full(len(jobs), merge_all)
    if not merge_all and uses.max(initial=0) > 1:
        starts = jobs[:, _NUM_ROWS].cumsum() - jobs[:, _NUM_ROWS]
        is_partial = np.maximum.reduceat(uses[rows], starts) > 1
    if not is_partial.any():
        empty = np.empty(0, np.int64)
        return np.full(len(jobs), -1), 0, (empty, np.zeros(1, np.int64), empty)
    widths = np.where(is_partial, jobs[:, _NUM_ROWS], 0)
    parts = np.where(is_partial, widths.cumsum() - widths, -1)
    partial_rows = rows[np.repeat(is_partial, jobs[:, _NUM_ROWS])]
    # Of each row in the order of its keys, so that a merge adds in the same order whoever shares the step.
    merge_parts = np.lexsort((np.repeat(jobs[:, _LO], widths), partial_rows))
    num_uses = np.bincount(partial_rows, minlength=num_rows)
    merge_rows = num_uses.nonzero()[0]
    indptr = np.concatenate(([0], num_uses[merge_rows].cumsum()))
    return parts, len(partial_rows), (merge_rows, indptr, merge_parts)


def _items(jobs: IntArray, parts: IntArray, kv_tokens: int, window: int) -> IntArray:
    lo, hi = jobs[:, _LO], jobs[:, _HI]
    all_see_from = np.maximum(lo, jobs[:, _MAX_POS] - window + 1) if window else lo
    full_lo = -(-all_see_from // kv_tokens) * kv_tokens
    full_hi = np.minimum(hi, jobs[:, _MIN_POS] + 1) // kv_tokens * kv_tokens
    is_empty = full_hi <= full_lo
    # An empty range sits at the first tile: then all tiles are masked ones behind it.
    full_lo = np.where(is_empty, lo // kv_tokens * kv_tokens, full_lo)
    full_hi = np.where(is_empty, full_lo, full_hi)
    return _table([*jobs.T[: _HI + 1], full_lo, full_hi, parts])


def _table(columns: list[IntArray]) -> IntArray:
    return np.array(columns, np.int64).T


def _ranges(starts: IntArray, lens: IntArray) -> IntArray:
    """Concatenate `arange(start, start + len)` of each pair."""
    ends: IntArray = np.add.accumulate(lens)
    total = int(ends[-1]) if len(ends) else 0
    return np.repeat(starts - (ends - lens), lens) + np.arange(total)


def _to_device(arrays: list[IntArray], device: str | torch.device) -> list[torch.Tensor]:
    """Copy arrays into one int32 buffer, so that a GPU gets them in one transfer."""
    starts = [0, *accumulate(-(-array.size // _ALIGN) * _ALIGN for array in arrays)]
    words = np.empty(starts[-1], np.int32)
    views = []
    for array, start in zip(arrays, starts, strict=False):
        view = words[start : start + array.size].reshape(array.shape)
        view[...] = array
        views.append(view)
    if torch.device(device).type == "cpu":
        return [torch.from_numpy(view) for view in views]
    buffer = torch.from_numpy(words).pin_memory().to(device, non_blocking=True)
    return [buffer[start : start + a.size].view(a.shape) for a, start in zip(arrays, starts, strict=False)]
