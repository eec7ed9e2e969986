"""Plans step after step: where every sequence has grown by one token since the last step, so has the plan.

Invariant: a plan that grew covers what a new one would; only where ranges are cut, and what is shared, is that of the step it
was made for. So it is made anew now and then, and whenever anything but the lengths changes.

    items of a plan     [ rows 1, 2 -------- )              the tail of a row is the item that ends at its own key:
                                    [ row 1 --- )  tail     only those become longer from step to step
                                    [ row 2 - )    tail
"""

from dataclasses import dataclass

import numpy as np
import torch

from chatpage_kernels.plan import AttentionPlan, IntArray, Tile, plan_attention

_MAX_GROWTH = 64  # tokens: the shortest range that is worth a cut of its own is four times as long
_ROW_START, _NUM_ROWS, _LO, _HI, _FULL_LO, _FULL_HI = 0, 1, 3, 4, 5, 6  # columns of an item


@dataclass(slots=True)
class _Growing:
    """A plan, and the step it stands at."""

    plan: AttentionPlan
    tails: IntArray  # items that end at the key of their only row
    seq_lens: IntArray
    block_tables: IntArray
    tile: Tile
    num_grown: int = 0


class Planner:
    """Plans the steps of one kind of layer; a plan is valid until the next one is asked for.

    Args:
        block_size: As for `plan_attention`, like the others.
        num_q_heads: Query heads.
        num_kv_heads: KV heads.
        window: Sliding window; plans with one do not grow.
        has_sinks: Attention sinks will be given.
        share: Let one item serve all sequences that hold the same blocks, where that pays.
        device: Where the kernels run; plans grow in host memory only.
    """

    def __init__(
        self,
        *,
        block_size: int,
        num_q_heads: int,
        num_kv_heads: int,
        window: int = 0,
        has_sinks: bool = False,
        share: bool = True,
        device: str | torch.device = "cpu",
    ) -> None:
        self._block_size = block_size
        self._heads = (num_q_heads, num_kv_heads)
        self._window = window
        self._has_sinks = has_sinks
        self._share = share
        self._device = torch.device(device)
        self._last: _Growing | None = None

    def plan(self, query_start_loc: IntArray, seq_lens: IntArray, block_tables: IntArray, *, tile: Tile) -> AttentionPlan:
        """Return the plan of a step, the same object as the last one if it could grow; see `plan_attention`."""
        last = self._last
        if last is not None and last.tile is tile and self._has_grown(last, query_start_loc, seq_lens, block_tables):
            self._grow(last, seq_lens, block_tables)
            return last.plan
        plan = plan_attention(
            query_start_loc,
            seq_lens,
            block_tables,
            block_size=self._block_size,
            num_q_heads=self._heads[0],
            num_kv_heads=self._heads[1],
            tile=tile,
            window=self._window,
            share=self._share,
            has_sinks=self._has_sinks,
            device=self._device,
        )
        can_grow = self._device.type == "cpu" and not self._window and len(seq_lens) == int(query_start_loc[-1])
        tails = _tails(plan) if can_grow else None
        self._last = None if tails is None else _Growing(plan, tails, seq_lens.copy(), block_tables.copy(), tile)
        return plan

    def _has_grown(self, last: _Growing, query_start_loc: IntArray, seq_lens: IntArray, block_tables: IntArray) -> bool:
        """Whether this is the last step again, one token later in every sequence, on the same blocks and perhaps new ones."""
        return (
            last.num_grown < _MAX_GROWTH
            and block_tables.shape == last.block_tables.shape
            and int(query_start_loc[-1]) == len(seq_lens)
            and np.array_equal(seq_lens, last.seq_lens + 1)
            and self._are_same_blocks(last, block_tables)
        )

    def _are_same_blocks(self, last: _Growing, block_tables: IntArray) -> bool:
        differs = block_tables != last.block_tables
        if not differs.any():
            return True
        is_filled = np.arange(block_tables.shape[1]) * self._block_size < last.seq_lens[:, None]
        return not (differs & is_filled).any()

    def _grow(self, last: _Growing, seq_lens: IntArray, block_tables: IntArray) -> None:
        if not np.array_equal(block_tables, last.block_tables):
            last.plan.block_tables.numpy()[:] = block_tables
            last.block_tables = block_tables.copy()
        last.seq_lens = seq_lens.copy()
        last.num_grown += 1
        last.plan.row_positions.numpy()[:] += 1
        items, tokens = last.plan.items.numpy(), last.plan.tile.kv_tokens
        tails = items[last.tails]
        lo, hi = tails[:, _LO], tails[:, _HI] + 1
        # What the row sees, as `plan_attention` has it: whole tiles, or nothing at the first one.
        first, end = -(-lo // tokens) * tokens, hi // tokens * tokens
        is_empty = end <= first
        tails[:, _HI] = hi
        tails[:, _FULL_LO] = np.where(is_empty, lo // tokens * tokens, first)
        tails[:, _FULL_HI] = np.where(is_empty, tails[:, _FULL_LO], end)
        items[last.tails] = tails


def _tails(plan: AttentionPlan) -> IntArray | None:
    """Return the items that end at the key of their only row; None if a row has no such item."""
    items = plan.items.numpy()
    rows = plan.row_index.numpy()[items[:, _ROW_START]]
    is_tail = (items[:, _NUM_ROWS] == 1) & (items[:, _HI] == plan.row_positions.numpy()[rows] + 1)
    tails: IntArray = is_tail.nonzero()[0]
    return tails if len(tails) == plan.num_tokens else None
