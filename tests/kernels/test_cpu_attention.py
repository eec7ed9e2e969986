"""The C++ kernels equal dense attention within the error of their dtype, for every instruction set this machine has."""

from typing import Any

import numpy as np
import pytest
import torch

from chatpage_kernels import Tile, plan_attention
from chatpage_kernels.cpu import tiles
from chatpage_kernels.cpu.kernels import CpuKernels
from tests.kernels.cpu_libraries import ISA_NAMES, best_kernels, kernels_for
from tests.kernels.steps import (
    FORKED,
    MIXED,
    Heads,
    Step,
    Tensors,
    assert_as_exact_as_torch,
    attend,
    make_step,
    make_tensors,
    random_step,
)

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SMALL = Tile(max_rows=16, kv_tokens=16, num_workers=64, split_tokens=32, item_cost=8, merge_cost=1)
OWN = tiles(2)[0]


@pytest.fixture(params=ISA_NAMES)
def kernels(request: pytest.FixtureRequest) -> CpuKernels:
    return kernels_for(request.param)


def _packed(kernels: CpuKernels, tensors: Tensors) -> Tensors:
    caches = tensors.key_cache.clone(), tensors.value_cache.clone()
    kernels.convert_cache(*caches)
    return Tensors(tensors.query, *caches)


def _check(kernels: CpuKernels, step: Step, heads: Heads, dtype: torch.dtype, tile: Tile = OWN, **options: Any) -> None:
    tensors = make_tensors(step, heads, dtype)
    scale = heads.head_dim**-0.5
    actual = attend(kernels.paged_attention, step, _packed(kernels, tensors), tile, scale=scale, **options)
    assert_as_exact_as_torch(actual, step, tensors, scale=scale, **options)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tile", [OWN, SMALL], ids=["own tile", "small tile"])
