"""Marks on messages: one conversation's own, and in its file."""

import io
import json
from pathlib import Path

import pytest

from chatpage.errors import NotFoundError
from chatpage.store import LOCAL_USER, Conversation, NewNode, Node, NodeId, NodeStatus, Role, Store
from chatpage.store.exporting import export_conversations
from chatpage.store.importing import import_stream


@pytest.fixture
def chat(store: Store) -> Conversation:
    return store.create_conversation(LOCAL_USER)


def _add(store: Store, chat: Conversation, parent_id: NodeId | None = None, **fields: object) -> Node:
    new = NewNode(**({"role": Role.ASSISTANT, "text": "Hi"} | fields))  # type: ignore[arg-type]
    return store.add_node(LOCAL_USER, chat.id, parent_id, new).nodes[0]


def _kept(store: Store, chat: Conversation) -> set[NodeId]:
    return {node.id for node in store.get_tree(LOCAL_USER, chat.id).tree.nodes.values() if node.is_kept}


def test_a_message_is_marked_until_the_mark_is_taken_away(store: Store, chat: Conversation) -> None:
    node, other = _add(store, chat), _add(store, chat)
    change = store.keep_node(LOCAL_USER, chat.id, node.id, is_kept=True)
    assert [found.is_kept for found in change.nodes] == [True]
    assert _kept(store, chat) == {node.id}
    assert store.get_node(LOCAL_USER, chat.id, node.id).is_kept
    assert store.get_path(LOCAL_USER, chat.id, leaf_id=node.id)[0].is_kept
    assert not store.get_node(LOCAL_USER, chat.id, other.id).is_kept
    again = store.keep_node(LOCAL_USER, chat.id, node.id, is_kept=True)
    assert (again.nodes, again.conversation.version) == ((), change.conversation.version)
    store.keep_node(LOCAL_USER, chat.id, node.id, is_kept=False)
    assert _kept(store, chat) == set()


def test_a_mark_stays_through_whatever_changes_the_message(store: Store, chat: Conversation) -> None:
    """Each of these changes is sent to readers with the whole message, and would have wiped out the mark they show."""
    node = _add(store, chat, status=NodeStatus.STREAMING)
    store.keep_node(LOCAL_USER, chat.id, node.id, is_kept=True)
    changes = store.finish_node(node.id, NodeStatus.ABORTED)
    changes += store.reopen_node(LOCAL_USER, chat.id, node.id)
    changes += store.finish_node(node.id, NodeStatus.COMPLETE)
    store.delete_node(LOCAL_USER, chat.id, node.id)
    changes += (store.restore_node(LOCAL_USER, chat.id, node.id),)
    assert [found.is_kept for change in changes for found in change.nodes] == [True] * 4


def test_a_fork_of_a_conversation_begins_with_its_marks_and_goes_its_own_way(store: Store, chat: Conversation) -> None:
    node = _add(store, chat)
    store.keep_node(LOCAL_USER, chat.id, node.id, is_kept=True)
    fork = store.fork_conversation(LOCAL_USER, chat.id)
    assert _kept(store, fork) == {node.id}
    store.keep_node(LOCAL_USER, fork.id, node.id, is_kept=False)
    assert _kept(store, chat) == {node.id}
    assert _kept(store, fork) == set()


def test_each_conversation_hears_of_its_own_mark(store: Store, chat: Conversation) -> None:
    node = _add(store, chat, status=NodeStatus.STREAMING)
    fork = store.fork_conversation(LOCAL_USER, chat.id)
    store.keep_node(LOCAL_USER, chat.id, node.id, is_kept=True)
    changes = store.finish_node(node.id, NodeStatus.COMPLETE)
    assert {change.conversation.id: change.nodes[0].is_kept for change in changes} == {chat.id: True, fork.id: False}


def test_nobody_marks_what_is_not_theirs_or_not_there(store: Store, chat: Conversation) -> None:
    node = _add(store, chat)
    ada = store.create_user("ada")
    for user_id, node_id in ((ada.id, node.id), (LOCAL_USER, NodeId("none"))):
        with pytest.raises(NotFoundError):
            store.keep_node(user_id, chat.id, node_id, is_kept=True)
    store.delete_node(LOCAL_USER, chat.id, node.id)
    with pytest.raises(NotFoundError):
        store.keep_node(LOCAL_USER, chat.id, node.id, is_kept=True)


def test_a_file_of_ours_holds_the_marks(store: Store, chat: Conversation, tmp_path: Path) -> None:
    node, other = _add(store, chat), _add(store, chat)
    store.keep_node(LOCAL_USER, chat.id, node.id, is_kept=True)
    file = io.StringIO()
    export_conversations(store, LOCAL_USER, file)
    record = json.loads(file.getvalue())[0]
    assert {found["id"]: found["kept"] for found in record["nodes"]} == {node.id: True, other.id: False}
    with Store(tmp_path / "other.db") as elsewhere:
        report = import_stream(elsewhere, LOCAL_USER, io.BytesIO(file.getvalue().encode()))
        [conversation] = elsewhere.list_conversations(LOCAL_USER)
        assert report.num_added == 1
        assert _kept(elsewhere, conversation) == {node.id}
        again = import_stream(elsewhere, LOCAL_USER, io.BytesIO(file.getvalue().encode()))
        assert again.num_unchanged == 1
