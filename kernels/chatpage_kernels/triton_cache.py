"""The cache writes in Triton: a step's keys and values into their slots, and copy-on-write for all layers in one launch.

Invariant: both move bits and never numbers, so they work for every dtype alike; both write exactly the rows they are told.
"""

# ruff: noqa: PLR0917 - a kernel has flat arguments
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from collections.abc import Sequence
from functools import lru_cache

import torch
import triton
import triton.language as tl

from chatpage_kernels.checks import FLOAT8, check_copies, check_write

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
_COPY_AT_ONCE = 1024


@triton.jit
def write_kernel(
    key, value, key_cache, value_cache, slots,
    s_kt, s_kh, s_vt, s_vh, s_kcb, s_kct, s_kch, s_vcb, s_vct, s_vch,
    BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr, KEY_WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr,
):  # fmt: skip
    """Write the keys and values of one token; grid (tokens,). Widths are those of all heads, padded."""
    t = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + t)
    if slot >= 0:
        block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
        i = tl.arange(0, KEY_WIDTH)
        h, d, is_key = (i // HEAD_DIM).to(tl.int64), i % HEAD_DIM, i < NUM_KV_HEADS * HEAD_DIM
        k = tl.load(key + t * s_kt + h * s_kh + d, mask=is_key)
        tl.store(key_cache + block * s_kcb + offset * s_kct + h * s_kch + d, k, mask=is_key)
        j = tl.arange(0, VALUE_WIDTH)
        h, e, is_value = (j // VALUE_DIM).to(tl.int64), j % VALUE_DIM, j < NUM_KV_HEADS * VALUE_DIM
        v = tl.load(value + t * s_vt + h * s_vh + e, mask=is_value)
        tl.store(value_cache + block * s_vcb + offset * s_vct + h * s_vch + e, v, mask=is_value)


@triton.jit
def copy_kernel(
    addresses, row_words, copies, BLOCK_SIZE: tl.constexpr, AT_ONCE: tl.constexpr, WORD: tl.constexpr, ALIGN: tl.constexpr
):
    """Copy the first rows of one block of one cache; grid (copies, caches, pieces of the largest block).

    `addresses` and `row_words` have the start of each cache and the length of its rows in words, multiples of ALIGN.
    """
    copy = copies + tl.program_id(0) * 3
    source, destination, num_rows = tl.load(copy), tl.load(copy + 1), tl.load(copy + 2)
    row = tl.load(row_words + tl.program_id(1))
    first = tl.multiple_of(tl.load(addresses + tl.program_id(1)).to(tl.pointer_type(WORD)), 16)
    end = tl.multiple_of(num_rows * row, ALIGN)
    block = tl.multiple_of(BLOCK_SIZE * row, ALIGN)
    i = tl.program_id(2).to(tl.int64) * AT_ONCE + tl.arange(0, AT_ONCE)
    words = tl.load(first + source * block + i, mask=i < end)
    tl.store(first + destination * block + i, words, mask=i < end)


def write_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """Write one row of keys and values per token into its slot; arguments as `reference.write_kv`.

    Raises:
        ValueError: Shapes, dtypes, devices or strides do not fit together.
    """
    check_write(key, value, key_cache, value_cache, slot_mapping)
    if key_cache.stride(3) != 1 or value_cache.stride(3) != 1:
        raise ValueError(f"the last stride of a cache must be 1: {key_cache.stride()}, {value_cache.stride()}")
    keys, values = _as_bits(key, key_cache), _as_bits(value, value_cache)
    key_bits, value_bits = _bits(key_cache), _bits(value_cache)
    num_kv_heads, head_dim, value_dim = *key.shape[1:], value.shape[2]
    if key.shape[0]:
        write_kernel[(key.shape[0],)](
            keys, values, key_bits, value_bits, slot_mapping,
            *keys.stride()[:2], *values.stride()[:2], *key_bits.stride()[:3], *value_bits.stride()[:3],
            BLOCK_SIZE=key_cache.shape[1], HEAD_DIM=head_dim, VALUE_DIM=value_dim, NUM_KV_HEADS=num_kv_heads,
            KEY_WIDTH=triton.next_power_of_2(num_kv_heads * head_dim),
            VALUE_WIDTH=triton.next_power_of_2(num_kv_heads * value_dim),
            num_warps=4,
        )  # fmt: skip


def copy_blocks(caches: Sequence[torch.Tensor], copies: torch.Tensor) -> None:
    """Copy the first rows of blocks to other blocks in all caches, in one launch; arguments as `reference.copy_blocks`.

    Raises:
        ValueError: Shapes, dtypes or devices do not fit together, or a cache is not contiguous.
    """
    check_copies(caches, copies)
    if not caches or not copies.shape[0]:
        return
    if not all(cache.is_contiguous() and cache.device == copies.device for cache in caches):
        raise ValueError(f"caches must be contiguous, and on the device of the copies, {copies.device}")
    block_size = caches[0].shape[1]
    row_bytes = tuple(cache[0, 0].nbytes for cache in caches)
    word = next(size for size in (4, 2, 1) if all(size_of_row % size == 0 for size_of_row in row_bytes))
    row_words = tuple(size // word for size in row_bytes)
    addresses, lengths = _device_table(tuple(cache.data_ptr() for cache in caches), row_words, copies.device)
    is_aligned = all(size % 4 == 0 for size in row_words)
    pieces = triton.cdiv(max(row_words) * block_size, _COPY_AT_ONCE)
    copy_kernel[copies.shape[0], len(caches), pieces](
        addresses, lengths, copies.contiguous(),
        BLOCK_SIZE=block_size, AT_ONCE=_COPY_AT_ONCE, WORD=_WORDS[word], ALIGN=4 if is_aligned else 1,
        num_warps=4,
    )  # fmt: skip


_WORDS = {4: tl.int32, 2: tl.int16, 1: tl.uint8}


@lru_cache(maxsize=8)
def _device_table(
    addresses: tuple[int, ...], row_words: tuple[int, ...], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what the copy kernel must know of the caches; an engine's caches stay where they are, so it is made once."""
    return torch.tensor(addresses, device=device), torch.tensor(row_words, device=device)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(_INTEGERS[tensor.element_size()])


def _as_bits(rows: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
    """Cast rows to the cache's dtype (8-bit floats saturate) and view them as integers with a last stride of 1."""
    if cache.dtype in FLOAT8:
        limit = torch.finfo(cache.dtype).max
        rows = rows.clamp(-limit, limit).to(cache.dtype)
    return _bits(rows if rows.stride(2) == 1 else rows.contiguous())
