"""Paged attention in Triton: the work-list kernel, the merge kernel, and their launcher.

Invariant: one program computes one item for one KV head. It reads the keys `[kv_lo, kv_hi)` of the item in ascending tiles and
nothing else (rows outside are masked in the load itself), so the sums of a row depend only on the pieces its plan gives it.

Query heads that share a KV head are packed as rows: row m of a tile is query row `m // GROUP` and head `m % GROUP` of the
group. Scores are kept in units of log2, since exp2 is what the hardware has. Item and merge counts are read on the device:
a launch captured in a graph may have more programs than the plan of a later step has items.
"""

# ruff: noqa: PLR0917, RET505, SIM108, SIM300 - a kernel is not Python: flat arguments, and branches chosen while compiling
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

import torch
import triton
import triton.language as tl

from chatpage_kernels.checks import FLOAT8, check_attention
from chatpage_kernels.plan import AttentionPlan
from chatpage_kernels.triton_config import family_of_device, fp32_precision, launch_options, why_unsupported

INTERPRET = tl.constexpr(bool(triton.knobs.runtime.interpret))  # fixed when the kernels are decorated
LOG2E = tl.constexpr(1.4426950408889634)

_MERGE_AT_ONCE = 8


@triton.jit
def round_to(x, DTYPE: tl.constexpr):
    """Cast fp32, rounding to nearest even. The interpreter cuts fp32 to bf16, so there the bits are rounded by hand."""
    if INTERPRET and DTYPE == tl.bfloat16:
        bits = x.to(tl.float32).to(tl.uint32, bitcast=True)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        return x.to(DTYPE)


@triton.jit
def _dot(a, b, acc, FP32_PRECISION: tl.constexpr):
    """Multiply with fp32 sums. The interpreter multiplies the bit patterns of bf16 operands, so there they become fp32."""
    if INTERPRET:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    elif a.dtype == tl.float32:
        return tl.dot(a, b, acc, input_precision=FP32_PRECISION)
    else:
        return tl.dot(a, b, acc)


@triton.jit
def _widen(x, DTYPE: tl.constexpr, KV_FORMAT: tl.constexpr):
    """Turn what a cache holds into the dtype of the query; 8-bit floats, held as bytes, on any hardware.

    Their bits are placed in an fp16: e5m2 is its upper byte; e4m3 has an exponent bias of 7 where fp16 has 15, so it comes
    out 2**8 too small, which `KV_FACTOR` puts right in the scales.
    """
    if KV_FORMAT == "e5m2":
        return (x.to(tl.uint16) << 8).to(tl.float16, bitcast=True).to(DTYPE)
    elif KV_FORMAT == "e4m3":
        bits = x.to(tl.uint16)
        return (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True).to(DTYPE)
    else:
        return x


