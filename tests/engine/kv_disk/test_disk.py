"""An engine that is started again goes on where the last one was, to the token, and nobody else finds anything."""

import random
import resource
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from chatpage.config import EngineConfig
from chatpage.engine import kv_cache
from chatpage.engine.kv_disk import disk, loading, saving, writer
from chatpage.engine.models.loading import load_model
from chatpage.events import Event, RequestFinished, TokenDelta
from chatpage.sampling_params import SamplingParams
from chatpage_kernels.cpu import build
from tests.engine.engines import assert_whole, finished, greedy, outputs, run_all
from tests.engine.kv_disk.engines import PROMPT, SIZE, ask, disk_of, files_in, on_disk, open_engine, started
from tests.engine.model_driving import reference_backend
from tests.tiny_models import save_tiny_llama, tiny_llama_folder


def _alone(prompt: list[int], max_tokens: int = 12) -> tuple[int, ...]:
    with started(None) as engine:
        return ask(engine, prompt, max_tokens=max_tokens)[0]


def _fill(folder: Path, prompt: list[int], **options: object) -> tuple[int, ...]:
    """Let a program answer a prompt and end."""
    with started(folder) as engine:
        return ask(engine, prompt, **options)[0]  # type: ignore[arg-type]


# -- the next program ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", range(1, len(PROMPT) + 1))
def test_after_a_restart_every_committed_token_is_found_wherever_the_prompt_ends(tmp_path: Path, length: int) -> None:
    """Partial blocks were left out once, so that a short conversation was computed again as a whole."""
    first = _fill(tmp_path, PROMPT[:length], max_tokens=1)
    again = [*PROMPT[:length], *first, 9, 8, 7]
    with started(tmp_path) as engine:
        answer, usage = ask(engine, again)
    assert answer == _alone(again)
    assert usage.cached_tokens == (length if length >= SIZE else 0)  # a lookup begins with a whole block
    assert usage.computed_prompt_tokens == len(again) - usage.cached_tokens


def test_the_same_prompt_again_computes_its_last_token_alone(tmp_path: Path) -> None:
    first = _fill(tmp_path, PROMPT)
    with started(tmp_path) as engine:
        answer, usage = ask(engine, PROMPT)
    assert answer == first
    assert usage.computed_prompt_tokens == 1


@pytest.mark.parametrize("common", [3, 4, 5, 20, 31, 40])
def test_a_branch_finds_what_it_has_in_common_to_the_token(tmp_path: Path, common: int) -> None:
    _fill(tmp_path, PROMPT)
    branch = [*PROMPT[:common], *(250 - token for token in PROMPT[common:])]
    with started(tmp_path) as engine:
        answer, usage = ask(engine, branch)
    assert answer == _alone(branch)
    assert usage.cached_tokens == (common if common >= SIZE else 0)  # a lookup begins with a whole block


def test_a_branch_in_the_middle_of_a_partial_block_finds_its_rows(tmp_path: Path) -> None:
    _fill(tmp_path, PROMPT[:35], max_tokens=1)
    with started(tmp_path) as engine:
        _, usage = ask(engine, [*PROMPT[:34], 1, 1, 1])
    assert usage.cached_tokens == 34


def test_branches_share_their_files(tmp_path: Path) -> None:
    with started(tmp_path) as engine:
        ask(engine, PROMPT[:32], max_tokens=1)
        before = on_disk(engine).saved_blocks
        for i in range(3):
            ask(engine, [*PROMPT[:32], i, i, i, i], max_tokens=1)
        assert before == 8
        assert on_disk(engine).saved_blocks == 8 + 3
    with started(tmp_path) as engine:
        for i in range(3):
            assert ask(engine, [*PROMPT[:32], i, i, i, i, 5], max_tokens=1)[1].cached_tokens == 36
        assert on_disk(engine).loaded_blocks == 8 + 3


def test_samples_of_one_prompt_are_all_there_after_a_restart(tmp_path: Path) -> None:
    params = SamplingParams(n=4, seed=3, max_tokens=9, ignore_eos=True)
    with started(tmp_path) as engine:
        request_id = engine.add_request(PROMPT, params)
        samples = outputs(run_all(engine), request_id)
    with started(tmp_path) as engine:
        for sample in samples:
            _, usage = ask(engine, [*PROMPT, *sample, 4])
            assert usage.computed_prompt_tokens == 2  # the last token of a sample was never fed to the model


