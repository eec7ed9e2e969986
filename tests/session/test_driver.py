"""How runs end: by themselves, stopped, deleted, failed, with the engine, with the server, with the disk."""

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest

from chatpage.engine.detokenizer import Detokenizer
from chatpage.engine.loop import AsyncEngine
from chatpage.errors import EngineDeadError, InvalidParameterError, NotFoundError, OverloadedError, RestartingError
from chatpage.server.protocol import NodeOp, TreePatch
from chatpage.server.views import RunParams
from chatpage.session import Session, SessionLimits
from chatpage.store import LOCAL_USER, Node, NodeId, NodeStatus, RunId, RunKind, RunStatus, Store
from tests.engine.engines import tiny_engine
from tests.sessions import LONG, Copy, Desk, open_desk, with_desk


async def stop(desk: Desk, run_id: str, sample: int | None = None) -> None:
    await desk.session.cancel_run(LOCAL_USER, RunId(run_id), sample)


# -- ended ---------------------------------------------------------------------------------------------------------------


def test_a_run_and_its_samples_end_in_one_change_of_the_conversation(tmp_path: Path) -> None:
    async def test(desk: Desk) -> None:
        chat = await desk.conversation(title="Named")
        run = await desk.ask(chat, n=3)
        copy = await desk.read(run)
        assert copy.end is not None
        assert copy.end.status is RunStatus.COMPLETE
        assert (await desk.store.get_conversation.aio(LOCAL_USER, chat.id)).version == chat.version + 2

    with_desk(tmp_path, test)


# -- stopped -------------------------------------------------------------------------------------------------------------


def test_stopping_one_sample_keeps_its_text_and_leaves_the_others(tmp_path: Path) -> None:
    async def test(desk: Desk) -> None:
        chat = await desk.conversation()
        run = await desk.ask(chat, n=3, params=LONG.model_copy(update={"max_tokens": 150}))
        await desk.first_text(run)
        await stop(desk, run.run_id, 1)
        copy = await desk.read(run)
        assert [copy.done[i].finish_reason for i in range(3)] == ["length", "abort", "length"]
        nodes = [await desk.node(chat, node_id) for node_id in run.node_ids]
        assert [node.status for node in nodes] == [NodeStatus.COMPLETE, NodeStatus.ABORTED, NodeStatus.COMPLETE]
        assert [node.text for node in nodes] == [copy.texts[i] for i in range(3)]
        assert nodes[0].text.startswith(nodes[1].text)
        assert copy.end is not None
        assert copy.end.status is RunStatus.COMPLETE
        with pytest.raises(InvalidParameterError, match="samples 0 to 2"):
            await stop(desk, run.run_id, 3)
        await stop(desk, run.run_id)  # it has ended: nothing happens
        with pytest.raises(NotFoundError):
            await stop(desk, "nobody")

    with_desk(tmp_path, test)


@pytest.mark.parametrize("hops", [0, 1, 2, 3, 5, 8, 13])
def test_a_run_can_be_stopped_at_any_moment(tmp_path: Path, hops: int) -> None:
    """Stopped before it was queued, while it was queued, and while it computed its prompt, each once left something behind."""

    async def test(desk: Desk) -> None:
        chat = await desk.conversation()
        run = await desk.ask(chat, "x" * 500, n=2, params=LONG)
        for _ in range(hops):
            await asyncio.sleep(0)
        await stop(desk, run.run_id)
        copy = await desk.read(run)
        assert copy.end is not None
        assert copy.end.status is RunStatus.ABORTED
        for node_id in run.node_ids:
            assert (await desk.node(chat, node_id)).status is NodeStatus.ABORTED
        more = await desk.again(RunKind.CONTINUE, chat, run.node_ids[0])
        assert (await desk.read(more)).done[0].finish_reason == "length"

    with_desk(tmp_path, test)


def test_stopping_a_waiting_run_touches_no_running_one(tmp_path: Path) -> None:
    async def test(desk: Desk) -> None:
        chat = await desk.conversation()
        running, waiting = [await desk.ask(chat, f"{i}", params=LONG) for i in range(2)]
        await desk.first_text(running)
        await stop(desk, waiting.run_id)
        copy = await desk.read(waiting)
        assert (copy.texts, copy.done[0].finish_reason) == ({0: ""}, "abort")
        assert not desk.session.logs.get(LOCAL_USER, RunId(running.run_id)).done  # type: ignore[union-attr]

    with_desk(tmp_path, test, limits=SessionLimits(max_running_runs=1))


