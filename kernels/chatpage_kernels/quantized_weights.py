"""Weights quantised in groups of 32 inputs, as GGUF has them, and their packed form for the kernels.

`QuantizedRows` is a matrix whose rows can still be chosen and joined; `pack` joins matrices of the same inputs into one
`PackedLinear`, the only copy that stays. Nothing in between is fp32: the bytes of a GGUF file are rearranged.

The value of a weight is `scale * code + min` (Q4_1), `scale * (code - 8)` (Q4_0) or `scale * (code - 128)` (Q8_0), with scale
and min in fp16 for each output and group of 32 inputs: 0.625, 0.5625 and 1.0625 bytes per weight.

A packed group of 32 outputs x 32 inputs; linear.h draws the codes:

    | codes, outputs 0-15 | codes, outputs 16-31 | 32 scales | 32 mins (Q4_1) |
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import torch

GROUP = 32  # inputs that share a scale
PANEL = 32  # outputs that lie side by side
HALF = PANEL // 2
_FP16_MAX = 65504.0


class Format(Enum):
    """How the weights of a group are coded; the value is that of linear.h."""

    Q4_0 = 0
    Q4_1 = 1
    Q8_0 = 2

    @property
    def bits(self) -> int:
        return 8 if self is Format.Q8_0 else 4

    @property
    def code_bytes(self) -> int:
        """Bytes that hold the codes of one output's group."""
        return GROUP * self.bits // 8

    @property
    def num_halves(self) -> int:
        """fp16 numbers beside the codes of one output's group."""
        return 2 if self is Format.Q4_1 else 1

    @property
    def group_bytes(self) -> int:
        """Bytes of a packed group of 32 outputs."""
        return PANEL * (self.code_bytes + 2 * self.num_halves)


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedRows:
    """A quantised matrix, row by row.

    Args:
        format: Of the codes.
        codes: uint8 [num_outputs, num_groups, 16 or 32]. 4-bit: byte i has input i in the low and 16 + i in the high nibble.
        scales: fp16 [num_outputs, num_groups].
        mins: fp16 [num_outputs, num_groups] for Q4_1, else None.
    """

    format: Format
    codes: torch.Tensor
    scales: torch.Tensor
    mins: torch.Tensor | None = None

    @property
    def num_outputs(self) -> int:
        return self.codes.shape[0]

    @property
    def num_inputs(self) -> int:
        return self.codes.shape[1] * GROUP

    def take(self, index: torch.Tensor | slice) -> "QuantizedRows":
        """Return the rows that an index names, in its order."""
        mins = None if self.mins is None else self.mins[index]
        return QuantizedRows(self.format, self.codes[index], self.scales[index], mins)

    def dequantize(self) -> torch.Tensor:
        """Return the values, fp32 [num_outputs, num_inputs]."""
        codes = self.codes
        if self.format.bits == 4:
            codes = torch.cat([codes & 15, codes >> 4], dim=2)
        offset = -(1 << self.format.bits - 1) * self.scales.float() if self.mins is None else self.mins.float()
        values = torch.addcmul(offset[:, :, None], codes.float(), self.scales.float()[:, :, None])
        return values.flatten(1)


