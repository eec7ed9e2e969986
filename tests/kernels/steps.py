"""Steps for the kernel tests: forked block tables over a poisoned pool, and the dense attention that they must equal.

Every row of the pool that no sequence of the step has filled is NaN: a kernel that reads one, even times zero, shows it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from chatpage_kernels import Tile, plan_attention
from chatpage_kernels.backend import PagedAttention


@dataclass(frozen=True)
class Step:
    """The tables of one step, as the planner takes them."""

    query_start_loc: NDArray[np.int32]
    seq_lens: NDArray[np.int32]
    block_tables: NDArray[np.int32]
    block_size: int

    @property
    def num_tokens(self) -> int:
        return int(self.query_start_loc[-1])

    @property
    def num_blocks(self) -> int:
        """Size of a pool that has all blocks of the step, and one more."""
        return int(self.block_tables.max(initial=0)) + 2


@dataclass(frozen=True)
class Heads:
    """Head counts and widths of an attention layer."""

    num_q: int = 6
    num_kv: int = 2
    head_dim: int = 16
    value_dim: int = 16


@dataclass(frozen=True)
class Tensors:
    """Queries and caches for a step."""

    query: torch.Tensor
    key_cache: torch.Tensor
    value_cache: torch.Tensor

    def to(self, device: str) -> "Tensors":
        return Tensors(self.query.to(device), self.key_cache.to(device), self.value_cache.to(device))


def make_step(seqs: Sequence[tuple[int, int]], *, block_size: int, forks: dict[int, tuple[int, int]] | None = None) -> Step:
    """Lay out a step over a shuffled pool.

    Args:
        seqs: (KV length, query length) of each sequence.
        block_size: Tokens per block.
        forks: Sequence to (parent, number of leading blocks it has from the parent); parents come first.
    """
    needs = [-(-length // block_size) for length, _ in seqs]
    free = np.random.default_rng(len(seqs) + sum(needs)).permutation(sum(needs)).tolist()
    tables = np.full((len(seqs), max(needs)), -1, np.int32)
    for i, need in enumerate(needs):
        parent, num_shared = (forks or {}).get(i, (0, 0))
        tables[i, :num_shared] = tables[parent, :num_shared]
        tables[i, num_shared:need] = [free.pop() for _ in range(need - num_shared)]
    starts = np.cumsum([0, *(rows for _, rows in seqs)]).astype(np.int32)
    return Step(starts, np.array([length for length, _ in seqs], np.int32), tables, block_size)


def random_step(rng: np.random.Generator, *, block_size: int, max_seqs: int, max_blocks: int) -> Step:
    """Draw a step over a random tree of forks: mixed lengths, chunks, single tokens, and sequences without rows."""
    seqs: list[tuple[int, int]] = []
    forks: dict[int, tuple[int, int]] = {}
    for i in range(rng.integers(1, max_seqs + 1)):
        num_shared = 0
        if i and rng.random() < 0.8:
            parent = int(rng.integers(i))
            num_shared = int(rng.integers(seqs[parent][0] // block_size + 1))
            forks[i] = (parent, num_shared)
        least = max(1, num_shared * block_size)
        length = int(rng.integers(least, max(least, max_blocks * block_size) + 1))
        rows = int(rng.choice(np.array([0, 1, 1, 1, rng.integers(1, length + 1)])))
        seqs.append((length, rows))
    return make_step(seqs, block_size=block_size, forks=forks)


def make_tensors(
    step: Step, heads: Heads, dtype: torch.dtype = torch.float32, *, kv_dtype: torch.dtype | None = None, seed: int = 0
) -> Tensors:
    """Fill queries and the written rows of the caches with normal numbers, all else with NaN."""
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(step.num_tokens, heads.num_q, heads.head_dim, generator=generator).to(dtype)
    caches = []
    for width in (heads.head_dim, heads.value_dim):
        cache = torch.randn(step.num_blocks, step.block_size, heads.num_kv, width, generator=generator)
        cache[~written_rows(step)] = torch.nan
        caches.append(cache.to(kv_dtype or dtype))
    return Tensors(query, *caches)


def attend(backend: PagedAttention, step: Step, tensors: Tensors, tile: Tile, **options: Any) -> torch.Tensor:
    """Plan the step and attend; options are those of the backend, and `window`, `share` and `split` of the planner."""
    planning = {name: options.pop(name) for name in ("window", "share", "split") if name in options}
    plan = plan_attention(
        step.query_start_loc,
        step.seq_lens,
        step.block_tables,
        block_size=step.block_size,
        num_q_heads=tensors.query.shape[1],
        num_kv_heads=tensors.key_cache.shape[2],
        tile=tile,
        has_sinks=options.get("sinks") is not None,
        device=tensors.query.device,
        **planning,
    )
    return backend(tensors.query, tensors.key_cache, tensors.value_cache, plan, **options)


def written_rows(step: Step) -> torch.Tensor:
    """Return which rows of the pool hold tokens; bool [num_blocks, block_size]."""
    written = torch.zeros(step.num_blocks, step.block_size, dtype=torch.bool)
    for table, length in zip(step.block_tables, step.seq_lens.tolist(), strict=True):
        positions = np.arange(length)
        written[torch.from_numpy(table[positions // step.block_size]).long(), torch.from_numpy(positions % step.block_size)] = (
            True
        )
    return written


def dense_attention(
    step: Step,
    tensors: Tensors,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> torch.Tensor:
    """Attend sequence by sequence over gathered keys, all in `dtype`; [num_tokens, num_q_heads, value_dim]."""
    num_heads, num_kv_heads = tensors.query.shape[1], tensors.key_cache.shape[2]
    out = torch.zeros(step.num_tokens, num_heads, tensors.value_cache.shape[3], dtype=dtype)
    for i, length in enumerate(step.seq_lens.tolist()):
        rows = slice(int(step.query_start_loc[i]), int(step.query_start_loc[i + 1]))
        query_pos = torch.arange(length - (rows.stop - rows.start), length)[:, None]
        key_pos = torch.arange(length)
        blocks = torch.from_numpy(step.block_tables[i, np.arange(length) // step.block_size]).long()
        key, value = (
            cache.to(dtype)[blocks, key_pos % step.block_size] * (1 if factor is None else factor.to(dtype)[:, None])
            for cache, factor in ((tensors.key_cache, k_scale), (tensors.value_cache, v_scale))
        )
        key, value = (x.repeat_interleave(num_heads // num_kv_heads, 1).transpose(0, 1) for x in (key, value))
        scores = tensors.query[rows].to(dtype).transpose(0, 1) @ key.transpose(1, 2) * scale
        scores = softcap * torch.tanh(scores / softcap) if softcap else scores
        hidden = (key_pos > query_pos) | ((key_pos <= query_pos - window) if window else False)
        scores = scores.masked_fill(hidden, -torch.inf)
        if sinks is not None:
            scores = torch.cat([scores, sinks.to(dtype)[:, None, None].expand(-1, scores.shape[1], 1)], -1)
        out[rows] = (scores.softmax(-1)[..., :length] @ value).transpose(0, 1)
    return out


def assert_as_exact_as_torch(actual: torch.Tensor, step: Step, tensors: Tensors, *, scale: float, **options: Any) -> None:
    """Bound the error by the dtype's own: twice what dense torch attention in the same dtype does wrong, and a rounding."""
    tensors, actual = tensors.to("cpu"), actual.cpu()
    exact = dense_attention(step, tensors, scale=scale, **options)
    same = dense_attention(step, tensors, scale=scale, dtype=actual.dtype, **options)
    assert not actual.isnan().any(), "an unwritten row reached the result, or a query row has none"
    error, own_error = ((result.double() - exact).abs().amax() for result in (actual, same))
    limit = 2 * own_error + 4 * torch.finfo(actual.dtype).eps * exact.abs().amax()
    assert error <= limit, f"error {error:.2e} is over the limit {limit:.2e}"


MIXED = make_step([(37, 37), (129, 5), (64, 1), (300, 70), (1, 1)], block_size=16)
FORKED = make_step([(330, 1), (341, 1), (420, 3), (500, 1), (90, 1)], block_size=16, forks={1: (0, 20), 2: (0, 20), 3: (2, 24)})
