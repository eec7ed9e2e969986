"""The tensors that hold keys and values, one pair per layer, cut into blocks.

Invariant: a row of a block means something only while the bookkeeping says so (a token was computed into it); everything else
may hold anything, NaN included, and is never read. Memory is reserved at once and touched only when a block is first written.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Self

import numpy as np
import numpy.typing as npt
import torch

from chatpage.engine.batch import Batch
from chatpage.engine.block_pool import BlockCopy
from chatpage.engine.memory_limits import available_memory
from chatpage.errors import ConfigError
from chatpage_kernels.backend import Backend, select_backend
from chatpage_kernels.cpu import huge_pages
from chatpage_kernels.plan import AttentionPlan
from chatpage_kernels.planner import Planner

if TYPE_CHECKING:
    from chatpage.config import EngineConfig
    from chatpage.engine.models.loading import LoadedModel

MIN_BLOCKS = 8
MEMORY_SHARE = 0.3
MAX_DEFAULT_CPU_BYTES = 4 * 2**30


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """What one attention layer keeps per token. Keys and values may differ in width (multi-head latent attention).

    Args:
        num_kv_heads: Heads of keys and of values.
        head_dim: Width of a key.
        value_dim: Width of a value.
        window: Tokens a query sees, itself included; 0 means all.
    """

    num_kv_heads: int
    head_dim: int
    value_dim: int
    window: int = 0


@dataclass(frozen=True, slots=True)
class LayerKind:
    """What layers must have in common to share the plan of a step.

    Args:
        num_q_heads: Heads of queries.
        num_kv_heads: Heads of keys and of values.
        window: Tokens a query sees, itself included; 0 means all.
        has_sinks: Each softmax is joined by a logit that attends to nothing.
    """

    num_q_heads: int
    num_kv_heads: int
    window: int = 0
    has_sinks: bool = False


def bytes_per_block(specs: Sequence[LayerSpec], block_size: int, dtype: torch.dtype) -> int:
    """Return the bytes of one block over all layers."""
    per_token = sum(spec.num_kv_heads * (spec.head_dim + spec.value_dim) for spec in specs)
    return per_token * block_size * dtype.itemsize


def num_blocks_for(block_bytes: int, device: torch.device, *, kv_memory: int | None, max_useful: int) -> int:
    """Return how many blocks to make.

    Args:
        block_bytes: Bytes of one block over all layers.
        device: Where they will live.
        kv_memory: Bytes the user gives; None takes 30 % of what is available, on a CPU at most 4 GiB.
        max_useful: Blocks that all sequences together can fill; a default never takes more.

    Raises:
        ConfigError: Fewer than 8 blocks fit, or `kv_memory` is more than the device has available.
    """
    available = available_memory(device)
    if kv_memory is None:
        share = int(available * MEMORY_SHARE)
        memory = min(share, MAX_DEFAULT_CPU_BYTES) if device.type == "cpu" else share
        num_blocks = min(memory // block_bytes, max(max_useful, MIN_BLOCKS))
    else:
        memory = kv_memory
        num_blocks = memory // block_bytes
    if kv_memory is not None and kv_memory > available:
        raise ConfigError(
            f"kv_memory is {_mib(kv_memory)}, but only {_mib(available)} are available on {device}: lower it, or free memory."
        )
    if num_blocks < MIN_BLOCKS:
        source = "kv_memory" if kv_memory is not None else f"{MEMORY_SHARE:.0%} of the {_mib(available)} available on {device}"
        raise ConfigError(
            f"Only {num_blocks} KV blocks fit into {_mib(memory)} ({source}); one takes {_mib(block_bytes)}, and "
            f"{MIN_BLOCKS} are needed. Give --kv-memory {-(-MIN_BLOCKS * block_bytes // 2**20)}MiB, or lower --block-size."
        )
    return num_blocks


class KvCache:
    """Keys and values of all layers.

    Args:
        specs: One per layer, in the order of the layers.
        num_blocks: Blocks per layer.
        block_size: Tokens per block.
        dtype: Type of the elements.
        device: Where they live.
        backend: Writes, copies and reads them; it may arrange the bytes inside a block in its own way. Default: the best
            one that is ready; a better one that becomes ready later takes over between two steps.
        cascade: Read a prefix that rows of a step share once for all of them, where that is faster.
    """

    def __init__(
        self,
        specs: Sequence[LayerSpec],
        *,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        backend: Backend | None = None,
        cascade: bool = True,
    ) -> None:
        self.specs = tuple(specs)
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.dtype = dtype
        self.device = device
        self.backend = backend or backend_for(specs, dtype, device)
        self.bytes_per_block = bytes_per_block(specs, block_size, dtype)
        shape = (num_blocks, block_size)
        self.layers = tuple(
            (
                torch.empty(*shape, spec.num_kv_heads, spec.head_dim, dtype=dtype, device=device),
                torch.empty(*shape, spec.num_kv_heads, spec.value_dim, dtype=dtype, device=device),
            )
            for spec in specs
        )
        self._tensors = [tensor for layer in self.layers for tensor in layer]
        # The bytes of every tensor, uint8 [num_blocks, bytes of a block in it].
        self._byte_rows = [tensor.view(num_blocks, -1).view(torch.uint8) for tensor in self._tensors]
        # On a CPU, the same with a block as one item: NumPy copies a few items without giving up the interpreter, which threads
        # that read files would keep for a while, some thousand times within a load.
        self._items = [rows.numpy().view(f"V{rows.shape[1]}")[:, 0] for rows in self._byte_rows if rows.device.type == "cpu"]
        # Where each tensor lies in a row of `read_blocks`.
        self._byte_ranges = list(pairwise(accumulate((rows.shape[1] for rows in self._byte_rows), initial=0)))
        for tensor in self._tensors:
            huge_pages.advise(tensor)
        self._num_touched = 0  # blocks from here on were never written
        self._cascade = cascade
        self._planners: dict[LayerKind, Planner] = {}

    @classmethod
    def for_model(cls, model: "LoadedModel", config: "EngineConfig") -> Self:
        """Make the cache of a loaded model in the memory that `config` gives it.

        Raises:
            ConfigError: Too few blocks fit.
        """
        specs, longest = model.runner.layer_specs, config.max_model_len or model.runner.max_model_len
        block_bytes = bytes_per_block(specs, config.block_size, model.dtype)
        max_useful = config.max_num_seqs * -(-longest // config.block_size)
        return cls(
            specs,
            num_blocks=num_blocks_for(block_bytes, model.device, kv_memory=config.kv_memory, max_useful=max_useful),
            block_size=config.block_size,
            dtype=model.dtype,
            device=model.device,
            cascade=config.cascade,
        )

    def begin_step(self, batch: Batch) -> None:
        """Note which blocks the step touches, and switch to a better backend if one has become ready.

        The new backend may want other bytes inside a block, so the blocks that were ever written are rearranged first; the
        others are left alone, because touching them would make the machine give them memory.
        """
        if (better := self.backend.successor()) is not None:
            for key_cache, value_cache in self.layers:
                better.convert_cache(key_cache[: self._num_touched], value_cache[: self._num_touched])
            self.backend = better
        self._num_touched = max(self._num_touched, int(batch.block_tables.max(initial=-1)) + 1)

    def plan(self, batch: Batch, kind: LayerKind) -> AttentionPlan:
        """Plan the attention of a step over this cache, for one kind of layer; it is valid until the next step is planned."""
        planner = self._planners.get(kind)
        if planner is None:
            planner = self._planners[kind] = Planner(
                block_size=self.block_size,
                num_q_heads=kind.num_q_heads,
                num_kv_heads=kind.num_kv_heads,
                window=kind.window,
                has_sinks=kind.has_sinks,
                share=self._cascade,
                device=self.device,
            )
        longest_query = int((batch.query_start_loc[1:] - batch.query_start_loc[:-1]).max(initial=0))
        tile = self.backend.tile_for(longest_query, kind.num_q_heads // kind.num_kv_heads)
        return planner.plan(batch.query_start_loc, batch.seq_lens, batch.block_tables, tile=tile)

    def copy(self, copies: Sequence[BlockCopy]) -> None:
        """Run copy-on-write copies in every layer; none of the destinations is a source."""
        table = torch.tensor([(copy.src, copy.dst, copy.num_rows) for copy in copies], dtype=torch.int64).view(-1, 3)
        self.backend.copy_blocks(self._tensors, table.to(self.device))

    @property
    def layout(self) -> str:
        """What the bytes of a block mean: the arrangement of the backend in use, the type, and the shapes of all layers."""
        shapes = ",".join(f"{spec.num_kv_heads}x{spec.head_dim}+{spec.value_dim}" for spec in self.specs)
        return f"{self.backend.name} {self.dtype} {self.block_size} {shapes}"

    def read_blocks(self, block_ids: Sequence[int]) -> npt.NDArray[np.uint8]:
        """Return copies of whole blocks, uint8 `[num_blocks, bytes_per_block]`.

        A row is the keys and the values of each layer in turn.
        """
        rows = np.empty((len(block_ids), self.bytes_per_block), dtype=np.uint8)
        for index, (start, stop) in enumerate(self._byte_ranges):
            if self.device.type == "cpu":
                items = self._items[index]
                target = rows[:, start:stop].view(items.dtype)[:, 0]
                for i, block_id in enumerate(block_ids):
                    target[i : i + 1] = items[block_id : block_id + 1]
            else:
                rows[:, start:stop] = self._byte_rows[index][list(block_ids)].cpu().numpy()
        return rows

    def write_blocks(self, block_ids: Sequence[int], rows: Sequence[npt.NDArray[np.uint8]]) -> None:
        """Fill whole blocks with rows that `read_blocks` returned under the same `layout`."""
        assert all(row.shape == (self.bytes_per_block,) for row in rows), f"a row is not of {self.bytes_per_block} bytes"
        for index, (start, stop) in enumerate(self._byte_ranges):
            if self.device.type == "cpu":
                items = self._items[index]
                for block_id, row in zip(block_ids, rows, strict=True):
                    items[block_id : block_id + 1] = row[start:stop].view(items.dtype)
            else:
                stacked = torch.from_numpy(np.stack([row[start:stop] for row in rows]))
                self._byte_rows[index][list(block_ids)] = stacked.to(self.device)
        self._num_touched = max(self._num_touched, max(block_ids) + 1)

    def clear_block(self, block_id: int) -> None:
        """Fill a block with zeros."""
        self.write_blocks([block_id], [np.zeros(self.bytes_per_block, dtype=np.uint8)])

    def poison(self) -> None:
        """Fill everything with NaN, so that a test sees any read of a row that nobody wrote."""
        for tensor in self._tensors:
            tensor.fill_(torch.nan)


def backend_for(specs: Sequence[LayerSpec], dtype: torch.dtype, device: torch.device) -> Backend:
    """Choose one backend that serves all layers, though they may differ in width."""
    widths = sorted({(spec.head_dim, spec.value_dim) for spec in specs}, key=sum)
    backends = [select_backend(device, dtype, head_dim=head_dim, value_dim=value_dim) for head_dim, value_dim in widths]
    # The tile of the widest layer fits the others too; the reference serves every width.
    return next((backend for backend in backends if backend.name == "reference"), backends[-1])


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.1f} MiB"
