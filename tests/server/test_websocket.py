"""The websocket: runs as they are written, reconnecting, stopping, two tabs, bad frames, and clients that read nothing."""

import asyncio
import contextlib
import json
import random
from pathlib import Path
from typing import Any

import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus

from chatpage.server import websocket
from chatpage.server.protocol import (
    ErrorMessage,
    PlanResult,
    Pong,
    RunDelta,
    TreePatch,
)
from chatpage.server.settings import ServeSettings
from chatpage.server.views import KvStats
from chatpage.store import LOCAL_USER, NewNode, NodeStatus, Role
from tests.engine.engines import tiny_engine
from tests.server.serving import LONG, Served, Wire, dial, with_server
from tests.sessions import Copy


def test_the_deltas_of_four_samples_joined_are_the_texts_of_their_messages(tmp_path: Path) -> None:
    async def test(served: Served) -> None:
        chat = served.conversation()
        async with dial(served) as wire:
            run = await wire.reply(chat, n=4, params={"max_tokens": 20, "ignore_eos": True, "seed": 3})
            copy = await wire.finish(run)
        assert copy.end is not None
        assert copy.end.status == "complete"
        texts = [served.node(chat.id, node_id).text for node_id in run.node_ids]
        assert [copy.texts[sample] for sample in range(4)] == texts
        assert len(set(texts)) == 4
        assert set(copy.done) == {0, 1, 2, 3}

    with_server(tmp_path, test)


def test_a_client_that_reconnects_at_random_moments_has_exactly_the_undisturbed_text(tmp_path: Path) -> None:
    """It resumes after the last number it saw, so nothing is missing and nothing comes twice, and the nodes keep their ids."""

    async def test(served: Served) -> None:
        chat = served.conversation()
        async with dial(served) as wire:
            run = await wire.reply(chat, n=8, params=LONG | {"temperature": 1.0, "seed": 1})
        chance = random.Random(0)
        copy = Copy()
        num_connections = 0
        while copy.end is None:
            num_connections += 1
            async with dial(served) as wire:
                wire.copies[run.run_id] = copy
                after = {} if copy.seq is None else {"after_seq": copy.seq}
                await wire.send("subscribe", run_id=run.run_id, **after)
                for _ in range(chance.randint(1, 6)):
                    await wire.receive()
                    if copy.end is not None:
                        break
        assert num_connections > 3, "it was disturbed"
        assert copy.num_snapshots == 1, "only the first connection needed the whole text"
        nodes = [served.node(chat.id, node_id) for node_id in run.node_ids]
        assert [copy.texts[sample] for sample in range(8)] == [node.text for node in nodes]
        assert all(node.status is NodeStatus.COMPLETE for node in nodes)

    with_server(tmp_path, test)


def test_going_away_stops_nothing_and_cancelling_keeps_the_text(tmp_path: Path) -> None:
    async def test(served: Served) -> None:
        chat = served.conversation()
        async with dial(served) as wire:
            run = await wire.reply(chat, params=LONG | {"max_tokens": 400})
            await wire.until(RunDelta)
        async with dial(served) as wire:
            await wire.send("subscribe", run_id=run.run_id)
            await wire.until(RunDelta)
            await wire.send("run.cancel", run_id=run.run_id)
            copy = await wire.finish(run)
        node = served.node(chat.id, run.node_ids[0])
        assert copy.end is not None
        assert copy.end.status == "aborted"
        assert node.status is NodeStatus.ABORTED
        assert node.text == copy.texts[0] != ""
        assert 0 < node.num_tokens < 400

    with_server(tmp_path, test)


def test_a_stop_that_is_the_last_word_of_a_client_still_stops(tmp_path: Path) -> None:
    """Stop and close the tab: the connection used to end the answering of the stop before it had begun."""

    async def test(served: Served) -> None:
        chat = served.conversation()
        for _ in range(5):
            async with dial(served) as wire:
                run = await wire.reply(chat, params=LONG | {"max_tokens": 400})
                await wire.send("run.cancel", run_id=run.run_id)
            while (await asyncio.to_thread(served.node, chat.id, run.node_ids[0])).status is NodeStatus.STREAMING:
                await asyncio.sleep(0.01)
            assert served.node(chat.id, run.node_ids[0]).status is NodeStatus.ABORTED

    with_server(tmp_path, test)


