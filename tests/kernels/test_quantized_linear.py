"""A layer over packed weights is the product with its dequantised weights, within the error of 8-bit activations.

C++ is tested for every instruction set that this machine has, and the torch reference by the same rules.
"""

import pytest
import torch
from torch.nn.functional import silu

from chatpage_kernels import quantized_linear
from chatpage_kernels.quantized_linear import LinearBackend, cpp_backend, linear_backend
from chatpage_kernels.quantized_weights import Format, PackedLinear, QuantizedRows, pack
from tests.kernels.cpu_libraries import ISA_NAMES, best_kernels, kernels_for
from tests.kernels.quantized_layers import gated, random_rows, whole_activations, whole_rows

SHAPES = [(32, 32), (33, 64), (1, 96), (100, 576), (7, 1536), (576, 160)]
ROWS = [1, 2, 3, 5, 6, 7, 8, 13, 40]


@pytest.fixture(params=["reference", *ISA_NAMES])
def backend(request: pytest.FixtureRequest) -> LinearBackend:
    if request.param == "reference":
        return linear_backend("meta")
    return cpp_backend(kernels_for(request.param).library)


@pytest.fixture(params=ISA_NAMES)
def cpp(request: pytest.FixtureRequest) -> LinearBackend:
    return cpp_backend(kernels_for(request.param).library)


@pytest.fixture
def best() -> LinearBackend:
    return cpp_backend(best_kernels().library)


