"""Paged attention and the cache writes in plain torch: the oracle of the other backends, and the fallback without them.

Invariant: it reads exactly the keys and values that the plan's items name, `[kv_lo, kv_hi)` of each, so rows that were never
written (freed, trimmed, unfilled) cannot reach a result, whatever they hold. Sums are in fp32 (fp64 for fp64 queries).

Items of the same number of rows and like length are computed together: shorter ones are padded with their own last key, masked.
"""

from collections.abc import Iterator, Sequence

import torch

from chatpage_kernels.checks import FLOAT8, check_attention, check_copies, check_write
from chatpage_kernels.plan import AttentionPlan, Tile

# One item should be a large matrix product: a group of them costs some twenty calls of torch.
TILE = Tile(max_rows=1024, kv_tokens=1, num_workers=1, split_tokens=4096, item_cost=400, merge_cost=8)

_MAX_SCORES = 1 << 23  # computed at once: 32 MiB of fp32
_Item = list[int]  # in the order of plan.ITEM_FIELDS
_NUM_ROWS, _LO, _HI, _FULL_LO, _FULL_HI, _PART = 1, 3, 4, 5, 6, 7


def paged_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    plan: AttentionPlan,
    *,
    scale: float,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend from every query row to the keys its plan gives it.

    Args:
        query: [num_tokens, num_q_heads, head_dim] floating point.
        key_cache: [num_blocks, block_size, num_kv_heads, head_dim] of query's dtype, or an 8-bit float.
        value_cache: [num_blocks, block_size, num_kv_heads, value_dim], likewise.
        plan: From `plan_attention`, on query's device.
        scale: Factor of the scores.
        softcap: If not 0, scores become `softcap * tanh(score / softcap)`.
        sinks: [num_q_heads] logits that join each softmax and attend to nothing; the plan must have been told.
        k_scale: [num_kv_heads] factor of what the key cache holds.
        v_scale: [num_kv_heads] factor of what the value cache holds.

    Returns:
        [num_tokens, num_q_heads, value_dim] in query's dtype.

    Raises:
        ValueError: Shapes, dtypes, devices or the plan do not fit together.
    """
    check_attention(query, key_cache, value_cache, plan, sinks=sinks, k_scale=k_scale, v_scale=v_scale)
    exact = torch.promote_types(query.dtype, torch.float32)
    num_heads, value_dim = query.shape[1], value_cache.shape[3]
    out = query.new_empty(query.shape[0], num_heads, value_dim)
    parts = query.new_empty(plan.num_parts, num_heads, value_dim, dtype=exact)
    part_lse = query.new_empty(plan.num_parts, num_heads, dtype=exact)
    factor = scale if k_scale is None else (k_scale.to(exact) * scale)[:, None, None]
    for group in _groups(plan.items.tolist(), num_heads):
        batch = _Batch(group, plan)
        output, lse = _attend(batch, query, key_cache, value_cache, factor=factor, softcap=softcap)
        if v_scale is not None:
            output *= v_scale.to(exact).repeat_interleave(plan.group_size)[:, None]
        if group[0][-1] < 0:
            out[batch.rows] = output.to(out.dtype)
        else:
            parts[batch.parts], part_lse[batch.parts] = output, lse
    if plan.num_parts:
        out[plan.merge_rows] = _merge(parts, part_lse, plan, sinks).to(out.dtype)
    return out


def write_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """Write one row of keys and values per token into its slot.

    Args:
        key: [num_tokens, num_kv_heads, head_dim]; for an 8-bit cache already divided by its scale. Too large values saturate.
        value: [num_tokens, num_kv_heads, value_dim], likewise.
        key_cache: [num_blocks, block_size, num_kv_heads, head_dim].
        value_cache: [num_blocks, block_size, num_kv_heads, value_dim].
        slot_mapping: int64 [num_tokens], `block * block_size + offset`; a token with a slot below 0 is skipped.

    Raises:
        ValueError: Shapes, dtypes or devices do not fit together.
    """
    check_write(key, value, key_cache, value_cache, slot_mapping)
    is_skipped = slot_mapping < 0
    if is_skipped.any():
        kept = ~is_skipped
        key, value, slot_mapping = key[kept], value[kept], slot_mapping[kept]
    block, offset = slot_mapping // key_cache.shape[1], slot_mapping % key_cache.shape[1]
    for rows, cache in ((key, key_cache), (value, value_cache)):
        _bits(cache)[block, offset] = _bits(_saturated(rows, cache.dtype))


def copy_blocks(caches: Sequence[torch.Tensor], copies: torch.Tensor) -> None:
    """Copy the first rows of blocks to other blocks, in all caches (copy-on-write).

    Args:
        caches: Tensors [num_blocks, block_size, ...].
        copies: int64 [n, 3] of (source block, destination block, number of rows); no destination is a source or another
            destination. Rows past the number keep what they hold.

    Raises:
        ValueError: Shapes or dtypes do not fit together.
    """
    check_copies(caches, copies)
    source, destination, num_rows = copies.unbind(1)
    row = torch.arange(caches[0].shape[1] if caches else 0, device=copies.device)
    pair, offset = torch.nonzero(row < num_rows[:, None], as_tuple=True)
    source, destination = source[pair], destination[pair]
    for cache in caches:
        bits = _bits(cache)
        bits[destination, offset] = bits[source, offset]


class _Batch:
    """Items of the same number of rows as tensors over [items, rows, keys], each padded to the longest with its last key.

    The keys before `first_masked` are seen by every row of every item; `mask` says which of the others a row must not see.
    """

    def __init__(self, group: list[_Item], plan: AttentionPlan) -> None:
        device = plan.items.device
        row_start, _, table, lo, hi, _, _, part = torch.tensor(group, device=device).T[..., None]
        row = torch.arange(group[0][_NUM_ROWS], device=device)
        self.rows = plan.row_index[row_start + row].long()
        self.parts = part + row
        longest = max(item[_HI] - item[_LO] for item in group)
        key = lo + torch.arange(longest, device=device)
        held = torch.minimum(key, hi - 1)
        self.slots = plan.block_tables[table, held // plan.block_size].long() * plan.block_size + held % plan.block_size
        self.first_masked = min(max(item[_FULL_HI] - item[_LO], 0) if item[_FULL_LO] <= item[_LO] else 0 for item in group)
        self.mask: torch.Tensor | None = None
        if self.first_masked < longest:
            seen = key[:, None, self.first_masked :]
            position = plan.row_positions[self.rows][..., None]
            self.mask = (seen > position) | (seen >= hi[..., None])
            if plan.window:
                self.mask |= seen <= position - plan.window


def _groups(items: list[_Item], num_heads: int) -> Iterator[list[_Item]]:
    """Gather items that can be computed together; one with too many scores is cut by its rows."""
    group: list[_Item] = []
    for item in sorted(_cut_large(items, num_heads), key=lambda item: (_kind(item), item[_LO] - item[_HI])):
        if group and not _fits(item, group, num_heads):
            yield group
            group = []
        group.append(item)
    if group:
        yield group


def _kind(item: _Item) -> tuple[bool, int]:
    return item[_PART] < 0, item[_NUM_ROWS]


def _fits(item: _Item, group: list[_Item], num_heads: int) -> bool:
    """Whether an item, not longer than those of the group, can join it without much padding."""
    length, longest = item[_HI] - item[_LO], group[0][_HI] - group[0][_LO]
    num_scores = (len(group) + 1) * item[_NUM_ROWS] * longest * num_heads
    return _kind(item) == _kind(group[0]) and length * 4 + 64 >= longest * 3 and num_scores <= _MAX_SCORES


def _cut_large(items: list[_Item], num_heads: int) -> Iterator[_Item]:
    for row_start, num_rows, table, lo, hi, full_lo, full_hi, part in items:
        step = max(1, _MAX_SCORES // ((hi - lo) * num_heads))
        for first in range(0, num_rows, step):
            rows = (row_start + first, min(step, num_rows - first))
            yield [*rows, table, lo, hi, full_lo, full_hi, part if part < 0 else part + first]


def _attend(
    batch: _Batch,
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    *,
    factor: float | torch.Tensor,
    softcap: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the outputs [items, rows, num_q_heads, value_dim] and their LSE [items, rows, num_q_heads] of a batch."""
    exact = torch.promote_types(query.dtype, torch.float32)
    num_kv_heads, head_dim = key_cache.shape[2:]
    num_items, num_rows = batch.rows.shape
    # Query heads that share a KV head become rows of one product per KV head: row * group_size + head in group.
    grouped = query[batch.rows].to(exact).view(num_items, num_rows, num_kv_heads, -1, head_dim).transpose(1, 2)
    keys = _gather(key_cache, batch).to(exact).permute(0, 2, 3, 1)
    scores = torch.matmul(grouped.flatten(2, 3), keys) * factor  # [items, kv heads, rows * group_size, keys]
    if softcap:
        scores = scores.div_(softcap).tanh_().mul_(softcap)
    if batch.mask is not None:
        by_row = scores.view(*scores.shape[:2], num_rows, -1, scores.shape[-1])[..., batch.first_masked :]
        by_row.masked_fill_(batch.mask[:, None, :, None], -torch.inf)
    top = scores.amax(-1, keepdim=True)
    top = top.masked_fill_(top == -torch.inf, 0.0)  # a row that sees none of these keys: sum 0, LSE -inf
    weights = scores.sub_(top).exp_()
    total = weights.sum(-1, keepdim=True)
    output = torch.matmul(weights, _gather(value_cache, batch).to(exact).transpose(1, 2))
    output /= total.masked_fill(total == 0, 1.0)
    shape = (num_items, num_rows, query.shape[1])
    output = output.view(*grouped.shape[:-1], -1).transpose(1, 2).reshape(*shape, -1)
    lse = (top + total.log()).view(grouped.shape[:-1]).transpose(1, 2).reshape(shape)
    return output, lse


