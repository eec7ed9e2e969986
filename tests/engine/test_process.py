"""The engine in a child process: the same answers, and what happens when either side dies."""

import asyncio
import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from chatpage.config import EngineConfig
from chatpage.engine.client import EngineClient
from chatpage.engine.core import Engine
from chatpage.engine.loop import AsyncEngine
from chatpage.engine.process import ProcessEngine, keep_alive
from chatpage.errors import EngineDeadError, InvalidRequestError, ModelNotFoundError, UnknownRequestError
from chatpage.events import RequestFinished, RequestId, SampleFinished, TokenDelta
from chatpage.sampling_params import SamplingParams
from tests.engine import scripted_engine
from tests.engine.engines import generate, greedy, tiny_engine
from tests.tiny_models import tiny_llama_folder

PROMPT = list(range(5, 40))


def load_from(config: EngineConfig | None) -> Engine:
    """Load in the child, from the folder that the parent made."""
    assert config is not None
    return tiny_engine(model=config.model)


def tiny_config() -> EngineConfig:
    return EngineConfig.load(model=str(tiny_llama_folder()))


def with_engine(test: Callable[[ProcessEngine], Coroutine[Any, Any, None]], load: Any = scripted_engine.load) -> None:
    async def run() -> None:
        async with ProcessEngine(tiny_config(), load=load) as engine:
            await asyncio.wait_for(test(engine), 60)
            if engine.is_alive:  # nothing is left in use
                while (stats := await engine.stats()).num_running or stats.num_waiting:
                    await asyncio.sleep(0.01)
                assert stats.memory.blocks_used == 0
        assert not engine.is_alive

    asyncio.run(run())


async def read(engine: EngineClient, request_id: RequestId) -> list[SampleFinished]:
    return [event async for event in engine.stream(request_id) if isinstance(event, SampleFinished)]


def test_a_process_that_is_closed_the_moment_it_was_begun_ends() -> None:
    """A port in use is found right after: the child had not been started yet, and could not be joined."""

    async def run() -> None:
        engine = ProcessEngine(tiny_config(), load=scripted_engine.load)
        engine.begin()
        await asyncio.wait_for(engine.close(), 60)
        assert not engine.is_alive

    asyncio.run(run())


def test_an_engine_is_replaced_by_a_better_one_when_nobody_uses_it() -> None:
    """The first start computes without compiled kernels; to have it stay so until someone starts it again helps nobody."""

    async def test(engine: ProcessEngine) -> None:
        assert engine.info.model == "interim"
        request_id = await engine.add_request(PROMPT, greedy(max_tokens=300))  # 1.5 s: longer than it takes to be replaced
        [end] = await read(engine, request_id)
        assert len(end.token_ids) == 300
        pid = engine.pid
        while engine.info.model == "interim":
            await asyncio.sleep(0.05)
        assert engine.pid == pid
        assert engine.info.model == "scripted"
        [end] = await read(engine, await engine.add_request(PROMPT, greedy(max_tokens=3)))
        assert end.text == "abc"

    with_engine(test, scripted_engine.load_interim_first)


def test_both_ways_to_run_an_engine_are_engine_clients() -> None:
    clients: list[EngineClient] = [AsyncEngine(), ProcessEngine()]
    assert not any(client.is_alive for client in clients)
    for client in clients:
        with pytest.raises(EngineDeadError):
            _ = client.info


