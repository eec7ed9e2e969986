"""The Triton kernels equal dense attention within the error of their dtype; interpreted, or compiled where there is a GPU."""

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
import triton

from chatpage_kernels import AttentionPlan, Tile, plan_attention, triton_attention
from tests.kernels.steps import FORKED, Heads, Step, Tensors, assert_as_exact_as_torch, attend, make_step, make_tensors

pytestmark = pytest.mark.usefixtures("one_thread")

DEVICE = "cpu" if triton.knobs.runtime.interpret else "cuda"
TILE = Tile(16, 32, num_workers=24, split_tokens=64, item_cost=8, merge_cost=1)

MIXED = make_step([(37, 9), (129, 5), (64, 1), (100, 23), (1, 1)], block_size=16)
SHORT = make_step([(70, 1), (81, 7)], block_size=16, forks={1: (0, 4)})


def _attend(step: Step, tensors: Tensors, tile: Tile = TILE, **options: Any) -> torch.Tensor:
    on_device = {name: value.to(DEVICE) if isinstance(value, torch.Tensor) else value for name, value in options.items()}
    return attend(triton_attention.paged_attention, step, tensors.to(DEVICE), tile, **on_device)


def _check(step: Step, heads: Heads, tile: Tile = TILE, dtype: torch.dtype = torch.float32, **options: Any) -> None:
    tensors = make_tensors(step, heads, dtype)
    scale = heads.head_dim**-0.5
    assert_as_exact_as_torch(_attend(step, tensors, tile, scale=scale, **options), step, tensors, scale=scale, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("step", [MIXED, FORKED], ids=["mixed", "forked"])
def test_it_equals_dense_attention(step: Step, dtype: torch.dtype) -> None:
    _check(step, Heads(), dtype=dtype)


@pytest.mark.parametrize(
    "heads",
    [
        Heads(9, 3, 64, 64),
        Heads(8, 1, 80, 80),
        Heads(2, 2, 96, 96),
        Heads(8, 2, 128, 128),
        Heads(2, 1, 192, 128),
        Heads(2, 2, 256, 256),
        Heads(20, 1, 24, 40),
    ],
    ids=lambda heads: f"{heads.num_q}-{heads.num_kv}x{heads.head_dim}-{heads.value_dim}",
)
def test_heads_may_be_grouped_and_padded(heads: Heads) -> None:
    _check(SHORT, heads, dtype=torch.float16)


@pytest.mark.parametrize("block_size", [8, 32, 64, 128])
def test_blocks_may_be_shorter_or_longer_than_a_tile(block_size: int) -> None:
    _check(make_step([(200, 3), (133, 9)], block_size=block_size, forks={1: (0, 128 // block_size)}), Heads())


@pytest.mark.parametrize(
    "options",
    [
        {"window": 20},
        {"softcap": 2.0},
        {"sinks": torch.tensor([0.5, -1, 2, 0, 3, 1])},
        {"sinks": torch.tensor([0.5, -1, 2, 0, 3, 1]), "window": 33, "softcap": 5.0},
    ],
    ids=["window", "softcap", "sinks", "all"],
)
@pytest.mark.parametrize("step", [MIXED, FORKED], ids=["mixed", "forked"])
def test_windows_softcaps_and_sinks_are_honoured(step: Step, options: dict[str, Any]) -> None:
    _check(step, Heads(), **options)


@pytest.mark.parametrize("kv_dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_8_bit_caches_are_scaled_per_head(dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
    tensors = make_tensors(SHORT, Heads(), dtype, kv_dtype=kv_dtype)
    v_scale = torch.tensor([2.0, 0.25])
    choices: list[dict[str, Any]] = [{}, {"v_scale": v_scale}, {"k_scale": torch.tensor([0.5, 1.5]), "v_scale": v_scale}]
    for scales in choices:
        actual = _attend(SHORT, tensors, scale=0.25, **scales)
        assert_as_exact_as_torch(actual, SHORT, tensors, scale=0.25, **scales)


def test_all_finite_8_bit_numbers_are_widened_exactly() -> None:
    """One row that sees one key returns that key's value: all of a format's finite numbers, subnormals among them."""
    for kv_dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        numbers = torch.arange(256, dtype=torch.uint8).view(kv_dtype)
        numbers = torch.where(numbers.float().isfinite(), numbers.float(), 0.0).to(kv_dtype)
        step = make_step([(1, 1)], block_size=8)
        cache = torch.zeros(2, 8, 1, 256, dtype=torch.float32)
        cache[step.block_tables[0, 0], 0, 0] = numbers.float()
        tensors = Tensors(torch.zeros(1, 1, 256), cache.to(kv_dtype), cache.to(kv_dtype))
        assert torch.equal(_attend(step, tensors, scale=1.0).cpu()[0, 0], numbers.float())


def test_a_bf16_result_is_rounded_and_not_cut() -> None:
    """The interpreter cuts fp32 to bf16; a mean of two neighbours rounds to the even one."""
    step = make_step([(2, 1)], block_size=8)
    value = torch.zeros(2, 8, 1, 16)
    value[step.block_tables[0, 0], :2] = torch.tensor([1.0, 1.0078125])[:, None, None]
    tensors = Tensors(*(x.bfloat16() for x in (torch.zeros(1, 1, 16), torch.zeros_like(value), value + 0.0078125)))
    assert _attend(step, tensors, scale=1.0).float().unique().tolist() == [1.015625]


def test_a_shuffled_block_table_changes_no_bit() -> None:
    tensors = make_tensors(FORKED, Heads())
    order = torch.randperm(FORKED.num_blocks, generator=torch.Generator().manual_seed(1))
    caches = [torch.empty_like(cache).index_copy_(0, order, cache) for cache in (tensors.key_cache, tensors.value_cache)]
    tables = np.where(FORKED.block_tables < 0, -1, order.numpy()[FORKED.block_tables]).astype(np.int32)
    moved = Step(FORKED.query_start_loc, FORKED.seq_lens, tables, FORKED.block_size)
    assert torch.equal(_attend(moved, Tensors(tensors.query, *caches), scale=0.25), _attend(FORKED, tensors, scale=0.25))


def test_with_fixed_splits_a_row_has_the_same_bits_whoever_is_in_the_step() -> None:
    """Shared or alone, in a chunk or by itself, the sums of a row are made of the same pieces in the same order."""
    tensors = make_tensors(FORKED, Heads(), torch.float16)
    together = _attend(FORKED, tensors, scale=0.25, split="fixed")
    for seq in range(len(FORKED.seq_lens)):
        last = int(FORKED.query_start_loc[seq + 1]) - 1
        alone = Step(np.array([0, 1], np.int32), FORKED.seq_lens[seq : seq + 1], FORKED.block_tables[seq : seq + 1], 16)
        only = Tensors(tensors.query[last : last + 1], tensors.key_cache, tensors.value_cache)
        assert torch.equal(_attend(alone, only, scale=0.25, split="fixed")[0], together[last])


def test_strided_queries_and_caches_are_read_as_they_are() -> None:
    """transformers hands over heads before tokens, and an engine may keep keys and values of a block side by side."""
    tensors = make_tensors(MIXED, Heads()).to(DEVICE)
    both = torch.stack([tensors.key_cache, tensors.value_cache], 1)
    by_head = tensors.query.transpose(0, 1).contiguous().transpose(0, 1)
    strided = Tensors(by_head, both[:, 0], both[:, 1])
    assert torch.equal(_attend(MIXED, strided, scale=0.25), _attend(MIXED, tensors, scale=0.25))


def test_pools_reach_past_32_bit_offsets() -> None:
    """The last block starts more than 2**31 elements into the pool, of which only the blocks of the step are ever touched."""
    step = make_step([(40, 3)], block_size=16)
    near = make_tensors(step, Heads(2, 1), torch.float32, kv_dtype=torch.float8_e5m2)
    stride = 2**30 + 4096
    far = []
    for cache in (near.key_cache, near.value_cache):
        pool = torch.empty(stride * (step.num_blocks - 1) + cache[0].numel(), dtype=torch.uint8, device=DEVICE)
        pool = pool.as_strided(cache.shape, (stride, *cache.stride()[1:]))
        pool.copy_(cache.view(torch.uint8))
        far.append(pool.view(cache.dtype))
    assert far[0].stride(0) * int(step.block_tables.max()) > 2**31
    assert torch.equal(_attend(step, Tensors(near.query, *far), scale=0.25), _attend(step, near, scale=0.25))


def _plan(step: Step, heads: Heads) -> AttentionPlan:
    tables = (step.query_start_loc, step.seq_lens, step.block_tables)
    return plan_attention(*tables, block_size=16, num_q_heads=heads.num_q, num_kv_heads=heads.num_kv, tile=TILE, device=DEVICE)


def test_programs_past_the_counts_leave_at_once() -> None:
    """A captured graph launches as many programs as the largest plan needs, over whatever an earlier plan left behind them."""
    tensors = make_tensors(FORKED, Heads()).to(DEVICE)
    plan = _plan(FORKED, Heads())
    wild = torch.full((3, 8), 2**30, dtype=torch.int32, device=DEVICE)
    padded = dataclasses.replace(
        plan,
        items=torch.cat([plan.items, wild]),
        merge_rows=torch.cat([plan.merge_rows, wild[:, 0]]),
        merge_indptr=torch.cat([plan.merge_indptr, wild[:, 0]]),
    )
    arguments = (tensors.query, tensors.key_cache, tensors.value_cache)
    expected = triton_attention.paged_attention(*arguments, plan, scale=0.25)
    assert torch.equal(triton_attention.paged_attention(*arguments, padded, scale=0.25), expected)


def test_merges_accept_strided_inputs() -> None:
    """A merge that took its inputs for contiguous mixed the heads of partial results that were slices of a larger tensor."""
    plan = _plan(FORKED, Heads())
    generator = torch.Generator().manual_seed(0)
    parts = torch.randn(plan.num_parts, 6, 16, generator=generator).to(DEVICE)
    lse = torch.randn(plan.num_parts, 6, generator=generator).to(DEVICE)
    lse[plan.merge_parts[0]] = -torch.inf  # a row that saw none of the keys of one item
    out = torch.full((FORKED.num_tokens, 6, 16), 7.0, device=DEVICE)
    triton_attention.merge_parts(out, parts, lse, plan)

    strided_out = torch.full((6, FORKED.num_tokens, 32), 7.0, device=DEVICE)[..., :16].transpose(0, 1)
    wide_parts = torch.zeros(6, plan.num_parts, 48, device=DEVICE)[..., :16].transpose(0, 1).copy_(parts)
    triton_attention.merge_parts(strided_out, wide_parts, lse.t().contiguous().t(), plan)
    assert torch.equal(strided_out, out)

    first, end = plan.merge_indptr[:2].tolist()
    mine = plan.merge_parts[first:end].long()
    weights = torch.softmax(lse[mine] * np.log(2), 0)[..., None]
    torch.testing.assert_close(out[plan.merge_rows[0]], (weights * parts[mine]).sum(0))


def test_caches_the_kernels_cannot_walk_are_refused() -> None:
    tensors = make_tensors(SHORT, Heads())
    spread = Tensors(tensors.query, tensors.key_cache.repeat_interleave(2, 3)[..., ::2], tensors.value_cache)
    with pytest.raises(ValueError, match="last stride"):
        _attend(SHORT, spread, scale=0.25)
    wide = make_tensors(SHORT, Heads(2, 1, 288, 16))
    with pytest.raises(ValueError, match="not 288"):
        _attend(SHORT, wide, scale=0.25)