def _activations(num_rows: int, num_inputs: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Rows like those of a model: some inputs are far larger than the others."""
    x = torch.randn(num_rows, num_inputs, generator=torch.Generator().manual_seed(4))
    x[:, ::37] *= 30
    return x.to(dtype)


def _allowed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Half a step of every activation, largest / 254 of its group, through the weights; and the rounding of fp32 sums."""
    step = x.double().view(x.shape[0], -1, 32).abs().amax(2) / 254
    magnitudes = weight.double().abs()
    return step @ magnitudes.view(len(weight), -1, 32).sum(2).T * 1.0001 + x.double().abs() @ magnitudes.T * 1e-5


def _assert_is_product(actual: torch.Tensor, x: torch.Tensor, rows: QuantizedRows) -> None:
    weight = rows.dequantize()
    error = (actual.double() - x.double() @ weight.double().T).abs()
    assert bool((error <= _allowed(x, weight)).all())


@pytest.mark.parametrize("format_", Format)
@pytest.mark.parametrize("shape", SHAPES)
def test_it_is_the_product_with_the_dequantised_weights(
    backend: LinearBackend, shape: tuple[int, int], format_: Format
) -> None:
    rows = random_rows(format_, *shape)
    packed = pack(rows)
    for num_rows in ROWS:
        x = _activations(num_rows, shape[1])
        _assert_is_product(backend.linear(x, packed), x, rows)


@pytest.mark.parametrize("format_", Format)
def test_it_is_exact_where_activations_are_their_own_codes(backend: LinearBackend, format_: Format) -> None:
    """Nothing is rounded here, so a code in a wrong place cannot hide in the error of quantisation."""
    for num_outputs, num_inputs in SHAPES:
        rows = whole_rows(format_, num_outputs, num_inputs)
        x = whole_activations(13, num_inputs)
        assert torch.equal(backend.linear(x, pack(rows)), (x.double() @ rows.dequantize().double().T).float())


@pytest.mark.parametrize("format_", Format)
def test_the_extremes_of_codes_do_not_overflow(backend: LinearBackend, format_: Format) -> None:
    """Without VNNI, products of pairs pass through 16 bits: 255 * 127 * 2 would not fit, and -128 has no opposite."""
    rows = whole_rows(format_, 64, 64)
    for byte in (0, 255):
        extreme = QuantizedRows(format_, torch.full_like(rows.codes, byte), rows.scales, rows.mins)
        for sign in (-1.0, 1.0):
            x = torch.full((3, 64), 127.0 * sign)
            assert torch.equal(backend.linear(x, pack(extreme)), x @ extreme.dequantize().T)


def test_a_prefill_of_512_rows_is_the_product(best: LinearBackend) -> None:
    rows = random_rows(Format.Q4_1, 100, 1536)
    x = _activations(512, 1536)
    _assert_is_product(best.linear(x, pack(rows)), x, rows)


@pytest.mark.parametrize("format_", Format)
def test_a_row_does_not_depend_on_the_others(cpp: LinearBackend, format_: Format) -> None:
    """Sampling by seed is repeatable only if a sequence gets the same logits whoever shares its steps."""
    packed, x = pack(random_rows(format_, 100, 576)), _activations(512, 576)
    alone = torch.cat([cpp.linear(x[i : i + 1], packed) for i in range(40)])
    for num_rows in (*ROWS, 512):
        assert torch.equal(cpp.linear(x[:num_rows], packed)[:40], alone[:num_rows])


def test_the_number_of_threads_changes_nothing(best: LinearBackend) -> None:
    packed, x, norm = pack(random_rows(Format.Q4_1, 960, 576)), _activations(33, 576), torch.rand(576)
    threads = torch.get_num_threads()
    try:
        results = []
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            results.append(best.linear(x, packed, norm_weight=norm))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@pytest.mark.parametrize("num_rows", [1, 9])
@pytest.mark.parametrize("width", [16, 40, 50])
def test_a_gated_layer_gives_silu_of_the_gate_times_the_other(backend: LinearBackend, width: int, num_rows: int) -> None:
    bias = torch.randn(2 * width, generator=torch.Generator().manual_seed(5))
    gate, other, packed = gated(Format.Q4_1, width, 64, bias)
    x = _activations(num_rows, 64)
    g, o = (
        (x.double() @ m.dequantize().double().T + b) for m, b in zip((gate, other), bias.double().split(width), strict=True)
    )
    g_error, o_error = (_allowed(x, m.dequantize()) for m in (gate, other))
    # The slope of silu is at most 1.1.
    allowed = 1.1 * g_error * (o.abs() + o_error) + silu(g).abs() * o_error + 1e-5
    assert bool(((backend.linear(x, packed).double() - silu(g) * o).abs() <= allowed).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bias_and_residual_are_added_before_the_one_rounding(backend: LinearBackend, dtype: torch.dtype) -> None:
    rows, x = whole_rows(Format.Q4_1, 50, 64), whole_activations(7, 64)
    bias = torch.arange(50, dtype=torch.float32)
    residual = torch.randn(7, 50, generator=torch.Generator().manual_seed(6)).to(dtype)
    exact = x @ rows.dequantize().T + bias
    out = residual.clone()
    result = backend.linear(x, pack(rows, bias=bias), out, residual=out)
    assert result is out
    assert torch.equal(out, (exact + residual.float()).to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm_comes_before_the_product(backend: LinearBackend, dtype: torch.dtype) -> None:
    rows, x = random_rows(Format.Q8_0, 64, 96), _activations(5, 96, dtype)
    weight = torch.rand(96, generator=torch.Generator().manual_seed(7)) + 0.5
    normed = x.double() * torch.rsqrt(x.double().square().mean(1, keepdim=True) + 1e-3) * weight.double()
    out = backend.linear(x, pack(rows), torch.empty(5, 64), norm_weight=weight, norm_epsilon=1e-3)
    error = (out.double() - normed @ rows.dequantize().double().T).abs()
    assert bool((error <= _allowed(normed, rows.dequantize())).all())


def test_rows_may_be_strided(backend: LinearBackend) -> None:
    rows, x = random_rows(Format.Q4_0, 40, 64), _activations(12, 128)[::2, 32:96]
    out = torch.full((6, 100), 7.0)
    backend.linear(x, pack(rows), out[:, 10:50])
    _assert_is_product(out[:, 10:50], x, rows)
    assert bool((out[:, :10] == 7).all())
    assert bool((out[:, 50:] == 7).all())


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_stays_in_its_row(backend: LinearBackend, bad: float) -> None:
    packed, x = pack(random_rows(Format.Q4_1, 33, 64)), _activations(9, 64)
    clean = backend.linear(x, packed)
    x[4, 50] = bad
    out = backend.linear(x, packed)
    assert not bool(out[4].isfinite().any())
    assert torch.equal(out[:4], clean[:4])
    assert torch.equal(out[5:], clean[5:])


@pytest.mark.parametrize("value", [0.0, 1e-38, 1e-20, 1e30])
def test_activations_of_any_size_are_served(backend: LinearBackend, value: float) -> None:
    rows = whole_rows(Format.Q4_0, 32, 32)
    out = backend.linear(torch.full((2, 32), value), pack(rows)).double()
    expected = torch.full((2, 32), value).double() @ rows.dequantize().double().T
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-27)


@pytest.mark.parametrize("format_", Format)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_embedding_is_read_from_the_packed_head(backend: LinearBackend, format_: Format, dtype: torch.dtype) -> None:
    rows = random_rows(format_, 100, 64)
    ids = torch.tensor([99, 0, 31, 32, 47, 99, 3])
    assert torch.equal(backend.embed(ids, pack(rows), dtype), rows.dequantize()[ids].to(dtype))
    assert backend.embed(ids[:0], pack(rows), dtype).shape == (0, 64)


def test_no_rows_give_no_rows(backend: LinearBackend) -> None:
    assert backend.linear(torch.empty(0, 64), pack(random_rows(Format.Q4_1, 33, 64))).shape == (0, 33)


def _packed() -> PackedLinear:
    return pack(random_rows(Format.Q4_1, 33, 64))


@pytest.mark.parametrize(
    ("x", "options"),
    [
        (torch.zeros(2, 32), {}),
        (torch.zeros(2, 64, dtype=torch.float16), {}),
        (torch.zeros(64, 2).T, {}),
        (torch.zeros(2, 64), {"out": torch.zeros(2, 32)}),
        (torch.zeros(2, 64), {"out": torch.zeros(2, 33, dtype=torch.float64)}),
        (torch.zeros(2, 64), {"residual": torch.zeros(3, 33)}),
        (torch.zeros(2, 64), {"residual": torch.zeros(2, 33, dtype=torch.bfloat16)}),
        (torch.zeros(2, 64), {"norm_weight": torch.zeros(33)}),
        (torch.zeros(2, 64), {"norm_weight": torch.zeros(64, dtype=torch.bfloat16)}),
    ],
)
def test_what_does_not_fit_is_refused(backend: LinearBackend, x: torch.Tensor, options: dict[str, torch.Tensor]) -> None:
    with pytest.raises(ValueError, match="must be"):
        backend.linear(x, _packed(), **options)  # type: ignore[arg-type]


def test_ids_beyond_the_rows_are_refused(backend: LinearBackend) -> None:
    for ids in (torch.tensor([33]), torch.tensor([-1]), torch.tensor([0], dtype=torch.int32)):
        with pytest.raises(ValueError, match="ids"):
            backend.embed(ids, _packed(), torch.float32)


def test_the_reference_serves_until_the_kernels_are_built(monkeypatch: pytest.MonkeyPatch) -> None:
    from chatpage_kernels.cpu import build

    monkeypatch.setattr(build, "start", lambda: None)
    monkeypatch.setattr(build, "library", lambda: None)
    monkeypatch.setattr(build, "describe", lambda: "being compiled")
    chosen = linear_backend()
    assert (chosen.name, chosen.reason, chosen.linear) == ("reference", "being compiled", quantized_linear.linear)
    library = best_kernels().library
    monkeypatch.setattr(build, "library", lambda: library)
    assert linear_backend().name == "cpp"