def test_answers_are_those_of_an_engine_in_this_process_through_every_method() -> None:
    """Sampling params hold a read-only mapping, which plain pickle refuses."""
    here = tiny_engine()
    expected = [generate(here, [*PROMPT, i], greedy(max_tokens=10))[0] for i in range(4)]

    async def test(engine: ProcessEngine) -> None:
        # the reason tells how long kernels were compiled, by whoever came first
        assert replace(engine.info, backend_reason="") == replace(here.info(), backend_reason="")
        ids = [await engine.add_request([*PROMPT, i], greedy(max_tokens=10)) for i in range(4)]
        ends = await asyncio.gather(*(read(engine, request_id) for request_id in ids))
        assert [end.token_ids for [end] in ends] == expected

        params = greedy(max_tokens=5, logit_bias={7: 1.0}, stop=("x",), logprobs=2)
        parent = await engine.add_request(PROMPT, params, cache_salt="a", request_id=RequestId("mine"))
        assert parent == "mine"
        await read(engine, parent)
        child = await engine.fork(parent, greedy(max_tokens=2), num_tokens=20)
        assert len(await read(engine, child)) == 1
        assert (await engine.prefix_cost(PROMPT, cache_salt="a")).tokens_to_compute == 0
        assert (await engine.prefix_cost(PROMPT, cache_salt="b")).cached_tokens == 0
        assert (await engine.prefix_blocks(PROMPT, cache_salt="a")).num_tokens == len(PROMPT)
        pin = await engine.pin(PROMPT, cache_salt="a")
        assert sum(block.ref_count for block in await engine.block_map()) == -(-len(PROMPT) // 4)
        await engine.unpin(pin)
        await engine.abort(child)
        warm = await engine.add_request(PROMPT[::-1], prefill_only=True)
        assert isinstance([event async for event in engine.stream(warm)][-1], RequestFinished)

    with_engine(test, load_from)


def test_errors_of_a_call_reach_its_caller_and_nobody_else() -> None:
    async def test(engine: ProcessEngine) -> None:
        with pytest.raises(InvalidRequestError, match="empty"):
            await engine.add_request([])
        with pytest.raises(UnknownRequestError):
            await engine.fork(RequestId("nobody"))
        request_id = await engine.add_request(PROMPT, greedy(max_tokens=2))
        with pytest.raises(InvalidRequestError, match="in use"):
            await engine.add_request(PROMPT, greedy(max_tokens=2), request_id=request_id)
        assert len(await read(engine, request_id)) == 1

    with_engine(test)


def test_leaving_a_stream_or_the_call_that_adds_it_aborts_the_request() -> None:
    async def test(engine: ProcessEngine) -> None:
        request_id = await engine.add_request(PROMPT, SamplingParams(n=4, max_tokens=50_000, ignore_eos=True))
        stream = engine.stream(request_id)
        async for event in stream:
            if isinstance(event, TokenDelta):
                break
        await stream.aclose()
        for _attempt in range(20):
            task = asyncio.create_task(engine.add_request(PROMPT, SamplingParams(max_tokens=50_000, ignore_eos=True)))
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    with_engine(test)


def test_a_killed_child_ends_every_stream_and_call_within_a_second_and_can_be_restarted() -> None:
    async def test(engine: ProcessEngine) -> None:
        ids = [await engine.add_request([*PROMPT, i], SamplingParams(max_tokens=50_000, ignore_eos=True)) for i in range(3)]
        readers = [asyncio.create_task(read(engine, request_id)) for request_id in ids]
        await asyncio.sleep(0.1)
        assert engine.pid is not None
        os.kill(engine.pid, signal.SIGKILL)
        killed_at = time.monotonic()
        for reader in readers:
            with pytest.raises(EngineDeadError, match="exit code -9"):
                await reader
        assert not engine.is_alive
        with pytest.raises(EngineDeadError):
            await engine.stats()
        assert time.monotonic() - killed_at < 1
        await engine.restart()
        assert len(await read(engine, await engine.add_request(PROMPT, greedy(max_tokens=2)))) == 1

    with_engine(test)


def test_a_step_that_goes_wrong_beyond_repair_says_why() -> None:
    async def test(engine: ProcessEngine) -> None:
        request_id = await engine.add_request(PROMPT, SamplingParams(max_tokens=50_000, ignore_eos=True))
        with pytest.raises(EngineDeadError, match="no memory for a step"):
            await read(engine, request_id)

    with_engine(test, scripted_engine.load_brittle)


def test_it_is_restarted_as_often_as_it_dies() -> None:
    async def test(engine: ProcessEngine) -> None:
        keeper = asyncio.create_task(keep_alive(engine))
        for _life in range(2):
            assert engine.pid is not None
            os.kill(engine.pid, signal.SIGKILL)
            await engine.wait_until_dead()
            while not engine.is_alive:
                await asyncio.sleep(0.01)
        keeper.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await keeper

    with_engine(test)


class PoorEngine(ProcessEngine):
    """An engine on a machine that has nothing left for a child, for a while."""

    refusals: list[Exception]

    def begin(self) -> None:
        if self.refusals:
            raise self.refusals.pop()
        super().begin()


def test_it_is_restarted_as_soon_as_the_machine_has_room_for_it_again() -> None:
    """With no descriptor left at that moment it was never tried again, and nothing said so."""

    async def run() -> None:
        engine = PoorEngine(tiny_config(), load=scripted_engine.load)
        engine.refusals = []
        async with engine:
            engine.refusals += [OSError(24, "Too many open files"), RuntimeError("can't start new thread")]
            keeper = asyncio.create_task(keep_alive(engine))
            assert engine.pid is not None
            os.kill(engine.pid, signal.SIGKILL)
            await engine.wait_until_dead()
            while not engine.is_alive:
                assert not keeper.done(), keeper
                await asyncio.sleep(0.01)
            keeper.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await keeper

    asyncio.run(asyncio.wait_for(run(), 60))


def test_a_child_that_no_thread_can_talk_to_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    start = threading.Thread.start

    def start_unless_it_sends(thread: threading.Thread) -> None:
        if thread.name == "chatpage-engine-send":
            raise RuntimeError("can't start new thread")
        start(thread)

    async def run() -> None:
        engine = ProcessEngine(tiny_config(), load=scripted_engine.load)
        with pytest.raises(EngineDeadError, match="new thread"):
            await asyncio.wait_for(engine.start(), 20)
        await engine.close()

    monkeypatch.setattr(threading.Thread, "start", start_unless_it_sends)
    asyncio.run(run())


def test_a_model_that_does_not_load_is_the_error_of_start() -> None:
    async def run() -> None:
        engine = ProcessEngine(EngineConfig.load(model="/nowhere/model.gguf"))
        with pytest.raises(ModelNotFoundError):
            await engine.start()
        await engine.close()

    asyncio.run(run())


def test_closing_ends_open_streams_later_calls_and_the_process() -> None:
    async def run() -> None:
        engine = ProcessEngine(tiny_config(), load=scripted_engine.load)
        await engine.start()
        request_id = await engine.add_request(PROMPT, SamplingParams(max_tokens=50_000, ignore_eos=True))
        reader = asyncio.create_task(read(engine, request_id))
        await asyncio.sleep(0.05)
        await engine.close()
        with pytest.raises(EngineDeadError, match="closed"):
            await asyncio.wait_for(reader, 10)
        with pytest.raises(EngineDeadError):
            await engine.add_request(PROMPT)
        await engine.close()

    asyncio.run(run())
    assert not [child for child in multiprocessing.active_children() if child.name == "chatpage-engine"]


def test_signals_of_the_terminal_leave_the_child_alone() -> None:
    """Ctrl-C goes to every process of the terminal; the parent wants to store what its runs said before the engine ends."""

    async def test(engine: ProcessEngine) -> None:
        assert engine.pid is not None
        for name in (signal.SIGINT, signal.SIGTERM):
            os.kill(engine.pid, name)
        assert len(await read(engine, await engine.add_request(PROMPT, greedy(max_tokens=20)))) == 1

    with_engine(test)


@pytest.mark.parametrize("load", ["load", "load_slowly"])
def test_the_child_ends_when_its_parent_is_killed(load: str, tmp_path: Path) -> None:
    """A parent that is killed cannot close anything; an engine left behind would hold the memory of its model."""
    program = textwrap.dedent(f"""
        import asyncio, sys
        from chatpage.config import EngineConfig
        from chatpage.engine.process import ProcessEngine
        from chatpage.sampling_params import SamplingParams
        from tests.engine.scripted_engine import {load}

        async def main():
            engine = ProcessEngine(EngineConfig(), load={load})
            starting = asyncio.create_task(engine.start())
            while engine.pid is None:
                await asyncio.sleep(0.01)
            if {load!r} == "load":
                await starting
                await engine.add_request(list(range(9)), SamplingParams(max_tokens=50_000, ignore_eos=True, n=4))
            print(engine.pid, flush=True)
            await asyncio.sleep(600)

        if __name__ == "__main__":
            asyncio.run(main())
        """)
    script = tmp_path / "parent.py"
    script.write_text(program)
    root = str(Path(__file__).parents[2])
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([root, f"{root}/kernels"])}
    parent = subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True, env=environment)
    assert parent.stdout is not None
    with parent, parent.stdout:
        child = int(parent.stdout.readline())
        parent.kill()
    deadline = time.monotonic() + 10
    while is_running(child):
        assert time.monotonic() < deadline, "the child outlives its parent"
        time.sleep(0.05)


def is_running(pid: int) -> bool:
    """Whether the process is there and more than a zombie."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
