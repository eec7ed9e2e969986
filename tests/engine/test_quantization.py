"""Small weights give nearly the same numbers, and the wide ones are gone."""

from pathlib import Path

import pytest
import torch
from torch import nn

from chatpage.config import EngineConfig
from chatpage.engine import kv_cache
from chatpage.engine.models import quantization
from chatpage.engine.models.loading import load_model
from chatpage.engine.models.quantization import Int4Linear, Int8Linear, quantize_linears
from chatpage.errors import ConfigError
from tests.engine.architectures import save, tiny_config, tiny_model
from tests.engine.model_driving import Driver, reference_backend
from tests.tiny_models import save_tiny_llama


def _linear(out_features: int = 128, in_features: int = 96, *, bias: bool = False) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(in_features, out_features, bias=bias).bfloat16()


def _error(layer: nn.Module, linear: nn.Linear, x: torch.Tensor) -> float:
    expected = nn.functional.linear(x.float(), linear.weight.float(), None if linear.bias is None else linear.bias.float())
    actual = layer(x).float()
    assert actual.shape == expected.shape
    return float((actual - expected).norm() / expected.norm())


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("num_rows", [1, 3, 16, 17, 64, 192, 193, 300])
def test_products_are_as_close_as_the_bits_allow_for_few_and_many_rows(num_rows: int, bias: bool) -> None:
    linear = _linear(bias=bias)
    x = torch.randn(1, num_rows, 96).bfloat16()
    with torch.inference_mode():
        assert _error(Int8Linear(linear), linear, x) < 0.012
        assert _error(Int4Linear(linear), linear, x) < 0.1


@pytest.mark.parametrize("kind", [Int8Linear, Int4Linear])
def test_the_widened_product_equals_the_packed_one(
    kind: type[Int8Linear | Int4Linear], monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = kind(_linear(192, 64))
    x = torch.randn(40, 64).bfloat16()
    with torch.inference_mode():
        monkeypatch.setattr(quantization, "MAX_PACKED_ROWS_INT8", 1000)
        monkeypatch.setattr(quantization, "MAX_PACKED_ROWS_INT4", 1000)
        packed = layer(x).float()
        monkeypatch.setattr(quantization, "MAX_PACKED_ROWS_INT8", 0)
        monkeypatch.setattr(quantization, "MAX_PACKED_ROWS_INT4", 0)
        widened = layer(x).float()
    assert (packed - widened).norm() < 0.01 * packed.norm()


@pytest.mark.parametrize("num_rows", [2, 300])
@pytest.mark.parametrize("kind", [Int8Linear, Int4Linear])
def test_rows_that_no_block_of_lanes_holds_still_work(kind: type[Int8Linear | Int4Linear], num_rows: int) -> None:
    linear = _linear(48, 64)
    with torch.inference_mode():
        assert _error(kind(linear), linear, torch.randn(num_rows, 64).bfloat16()) < 0.1


def test_a_q4_1_grid_survives_int4() -> None:
    """Weights that already lie on 16 levels per group of 32, as in a Q4_1 file, come back to the rounding of bfloat16."""
    torch.manual_seed(0)
    codes = torch.randint(0, 16, (64, 3, 32)).float()
    codes[..., 0], codes[..., 1] = 0, 15
    weight = (codes * torch.rand(64, 3, 1) + torch.randn(64, 3, 1)).flatten(1)
    linear = nn.Linear(96, 64, bias=False).bfloat16()
    linear.weight.data = weight.bfloat16()
    x = torch.eye(96).bfloat16()
    with torch.inference_mode():
        assert _error(Int4Linear(linear), linear, x) < 0.006


def test_no_rows_give_no_rows() -> None:
    """A step that only fills the KV cache asks for no logits, so the head gets an empty input."""
    x = torch.empty(1, 0, 96).bfloat16()
    assert Int8Linear(_linear())(x).shape == (1, 0, 128)
    assert Int4Linear(_linear())(x).shape == (1, 0, 128)


def test_weights_of_zero_stay_zero() -> None:
    linear = _linear()
    linear.weight.data.zero_()
    x = torch.randn(2, 96).bfloat16()
    with torch.inference_mode():
        for layer in (Int8Linear(linear), Int4Linear(linear)):
            assert not layer(x).any()


def _num_bytes(model: nn.Module) -> int:
    tensors = {tensor.data_ptr(): tensor for tensor in (*model.parameters(), *model.buffers())}
    return sum(tensor.numel() * tensor.itemsize for tensor in tensors.values())


def test_the_wide_weights_are_freed_and_the_head_gets_eight_bits() -> None:
    model = tiny_model(tiny_config("llama", hidden_size=64, intermediate_size=128, tie_word_embeddings=False)).bfloat16()
    wide = _num_bytes(model)
    text = quantize_linears(model, "int4", head=model.get_output_embeddings())
    assert text == "1 linear layers int8, 14 linear layers int4"
    assert type(model.lm_head) is Int8Linear
    assert _num_bytes(model) < 0.55 * wide
    assert not any(type(module) is nn.Linear for module in model.modules())


def test_an_embedding_that_is_also_the_head_keeps_its_values() -> None:
    model = tiny_model(tiny_config("llama", tie_word_embeddings=True)).bfloat16()
    before = model.get_input_embeddings().weight.clone()
    quantize_linears(model, "int8", head=model.get_output_embeddings())
    assert torch.equal(model.get_input_embeddings().weight, before)
    assert type(model.lm_head) is Int8Linear


def test_layers_whose_shape_does_not_fit_stay_wide() -> None:
    model = nn.Sequential(nn.Linear(64, 128), nn.Linear(128, 4), nn.Linear(40, 64)).bfloat16()
    assert quantize_linears(model, "int4", head=None) == "1 linear layers int4, 2 linear layers kept"


def test_a_model_of_fused_experts_is_refused() -> None:
    model = tiny_model(tiny_config("mixtral", num_local_experts=8))
    with pytest.raises(ConfigError, match=r"int4 is not available for this model: only \d+% of its weights"):
        quantize_linears(model, "int4", head=None)


@pytest.mark.parametrize("bits", ["int8", "int4"])
def test_a_quantized_model_is_served_and_stays_near_the_wide_one(
    bits: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_cache, "select_backend", reference_backend)
    folder = save_tiny_llama(tmp_path, hidden_size=64, intermediate_size=128)
    wide = load_model(EngineConfig.load(model=str(folder), device="cpu", dtype="bfloat16"), show_progress=False)
    small = load_model(EngineConfig.load(model=str(folder), device="cpu", quantization=bits), show_progress=False)
    assert bits in small.description
    logits = []
    for model in (wide, small):
        driver = Driver(model.runner, dtype=torch.bfloat16)
        logits.append(driver.step([(list(range(20, 44)), 0, driver.table(24))]))
    error = (logits[0] - logits[1]).norm() / logits[0].norm()
    assert 0 < error < (0.05 if bits == "int8" else 0.4)


def test_a_quantized_model_of_another_family_is_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_cache, "select_backend", reference_backend)
    folder = save(tiny_model(tiny_config("qwen2", hidden_size=64, intermediate_size=64)), tmp_path)
    model = load_model(EngineConfig.load(model=str(folder), device="cpu", quantization="int8"), show_progress=False)
    assert len(Driver(model.runner, dtype=torch.bfloat16).greedy([[5, 6, 7]], 4, chunk=2)[0]) == 4
