"""Layers over packed weights for tests: random ones, and ones whose results are whole numbers."""

import torch

from chatpage_kernels.quantized_weights import Format, PackedLinear, QuantizedRows, from_q4_0, from_q4_1, from_q8_0, pack


def random_rows(format_: Format, num_outputs: int, num_inputs: int, seed: int = 0) -> QuantizedRows:
    """Return weights of a trained layer's size: about 0.05 each."""
    generator = torch.Generator().manual_seed(seed)
    shape = (num_outputs, num_inputs // 32)
    scales = torch.rand(shape, generator=generator) * 0.01 + 0.001
    if format_ is Format.Q8_0:
        return from_q8_0(_codes(generator, -128, 128, num_outputs, num_inputs).to(torch.int8), scales / 16)
    codes = _codes(generator, 0, 16, num_outputs, num_inputs).to(torch.uint8)
    if format_ is Format.Q4_0:
        return from_q4_0(codes, scales * torch.randn(shape, generator=generator).sign())
    return from_q4_1(codes, scales, -scales * (7.5 + torch.randn(shape, generator=generator)))


def whole_rows(format_: Format, num_outputs: int, num_inputs: int) -> QuantizedRows:
    """Return weights that are whole numbers."""
    rows = random_rows(format_, num_outputs, num_inputs)
    scales = (torch.arange(rows.scales.numel()) % 3 + 1).view_as(rows.scales).half()
    mins = None if rows.mins is None else (torch.arange(scales.numel()) % 7 - 3).view_as(scales).half()
    return QuantizedRows(format_, rows.codes, scales, mins)


def whole_activations(num_rows: int, num_inputs: int) -> torch.Tensor:
    """Return fp32 activations whose 8-bit codes are they themselves: whole numbers, the largest of each group 127."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randint(-127, 128, (num_rows, num_inputs // 32, 32), generator=generator)
    x[:, :, 5] = 127
    return x.flatten(1).float()


def gated(
    format_: Format, width: int, num_inputs: int, bias: torch.Tensor | None = None
) -> tuple[QuantizedRows, QuantizedRows, PackedLinear]:
    """Return a gate, what it multiplies, and both packed."""
    gate, other = (random_rows(format_, width, num_inputs, seed) for seed in (2, 3))
    return gate, other, pack(gate, other, is_gated=True, bias=bias)


def _codes(generator: torch.Generator, low: int, high: int, *shape: int) -> torch.Tensor:
    return torch.randint(low, high, shape, generator=generator)
