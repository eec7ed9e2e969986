"""Attention and cache writes in C++ for AVX2 and AVX-512, compiled on first use.

Invariant: nothing here waits for a compiler; until the kernels are ready, `backend` returns None and torch computes.
"""

from functools import cache

import torch

from chatpage_kernels.backend import Backend
from chatpage_kernels.cpu import build
from chatpage_kernels.cpu.kernels import CpuKernels, why_unsupported
from chatpage_kernels.cpu.library import Library
from chatpage_kernels.plan import Tile

__all__ = ["backend", "tiles", "why_unsupported"]


def backend(dtype: torch.dtype, *, head_dim: int, kv_dtype: torch.dtype) -> Backend | None:
    """Return the backend for a model, or None if the kernels are not ready or cannot serve it.

    Args:
        dtype: Of queries and outputs.
        head_dim: Width of a key.
        kv_dtype: Of the caches.
    """
    library = build.library()
    if library is None or why_unsupported(dtype, kv_dtype, head_dim):
        return None
    kernels = _kernels(library)
    decode, prefill = tiles(torch.get_num_threads())
    return Backend(
        name="cpp",
        reason=build.describe(),
        tile=decode,
        prefill_tile=prefill,
        paged_attention=kernels.paged_attention,
        write_kv=kernels.write_kv,
        copy_blocks=kernels.copy_blocks,
        convert_cache=kernels.convert_cache,
    )


def tiles(num_threads: int) -> tuple[Tile, Tile]:
    """Return the item sizes for decode and for prefill."""
    # Threads take units (item x KV head) as they get free, and a few each even out; more would cost more merges.
    tile = Tile(max_rows=96, kv_tokens=64, num_workers=num_threads * 3, split_tokens=256, item_cost=16, merge_cost=4)
    return tile, tile


@cache
def _kernels(library: Library) -> CpuKernels:
    return CpuKernels(library)
