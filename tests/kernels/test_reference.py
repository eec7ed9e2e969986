"""The torch backend equals dense attention for every shape of step, and never reads a row that nobody wrote."""

from typing import Any

import numpy as np
import pytest
import torch

from chatpage_kernels import Tile, reference
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
    written_rows,
)

pytestmark = pytest.mark.usefixtures("one_thread")

SMALL = Tile(max_rows=16, kv_tokens=16, num_workers=64, split_tokens=32, item_cost=8, merge_cost=1)


def _attend(step: Step, tensors: Tensors, tile: Tile, **options: Any) -> torch.Tensor:
    return attend(reference.paged_attention, step, tensors, tile, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("tile", [reference.TILE, SMALL], ids=["own tile", "small tile"])
@pytest.mark.parametrize("step", [MIXED, FORKED], ids=["mixed", "forked"])
def test_it_equals_dense_attention(step: Step, tile: Tile, dtype: torch.dtype) -> None:
    tensors = make_tensors(step, Heads(), dtype)
    assert_as_exact_as_torch(_attend(step, tensors, tile, scale=0.25), step, tensors, scale=0.25)


@pytest.mark.parametrize(
    "heads", [Heads(9, 3, 64, 64), Heads(8, 1, 80, 80), Heads(4, 4, 96, 96), Heads(4, 1, 72, 40), Heads(1, 1, 3, 5)]
)
@pytest.mark.parametrize("step", [MIXED, FORKED], ids=["mixed", "forked"])
def test_heads_may_be_grouped_and_of_any_width(step: Step, heads: Heads) -> None:
    tensors = make_tensors(step, heads)
    assert_as_exact_as_torch(_attend(step, tensors, SMALL, scale=0.1), step, tensors, scale=0.1)


@pytest.mark.parametrize("block_size", [1, 8, 32, 128])
def test_blocks_may_have_any_size(block_size: int) -> None:
    step = make_step([(200, 3), (133, 9)], block_size=block_size, forks={1: (0, 100 // block_size)})
    tensors = make_tensors(step, Heads())
    assert_as_exact_as_torch(_attend(step, tensors, SMALL, scale=0.25), step, tensors, scale=0.25)


@pytest.mark.parametrize(
    "options", [{"window": 50}, {"softcap": 2.0}, {"sinks": torch.tensor([0.5, -1, 2, 0, 3, 1])}], ids=lambda o: next(iter(o))
)
@pytest.mark.parametrize("tile", [reference.TILE, SMALL], ids=["own tile", "small tile"])
@pytest.mark.parametrize("step", [MIXED, FORKED], ids=["mixed", "forked"])
def test_windows_softcaps_and_sinks_are_honoured(step: Step, tile: Tile, options: dict[str, Any]) -> None:
    tensors = make_tensors(step, Heads())
    assert_as_exact_as_torch(_attend(step, tensors, tile, scale=0.25, **options), step, tensors, scale=0.25, **options)


@pytest.mark.parametrize("kv_dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_8_bit_caches_are_scaled_per_head(kv_dtype: torch.dtype) -> None:
    tensors = make_tensors(FORKED, Heads(), kv_dtype=kv_dtype)
    scales: dict[str, Any] = {"k_scale": torch.tensor([0.5, 1.5]), "v_scale": torch.tensor([2.0, 0.25])}
    assert_as_exact_as_torch(_attend(FORKED, tensors, SMALL, scale=0.25, **scales), FORKED, tensors, scale=0.25, **scales)


def test_a_shuffled_block_table_changes_no_bit() -> None:
    tensors = make_tensors(FORKED, Heads())
    order = torch.randperm(FORKED.num_blocks, generator=torch.Generator().manual_seed(1))
    shuffled = Tensors(
        tensors.query, *(torch.empty_like(x).index_copy_(0, order, x) for x in (tensors.key_cache, tensors.value_cache))
    )
    tables = np.where(FORKED.block_tables < 0, -1, order.numpy()[FORKED.block_tables]).astype(np.int32)
    moved = Step(FORKED.query_start_loc, FORKED.seq_lens, tables, FORKED.block_size)
    assert torch.equal(_attend(moved, shuffled, SMALL, scale=0.25), _attend(FORKED, tensors, SMALL, scale=0.25))


def test_an_item_with_many_scores_is_cut_by_its_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = make_tensors(FORKED, Heads())
    whole = _attend(FORKED, tensors, reference.TILE, scale=0.25)
    monkeypatch.setattr(reference, "_MAX_SCORES", 4096)
    torch.testing.assert_close(_attend(FORKED, tensors, reference.TILE, scale=0.25), whole)


def test_strided_queries_are_read_as_they_are() -> None:
    """Queries come as a slice of a packed projection."""
    tensors = make_tensors(MIXED, Heads())
    packed = torch.randn(MIXED.num_tokens, 10, 16)
    packed[:, 2:8] = tensors.query
    strided = Tensors(packed[:, 2:8], tensors.key_cache, tensors.value_cache)
    assert torch.equal(_attend(MIXED, strided, SMALL, scale=0.25), _attend(MIXED, tensors, SMALL, scale=0.25))


@pytest.mark.parametrize("seed", range(30))
def test_random_steps_equal_dense_attention(seed: int) -> None:
    rng = np.random.default_rng(seed)
    step = random_step(rng, block_size=int(rng.choice([1, 4, 16])), max_seqs=6, max_blocks=8)
    tensors = make_tensors(step, Heads(), seed=seed)
    if step.num_tokens:
        window = int(rng.choice([0, 7]))
        actual = _attend(step, tensors, SMALL, window=window, scale=0.25)
        assert_as_exact_as_torch(actual, step, tensors, scale=0.25, window=window)


def test_a_mistake_is_an_error_with_its_numbers() -> None:
    tensors = make_tensors(MIXED, Heads())
    with pytest.raises(ValueError, match=r"114 tokens"):
        _attend(MIXED, Tensors(tensors.query[1:], tensors.key_cache, tensors.value_cache), SMALL, scale=1.0)
    with pytest.raises(ValueError, match="cannot serve"):
        _attend(MIXED, Tensors(tensors.query, tensors.key_cache.half(), tensors.value_cache), SMALL, scale=1.0)
    with pytest.raises(ValueError, match="k_scale is"):
        _attend(MIXED, tensors, SMALL, scale=1.0, k_scale=torch.ones(3))


def test_tokens_go_to_their_slots_and_padding_goes_nowhere() -> None:
    generator = torch.Generator().manual_seed(0)
    key, value = torch.randn(4, 2, 8, generator=generator), torch.randn(4, 2, 6, generator=generator)
    key_cache, value_cache = torch.full((5, 4, 2, 8), torch.nan), torch.full((5, 4, 2, 6), torch.nan)
    reference.write_kv(key, value, key_cache, value_cache, torch.tensor([7, -1, 0, 19]))
    for rows, cache in ((key, key_cache), (value, value_cache)):
        flat = cache.flatten(0, 1)
        assert torch.equal(flat[[7, 0, 19]], rows[[0, 2, 3]])
        assert flat.isnan().all((1, 2)).sum() == 17


def test_values_too_large_for_8_bits_saturate() -> None:
    rows = torch.tensor([[[1e9, -1e9]]])
    cache = torch.zeros(1, 1, 1, 2).to(torch.float8_e4m3fn)
    reference.write_kv(rows, rows, cache, cache.clone(), torch.tensor([0]))
    assert cache.float().flatten().tolist() == [448.0, -448.0]


def test_a_copy_moves_the_given_rows_of_every_cache_and_no_other() -> None:
    """Copying a whole block would overwrite rows that the destination's owner has written since the copy was ordered."""
    caches = [torch.randn(6, 4, 2, 8), torch.randn(6, 4, 2, 6).to(torch.float8_e5m2)]
    expected = [cache.clone().float() for cache in caches]
    for cache in expected:
        cache[5, :3], cache[0, :1], cache[2, :4] = cache[1, :3], cache[3, :1], cache[4, :4]
    reference.copy_blocks(caches, torch.tensor([[1, 5, 3], [3, 0, 1], [4, 2, 4], [1, 4, 0]]))
    assert all(torch.equal(cache.float(), wanted) for cache, wanted in zip(caches, expected, strict=True))


def test_poison_covers_all_that_nobody_wrote() -> None:
    assert make_tensors(FORKED, Heads()).key_cache.isnan().any((2, 3)).equal(~written_rows(FORKED))
