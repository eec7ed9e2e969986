"""The engine on its thread: many readers, slow readers, readers that leave, and an engine that dies."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from chatpage.config import EngineConfig
from chatpage.engine.core import Engine
from chatpage.engine.loop import AsyncEngine
from chatpage.errors import EngineDeadError, InvalidRequestError, ModelNotFoundError, UnknownRequestError
from chatpage.events import RequestFinished, RequestId, SampleFinished, TokenDelta
from chatpage.sampling_params import SamplingParams
from tests.engine.engines import assert_whole, generate, greedy, tiny_engine

PROMPT = list(range(5, 40))


def with_engine(test: Callable[[AsyncEngine, Engine], Coroutine[Any, Any, None]]) -> None:
    """Run `test` on a started engine, then prove that no block is left in use."""
    engine = tiny_engine()

    async def run() -> None:
        async with AsyncEngine(load=lambda _: engine) as running:
            await asyncio.wait_for(test(running, engine), 60)

    asyncio.run(run())
    while engine.has_work:
        engine.step()
    assert_whole(engine)


async def read(engine: AsyncEngine, request_id: RequestId) -> list[SampleFinished]:
    return [event async for event in engine.stream(request_id) if isinstance(event, SampleFinished)]


def test_many_readers_each_get_their_own_events() -> None:
    expected = [generate(tiny_engine(), [*PROMPT, i], greedy(max_tokens=10))[0] for i in range(4)]

    async def test(running: AsyncEngine, _: Engine) -> None:
        ids = [await running.add_request([*PROMPT, i], greedy(max_tokens=10)) for i in range(4)]
        ends = await asyncio.gather(*(read(running, request_id) for request_id in ids))
        assert [end.token_ids for [end] in ends] == expected

    with_engine(test)


def test_a_slow_reader_finds_its_deltas_merged_and_complete() -> None:
    async def test(running: AsyncEngine, engine: Engine) -> None:
        request_id = await running.add_request(PROMPT, SamplingParams(max_tokens=100, ignore_eos=True, seed=1, logprobs=1))
        while (await running.stats()).num_running or engine.has_work:
            await asyncio.sleep(0.01)
        events = [event async for event in running.stream(request_id)]
        deltas = [event for event in events if isinstance(event, TokenDelta)]
        end = next(event for event in events if isinstance(event, SampleFinished))
        assert len(deltas) == 1
        assert deltas[0].token_ids == end.token_ids
        assert (deltas[0].text, len(deltas[0].logprobs)) == (end.text, 100)

    with_engine(test)


def test_leaving_a_stream_aborts_the_request() -> None:
    async def test(running: AsyncEngine, _: Engine) -> None:
        request_id = await running.add_request(PROMPT, SamplingParams(n=4, max_tokens=1000, ignore_eos=True))
        stream = running.stream(request_id)
        async for event in stream:
            if isinstance(event, TokenDelta):
                break
        await stream.aclose()
        while (await running.stats()).num_running:
            await asyncio.sleep(0.01)

    with_engine(test)


def test_errors_of_a_call_reach_its_caller_and_nobody_else() -> None:
    async def test(running: AsyncEngine, _: Engine) -> None:
        with pytest.raises(InvalidRequestError, match="empty"):
            await running.add_request([])
        with pytest.raises(UnknownRequestError):
            await running.fork(RequestId("nobody"))
        request_id = await running.add_request(PROMPT, greedy(max_tokens=2))
        assert len(await read(running, request_id)) == 1

    with_engine(test)


def test_fork_pin_and_cost_work_from_asyncio() -> None:
    async def test(running: AsyncEngine, _: Engine) -> None:
        parent = await running.add_request(PROMPT, greedy(max_tokens=5))
        await read(running, parent)
        child = await running.fork(parent, greedy(max_tokens=2), num_tokens=20)
        assert len(await read(running, child)) == 1
        pin = await running.pin(PROMPT)
        assert (await running.prefix_cost(PROMPT)).tokens_to_compute == 0
        assert (await running.prefix_blocks(PROMPT)).num_tokens == len(PROMPT)
        assert sum(block.ref_count for block in await running.block_map()) == -(-len(PROMPT) // 4)
        await running.unpin(pin)
        await running.abort(child)

    with_engine(test)


def test_a_caller_that_is_cancelled_while_adding_leaves_no_request() -> None:
    async def test(running: AsyncEngine, _: Engine) -> None:
        for _attempt in range(50):
            task = asyncio.create_task(running.add_request(PROMPT, SamplingParams(max_tokens=1000, ignore_eos=True)))
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        while (stats := await running.stats()).num_running or stats.num_waiting:
            await asyncio.sleep(0.01)

    with_engine(test)


def test_a_model_that_does_not_load_is_the_error_of_start() -> None:
    async def run() -> None:
        with pytest.raises(ModelNotFoundError):
            await AsyncEngine(EngineConfig.load(model="/nowhere/model.gguf")).start()

    asyncio.run(run())


def test_an_engine_that_dies_tells_every_reader_and_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = tiny_engine()

    async def run() -> None:
        running = AsyncEngine(load=lambda _: engine)
        await running.start()
        request_id = await running.add_request(PROMPT, SamplingParams(max_tokens=1000, ignore_eos=True))

        def die() -> None:
            raise MemoryError("no memory for a step")

        monkeypatch.setattr(engine, "step", die)
        with pytest.raises(EngineDeadError, match="no memory for a step"):
            await asyncio.wait_for(read(running, request_id), 10)
        assert not running.is_alive
        with pytest.raises(EngineDeadError, match="no memory for a step"):
            await running.stats()
        await running.close()

    asyncio.run(run())


def test_closing_ends_open_streams_and_later_calls() -> None:
    async def run() -> None:
        running = AsyncEngine(load=lambda _: tiny_engine())
        await running.start()
        request_id = await running.add_request(PROMPT, SamplingParams(max_tokens=1500, ignore_eos=True))
        reader = asyncio.create_task(read(running, request_id))
        await asyncio.sleep(0.05)
        await running.close()
        with pytest.raises(EngineDeadError, match="closed"):
            await asyncio.wait_for(reader, 10)
        with pytest.raises(EngineDeadError):
            await running.add_request(PROMPT)

    asyncio.run(run())


def test_a_finished_request_ends_its_stream() -> None:
    async def test(running: AsyncEngine, _: Engine) -> None:
        request_id = await running.add_request(PROMPT, greedy(max_tokens=1), prefill_only=True)
        events = [event async for event in running.stream(request_id)]
        assert isinstance(events[-1], RequestFinished)
        assert events[-1].usage.completion_tokens == 0

    with_engine(test)