def test_a_message_sent_twice_starts_one_run(tmp_path: Path) -> None:
    async def test(served: Served) -> None:
        chat = served.conversation()
        async with dial(served) as first, dial(served) as second:
            runs = [await wire.reply(chat, client_msg_id="once") for wire in (first, second)]
            assert runs[0].run_id == runs[1].run_id
            assert (await first.finish(runs[0])).texts == (await second.finish(runs[1])).texts
        assert len(served.desk.store.get_tree(LOCAL_USER, chat.id).tree.nodes) == 2

    with_server(tmp_path, test)


def test_two_sockets_on_one_conversation_stay_in_step(tmp_path: Path) -> None:
    async def patches(wire: Wire, version: int) -> list[TreePatch]:
        seen: list[TreePatch] = []
        while not seen or seen[-1].version < version:
            seen.append(await wire.until(TreePatch))
        return seen

    async def test(served: Served) -> None:
        chat, other = served.conversation(title="One"), served.conversation(title="Two")
        async with dial(served) as writer, dial(served) as reader:
            for wire in (writer, reader):
                await wire.send("subscribe", conversation_id=chat.id)
                await wire.until(TreePatch)
            run = await writer.reply(chat)
            await writer.reply(other)
            await writer.finish(run)
            version = served.desk.store.get_conversation(LOCAL_USER, chat.id).version
            seen = await patches(reader, version)
            assert [patch.version for patch in seen] == list(range(chat.version + 1, version + 1))
            assert {patch.conversation_id for patch in seen} == {chat.id}
            text = served.node(chat.id, run.node_ids[0]).text
            nodes = [op.node for patch in seen for op in patch.ops if op.op == "node"]
            assert [node.text for node in nodes if node.id == run.node_ids[0]][-1] == text

    with_server(tmp_path, test)


@pytest.mark.parametrize(
    ("frame", "code"),
    [
        ("{", "invalid_json"),
        ("[]", "invalid_json"),
        ("null", "invalid_json"),
        ("[" * 100_000, "invalid_json"),
        ('{"type":"ping","t":' + "[" * 1000 + "]" * 1000 + "}", "invalid_json"),
        ('{"type":"nonsense"}', "unknown_type"),
        ("{}", "unknown_type"),
        ('{"type":"ping","t":"soon"}', "invalid_message"),
        ('{"type":"ping","t":1,"u":2}', "invalid_message"),
        ('{"type":"ping","t":NaN}', "invalid_message"),
        ('{"type":"subscribe"}', "invalid_message"),
        ('{"type":"subscribe","run_id":"none"}', "not_found"),
        ('{"type":"subscribe","conversation_id":"none"}', "not_found"),
        ('{"type":"run.cancel","run_id":"none"}', "not_found"),
        ('{"type":"prefix.warm","conversation_id":"none","parent_id":"none"}', "not_found"),
        ('{"type":"prefix.warm","conversation_id":"none"}', "not_found"),
        ('{"type":"prefix.warm","conversation_id":"none","draft":"Hi"}', "not_found"),
        (b"\x00\x01", "invalid_message"),
    ],
)
def test_a_bad_frame_gets_a_typed_error_and_the_connection_goes_on(frame: str | bytes, code: str, server: Served) -> None:
    async def test() -> None:
        async with dial(server) as wire:
            await wire.socket.send(frame)
            error = await wire.until(ErrorMessage)
            assert error.code == code or (code == "invalid_json" and error.code == "invalid_message"), error
            await wire.send("ping", t=2.5)
            assert await wire.until(Pong) == Pong(t=2.5)

    asyncio.run(test())