def test_a_storm_of_starts_and_stops_leaves_no_block_and_no_task(tmp_path: Path) -> None:
    async def test(desk: Desk) -> None:
        chat = await desk.conversation()
        for _ in range(15):
            runs = await asyncio.gather(*(desk.ask(chat, n=2, params=LONG) for _ in range(4)))
            await asyncio.gather(*(stop(desk, run.run_id) for run in runs))
            await asyncio.gather(*(desk.read(run) for run in runs))
        await asyncio.sleep(0.2)
        left = [task for task in asyncio.all_tasks() if task is not asyncio.current_task() and not task.done()]
        assert len(left) <= 1, "the task that runs the test"
        assert not desk.session._live
        assert not desk.session._drivers
        assert (await desk.running.stats()).memory.blocks_used == 0

    with_desk(tmp_path, test)


# -- deleted -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["reply", "message", "conversation"])
def test_deleting_what_a_run_writes_into_stops_it_and_nothing_comes_back(tmp_path: Path, what: str) -> None:
    """The end of a run once put the reply back that its user had deleted."""

    async def test(desk: Desk) -> None:
        chat = await desk.conversation(title="A title")
        run = await desk.ask(chat, params=LONG)
        await desk.first_text(run)
        patches = desk.session.follow_conversation(LOCAL_USER, chat.id)
        await anext(patches)
        await anext(patches)  # the tree, and the run
        if what == "conversation":
            await desk.session.delete_conversation(LOCAL_USER, chat.id)
        else:
            deleted = run.node_ids[0] if what == "reply" else run.input_node_id
            await desk.session.delete_node(LOCAL_USER, chat.id, NodeId(deleted or ""))
        log = desk.session.logs.get(LOCAL_USER, RunId(run.run_id))
        assert log is not None
        copy = Copy()
        async for message in log.follow():
            copy.take(message)
        assert copy.done[0].finish_reason == "abort"
        await desk.session.restore_conversation(LOCAL_USER, chat.id)
        shown = {node.id for node in await desk.nodes(chat)}
        assert (run.node_ids[0] in shown) == (what == "conversation")
        late: list[TreePatch] = []
        while not late or late[-1].version < (await desk.store.get_conversation.aio(LOCAL_USER, chat.id)).version:
            patch = await asyncio.wait_for(anext(patches), 5)
            assert isinstance(patch, TreePatch)
            late.append(patch)
        await patches.aclose()
        if what != "conversation":
            assert not [op for patch in late for op in patch.ops if isinstance(op, NodeOp)]
            await desk.session.restore_node(LOCAL_USER, chat.id, NodeId(deleted or ""))
        node = await desk.node(chat, run.node_ids[0])
        assert (node.text, node.status) == (copy.texts[0], NodeStatus.ABORTED)
        assert not desk.session._hidden

    with_desk(tmp_path, test)


def test_a_stop_that_meets_a_busy_engine_is_asked_for_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was forgotten, or ended the run as an error while the engine computed on for nobody."""

    async def test(desk: Desk) -> None:
        abort, asked = desk.running.abort, []

        async def busy(*arguments: Any) -> None:
            asked.append(arguments)
            if len(asked) < 4:
                raise OverloadedError("The engine has 4096 commands waiting.")
            await abort(*arguments)

        monkeypatch.setattr(desk.running, "abort", busy)
        run = await desk.ask(await desk.conversation(), params=LONG)
        await desk.first_text(run)
        await stop(desk, run.run_id)
        copy = await desk.read(run)
        assert copy.end is not None
        assert copy.end.status is RunStatus.ABORTED
        assert len(asked) == 4

    with_desk(tmp_path, test)


def test_deleting_another_branch_leaves_a_run_alone(tmp_path: Path) -> None:
    async def test(desk: Desk) -> None:
        chat = await desk.conversation()
        other = await desk.reply(chat, "Another")
        run = await desk.ask(chat, params=LONG.model_copy(update={"max_tokens": 100}))
        fork = await desk.session.fork_conversation(LOCAL_USER, chat.id)
        await desk.session.delete_node(LOCAL_USER, chat.id, other.id)
        await desk.session.delete_conversation(LOCAL_USER, fork.id)
        assert (await desk.read(run)).done[0].finish_reason == "length"

    with_desk(tmp_path, test)


# -- failed --------------------------------------------------------------------------------------------------------------


def break_step(desk: Desk, monkeypatch: pytest.MonkeyPatch, *, after: int = 0) -> None:
    """Let a step of the engine go wrong once, after some that do not."""
    executor: Any = desk.engine._executor
    compute, num_left = executor._compute_logits, [after]

    def brittle(plan: Any) -> Any:
        num_left[0] -= 1
        if num_left[0] == -1:
            raise RuntimeError("a kernel refused")
        return compute(plan)

    monkeypatch.setattr(executor, "_compute_logits", brittle)


def test_a_regeneration_that_fails_at_once_leaves_no_orphan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failed regeneration once left an empty reply selected, and the conversation did not open any more."""

    async def test(desk: Desk) -> None:
        chat = await desk.conversation()
        reply = await desk.reply(chat)
        shown = await desk.path(chat)
        break_step(desk, monkeypatch)
        run = await desk.again(RunKind.REGENERATE, chat, reply.parent_id or "", n=3, params=RunParams(seed=1))
        copy = await desk.read(run)
        assert copy.end is not None
        assert copy.end.error is not None
        assert (copy.end.status, copy.end.error.code) == (RunStatus.ERROR, "engine_step_failed")
        assert await desk.path(chat) == shown
        assert await desk.children(chat, reply.parent_id) == (reply.id,)
        stored = await desk.store.get_run.aio(LOCAL_USER, RunId(run.run_id))
        assert (stored.status, stored.error_code) == (RunStatus.ERROR, "engine_step_failed")
        assert (await desk.reply(chat, "Still there?", reply.id)).num_tokens == 8

    with_desk(tmp_path, test)


