"""The whole bench on a tiny model: engines in processes of their own, a table, a file and a chart."""

import io
import json
import os
import signal
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from rich.console import Console

from chatpage.bench import against
from chatpage.bench.against import Plan, run_against
from chatpage.bench.measuring import Outcome
from chatpage.bench.peers.interface import Setup
from chatpage.bench.peers.process import PeerProcess, environment_of
from chatpage.bench.peers.registry import ENTRIES, Entry
from chatpage.bench.workloads import TITLES, Material, Sizes
from chatpage.config import EngineConfig
from chatpage.errors import ContextLengthError, EngineStepError, InvalidRequestError
from tests.tiny_models import tiny_llama_folder, tiny_tokenizer


def _config(**settings: Any) -> EngineConfig:
    defaults: dict[str, Any] = {"model": str(tiny_llama_folder()), "device": "cpu", "dtype": "float32", "threads": 1}
    return EngineConfig.load(**defaults | {"kv_memory": 2**22, "max_batched_tokens": 512} | settings)


def _setup(tmp_path: Path) -> Setup:
    folder = tiny_llama_folder()
    values = _config().model_dump(mode="json")
    return Setup(values, folder, (folder / "model.safetensors",), 1, tmp_path / "cache", tmp_path)


@pytest.mark.timeout(600)
def test_every_workload_runs_on_both_and_is_written_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ENTRIES, "vllm", Entry("vllm", "VllmPeer", "no_such_module", "pip install vllm"))
    console = Console(file=io.StringIO(), width=200)
    plan = Plan(
        workloads=tuple(TITLES),
        peers=("transformers", "vllm"),
        repeat=1,
        is_quick=True,
        json_file=tmp_path / "bench.json",
        chart_file=tmp_path / "bench.svg",
    )
    results = run_against(_config(), plan, console)

    def outcome(workload: str, engine: str) -> Outcome:
        return results.outcomes[workload][engine]

    ours, theirs = ({name: outcome(name, engine).numbers for name in TITLES} for engine in ("chatpage", "transformers"))
    for name in TITLES:
        assert not outcome(name, "chatpage").reason
        assert not outcome(name, "transformers").reason
        assert ours[name].keys() >= theirs[name].keys()
        assert all(value > 0 for n, values in ours[name].items() if n.endswith(("tok/s", " ms", " s")) for value in values)
    assert ours["W3"]["computed tokens"] == theirs["W3"]["computed tokens"] == [28]
    assert ours["W6"]["computed tokens"] == [0]
    assert theirs["W6"]["computed tokens"] == [1]
    assert ours["W4"]["cold computed tokens"] == [150]
    assert theirs["W4"]["cold computed tokens"] == [8 * 150]
    assert ours["W4"]["warm computed tokens"] == [0]
    assert 290 <= ours["W5"]["cold computed tokens"][0] <= 100 + 8 * 25  # some questions begin with the same letters
    assert theirs["W5"]["warm computed tokens"] == [8 * 25]
    assert ours["W7"]["copied bytes"] == [0]
    assert theirs["W7"]["copied bytes"] == [400 * 2 * 2 * 2 * 16 * 4]
    assert ours["W8"]["computed tokens"] == [28]
    assert theirs["W8"]["computed tokens"] == [428]
    assert results.num_same_ids("chatpage", "transformers") == 12

    written = json.loads((tmp_path / "bench.json").read_text(encoding="utf-8"))
    assert written["times"]["W4"]["chatpage"]["numbers"]["cold s"]["values"] == ours["W4"]["cold s"]
    assert written["engines"].keys() == {"chatpage", "transformers"}
    assert written["absent"] == {"vllm": "not installed: pip install vllm"}
    assert written["times"]["START"]["chatpage"]["numbers"]["ready s"]["median"] > 0
    assert ElementTree.parse(tmp_path / "bench.svg").getroot() is not None
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert "W5 8 chats on one system prompt" in text
    assert "vllm: not installed: pip install vllm." in text
    assert "transformers took the same first 12 of 12 tokens" in text


def test_a_context_too_small_for_a_workload_is_refused_before_anything_runs() -> None:
    plan = Plan(workloads=("W7",), peers=(), repeat=1)
    with pytest.raises(ContextLengthError, match="needs 4200 tokens, the engine takes 2048"):
        run_against(_config(), plan, Console(file=io.StringIO()))


def test_a_file_that_cannot_be_written_is_refused_before_anything_runs() -> None:
    plan = Plan(workloads=("W1",), peers=(), repeat=1, chart_file=Path("/no/such/bench.svg"))
    with pytest.raises(InvalidRequestError, match=r"Cannot write /no/such/bench\.svg"):
        run_against(_config(), plan, Console(file=io.StringIO()))


def test_an_engine_that_cannot_start_is_named_and_the_others_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """OpenVINO is given the GGUF file; a folder it could not read."""
    monkeypatch.setitem(ENTRIES, "openvino", Entry("openvino", "OpenVinoPeer", "json", "pip install openvino-genai"))
    console = Console(file=io.StringIO(), width=200)
    results = run_against(_config(), Plan(workloads=("W2",), peers=("openvino",), repeat=1, is_quick=True), console)
    assert list(results.outcomes["W2"]) == ["chatpage"]
    assert isinstance(console.file, io.StringIO)
    assert "openvino: it is given the weights as a GGUF file, and this model is none." in console.file.getvalue()


def test_a_process_that_dies_is_an_error_with_its_last_words(tmp_path: Path) -> None:
    process = PeerProcess("transformers", _setup(tmp_path))
    try:
        process.load(Sizes().scaled(0.1), len(tiny_tokenizer()))
        (tmp_path / "transformers.log").write_text("first words\nout of memory, perhaps\n")
        os.kill(process.pids[0], signal.SIGKILL)
        with pytest.raises(EngineStepError, match=r"its process ended \(-9\): out of memory, perhaps"):
            process.play("W1", Material([1, 2, 3]))
    finally:
        process.close()


def test_an_engine_that_raises_is_an_error_and_lives_on(tmp_path: Path) -> None:
    process = PeerProcess("transformers", _setup(tmp_path))
    try:
        process.load(Sizes().scaled(0.1), len(tiny_tokenizer()))
        with pytest.raises(EngineStepError, match="Error"):
            process.play("W1", Material([10**6]))
        assert process.play("W1", Material([1, 2, 3])).numbers.keys() == {"decode tok/s"}
    finally:
        process.close()


def test_no_process_is_left_when_it_is_closed(tmp_path: Path) -> None:
    process = PeerProcess("chatpage", _setup(tmp_path))
    process.load(Sizes().scaled(0.1), len(tiny_tokenizer()))
    pids = process.pids
    process.close()
    assert pids
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_how_threads_wait_is_left_to_every_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """chatpage's command line shortens the spinning of OpenMP for itself; on an idle machine that slows others down."""
    monkeypatch.setenv("GOMP_SPINCOUNT", "2000")
    assert environment_of("chatpage", 2)["GOMP_SPINCOUNT"] == "2000"
    assert "GOMP_SPINCOUNT" not in environment_of("llama.cpp", 2)
    assert environment_of("llama.cpp", 2)["OMP_NUM_THREADS"] == "2"


def test_a_number_of_threads_that_is_given_counts() -> None:
    assert against.num_threads(_config(threads=3)) == 3
    assert against.num_threads(_config(threads=None)) >= 1
