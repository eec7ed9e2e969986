"""Weights in 8 or 4 bits for the linear layers of a model on a CPU, where a decode step is bound by reading weights.

    int8   one scale per output row; half the bytes of bfloat16
    int4   16 levels between the smallest and the largest weight of every 32 (the grid of Q4_1 GGUF files, so such a file keeps
           its values); a quarter of the bytes. The output head is int8: its errors go straight into the choice of a token.

Few rows (a decode step) go through torch's packed products, which read the small weights directly. Many rows (a prefill chunk)
would recompute the weights for every few rows there, so the weights are widened once per call and multiplied as bfloat16: the
cost of widening does not depend on the rows. Both give the same result up to the rounding of bfloat16.

Invariant: after `quantize_linears` the wide weights of the replaced layers are gone, except an embedding that is also the head.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Literal

import torch
from torch import nn

from chatpage.errors import ConfigError

GROUP_SIZE = 32
MAX_PACKED_ROWS_INT8 = 16  # measured: with more rows, widening is cheaper than the packed product
MAX_PACKED_ROWS_INT4 = 192
_LANES = 64  # rows of weights that torch interleaves, where the CPU has AVX-512
_MIN_SHARE = 0.5

Bits = Literal["int8", "int4"]


class Int8Linear(nn.Module):
    """A linear layer with int8 weights and a bfloat16 scale per output row.

    Args:
        linear: The layer to take the weights of; its own are not changed.
    """

    weight: torch.Tensor  # int8 [out_features, in_features]
    scales: torch.Tensor  # bfloat16 [out_features]
    bias: torch.Tensor | None

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        weight = linear.weight.detach().float()
        scales = (weight.abs().amax(1) / 127).clamp_min(1e-12)
        self.register_buffer("weight", (weight / scales[:, None]).round().clamp(-127, 127).to(torch.int8))
        self.register_buffer("scales", scales.bfloat16())
        self.register_buffer("bias", None if linear.bias is None else linear.bias.detach().bfloat16())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return `[..., out_features]` for bfloat16 `[..., in_features]`."""
        rows = x.reshape(-1, self.in_features)
        if rows.shape[0] == 0:
            y = x.new_empty(0, self.out_features)
        elif rows.shape[0] <= MAX_PACKED_ROWS_INT8:
            y = torch.ops.aten._weight_int8pack_mm(rows.contiguous(), self.weight, self.scales)
        else:
            y = nn.functional.linear(rows, self.weight.to(x.dtype)).mul_(self.scales)
        if self.bias is not None:
            y = y + self.bias
        return y.view(*x.shape[:-1], self.out_features)


