"""Only what the fused runner computes passes; its windows and frequencies are those of transformers."""

from typing import Any

import pytest
import torch

from chatpage.engine.models.llama_shape import read_shape, why_unsupported
from tests.engine.architectures import tiny_config, tiny_model


@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen2", "qwen3"])
def test_the_family_passes(model_type: str) -> None:
    config = tiny_config(model_type, hidden_size=64, intermediate_size=96, head_dim=16)
    assert why_unsupported(config) == ""
    shape = read_shape(config, max_len=128)
    assert (shape.num_layers, shape.num_q_heads, shape.num_kv_heads, shape.head_dim) == (2, 4, 2, 16)


@pytest.mark.parametrize(
    ("model_type", "settings", "reason"),
    [
        ("gemma", {}, "gemma is not of the llama family"),
        ("llama", {"hidden_act": "gelu"}, "its activation is gelu"),
        ("llama", {"mlp_bias": True}, "have a bias"),
        ("llama", {"hidden_size": 40}, "no multiples of 32"),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, r"\(dynamic\)"),
    ],
)
def test_what_it_does_not_compute_is_named(model_type: str, settings: dict[str, Any], reason: str) -> None:
    fitting = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
    with pytest.raises(AssertionError, match=reason):
        assert not why_unsupported(tiny_config(model_type, **(fitting | settings)))


def test_a_window_belongs_to_the_layers_that_have_it() -> None:
    mistral = tiny_config("mistral", sliding_window=6)
    assert read_shape(mistral, max_len=128).windows == (6, 6)
    assert read_shape(mistral, max_len=6).windows == (0, 0)
    kinds = ["full_attention", "sliding_attention"]
    mixed = tiny_config("qwen2", sliding_window=6, use_sliding_window=True, layer_types=kinds)
    assert read_shape(mixed, max_len=128).windows == (0, 6)
    assert read_shape(tiny_config("llama"), max_len=128).windows == (0, 0)


@pytest.mark.parametrize("kind", ["default", "linear", "llama3", "yarn"])
def test_frequencies_are_those_of_the_model(kind: str) -> None:
    parameters = {
        "rope_type": kind, "rope_theta": 5e4, "factor": 4.0, "original_max_position_embeddings": 32,
        "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    }  # fmt: skip
    known = {"default": 2, "linear": 3, "llama3": 6, "yarn": 4}[kind]
    config = tiny_config("llama", head_dim=16, rope_parameters=dict(list(parameters.items())[:known]))
    shape = read_shape(config, max_len=128)
    rotary = tiny_model(config).model.rotary_emb
    torch.testing.assert_close(shape.frequencies, rotary.inv_freq, rtol=1e-6, atol=0)
    assert shape.rotary_factor == rotary.attention_scaling
