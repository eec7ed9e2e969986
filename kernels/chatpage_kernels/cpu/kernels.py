"""Launchers of the C++ kernels: the functions of `reference` over a loaded library.

Invariant: the layout of a cache follows from its shape and dtype alone (`is_packed`), so every call agrees on it and nothing
has to remember it. A step's plan is prepared once and used by every layer: a call costs microseconds.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from chatpage_kernels.checks import check_attention, check_copies, check_write
from chatpage_kernels.cpu.library import AttentionCall, CacheShape, Library, WriteCall
from chatpage_kernels.plan import AttentionPlan, IntArray

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # DType of abi.h

_GROUP = 16  # kGroup of tile.h: tokens that one load of packed keys holds
_OUT_OF_MEMORY, _OUTSIDE_CACHE = 1, 3  # Status of abi.h
_COPIES_PER_TEAM = 16  # copies of a block in one cache that make up for waking threads
_FEW_ROWS = 24  # kFewRows of tile.h
_MAX_HEADS = 8  # kMaxHeads of abi.h
_MAX_PREPARED = 8  # a step has one plan for each kind of layer
_WORK_PER_THREAD = 2048  # keys x rows x KV heads that make up for waking a thread


def is_packed(cache: torch.Tensor) -> bool:
    """Whether the blocks of a cache are in the packed layout of layout.h: whole groups of tokens, bf16 or fp32."""
    return cache.shape[1] % _GROUP == 0 and cache.dtype in (torch.bfloat16, torch.float32)


def why_unsupported(dtype: torch.dtype, kv_dtype: torch.dtype, head_dim: int) -> str:
    """Say why the kernels cannot serve a model; empty if they can."""
    if dtype not in DTYPES or kv_dtype != dtype:
        return f"the C++ kernels read fp32, bf16 and fp16 caches of the model's own type, not {kv_dtype} for {dtype}"
    if head_dim % 2:
        return f"the C++ kernels need an even head size, not {head_dim}"
    return ""


@dataclass(frozen=True, slots=True)
class PreparedAttention:
    """A plan with what its calls have in common; it keeps alive what the call points at."""

    plan: AttentionPlan
    units: torch.Tensor
    call: AttentionCall
    useful_threads: int


class CpuKernels:
    """Paged attention and cache writes of one library."""

    def __init__(self, library: Library) -> None:
        self.library = library
        self._prepared: dict[tuple[object, ...], PreparedAttention] = {}
        self._writes: dict[tuple[object, ...], WriteCall] = {}

    def paged_attention(
        self,
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
        """Attend from every query row to the keys its plan gives it; see `reference.paged_attention`.

        Raises:
            ValueError: Shapes, dtypes or the plan do not fit together, or scales of an 8-bit cache are given.
            MemoryError: There is no memory for the partial results.
        """
        if k_scale is not None or v_scale is not None:
            raise ValueError("k_scale and v_scale belong to 8-bit caches, which the C++ kernels do not read")
        if not scale > 0:
            raise ValueError(f"scale is {scale}; it must be above 0")
        if query.stride(2) != 1:
            query = query.contiguous()
        layout = (query.shape, query.stride(), key_cache.shape, value_cache.shape)
        key = (id(plan), layout, query.dtype, key_cache.dtype, value_cache.dtype, sinks is None)
        ready = self._prepared.get(key)
        if ready is None:
            check_attention(query, key_cache, value_cache, plan, sinks=sinks, k_scale=None, v_scale=None)
            _make_room(self._prepared)
            ready = self._prepared[key] = _prepare(query, key_cache, value_cache, plan)
        _check_memory(key_cache, value_cache)
        call = ready.call
        out = query.new_empty(query.shape[0], query.shape[1], value_cache.shape[3])
        if sinks is not None:
            sinks = sinks.to(torch.float32).contiguous()
            call.sinks = sinks.data_ptr()
        call.query, call.out = query.data_ptr(), out.data_ptr()
        call.key_cache, call.value_cache = key_cache.data_ptr(), value_cache.data_ptr()
        call.scale, call.softcap = scale, softcap
        call.num_threads = min(torch.get_num_threads(), ready.useful_threads)
        _raise_if_failed(self.library.attention(call))
        return out

    def prepare(
        self,
        query: torch.Tensor,
        out: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        plan: AttentionPlan,
        *,
        scale: float,
    ) -> PreparedAttention:
        """Return the call of a plan over buffers that stay where they are, for `CpuLayers.run`; keep it and them alive.

        Args:
            query: See `paged_attention`.
            out: Of query's shape and dtype, contiguous; written.
            key_cache: Of one layer; the others are alike.
            value_cache: Likewise.
            plan: Of a step.
            scale: Factor of the scores.

        Raises:
            ValueError: Shapes, dtypes or the plan do not fit together.
        """
        check_attention(query, key_cache, value_cache, plan, sinks=None, k_scale=None, v_scale=None)
        if out.shape != query.shape or out.dtype != query.dtype or not out.is_contiguous() or query.stride(2) != 1:
            raise ValueError(f"out is {tuple(out.shape)} {out.dtype}; it must be contiguous {query.dtype} {tuple(query.shape)}")
        ready = _prepare(query, key_cache, value_cache, plan)
        call = ready.call
        call.query, call.out, call.scale = query.data_ptr(), out.data_ptr(), scale
        call.key_cache, call.value_cache = key_cache.data_ptr(), value_cache.data_ptr()
        call.num_threads = min(torch.get_num_threads(), ready.useful_threads)
        return ready

    def write_kv(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Write one row of keys and values per token into its slot; see `reference.write_kv`."""
        if key.stride(2) != 1 or value.stride(2) != 1:
            key, value = key.contiguous(), value.contiguous()
        layout = (key.shape, key.stride(), value.shape, value.stride(), key_cache.shape, value_cache.shape, slot_mapping.shape)
        kind = (layout, key.dtype, value.dtype, key_cache.dtype, value_cache.dtype, slot_mapping.dtype)
        call = self._writes.get(kind)
        if call is None:
            check_write(key, value, key_cache, value_cache, slot_mapping)
            _make_room(self._writes)
            call = self._writes[kind] = _prepare_write(key, value, key_cache, value_cache)
        _check_memory(key_cache, value_cache, slot_mapping)
        call.key, call.value, call.slots = key.data_ptr(), value.data_ptr(), slot_mapping.data_ptr()
        call.key_cache, call.value_cache = key_cache.data_ptr(), value_cache.data_ptr()
        call.num_threads = torch.get_num_threads()
        _raise_if_failed(self.library.write_kv(call))

    def copy_blocks(self, caches: Sequence[torch.Tensor], copies: torch.Tensor) -> None:
        """Copy the first rows of blocks to other blocks, in all caches; see `reference.copy_blocks`.

        Args:
            caches: The key and the value cache of each layer in turn: they are packed differently.
            copies: int64 [n, 3] of (source block, destination block, number of rows).
        """
        check_copies(caches, copies)
        if len(caches) % 2:
            raise ValueError(f"{len(caches)} caches were given; they must be the key and the value cache of each layer in turn")
        _check_memory(*caches)
        copies = copies.contiguous()
        by_shape: dict[tuple[object, ...], list[torch.Tensor]] = {}
        for key_cache, value_cache in zip(caches[::2], caches[1::2], strict=True):
            pair = (key_cache, value_cache)
            by_shape.setdefault(tuple((cache.shape, cache.dtype) for cache in pair), []).extend(pair)
        for alike in by_shape.values():
            pointers = (ctypes.c_void_p * len(alike))(*(cache.data_ptr() for cache in alike))
            shape = cache_shape(alike[0], alike[1])
            threads = torch.get_num_threads() if len(alike) * len(copies) >= _COPIES_PER_TEAM else 1
            arguments = (pointers, len(alike) // 2, copies.data_ptr(), len(copies), shape, threads)
            _raise_if_failed(self.library.copy_blocks(*arguments))

    def convert_cache(self, key_cache: torch.Tensor, value_cache: torch.Tensor, *, to_packed: bool = True) -> None:
        """Rearrange the blocks of two caches in place, from the layout of the reference to that of these kernels or back.

        Args:
            key_cache: [num_blocks, block_size, num_kv_heads, head_dim], or a slice of its blocks.
            value_cache: [num_blocks, block_size, num_kv_heads, value_dim], likewise.
            to_packed: False leads back to the layout of the reference, in which caches can be kept or sent elsewhere.

        Raises:
            MemoryError: There is no memory for one block of scratch per thread; blocks may then be in either layout.
        """
        _check_memory(key_cache, value_cache)
        if not is_packed(key_cache):
            return
        shape = cache_shape(key_cache, value_cache)
        for is_values, cache in enumerate((key_cache, value_cache)):
            threads = torch.get_num_threads()
            _raise_if_failed(self.library.convert(cache.data_ptr(), is_values, to_packed, shape, threads))


def _prepare(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    plan: AttentionPlan,
) -> PreparedAttention:
    _check_types(query, key_cache, value_cache)
    last_block = int(plan.block_tables.max()) if plan.block_tables.numel() else -1
    if last_block >= key_cache.shape[0]:
        raise ValueError(f"the block tables name block {last_block}; the cache has {key_cache.shape[0]} blocks")
    num_items = int(plan.num_items)
    items = plan.items[:num_items].numpy()
    work = (items[:, 4] - items[:, 3]) * np.maximum(items[:, 1] * plan.group_size, 4)
    units = _units(items[:, 1] * plan.group_size, work, key_cache.shape[2])
    call = AttentionCall(
        items=plan.items.data_ptr(),
        units=units.data_ptr(),
        row_index=plan.row_index.data_ptr(),
        row_positions=plan.row_positions.data_ptr(),
        block_tables=plan.block_tables.data_ptr(),
        merge_rows=plan.merge_rows.data_ptr(),
        merge_indptr=plan.merge_indptr.data_ptr(),
        merge_parts=plan.merge_parts.data_ptr(),
        num_units=len(units),
        table_stride=plan.block_tables.stride(0),
        num_merges=int(plan.num_merges),
        num_parts=plan.num_parts,
        window=plan.window,
        num_query_heads=query.shape[1],
        query_row_stride=query.stride(0),
        query_head_stride=query.stride(1),
        cache=cache_shape(key_cache, value_cache),
    )
    useful_threads = 1 + int(work.sum()) * key_cache.shape[2] // _WORK_PER_THREAD
    return PreparedAttention(plan, units, call, useful_threads)


def _units(num_rows: IntArray, work: IntArray, num_kv_heads: int) -> torch.Tensor:
    """Cut items into units of KV heads, costliest first: int32 [n, 3] of item, first head, end of the heads.

    An item of few rows is bound by memory and takes several heads at once, as long as every thread gets a unit; one of many
    rows is bound by arithmetic, and single heads spread better.
    """
    together = min(num_kv_heads, _MAX_HEADS, max(1, len(work) * num_kv_heads // torch.get_num_threads()))
    heads = np.where(num_rows <= _FEW_ROWS, together, 1)
    order = np.argsort(-work * heads, kind="stable")
    heads = heads[order]
    counts = -(-num_kv_heads // heads)
    ends = np.cumsum(counts)
    place = np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - counts, counts)
    step = np.repeat(heads, counts)
    columns = (np.repeat(order, counts), place * step, np.minimum(place * step + step, num_kv_heads))
    return torch.from_numpy(np.stack(columns, 1).astype(np.int32))


def _prepare_write(key: torch.Tensor, value: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor) -> WriteCall:
    _check_types(key, key_cache, value_cache)
    return WriteCall(
        key_row_stride=key.stride(0),
        key_head_stride=key.stride(1),
        value_row_stride=value.stride(0),
        value_head_stride=value.stride(1),
        num_tokens=key.shape[0],
        cache=cache_shape(key_cache, value_cache),
    )


def _check_types(rows: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor) -> None:
    if not rows.is_cpu or rows.dtype not in DTYPES or key_cache.dtype != rows.dtype or value_cache.dtype != rows.dtype:
        raise ValueError(
            f"the C++ kernels need fp32, bf16 or fp16 tensors of one type on the CPU, not {rows.dtype} on {rows.device} "
            f"with caches of {key_cache.dtype} and {value_cache.dtype}"
        )


def _make_room(prepared: dict[tuple[object, ...], Any]) -> None:
    """Forget the oldest entries of a dictionary of prepared calls."""
    while len(prepared) >= _MAX_PREPARED:
        prepared.pop(next(iter(prepared)))


def cache_shape(key_cache: torch.Tensor, value_cache: torch.Tensor) -> CacheShape:
    """Return what the C++ side must know about the caches of a layer."""
    num_blocks, block_size, num_kv_heads, head_dim = key_cache.shape
    dtype = DTYPES[key_cache.dtype]
    return CacheShape(block_size, num_kv_heads, head_dim, value_cache.shape[3], dtype, is_packed(key_cache), num_blocks)


def _check_memory(*tensors: torch.Tensor) -> None:
    for tensor in tensors:
        if not tensor.is_contiguous():
            raise ValueError(f"a cache or slot mapping {tuple(tensor.shape)} is not contiguous: strides {tensor.stride()}")


def _raise_if_failed(status: int) -> None:
    if status == _OUT_OF_MEMORY:
        raise MemoryError("the C++ kernels could not get memory for partial results")
    if status == _OUTSIDE_CACHE:
        raise ValueError("a slot, a block or a number of rows lies outside the cache; nothing was written")
    if status:
        raise RuntimeError(f"the C++ kernels refused a call with status {status}")
