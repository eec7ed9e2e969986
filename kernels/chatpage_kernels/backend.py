"""Chooses the functions that do a step's attention on this machine: Triton on a GPU, C++ on a CPU, torch where neither runs.

Invariant: the first answer never waits. On a CPU whose C++ kernels are not built yet it is the torch reference, and the build
runs in the background; between two steps the engine asks `backend.successor()`, and switches once it has an answer:

    if (better := backend.successor()) is not None:
        for layer in layers:
            better.convert_cache(layer.key_cache, layer.value_cache)
        backend = better

Importing this module imports neither triton nor a compiler; choosing does.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch

from chatpage_kernels import reference
from chatpage_kernels.plan import AttentionPlan, Tile


class PagedAttention(Protocol):
    """As `reference.paged_attention`."""

    def __call__(
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
    ) -> torch.Tensor: ...


class WriteKv(Protocol):
    """As `reference.write_kv`."""

    def __call__(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None: ...


class CopyBlocks(Protocol):
    """As `reference.copy_blocks`, of the key and the value cache of each layer in turn: they may be arranged differently."""

    def __call__(self, caches: Sequence[torch.Tensor], copies: torch.Tensor) -> None: ...


def _no_successor() -> "Backend | None":
    return None


def _keep_cache(key_cache: torch.Tensor, value_cache: torch.Tensor) -> None:
    """Change nothing: the layout inside the blocks is that of the reference."""


@dataclass(frozen=True, slots=True)
class Backend:
    """The three functions, and what a planner and an owner of caches must know about them.

    Args:
        name: "triton", "cpp" or "reference".
        reason: Why this one was chosen, for people.
        tile: Item size and costs for steps whose sequences have few rows each (decode).
        prefill_tile: The same for steps in which a sequence has more rows than `tile` holds.
        paged_attention: Attention of one layer.
        write_kv: Writes the keys and values of a step into their slots.
        copy_blocks: Copies rows of blocks in all caches.
        convert_cache: Rearranges a key and a value cache filled under the reference, in place, for this backend.
        successor: Returns a better backend once there is one; never waits.
    """

    name: str
    reason: str
    tile: Tile
    prefill_tile: Tile
    paged_attention: PagedAttention
    write_kv: WriteKv
    copy_blocks: CopyBlocks
    convert_cache: Callable[[torch.Tensor, torch.Tensor], None] = _keep_cache
    successor: "Callable[[], Backend | None]" = _no_successor

    def tile_for(self, longest_query: int, group_size: int) -> Tile:
        """Return the tile for a step whose longest sequence has so many query rows."""
        return self.tile if longest_query * group_size <= self.tile.max_rows else self.prefill_tile


def select_backend(
    device: str | torch.device,
    dtype: torch.dtype,
    *,
    head_dim: int,
    value_dim: int | None = None,
    kv_dtype: torch.dtype | None = None,
) -> Backend:
    """Choose the best backend that is ready now; see `Backend.successor` for what becomes ready later.

    Args:
        device: Where the caches and the model live.
        dtype: Of queries and outputs.
        head_dim: Width of a key.
        value_dim: Width of a value; default: head_dim.
        kv_dtype: Of the caches; default: dtype.
    """
    device = torch.device(device)
    widths = (head_dim, head_dim if value_dim is None else value_dim)
    kv_dtype = kv_dtype or dtype
    if device.type == "cuda":
        return _for_gpu(device, dtype, widths, kv_dtype)
    if device.type == "cpu":
        return _for_cpu(dtype, widths, kv_dtype)
    return _reference(f"there are no kernels for {device.type} devices")


def _reference(reason: str, successor: Callable[[], Backend | None] = _no_successor) -> Backend:
    return Backend(
        name="reference",
        reason=reason,
        tile=reference.TILE,
        prefill_tile=reference.TILE,
        paged_attention=reference.paged_attention,
        write_kv=reference.write_kv,
        copy_blocks=reference.copy_blocks,
        successor=successor,
    )


def _for_gpu(device: torch.device, dtype: torch.dtype, widths: tuple[int, int], kv_dtype: torch.dtype) -> Backend:
    try:
        from chatpage_kernels import triton_attention, triton_cache, triton_config
    except ImportError as error:
        return _reference(f"triton cannot be imported: {error}")
    problem = triton_config.why_unsupported(dtype, kv_dtype, *widths, capability=torch.cuda.get_device_capability(device))
    if problem:
        return _reference(problem)
    num_processors = torch.cuda.get_device_properties(device).multi_processor_count
    decode, prefill = triton_config.tiles(triton_config.family_of_device(device), dtype, max(widths), num_processors)
    return Backend(
        name="triton",
        reason=f"{torch.cuda.get_device_name(device)} with {num_processors} multiprocessors",
        tile=decode,
        prefill_tile=prefill,
        paged_attention=triton_attention.paged_attention,
        write_kv=triton_cache.write_kv,
        copy_blocks=triton_cache.copy_blocks,
    )


def _for_cpu(dtype: torch.dtype, widths: tuple[int, int], kv_dtype: torch.dtype) -> Backend:
    try:
        from chatpage_kernels import cpu
        from chatpage_kernels.cpu import build
    except ImportError as error:
        return _reference(f"the C++ kernels are not part of this installation: {error}")
    if problem := cpu.why_unsupported(dtype, kv_dtype, widths[0]):
        return _reference(problem)
    # Gives None as long as the kernels are not built, and for good if they cannot be.
    ready = partial(cpu.backend, dtype, head_dim=widths[0], kv_dtype=kv_dtype)
    build.start()
    return ready() or _reference(build.describe(), successor=ready)
