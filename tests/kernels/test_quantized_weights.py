"""Packed weights hold the same values as the rows they were made from, in at most 0.63 bytes per 4-bit weight."""

import pytest
import torch

from chatpage_kernels.quantized_weights import Format, PackedLinear, from_q4_0, from_q4_1, from_q8_0, pack, quantize
from tests.kernels.quantized_layers import gated, random_rows


@pytest.mark.parametrize("format_", Format)
@pytest.mark.parametrize("shape", [(32, 32), (33, 64), (1, 32), (100, 96)])
def test_unpacking_gives_the_rows_back(format_: Format, shape: tuple[int, int]) -> None:
    rows = random_rows(format_, *shape)
    back = pack(rows).unpack()
    assert torch.equal(back.dequantize()[: shape[0]], rows.dequantize())
    assert torch.equal(back.codes[: shape[0]], rows.codes)


def test_a_code_lies_where_the_header_draws_it() -> None:
    """Output 17, input 22 is in the second half, vector 1, byte 4 * 1 + 2, high nibble."""
    codes = torch.zeros(32, 32, dtype=torch.uint8)
    codes[17, 22] = 9
    packed = pack(from_q4_1(codes, torch.ones(32, 1), torch.full((32, 1), 2.0)))
    data = packed.data.flatten()
    assert data[:512].nonzero().flatten().tolist() == [256 + 64 + 4 + 2]
    assert data[256 + 64 + 4 + 2] == 9 << 4
    assert data[512:].view(torch.float16).tolist() == [1.0] * 32 + [2.0] * 32


def test_values_are_scale_times_code_with_the_offset_of_the_format() -> None:
    codes, scales = torch.arange(16, dtype=torch.uint8).repeat(2)[None], torch.tensor([[0.5]])
    assert torch.equal(from_q4_0(codes, scales).dequantize(), 0.5 * (codes.float() - 8))
    assert torch.equal(from_q4_1(codes, scales, torch.tensor([[-3.0]])).dequantize(), 0.5 * codes.float() - 3)
    signed = torch.arange(-128, 128, 8, dtype=torch.int8)[None]
    assert torch.equal(from_q8_0(signed, scales).dequantize(), 0.5 * signed.float())


@pytest.mark.parametrize(("format_", "bytes_per_weight"), [(Format.Q4_0, 0.5625), (Format.Q4_1, 0.625), (Format.Q8_0, 1.0625)])
def test_it_takes_what_the_format_takes_and_no_more(format_: Format, bytes_per_weight: float) -> None:
    assert pack(random_rows(format_, 64, 96)).num_bytes == 64 * 96 * bytes_per_weight


@pytest.mark.parametrize("bits", [4, 8])
def test_quantising_errs_by_half_a_step_of_the_group(bits: int) -> None:
    weight = torch.randn(40, 96, generator=torch.Generator().manual_seed(0)) * torch.logspace(-4, 4, 40)[:, None]
    groups = weight.view(40, 3, 32)
    span = groups.amax(2) - groups.amin(2) if bits == 4 else 2 * groups.abs().amax(2)
    half_step = span / (15 if bits == 4 else 254) / 2
    # Scale and min are rounded to fp16: a part in 2048 of what they stand for.
    allowed = half_step * 1.001 + (span + groups.abs().amax(2)) / 2048
    errors = (quantize(weight, bits).dequantize() - weight).view(40, 3, 32).abs().amax(2)
    assert bool((errors <= allowed).all())


def test_a_group_of_one_value_is_that_value() -> None:
    for bits in (4, 8):
        assert torch.equal(quantize(torch.zeros(3, 32), bits).dequantize(), torch.zeros(3, 32))
    assert torch.equal(quantize(torch.full((3, 32), 0.75), 4).dequantize(), torch.full((3, 32), 0.75))