def test_a_run_that_fails_on_the_way_keeps_what_it_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(desk: Desk) -> None:
        chat = await desk.conversation()
        break_step(desk, monkeypatch, after=5)
        run = await desk.ask(chat, n=2, params=LONG)
        copy = await desk.read(run)
        assert {done.finish_reason for done in copy.done.values()} == {"error"}
        for i, node_id in enumerate(run.node_ids):
            node = await desk.node(chat, node_id)
            assert (node.status, node.text) == (NodeStatus.ERROR, copy.texts[i])
            assert "a kernel refused" in (node.detail or "")
            assert node.num_tokens == 5
        more = await desk.again(RunKind.CONTINUE, chat, run.node_ids[1])
        await desk.read(more)
        assert (await desk.node(chat, run.node_ids[1])).num_tokens == 13

    with_desk(tmp_path, test)


def test_when_the_engine_dies_replies_are_interrupted_and_nothing_more_is_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> None:
        engine = tiny_engine()
        async with AsyncEngine(load=lambda _: engine) as running:
            with Store(tmp_path / "chatpage.db") as store:
                session = Session(running, store, engine.tokenizer, flush_s=0.05)
                desk = Desk(session, engine, running)
                chat = await desk.conversation()
                speaking = await desk.ask(chat, params=LONG)
                await desk.first_text(speaking)

                def die() -> None:
                    raise MemoryError("no memory for a step")

                monkeypatch.setattr(engine, "step", die)
                copy = await desk.read(speaking)
                assert copy.end is not None
                assert copy.end.error is not None
                assert (copy.end.status, copy.end.error.code) == (RunStatus.INTERRUPTED, "engine_dead")
                assert copy.end.error.retryable
                before = await desk.nodes(chat)
                assert (before[-1].status, before[-1].text) == (NodeStatus.INTERRUPTED, copy.texts[0])
                assert before[-1].detail == copy.end.error.message
                with pytest.raises(EngineDeadError):
                    await desk.ask(chat, "Anybody?")
                assert await desk.nodes(chat) == before
                await session.close()
        async with open_desk(tmp_path) as desk:
            more = await desk.again(RunKind.CONTINUE, chat, speaking.node_ids[0])
            assert more.node_ids == speaking.node_ids
            assert (await desk.read(more)).texts[0].startswith(copy.texts[0])

    asyncio.run(run())


def test_a_disk_that_fails_ends_the_run_with_an_error_and_the_session_lives(tmp_path: Path) -> None:
    async def test(desk: Desk) -> None:
        chat = await desk.conversation()
        run = await desk.ask(chat, params=LONG.model_copy(update={"max_tokens": 50}))
        await desk.first_text(run)
        desk.store.close()
        copy = await desk.read(run)
        assert copy.done[0].finish_reason == "length", "readers get all of it"
        assert copy.end is not None
        assert copy.end.error is not None
        assert (copy.end.status, copy.end.error.code) == (RunStatus.ERROR, "store_error")

    with_desk(tmp_path, test)


# -- the server ends -----------------------------------------------------------------------------------------------------