def test_a_stream_of_nonsense_never_crashes_the_server(server: Served) -> None:
    """Pieces of real messages are cut, repeated and mixed; each frame is answered or has its meaning."""

    async def test() -> None:
        chance = random.Random(7)
        parts = [
            '{"type":"',
            "hello",
            "subscribe",
            "run.create",
            '","',
            "run_id",
            '":',
            "null",
            "1e999",
            "[",
            "]",
            "{",
            "}",
            '"',
        ]
        parts += ["conversation_id", "n", "-1", "\\ud800", "\x00", "after_seq", "params", "true", ",", "9" * 40, "client_id"]
        async with dial(server) as wire:
            for number in range(500):
                frame = "".join(chance.choices(parts, k=chance.randint(1, 12)))
                await wire.socket.send(frame.encode() if chance.random() < 0.1 else frame)
                if number % 50 == 0:
                    await wire.send("ping", t=number)
                    while not isinstance(message := await wire.receive(), Pong):
                        assert isinstance(message, ErrorMessage)
                        assert message.code != "internal_error"

    asyncio.run(test())


def test_an_error_names_the_message_it_is_about(server: Served) -> None:
    async def test() -> None:
        async with dial(server) as wire:
            await wire.send("run.cancel", run_id="none", ref="seven")
            assert (await wire.until(ErrorMessage)).ref == "seven"
            await wire.send("run.create", conversation_id="none", client_msg_id="eight", kind="reply", input="Hi")
            error = await wire.until(ErrorMessage)
            assert (error.ref, error.code, error.retryable) == ("eight", "not_found", False)

    asyncio.run(test())