@pytest.mark.parametrize("format_", Format)
def test_joined_matrices_lie_one_below_the_other(format_: Format) -> None:
    parts = [random_rows(format_, n, 64, seed=n) for n in (48, 16, 20)]
    packed = pack(*parts)
    assert packed.num_outputs == packed.width == 84
    assert torch.equal(packed.unpack().dequantize()[:84], torch.cat([p.dequantize() for p in parts]))


def test_a_gate_and_its_other_alternate_by_16_rows() -> None:
    gate, other, packed = gated(Format.Q4_1, 24, 64)
    values = packed.unpack().dequantize()
    assert (packed.num_outputs, packed.width) == (48, 24)
    assert torch.equal(values[:16], gate.dequantize()[:16])
    assert torch.equal(values[16:32], other.dequantize()[:16])
    assert torch.equal(values[32:40], gate.dequantize()[16:])
    assert torch.equal(values[48:56], other.dequantize()[16:])


def test_4_bit_formats_join_exactly() -> None:
    parts = [random_rows(Format.Q4_0, 32, 64), random_rows(Format.Q4_1, 32, 64)]
    packed = pack(*parts)
    assert packed.format is Format.Q4_1
    torch.testing.assert_close(packed.unpack().dequantize(), torch.cat([p.dequantize() for p in parts]), rtol=0, atol=1e-8)


def test_with_8_bits_among_them_all_become_8_bits() -> None:
    narrow, wide = random_rows(Format.Q4_1, 32, 64), random_rows(Format.Q8_0, 32, 64)
    packed = pack(narrow, wide)
    values = packed.unpack().dequantize()
    assert packed.format is Format.Q8_0
    assert torch.equal(values[32:], wide.dequantize())
    assert float((values[:32] - narrow.dequantize()).abs().max()) <= float(narrow.dequantize().abs().max()) / 250


def test_rows_are_taken_in_any_order() -> None:
    """Checkpoints in GGUF have the heads of Q and K in another order of rows than the runner wants."""
    rows, index = random_rows(Format.Q4_1, 64, 32), torch.randperm(64)
    assert torch.equal(rows.take(index).dequantize(), rows.dequantize()[index])


@pytest.mark.parametrize(
    ("codes", "scales"),
    [
        (torch.zeros(4, 48, dtype=torch.uint8), torch.ones(4, 1)),
        (torch.full((4, 32), 16, dtype=torch.uint8), torch.ones(4, 1)),
        (torch.zeros(4, 32, dtype=torch.int32), torch.ones(4, 1)),
        (torch.zeros(4, 32, dtype=torch.uint8), torch.ones(4, 2)),
        (torch.zeros(4, 32, dtype=torch.uint8), torch.full((4, 1), 1e6)),
        (torch.zeros(4, 32, dtype=torch.uint8), torch.full((4, 1), torch.nan)),
    ],
    ids=["inputs", "code", "dtype", "scales", "beyond fp16", "nan"],
)
def test_what_does_not_fit_is_refused(codes: torch.Tensor, scales: torch.Tensor) -> None:
    with pytest.raises(ValueError, match=r"must be|need|fp16"):
        from_q4_0(codes, scales)


def test_matrices_that_cannot_be_joined_are_refused() -> None:
    a, b = random_rows(Format.Q4_0, 32, 32), random_rows(Format.Q4_0, 32, 64)
    with pytest.raises(ValueError, match="32 x 32, 32 x 64"):
        pack(a, b)
    with pytest.raises(ValueError, match="a gate needs one other of its shape"):
        pack(a, a.take(slice(0, 16)), is_gated=True)
    with pytest.raises(ValueError, match=r"it must be \(32,\)"):
        pack(a, bias=torch.zeros(16))
    with pytest.raises(ValueError, match="to 4 or 8 bits"):
        quantize(torch.zeros(4, 32), 3)


def test_data_of_another_shape_is_refused() -> None:
    packed = pack(random_rows(Format.Q4_0, 32, 32))
    with pytest.raises(ValueError, match="must be uint8"):
        PackedLinear(Format.Q4_1, packed.data, 32, 32)