def test_closing_stores_what_runs_said_and_a_new_session_goes_on(tmp_path: Path) -> None:
    async def run() -> None:
        async with open_desk(tmp_path, limits=SessionLimits(max_running_runs=1)) as desk:
            chat = await desk.conversation()
            whole = await desk.reply(chat, "Hello", params=LONG.model_copy(update={"max_tokens": 300}))
            cut = await desk.again(RunKind.REGENERATE, chat, whole.id, params=LONG)
            waiting = await desk.ask(chat, "Wait", params=LONG)
            await desk.first_text(cut)
            reader = asyncio.create_task(desk.read(cut))
            await desk.session.close()
            assert (await reader).end is not None
        async with open_desk(tmp_path) as desk:
            for made in (cut, waiting):
                node = await desk.node(chat, made.node_ids[0])
                assert node.status is NodeStatus.INTERRUPTED
                run = await desk.store.get_run.aio(LOCAL_USER, RunId(made.run_id))
                assert run.status is RunStatus.INTERRUPTED
            cut_node = await desk.node(chat, cut.node_ids[0])
            assert 0 < cut_node.num_tokens < 300
            rest = LONG.model_copy(update={"max_tokens": 300 - cut_node.num_tokens})
            more = await desk.again(RunKind.CONTINUE, chat, cut_node.id, params=rest)
            texts = [(await desk.read(more)).texts[0]]
            late = await desk.read(cut, after_seq=3)
            texts.append(late.texts[0])
            assert late.num_snapshots == 1
            # A cut inside a character shows one replacement character more or less; the tokens are the same.
            assert {text.replace("\ufffd", "") for text in texts} == {whole.text.replace("\ufffd", "")}
            assert (await desk.node(chat, cut_node.id)).token_ids == whole.token_ids

    asyncio.run(run())


def test_closing_right_after_a_start_leaves_nothing_streaming(tmp_path: Path) -> None:
    async def run() -> None:
        async with open_desk(tmp_path) as desk:
            chat = await desk.conversation()
            starts = [asyncio.create_task(desk.ask(chat, f"{i}", params=LONG)) for i in range(5)]
            await asyncio.sleep(0)
            await desk.session.close()
            ends = await asyncio.gather(*starts, return_exceptions=True)
            assert not [end for end in ends if isinstance(end, BaseException) and not isinstance(end, RestartingError)]
            assert NodeStatus.STREAMING not in {node.status for node in await desk.nodes(chat)}

    asyncio.run(run())


# -- readers -------------------------------------------------------------------------------------------------------------


def test_readers_that_come_and_go_at_random_moments_end_with_the_text_of_an_undisturbed_one(tmp_path: Path) -> None:
    async def test(desk: Desk) -> None:
        chat = await desk.conversation()
        run = await desk.ask(chat, n=8, params=RunParams(max_tokens=150, ignore_eos=True, seed=3))
        random_numbers = random.Random(7)

        async def restless() -> Copy:
            copy = Copy()
            while copy.end is None:
                messages = desk.session.follow(LOCAL_USER, RunId(run.run_id), copy.seq)
                stay = random_numbers.randrange(1, 6)
                async for message in messages:
                    copy.take(message)
                    stay -= 1
                    if not stay:
                        break
                await messages.aclose()
                await asyncio.sleep(random_numbers.random() * 0.01)
            return copy

        still, *others = await asyncio.gather(desk.read(run), *(restless() for _ in range(10)))
        for copy in others:
            assert copy.texts == still.texts
        for i, node_id in enumerate(run.node_ids):
            assert (await desk.node(chat, node_id)).text == still.texts[i]

    with_desk(tmp_path, test)


def test_a_reader_that_leaves_does_not_stop_the_run(tmp_path: Path) -> None:
    async def test(desk: Desk) -> None:
        chat = await desk.conversation()
        run = await desk.ask(chat, params=LONG.model_copy(update={"max_tokens": 60}))
        await desk.first_text(run)
        copy = await desk.read(run)
        assert copy.done[0].finish_reason == "length"

    with_desk(tmp_path, test)


def test_what_is_written_while_a_sample_runs_is_a_start_of_what_it_says(tmp_path: Path) -> None:
    """Text and tokens of a reply cut by a crash belong together, so that it can go on where it was cut."""

    async def test(desk: Desk) -> None:
        chat = await desk.conversation()
        run = await desk.ask(chat, params=LONG.model_copy(update={"max_tokens": 400}))
        seen: list[Node] = []
        log = desk.session.logs.get(LOCAL_USER, RunId(run.run_id))
        assert log is not None
        while log.done is None:
            node = await desk.node(chat, run.node_ids[0])
            if not seen or seen[-1].num_tokens < node.num_tokens:
                seen.append(node)
            await asyncio.sleep(0.01)
        end = await desk.node(chat, run.node_ids[0])
        assert len(seen) > 2
        for node in seen:
            assert end.text.startswith(node.text)
            assert end.token_ids[: node.num_tokens] == node.token_ids
            assert Detokenizer(desk.engine.tokenizer).append(node.token_ids)[0] == node.text

    with_desk(tmp_path, test, flush_s=0.02)
