"""The fused runner computes what its weights say, whatever the step, and says why where it does not run."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import load_file, save_file

from chatpage.config import EngineConfig
from chatpage.engine.core import Engine
from chatpage.engine.models import fused_loading, packed_weights
from chatpage.engine.models.fused_runner import FusedRunner
from chatpage.engine.models.loading import LoadedModel, load_model
from chatpage.engine.models.packed_reference import reference_logits
from chatpage.errors import BrokenModelError
from chatpage.sampling_params import SamplingParams
from chatpage_kernels import cpu
from chatpage_kernels.cpu import build
from tests.engine.architectures import save, tiny_config, tiny_model
from tests.engine.engines import assert_whole, generate, greedy, outputs, run_all
from tests.engine.model_driving import Driver
from tests.gguf_writing import NUM_TOKENS, save_gguf_llama, write_llama_gguf

PROMPT = list(range(30, 67))


@pytest.fixture(scope="module", autouse=True)
def _kernels() -> None:
    if build.wait() is None:
        pytest.skip(build.describe())


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[Kind, Path]:
    """A tiny llama in each format."""
    folder = tmp_path_factory.mktemp("gguf")
    model = save_gguf_llama(folder / "m")
    kinds = (Kind.F32, Kind.Q4_0, Kind.Q4_1, Kind.Q8_0)
    return {kind: write_llama_gguf(model, folder / f"{kind.name}.gguf", quantization=kind) for kind in kinds}


@pytest.fixture(autouse=True)
def _own_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    monkeypatch.setenv("CHATPAGE_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "fused-cache"))


def _config(file: Path, **settings: Any) -> EngineConfig:
    defaults: dict[str, Any] = {"device": "cpu", "kv_memory": 2**21, "check_integrity": True}
    return EngineConfig.load(model=str(file), **(defaults | settings))


def _load(file: Path, **settings: Any) -> LoadedModel:
    return load_model(_config(file, **settings), show_progress=False)


def _fused(model: LoadedModel) -> FusedRunner:
    assert isinstance(model.runner, FusedRunner), model.computed_by
    return model.runner


def _driver(model: LoadedModel, num_blocks: int = 48) -> Driver:
    """Drive over blocks of 16 in the layout of the C++ kernels, or over the kernels in torch."""
    if not isinstance(model.runner, FusedRunner):
        return Driver(model.runner, dtype=model.dtype, num_blocks=num_blocks, block_size=16)
    head_dim = model.runner.layer_specs[0].head_dim
    backend = cpu.backend(torch.bfloat16, head_dim=head_dim, kv_dtype=torch.bfloat16)
    return Driver(model.runner, dtype=torch.bfloat16, num_blocks=num_blocks, block_size=16, backend=backend)


def _logits_in_chunks(model: LoadedModel, prompts: Sequence[Sequence[int]], cuts: Sequence[int]) -> torch.Tensor:
    """The logits after the last token of each prompt, computed side by side in two steps."""
    driver = _driver(model)
    tables = [driver.table(len(prompt)) for prompt in prompts]
    driver.step([(p[:cut], 0, t) for p, t, cut in zip(prompts, tables, cuts, strict=True)])
    return driver.step([(p[cut:], cut, t) for p, t, cut in zip(prompts, tables, cuts, strict=True)])


def _error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    spread = expected - expected.mean(-1, keepdim=True)
    return float(((actual - expected).norm(dim=-1) / spread.norm(dim=-1)).max())


def _assert_near_transformers(file: Path, **settings: Any) -> None:
    prompts = (PROMPT, [100, 90, 80, 70, 60])
    fused = _load(file, **settings)
    assert isinstance(fused.runner, FusedRunner), fused.computed_by
    expected = _logits_in_chunks(_load(file, dtype="float32"), prompts, (20, 2))
    actual = _logits_in_chunks(fused, prompts, (20, 2))
    assert actual.dtype == torch.float32
    assert _error(actual, expected) < 0.06


@pytest.mark.parametrize("kind", [Kind.Q4_0, Kind.Q4_1, Kind.Q8_0])
def test_logits_are_those_of_transformers_on_the_dequantized_weights(kind: Kind, files: dict[Kind, Path]) -> None:
    """Activations have 8 bits and keys 16, which moves them a little; rows of heads in the wrong order move them by 100 %."""
    _assert_near_transformers(files[kind])


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("is_tied", [False, True])
def test_the_family_is_served_with_biases_norms_of_heads_and_tied_heads(model_type: str, is_tied: bool, tmp_path: Path) -> None:
    head_dim = 128 if model_type == "qwen3" else 32  # transformers reads no other from a GGUF file of that name
    sizes = {"vocab_size": NUM_TOKENS, "hidden_size": 128, "intermediate_size": 96, "head_dim": head_dim}
    config = tiny_config(model_type, tie_word_embeddings=is_tied, **sizes)
    model = tiny_model(config)
    for name, parameter in model.named_parameters():
        if name.endswith(("bias", "norm.weight")):  # else they are 0 and 1, and nobody would miss them
            parameter.data += torch.rand(parameter.shape, generator=torch.Generator().manual_seed(1))
    folder = save(model, tmp_path / "m")
    _assert_near_transformers(write_llama_gguf(folder, tmp_path / "tiny.gguf", quantization=Kind.Q8_0))


def test_divisors_of_the_rotary_frequencies_are_honoured(tmp_path: Path) -> None:
    """Llama 3 files carry their scaled frequencies as a tensor; without it long contexts come out as noise."""
    folder = save_gguf_llama(tmp_path / "m")
    plain = _load(write_llama_gguf(folder, tmp_path / "plain.gguf", quantization=Kind.Q8_0))
    divisors = {"rope_freqs.weight": np.array([1, 1, 2, 2, 4, 4, 8, 8], np.float32)}
    scaled = _load(write_llama_gguf(folder, tmp_path / "scaled.gguf", quantization=Kind.Q8_0, extra=divisors))
    before, after = (_fused(model)._model.shape.frequencies for model in (plain, scaled))
    assert torch.equal(before / after, torch.tensor([1.0, 1, 2, 2, 4, 4, 8, 8]))
    assert _error(*(_logits_in_chunks(model, (PROMPT,), (20,)) for model in (scaled, plain))) > 0.1


def test_weights_lie_side_by_side_in_their_order(files: dict[Kind, Path]) -> None:
    """Each in pages of its own, they cost an eighth of a step."""
    layers = _fused(_load(files[Kind.Q4_1]))._model.layers
    places = [(m.data.data_ptr(), m.data.nbytes) for layer in layers for m in layer.matrices]
    assert all(0 <= b - (a + size) < 64 for (a, size), (b, _) in pairwise(places))
    assert all(place % 64 == 0 for place, _ in places)


def test_windows_differ_from_layer_to_layer(files: dict[Kind, Path]) -> None:
    plain = _fused(_load(files[Kind.Q8_0]))._model
    narrow = replace(plain, shape=replace(plain.shape, windows=(5, 0)))
    library = build.library()
    assert library is not None
    runner = FusedRunner(narrow, library, model_id="x", max_model_len=128, eos_token_ids=frozenset())
    assert [spec.window for spec in runner.layer_specs] == [5, 0]
    fused_loading.prove(runner, narrow)
    ids = [torch.tensor(PROMPT)]
    assert _error(reference_logits(narrow, ids)[-1:], reference_logits(plain, ids)[-1:]) > 0.1


def test_a_prefix_computed_before_gives_the_same_bits_at_every_split_point(files: dict[Kind, Path]) -> None:
    """Products do not depend on the other rows of a step; attention over fewer keys than are ever split does not either."""
    model = _load(files[Kind.Q4_1])
    driver = _driver(model, num_blocks=6 * len(PROMPT))
    (whole,) = driver.step([(PROMPT, 0, driver.table(len(PROMPT)))])
    for split in range(1, len(PROMPT)):
        table = driver.table(len(PROMPT))
        driver.step([(PROMPT[:split], 0, table)])
        (rest,) = driver.step([(PROMPT[split:], split, table)])
        assert torch.equal(rest, whole), split


def test_the_cuts_of_a_long_prompt_move_its_logits_less_than_the_weights_do(files: dict[Kind, Path]) -> None:
    """Over many keys the items of a step decide in which order a row adds up, so these are no longer the same bits."""
    model = _load(files[Kind.Q4_1])
    prompt = [30 + i * i % 200 for i in range(700)]
    (whole,) = (driver := _driver(model)).step([(prompt, 0, driver.table(700))])
    for cut in (1, 350, 691, 699):
        (cut_in_two,) = _logits_in_chunks(model, (prompt,), (cut,))
        assert _error(cut_in_two[None], whole[None]) < 0.03, cut


def test_a_step_that_wants_no_logits_gives_none_and_larger_steps_follow(files: dict[Kind, Path]) -> None:
    """The buffers are made for the largest step so far; a larger one, or another cache, makes them anew."""
    model = _load(files[Kind.Q8_0])
    prompt = [30 + i % 200 for i in range(300)]
    for num_tokens in (1, 64, 65, 300):
        driver = _driver(model)
        logits = driver.step([(prompt[:num_tokens], 0, driver.table(num_tokens))])
        expected = reference_logits(_fused(model)._model, [torch.tensor(prompt[:num_tokens])])[-1:]
        assert _error(logits, expected) < 0.06
    engine = Engine(_config(files[Kind.Q8_0]), model)
    engine.add_request(prompt[:40], prefill_only=True)
    run_all(engine)
    assert_whole(engine)


def test_a_prompt_that_is_cached_up_to_any_point_is_continued_the_same_way(files: dict[Kind, Path]) -> None:
    engine = Engine.load(_config(files[Kind.Q4_1]))
    engine.poison_free_rows()
    expected = generate(engine, PROMPT, greedy(max_tokens=12), cache_salt="cold")
    for split in range(1, len(PROMPT)):
        engine.add_request(PROMPT[:split], prefill_only=True, cache_salt=str(split))
        run_all(engine)
        assert generate(engine, PROMPT, greedy(max_tokens=12), cache_salt=str(split)) == expected
    assert_whole(engine)


def test_samples_follow_from_their_seed_alone_or_beside_neighbours(files: dict[Kind, Path]) -> None:
    engine = Engine.load(_config(files[Kind.Q4_0]))
    alone = {}
    for n in range(1, 9):
        params = SamplingParams(n=n, seed=n, temperature=1.0, max_tokens=10, ignore_eos=True)
        alone[n] = generate(engine, PROMPT, params, cache_salt=f"alone {n}")
        assert len(set(alone[n])) == n
    requests = {
        n: engine.add_request(
            PROMPT, SamplingParams(n=n, seed=n, temperature=1.0, max_tokens=10, ignore_eos=True), cache_salt=f"beside {n % 2}"
        )
        for n in alone
    }
    events = run_all(engine)
    assert {n: outputs(events, request) for n, request in requests.items()} == alone
    assert_whole(engine)


@pytest.mark.parametrize(("bits", "formats", "bound"), [("int8", "Q8_0", 0.06), ("int4", "Q4_1", 0.6)])
def test_wide_weights_become_small_if_the_user_asks(bits: str, formats: str, bound: float, files: dict[Kind, Path]) -> None:
    model = _load(files[Kind.F32], quantization=bits)
    assert f"({formats} layers, Q8_0 head)" in model.description
    expected = _logits_in_chunks(_load(files[Kind.F32], dtype="float32"), (PROMPT,), (20,))
    assert _error(_logits_in_chunks(model, (PROMPT,), (20,)), expected) < bound


def test_whatever_changes_the_numbers_is_another_model(files: dict[Kind, Path]) -> None:
    settings: list[dict[str, Any]] = [{}, {"quantization": "int8"}, {"dtype": "float32"}, {"quantization": "none"}]
    ids = [_load(files[Kind.Q4_1], **each).runner.model_id for each in settings]
    assert len(set(ids)) == 4
    assert _load(files[Kind.Q4_1]).runner.model_id == ids[0]


def test_the_runner_says_what_it_is(files: dict[Kind, Path]) -> None:
    model = _load(files[Kind.Q4_1], max_model_len=200)
    runner = _fused(model)
    assert (runner.max_model_len, runner.vocab_size, runner.eos_token_ids) == (200, NUM_TOKENS, frozenset({2}))
    assert model.dtype == torch.bfloat16
    assert model.computed_by.startswith("fused: packed weights and C++ kernels for ")
    assert "Q4_1 layers, Q8_0 head" in model.description


@pytest.mark.parametrize(
    ("kind", "settings", "reason"),
    [
        (Kind.Q4_1, {"quantization": "none"}, "quantization is none"),
        (Kind.Q4_1, {"dtype": "float32"}, "dtype is float32"),
        (Kind.F32, {}, "the weights of the file are not quantized"),
    ],
)
def test_what_speaks_against_it_is_said(kind: Kind, settings: dict[str, Any], reason: str, files: dict[Kind, Path]) -> None:
    model = _load(files[kind], **settings)
    assert model.computed_by.startswith("transformers: ")
    assert reason in model.computed_by


def test_a_file_of_other_layers_is_left_to_transformers(files: dict[Kind, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Mixtures of experts come under the name of llama, too; to call such a file incomplete sends people to fetch it again."""
    monkeypatch.setattr(packed_weights, "MATRICES", ("attn_q", "ffn_gate_inp"))
    assert "the file has no blk.0.ffn_gate_inp.weight" in _load(files[Kind.Q4_1]).computed_by