def test_nothing_is_loaded_before_it_is_needed(tmp_path: Path) -> None:
    _fill(tmp_path, PROMPT)
    with started(tmp_path) as engine:
        ask(engine, [5, 5, 5, 5, 5])
        assert on_disk(engine).loaded_blocks == 0


def test_four_identical_prompts_are_loaded_once(tmp_path: Path) -> None:
    first = _fill(tmp_path, PROMPT)
    with started(tmp_path) as engine:
        ids = [engine.add_request(PROMPT, greedy(max_tokens=12)) for _ in range(4)]
        events = run_all(engine)
        assert [outputs(events, request_id)[0] for request_id in ids] == [first] * 4
        assert on_disk(engine).loaded_blocks == len(PROMPT) // SIZE + 1 == 11


def test_the_cost_of_a_prompt_tells_what_the_disk_has(tmp_path: Path) -> None:
    _fill(tmp_path, PROMPT[:32])
    with started(tmp_path) as engine:
        cost = engine.prefix_cost(PROMPT)
        assert (cost.cached_tokens, cost.tokens_to_compute, cost.blocks_shared) == (32, 9, 8)
        assert engine.prefix_cost(PROMPT, cache_salt="bob").cached_tokens == 0
        assert ask(engine, PROMPT)[1].cached_tokens == 32


