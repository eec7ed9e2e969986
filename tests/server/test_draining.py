"""A server that is told to end says so to everybody who listens, after all that was written; nobody can hold it up."""

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from fastapi import FastAPI
from starlette.responses import StreamingResponse
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed

from chatpage.client import AsyncClient
from chatpage.errors import RestartingError
from chatpage.runs import RunLog
from chatpage.server.protocol import Restarting, RunCreated, RunDone, TreePatch
from chatpage.server.settings import ServeSettings
from chatpage.server.views import RunRequest
from chatpage.session import SessionLimits
from chatpage.store import LOCAL_USER, ConversationId, NewNode, NodeId, NodeStatus, Role, RunId, RunKind, Store
from tests.server.openai.clients import HELLO, model_of, official_async
from tests.server.serving import LONG, SHORT, Served, dial, serving, with_server
from tests.sessions import Desk, with_desk

ENDLESS = LONG | {"max_tokens": 1500}


def end(served: Served) -> None:
    """As a signal does."""
    served.server.should_exit = True


def stored(served: Served, run: RunCreated, folder: Path) -> list[Any]:
    """Return the messages of a run from the database of a server that has ended."""
    with Store(folder / "chatpage.db") as store:
        return [store.get_node(LOCAL_USER, ConversationId(run.conversation_id), NodeId(node)) for node in run.node_ids]


def test_a_stream_ends_with_all_that_is_stored_then_restarting_then_1012(tmp_path: Path) -> None:
    """A client that was cut off in the middle had less than the store; what it showed was wrong until it came back."""
    found: list[tuple[RunCreated, dict[int, str]]] = []

    async def test(served: Served) -> None:
        async with dial(served) as wire, dial(served) as idle, dial(served, hello=False) as silent:
            run = await wire.reply(served.conversation(), n=3, params=ENDLESS)
            await wire.first_texts(run)
            end(served)
            done = await wire.until(RunDone)
            assert done.status == "interrupted"
            assert (await wire.until(Restarting)).retry_after_ms > 0
            assert await wire.close_code() == 1012
            for other in (idle, silent):
                await other.until(Restarting)
                assert await other.close_code() == 1012
            found.append((run, wire.copies[run.run_id].texts))

    with serving(tmp_path) as served:
        asyncio.run(asyncio.wait_for(test(served), 60))
    [(run, texts)] = found
    nodes = stored(served, run, tmp_path)
    assert [node.text for node in nodes] == [texts[sample] for sample in range(3)]
    assert all(texts.values())
    assert {node.status for node in nodes} == {NodeStatus.INTERRUPTED}


def test_an_interrupted_reply_goes_on_after_the_restart_as_if_it_had_never_stopped(tmp_path: Path) -> None:
    async def first(served: Served) -> RunCreated:
        async with dial(served) as wire:
            run = await wire.reply(served.conversation(), params=ENDLESS)
            await wire.first_texts(run)
            end(served)
            assert await wire.close_code() == 1012
            return run

    async def second(served: Served, run: RunCreated) -> None:
        before = served.node(run.conversation_id, run.node_ids[0])
        params = LONG | {"max_tokens": len(before.token_ids) + 20}
        async with dial(served) as wire:
            whole = await wire.reply(served.conversation(), params=params)
            expected = await wire.finish(whole)
            fields = {"kind": "continue", "parent_id": run.node_ids[0], "params": LONG | {"max_tokens": 20}}
            await wire.send("run.create", conversation_id=run.conversation_id, client_msg_id="on", **fields)
            await wire.finish(await wire.until(RunCreated, client_msg_id="on"))
        after = served.node(run.conversation_id, run.node_ids[0])
        assert after.token_ids == served.node(whole.conversation_id, whole.node_ids[0]).token_ids
        # A random model says bytes that are no text; how many marks stand for a run of them depends on where it was cut.
        assert after.text.replace("\ufffd", "") == expected.texts[0].replace("\ufffd", "")

    with serving(tmp_path) as served:
        run = asyncio.run(asyncio.wait_for(first(served), 60))
    with serving(tmp_path) as served:
        asyncio.run(asyncio.wait_for(second(served, run), 60))


def test_a_run_that_waits_for_its_turn_is_interrupted_too(tmp_path: Path) -> None:
    async def test(desk: Desk) -> None:
        chats = [await desk.conversation() for _ in range(2)]
        runs = [await desk.ask(chat, params=desk_long()) for chat in chats]
        await desk.first_text(runs[0])
        await desk.session.drain()
        copies = [await desk.read(run) for run in runs]
        assert [copy.end.status for copy in copies if copy.end] == ["interrupted"] * 2

    with_desk(tmp_path, test, limits=SessionLimits(max_running_runs=1, max_queued_runs=1))


