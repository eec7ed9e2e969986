"""A model name becomes a model that is whole, or an error that says what is wrong and what to do."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from chatpage.config import EngineConfig
from chatpage.engine import kv_cache
from chatpage.engine.models import gguf_files, loading
from chatpage.engine.models.loading import LoadedModel, load_model, resolve_device, resolve_dtype
from chatpage.errors import BrokenModelError, ConfigError, ModelNotFoundError, UnsupportedModelError
from tests.engine.model_driving import Driver, reference_backend
from tests.gguf_writing import save_gguf_llama, write_llama_gguf
from tests.tiny_models import CHAT_TEMPLATE, save_tiny_llama

MESSAGES = [{"role": "user", "content": "Hi"}]


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Keep to the kernels in torch, an empty cache folder, and no network."""
    monkeypatch.setattr(kv_cache, "select_backend", reference_backend)
    monkeypatch.setenv("CHATPAGE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


def _load(model: Path | str, **settings: Any) -> LoadedModel:
    defaults: dict[str, Any] = {"device": "cpu", "dtype": "float32"}
    return load_model(EngineConfig.load(model=str(model), **(defaults | settings)), show_progress=False)


def test_a_folder_is_loaded_with_its_tokenizer(tmp_path: Path) -> None:
    model = _load(save_tiny_llama(tmp_path / "m"))
    assert (model.runner.max_model_len, model.runner.vocab_size, len(model.runner.layer_specs)) == (2048, 259, 2)
    assert model.runner.eos_token_ids == {2}
    assert model.tokenizer.decode(model.tokenizer.encode("naïve 😀")) == "naïve 😀"
    assert model.tokenizer.chat_template == CHAT_TEMPLATE
    assert "llama" in model.description


def test_every_end_token_of_the_generation_config_counts(tmp_path: Path) -> None:
    """A chat model has several; the one of the tokenizer alone lets it talk past the end of its turn."""
    folder = save_tiny_llama(tmp_path / "m")
    settings = json.loads((folder / "generation_config.json").read_text())
    (folder / "generation_config.json").write_text(json.dumps(settings | {"eos_token_id": [7, 9]}))
    assert _load(folder).runner.eos_token_ids == {2, 7, 9}


def test_same_name_with_other_weights_is_another_model(tmp_path: Path) -> None:
    """KV computed by the old weights answered for the new ones, when a folder was replaced under a running cache."""
    folder = save_tiny_llama(tmp_path / "m", seed=1)
    first = _load(folder).runner.model_id
    assert _load(folder).runner.model_id == first
    save_tiny_llama(folder, seed=2)
    assert _load(folder).runner.model_id != first


def test_weights_of_equal_size_and_time_still_differ(tmp_path: Path) -> None:
    import os

    folder = save_tiny_llama(tmp_path / "m", seed=1)
    file = folder / "model.safetensors"
    time = file.stat().st_mtime_ns
    first = _load(folder).runner.model_id
    weights = load_file(file)
    save_file({name: weight * 1.01 for name, weight in weights.items()}, file, metadata={"format": "pt"})
    os.utime(file, ns=(time, time))
    assert _load(folder).runner.model_id != first


def test_settings_and_dtype_are_part_of_the_identity(tmp_path: Path) -> None:
    folder = save_tiny_llama(tmp_path / "m")
    ids = {_load(folder).runner.model_id, _load(folder, dtype="bfloat16").runner.model_id}
    ids |= {_load(folder, quantization="int8", dtype="bfloat16").runner.model_id}
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.1}))
    ids |= {_load(folder).runner.model_id}
    assert len(ids) == 4


def test_missing_weights_are_an_error_and_never_random(tmp_path: Path) -> None:
    """transformers fills what is missing with random numbers and only warns."""
    folder = save_tiny_llama(tmp_path / "m")
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(BrokenModelError, match=r"1 weights are missing, such as model\.layers\.1\.mlp\.up_proj\.weight"):
        _load(folder)


