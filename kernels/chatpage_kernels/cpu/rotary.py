"""Launcher of what lies between the QKV projection and attention in C++ (rotary.cpp), over a loaded library.

Invariant: the struct here and in rotary.h are the same, byte for byte; a library with another size is refused.
"""

from ctypes import POINTER, Structure, byref, c_float, c_int32, c_int64, c_void_p

import torch

from chatpage_kernels.cpu.kernels import DTYPES, cache_shape
from chatpage_kernels.cpu.library import CacheShape, Library

_MAX_HEAD_DIM = 1024  # kMaxHeadDim of rotary.cpp
_OUTSIDE_CACHE = 3  # Status of abi.h


class RotaryCall(Structure):
    """Arguments of `chatpage_rotary`; see rotary.h."""

    _fields_ = (
        *((name, c_void_p) for name in ("qkv", "query", "key_cache", "value_cache", "slots", "positions", "table")),
        *((name, c_void_p) for name in ("query_norm", "key_norm")),
        ("qkv_row_stride", c_int64),
        *((name, c_int32) for name in ("num_tokens", "num_query_heads", "num_positions", "rotary_dim")),
        *((name, c_int32) for name in ("qkv_dtype", "num_threads")),
        ("norm_epsilon", c_float),
        ("cache", CacheShape),
    )


class CpuRotary:
    """Norms of heads, rotation by position and the write to the KV cache, of one library."""

    def __init__(self, library: Library) -> None:
        """Bind the function of a library.

        Raises:
            OSError: The library was built from other sources.
        """
        library.check("chatpage_rotary_abi", RotaryCall)
        self._rotary = library.bind("chatpage_rotary", POINTER(RotaryCall))

    def prepare(
        self,
        qkv: torch.Tensor,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        *,
        slot_mapping: torch.Tensor,
        positions: torch.Tensor,
        table: torch.Tensor,
        query_norm: torch.Tensor | None = None,
        key_norm: torch.Tensor | None = None,
        norm_epsilon: float = 1e-5,
    ) -> RotaryCall:
        """Return the call for `run`: rotated queries go to `query`, rotated keys and the values to their slots.

        The call holds addresses only: keep the tensors alive. `num_tokens` may be lowered before a run.

        Args:
            qkv: fp32 or bf16 [num_tokens, (num_q_heads + 2 * num_kv_heads) * head_dim], rows may be strided.
            query: [num_tokens, num_q_heads, head_dim] of the caches' dtype, contiguous; written.
            key_cache: [num_blocks, block_size, num_kv_heads, head_dim] fp32, bf16 or fp16, in the layout of the C++ kernels.
            value_cache: Of key_cache's shape and dtype.
            slot_mapping: int64 [num_tokens]; slot = block * block_size + offset, below 0: the token is not written.
            positions: int64 [num_tokens], rows of `table`.
            table: From `rotary_table`.
            query_norm: fp32 [head_dim]: each query head goes through RMSNorm first.
            key_norm: Likewise for keys.
            norm_epsilon: Of both norms.

        Raises:
            ValueError: The tensors do not fit together.
        """
        _check_rows(qkv, query, key_cache, value_cache)
        _check_positions(query, slot_mapping, positions, table)
        _check_norms(query.shape[2], query_norm, key_norm)
        return RotaryCall(
            qkv.data_ptr(),
            query.data_ptr(),
            key_cache.data_ptr(),
            value_cache.data_ptr(),
            slot_mapping.data_ptr(),
            positions.data_ptr(),
            table.data_ptr(),
            None if query_norm is None else query_norm.data_ptr(),
            None if key_norm is None else key_norm.data_ptr(),
            qkv.stride(0),
            qkv.shape[0],
            query.shape[1],
            *table.shape,
            DTYPES[qkv.dtype],
            torch.get_num_threads(),
            norm_epsilon,
            cache_shape(key_cache, value_cache),
        )

    def run(self, call: RotaryCall) -> None:
        """Run a prepared call.

        Raises:
            ValueError: A slot lies outside the cache or a position outside the table; nothing was written.
        """
        status = self._rotary(byref(call))
        if status == _OUTSIDE_CACHE:
            raise ValueError("a slot lies outside the cache or a position outside the table; nothing was written")
        if status:
            raise RuntimeError(f"rotation in C++ failed with status {status}")


def _check_rows(qkv: torch.Tensor, query: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor) -> None:
    num_tokens, num_query_heads, head_dim = query.shape
    num_heads = num_query_heads + 2 * key_cache.shape[2]
    if (
        qkv.shape != (num_tokens, num_heads * head_dim)
        or qkv.dtype not in {torch.float32, torch.bfloat16}
        or qkv.stride(1) != 1
    ):
        raise ValueError(f"qkv is {tuple(qkv.shape)} {qkv.dtype}; it must be fp32 or bf16 {(num_tokens, num_heads * head_dim)}")
    if key_cache.shape != value_cache.shape or key_cache.shape[3] != head_dim or head_dim > _MAX_HEAD_DIM:
        shapes = f"{tuple(key_cache.shape)} and {tuple(value_cache.shape)}"
        raise ValueError(f"the caches {shapes} do not fit each other or heads of {head_dim} (at most {_MAX_HEAD_DIM})")
    for name, tensor in (("query", query), ("key_cache", key_cache), ("value_cache", value_cache)):
        if tensor.dtype != key_cache.dtype or tensor.dtype not in DTYPES or not tensor.is_contiguous():
            raise ValueError(
                f"{name} is {tensor.dtype}; queries and caches must be of one dtype out of {list(DTYPES)}, contiguous"
            )


def _check_positions(query: torch.Tensor, slot_mapping: torch.Tensor, positions: torch.Tensor, table: torch.Tensor) -> None:
    num_tokens, _, head_dim = query.shape
    for name, tensor in (("slot_mapping", slot_mapping), ("positions", positions)):
        if tensor.shape != (num_tokens,) or tensor.dtype != torch.int64 or not tensor.is_contiguous():
            raise ValueError(f"{name} is {tuple(tensor.shape)} {tensor.dtype}; it must be int64 ({num_tokens},), contiguous")
    if (
        table.ndim != 2
        or table.shape[1] % 2
        or table.shape[1] > head_dim
        or table.dtype != torch.float32
        or not table.is_contiguous()
    ):
        raise ValueError(
            f"the table is {tuple(table.shape)} {table.dtype}; it must be fp32 rows of an even number, at most {head_dim}"
        )


def _check_norms(head_dim: int, *norms: torch.Tensor | None) -> None:
    for norm in norms:
        if norm is not None and (norm.shape != (head_dim,) or norm.dtype != torch.float32 or not norm.is_contiguous()):
            raise ValueError(f"a norm of heads is {tuple(norm.shape)} {norm.dtype}; it must be fp32 ({head_dim},)")
