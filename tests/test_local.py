"""The client without a server does what the client of a server does."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from chatpage.client import Client, ServerError
from chatpage.engine.core import Engine
from chatpage.errors import ModelNotFoundError, NotFoundError
from chatpage.local import LocalClient
from chatpage.server.protocol import RunCreated, RunDone, TreePatch
from chatpage.server.views import RunParams, RunRequest
from chatpage.store import LOCAL_USER, ConversationId, NodeStatus, RunKind, Store
from tests.engine.engines import assert_whole, tiny_engine

LONG = RunParams(max_tokens=400, ignore_eos=True)


@pytest.fixture(scope="module")
def engine() -> Engine:
    return tiny_engine(check_integrity=False)


@pytest.fixture
def client(engine: Engine, tmp_path: Path) -> Iterator[LocalClient]:
    with LocalClient(data_dir=tmp_path, load=lambda _: engine) as opened:
        yield opened
    assert_whole(engine)


def _start(client: Client, n: int = 2) -> tuple[RunCreated, Iterator[object]]:
    chat = client.create_conversation()
    request = RunRequest(conversation_id=chat.id, kind=RunKind.REPLY, input="Hello", n=n, params=LONG)
    messages = client.run(request)
    created = next(messages)
    assert isinstance(created, RunCreated)
    return created, messages


def test_stopping_returns_when_it_has_ended(client: LocalClient) -> None:
    created, messages = _start(client)
    client.cancel(created.run_id, 1)
    client.cancel(created.run_id)
    assert isinstance(list(messages)[-1], RunDone)
    nodes = [node for node in client.tree(created.conversation_id).nodes if node.id in created.node_ids]
    assert {node.status for node in nodes} == {NodeStatus.ABORTED}


def test_closing_keeps_what_a_run_has_said(engine: Engine, tmp_path: Path) -> None:
    with LocalClient(data_dir=tmp_path, load=lambda _: engine) as client:
        created, messages = _start(client, n=1)
        for _ in range(5):
            next(messages)
    assert_whole(engine)
    with Store(tmp_path / "chatpage.db") as store:
        tree = store.get_tree(LOCAL_USER, ConversationId(created.conversation_id)).tree
        [node] = [node for node in tree.nodes.values() if node.id in created.node_ids]
    assert node.status is NodeStatus.INTERRUPTED
    assert node.text


def test_changes_are_followed_and_mistakes_are_told(client: LocalClient) -> None:
    chat = client.create_conversation(title="one")
    changes = client.follow_conversation(chat.id)
    assert isinstance(next(changes), TreePatch)
    client.update_conversation(chat.id, title="two")
    patch = next(changes)
    assert isinstance(patch, TreePatch)
    assert patch.version == chat.version + 1
    assert client.plan(RunRequest(conversation_id=chat.id, kind=RunKind.REPLY, input="Hi")).prefix.tokens > 0
    assert client.welcome().user_id == LOCAL_USER
    with pytest.raises(ServerError) as caught:
        client.tree("none")
    assert caught.value.server_code == "not_found"
    with pytest.raises(NotFoundError):
        client.cancel("none")


def test_a_model_that_is_not_there_is_told_and_leaves_nothing_open(tmp_path: Path) -> None:
    def fail(_: object) -> Engine:
        raise ModelNotFoundError("There is no such model.")

    for _ in range(2):
        with pytest.raises(ModelNotFoundError):
            LocalClient(data_dir=tmp_path, load=fail)