@dataclass(frozen=True, slots=True, eq=False)
class PackedLinear:
    """The weights of a linear layer, packed for the kernels.

    Args:
        format: Of the codes.
        data: uint8 [num_panels, num_groups, format.group_bytes], contiguous.
        num_outputs: Rows of the matrix; if gated, of gate and other together.
        num_inputs: A multiple of 32.
        is_gated: Each panel has 16 rows of a gate and 16 to multiply: the layer gives silu(gate) * other.
        bias: fp32 [32 * num_panels] in the order of the panels, or None.
    """

    format: Format
    data: torch.Tensor
    num_outputs: int
    num_inputs: int
    is_gated: bool = False
    bias: torch.Tensor | None = None

    def __post_init__(self) -> None:
        shape = (-(-self.num_outputs // PANEL), self.num_inputs // GROUP, self.format.group_bytes)
        if self.data.shape != shape or self.data.dtype != torch.uint8 or not self.data.is_contiguous():
            raise ValueError(
                f"packed weights are {tuple(self.data.shape)} {self.data.dtype}; they must be uint8 {shape}, contiguous"
            )
        if self.bias is not None and (self.bias.shape != (shape[0] * PANEL,) or self.bias.dtype != torch.float32):
            raise ValueError(f"the bias is {tuple(self.bias.shape)} {self.bias.dtype}; it must be fp32 ({shape[0] * PANEL},)")

    @property
    def width(self) -> int:
        """Columns of the layer's output."""
        return self.num_outputs // 2 if self.is_gated else self.num_outputs

    @property
    def num_bytes(self) -> int:
        return self.data.nbytes + (0 if self.bias is None else self.bias.nbytes)

    def unpack(self, first_panel: int = 0, end_panel: int | None = None) -> QuantizedRows:
        """Return the rows of the panels [first_panel, end_panel) in the order of the panels, with the padding."""
        data = self.data[first_panel:end_panel]
        num_panels, num_groups, _ = data.shape
        code_bytes = PANEL * self.format.code_bytes
        codes = (
            data[:, :, :code_bytes]
            .contiguous()
            .view(torch.int32)
            .view(num_panels, num_groups, 2, self.format.code_bytes // 4, HALF)
        )
        codes = (
            codes.permute(0, 2, 4, 1, 3).reshape(num_panels * PANEL, num_groups, self.format.code_bytes // 4).view(torch.uint8)
        )
        halves = (
            data[:, :, code_bytes:].contiguous().view(torch.float16).view(num_panels, num_groups, self.format.num_halves, PANEL)
        )
        halves = halves.permute(2, 0, 3, 1).reshape(self.format.num_halves, num_panels * PANEL, num_groups)
        return QuantizedRows(self.format, codes, halves[0], halves[1] if self.format is Format.Q4_1 else None)


def from_q4_1(codes: torch.Tensor, scales: torch.Tensor, mins: torch.Tensor) -> QuantizedRows:
    """Take 4-bit codes whose values are `scale * code + min`.

    Args:
        codes: uint8 [num_outputs, num_inputs] of [0, 15]; num_inputs is a multiple of 32.
        scales: [num_outputs, num_inputs / 32]; rounded to fp16.
        mins: Likewise.

    Raises:
        ValueError: Shapes or values do not fit.
    """
    return QuantizedRows(Format.Q4_1, _pack_nibbles(codes), _half(scales, codes), _half(mins, codes))


def from_q4_0(codes: torch.Tensor, scales: torch.Tensor) -> QuantizedRows:
    """Take 4-bit codes whose values are `scale * (code - 8)`; see `from_q4_1`."""
    return QuantizedRows(Format.Q4_0, _pack_nibbles(codes), _half(scales, codes))


def from_q8_0(codes: torch.Tensor, scales: torch.Tensor) -> QuantizedRows:
    """Take int8 codes [num_outputs, num_inputs] whose values are `scale * code`; see `from_q4_1`."""
    if codes.dtype != torch.int8 or codes.ndim != 2 or codes.shape[1] % GROUP:
        raise ValueError(
            f"codes are {tuple(codes.shape)} {codes.dtype}; they must be int8 [outputs, a multiple of {GROUP} inputs]"
        )
    return QuantizedRows(Format.Q8_0, _biased(codes).view(codes.shape[0], -1, GROUP), _half(scales, codes))


def quantize(weight: torch.Tensor, bits: int) -> QuantizedRows:
    """Quantise a matrix by the extremes of each group: 4 bits as Q4_1, 8 bits as Q8_0.

    Args:
        weight: Floating point [num_outputs, num_inputs]; num_inputs is a multiple of 32.
        bits: 4 or 8.

    Raises:
        ValueError: The shape or `bits` is not served, or a value is not finite or beyond fp16.
    """
    if weight.ndim != 2 or weight.shape[1] % GROUP or bits not in {4, 8}:
        raise ValueError(
            f"cannot quantise {tuple(weight.shape)} to {bits} bits: the inputs go in groups of {GROUP}, to 4 or 8 bits"
        )
    groups = weight.float().view(weight.shape[0], -1, GROUP)
    if bits == 8:
        scales = groups.abs().amax(2).div(127)
        scales = _round_up_to_half(scales)
        codes = groups.div(_not_zero(scales)[:, :, None]).round_().clamp_(-127, 127)
        return from_q8_0(codes.to(torch.int8).flatten(1), scales)
    mins = _half(groups.amin(2), weight).float()
    scales = _round_up_to_half((groups.amax(2) - mins).div(15))
    codes = groups.sub(mins[:, :, None]).div_(_not_zero(scales)[:, :, None]).round_().clamp_(0, 15)
    return from_q4_1(codes.to(torch.uint8).flatten(1), scales, mins)


def pack(*matrices: QuantizedRows, is_gated: bool = False, bias: torch.Tensor | None = None) -> PackedLinear:
    """Join matrices of the same inputs, one below the other, and pack them.

    Matrices of different formats become the smallest one that holds all of them: Q4_0 and Q4_1 are Q4_1, exactly; with a Q8_0
    among them everything is quantised to 8 bits.

    Args:
        matrices: At least one.
        is_gated: There are two of one shape, the gate and what it multiplies: the layer gives silu(gate) * other.
        bias: [num_outputs] of the joined matrix.

    Raises:
        ValueError: The matrices do not fit together.
    """
    if len({m.num_inputs for m in matrices}) != 1 or (
        is_gated and [m.num_outputs for m in matrices] != [matrices[0].num_outputs] * 2
    ):
        shapes = ", ".join(f"{m.num_outputs} x {m.num_inputs}" for m in matrices)
        raise ValueError(
            f"cannot join matrices of {shapes}: their inputs must be the same, and a gate needs one other of its shape"
        )
    matrices = tuple(_common_format(matrices))
    num_outputs, num_groups = sum(m.num_outputs for m in matrices), matrices[0].codes.shape[1]
    if bias is not None and bias.shape != (num_outputs,):
        raise ValueError(f"the bias is {tuple(bias.shape)}; it must be ({num_outputs},)")
    arrange = _interleave_halves if is_gated else _join_panels
    codes = arrange([m.codes.contiguous().view(torch.int32) for m in matrices])
    codes = codes.view(-1, 2, HALF, num_groups, codes.shape[2]).permute(0, 3, 1, 4, 2)
    format_ = matrices[0].format
    parts = [codes.reshape(codes.shape[0], num_groups, -1).view(torch.uint8)]
    for halves in ([m.scales for m in matrices], [m.mins for m in matrices if m.mins is not None]):
        if halves:
            parts.append(arrange(halves).view(-1, PANEL, num_groups).transpose(1, 2).contiguous().view(torch.uint8))
    if bias is not None:
        bias = arrange(list(bias.float().split([m.num_outputs for m in matrices])))
    return PackedLinear(format_, torch.cat(parts, dim=2), num_outputs, num_groups * GROUP, is_gated, bias)


def _join_panels(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Join along the first dimension and pad it with zeros to whole panels."""
    return _padded(tensors[0] if len(tensors) == 1 else torch.cat(list(tensors)), PANEL)


def _interleave_halves(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Alternate 16 rows of the first and 16 of the second, each padded with zeros."""
    halves = [_padded(tensor, HALF).unflatten(0, (-1, HALF)) for tensor in tensors]
    return torch.stack(halves, dim=1).flatten(0, 2)


def _padded(tensor: torch.Tensor, multiple: int) -> torch.Tensor:
    missing = -tensor.shape[0] % multiple
    return torch.cat([tensor, tensor.new_zeros(missing, *tensor.shape[1:])]) if missing else tensor


def _common_format(matrices: Sequence[QuantizedRows]) -> list[QuantizedRows]:
    formats = {m.format for m in matrices}
    if len(formats) == 1:
        return list(matrices)
    if Format.Q8_0 in formats:
        return [m if m.format is Format.Q8_0 else quantize(m.dequantize(), 8) for m in matrices]
    return [m if m.mins is not None else QuantizedRows(Format.Q4_1, m.codes, m.scales, m.scales * -8) for m in matrices]


def _pack_nibbles(codes: torch.Tensor) -> torch.Tensor:
    if codes.dtype != torch.uint8 or codes.ndim != 2 or codes.shape[1] % GROUP or (codes.numel() and int(codes.max()) > 15):
        raise ValueError(
            f"codes are {tuple(codes.shape)} {codes.dtype}; they must be uint8 [outputs, a multiple of {GROUP} inputs] below 16"
        )
    groups = codes.view(codes.shape[0], -1, 2, GROUP // 2)
    return groups[:, :, 0] | groups[:, :, 1] << 4


def _biased(codes: torch.Tensor) -> torch.Tensor:
    """Turn int8 into uint8, 128 higher."""
    return codes.contiguous().view(torch.uint8) ^ 128


def _half(values: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    expected = (codes.shape[0], codes.shape[1] // GROUP)
    if values.shape != expected:
        raise ValueError(f"scales or mins are {tuple(values.shape)}; codes of {tuple(codes.shape)} need {expected}")
    if values.numel() and not bool((values.abs() <= _FP16_MAX).all()):
        raise ValueError(f"scales or mins are not finite or beyond {_FP16_MAX:.0f}, what fp16 holds")
    return values.to(torch.float16)


def _round_up_to_half(scales: torch.Tensor) -> torch.Tensor:
    """Round to fp16, never down: the extremes of a group must stay within the codes."""
    rounded = scales.to(torch.float16)
    too_small = rounded.float() < scales
    return torch.where(too_small, torch.nextafter(rounded, torch.full_like(rounded, torch.inf)), rounded).float()


def _not_zero(scales: torch.Tensor) -> torch.Tensor:
    return torch.where(scales == 0, 1.0, scales)