@pytest.mark.parametrize("step", [MIXED, FORKED], ids=["mixed", "forked"])
def test_it_equals_dense_attention(kernels: CpuKernels, step: Step, tile: Tile, dtype: torch.dtype) -> None:
    _check(kernels, step, Heads(), dtype, tile)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "heads",
    [
        Heads(9, 3, 64, 64),
        Heads(8, 1, 80, 80),
        Heads(4, 4, 96, 96),
        Heads(8, 2, 128, 128),
        Heads(5, 1, 192, 128),
        Heads(14, 2, 256, 256),
        Heads(7, 1, 72, 40),
        Heads(3, 3, 2, 1),
    ],
    ids=lambda heads: f"{heads.num_q}-{heads.num_kv}x{heads.head_dim}-{heads.value_dim}",
)
def test_heads_may_be_grouped_and_of_any_even_width(kernels: CpuKernels, heads: Heads, dtype: torch.dtype) -> None:
    step = make_step([(37, 20), (129, 5), (150, 1), (1, 1)], block_size=16, forks={2: (1, 7)})
    _check(kernels, step, heads, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", [1, 7, 8, 16, 24, 32, 48, 128])
def test_blocks_may_have_any_size(kernels: CpuKernels, block_size: int, dtype: torch.dtype) -> None:
    step = make_step([(200, 3), (133, 9)], block_size=block_size, forks={1: (0, 100 // block_size)})
    _check(kernels, step, Heads(), dtype)


@pytest.mark.parametrize("length", [15, 16, 17, 127, 128, 129, 255, 257])
def test_lengths_around_the_borders_of_blocks_and_tiles(length: int) -> None:
    """A prompt that ended exactly at a border, or one token beside it, has read one row too many or too few elsewhere."""
    for rows in {1, 2, length}:
        _check(best_kernels(), make_step([(length, rows)], block_size=16), Heads(), torch.bfloat16)


@pytest.mark.parametrize(
    "options",
    [
        {"window": 1},
        {"window": 50},
        {"softcap": 2.0},
        {"sinks": torch.tensor([0.5, -1, 2, 0, 3, 1])},
        {"sinks": torch.tensor([40.0, -40, 2, 0, 3, 1]), "window": 33, "softcap": 5.0},
    ],
    ids=["window 1", "window", "softcap", "sinks", "all"],
)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("step", [MIXED, FORKED], ids=["mixed", "forked"])
def test_windows_softcaps_and_sinks_are_honoured(
    kernels: CpuKernels, step: Step, dtype: torch.dtype, options: dict[str, Any]
) -> None:
    _check(kernels, step, Heads(), dtype, **options)
    _check(kernels, step, Heads(), dtype, SMALL, **options)


@pytest.mark.parametrize("seed", range(20))
def test_random_trees_of_forks_equal_dense_attention(seed: int) -> None:
    rng = np.random.default_rng(seed)
    step = random_step(rng, block_size=int(rng.choice([4, 16, 32])), max_seqs=6, max_blocks=8)
    if step.num_tokens:
        dtype, tile = DTYPES[seed % 2], (OWN, SMALL)[seed // 2 % 2]
        _check(best_kernels(), step, Heads(), dtype, tile, window=int(rng.choice([0, 7])))


def test_rows_before_the_window_may_belong_to_someone_else() -> None:
    """A window starts inside a block; what lies before it in that block may have been given up and poisoned."""
    step = make_step([(100, 1)], block_size=16)
    tensors = make_tensors(step, Heads(), torch.bfloat16)
    exact = _packed(best_kernels(), tensors)
    block = int(step.block_tables[0, (100 - 21) // 16])
    for cache in (tensors.key_cache, tensors.value_cache):
        cache[block, : (100 - 21) % 16] = torch.nan
    options: dict[str, Any] = {"window": 21, "scale": 0.25}
    poisoned = attend(best_kernels().paged_attention, step, _packed(best_kernels(), tensors), OWN, **options)
    assert torch.equal(poisoned, attend(best_kernels().paged_attention, step, exact, OWN, **options))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("part", ["key_cache", "value_cache"])
def test_a_nan_that_a_row_sees_is_not_hidden(kernels: CpuKernels, part: str, dtype: torch.dtype) -> None:
    """A maximum that drops NaN turned a broken model into fluent nonsense; a neighbour in the step stays clean."""
    step = make_step([(40, 40), (40, 40)], block_size=16)
    tensors = make_tensors(step, Heads(), dtype)
    getattr(tensors, part)[int(step.block_tables[0, 1]), 4] = torch.nan  # position 20
    actual = attend(kernels.paged_attention, step, _packed(kernels, tensors), OWN, scale=0.25)
    assert actual[20:40].isnan().all()
    assert not actual[40:].isnan().any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_large_scores_do_not_overflow(kernels: CpuKernels, dtype: torch.dtype) -> None:
    step = make_step([(300, 3)], block_size=16)
    tensors = make_tensors(step, Heads(), dtype)
    large = Tensors(tensors.query * 30, tensors.key_cache * 30, tensors.value_cache)
    actual = attend(kernels.paged_attention, step, _packed(kernels, large), SMALL, scale=1.0)
    assert_as_exact_as_torch(actual, step, large, scale=1.0)


def test_a_shuffled_block_table_changes_no_bit() -> None:
    tensors = make_tensors(FORKED, Heads(), torch.bfloat16)
    order = torch.randperm(FORKED.num_blocks, generator=torch.Generator().manual_seed(1))
    caches = [torch.empty_like(cache).index_copy_(0, order, cache) for cache in (tensors.key_cache, tensors.value_cache)]
    tables = np.where(FORKED.block_tables < 0, -1, order.numpy()[FORKED.block_tables]).astype(np.int32)
    moved = Step(FORKED.query_start_loc, FORKED.seq_lens, tables, FORKED.block_size)
    kernels = best_kernels()
    expected = attend(kernels.paged_attention, FORKED, _packed(kernels, tensors), SMALL, scale=0.25)
    shuffled = _packed(kernels, Tensors(tensors.query, *caches))
    assert torch.equal(attend(kernels.paged_attention, moved, shuffled, SMALL, scale=0.25), expected)


def test_with_fixed_splits_a_row_has_the_same_bits_whoever_is_in_the_step() -> None:
    """Alone or beside others, in a chunk or as one token, the sums of a row are made of the same pieces in the same order."""
    kernels, tensors = best_kernels(), make_tensors(FORKED, Heads(), torch.bfloat16)
    packed = _packed(kernels, tensors)
    together = attend(kernels.paged_attention, FORKED, packed, SMALL, scale=0.25, split="fixed")
    for seq in range(len(FORKED.seq_lens)):
        last = int(FORKED.query_start_loc[seq + 1]) - 1
        alone = Step(np.array([0, 1], np.int32), FORKED.seq_lens[seq : seq + 1], FORKED.block_tables[seq : seq + 1], 16)
        only = Tensors(packed.query[last : last + 1], packed.key_cache, packed.value_cache)
        assert torch.equal(attend(kernels.paged_attention, alone, only, SMALL, scale=0.25, split="fixed")[0], together[last])


def test_the_number_of_threads_changes_no_bit() -> None:
    """Who computes a unit, and who merges, is decided by the clock; what comes out must not be."""
    kernels, tensors = best_kernels(), make_tensors(FORKED, Heads(9, 3, 64, 64), torch.bfloat16)
    packed, before = _packed(kernels, tensors), torch.get_num_threads()
    results = []
    try:
        for num_threads in (1, 2, 5):
            torch.set_num_threads(num_threads)
            for sinks in (None, torch.zeros(9)):
                results.append(attend(kernels.paged_attention, FORKED, packed, SMALL, scale=0.1, sinks=sinks))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(result, results[i % 2]) for i, result in enumerate(results))


def test_many_merges_are_shared_among_the_threads() -> None:
    """Few merges are done by whoever ends last, many by all threads after a barrier."""
    step = make_step([(300, 300)], block_size=16)
    _check(best_kernels(), step, Heads(9, 3, 64, 64), torch.bfloat16, SMALL, sinks=torch.zeros(9))


def test_strided_queries_are_read_as_they_are() -> None:
    """Queries come as a slice of a packed projection, or with heads before tokens."""
    kernels, tensors = best_kernels(), make_tensors(MIXED, Heads(), torch.bfloat16)
    packed = _packed(kernels, tensors)
    wide = torch.randn(MIXED.num_tokens, 10, 16).bfloat16()
    wide[:, 2:8] = tensors.query
    by_head = tensors.query.transpose(0, 1).contiguous().transpose(0, 1)
    apart = tensors.query.repeat_interleave(2, 2)[..., ::2]
    expected = attend(kernels.paged_attention, MIXED, packed, OWN, scale=0.25)
    for query in (wide[:, 2:8], by_head, apart):
        strided = Tensors(query, packed.key_cache, packed.value_cache)
        assert torch.equal(attend(kernels.paged_attention, MIXED, strided, OWN, scale=0.25), expected)


def test_plans_of_several_kinds_of_layers_alternate() -> None:
    """A model with windows in every other layer has two plans a step; what is kept of one must not serve the other."""
    kernels, tensors = best_kernels(), make_tensors(MIXED, Heads(), torch.bfloat16)
    packed = _packed(kernels, tensors)
    plans = [
        plan_attention(
            MIXED.query_start_loc,
            MIXED.seq_lens,
            MIXED.block_tables,
            block_size=16,
            num_q_heads=6,
            num_kv_heads=2,
            tile=OWN,
            window=window,
        )
        for window in range(12)
    ]
    for plan in [*plans, *plans[::-1]]:
        actual = kernels.paged_attention(packed.query, packed.key_cache, packed.value_cache, plan, scale=0.25)
        assert_as_exact_as_torch(actual, MIXED, tensors, scale=0.25, window=plan.window)


def test_pools_reach_past_32_bit_offsets() -> None:
    """A sequence whose blocks lie more than 2**31 elements into the pool; only those blocks are ever touched."""
    num_blocks = 2**31 // (16 * 128) + 4
    step = make_step([(40, 2)], block_size=16)
    tensors = make_tensors(step, Heads(2, 1, 128, 128), torch.bfloat16)
    kernels = best_kernels()
    small = _packed(kernels, tensors)
    shift = num_blocks - 4
    caches = [torch.empty(num_blocks, 16, 1, 128, dtype=torch.bfloat16) for _ in range(2)]
    for cache, near in zip(caches, (small.key_cache, small.value_cache), strict=True):
        cache[shift : shift + step.num_blocks] = near[: step.num_blocks]
    far = Step(step.query_start_loc, step.seq_lens, step.block_tables + np.int32(shift), 16)
    actual = attend(kernels.paged_attention, far, Tensors(small.query, *caches), OWN, scale=0.1)
    assert torch.equal(actual, attend(kernels.paged_attention, step, small, OWN, scale=0.1))


def test_a_mistake_is_an_error_with_its_numbers() -> None:
    kernels, tensors = best_kernels(), make_tensors(MIXED, Heads(), torch.bfloat16)
    with pytest.raises(ValueError, match="114 tokens"):
        attend(kernels.paged_attention, MIXED, Tensors(tensors.query[1:], *_caches(tensors)), OWN, scale=1.0)
    with pytest.raises(ValueError, match="8-bit caches"):
        attend(kernels.paged_attention, MIXED, tensors, OWN, scale=1.0, k_scale=torch.ones(2))
    with pytest.raises(ValueError, match=r"scale is 0"):
        attend(kernels.paged_attention, MIXED, tensors, OWN, scale=0)
    spread = Tensors(tensors.query, tensors.key_cache.repeat_interleave(2, 3)[..., ::2], tensors.value_cache)
    with pytest.raises(ValueError, match="not contiguous"):
        attend(kernels.paged_attention, MIXED, spread, OWN, scale=1.0)
    short = Tensors(tensors.query, *(cache[:-2] for cache in _caches(tensors)))
    with pytest.raises(ValueError, match=rf"the cache has {MIXED.num_blocks - 2} blocks"):
        attend(kernels.paged_attention, MIXED, short, OWN, scale=1.0)
    double = Tensors(*(x.double() for x in (tensors.query, *_caches(tensors))))
    with pytest.raises(ValueError, match="float64"):
        attend(kernels.paged_attention, MIXED, double, OWN, scale=1.0)


def _caches(tensors: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
    return tensors.key_cache, tensors.value_cache
