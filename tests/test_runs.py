"""The log of a run: what a reader gets, however slow it is, whenever it comes and goes."""

import asyncio
import itertools
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chatpage.runs import RunLog, RunLogs, SampleLog
from chatpage.server.protocol import RunCreated, RunDelta, RunDone, RunMessage, RunSnapshot, SampleDone
from chatpage.server.views import UsageView
from chatpage.store import NodeId, RunId, RunKind, RunStatus, UserId
from tests.sessions import Copy

USAGE = UsageView(prompt_tokens=1, cached_tokens=0, completion_tokens=1)
OWNER = UserId("owner")


def new_log(num_samples: int = 2, *, kept_events: int = 2048, run_id: str = "run", client_msg_id: str | None = None) -> RunLog:
    created = RunCreated(
        run_id=run_id,
        conversation_id="conversation",
        kind=RunKind.REPLY,
        node_ids=tuple(f"node {i}" for i in range(num_samples)),
        client_msg_id=client_msg_id,
    )
    return RunLog(OWNER, created, [SampleLog(i, NodeId(f"node {i}")) for i in range(num_samples)], kept_events=kept_events)


def finish(log: RunLog) -> None:
    for sample in log.samples:
        if sample.done is None:
            log.end_sample(sample.sample, "stop", USAGE)
    log.end(RunStatus.COMPLETE, usage=USAGE)


async def read_all(log: RunLog, after_seq: int | None = None) -> list[RunMessage]:
    return [message async for message in log.follow(after_seq)]


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def limited() -> None:
        await asyncio.wait_for(test(), 20)

    asyncio.run(limited())


def test_a_reader_that_keeps_up_gets_every_event_under_its_own_number() -> None:
    async def test() -> None:
        log = new_log()
        messages: list[RunMessage] = []

        async def read() -> None:
            messages.extend([message async for message in log.follow(0)])

        reader = asyncio.create_task(read())
        for i in range(6):
            log.append_delta(i % 2, f"{i}", (i,))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        finish(log)
        await reader
        assert [message.seq for message in messages] == list(range(1, 10))
        assert [message.type for message in messages] == ["run.delta"] * 6 + ["sample.done"] * 2 + ["run.done"]

    run(test)


def test_what_gathers_while_a_reader_is_away_is_merged_per_sample_up_to_the_next_end() -> None:
    async def test() -> None:
        log = new_log()
        for i in range(3):
            log.append_delta(0, f"a{i}", (i,), -0.5)
            log.append_delta(1, f"b{i}", (i, i))
        log.end_sample(0, "stop", USAGE)
        log.append_delta(1, "c", (9,))
        finish(log)
        first, done, second, *rest = await read_all(log, 0)
        assert isinstance(first, RunDelta)
        assert first.d == ((0, "a0a1a2", 3, -1.5), (1, "b0b1b2", 6))
        assert (first.seq, done.seq, second.seq, [message.seq for message in rest]) == (6, 7, 8, [9, 10])

    run(test)


def test_a_reader_that_comes_back_gets_exactly_what_it_lacks() -> None:
    """A client that lost its connection once showed half a sentence twice."""

    async def test() -> None:
        log = new_log(1)
        for i in range(10):
            log.append_delta(0, f"{i}", (i,))
        finish(log)
        for seen in range(11):
            delta = next((m for m in await read_all(log, seen) if isinstance(m, RunDelta)), None)
            assert (delta.d[0][1] if delta else "") == "0123456789"[seen:]
        assert await read_all(log, log.seq) == []

    run(test)


def test_a_snapshot_comes_first_for_a_reader_that_is_new_too_old_or_from_the_future() -> None:
    async def test() -> None:
        log = new_log(1, kept_events=4)
        for i in range(20):
            log.append_delta(0, f"{i % 10}", (i,))
        finish(log)
        for after_seq in (None, 0, 3, 99):
            snapshot, done = await read_all(log, after_seq)
            assert isinstance(snapshot, RunSnapshot)
            assert snapshot.samples[0].text == "0123456789" * 2
            assert (snapshot.samples[0].finish_reason, snapshot.samples[0].num_tokens) == ("stop", 20)
            assert (snapshot.seq, done.seq) == (log.seq - 1, log.seq)
        assert isinstance((await read_all(log, 19))[0], RunDelta)

    run(test)