def test_weights_of_another_shape_are_an_error(tmp_path: Path) -> None:
    folder = save_tiny_llama(tmp_path / "m")
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"] = torch.ones(3)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(BrokenModelError, match="cannot be loaded"):
        _load(folder)


def test_truncated_weights_are_an_error(tmp_path: Path) -> None:
    file = save_tiny_llama(tmp_path / "m") / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(BrokenModelError, match="cannot be loaded"):
        _load(file.parent)


@pytest.mark.parametrize("content", ["", "{", "[]", "{}"])
def test_a_damaged_config_is_an_error(tmp_path: Path, content: str) -> None:
    folder = save_tiny_llama(tmp_path / "m")
    (folder / "config.json").write_text(content)
    with pytest.raises(BrokenModelError, match=r"config\.json is damaged"):
        _load(folder)


def test_an_architecture_nobody_knows_is_named(tmp_path: Path) -> None:
    folder = save_tiny_llama(tmp_path / "m")
    (folder / "config.json").write_text('{"model_type": "gpt9"}')
    with pytest.raises(UnsupportedModelError, match=r"^gpt9"):
        _load(folder)


def test_a_folder_without_a_tokenizer_is_an_error(tmp_path: Path) -> None:
    folder = save_tiny_llama(tmp_path / "m")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    with pytest.raises(BrokenModelError, match="tokenizer"):
        _load(folder)


def test_what_is_not_there_is_said_to_be_not_there(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="no file or folder"):
        _load(tmp_path / "absent")
    with pytest.raises(ModelNotFoundError, match="no file or folder"):
        _load("absent.gguf")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelNotFoundError, match="holds no model"):
        _load(tmp_path / "empty")
    (tmp_path / "empty" / "a.gguf").touch()
    with pytest.raises(ModelNotFoundError, match=r"It has a\.gguf"):
        _load(tmp_path / "empty")
    (tmp_path / "empty" / "config.json").touch()
    with pytest.raises(BrokenModelError, match="no weights"):
        _load(tmp_path / "empty")


def test_a_hub_model_comes_from_the_local_cache_without_a_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = tmp_path / "hub"
    repo = hub / "models--someone--tiny"
    save_tiny_llama(repo / "snapshots" / "abc123")
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("abc123")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(hub))
    assert _load("someone/tiny").name == "someone/tiny"
    with pytest.raises(ModelNotFoundError, match=r"not in the local cache .* HF_HUB_OFFLINE is set"):
        _load("someone/absent")
    with pytest.raises(ModelNotFoundError, match="cannot be the id of a hub model"):
        _load("not a name!")


def test_a_gguf_file_gives_the_tokens_of_its_weights(tmp_path: Path) -> None:
    """The second start takes the converted files: same tokens, same tokenizer, same chat template."""
    folder = save_gguf_llama(tmp_path / "m")
    file = write_llama_gguf(folder, tmp_path / "tiny.gguf")
    prompts = [list(range(20, 40))]
    expected = Driver(_load(folder).runner).greedy(prompts, 12, chunk=8)
    first = _load(file)
    assert Driver(first.runner).greedy(prompts, 12, chunk=8) == expected
    assert list((tmp_path / "cache" / "gguf").glob("*/float32/model.safetensors"))
    again = _load(file)
    assert Driver(again.runner).greedy(prompts, 12, chunk=8) == expected
    assert again.runner.model_id == first.runner.model_id
    prompt = first.tokenizer.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
    assert prompt == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert again.tokenizer.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True) == prompt
    assert not list((tmp_path / "cache").rglob("*.partial"))


def test_a_large_gguf_file_is_not_stored_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_files, "MAX_CONVERTED_BYTES", 1000)
    _load(write_llama_gguf(save_gguf_llama(tmp_path / "m"), tmp_path / "tiny.gguf"))
    assert not list((tmp_path / "cache").rglob("*.safetensors"))
    assert list((tmp_path / "cache").rglob("tokenizer.json"))


