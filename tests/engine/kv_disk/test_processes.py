"""Programs that end in their usual ways leave their KV, and the next one goes on from it."""

import asyncio
import multiprocessing
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from chatpage.config import EngineConfig
from chatpage.engine.client import EngineClient
from chatpage.engine.core import Engine
from chatpage.engine.loop import AsyncEngine
from chatpage.engine.process import ProcessEngine
from chatpage.events import RequestFinished, SampleFinished, Usage
from tests.engine.engines import greedy
from tests.engine.kv_disk.engines import PROMPT, SIZE, ask, disk_of, files_in, open_engine, started
from tests.tiny_models import tiny_llama_folder


def _config(folder: Path) -> EngineConfig:
    return EngineConfig.load(
        model=str(tiny_llama_folder()), device="cpu", dtype="float32", kv_memory=2**20, block_size=SIZE, kv_disk=folder
    )


def _load(config: EngineConfig | None) -> Engine:
    """Load an engine whose backend never changes: in a child the fixture of these tests does not reach."""
    from chatpage.engine import kv_cache
    from tests.engine.model_driving import reference_backend

    kv_cache.backend_for = reference_backend
    return Engine.load(config)


async def _ask(engine: EngineClient, prompt: list[int]) -> tuple[tuple[int, ...], Usage]:
    request_id = await engine.add_request(prompt, greedy(max_tokens=12))
    events = [event async for event in engine.stream(request_id)]
    (sample,) = [event for event in events if isinstance(event, SampleFinished)]
    (ended,) = [event for event in events if isinstance(event, RequestFinished)]
    return sample.token_ids, ended.usage


def _twice(make: Callable[[], Any]) -> tuple[tuple[tuple[int, ...], Usage], tuple[tuple[int, ...], Usage]]:
    async def run() -> tuple[tuple[int, ...], Usage]:
        async with make() as engine:
            return await _ask(engine, PROMPT)

    return asyncio.run(run()), asyncio.run(run())


def test_an_engine_on_a_thread_leaves_its_kv(tmp_path: Path) -> None:
    first, second = _twice(lambda: AsyncEngine(_config(tmp_path), load=_load))
    assert first[0] == second[0]
    assert (first[1].cached_tokens, second[1].computed_prompt_tokens) == (0, 1)


def test_an_engine_in_a_process_of_its_own_leaves_its_kv(tmp_path: Path) -> None:
    """The child of a server is told to end by its parent, and had five seconds to do so, a step included."""
    first, second = _twice(lambda: ProcessEngine(_config(tmp_path), load=_load))
    assert first[0] == second[0]
    assert (first[1].cached_tokens, second[1].computed_prompt_tokens) == (0, 1)


def test_a_process_that_is_killed_leaves_what_was_written_and_nothing_else(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_fill_and_hang, args=(_config(tmp_path), theirs))
    process.start()
    assert ours.recv() == "written"
    process.kill()
    process.join()
    assert len(files_in(tmp_path)) == 13
    with started(tmp_path) as engine:
        assert ask(engine, PROMPT)[1].cached_tokens == 40


def _fill_and_hang(config: EngineConfig, pipe: Any) -> None:
    engine = _load(config)
    ask(engine, PROMPT)
    disk_of(engine).flush()
    pipe.send("written")
    pipe.recv()


def test_engines_write_and_read_one_folder_at_the_same_time(tmp_path: Path) -> None:
    """Two servers on one folder: each file is published by one rename, and a limit that both keep evicts under the other."""
    prompts = [[*PROMPT[:12], i, *PROMPT[i:]] for i in range(3, 11)]
    with started(None) as engine:
        expected = [ask(engine, prompt)[0] for prompt in prompts]
    open_engine(None)  # the model is loaded before the threads need it
    assert asyncio.run(_race([partial(_answers, tmp_path, prompts) for _ in range(3)])) == [expected] * 3
    assert not [path for path in files_in(tmp_path) if path.suffix != ".safetensors"]


async def _race(works: list[Callable[[], Any]]) -> list[Any]:
    return await asyncio.gather(*(asyncio.to_thread(work) for work in works))


def _answers(folder: Path, prompts: list[list[int]]) -> list[tuple[int, ...]]:
    answers = []
    for prompt in prompts:
        with started(folder, kv_disk_size=60_000) as engine:
            answers.append(ask(engine, prompt)[0])
    return answers
