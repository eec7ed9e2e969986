"""What programs do with conversations, through both clients."""

import asyncio
import contextlib
import inspect
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from chatpage.client import AsyncClient, Client, ServerError
from chatpage.server.protocol import RunCreated, RunDone, TreePatch
from chatpage.server.settings import ServeSettings
from chatpage.server.views import RunParams, RunRequest
from chatpage.store import Role, RunKind
from tests.server.serving import Served, serving, with_server
from tests.sessions import Copy

SHORT = RunParams(max_tokens=8, ignore_eos=True, temperature=0.0)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(tmp_path_factory.mktemp("clients")) as found:
        yield found


@pytest.fixture
def client(served: Served) -> Iterator[Client]:
    with Client(served.url) as opened:
        yield opened


def _reply(client: Client, conversation_id: str, text: str = "Hello", **fields: object) -> tuple[RunCreated, Copy]:
    fields = {"params": SHORT, **fields}
    request = RunRequest(conversation_id=conversation_id, kind=RunKind.REPLY, input=text, **fields)  # type: ignore[arg-type]
    copy = Copy()
    created, *messages = client.run(request)
    assert isinstance(created, RunCreated)
    for message in messages:
        assert not isinstance(message, RunCreated)
        copy.take(message)
    return created, copy


def test_both_clients_offer_the_same() -> None:
    public = {name for name in dir(AsyncClient) if not name.startswith("_")}
    assert {name for name in dir(Client) if not name.startswith("_")} - {"close", "hint"} == public
    for name in public:
        blocking, other = getattr(Client, name), getattr(AsyncClient, name)
        assert (blocking.__name__, blocking.__doc__) == (name, other.__doc__), name
        assert inspect.iscoroutinefunction(other) or inspect.isasyncgenfunction(other)


def test_a_conversation_is_made_answered_branched_and_looked_at(client: Client) -> None:
    chat = client.create_conversation(title="Trees", system_prompt="Be brief.", tags=["wood"], params=RunParams(top_k=5))
    assert chat.id in [found.id for found in client.list_conversations(tag="wood")]
    root = client.tree(chat.id).nodes[0]
    run, copy = _reply(client, chat.id, "One tree", parent_id=root.id, n=2)
    assert copy.end is not None
    tree = client.tree(chat.id)
    assert [node.text for node in tree.nodes if node.id in run.node_ids] == [copy.texts[0], copy.texts[1]]
    patch = client.select(chat.id, run.node_ids[1])
    assert patch.version > tree.conversation.version
    question = run.input_node_id
    assert question is not None
    edited = client.edit(chat.id, question, "Two trees")
    assert edited.parent_id == root.id
    answered = client.edit_and_answer(chat.id, question, "Three trees", params=SHORT)
    assert isinstance(list(client.follow(answered.run_id))[-1], RunDone)
    note = client.add_message(chat.id, Role.SYSTEM, "Now rhyme.", parent_id=run.node_ids[0])
    assert client.delete_node(chat.id, note.id).ops
    assert client.restore_node(chat.id, note.id).ops
    assert {hit.node_id for hit in client.search("trees", conversation_id=chat.id)} >= {edited.id}
    fork = client.fork_conversation(chat.id, node_id=question, title="Oaks")
    assert [node.text for node in client.tree(fork.id).nodes] == ["Be brief.", "One tree"]
    renamed = client.update_conversation(chat.id, title="Elms", is_pinned=True)
    assert (renamed.title, renamed.is_pinned, renamed.tags) == ("Elms", True, ("wood",))
    assert "wood" in [tag.name for tag in client.list_tags()]
    assert client.delete_conversation(fork.id).is_deleted
    assert not client.restore_conversation(fork.id).is_deleted
    assert client.plan(RunRequest(conversation_id=chat.id, kind=RunKind.REPLY, input="Hi", params=SHORT)).prefix.tokens > 0
    assert client.welcome().model.block_size == 4


def test_the_tokens_of_a_reply_say_where_it_can_be_forked(client: Client) -> None:
    chat = client.create_conversation()
    run, copy = _reply(client, chat.id, params=RunParams(max_tokens=12, ignore_eos=True, seed=5))
    ends = client.tokens(chat.id, run.node_ids[0]).ends
    assert ends[-1] == len(copy.texts[0])
    assert list(ends) == sorted(ends)
    request = RunRequest(conversation_id=chat.id, kind=RunKind.FORK, parent_id=run.node_ids[0], branch_at_token=5, params=SHORT)
    created, *_ = client.run(request)
    assert isinstance(created, RunCreated)
    branch = next(node for node in client.tree(chat.id).nodes if node.id == created.node_ids[0])
    assert branch.text[: ends[4]] == copy.texts[0][: ends[4]]