def test_who_follows_too_much_is_told_to_unsubscribe_since_time_alone_helps_nobody(
    server: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(websocket, "MAX_TOPICS", 1)

    async def test() -> None:
        async with dial(server) as wire:
            first, second = (str(server.conversation().id) for _ in range(2))
            await wire.send("subscribe", conversation_id=first)
            await wire.until(TreePatch)
            await wire.send("subscribe", conversation_id=second, ref="second")
            error = await wire.until(ErrorMessage)
            assert (error.ref, error.code, error.retryable, error.retry_after_ms) == ("second", "invalid_request", False, None)
            assert "unsubscribe from one" in error.message
            await wire.send("unsubscribe", conversation_id=first)
            await wire.send("subscribe", conversation_id=second)
            assert (await wire.until(TreePatch)).conversation_id == second

    asyncio.run(test())


def test_a_frame_above_the_limit_closes_with_1009(server: Served) -> None:
    async def test() -> None:
        async with dial(server) as wire:
            with contextlib.suppress(ConnectionClosed):  # it may be closed before all of it is sent
                await wire.socket.send("x" * (2**20 + 1))
            assert await wire.close_code() == 1009

    asyncio.run(test())


def test_nothing_is_served_before_hello(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(websocket, "HELLO_S", 0.2)

    async def test() -> None:
        async with dial(server, hello=False) as wire:
            await wire.send("subscribe", kv=True)
            assert (await wire.until(ErrorMessage)).code == "invalid_request"
            assert await wire.close_code() == 1008

    asyncio.run(test())


def test_an_unknown_subprotocol_is_refused(server: Served) -> None:
    async def test() -> None:
        with pytest.raises(InvalidStatus) as caught:
            async with dial(server, subprotocols=["chatpage.v9"]):
                pass
        assert caught.value.response.status_code == 403

    asyncio.run(test())


def test_a_plan_says_the_cost_and_a_subscription_to_the_memory_its_numbers(server: Served) -> None:
    async def test() -> None:
        chat = server.conversation()
        async with dial(server) as wire:
            await wire.finish(await wire.reply(chat, "Hello there"))
            await wire.send("plan", ref="p", conversation_id=chat.id, kind="reply", input="Hello there")
            plan = await wire.until(PlanResult)
            assert plan.ref == "p"
            assert plan.prefix.cached == plan.prefix.tokens - plan.prefix.computed > 0
            await wire.send("subscribe", kv=True)
            assert (await wire.until(KvStats)).generated_tokens >= 8
            await wire.send("unsubscribe", kv=True)
            await wire.send("ping", t=1)
            await wire.until(Pong)

    asyncio.run(test())


def test_a_warmed_draft_is_in_the_cache_when_it_is_sent(server: Served) -> None:
    async def test() -> None:
        chat = server.conversation()
        draft = "A draft that is long enough to fill some blocks of the cache before it is sent."
        async with dial(server) as wire:
            await wire.send("prefix.warm", conversation_id=chat.id, draft=draft)
            for _ in range(100):
                await wire.send("plan", conversation_id=chat.id, kind="reply", input=draft)
                plan = await wire.until(PlanResult)
                if plan.prefix.cached > plan.prefix.tokens / 2:
                    return
                await asyncio.sleep(0.05)
            raise AssertionError(f"only {plan.prefix.cached} of {plan.prefix.tokens} tokens were warmed")

    asyncio.run(test())


def test_starting_and_stopping_in_a_storm_leaves_nothing_behind(tmp_path: Path) -> None:
    """Some are stopped while they wait, some while they compute, and some by a client that goes away; `serving` ends by
    checking that every block was given back.
    """

    async def storm(served: Served, number: int) -> None:
        chat, chance = served.conversation(), random.Random(number)
        for turn in range(8):
            async with dial(served) as wire:
                run = await wire.reply(chat, f"{number} {turn}", n=chance.randint(1, 4), params=LONG | {"max_tokens": 400})
                if chance.random() < 0.5:
                    await wire.until(RunDelta)
                await wire.send("run.cancel", run_id=run.run_id)
                if chance.random() < 0.7:
                    await wire.finish(run)

    async def test(served: Served) -> None:
        await asyncio.gather(*(storm(served, number) for number in range(4)))
        while (await asyncio.to_thread(_num_live_runs, served)) > 0:
            await asyncio.sleep(0.02)

    with_server(tmp_path, test, engine=tiny_engine(kv_memory=2**19))


def _num_live_runs(served: Served) -> int:
    return len(served.desk.session._drivers)


def test_a_client_that_reads_nothing_is_closed_with_1013_and_slows_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(websocket, "SEND_S", 0.5)

    async def test(served: Served) -> None:
        chat = served.conversation()
        served.desk.store.add_node(LOCAL_USER, chat.id, None, NewNode(role=Role.USER, text="word " * 60_000))
        async with dial(served, max_queue=1, ping_interval=None) as stuck, dial(served) as reader:
            for _ in range(200):  # each answer is a tree of 300 kB, and none is read
                await stuck.send("subscribe", conversation_id=chat.id)
                await asyncio.sleep(0.005)
            run = await reader.reply(served.conversation())
            copy = await reader.finish(run)
            assert copy.texts[0] == served.node(run.conversation_id, run.node_ids[0]).text
            await asyncio.sleep(1.0)
            assert await stuck.close_code() == 1013

    with_server(tmp_path, test)


def test_where_a_key_is_needed_it_comes_as_header_subprotocol_or_first_message(tmp_path: Path) -> None:
    async def test(served: Served) -> None:
        user = served.desk.store.create_user("ann")
        _, key = served.desk.store.create_api_key(user.id, "test")
        ways: list[tuple[dict[str, Any], dict[str, Any]]] = [
            ({"additional_headers": {"Authorization": f"Bearer {key}"}}, {}),
            ({"subprotocols": ["chatpage.v1", f"chatpage.key.{key}"]}, {}),
            ({}, {"token": key}),
        ]
        for options, fields in ways:
            async with dial(served, hello=False, **options) as wire:
                assert (await wire.hello(**fields)).user_id == user.id
                assert wire.socket.subprotocol == "chatpage.v1"
        for fields in ({}, {"token": "cp-wrong"}):
            async with dial(served, hello=False) as wire:
                await wire.socket.send(json.dumps({"type": "hello", "client_id": "x", **fields}))
                assert (await wire.until(ErrorMessage)).code == "unauthorized"
                await wire.send("subscribe", kv=True)
                assert (await wire.until(ErrorMessage)).code == "invalid_request"
        with pytest.raises(InvalidStatus):
            async with dial(served, additional_headers={"Authorization": "Bearer cp-wrong"}):
                pass

    with_server(tmp_path, test, settings=ServeSettings(host="0.0.0.0"))
