"""What every backend demands of its arguments, so that a mistake is an error with its numbers and never a wild read."""

from collections.abc import Sequence

import torch

from chatpage_kernels.plan import AttentionPlan

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def check_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    plan: AttentionPlan,
    *,
    sinks: torch.Tensor | None,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
) -> None:
    """Check the arguments of `paged_attention` against each other and the plan.

    Raises:
        ValueError: They do not fit together.
    """
    if query.ndim != 3 or query.shape[0] != plan.num_tokens:
        raise ValueError(f"query is {tuple(query.shape)}; the plan has {plan.num_tokens} tokens of (heads, head_dim)")
    if key_cache.ndim != 4 or key_cache.shape[:3] != value_cache.shape[:3] or key_cache.shape[3] != query.shape[2]:
        shapes = f"{tuple(key_cache.shape)} and {tuple(value_cache.shape)}"
        raise ValueError(f"the caches {shapes} do not fit each other, or the head_dim {query.shape[2]} of the query")
    num_kv_heads = key_cache.shape[2]
    if key_cache.shape[1] != plan.block_size or query.shape[1] != num_kv_heads * plan.group_size:
        raise ValueError(
            f"the plan is for blocks of {plan.block_size} tokens and {plan.group_size} query heads per KV head; "
            f"the cache has {key_cache.shape[1]} tokens per block, and {query.shape[1]} heads share {num_kv_heads}"
        )
    _check_dtypes(query, key_cache, value_cache)
    if (sinks is not None) != plan.has_sinks:
        raise ValueError(f"the plan was made with has_sinks={plan.has_sinks}: plan again")
    for name, tensor, size in (
        ("sinks", sinks, query.shape[1]),
        ("k_scale", k_scale, num_kv_heads),
        ("v_scale", v_scale, num_kv_heads),
    ):
        if tensor is not None and (tensor.shape != (size,) or tensor.device != query.device):
            raise ValueError(f"{name} is {tuple(tensor.shape)} on {tensor.device}; it must be ({size},) on {query.device}")


def check_write(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """Check the arguments of `write_kv`.

    Raises:
        ValueError: They do not fit together.
    """
    num_tokens = slot_mapping.shape[0]
    for name, rows, cache in (("key", key, key_cache), ("value", value, value_cache)):
        if rows.shape != (num_tokens, *cache.shape[2:]):
            raise ValueError(f"{name} is {tuple(rows.shape)}; {num_tokens} slots of {tuple(cache.shape[2:])} were given")
        _check_dtypes(rows, cache)
    if slot_mapping.dtype != torch.int64 or key_cache.shape[:3] != value_cache.shape[:3]:
        raise ValueError(f"slot_mapping is {slot_mapping.dtype}, not int64, or the caches differ in their blocks")


def check_copies(caches: Sequence[torch.Tensor], copies: torch.Tensor) -> None:
    """Check the arguments of `copy_blocks`.

    Raises:
        ValueError: They do not fit together.
    """
    if copies.ndim != 2 or copies.shape[1] != 3 or copies.dtype != torch.int64:
        raise ValueError(f"copies is {tuple(copies.shape)} {copies.dtype}; it must be int64 [n, 3]")
    if len({cache.shape[:2] for cache in caches}) > 1:
        raise ValueError(f"the caches differ in their blocks: {sorted({tuple(cache.shape[:2]) for cache in caches})}")


def _check_dtypes(rows: torch.Tensor, *caches: torch.Tensor) -> None:
    for cache in caches:
        if cache.dtype not in (rows.dtype, *FLOAT8) or cache.device != rows.device:
            raise ValueError(
                f"a {cache.dtype} cache on {cache.device} cannot serve {rows.dtype} rows on {rows.device}: "
                "the cache must have their dtype or an 8-bit float, on their device"
            )
