"""The C++ cache writes move exactly the rows they are told, bit by bit, in either layout of the blocks."""

from collections.abc import Sequence

import pytest
import torch

from chatpage_kernels import reference
from chatpage_kernels.cpu.kernels import is_packed
from tests.kernels.cpu_libraries import best_kernels

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
WIDTHS = [(64, 64), (24, 40), (2, 1)]


def _normal(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _pair(num_blocks: int, block_size: int, widths: tuple[int, int], dtype: torch.dtype, seed: int = 0) -> list[torch.Tensor]:
    return [_normal(num_blocks, block_size, 3, width, dtype=dtype, seed=seed + i) for i, width in enumerate(widths)]


def _assert_same_bytes(actual: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> None:
    assert all(torch.equal(a.view(torch.uint8), e.view(torch.uint8)) for a, e in zip(actual, expected, strict=True))


def _convert(caches: Sequence[torch.Tensor], *, to_packed: bool) -> None:
    for key_cache, value_cache in zip(caches[::2], caches[1::2], strict=True):
        best_kernels().convert_cache(key_cache, value_cache, to_packed=to_packed)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", [7, 8, 16, 48])
@pytest.mark.parametrize("widths", WIDTHS)
def test_a_conversion_and_its_reverse_change_no_bit(widths: tuple[int, int], block_size: int, dtype: torch.dtype) -> None:
    """A cache filled by torch while the kernels were compiled goes on under them; NaN in it stays where and what it was."""
    caches = _pair(5, block_size, widths, dtype)
    caches[0][1], caches[1][2] = torch.nan, torch.nan
    original = [cache.clone() for cache in caches]
    _convert(caches, to_packed=True)
    is_rearranged = not torch.equal(caches[0].view(torch.uint8), original[0].view(torch.uint8))
    assert is_rearranged == is_packed(caches[0])
    _convert(caches, to_packed=False)
    _assert_same_bytes(caches, original)


def test_only_the_given_blocks_are_converted() -> None:
    """An engine converts the blocks it has touched: writing to the others would make the machine give them memory."""
    caches = _pair(6, 16, (64, 64), torch.bfloat16)
    original = [cache.clone() for cache in caches]
    _convert([cache[:4] for cache in caches], to_packed=True)
    _assert_same_bytes([cache[4:] for cache in caches], [cache[4:] for cache in original])
    assert not torch.equal(caches[0][3], original[0][3])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", [7, 8, 16, 48])
@pytest.mark.parametrize("widths", WIDTHS)
def test_tokens_go_to_their_slots_and_padding_goes_nowhere(
    widths: tuple[int, int], block_size: int, dtype: torch.dtype
) -> None:
    caches = _pair(4, block_size, widths, dtype)
    expected = [cache.clone() for cache in caches]
    key, value = (_normal(6, 3, width, dtype=dtype, seed=9) for width in widths)
    slots = torch.tensor([6, -1, 0, 4 * block_size - 1, block_size, 5])
    reference.write_kv(key, value, expected[0], expected[1], slots)
    _convert(caches, to_packed=True)
    best_kernels().write_kv(key, value, caches[0], caches[1], slots)
    _convert(caches, to_packed=False)
    _assert_same_bytes(caches, expected)


def test_many_tokens_are_written_by_all_threads() -> None:
    caches = _pair(20, 16, (64, 64), torch.bfloat16)
    expected = [cache.clone() for cache in caches]
    slots = torch.randperm(320, generator=torch.Generator().manual_seed(0))[:301]
    key, value = (_normal(301, 3, 64, dtype=torch.bfloat16, seed=seed) for seed in (7, 8))
    reference.write_kv(key, value, expected[0], expected[1], slots)
    _convert(caches, to_packed=True)
    best_kernels().write_kv(key, value, caches[0], caches[1], slots)
    _convert(caches, to_packed=False)
    _assert_same_bytes(caches, expected)


def test_rows_may_be_strided() -> None:
    """Keys come as slices of a packed projection, values with heads before tokens, or with every other element."""
    caches = _pair(2, 16, (64, 64), torch.bfloat16)
    expected = [cache.clone() for cache in caches]
    projection = _normal(4, 9, 64, dtype=torch.bfloat16)
    by_head = _normal(3, 4, 64, dtype=torch.bfloat16).transpose(0, 1)
    apart = _normal(4, 3, 128, dtype=torch.bfloat16)[..., ::2]
    slots = torch.tensor([3, 31, 17, 2])
    _convert(caches, to_packed=True)
    for key, value in ((projection[:, 2:5], by_head), (apart, projection[:, 6:])):
        reference.write_kv(key, value, expected[0], expected[1], slots)
        best_kernels().write_kv(key, value, caches[0], caches[1], slots)
    _convert(caches, to_packed=False)
    _assert_same_bytes(caches, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", [7, 8, 16, 48])
@pytest.mark.parametrize("widths", WIDTHS)
def test_a_copy_moves_the_given_rows_of_every_cache_and_no_other(
    widths: tuple[int, int], block_size: int, dtype: torch.dtype
) -> None:
    """Copying a whole block would overwrite rows that the destination's owner has written since the copy was ordered."""
    caches = [cache for layer in range(3) for cache in _pair(6, block_size, widths, dtype, seed=10 * layer)]
    expected = [cache.clone() for cache in caches]
    copies = torch.tensor([[1, 5, 3], [3, 0, 1], [4, 2, block_size], [1, 4, 0]])
    reference.copy_blocks(expected, copies)
    _convert(caches, to_packed=True)
    best_kernels().copy_blocks(caches, copies)
    _convert(caches, to_packed=False)
    _assert_same_bytes(caches, expected)


@pytest.mark.parametrize("num_rows", range(17))
def test_every_number_of_rows_can_be_copied(num_rows: int) -> None:
    caches = _pair(2, 16, (64, 64), torch.bfloat16)
    expected = [cache.clone() for cache in caches]
    copies = torch.tensor([[1, 0, num_rows]])
    reference.copy_blocks(expected, copies)
    _convert(caches, to_packed=True)
    best_kernels().copy_blocks(caches, copies)
    _convert(caches, to_packed=False)
    _assert_same_bytes(caches, expected)


def test_layers_of_several_widths_are_copied_together() -> None:
    caches = [*_pair(4, 16, (64, 64), torch.bfloat16), *_pair(4, 16, (24, 40), torch.bfloat16, seed=3)]
    caches += _pair(4, 16, (64, 64), torch.bfloat16, seed=5)
    expected = [cache.clone() for cache in caches]
    copies = torch.tensor([[0, 3, 5], [1, 2, 16]])
    reference.copy_blocks(expected, copies)
    _convert(caches, to_packed=True)
    best_kernels().copy_blocks(caches, copies)
    _convert(caches, to_packed=False)
    _assert_same_bytes(caches, expected)


def test_nothing_to_do_does_nothing() -> None:
    caches = _pair(2, 16, (64, 64), torch.bfloat16)
    original = [cache.clone() for cache in caches]
    kernels, no_rows = best_kernels(), torch.empty(0, 3, 64, dtype=torch.bfloat16)
    kernels.write_kv(no_rows, no_rows, caches[0], caches[1], torch.empty(0, dtype=torch.int64))
    kernels.copy_blocks(caches, torch.empty(0, 3, dtype=torch.int64))
    kernels.copy_blocks([], torch.tensor([[0, 1, 1]]))
    kernels.convert_cache(caches[0][:0], caches[1][:0])
    _assert_same_bytes(caches, original)


def test_a_mistake_is_an_error_with_its_numbers() -> None:
    kernels, caches = best_kernels(), _pair(2, 16, (64, 64), torch.bfloat16)
    with pytest.raises(ValueError, match="in turn"):
        kernels.copy_blocks(caches[:1], torch.tensor([[0, 1, 1]]))
    row = _normal(1, 3, 64, dtype=torch.bfloat16)
    apart = torch.zeros(2, 16, 3, 128, dtype=torch.bfloat16)[..., ::2]
    with pytest.raises(ValueError, match="not contiguous"):
        kernels.write_kv(row, row, apart, caches[1], torch.tensor([0]))
    with pytest.raises(ValueError, match="2 slots"):
        kernels.write_kv(row, row, caches[0], caches[1], torch.tensor([0, 1]))


def test_nothing_outside_the_cache_is_written() -> None:
    kernels, caches = best_kernels(), _pair(2, 16, (64, 64), torch.bfloat16)
    original = [cache.clone() for cache in caches]
    rows = _normal(2, 3, 64, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="outside the cache"):
        kernels.write_kv(rows, rows, caches[0], caches[1], torch.tensor([0, 32]))
    for copy in ([0, 2, 1], [-1, 0, 1], [0, 1, 17], [0, 1, -1]):
        with pytest.raises(ValueError, match="outside the cache"):
            kernels.copy_blocks(caches, torch.tensor([[0, 1, 1], copy]))
    _assert_same_bytes(caches, original)
