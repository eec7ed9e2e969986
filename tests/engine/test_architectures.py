"""Every architecture either computes what its own attention computes, or is refused by name and reason."""

from pathlib import Path
from typing import Any

import pytest
import torch

from chatpage.config import EngineConfig
from chatpage.engine import kv_cache
from chatpage.engine.models.loading import load_model
from chatpage.errors import UnsupportedModelError
from tests.engine import architectures
from tests.engine.architectures import MLA, SERVED, tiny_config, tiny_model
from tests.engine.model_driving import Driver, reference_backend
from tests.tiny_models import tiny_tokenizer

NUM_TOKENS = 24


@pytest.fixture(autouse=True)
def _reference_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Architectures are the subject here, so every machine runs the same kernels, and none starts a compiler."""
    monkeypatch.setattr(kv_cache, "select_backend", reference_backend)


def _load(folder: Path) -> Any:
    return load_model(EngineConfig.load(model=str(folder), device="cpu", dtype="float32"), show_progress=False)


def _generate(model: Any, prompt: list[int]) -> list[int]:
    with torch.inference_mode():
        output = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=NUM_TOKENS,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
    tokens: list[int] = output[0, len(prompt) :].tolist()
    return tokens


@pytest.mark.parametrize("model_type", sorted(SERVED))
def test_greedy_tokens_equal_those_of_transformers(model_type: str, tmp_path: Path) -> None:
    """Two prompts side by side, in chunks, over scattered blocks: the tokens of `generate` for each prompt alone."""
    model = tiny_model(tiny_config(model_type, **SERVED[model_type]))
    prompts = [list(range(20, 33)), list(range(200, 160, -2))]
    expected = [_generate(model, prompt) for prompt in prompts]
    driver = Driver(_load(architectures.save(model, tmp_path)).runner)
    assert driver.greedy(prompts, NUM_TOKENS, chunk=7) == expected


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "alibi in the mask": ("bloom", {"n_layer": 2, "n_head": 4}, "ALiBi"),
    "alibi in the mask of mpt": ("mpt", {"d_model": 32, "n_heads": 4, "n_layers": 2}, "ALiBi"),
    "alibi by a switch": ("falcon", {"alibi": True}, "ALiBi"),
    "attention of its own": ("falcon", {}, "ignores the hook"),
    "attention of its own, gpt_neox_japanese": ("gpt_neox_japanese", {}, "ignores the hook"),
    "attention of its own, xglm": ("xglm", {"d_model": 32, "attention_heads": 4, "num_layers": 2}, "ignores the hook"),
    "attention of its own, openai-gpt": ("openai-gpt", {"n_embd": 32, "n_layer": 2, "n_head": 4}, "ignores the hook"),
    "recurrent": ("mamba", {}, "running state"),
    "recurrent with heads": ("mamba2", {"num_heads": 8, "head_dim": 8, "expand": 2, "n_groups": 1}, "running state"),
    "recurrent, rwkv": ("rwkv", {}, "running state"),
    "hybrid, linear attention": ("minimax", {"layer_types": ["linear_attention", "full_attention"]}, "linear_attention"),
    "hybrid, gated delta": ("qwen3_next", {"layer_types": ["linear_attention", "full_attention"]}, "linear_attention"),
    "hybrid, convolutions": ("lfm2", {"layer_types": ["conv", "full_attention"]}, "conv"),
    "hybrid, side by side": ("falcon_h1", {}, "running state"),
    "hybrid, jamba": ("jamba", {}, "running state"),
    "hybrid, gemma": ("recurrent_gemma", {}, "running state"),
    "keys and values of other layers": ("gemma3n_text", {"num_kv_shared_layers": 1}, "other layers"),
    "sparse selection": ("deepseek_v32", MLA, "indexed_attention"),
    "an encoder": ("bert", {}, "not causal"),
    "an encoder, roberta": ("roberta", {}, "not causal"),
    "an encoder-decoder": ("bart", {"d_model": 32}, "encoder-decoder"),
    "an encoder-decoder without a decoder-only class": ("t5", {}, "encoder-decoder"),
    "cross-attention": ("gpt2", {**architectures.GPT, "add_cross_attention": True}, "cross-attention"),
    "two passes over its layers": ("diffllama", {}, "call their attention 4 times"),
    "a mask of its own": ("doge", {}, "mask"),
    "a window in its mask": ("phimoe", {}, "window of 6 tokens is only in its mask"),
}

FOUND_BY_TRYING = (
    "ignores the hook",
    "not causal",
    "call their attention 4 times",
    "mask",
    "window of 6 tokens is only in its mask",
)


@pytest.mark.parametrize("case", REFUSED)
def test_what_paged_attention_cannot_serve_is_refused_by_name_and_reason(case: str, tmp_path: Path) -> None:
    """Such models ran before this check, and answered fluently and wrongly: the hook is ignored without a word."""
    model_type, settings, reason = REFUSED[case]
    config = tiny_config(model_type, **settings)
    config.save_pretrained(tmp_path)
    if reason in FOUND_BY_TRYING:
        tiny_model(config).save_pretrained(tmp_path)
    else:
        (tmp_path / "model.safetensors").write_bytes(b"never read: the settings alone decide")
    tiny_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match=f"^{model_type} cannot be served") as refused:
        _load(tmp_path)
    assert reason in str(refused.value)


def test_a_model_that_brings_its_own_code_is_refused_without_running_it(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "mine", "auto_map": {"AutoConfig": "code.Config"}}')
    (tmp_path / "code.py").write_text("raise SystemExit('ran')")
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(UnsupportedModelError, match=r"mine.*brings its own code"):
        _load(tmp_path)


def test_a_long_neighbour_never_changes_rotary_frequencies(tmp_path: Path) -> None:
    """`dynamic` RoPE takes its frequencies from the longest sequence of the batch: a model must end where that would begin."""
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0, "original_max_position_embeddings": 48}
    model = tiny_model(tiny_config("llama", rope_parameters=rope, max_position_embeddings=192))
    runner = _load(architectures.save(model, tmp_path)).runner
    assert runner.max_model_len == 48
    short, long = list(range(20, 33)), list(range(50, 90))
    alone = Driver(runner).greedy([short], 8, chunk=64)
    assert Driver(runner).greedy([short, long], 8, chunk=64)[:1] == alone
    with pytest.raises(Exception, match="exact up to 48 tokens"):
        load_model(EngineConfig.load(model=str(tmp_path), device="cpu", dtype="float32", max_model_len=49))


def test_longrope_ends_at_its_original_length_too(tmp_path: Path) -> None:
    factors = [1.0 + i / 8 for i in range(4)]
    rope = {
        "rope_type": "longrope",
        "short_factor": [1.0] * 4,
        "long_factor": factors,
        "factor": 4.0,
        "rope_theta": 10000.0,
    }
    settings = {"rope_parameters": rope, "original_max_position_embeddings": 32, "sliding_window": None}
    model = tiny_model(tiny_config("phi3", **settings))
    assert _load(architectures.save(model, tmp_path)).runner.max_model_len == 32


def test_chunked_attention_is_served_up_to_its_first_chunk(tmp_path: Path) -> None:
    """llama4 attends within chunks, and says so in its mask only."""
    model = tiny_model(tiny_config("llama4_text", intermediate_size_mlp=48, attention_chunk_size=40))
    assert _load(architectures.save(model, tmp_path)).runner.max_model_len == 40


def test_layers_differ_in_window_and_value_width(tmp_path: Path) -> None:
    gemma = _load(architectures.save(tiny_model(tiny_config("gemma2")), tmp_path / "gemma")).runner
    assert [spec.window for spec in gemma.layer_specs] == [6, 0]
    deepseek = _load(architectures.save(tiny_model(tiny_config("deepseek_v3", **MLA)), tmp_path / "deepseek")).runner
    assert {(spec.num_kv_heads, spec.head_dim, spec.value_dim) for spec in deepseek.layer_specs} == {(4, 16, 12)}
