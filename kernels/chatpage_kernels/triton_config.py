"""What the Triton kernels can serve, and with which tiles, warps and stages on which kind of GPU.

Invariant: every combination it returns compiles without register spills and within the shared memory of each GPU of its
family; `chatpage_kernels.aot` compiles them all without a GPU and holds it. Imports no triton.
"""

from functools import lru_cache
from typing import Literal

import torch

from chatpage_kernels.checks import FLOAT8
from chatpage_kernels.plan import Tile

Family = Literal["mma", "wgmma", "mfma"]
MAX_HEAD_DIM = 256


def family_of(capability: tuple[int, int], *, is_hip: bool) -> Family:
    """Return the kind of matrix unit: of a warp (Ampere, Ada, GeForce Blackwell), of a group (Hopper, Blackwell), or AMD's."""
    if is_hip:
        return "mfma"
    return "wgmma" if capability[0] in (9, 10) else "mma"


@lru_cache(maxsize=16)
def family_of_device(device: torch.device) -> Family:
    """Return the family of a GPU; "mma" for the CPU, where kernels are interpreted."""
    if device.type == "cpu":
        return "mma"
    return family_of(torch.cuda.get_device_capability(device), is_hip=torch.version.hip is not None)


def tiles(family: Family, dtype: torch.dtype, head_dim: int, num_processors: int) -> tuple[Tile, Tile]:
    """Return the tiles for steps of few rows per sequence and for prefill, for a GPU with so many multiprocessors."""
    is_wide = head_dim > 128
    if dtype == torch.float32:
        rows, kv_tokens = (16, 16) if is_wide else (32, 32)
    else:
        rows, kv_tokens = (64 if is_wide or family != "wgmma" else 128), (32 if is_wide else 64)
    decode, prefill = (
        Tile(max_rows, kv_tokens, num_workers=2 * num_processors, split_tokens=256, item_cost=64, merge_cost=8)
        for max_rows in (16, rows)
    )
    return decode, prefill


def launch_options(family: Family, dtype: torch.dtype, *, rows: int, head_dim: int, is_8_bit: bool) -> dict[str, int]:
    """Return the compiler's options for a tile of so many packed rows, for caches of `dtype` or of 8 bits."""
    is_wide = head_dim > 128
    # Left alone, ptxas keeps registers for a second program and spills a few; told that it may have all, it needs fewer.
    all_registers = {} if family == "mfma" else {"maxnreg": 255}
    if dtype == torch.float32:
        return {"num_warps": 8 if is_wide or rows > 32 else 4, "num_stages": 2, **all_registers}
    if rows > 32:
        return {"num_warps": 4 if family == "mfma" else 8, "num_stages": 2, **(all_registers if family == "mma" else {})}
    has_three_stages = not is_wide and not is_8_bit and (family == "wgmma" or (family == "mma" and head_dim > 64))
    return {"num_warps": 4, "num_stages": 3 if has_three_stages else 2}


def fp32_precision(family: Family) -> str:
    """Return how fp32 is multiplied: by three TF32 products on NVIDIA, where plain FMAs would spill; AMD has fp32 units."""
    return "ieee" if family == "mfma" else "tf32x3"


def why_unsupported(
    dtype: torch.dtype, kv_dtype: torch.dtype, head_dim: int, value_dim: int, *, capability: tuple[int, int] = (8, 0)
) -> str | None:
    """Return why the Triton kernels cannot serve a model on a GPU, or None if they can."""
    if dtype not in (torch.float32, torch.float16, torch.bfloat16) or kv_dtype not in (dtype, *FLOAT8):
        return f"the Triton kernels compute in fp32, fp16 or bf16, not {dtype} over {kv_dtype} caches"
    if max(head_dim, value_dim) > MAX_HEAD_DIM:
        return f"the Triton kernels hold heads up to {MAX_HEAD_DIM} wide, not {max(head_dim, value_dim)}"
    if capability < (8, 0):
        return f"the Triton kernels need compute capability 8.0, the GPU has {capability[0]}.{capability[1]}"
    return None