@given(
    events=st.lists(st.tuples(st.integers(0, 2), st.text("ab\u20ac", max_size=3)), max_size=60),
    pauses=st.lists(st.integers(0, 9), min_size=1, max_size=20),
    stays=st.lists(st.integers(1, 5), min_size=1, max_size=20),
    kept_events=st.integers(1, 30),
)
@settings(max_examples=150, deadline=None)
def test_any_reader_ends_with_the_text_of_the_log(
    events: list[tuple[int, str]], pauses: list[int], stays: list[int], kept_events: int
) -> None:
    """Readers of any speed that leave and come back at any moment; `Copy` holds the rules about numbers."""

    async def test() -> None:
        log = new_log(3, kept_events=kept_events)
        copy = Copy()

        async def write() -> None:
            for sample, text in events:
                log.append_delta(sample, text, (1,))
                await asyncio.sleep(0)
            finish(log)

        async def read() -> None:
            for pause, stay in zip(itertools.cycle(pauses), itertools.cycle(stays), strict=False):
                messages = log.follow(copy.seq)
                num_read = 0
                async for message in messages:
                    copy.take(message)
                    num_read += 1
                    for _ in range(pause):
                        await asyncio.sleep(0)
                    if num_read == stay:
                        break
                await messages.aclose()
                if copy.end is not None:
                    return

        await asyncio.gather(write(), read())
        assert copy.texts == {i: "".join(text for sample, text in events if sample == i) for i in range(3)}
        assert copy.end is not None
        assert copy.end.status is RunStatus.COMPLETE

    run(test)


def test_memory_of_a_long_run_is_bounded_by_its_text() -> None:
    log = new_log(1, kept_events=10)
    for i in range(1000):
        log.append_delta(0, "x", (i,))
    assert len(log._events) < 20
    assert (log.seq, len(log.samples[0].text)) == (1000, 1000)


def test_a_token_is_settled_once_its_text_is_there() -> None:
    """Half a character, or the start of a stop string, is held back; the store must not get its tokens without its text."""
    sample = SampleLog(0, NodeId("node"), prefix_text="So: ", prefix_token_ids=(7, 8))
    sample.append("a", (1,))
    sample.append("", (2,))
    assert (sample.num_settled_parts, sample.num_settled_tokens) == (1, 1)
    sample.append("\u20ac", (3,))
    assert (sample.num_settled_parts, sample.num_settled_tokens) == (3, 3)
    sample.append("", (4,))
    sample.settle()
    assert (sample.num_settled_tokens, sample.text) == (4, "So: a\u20ac")
    assert (sample.view().num_tokens, sample.view().num_prefix_tokens) == (4, 2)


@pytest.mark.parametrize(("reason", "token_ids"), [("stop", [1, 2]), ("length", [1, 2]), ("abort", [1]), ("error", [1])])
def test_half_a_character_is_dropped_when_a_sample_is_cut_and_an_end_token_is_kept(reason: str, token_ids: list[int]) -> None:
    """A reply that was stopped inside a character and continued once lost a character of its text, or had one twice."""
    log = new_log(1)
    log.append_delta(0, "a", (1,))
    log.append_delta(0, "", (2,))
    log.end_sample(0, reason, USAGE)
    assert (log.samples[0].token_ids, log.samples[0].text) == (token_ids, "a")


def test_log_probabilities_that_are_no_numbers_are_left_out() -> None:
    """JSON has no word for minus infinity."""

    async def test() -> None:
        log = new_log(1)
        log.append_delta(0, "a", (1,), float("-inf"))
        finish(log)
        [delta, *_] = await read_all(log, 0)
        assert isinstance(delta, RunDelta)
        assert delta.d == ((0, "a", 1),)

    run(test)


def test_nothing_follows_the_end() -> None:
    log = new_log(1)
    finish(log)
    with pytest.raises(AssertionError):
        log.append_delta(0, "late", (1,))


def test_ended_runs_are_kept_for_a_while_and_only_so_many() -> None:
    now = 0.0
    logs = RunLogs(kept_ended=2, kept_s=10.0, clock=lambda: now)
    for i in range(4):
        logs.add(new_log(run_id=f"run {i}", client_msg_id=f"message {i}"))
    assert logs.find(OWNER, "message 0") is logs.get(OWNER, RunId("run 0"))
    for i in range(3):
        logs.mark_ended(RunId(f"run {i}"))
    assert logs.get(OWNER, RunId("run 0")) is None, "one too many had ended"
    assert logs.find(OWNER, "message 0") is None
    assert logs.get(OWNER, RunId("run 1")) is not None
    now = 10.5
    assert logs.get(OWNER, RunId("run 1")) is None
    assert logs.get(OWNER, RunId("run 3")) is not None, "it goes on, however long it takes"
    assert len(logs) == 1


def test_a_log_is_only_for_its_user() -> None:
    logs = RunLogs()
    logs.add(new_log(client_msg_id="message"))
    stranger = UserId("stranger")
    assert logs.get(stranger, RunId("run")) is None
    assert logs.find(stranger, "message") is None


def test_an_end_says_how_long_it_took() -> None:
    log = new_log(1)
    log.end_sample(0, "abort", USAGE, detail="the server was stopped")
    done = log.samples[0].done
    assert isinstance(done, SampleDone)
    assert (done.ttft_ms, done.tok_s, done.detail) == (None, None, "the server was stopped")
    log.end(RunStatus.ABORTED)
    assert isinstance(log.done, RunDone)
