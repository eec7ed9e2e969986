"""Linear layers over packed weights: the C++ kernels where they are built, plain torch everywhere else.

In C++, activations are quantised to 8 bits in groups of 32 (scale = largest / 127; one scale for a whole row would be a tenth
faster with many rows, at ten times the divergence of a small model's predictions), products are whole numbers inside a group
and fp32 across groups. What holds there:

- a row's result depends on that row alone, to the bit: not on the number of rows, their order, or the number of threads;
- a row with a NaN or an infinity gives NaN, and its neighbours nothing of it.

The torch reference dequantises the weights and leaves activations as they are: more exact, far slower, and other bits. A run
that must be repeatable stays with one of the two: ask `linear_backend` once, and keep what it gives.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Protocol

import torch

from chatpage_kernels.quantized_weights import HALF, PANEL, PackedLinear

if TYPE_CHECKING:
    from chatpage_kernels.cpu.library import Library

_PANELS_AT_ONCE = 64  # of the reference: 2,048 outputs are dequantised at a time


class LinearFunction(Protocol):
    """As `linear`."""

    def __call__(
        self,
        x: torch.Tensor,
        packed: PackedLinear,
        out: torch.Tensor | None = None,
        *,
        residual: torch.Tensor | None = None,
        norm_weight: torch.Tensor | None = None,
        norm_epsilon: float = 1e-5,
    ) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True)
class LinearBackend:
    """The two functions, and where they come from.

    Args:
        name: "cpp" or "reference".
        reason: Why this one, for people.
        linear: As `linear`.
        embed: As `embed`.
    """

    name: str
    reason: str
    linear: LinearFunction
    embed: Callable[[torch.Tensor, PackedLinear, torch.dtype], torch.Tensor]


def linear_backend(device: str | torch.device = "cpu") -> LinearBackend:
    """Return what computes linear layers now: C++ once it is built, the reference until then and on other devices."""
    if torch.device(device).type != "cpu":
        return _reference("packed weights are computed by torch on this device")
    try:
        from chatpage_kernels.cpu import build
    except ImportError as error:
        return _reference(f"the C++ kernels are not part of this installation: {error}")
    build.start()
    library = build.library()
    return _reference(build.describe()) if library is None else cpp_backend(library)


@cache
def cpp_backend(library: "Library") -> LinearBackend:
    """Return the functions of a loaded library."""
    from chatpage_kernels.cpu.linear import CpuLinear

    kernels = CpuLinear(library)

    def linear_(
        x: torch.Tensor,
        packed: PackedLinear,
        out: torch.Tensor | None = None,
        *,
        residual: torch.Tensor | None = None,
        norm_weight: torch.Tensor | None = None,
        norm_epsilon: float = 1e-5,
    ) -> torch.Tensor:
        out = _check_linear(x, packed, out, residual, norm_weight)
        kernels.linear(x, packed, out, residual=residual, norm_weight=norm_weight, norm_epsilon=norm_epsilon)
        return out

    def embed_(ids: torch.Tensor, packed: PackedLinear, dtype: torch.dtype) -> torch.Tensor:
        _check_embed(ids, packed)
        out = torch.empty(ids.shape[0], packed.num_inputs, dtype=dtype)
        kernels.embed(ids.contiguous(), packed, out)
        return out

    return LinearBackend("cpp", f"C++ kernels for {library.isa}", linear_, embed_)


def _reference(reason: str) -> LinearBackend:
    return LinearBackend("reference", reason, linear, embed)


def linear(
    x: torch.Tensor,
    packed: PackedLinear,
    out: torch.Tensor | None = None,
    *,
    residual: torch.Tensor | None = None,
    norm_weight: torch.Tensor | None = None,
    norm_epsilon: float = 1e-5,
) -> torch.Tensor:
    """Compute a linear layer in torch: the oracle, and the fallback.

    Args:
        x: fp32 or bf16 [num_rows, num_inputs]; rows may be strided.
        packed: The weights.
        out: fp32 or bf16 [num_rows, packed.width] to write to, rows may be strided; default: new, of x's dtype.
        residual: Of out's shape and dtype, added to the result; may be `out` itself.
        norm_weight: fp32 [num_inputs]; x goes through RMSNorm first: x / sqrt(mean(x^2) + norm_epsilon) * norm_weight.
        norm_epsilon: See norm_weight.

    Returns:
        `out`: x @ weight.T + bias, through silu(gate) * other if packed is gated, plus residual; rounded once.

    Raises:
        ValueError: Shapes, dtypes or strides do not fit together.
    """
    out = _check_linear(x, packed, out, residual, norm_weight)
    value = x.float()
    if norm_weight is not None:
        value = value * torch.rsqrt(value.square().mean(1, keepdim=True) + norm_epsilon) * norm_weight
    parts = []
    for first in range(0, packed.data.shape[0], _PANELS_AT_ONCE):
        parts.append(value @ packed.unpack(first, first + _PANELS_AT_ONCE).dequantize().T)
    result = torch.cat(parts, dim=1)
    if packed.bias is not None:
        result += packed.bias
    if packed.is_gated:
        halves = result.unflatten(1, (-1, 2, HALF))
        result = (torch.nn.functional.silu(halves[:, :, 0]) * halves[:, :, 1]).flatten(1)
    result = result[:, : packed.width]
    return out.copy_(result if residual is None else result + residual)


def embed(ids: torch.Tensor, packed: PackedLinear, dtype: torch.dtype) -> torch.Tensor:
    """Look rows of the weights up: the embedding of a model whose output head is `packed`.

    Args:
        ids: int64 [num_rows].
        packed: Not gated.
        dtype: Of the result, fp32 or bf16.

    Returns:
        [num_rows, packed.num_inputs].

    Raises:
        ValueError: An id is out of range, or its dtype or shape is wrong.
    """
    _check_embed(ids, packed)
    if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < packed.num_outputs:
        raise ValueError(
            f"ids from {int(ids.min())} to {int(ids.max())} are not all below the {packed.num_outputs} rows there are"
        )
    panels, index = torch.unique(ids // PANEL, return_inverse=True)
    chosen = PackedLinear(packed.format, packed.data[panels], len(panels) * PANEL, packed.num_inputs)
    return chosen.unpack().take(index * PANEL + ids % PANEL).dequantize().to(dtype)


def _check_linear(
    x: torch.Tensor,
    packed: PackedLinear,
    out: torch.Tensor | None,
    residual: torch.Tensor | None,
    norm_weight: torch.Tensor | None,
) -> torch.Tensor:
    shape = (x.shape[0], packed.width)
    if x.ndim != 2 or x.shape[1] != packed.num_inputs or not _is_served(x):
        raise ValueError(
            f"x is {tuple(x.shape)} {x.dtype}; it must be fp32 or bf16 rows of {packed.num_inputs}, each contiguous"
        )
    if out is None:
        out = x.new_empty(shape)
    elif out.shape != shape or not _is_served(out):
        raise ValueError(f"out is {tuple(out.shape)} {out.dtype}; it must be fp32 or bf16 {shape}, each row contiguous")
    if residual is not None and (residual.shape != shape or residual.dtype != out.dtype or residual.stride(1) != 1):
        raise ValueError(
            f"residual is {tuple(residual.shape)} {residual.dtype}; it must be {out.dtype} {shape}, each row contiguous"
        )
    if norm_weight is not None and (
        norm_weight.shape != (packed.num_inputs,) or norm_weight.dtype != torch.float32 or not norm_weight.is_contiguous()
    ):
        raise ValueError(
            f"norm_weight is {tuple(norm_weight.shape)} {norm_weight.dtype}; it must be fp32 ({packed.num_inputs},)"
        )
    return out


def _is_served(rows: torch.Tensor) -> bool:
    return rows.dtype in {torch.float32, torch.bfloat16} and rows.stride(1) == 1


def _check_embed(ids: torch.Tensor, packed: PackedLinear) -> None:
    if ids.ndim != 1 or ids.dtype != torch.int64 or packed.is_gated:
        raise ValueError(f"ids are {tuple(ids.shape)} {ids.dtype}; they must be int64 [num_rows], of weights without a gate")
    if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < packed.num_outputs:
        raise ValueError(
            f"ids from {int(ids.min())} to {int(ids.max())} are not all below the {packed.num_outputs} rows there are"
        )
