"""The probe at load must catch every way in which a model can mean more than the hook is told."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from chatpage.engine import attention, kv_cache
from chatpage.engine.attention import UnsupportedAttentionError, attention_step, hook
from chatpage.engine.models.transformers_runner import TransformersRunner
from chatpage.errors import UnsupportedModelError
from tests.engine.architectures import tiny_config, tiny_model
from tests.engine.model_driving import reference_backend


@pytest.fixture(autouse=True)
def _reference_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_cache, "select_backend", reference_backend)


def _hooked(model_type: str = "llama", **settings: Any) -> Any:
    model = tiny_model(tiny_config(model_type, **settings))
    model.set_attn_implementation(attention.register())
    return model


def _runner(model: Any) -> TransformersRunner:
    return TransformersRunner(model, model_id="x", max_model_len=8192, eos_token_ids=frozenset({2}), dtype=torch.float32)


def test_a_plain_decoder_passes_and_keeps_our_attention() -> None:
    model = _hooked()
    runner = _runner(model)
    assert (runner.vocab_size, len(runner.layer_specs)) == (272, 2)
    assert model.config._attn_implementation == attention.IMPLEMENTATION


@pytest.mark.parametrize("window", [6, 40, 4096])
def test_a_window_that_the_hook_is_not_told_is_seen(window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """No probe reaches past 4,096 tokens; so the eager mask is asked whether it knows a window."""
    model = _hooked("mistral", sliding_window=window)
    read_call = attention._read_call

    def forgetful(module: Any, mask: Any, scale: float, options: dict[str, Any]) -> Any:
        return read_call(module, mask, scale, options | {"sliding_window": None})

    _runner(model)
    monkeypatch.setattr(attention, "_read_call", forgetful)
    with pytest.raises(UnsupportedModelError, match=rf"mistral.*window of {window} tokens is only in its mask"):
        _runner(model)
    assert model.config.sliding_window == window


@pytest.mark.parametrize("window", [6, 40])
def test_a_window_that_is_honoured_wrongly_is_seen(window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A probe shorter than the window sees no difference, so a longer one is made for windows up to 512 tokens."""
    model = _hooked("mistral", sliding_window=window)
    read_call = attention._read_call

    def off_by_one(module: Any, mask: Any, scale: float, options: dict[str, Any]) -> Any:
        return read_call(module, mask, scale, options | {"sliding_window": window + 1})

    _runner(model)
    monkeypatch.setattr(attention, "_read_call", off_by_one)
    with pytest.raises(UnsupportedModelError, match=r"mistral.*logits differ"):
        _runner(model)


def _mix_in_previous_token(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
    return output + 0.2 * torch.nn.functional.pad(output, (0, 0, 1, 0))[:, :-1]


def _mix_in_batch_mean(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
    return output + 0.2 * output.mean(1, keepdim=True)


@pytest.mark.parametrize("leak", [_mix_in_previous_token, _mix_in_batch_mean])
def test_state_outside_of_the_kv_cache_is_seen(leak: Callable[..., torch.Tensor]) -> None:
    """A convolution over tokens agrees with eager on a fresh prompt; only a second chunk or a neighbour shows the state."""
    model = _hooked()
    model.model.layers[0].mlp.register_forward_hook(leak)
    with pytest.raises(UnsupportedModelError, match="mask or a state"):
        _runner(model)


def test_a_layer_that_keeps_its_attention_to_itself_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    model = _hooked()
    layer = model.model.layers[1].self_attn
    monkeypatch.setattr(layer, "forward", lambda hidden_states, **_: (torch.zeros_like(hidden_states), None))
    with pytest.raises(UnsupportedModelError, match="only 1 of its 2 layers"):
        _runner(model)


def test_weights_that_give_nan_are_refused_instead_of_served() -> None:
    model = _hooked()
    model.model.norm.weight.data.fill_(torch.nan)
    with pytest.raises(UnsupportedModelError, match="nan"):
        _runner(model)


class _Layer(torch.nn.Module):
    def __init__(self, *, is_causal: bool = True, layer_idx: int | None = 0) -> None:
        super().__init__()
        self.is_causal = is_causal
        self.layer_idx = layer_idx


class _Never:
    def attend(self, *_: Any) -> torch.Tensor:
        raise AssertionError("must have been refused")


@pytest.mark.parametrize(
    ("layer", "mask", "options", "reason"),
    [
        (_Layer(is_causal=False), None, {}, "not causal"),
        (_Layer(), None, {"is_causal": False}, "not causal"),
        (_Layer(layer_idx=None), None, {}, "no index"),
        (_Layer(), torch.zeros(1, 1, 3, 3), {}, "mask of its own"),
        (_Layer(), None, {"dropout": 0.1}, "drops weights"),
        (_Layer(), None, {"position_bias": torch.zeros(1)}, "'position_bias'"),
        (_Layer(), None, {"indices": torch.zeros(1)}, "'indices'"),
    ],
)
def test_the_hook_refuses_what_the_kernels_do_not_do(
    layer: _Layer, mask: torch.Tensor | None, options: dict[str, Any], reason: str
) -> None:
    q = torch.zeros(1, 2, 3, 4)
    with attention_step(_Never()), pytest.raises(UnsupportedAttentionError, match=reason):
        hook(layer, q, q, q, mask, **options)


def test_an_option_that_says_nothing_is_no_reason_to_refuse() -> None:
    class Echo:
        def attend(self, call: attention.AttentionCall, query: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
            assert (call.scale, call.window, call.softcap, call.sinks) == (0.5, 0, 0.0, None)
            return query

    q = torch.randn(1, 2, 3, 4)
    with attention_step(Echo()):
        output, weights = hook(_Layer(), q, q, q, None, None, position_bias=None, sliding_window=None, use_cache=False)
    assert torch.equal(output, q.transpose(1, 2))
    assert weights is None
