"""The Triton cache writes move exactly the rows they are told, bit by bit, as the torch ones do."""

from collections.abc import Sequence

import pytest
import torch
import triton

from chatpage_kernels import reference, triton_cache

pytestmark = pytest.mark.usefixtures("one_thread")

DEVICE = "cpu" if triton.knobs.runtime.interpret else "cuda"
DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]


def _normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)


def _bytes(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor.contiguous().view(torch.uint8) for tensor in tensors]


def _assert_same_bytes(actual: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> None:
    assert all(torch.equal(a, e) for a, e in zip(_bytes(actual), _bytes(expected), strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_heads", "head_dim", "value_dim"), [(3, 64, 64), (1, 80, 72), (2, 5, 3)])
def test_writes_equal_those_of_torch(dtype: torch.dtype, num_heads: int, head_dim: int, value_dim: int) -> None:
    rows_dtype = torch.float32 if dtype.itemsize == 1 else dtype
    key, value = (
        _normal(5, num_heads, head_dim, dtype=rows_dtype),
        _normal(5, num_heads, value_dim, dtype=rows_dtype, seed=1) * 500,
    )
    slots = torch.tensor([7, -1, 0, 19, 8], device=DEVICE)
    caches = [_normal(5, 4, num_heads, width, dtype=dtype, seed=width) for width in (head_dim, value_dim)]
    expected = [cache.clone() for cache in caches]
    reference.write_kv(key, value, expected[0], expected[1], slots)
    triton_cache.write_kv(key, value, caches[0], caches[1], slots)
    _assert_same_bytes(caches, expected)


def test_rows_and_caches_may_be_strided() -> None:
    """Keys come as slices of a packed projection, or with heads before tokens; caches may lie side by side."""
    packed = _normal(4, 3, 2, 16)
    by_head = _normal(2, 4, 16).transpose(0, 1)
    both = _normal(5, 2, 4, 2, 16)
    expected = [both[:, 0].clone(), both[:, 1].clone()]
    slots = torch.tensor([3, 9, 11, 2], device=DEVICE)
    reference.write_kv(packed[:, 1], by_head, expected[0], expected[1], slots)
    triton_cache.write_kv(packed[:, 1], by_head, both[:, 0], both[:, 1], slots)
    _assert_same_bytes([both[:, 0], both[:, 1]], expected)


def test_a_step_without_tokens_writes_nothing() -> None:
    caches = [_normal(2, 4, 1, 8), _normal(2, 4, 1, 8)]
    expected = [cache.clone() for cache in caches]
    no_rows, no_slots = _normal(0, 1, 8), torch.empty(0, dtype=torch.int64, device=DEVICE)
    triton_cache.write_kv(no_rows, no_rows, caches[0], caches[1], no_slots)
    triton_cache.copy_blocks(caches, torch.empty(0, 3, dtype=torch.int64, device=DEVICE))
    triton_cache.copy_blocks([], torch.tensor([[0, 1, 1]], device=DEVICE))
    _assert_same_bytes(caches, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("widths", [(64, 64), (24, 40), (5, 3)])
def test_copies_equal_those_of_torch(dtype: torch.dtype, widths: tuple[int, int]) -> None:
    caches = [_normal(6, 16, 3, width, dtype=dtype, seed=layer) for layer in range(3) for width in widths]
    expected = [cache.clone() for cache in caches]
    copies = torch.tensor([[1, 5, 3], [3, 0, 1], [4, 2, 16], [1, 4, 0]], device=DEVICE)
    reference.copy_blocks(expected, copies)
    triton_cache.copy_blocks(caches, copies)
    _assert_same_bytes(caches, expected)


def test_caches_of_two_dtypes_are_copied_together() -> None:
    caches = [_normal(4, 8, 1, 6, dtype=torch.float32), _normal(4, 8, 1, 6).to(torch.float8_e5m2)]
    expected = [cache.clone() for cache in caches]
    copies = torch.tensor([[0, 3, 5]], device=DEVICE)
    reference.copy_blocks(expected, copies)
    triton_cache.copy_blocks(caches, copies)
    _assert_same_bytes(caches, expected)


def test_caches_that_moved_are_found_again() -> None:
    """The table of addresses is kept between calls: another pool, even of the same shape, must not hit the old one."""
    copies = torch.tensor([[0, 1, 2]], device=DEVICE)
    pools = [[_normal(2, 4, 1, 8, seed=seed)] for seed in range(3)]
    for pool in [*pools, *pools]:
        triton_cache.copy_blocks(pool, copies)
        assert torch.equal(pool[0][1, :2], pool[0][0, :2])
        pool[0][1] = 0


def test_pools_reach_past_32_bit_offsets() -> None:
    """Blocks more than 2**31 elements into the pool, of which only those that are written are ever touched."""
    num_blocks = 2**31 // (16 * 125) + 3
    pool = torch.empty(num_blocks, 16, 1, 125, dtype=torch.uint8, device=DEVICE).view(torch.float8_e5m2)
    row = _normal(1, 1, 125)
    far = num_blocks - 1
    triton_cache.write_kv(row, row, pool, pool, torch.tensor([far * 16 + 3], device=DEVICE))
    pool.view(torch.uint8)[far, :3] = 1
    triton_cache.copy_blocks([pool], torch.tensor([[far, far - 1, 4]], device=DEVICE))
    expected = row.to(torch.float8_e5m2)[0]
    assert torch.equal(pool[far, 3].view(torch.uint8), expected.view(torch.uint8))
    assert torch.equal(pool[far - 1, 3].view(torch.uint8), expected.view(torch.uint8))


def test_a_cache_the_kernels_cannot_walk_is_refused() -> None:
    spread = _normal(2, 4, 1, 16)[..., ::2]
    with pytest.raises(ValueError, match="last stride"):
        triton_cache.write_kv(_normal(1, 1, 8), _normal(1, 1, 8), spread, spread, torch.tensor([0], device=DEVICE))
    with pytest.raises(ValueError, match="contiguous"):
        triton_cache.copy_blocks([spread], torch.tensor([[0, 1, 1]], device=DEVICE))