@triton.jit
def _visit_tile(
    start, lo, hi, q, position, top, total, acc, key_head, value_head, table,
    s_kb, s_kt, s_vb, s_vt, qk_scale, softcap, window,
    HEAD_DIM: tl.constexpr, KEY_WIDTH: tl.constexpr, VALUE_DIM: tl.constexpr, VALUE_WIDTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, KV_TILE: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    KV_FORMAT: tl.constexpr, FP32_PRECISION: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Add the keys `[start, start + KV_TILE)` to the running softmax; MASKED ones may lie outside, or be hidden from rows."""
    n = start + tl.arange(0, KV_TILE)  # [KV_TILE] key positions
    d = tl.arange(0, KEY_WIDTH)
    e = tl.arange(0, VALUE_WIDTH)
    is_held = (n >= lo) & (n < hi)
    if MASKED:
        block = tl.load(table + n // BLOCK_SIZE, mask=is_held, other=0).to(tl.int64)
    else:
        block = tl.load(table + n // BLOCK_SIZE).to(tl.int64)
    offset = (n % BLOCK_SIZE).to(tl.int64)
    key_at = key_head + (block * s_kb + offset * s_kt)[:, None] + d[None, :]  # [KV_TILE, KEY_WIDTH]
    value_at = value_head + (block * s_vb + offset * s_vt)[:, None] + e[None, :]  # [KV_TILE, VALUE_WIDTH]
    if MASKED:
        k = tl.load(key_at, mask=is_held[:, None] & (d < HEAD_DIM)[None, :], other=0)
        v = tl.load(value_at, mask=is_held[:, None] & (e < VALUE_DIM)[None, :], other=0)
    else:
        if HEAD_DIM != KEY_WIDTH:
            k = tl.load(key_at, mask=(d < HEAD_DIM)[None, :], other=0)
        else:
            k = tl.load(key_at)
        if VALUE_DIM != VALUE_WIDTH:
            v = tl.load(value_at, mask=(e < VALUE_DIM)[None, :], other=0)
        else:
            v = tl.load(value_at)
    k = _widen(k, q.dtype, KV_FORMAT)
    v = _widen(v, q.dtype, KV_FORMAT)
    s = _dot(q, tl.trans(k), tl.zeros([q.shape[0], KV_TILE], tl.float32), FP32_PRECISION) * qk_scale  # [ROWS, KV_TILE]
    if HAS_SOFTCAP:  # tanh(x) = 1 - 2 / (1 + e^2x); 2 * log2(e)^2 since both s and softcap carry a log2(e)
        s = softcap * (1.0 - 2.0 / (1.0 + tl.exp2(s * (2.8853900817779268 / softcap))))
    if MASKED:
        is_seen = is_held[None, :] & (n[None, :] <= position[:, None])
        if HAS_WINDOW:
            is_seen = is_seen & (n[None, :] > position[:, None] - window)
        s = tl.where(is_seen, s, float("-inf"))
    new_top = tl.maximum(top, tl.max(s, 1))
    # A row that has seen no key yet has -inf at the top, and -inf - -inf is NaN.
    base = tl.where(new_top == float("-inf"), 0.0, new_top) if MASKED else new_top
    decay = tl.exp2(top - base)
    p = tl.exp2(s - base[:, None])
    total = total * decay + tl.sum(p, 1)
    acc = _dot(round_to(p, q.dtype), v, acc * decay[:, None], FP32_PRECISION)
    return new_top, total, acc


@triton.jit(do_not_specialize=["window"])
def attention_kernel(
    out, parts, part_lse, query, key_cache, value_cache, k_scale, v_scale,
    items, num_items, row_index, row_positions, block_tables,
    s_qt, s_qh, s_kb, s_kt, s_kh, s_vb, s_vt, s_vh, s_table,
    qk_scale, softcap, window,
    NUM_HEADS: tl.constexpr, GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr, KEY_WIDTH: tl.constexpr, VALUE_DIM: tl.constexpr, VALUE_WIDTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, ROWS: tl.constexpr, KV_TILE: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_SCALES: tl.constexpr, KV_FORMAT: tl.constexpr,
    FP32_PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute one item for one KV head; grid (items, KV heads).

    qk_scale and softcap carry a factor of log2(e). Final results go to `out` [tokens, heads, value_dim], partial ones to
    `parts` [parts, heads, value_dim] with their log2-sum-exp2 in `part_lse` [parts, heads], all contiguous.
    """
    if tl.program_id(0) >= tl.load(num_items):
        return
    h = tl.program_id(1)
    item = items + tl.program_id(0) * 8
    row_start, num_rows, seq, lo = tl.load(item), tl.load(item + 1), tl.load(item + 2), tl.load(item + 3)
    hi, full_lo, full_hi, part = tl.load(item + 4), tl.load(item + 5), tl.load(item + 6), tl.load(item + 7)
    full_lo = tl.multiple_of(full_lo, KV_TILE)
    full_hi = tl.multiple_of(full_hi, KV_TILE)

    m = tl.arange(0, ROWS)
    r = m // GROUP  # [ROWS] row of the item
    is_row = r < num_rows
    head = h * GROUP + m % GROUP
    row = tl.load(row_index + row_start + r, mask=is_row, other=0)
    position = tl.load(row_positions + row, mask=is_row, other=-1)
    d = tl.arange(0, KEY_WIDTH)
    e = tl.arange(0, VALUE_WIDTH)
    query_at = query + (row.to(tl.int64) * s_qt + head.to(tl.int64) * s_qh)[:, None] + d[None, :]
    q = tl.load(query_at, mask=is_row[:, None] & (d < HEAD_DIM)[None, :], other=0.0)  # [ROWS, KEY_WIDTH]
    if HAS_SCALES:
        qk_scale = qk_scale * tl.load(k_scale + h)

    table = block_tables + seq.to(tl.int64) * s_table
    key_head = key_cache + h.to(tl.int64) * s_kh
    value_head = value_cache + h.to(tl.int64) * s_vh
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, VALUE_WIDTH], tl.float32)
    for start in tl.range(lo // KV_TILE * KV_TILE, full_lo, KV_TILE, num_stages=1):  # left edge: a window, an unaligned start
        top, total, acc = _visit_tile(
            start, lo, hi, q, position, top, total, acc, key_head, value_head, table,
            s_kb, s_kt, s_vb, s_vt, qk_scale, softcap, window,
            HEAD_DIM, KEY_WIDTH, VALUE_DIM, VALUE_WIDTH, BLOCK_SIZE, KV_TILE,
            HAS_WINDOW, HAS_SOFTCAP, KV_FORMAT, FP32_PRECISION, True,
        )  # fmt: skip
    for start in tl.range(full_lo, full_hi, KV_TILE):  # every key is held, and seen by every row
        top, total, acc = _visit_tile(
            start, lo, hi, q, position, top, total, acc, key_head, value_head, table,
            s_kb, s_kt, s_vb, s_vt, qk_scale, softcap, window,
            HEAD_DIM, KEY_WIDTH, VALUE_DIM, VALUE_WIDTH, BLOCK_SIZE, KV_TILE,
            HAS_WINDOW, HAS_SOFTCAP, KV_FORMAT, FP32_PRECISION, False,
        )  # fmt: skip
    for start in tl.range(full_hi, hi, KV_TILE, num_stages=1):  # right edge: the causal diagonal, the last tile
        top, total, acc = _visit_tile(
            start, lo, hi, q, position, top, total, acc, key_head, value_head, table,
            s_kb, s_kt, s_vb, s_vt, qk_scale, softcap, window,
            HEAD_DIM, KEY_WIDTH, VALUE_DIM, VALUE_WIDTH, BLOCK_SIZE, KV_TILE,
            HAS_WINDOW, HAS_SOFTCAP, KV_FORMAT, FP32_PRECISION, True,
        )  # fmt: skip

    safe_total = tl.where(total == 0.0, 1.0, total)
    factor = 1.0 / safe_total
    if KV_FORMAT == "e4m3":
        factor = factor * 256.0
    if HAS_SCALES:
        factor = factor * tl.load(v_scale + h)
    o = acc * factor[:, None]  # [ROWS, VALUE_WIDTH]
    is_out = is_row[:, None] & (e < VALUE_DIM)[None, :]
    if part >= 0:
        at = (part + r).to(tl.int64) * NUM_HEADS + head
        tl.store(parts + at[:, None] * VALUE_DIM + e[None, :], o, mask=is_out)
        tl.store(part_lse + at, top + tl.log2(safe_total), mask=is_row)  # -inf for a row that sees none of these keys
    else:
        at = row.to(tl.int64) * NUM_HEADS + head
        tl.store(out + at[:, None] * VALUE_DIM + e[None, :], round_to(o, out.dtype.element_ty), mask=is_out)


@triton.jit
def merge_kernel(
    out, parts, part_lse, sinks, merge_rows, merge_indptr, merge_parts, num_merges,
    s_ot, s_oh, s_pp, s_ph, s_lp, s_lh,
    VALUE_DIM: tl.constexpr, VALUE_WIDTH: tl.constexpr, AT_ONCE: tl.constexpr, HAS_SINKS: tl.constexpr,
):  # fmt: skip
    """Merge the partial results of one query row and head by log-sum-exp; grid (merges, heads)."""
    i, h = tl.program_id(0), tl.program_id(1).to(tl.int64)
    if i >= tl.load(num_merges):
        return
    first, end = tl.load(merge_indptr + i), tl.load(merge_indptr + i + 1)
    row = tl.load(merge_rows + i).to(tl.int64)
    e = tl.arange(0, VALUE_WIDTH)
    top = tl.load(sinks + h).to(tl.float32) * LOG2E if HAS_SINKS else float("-inf")
    total = 1.0 if HAS_SINKS else 0.0
    acc = tl.zeros([VALUE_WIDTH], tl.float32)
    for at in range(first, end, AT_ONCE):
        j = at + tl.arange(0, AT_ONCE)
        part = tl.load(merge_parts + j, mask=j < end, other=0).to(tl.int64)  # [AT_ONCE]
        lse = tl.load(part_lse + part * s_lp + h * s_lh, mask=j < end, other=float("-inf"))
        is_part = (j < end)[:, None] & (e < VALUE_DIM)[None, :]
        o = tl.load(parts + (part * s_pp + h * s_ph)[:, None] + e[None, :], mask=is_part, other=0.0)  # [AT_ONCE, VALUE_WIDTH]
        new_top = tl.maximum(top, tl.max(lse, 0))
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        weight, decay = tl.exp2(lse - base), tl.exp2(top - base)
        acc = acc * decay + tl.sum(o * weight[:, None], 0)
        total = total * decay + tl.sum(weight, 0)
        top = new_top
    acc = acc / total
    tl.store(out + row * s_ot + h * s_oh + e, round_to(acc, out.dtype.element_ty), mask=e < VALUE_DIM)


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
    """Attend from every query row to the keys its plan gives it; arguments and result as `reference.paged_attention`.

    Head widths up to 256; fp32, fp16 or bf16; the caches may have any strides but a last one of 1.

    Raises:
        ValueError: Shapes, dtypes, devices, strides or the plan do not fit together, or this kernel.
    """
    check_attention(query, key_cache, value_cache, plan, sinks=sinks, k_scale=k_scale, v_scale=v_scale)
    _check_layout(query, key_cache, value_cache)
    query = query if query.stride(2) == 1 else query.contiguous()
    num_heads, head_dim, value_dim = query.shape[1], query.shape[2], value_cache.shape[3]
    out = query.new_empty(query.shape[0], num_heads, value_dim)
    parts = query.new_empty(plan.num_parts, num_heads, value_dim, dtype=torch.float32)
    part_lse = query.new_empty(plan.num_parts, num_heads, dtype=torch.float32)
    factors = _scales(k_scale, v_scale, key_cache.shape[2]) or (part_lse, part_lse)
    kv_format = _KV_FORMATS.get(key_cache.dtype, "same")
    keys, values = (cache.view(torch.uint8) if cache.dtype in FLOAT8 else cache for cache in (key_cache, value_cache))
    log2_scale = scale * LOG2E.value * (256.0 if kv_format == "e4m3" else 1.0)
    family = family_of_device(query.device)
    rows = _pad(max(plan.tile.max_rows, plan.group_size))
    if plan.items.shape[0]:
        attention_kernel[plan.items.shape[0], key_cache.shape[2]](
            out, parts, part_lse, query, keys, values, *factors,
            plan.items, plan.num_items, plan.row_index, plan.row_positions, plan.block_tables,
            *query.stride()[:2], *keys.stride()[:3], *values.stride()[:3], plan.block_tables.stride(0),
            log2_scale, softcap * LOG2E.value, plan.window,
            NUM_HEADS=num_heads, GROUP=plan.group_size,
            HEAD_DIM=head_dim, KEY_WIDTH=_pad(head_dim), VALUE_DIM=value_dim, VALUE_WIDTH=_pad(value_dim),
            BLOCK_SIZE=plan.block_size, ROWS=rows, KV_TILE=plan.tile.kv_tokens,
            HAS_WINDOW=plan.window > 0, HAS_SOFTCAP=softcap > 0, HAS_SCALES=factors[0] is not part_lse, KV_FORMAT=kv_format,
            FP32_PRECISION=fp32_precision(family),
            **launch_options(
                family, query.dtype, rows=rows, head_dim=max(head_dim, value_dim), is_8_bit=kv_format != "same"
            ),
        )  # fmt: skip
    merge_parts(out, parts, part_lse, plan, sinks=sinks)
    return out


def merge_parts(
    out: torch.Tensor, parts: torch.Tensor, part_lse: torch.Tensor, plan: AttentionPlan, *, sinks: torch.Tensor | None = None
) -> None:
    """Merge partial results into the rows of `out` that the plan merges.

    Args:
        out: [num_tokens, num_heads, value_dim]; other rows keep what they hold.
        parts: fp32 [num_parts, num_heads, value_dim], normalised; any strides but a last one of 1.
        part_lse: fp32 [num_parts, num_heads] base-2 logarithms of the sums of `2**score`; any strides.
        plan: Says which parts make up which row.
        sinks: [num_heads] natural logits that join each softmax.
    """
    num_merges = plan.merge_rows.shape[0]
    if num_merges:
        merge_kernel[num_merges, out.shape[1]](
            out, parts, part_lse, part_lse if sinks is None else sinks,
            plan.merge_rows, plan.merge_indptr, plan.merge_parts, plan.num_merges,
            *out.stride()[:2], *parts.stride()[:2], *part_lse.stride(),
            VALUE_DIM=out.shape[2], VALUE_WIDTH=_pad(out.shape[2]), AT_ONCE=_MERGE_AT_ONCE, HAS_SINKS=sinks is not None,
            num_warps=2,
        )  # fmt: skip


_KV_FORMATS = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}


def _pad(size: int) -> int:
    """Return the power of two, at least 16, that `tl.dot` takes for a size."""
    return max(16, int(triton.next_power_of_2(size)))


def _scales(
    k_scale: torch.Tensor | None, v_scale: torch.Tensor | None, num_kv_heads: int
) -> tuple[torch.Tensor, torch.Tensor] | None:
    given = k_scale if k_scale is not None else v_scale
    if given is None:
        return None
    one = torch.ones(num_kv_heads, dtype=torch.float32, device=given.device)
    return (one if k_scale is None else k_scale.float(), one if v_scale is None else v_scale.float())


def _check_layout(query: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor) -> None:
    problem = why_unsupported(query.dtype, key_cache.dtype, query.shape[2], value_cache.shape[3])
    if problem:
        raise ValueError(problem)
    if key_cache.dtype != value_cache.dtype or key_cache.stride(3) != 1 or value_cache.stride(3) != 1:
        raise ValueError(
            f"the caches must have one dtype and a last stride of 1; they are {key_cache.dtype} with strides "
            f"{key_cache.stride()} and {value_cache.dtype} with {value_cache.stride()}"
        )