def desk_long() -> Any:
    return RunRequest.model_fields["params"].default.model_copy(update=ENDLESS)


def test_new_runs_are_refused_as_restarting_whatever_way_they_come(tmp_path: Path) -> None:
    async def test(served: Served) -> None:
        chat = served.conversation()
        asyncio.run_coroutine_threadsafe(served.desk.session.drain(), served.loop).result(30)
        async with dial(served) as wire, httpx.AsyncClient(base_url=served.url) as http:
            fields = {"kind": "reply", "input": "Hi", "params": SHORT, "client_msg_id": "late"}
            await wire.send("run.create", conversation_id=chat.id, **fields)
            error = await wire.until_error("late")
            assert (error.code, error.retryable) == ("restarting", True)
            body = {"model": model_of(served), "messages": HELLO}
            for path, sent in (("/api/runs", {"conversation_id": chat.id, "kind": "reply", "input": "Hi"}), (CHAT, body)):
                answer = await http.post(path, json=sent)
                assert (answer.status_code, answer.json()["error"]["code"]) == (503, "restarting"), answer.text
                assert answer.headers["retry-after"] == "1"
            ready = await http.get("/ready")
            assert (ready.status_code, ready.json()) == (503, {"status": "restarting"})
            assert (await http.get(f"/api/conversations/{chat.id}")).status_code == 200
        assert not served.desk.store.list_runs(LOCAL_USER, chat.id)

    with_server(tmp_path, test)


CHAT = "/v1/chat/completions"


def test_openai_streams_end_with_an_error_and_whole_answers_with_503(tmp_path: Path) -> None:
    async def test(served: Served) -> None:
        client, model = official_async(served), model_of(served)
        body: dict[str, Any] = {"model": model, "messages": HELLO, "max_tokens": 1500, "extra_body": {"ignore_eos": True}}
        stream = await client.chat.completions.create(stream=True, **body)
        whole = asyncio.create_task(client.chat.completions.create(**body))
        responses = await client.responses.create(
            model=model, input="Hi", max_output_tokens=1500, stream=True, extra_body={"ignore_eos": True}
        )
        kinds = [(await anext(responses)).type]
        await anext(stream)
        while served.desk.session.admission.num_tickets(LOCAL_USER) < 3:
            await asyncio.sleep(0.01)
        end(served)
        with pytest.raises(openai.APIError) as streamed:
            async for _ in stream:
                pass
        assert streamed.value.code == "restarting"
        with pytest.raises(openai.InternalServerError) as refused:
            await whole
        assert (refused.value.status_code, refused.value.code) == (503, "restarting")
        kinds += [event.type async for event in responses]
        assert kinds[-1] == "response.failed"
        await client.close()

    with_server(tmp_path, test)


def test_a_socket_of_responses_hears_the_end_of_every_lane_and_is_closed_with_1012(tmp_path: Path) -> None:
    async def test(served: Served) -> None:
        async with connect(f"{served.url.replace('http', 'ws')}/v1/responses") as line:
            ask = {"type": "response.create", "model": model_of(served), "input": "Hi", "max_output_tokens": 1500}
            for lane, store in (("a", True), ("b", False)):
                await line.send(json.dumps({**ask, "stream_id": lane, "store": store, "ignore_eos": True}))
            events: list[dict[str, Any]] = []
            while {event.get("stream_id") for event in events if event["type"] == "response.output_text.delta"} != {"a", "b"}:
                events.append(json.loads(await line.recv()))
            end(served)
            with contextlib.suppress(ConnectionClosed):
                while True:
                    events.append(json.loads(await line.recv()))
            assert line.close_code == 1012
            ends = {event.get("stream_id"): event["type"] for event in events}
            assert ends == {"a": "response.failed", "b": "response.failed", None: "error"}
            assert events[-1]["error"]["code"] == "restarting"

    with_server(tmp_path, test)