def test_a_replaced_gguf_file_is_converted_anew(tmp_path: Path) -> None:
    file = tmp_path / "tiny.gguf"
    write_llama_gguf(save_gguf_llama(tmp_path / "a", seed=1), file)
    first = Driver(_load(file).runner).greedy([list(range(20, 40))], 12, chunk=8)
    write_llama_gguf(save_gguf_llama(tmp_path / "b", seed=2), file)
    assert Driver(_load(file).runner).greedy([list(range(20, 40))], 12, chunk=8) != first


@pytest.mark.parametrize("damage", ["empty", "other", "truncated header", "truncated weights"])
def test_a_damaged_gguf_file_is_an_error_and_leaves_nothing_behind(tmp_path: Path, damage: str) -> None:
    file = write_llama_gguf(save_gguf_llama(tmp_path / "m"), tmp_path / "tiny.gguf")
    data = file.read_bytes()
    cut = {"empty": b"", "other": b"PK" + data[2:], "truncated header": data[:3000], "truncated weights": data[:-20000]}
    file.write_bytes(cut[damage])
    with pytest.raises(BrokenModelError, match=r"tiny\.gguf"):
        _load(file)
    assert not list((tmp_path / "cache").rglob("*.partial"))


def test_a_context_beyond_the_model_is_refused_with_both_numbers(tmp_path: Path) -> None:
    folder = save_tiny_llama(tmp_path / "m")
    assert _load(folder, max_model_len=100).runner.max_model_len == 100
    with pytest.raises(ConfigError, match=r"max_model_len is 4096, but llama is exact up to 2048"):
        _load(folder, max_model_len=4096)


def test_a_gpu_that_is_not_there_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="device is cuda, but"):
        resolve_device("cuda")
    assert resolve_device("auto") == torch.device("cpu")


@pytest.mark.parametrize("has_instructions", [True, False])
def test_auto_takes_the_dtype_that_is_fast_here(monkeypatch: pytest.MonkeyPatch, has_instructions: bool) -> None:
    monkeypatch.setattr(loading, "_has_bfloat16_instructions", lambda: has_instructions)
    on_cpu = torch.bfloat16 if has_instructions else torch.float32
    assert resolve_dtype(EngineConfig.load(), torch.device("cpu")) == (on_cpu, "none")
    assert resolve_dtype(EngineConfig.load(), torch.device("cuda")) == (torch.bfloat16, "none")
    assert resolve_dtype(EngineConfig.load(dtype="float16"), torch.device("cpu")) == (torch.float16, "none")
    assert resolve_dtype(EngineConfig.load(quantization="int4"), torch.device("cpu")) == (torch.bfloat16, "int4")


def test_quantization_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ConfigError, match="int4 is not available on cuda"):
        resolve_dtype(EngineConfig.load(quantization="int4"), torch.device("cuda"))
    with pytest.raises(ConfigError, match="int8 computes in bfloat16, but dtype is float32"):
        resolve_dtype(EngineConfig.load(quantization="int8", dtype="float32"), torch.device("cpu"))


@pytest.mark.parametrize("name", ["", " ", "~nobody-of-that-name/x", "a" * 300, "a\0b"])
def test_a_name_that_can_be_no_model_is_an_error(name: str) -> None:
    with pytest.raises(ModelNotFoundError):
        _load(name)


def test_a_hub_that_cannot_be_reached_is_an_error_not_a_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    """The network library of the hub raises errors of its own, which are no OSError."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(ModelNotFoundError, match="cannot be reached"):
        _load("nobody/nothing")


def test_a_converted_model_in_a_cache_that_cannot_be_written_still_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shared cache on a read-only disk was refused, though everything needed was in it."""
    file = tmp_path / "m.gguf"
    write_llama_gguf(save_gguf_llama(tmp_path / "m"), file)
    _load(file)

    def refuse(*_: object) -> None:
        raise AssertionError("a lock was wanted for what exists")

    monkeypatch.setattr("chatpage.engine.models.cache_dir.locked", refuse)
    _load(file)