def test_what_memory_lost_is_found_on_disk_while_the_program_runs(tmp_path: Path) -> None:
    with started(tmp_path) as engine:
        first, _ = ask(engine, PROMPT)
        disk_of(engine).flush()
        engine.clear_cache()
        answer, usage = ask(engine, PROMPT)
    assert answer == first
    assert usage.cached_tokens == 40


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_blocks_packed_by_the_cpp_kernels_come_back_as_they_were(
    tmp_path: Path, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if build.wait(300) is None:
        pytest.skip(build.describe())
    monkeypatch.setattr(kv_cache, "backend_for", BACKEND_FOR)
    model = load_model(EngineConfig.load(model=str(tiny_llama_folder()), dtype=dtype, device="cpu"))
    settings: dict[str, Any] = {"model": model, "block_size": 16}
    with started(tmp_path, **settings) as engine:
        assert engine.info().backend == "cpp"
        first, _ = ask(engine, PROMPT)
        warm, _ = ask(engine, [*PROMPT, *first, 5])
    with started(tmp_path, **settings) as engine:
        answer, usage = ask(engine, [*PROMPT, *first, 5])
    assert answer == warm
    assert usage.computed_prompt_tokens == 1


BACKEND_FOR = kv_cache.backend_for


# -- nobody else ---------------------------------------------------------------------------------------------------------


def test_another_users_probe_finds_nothing_on_disk(tmp_path: Path) -> None:
    """A cache that outlived its process once answered faster to whoever guessed what others had asked."""
    with started(tmp_path) as engine:
        ask(engine, PROMPT, cache_salt="alice")
    with started(tmp_path) as engine:
        for salt in ("bob", "", "alice\0", "Alice"):
            assert ask(engine, PROMPT, cache_salt=salt)[1].cached_tokens == 0
        assert on_disk(engine).loaded_blocks == 0
        assert ask(engine, PROMPT, cache_salt="alice")[1].cached_tokens == 40


def test_other_weights_under_the_same_name_find_nothing(tmp_path: Path) -> None:
    folder = save_tiny_llama(tmp_path / "model", seed=1)
    _fill(tmp_path / "kv", PROMPT)
    settings: dict[str, Any] = {"model": str(folder), "device": "cpu", "dtype": "float32"}
    for seed in (1, 2):
        save_tiny_llama(folder, seed=seed)
        model = load_model(EngineConfig.load(**settings))
        with started(tmp_path / "kv", model=model) as engine:
            answer, usage = ask(engine, PROMPT)
            assert usage.cached_tokens == 0
        with started(None, model=model) as engine:
            assert ask(engine, PROMPT)[0] == answer


def test_another_layout_or_block_size_finds_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _fill(tmp_path, PROMPT)
    with started(tmp_path, block_size=8) as engine:
        assert ask(engine, PROMPT)[1].cached_tokens == 0
    monkeypatch.setattr(kv_cache, "backend_for", lambda *_: replace(reference_backend(), name="packed"))
    with started(tmp_path) as engine:
        assert ask(engine, PROMPT)[1].cached_tokens == 0


def test_a_backend_that_takes_over_finds_nothing_of_the_old_layout_and_saves_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernels of a CPU take over while blocks are on their way in both directions."""
    _fill(tmp_path, PROMPT)
    expected = _alone([*PROMPT, 5])
    better = replace(reference_backend(), name="better")
    monkeypatch.setattr(kv_cache, "backend_for", lambda *_: replace(reference_backend(), successor=lambda: better))
    with started(tmp_path) as engine:
        busy = engine.add_request([7, 7, 7], greedy(max_tokens=30))
        engine.step()
        assert engine.info().backend == "better"
        answer, usage = ask(engine, [*PROMPT, 5])
        assert (answer, usage.cached_tokens) == (expected, 0)
        engine.abort(busy)
    monkeypatch.setattr(kv_cache, "backend_for", lambda *_: better)
    with started(tmp_path) as engine:
        answer, usage = ask(engine, [*PROMPT, 5])
    assert answer == expected
    assert usage.computed_prompt_tokens == 1


# -- beside others -------------------------------------------------------------------------------------------------------


def test_streams_write_the_same_while_blocks_come_and_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One block moves between two steps here, so loads and copies last over many of them."""
    for name in ("_LOAD_BYTES_BESIDE_STREAMS", "_SAVE_BYTES_BESIDE_STREAMS", "_IDLE_BYTES"):
        monkeypatch.setattr(f"chatpage.engine.kv_disk.disk.{name}", 1)
    rng = random.Random(5)
    prompts = [PROMPT[: rng.randint(8, 41)] + [rng.randrange(3, 250) for _ in range(rng.randint(1, 30))] for _ in range(12)]
    expected = [_alone(prompt) for prompt in prompts]
    cached = []
    for _ in range(3):
        with started(tmp_path) as engine:
            waiting, ids, events = list(prompts), [], []
            while waiting or engine.has_work:
                if waiting and rng.random() < 0.3:
                    ids.append(engine.add_request(waiting.pop(0), greedy(max_tokens=12)))
                events += engine.step()
            assert [outputs(events, request_id)[0] for request_id in ids] == expected
            cached.append(sum(finished(events, request_id).usage.cached_tokens for request_id in ids))
    assert cached[0] < cached[1] == cached[2] == sum(len(prompt) - 1 for prompt in prompts)


def test_a_running_stream_is_served_in_every_step_while_another_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _fill(tmp_path, PROMPT)
    monkeypatch.setattr("chatpage.engine.kv_disk.disk._LOAD_BYTES_BESIDE_STREAMS", 1)
    with started(tmp_path) as engine:
        stream = engine.add_request([7, 7, 7], greedy(max_tokens=60))
        engine.step()
        engine.add_request(PROMPT, greedy(max_tokens=2))
        num_steps = 0
        while disk_of(engine).has_loads:
            assert [e.request_id for e in engine.step() if isinstance(e, TokenDelta)][:1] == [stream]
            num_steps += 1
        assert num_steps >= 10


def test_an_aborted_request_that_waited_for_its_load_leaves_nothing(tmp_path: Path) -> None:
    _fill(tmp_path, PROMPT)
    for num_steps in range(4):
        with started(tmp_path) as engine:
            first, second = (engine.add_request(PROMPT, greedy(max_tokens=4)) for _ in range(2))
            events = [event for _ in range(num_steps) for event in engine.step()]
            engine.abort(first)
            events += run_all(engine)
            assert len(outputs(events, second)[0]) == 4
            assert_whole(engine)


@pytest.mark.parametrize("n", [1, 3])
def test_a_preempted_sequence_comes_back_from_disk_instead_of_being_computed_again(tmp_path: Path, n: int) -> None:
    """Under pressure a long prompt was computed anew each time it had to give way, though the disk could have had it."""

    def run(folder: Path | None) -> tuple[list[tuple[int, ...]], int, int]:
        with started(folder, kv_memory=2**16) as engine:
            ids = [engine.add_request([*PROMPT, i, i], greedy(n=n, max_tokens=60)) for i in range(3)]
            events: list[Event] = []
            while engine.has_work:
                events += engine.step()
                if engine._disk is not None:
                    engine._disk.flush()
            stats = engine.stats()
            assert stats.num_preemptions > 0, "there was no pressure"
            texts = [tokens for request_id in ids for tokens in outputs(events, request_id)]
            return texts, stats.computed_tokens, stats.disk.loaded_tokens if stats.disk else 0

    texts, computed, _ = run(None)
    texts_with_disk, computed_with_disk, loaded = run(tmp_path)
    assert texts_with_disk == texts
    assert loaded > 0
    assert computed_with_disk < computed


def test_a_load_gives_way_to_a_stream_that_needs_its_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks held for a request that only waits must not end one that runs."""
    _fill(tmp_path, [*PROMPT, *PROMPT])
    monkeypatch.setattr("chatpage.engine.kv_disk.disk._LOAD_BYTES_BESIDE_STREAMS", 1)
    expected = _alone([9, 9, 9], 60), _alone([*PROMPT, *PROMPT], 4)
    with started(tmp_path, kv_memory=24 * SIZE * 512) as engine:
        stream = engine.add_request([9, 9, 9], greedy(max_tokens=60))
        engine.step()
        other = engine.add_request([*PROMPT, *PROMPT], greedy(max_tokens=4))
        events = run_all(engine)
        assert (outputs(events, stream)[0], outputs(events, other)[0]) == expected
        assert finished(events, stream).usage.num_preemptions == 0


def test_a_pool_too_small_for_what_the_disk_has_serves_all_the_same(tmp_path: Path) -> None:
    prompts = [[*PROMPT[:20], i, *PROMPT[:20]] for i in range(3, 9)]
    expected = [_alone(prompt, 20) for prompt in prompts]
    for _ in range(2):
        with started(tmp_path, kv_memory=30 * SIZE * 512) as engine:
            ids = [engine.add_request(prompt, greedy(max_tokens=20)) for prompt in prompts]
            events = run_all(engine)
            assert [outputs(events, request_id)[0] for request_id in ids] == expected


def test_a_cache_that_is_cleared_in_the_middle_of_a_load_is_computed_again(tmp_path: Path) -> None:
    first = _fill(tmp_path, PROMPT)
    with started(tmp_path) as engine:
        request_id = engine.add_request(PROMPT, greedy(max_tokens=12))
        engine.step()
        engine.clear_cache()
        assert outputs(run_all(engine), request_id) == [first]


def test_two_programs_on_one_folder_find_what_the_other_saved(tmp_path: Path) -> None:
    with started(tmp_path) as one, started(tmp_path) as two:
        first, _ = ask(one, PROMPT)
        disk_of(one).flush()
        answer, usage = ask(two, PROMPT)
        assert (answer, usage.cached_tokens) == (first, 40)
        ask(two, [*PROMPT, *answer, 3, 3, 3, 3])
        disk_of(two).flush()
        assert ask(one, [*PROMPT, *answer, 3, 3, 3, 3, 1])[1].cached_tokens >= 52
    assert not [path for path in files_in(tmp_path) if path.suffix == ".tmp"]


# -- limits and faults ---------------------------------------------------------------------------------------------------


def test_the_folder_stays_under_its_limit_and_keeps_what_was_used_last(tmp_path: Path) -> None:
    with started(tmp_path, kv_disk_size=30_000) as engine:
        for i in range(6):
            ask(engine, [*PROMPT[i:], *PROMPT[:i]], max_tokens=1)
        stats = on_disk(engine)
        assert disk_of(engine)._saver._known == set(files_in(tmp_path))
        assert stats.bytes == sum(path.stat().st_size for path in files_in(tmp_path)) <= 30_000
        assert stats.evicted_blocks > 0
    with started(tmp_path, kv_disk_size=30_000) as engine:
        assert ask(engine, [*PROMPT[5:], *PROMPT[:5]], max_tokens=1)[1].cached_tokens == 40


def test_a_disk_that_cannot_be_written_is_logged_once_and_the_engine_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected = _alone(PROMPT)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with started(tmp_path) as engine:
        monkeypatch.setattr("os.fsync", full)
        for _ in range(3):
            assert ask(engine, PROMPT)[0] == expected
            engine.clear_cache()
            stats = on_disk(engine)
        assert (stats.is_saving, stats.saved_blocks) == (False, 0)
    assert [record.getMessage() for record in caplog.records] == [
        f"KV cannot be saved in {tmp_path}/kv-v1: No space left on device. "
        "It is tried again and again; everything else goes on."
    ]
    assert files_in(tmp_path) == []


@pytest.mark.skipif(sys.platform != "linux", reason="limits the size of files as Linux does")
def test_saving_comes_back_by_itself_with_all_that_memory_still_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A disk that was full for a minute ended saving until the next restart. Here files may really not grow for a while."""
    monkeypatch.setattr(writer, "FIRST_PAUSE_S", 0.2)
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with started(tmp_path) as engine:
        resource.setrlimit(resource.RLIMIT_FSIZE, (64, hard))
        try:
            first, _ = ask(engine, PROMPT)
            ask(engine, PROMPT[::-1])
            while (stats := on_disk(engine)).write_errors < 2:  # the second error pauses longer than the first
                time.sleep(0.05)
                run_all(engine)
            assert (stats.is_saving, stats.saved_blocks) == (False, 0)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
        while not on_disk(engine).is_saving:
            time.sleep(0.05)
            run_all(engine)
        run_all(engine)
        num_blocks = on_disk(engine).saved_blocks
        assert num_blocks == 2 * ((len(PROMPT) + 11) // SIZE)
    assert [record.getMessage().partition(" in ")[0] for record in caplog.records] == ["KV cannot be saved", "KV is saved"]
    with started(tmp_path) as engine:
        assert ask(engine, [*PROMPT, *first])[1].cached_tokens >= len(PROMPT)


def test_a_folder_that_vanishes_is_no_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with started(tmp_path) as engine:
        first, _ = ask(engine, PROMPT)
        disk_of(engine).flush()
        (tmp_path / "kv-v1").rename(tmp_path / "elsewhere")
        engine.clear_cache()
        assert ask(engine, PROMPT)[0] == first
        ask(engine, PROMPT[::-1])
        assert not on_disk(engine).is_saving
    assert len(caplog.records) == 1
    assert not (tmp_path / "kv-v1").exists()


def test_a_folder_that_cannot_be_made_is_logged_and_the_engine_starts(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").touch()
    with started(tmp_path / "file") as engine:
        assert ask(engine, PROMPT)[0] == _alone(PROMPT)
        assert engine.stats().disk is None
    assert "KV is not kept in" in caplog.text


def test_values_that_are_no_numbers_never_reach_the_disk(tmp_path: Path) -> None:
    """A model that overflowed once would otherwise do so again in every program that follows."""
    with started(tmp_path) as engine:
        ask(engine, PROMPT, max_tokens=1)
        disk_of(engine).flush()
        before = files_in(tmp_path)
        block = engine.prefix_blocks(PROMPT).block_ids[3]
        for path in before:
            path.unlink()
        disk_of(engine)._saver._known.clear()
        engine._kv_cache.layers[0][0][block, 2, 1, 0] = float("inf")
        disk_of(engine)._saver.offer(engine._root(""), PROMPT)
        run_all(engine)
        assert on_disk(engine).blocks == 2 * len(before) - 1
        assert len(files_in(tmp_path)) == len(before) - 1


def test_closing_keeps_to_its_time_and_saves_the_latest_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "MAX_WAITING_BYTES", 1)
    monkeypatch.setattr(saving, "_MAX_BATCH_BYTES", 1)
    monkeypatch.setattr(saving.Saver, "has_work", False)  # nothing is saved before the end
    engine = open_engine(tmp_path)
    latest = PROMPT[::-1]
    for prompt in (PROMPT, latest):
        ask(engine, prompt, max_tokens=1)
    now = [0.0]
    clock = SimpleNamespace(monotonic=lambda: now[0], time_ns=time.time_ns)
    for module in (disk, saving, writer):
        monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr("os.fsync", lambda _: now.__setitem__(0, now[0] + 0.05))
    engine.close(save_s=0.3)
    num_files = len(files_in(tmp_path))
    assert 6 <= num_files <= 7
    monkeypatch.undo()
    monkeypatch.setattr(kv_cache, "backend_for", reference_backend)
    with started(tmp_path) as engine:
        assert ask(engine, latest)[1].cached_tokens == num_files * SIZE
        assert ask(engine, PROMPT)[1].cached_tokens == 0


def test_what_runs_when_the_engine_closes_is_saved(tmp_path: Path) -> None:
    engine = open_engine(tmp_path)
    engine.add_request(PROMPT, greedy(max_tokens=100))
    events = [event for _ in range(10) for event in engine.step()]
    assert not [event for event in events if isinstance(event, RequestFinished)]
    engine.close()
    engine.close()
    with started(tmp_path) as engine:
        assert ask(engine, [*PROMPT, 3])[1].cached_tokens == len(PROMPT)


def test_a_disk_that_does_not_answer_costs_one_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = _fill(tmp_path, PROMPT)
    monkeypatch.setattr(loading, "_PATIENCE_S", 0.0)
    with started(tmp_path) as engine:
        answers = threading.Event()
        for _ in range(2):  # as many as there are threads
            disk_of(engine)._reader._pool.submit(answers.wait, 60)
        answer, usage = ask(engine, PROMPT)
        answers.set()
        assert (answer, usage.cached_tokens) == (first, 0)
        engine.clear_cache()
        assert ask(engine, PROMPT)[1].cached_tokens == 0