def test_a_start_does_not_wait_for_the_compiler(files: dict[Kind, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "library", lambda: None)
    monkeypatch.setattr(build, "is_running", lambda: True)
    monkeypatch.setattr(build, "wait", lambda: pytest.fail("it waited"))
    model = _load(files[Kind.Q4_1])
    assert model.computed_by == "transformers: the C++ kernels are being compiled"
    assert model.is_interim
    assert not model.is_outdated
    monkeypatch.undo()
    assert model.is_outdated
    assert not _load(files[Kind.Q4_1]).is_interim


def test_a_start_that_asks_for_small_weights_waits(files: dict[Kind, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    library = build.library()
    ready: list[Any] = []
    monkeypatch.setattr(build, "library", lambda: ready[0] if ready else None)
    monkeypatch.setattr(build, "wait", lambda: ready.append(library))
    _fused(_load(files[Kind.Q4_1], quantization="int4"))
    assert ready == [library]


def test_kernels_that_compute_something_else_are_not_used(files: dict[Kind, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(*arguments: Any) -> torch.Tensor:
        logits = reference_logits(*arguments)
        logits[-1] = logits[-1].roll(1)
        return logits

    monkeypatch.setattr(fused_loading, "reference_logits", wrong)
    assert "transformers: the C++ kernels differ from torch by" in _load(files[Kind.Q4_1]).computed_by


def test_a_file_that_lacks_a_tensor_is_broken(tmp_path: Path) -> None:
    folder = save_gguf_llama(tmp_path / "m")
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors")
    file = write_llama_gguf(folder, tmp_path / "tiny.gguf", quantization=Kind.Q4_1)
    with pytest.raises(BrokenModelError, match=r"it has no tensor blk\.1\.ffn_up\.weight"):
        _load(file)


def test_a_file_that_was_cut_is_broken(tmp_path: Path, files: dict[Kind, Path]) -> None:
    file = tmp_path / "cut.gguf"
    file.write_bytes(files[Kind.Q4_1].read_bytes()[:-5000])
    with pytest.raises(BrokenModelError, match=r"cut\.gguf"):
        _load(file)
