"""What the kernel benchmark measures: steps of several kinds, laid out over shuffled blocks.

Invariant: a step comes in `num_copies` caches that together are larger than any cache of the processor, and each run takes the
next one, as the layers of a model do: what is measured is reading memory, not a cache that the previous run has filled.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from chatpage_kernels.backend import Backend
from chatpage_kernels.cpu import huge_pages
from chatpage_kernels.plan import AttentionPlan, plan_attention

_MAX_COPIES = 48


@dataclass(frozen=True, slots=True)
class Case:
    """A step to measure.

    Args:
        name: For people; unique in a grid.
        num_seqs: Sequences, all alike.
        kv_len: KV length of each after the step.
        q_len: Query rows of each.
        num_shared: Leading tokens whose blocks all sequences have in common.
    """

    name: str
    num_seqs: int
    kv_len: int
    q_len: int
    num_shared: int = 0


@dataclass(frozen=True, slots=True)
class Model:
    """The attention layer that the cases run on."""

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype


SMALL_MODEL = Model(9, 3, 64, 16, torch.bfloat16)  # SmolLM2-135M
LARGE_MODEL = Model(32, 8, 128, 16, torch.bfloat16)  # Llama 3 8B
TINY_MODEL = Model(6, 2, 16, 16, torch.float32)

CPU_GRID = (
    Case("decode 1 x 100", 1, 100, 1),
    Case("decode 1 x 1,500", 1, 1500, 1),
    Case("decode 8 x 1,500", 8, 1500, 1),
    Case("split 1 x 12,000", 1, 12000, 1),
    Case("cascade 8 x 1,500", 8, 1500, 1, num_shared=1472),
    Case("cascade 32 x 1,500", 32, 1500, 1, num_shared=1472),
    Case("extend 28 + 1,500", 1, 1528, 28),
    Case("extend 512 + 1,000", 1, 1512, 512),
    Case("prefill 512", 1, 512, 512),
    Case("prefill 1,500", 1, 1500, 1500),
)
GPU_GRID = (
    Case("decode 1 x 2,048", 1, 2048, 1),
    Case("decode 16 x 2,048", 16, 2048, 1),
    Case("decode 64 x 4,096", 64, 4096, 1),
    Case("split 1 x 65,536", 1, 65536, 1),
    Case("split 4 x 32,768", 4, 32768, 1),
    Case("cascade 8 x 4,096", 8, 4096, 1, num_shared=4064),
    Case("cascade 64 x 4,096", 64, 4096, 1, num_shared=4064),
    Case("extend 8 x (512 + 4,096)", 8, 4608, 512),
    Case("prefill 2,048", 1, 2048, 2048),
    Case("prefill 8,192", 1, 8192, 8192),
)
TINY_GRID = (
    Case("decode 2 x 40", 2, 40, 1),
    Case("split 1 x 300", 1, 300, 1),
    Case("cascade 3 x 70", 3, 70, 1, num_shared=48),
    Case("extend 5 + 40", 1, 45, 5),
    Case("prefill 20", 1, 20, 20),
)


@dataclass(frozen=True, slots=True)
class Inputs:
    """Tensors of a case, and its plans for a backend.

    `caches` are in the backend's own layout, `plain` is one as it was; `plan_apart` is the plan without sharing.
    """

    case: Case
    model: Model
    query: torch.Tensor
    caches: Sequence[tuple[torch.Tensor, torch.Tensor]]
    plain: tuple[torch.Tensor, torch.Tensor]
    tables: torch.Tensor  # int64 [num_seqs, blocks]
    plan: AttentionPlan
    plan_apart: AttentionPlan

    @property
    def scale(self) -> float:
        return float(self.model.head_dim**-0.5)

    @property
    def num_bytes(self) -> int:
        """Bytes that must be read or written at least: each block once, queries and outputs."""
        blocks = int(self.tables.unique().numel())
        tokens = blocks * self.model.block_size - self._num_unfilled
        row = self.model.head_dim * self.query.element_size()
        return 2 * row * (tokens * self.model.num_kv_heads + self.query.shape[0] * self.model.num_q_heads)

    @property
    def num_flops(self) -> int:
        """Floating point operations of the visible pairs of query and key: two products."""
        case = self.case
        pairs = case.num_seqs * sum(range(case.kv_len - case.q_len + 1, case.kv_len + 1))
        return 4 * pairs * self.model.num_q_heads * self.model.head_dim

    @property
    def _num_unfilled(self) -> int:
        size = self.model.block_size
        is_tail_own = self.case.num_shared < self.case.kv_len
        return (-self.case.kv_len % size) * (self.case.num_seqs if is_tail_own else 1)

    def gather(self, cache: torch.Tensor) -> torch.Tensor:
        """Return the rows of a plain cache as [num_seqs, num_kv_heads, kv_len, head_dim]."""
        rows = cache.index_select(0, self.tables.flatten()).view(self.case.num_seqs, -1, *cache.shape[2:])
        return rows[:, : self.case.kv_len].transpose(1, 2)


def copy_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous copy, in huge pages where the system has them: nobody is measured on his luck with page tables."""
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    huge_pages.advise(copy)
    return copy.copy_(tensor)


def make_inputs(case: Case, model: Model, backend: Backend, device: torch.device, *, flush_bytes: int) -> Inputs:
    """Lay out a case.

    Args:
        case: The step.
        model: The attention layer.
        backend: Whose tiles and layout to use.
        device: Where the tensors live.
        flush_bytes: Size that all caches together should exceed.
    """
    generator = torch.Generator().manual_seed(0)
    size = model.block_size
    num_blocks, shared = -(-case.kv_len // size), case.num_shared // size
    total = shared + case.num_seqs * (num_blocks - shared)
    order = torch.randperm(total, generator=generator)
    own = order[shared:].view(case.num_seqs, -1)
    tables = torch.cat([order[:shared].expand(case.num_seqs, -1), own], 1)
    shape = (total, size, model.num_kv_heads, model.head_dim)
    plain = tuple(torch.randn(shape, generator=generator).to(model.dtype).to(device) for _ in range(2))
    copy_bytes = 2 * plain[0].numel() * plain[0].element_size()
    caches = []
    for _ in range(min(_MAX_COPIES, 1 + flush_bytes // copy_bytes)):
        key_cache, value_cache = (copy_of(cache) for cache in plain)
        backend.convert_cache(key_cache, value_cache)
        caches.append((key_cache, value_cache))
    query = torch.randn(case.num_seqs * case.q_len, model.num_q_heads, model.head_dim, generator=generator)
    plans = [_plan(case, model, backend, tables, device, share=share) for share in (True, False)]
    query = query.to(model.dtype).to(device)
    return Inputs(case, model, query, caches, (plain[0], plain[1]), tables.to(device), *plans)


def _plan(
    case: Case, model: Model, backend: Backend, tables: torch.Tensor, device: torch.device, *, share: bool
) -> AttentionPlan:
    return plan_attention(
        np.arange(case.num_seqs + 1, dtype=np.int32) * case.q_len,
        np.full(case.num_seqs, case.kv_len, np.int32),
        tables.numpy().astype(np.int32),
        block_size=model.block_size,
        num_q_heads=model.num_q_heads,
        num_kv_heads=model.num_kv_heads,
        tile=backend.tile_for(case.q_len, model.num_q_heads // model.num_kv_heads),
        share=share,
        device=device,
    )