def test_the_branches_of_a_conversation_show_what_they_share(client: Client, served: Served) -> None:
    chat = client.create_conversation()
    _reply(client, chat.id, "Hello, all of you", n=4, params=RunParams(max_tokens=8, ignore_eos=True, seed=1))
    view = client.conversation_kv(chat.id)
    assert view.num_branches == 4
    assert view.stats.blocks_used > view.stats.blocks_shared > 0
    assert view.stats.rows_without_sharing > view.stats.rows_held
    assert client.kv().stats.blocks_used == 0, "they were held for that moment only"


def test_presets_and_files_go_both_ways(client: Client, tmp_path: Path) -> None:
    preset = client.create_preset("poet", system_prompt="Rhyme.", params=RunParams(top_p=0.5))
    assert client.update_preset(preset.id, name="bard").name == "bard"
    chat = client.create_conversation(preset_id=preset.id)
    assert client.tree(chat.id).nodes[0].text == "Rhyme."
    assert [found.name for found in client.list_presets()] == ["bard"]
    client.delete_preset(preset.id)
    assert client.list_presets() == ()
    client.export(tmp_path / "one.json", ids=[chat.id])
    again = client.import_file(tmp_path / "one.json")
    assert (again.num_added, again.num_unchanged) == (0, 1)


def test_what_the_server_refuses_is_told_with_its_code(client: Client) -> None:
    for call in (
        lambda: client.tree("none"),
        lambda: client.tree("../../metrics"),
        lambda: list(client.follow("none")),
        lambda: client.edit("none", "none", "x"),
    ):
        with pytest.raises(ServerError) as caught:
            call()
        assert caught.value.server_code == "not_found"
    with pytest.raises(ServerError) as caught:
        client.create_conversation(title="x" * 2000)
    assert caught.value.server_code == "invalid_request"


def test_leaving_a_run_early_leaves_no_task_and_closing_ends_the_thread(served: Served) -> None:
    client = Client(served.url)
    chat = client.create_conversation()
    request = RunRequest(
        conversation_id=chat.id, kind=RunKind.REPLY, input="Hi", params=RunParams(max_tokens=200, ignore_eos=True)
    )
    messages = client.run(request)
    created = next(messages)
    assert isinstance(created, RunCreated)
    messages.close()  # type: ignore[attr-defined]
    client.cancel(created.run_id)
    followed = client.follow_conversation(chat.id)
    assert isinstance(next(followed), TreePatch)
    client.close()
    client.close()
    assert "chatpage-client" not in [thread.name for thread in threading.enumerate()]
    with pytest.raises(RuntimeError, match="closed"):
        client.kv()
    followed.close()  # type: ignore[attr-defined]


def test_a_conversation_is_followed_through_broken_connections(tmp_path: Path) -> None:
    async def test(served: Served) -> None:
        client = AsyncClient(served.url)
        chat = await client.create_conversation(title="0")
        seen: list[TreePatch] = []
        async with contextlib.aclosing(client.follow_conversation(chat.id)) as messages:
            async for message in messages:
                assert isinstance(message, TreePatch)
                seen.append(message)
                if len(seen) == 6:
                    break
                for connection in list(served.server.server_state.connections):
                    served.loop.call_soon_threadsafe(connection.transport.abort)
                await client.update_conversation(chat.id, title=str(len(seen)))
        assert [patch.version for patch in seen] == list(range(chat.version, chat.version + 6))

    with_server(tmp_path, test)


def test_a_wrong_key_and_a_dead_address_are_told_apart(tmp_path: Path) -> None:
    with serving(tmp_path, settings=ServeSettings(host="0.0.0.0")) as found:
        _, key = found.desk.store.create_api_key(found.desk.store.create_user("ann").id, "test")
        with Client(found.url, key="cp-wrong") as client, pytest.raises(ServerError) as caught:
            client.list_conversations()
        assert caught.value.server_code == "unauthorized"
        with Client(found.url + "/", key=key) as client:
            assert client.list_conversations() == ()
        url = found.url
    with pytest.raises(ConnectionError, match="cannot be reached"):
        asyncio.run(AsyncClient(url).list_conversations())