def _gather(cache: torch.Tensor, batch: _Batch) -> torch.Tensor:
    """Return the rows of a batch's keys: [items, keys, num_kv_heads, width]."""
    # index_select is several times faster than an index of two tensors.
    rows = _bits(cache).view(-1, *cache.shape[2:]).index_select(0, batch.slots.flatten())
    return rows.view(*batch.slots.shape, *cache.shape[2:]).view(cache.dtype)


def _merge(parts: torch.Tensor, part_lse: torch.Tensor, plan: AttentionPlan, sinks: torch.Tensor | None) -> torch.Tensor:
    """Merge partial results by log-sum-exp; [num_merges, num_q_heads, value_dim]."""
    first, count = plan.merge_indptr[:-1], plan.merge_indptr.diff()
    place = torch.arange(int(count.max()), device=parts.device)
    index = plan.merge_parts[(first[:, None] + place).clamp_max_(plan.num_parts - 1)].long()
    lse = part_lse[index].masked_fill_((place >= count[:, None])[..., None], -torch.inf)
    top = lse.amax(1)
    if sinks is not None:
        top = torch.maximum(top, sinks.to(top.dtype))
    weights = (lse - top[:, None]).exp_()
    total = weights.sum(1)
    if sinks is not None:
        total += (sinks.to(top.dtype) - top).exp_()
    return torch.einsum("rph,rphd->rhd", weights, parts[index]).div_(total[..., None])


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """View 8-bit floats as bytes: torch moves bytes on every device, 8-bit floats only on some."""
    return tensor.view(torch.uint8) if tensor.dtype in FLOAT8 else tensor


def _saturated(rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Cast, with values past the range of an 8-bit float at its end."""
    if dtype not in FLOAT8:
        return rows
    limit = torch.finfo(dtype).max
    return rows.clamp(-limit, limit).to(dtype)