class Int4Linear(nn.Module):
    """A linear layer with 4-bit weights, a bfloat16 scale and offset per 32 weights of a row.

    Args:
        linear: The layer to take the weights of; its own are not changed. `can_be_int4` must hold.
    """

    packed: torch.Tensor  # uint8 [out_features, in_features / 2], in the order torch's product wants
    scales_and_zeros: torch.Tensor  # bfloat16 [in_features / 32, out_features, 2]
    bias: torch.Tensor | None

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        groups = linear.weight.detach().float().unflatten(1, (-1, GROUP_SIZE))
        low, high = groups.amin(-1), groups.amax(-1)
        scales = ((high - low) / 15).clamp_min(1e-12)
        codes = ((groups - low[..., None]) / scales[..., None]).round().clamp(0, 15).to(torch.int32).flatten(1)
        self.register_buffer("packed", torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1))
        # torch counts codes from the middle: weight = (code - 8) * scale + zero.
        both = torch.stack([scales, low + 8 * scales], -1).transpose(0, 1).contiguous()
        self.register_buffer("scales_and_zeros", both.bfloat16())
        self.register_buffer("bias", None if linear.bias is None else linear.bias.detach().bfloat16())
        self._can_widen = self.out_features % _LANES == 0 and _is_interleaved()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return `[..., out_features]` for bfloat16 `[..., in_features]`."""
        rows = x.reshape(-1, self.in_features)
        if rows.shape[0] == 0:
            y = x.new_empty(0, self.out_features)
        elif rows.shape[0] <= MAX_PACKED_ROWS_INT4 or not self._can_widen:
            y = torch.ops.aten._weight_int4pack_mm_for_cpu(rows.contiguous(), self.packed, GROUP_SIZE, self.scales_and_zeros)
        else:
            y = _multiply_wide(rows, self.packed, self.scales_and_zeros)
        if self.bias is not None:
            y = y + self.bias
        return y.view(*x.shape[:-1], self.out_features)


def quantize_linears(model: nn.Module, bits: Bits, *, head: nn.Module | None) -> str:
    """Replace the linear layers of a model on a CPU, one after the other, and describe what was done.

    Args:
        model: Its weights are bfloat16.
        bits: See the top of this file. Layers whose shape does not fit (routers, mostly) stay as they are.
        head: The output head, if it is one of the linear layers. Where it shares its weights with the embedding, the
            embedding keeps the wide ones.

    Raises:
        ConfigError: Most weights of the model are not in linear layers (such as fused experts), so it would be of no use.
    """
    in_linears = sum(module.weight.numel() for module in model.modules() if isinstance(module, nn.Linear))
    total = sum(parameter.numel() for parameter in model.parameters())
    if in_linears < _MIN_SHARE * total:
        raise ConfigError(
            f"{bits} is not available for this model: only {in_linears / total:.0%} of its weights are in plain linear layers. "
            "Use --quantization none."
        )
    make: dict[Bits, Callable[[nn.Linear], nn.Module]] = {"int8": Int8Linear, "int4": Int4Linear}
    counts = {"int8": 0, "int4": 0, "kept": 0}
    for parent in list(model.modules()):
        for name, module in list(parent.named_children()):
            if type(module) is not nn.Linear:
                continue
            kind: Bits = "int8" if module is head else bits
            if kind == "int4" and not can_be_int4(module):
                counts["kept"] += 1
                continue
            setattr(parent, name, make[kind](module))
            counts[kind] += 1
    return ", ".join(f"{count} linear layers {kind}" for kind, count in counts.items() if count)


def can_be_int4(linear: nn.Linear) -> bool:
    """Tell whether torch's product takes these shapes."""
    return linear.out_features % 16 == 0 and linear.in_features % GROUP_SIZE == 0


def _multiply_wide(rows: torch.Tensor, packed: torch.Tensor, scales_and_zeros: torch.Tensor) -> torch.Tensor:
    """Multiply after widening all weights to bfloat16; [num_rows, out_features]."""
    scales, zeros = scales_and_zeros.unbind(-1)  # [groups, out_features]
    weight = _unpack(packed, rows.dtype).unflatten(0, (-1, GROUP_SIZE))  # [groups, 32, out_features]
    weight.mul_(scales[:, None]).add_((zeros - 8 * scales)[:, None])
    return torch.mm(rows, weight.flatten(0, 1))


def _unpack(packed: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the codes 0 to 15 of packed weights, [in_features, out_features].

    A byte holds the rows r and r + 32 of a block of 64, low bits first; bytes go over the 32 rows, then the columns.
    """
    pairs = packed.view(packed.shape[0] // _LANES, -1, _LANES // 2)
    codes = torch.empty(pairs.shape[1], pairs.shape[0], _LANES, dtype=dtype)
    by_block = codes.transpose(0, 1)
    by_block[..., : _LANES // 2] = pairs & 15
    by_block[..., _LANES // 2 :] = pairs >> 4
    return codes.flatten(1)


@lru_cache(maxsize=1)
def _is_interleaved() -> bool:
    """Whether torch packs as `_unpack` expects; it depends on the CPU, so it is tried."""
    codes = torch.randint(0, 16, (2 * _LANES, GROUP_SIZE), dtype=torch.int32, generator=torch.Generator().manual_seed(0))
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
    return torch.equal(_unpack(packed, torch.int32).T, codes)
