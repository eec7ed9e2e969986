"""Replies that end while the disk is full: they are kept, told of, and saved when there is room again."""

import asyncio
import logging

import pytest

from chatpage.chaos.disks import Disk
from chatpage.errors import StoreFullError
from chatpage.runs import RunLog, SampleLog
from chatpage.server.views import UsageView
from chatpage.session import running
from chatpage.session.recorder import Recorder
from chatpage.session.views import run_created
from chatpage.store import LOCAL_USER, NodeId, NodeStatus, RunId, RunKind, RunStatus, Store
from tests.sessions import LONG, TIMEOUT_S, Copy, Desk, with_desk

PARAMS = LONG.model_copy(update={"max_tokens": 300})


async def until_saved(desk: Desk) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        while desk.session.counts().num_unsaved_runs:
            await asyncio.sleep(0.02)


def test_a_reply_that_ended_on_a_full_disk_is_saved_when_there_is_room(disk: Disk) -> None:
    """It was tried for a second and a half, and then lost, although its user freed some space a minute later."""

    async def test(desk: Desk) -> None:
        chat = await desk.conversation()
        run = await desk.ask(chat, n=2, params=PARAMS)
        await desk.first_text(run)
        with disk.full():
            copy = await desk.read(run)
            assert copy.end is not None
            assert copy.end.error is not None
            assert (copy.end.status, copy.end.error.code) == (RunStatus.ERROR, "store_full")
            assert "saved as soon as that is possible" in copy.end.error.message
            assert desk.session.counts().num_unsaved_runs == 1
            assert desk.session.admission.num_users == 0, "others need not wait for the disk"
            path, _ = await desk.session._read_path(LOCAL_USER, chat.id, NodeId(run.node_ids[0]))
            assert (path[-1].text, path[-1].status) == (copy.texts[0], NodeStatus.COMPLETE)
            with pytest.raises(StoreFullError):
                await desk.again(RunKind.CONTINUE, chat, run.node_ids[0])
            await asyncio.sleep(0.5)
            stored = await desk.node(chat, run.node_ids[0])
            assert stored.status is NodeStatus.STREAMING
        await until_saved(desk)
        for i, node_id in enumerate(run.node_ids):
            node = await desk.node(chat, node_id)
            assert (node.text, node.status, node.num_tokens) == (copy.texts[i], NodeStatus.COMPLETE, 300)
        assert (await desk.store.get_run.aio(LOCAL_USER, RunId(run.run_id))).status is RunStatus.COMPLETE
        more = await desk.again(RunKind.CONTINUE, chat, run.node_ids[0])
        assert (await desk.read(more)).texts[0].startswith(copy.texts[0])

    with_desk(disk.folder, test)


def test_followers_of_a_conversation_see_the_reply_end_when_it_is_saved(disk: Disk) -> None:
    async def test(desk: Desk) -> None:
        chat = await desk.conversation()
        run = await desk.ask(chat, params=PARAMS)
        await desk.first_text(run)
        with disk.full():
            await desk.read(run)
            patches = desk.session.follow_conversation(LOCAL_USER, chat.id)
            await anext(patches)
            assert await anext(patches) == run
        async with asyncio.timeout(TIMEOUT_S):
            patch = await anext(patches)
        assert '"status":"complete"' in patch.to_json()
        await patches.aclose()

    with_desk(disk.folder, test)


def test_an_end_on_a_full_disk_names_what_is_not_saved(disk: Disk, caplog: pytest.LogCaptureFixture) -> None:
    async def test(desk: Desk) -> None:
        chat = await desk.conversation()
        whole = await desk.reply(chat, "Saved", params=PARAMS)
        run = await desk.ask(chat, params=PARAMS)
        await desk.first_text(run)
        with disk.full():
            await desk.read(run)
            await desk.session.close()
        lines = [record.message for record in caplog.records if record.levelno == logging.ERROR]
        assert len(lines) == 1, lines
        assert run.node_ids[0] in lines[0]
        assert run.conversation_id in lines[0]
        assert "is not saved, or not to its end: 300 tokens" in lines[0]
        assert whole.id not in lines[0]
        assert desk.session.counts().num_unsaved_runs == 0

    with_desk(disk.folder, test)


def test_runs_that_are_stopped_by_the_end_of_the_server_do_not_wait_for_a_full_disk(disk: Disk) -> None:
    async def test(desk: Desk) -> None:
        chat = await desk.conversation()
        run = await desk.ask(chat, params=LONG)
        await desk.first_text(run)
        reading = asyncio.create_task(desk.read(run))
        with disk.full():
            await desk.session.close()
        copy = await reading
        assert copy.end is not None
        assert copy.end.status is RunStatus.ERROR

    with_desk(disk.folder, test)
    with Store(disk.folder / "chatpage.db") as store:  # as after any crash: what was written before is there
        (chat,) = store.list_conversations(LOCAL_USER)
        nodes = store.get_tree(LOCAL_USER, chat.id).tree.in_order()
        assert nodes[-1].status is NodeStatus.INTERRUPTED


def test_no_run_begins_while_too_many_wait_to_be_saved(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that takes a little now and then would else fill the memory with what it did not take."""
    monkeypatch.setattr(running, "MAX_UNSAVED_RUNS", 2)

    async def test(desk: Desk) -> None:
        chat = await desk.conversation()
        runs = [await desk.ask(chat, params=PARAMS) for _ in range(2)]
        for run in runs:
            await desk.first_text(run)
        with disk.full():
            copies: list[Copy] = await asyncio.gather(*(desk.read(run) for run in runs))
            with pytest.raises(StoreFullError, match="2 replies wait to be saved"):
                await desk.ask(chat)
        await until_saved(desk)
        await desk.reply(chat)
        for run, copy in zip(runs, copies, strict=True):
            assert (await desk.node(chat, run.node_ids[0])).text == copy.texts[0]

    with_desk(disk.folder, test)


def test_saving_is_tried_again_however_often_it_failed(disk: Disk, caplog: pytest.LogCaptureFixture) -> None:
    """The pause doubled until it was no number any more, at the 1029th attempt, and the reply was lost."""

    async def test(desk: Desk) -> None:
        chat = await desk.conversation()
        started = desk.store.start_run(LOCAL_USER, chat.id, None, kind=RunKind.REPLY)
        node_id = started.run.samples[0].node_id
        sample = SampleLog(0, node_id)
        log = RunLog(LOCAL_USER, run_created(started.run), [sample])
        recorder = Recorder(desk.store, log, publish=lambda _: None, on_stored=lambda *_: None, flush_s=1e-6)
        with disk.full():
            recorder.start()
            log.append_delta(0, "x" * 2**20, [1])
            async with asyncio.timeout(TIMEOUT_S):
                while not any("attempt 1024:" in record.message for record in caplog.records):
                    await asyncio.sleep(0.01)
            await asyncio.sleep(0.3)
            log.end_sample(0, "stop", UsageView(prompt_tokens=1, cached_tokens=0, completion_tokens=1))
            recorder.end_sample(0, NodeStatus.COMPLETE)
            recorder.close(lambda ends: desk.store.finish_run.submit(started.run.id, RunStatus.COMPLETE, ends=ends))
            assert isinstance(await recorder.wait_until_written_or_late(), StoreFullError)
        async with asyncio.timeout(TIMEOUT_S):
            await recorder.wait()
        assert (await desk.node(chat, node_id)).text == "x" * 2**20

    with_desk(disk.folder, test)