def test_a_stream_that_never_ends_is_ended_without_an_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A page holds a stream of heartbeats open; a server that waited for it took five seconds longer to end."""

    async def beats() -> AsyncIterator[bytes]:
        while True:
            yield b"beat\n"
            await asyncio.sleep(0.01)

    def extend(app: FastAPI) -> None:
        async def endless() -> StreamingResponse:
            return StreamingResponse(beats())

        app.add_api_route("/beats", endless)

    async def test(served: Served) -> None:
        async with httpx.AsyncClient() as http, http.stream("GET", f"{served.url}/beats") as answer:
            chunks = answer.aiter_raw()
            assert await anext(chunks) == b"beat\n"
            end(served)
            async for _ in chunks:  # raises if the connection is cut instead
                pass

    with_server(tmp_path, test, extend=extend)
    assert not [record for record in caplog.records if record.levelname == "ERROR"], caplog.text


def test_a_client_that_reads_nothing_does_not_hold_up_the_end(tmp_path: Path) -> None:
    """`serving` fails if the server does not end; what waits for that client would be sent for ever."""

    async def test(served: Served) -> None:
        chat = served.conversation()
        served.desk.store.add_node(LOCAL_USER, chat.id, None, NewNode(role=Role.USER, text="word " * 60_000))
        async with dial(served, max_queue=1, ping_interval=None) as stuck, dial(served) as reader:
            for _ in range(100):  # each answer is a tree of 300 kB, and none is read
                await stuck.send("subscribe", conversation_id=chat.id)
                await asyncio.sleep(0.005)
            run = await reader.reply(served.conversation(), params=ENDLESS)
            await reader.first_texts(run)
            end(served)
            await reader.until(Restarting)
            assert await reader.close_code() == 1012
            while not has_ended(served.url):
                await asyncio.sleep(0.05)
            stuck.socket.transport.abort()

    with_server(tmp_path, test)


def has_ended(url: str) -> bool:
    """Whether nobody listens any more."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", int(url.rpartition(":")[2]))) != 0


def test_the_client_of_this_project_goes_on_when_the_server_is_back(tmp_path: Path) -> None:
    """It reads a run to its end and follows a conversation across the restart, on the same port."""

    async def test() -> None:
        with serving(tmp_path) as served:
            port = int(served.url.rpartition(":")[2])
            chat = served.conversation()
            client = AsyncClient(served.url)
            patches = client.follow_conversation(chat.id)
            versions = [await anext(patches)]
            messages = client.run(RunRequest(conversation_id=chat.id, kind=RunKind.REPLY, input="Hi", params=desk_long()))
            run = await anext(messages)
            assert isinstance(run, RunCreated)
            await anext(messages)
            end(served)
        with serving(tmp_path, port=port) as served:
            said = [message async for message in messages]
            assert isinstance(said[-1], RunDone)
            assert said[-1].status == "interrupted"
            follow_up = RunRequest(
                conversation_id=chat.id, kind=RunKind.REPLY, parent_id=run.node_ids[0], input="More", params=desk_long()
            )
            again = client.run(follow_up.model_copy(update={"params": follow_up.params.model_copy(update=SHORT)}))
            news = [message async for message in again]
            assert isinstance(news[-1], RunDone)
            assert news[-1].status == "complete"
            wanted = served.desk.store.get_conversation(LOCAL_USER, chat.id).version
            while not isinstance(versions[-1], TreePatch) or versions[-1].version < wanted:
                versions.append(await anext(patches))
            await patches.aclose()

    asyncio.run(asyncio.wait_for(test(), 120))


def test_draining_twice_is_fine_and_a_run_asked_for_again_is_still_found(tmp_path: Path) -> None:
    async def test(desk: Desk) -> None:
        chat = await desk.conversation()
        run = await desk.ask(chat, client_msg_id="one", params=desk_long())
        await desk.first_text(run)
        await desk.session.drain()
        await desk.session.drain()
        assert (await desk.ask(chat, client_msg_id="one")).run_id == run.run_id
        with pytest.raises(RestartingError):
            await desk.ask(chat, client_msg_id="two")
        log = desk.session.logs.get(LOCAL_USER, RunId(run.run_id))
        assert isinstance(log, RunLog)
        assert log.samples[0].text == (await desk.node(chat, run.node_ids[0])).text

    with_desk(tmp_path, test)


def test_settings_of_a_login_do_not_keep_a_page_from_hearing_of_the_end(tmp_path: Path) -> None:
    """A socket that has not said who it is hears of the end like any other."""

    async def test(served: Served) -> None:
        async with dial(served, hello=False) as wire:
            end(served)
            await wire.until(Restarting)
            assert await wire.close_code() == 1012

    with_server(tmp_path, test, settings=ServeSettings(require_login=True))
