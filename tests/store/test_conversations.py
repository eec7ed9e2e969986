"""Conversations: owned, versioned, forked without copying, deleted with a way back."""

from collections.abc import Callable

import pytest
import sqlite_utils

from chatpage.errors import ConflictError, InvalidRequestError, NotFoundError
from chatpage.store import LOCAL_USER, Conversation, ConversationId, NewNode, NodeId, NodeStatus, Role, Store
from tests.store.helpers import add, assistant, shown, tree_of, user

LATER = 2**53


def num_rows(store: Store, table: str) -> int:
    return store.database.read(lambda db: sqlite_utils.db.Table(db, table).count).result()


def test_a_new_conversation_is_empty_and_stands_at_version_one(store: Store) -> None:
    params = {"temperature": 0.5}
    made = store.create_conversation(LOCAL_USER, title="a\ud800", tags=["b", "a", "a"], params=params, is_pinned=True)
    assert store.get_conversation(LOCAL_USER, made.id) == made
    assert made.title == "a\ufffd"  # half a character, which JSON can spell and no database can hold
    assert (made.version, made.tags, made.params, made.is_pinned) == (1, ("a", "b"), params, True)
    assert tree_of(store, made.id).active_leaf() is None
    assert store.get_path(LOCAL_USER, made.id) == ()


def test_every_change_raises_the_version_by_one(store: Store, conversation: Conversation) -> None:
    first = store.add_node(LOCAL_USER, conversation.id, None, user("one"))
    node_id = first.nodes[0].id
    second = store.edit_node(LOCAL_USER, conversation.id, node_id, user("two"))
    third = store.choose_node(LOCAL_USER, conversation.id, node_id)
    fourth = store.delete_node(LOCAL_USER, conversation.id, node_id)
    fifth = store.restore_node(LOCAL_USER, conversation.id, node_id)
    sixth = store.update_conversation(LOCAL_USER, conversation.id, title="New")
    assert [change.conversation.version for change in (first, second, third, fourth, fifth)] == [2, 3, 4, 5, 6]
    assert (sixth.version, sixth.title) == (7, "New")


def test_choosing_what_is_shown_already_changes_nothing(store: Store, conversation: Conversation) -> None:
    node_id = add(store, conversation, None, "one")
    assert store.choose_node(LOCAL_USER, conversation.id, node_id).conversation.version == 2


def test_a_change_based_on_an_old_version_is_refused_with_the_version_now(store: Store, conversation: Conversation) -> None:
    """A page that had slept overwrote what another one had done since; a stale change must not get through."""
    node_id = add(store, conversation, None, "one")
    refused: list[Callable[[], object]] = [
        lambda: store.add_node(LOCAL_USER, conversation.id, None, user("two"), expected_version=1),
        lambda: store.edit_node(LOCAL_USER, conversation.id, node_id, user("two"), expected_version=1),
        lambda: store.choose_node(LOCAL_USER, conversation.id, node_id, expected_version=1),
        lambda: store.delete_node(LOCAL_USER, conversation.id, node_id, expected_version=1),
        lambda: store.update_conversation(LOCAL_USER, conversation.id, title="two", expected_version=1),
        lambda: store.delete_conversation(LOCAL_USER, conversation.id, expected_version=1),
    ]
    for change in refused:
        with pytest.raises(ConflictError, match="is at version 2, not 1") as caught:
            change()
        assert caught.value.version == 2
    assert shown(store, conversation.id) == ["one"]


def test_pinned_ones_come_first_then_the_latest_changed(store: Store) -> None:
    first, second, third = (store.create_conversation(LOCAL_USER, title=title) for title in "abc")
    store.update_conversation(LOCAL_USER, first.id, is_pinned=True)
    add(store, second, None, "hello")
    assert [found.title for found in store.list_conversations(LOCAL_USER)] == ["a", "b", "c"]
    assert [found.title for found in store.list_conversations(LOCAL_USER, limit=1, offset=1)] == ["b"]
    store.update_conversation(LOCAL_USER, first.id, is_pinned=False)
    add(store, third, None, "hello")
    assert [found.title for found in store.list_conversations(LOCAL_USER)] == ["c", "a", "b"]


def test_tags_select_conversations_and_are_counted(store: Store) -> None:
    tagged = store.create_conversation(LOCAL_USER, title="a", tags=["work", "rust"])
    store.create_conversation(LOCAL_USER, title="b", tags=["work"])
    assert store.list_conversations(LOCAL_USER, tag="rust") == (tagged,)
    assert store.list_tags(LOCAL_USER) == (("rust", 1), ("work", 2))
    store.update_conversation(LOCAL_USER, tagged.id, tags=[])
    assert store.list_tags(LOCAL_USER) == (("work", 1),)


@pytest.mark.parametrize("tags", [[""], ["x" * 101], [str(number) for number in range(65)]])
def test_tags_out_of_bounds_are_refused_and_nothing_is_made(store: Store, tags: list[str]) -> None:
    with pytest.raises(InvalidRequestError, match="at most 64 tags"):
        store.create_conversation(LOCAL_USER, tags=tags)
    assert store.list_conversations(LOCAL_USER) == ()


def test_params_that_are_no_json_are_refused(store: Store) -> None:
    with pytest.raises(InvalidRequestError, match="cannot be stored as JSON"):
        store.create_conversation(LOCAL_USER, params={"temperature": float("nan")})


def test_another_user_sees_and_changes_nothing(store: Store, conversation: Conversation) -> None:
    stranger = store.create_user("mallory").id
    node_id = add(store, conversation, None, "secret")
    attempts: list[Callable[[], object]] = [
        lambda: store.get_conversation(stranger, conversation.id),
        lambda: store.get_tree(stranger, conversation.id),
        lambda: store.get_path(stranger, conversation.id),
        lambda: store.get_node(stranger, conversation.id, node_id),
        lambda: store.add_node(stranger, conversation.id, node_id, user("hi")),
        lambda: store.edit_node(stranger, conversation.id, node_id, user("hi")),
        lambda: store.choose_node(stranger, conversation.id, node_id),
        lambda: store.delete_node(stranger, conversation.id, node_id),
        lambda: store.restore_node(stranger, conversation.id, node_id),
        lambda: store.reopen_node(stranger, conversation.id, node_id),
        lambda: store.update_conversation(stranger, conversation.id, title="mine"),
        lambda: store.delete_conversation(stranger, conversation.id),
        lambda: store.restore_conversation(stranger, conversation.id),
        lambda: store.fork_conversation(stranger, conversation.id),
        lambda: store.list_runs(stranger, conversation.id),
    ]
    for attempt in attempts:
        with pytest.raises(NotFoundError, match="There is no conversation"):
            attempt()
    assert store.list_conversations(stranger) == ()
    assert store.search(stranger, "secret") == ()
    assert store.get_conversation(LOCAL_USER, conversation.id).version == 2


def test_a_node_of_one_conversation_cannot_be_reached_through_another(store: Store, conversation: Conversation) -> None:
    other = store.create_conversation(LOCAL_USER)
    node_id = add(store, conversation, None, "one")
    with pytest.raises(NotFoundError):
        store.add_node(LOCAL_USER, other.id, node_id, user("two"))
    with pytest.raises(NotFoundError):
        store.get_node(LOCAL_USER, other.id, node_id)


def test_a_fork_points_at_the_same_nodes(store: Store, conversation: Conversation) -> None:
    root = add(store, conversation, None, "question")
    reply = add(store, conversation, root, assistant("answer", token_ids=[7, 8]))
    add(store, conversation, reply, "next")
    before = num_rows(store, "nodes")
    fork = store.fork_conversation(LOCAL_USER, conversation.id, node_id=reply, title="Fork")
    assert num_rows(store, "nodes") == before
    assert shown(store, fork.id) == ["question", "answer"]
    assert tree_of(store, fork.id).nodes[reply] == tree_of(store, conversation.id).nodes[reply]
    assert (fork.forked_from, fork.title) == (conversation.id, "Fork")


def test_what_a_fork_does_is_not_seen_in_the_original_and_the_other_way_round(store: Store, conversation: Conversation) -> None:
    root = add(store, conversation, None, "question")
    fork = store.fork_conversation(LOCAL_USER, conversation.id)
    add(store, fork, root, "in the fork")
    add(store, conversation, root, "in the original")
    assert shown(store, fork.id) == ["question", "in the fork"]
    assert shown(store, conversation.id) == ["question", "in the original"]
    store.delete_node(LOCAL_USER, fork.id, root)
    assert shown(store, conversation.id) == ["question", "in the original"]


def test_a_fork_of_the_whole_tree_keeps_all_branches_and_what_is_shown(store: Store, conversation: Conversation) -> None:
    root = add(store, conversation, None, "question")
    first = add(store, conversation, root, assistant("first"))
    add(store, conversation, root, assistant("second"))
    gone = add(store, conversation, root, assistant("deleted"))
    store.delete_node(LOCAL_USER, conversation.id, gone)
    store.choose_node(LOCAL_USER, conversation.id, first)
    fork = store.fork_conversation(LOCAL_USER, conversation.id)
    assert shown(store, fork.id) == ["question", "first"]
    assert tree_of(store, fork.id).nodes.keys() == tree_of(store, conversation.id).nodes.keys()


def test_a_reply_that_streams_into_two_conversations_ends_in_both(store: Store, conversation: Conversation) -> None:
    reply = add(store, conversation, None, NewNode(role=Role.ASSISTANT, status=NodeStatus.STREAMING))
    fork = store.fork_conversation(LOCAL_USER, conversation.id)
    changes = store.finish_node(reply, NodeStatus.COMPLETE, text="done")
    assert {change.conversation.id: change.conversation.version for change in changes} == {conversation.id: 3, fork.id: 2}
    assert shown(store, fork.id) == shown(store, conversation.id) == ["done"]


def test_a_deleted_conversation_is_gone_until_it_is_restored(store: Store, conversation: Conversation) -> None:
    add(store, conversation, None, "findable")
    store.delete_conversation(LOCAL_USER, conversation.id)
    with pytest.raises(NotFoundError, match="was deleted; restore it first"):
        store.get_tree(LOCAL_USER, conversation.id)
    assert store.list_conversations(LOCAL_USER) == ()
    assert [found.id for found in store.list_conversations(LOCAL_USER, deleted=True)] == [conversation.id]
    assert store.search(LOCAL_USER, "findable") == ()
    store.restore_conversation(LOCAL_USER, conversation.id)
    assert shown(store, conversation.id) == ["findable"]
    assert store.restore_conversation(LOCAL_USER, conversation.id).version == 4


def test_a_purge_removes_what_no_conversation_points_at_and_nothing_else(store: Store, conversation: Conversation) -> None:
    """Nodes are counted by the conversations that point at them; deleting one conversation once emptied its forks."""
    root = add(store, conversation, None, "shared")
    add(store, conversation, root, assistant("alone"))
    fork = store.fork_conversation(LOCAL_USER, conversation.id, node_id=root)
    store.delete_conversation(LOCAL_USER, conversation.id)
    purged = store.purge_deleted(before=LATER)
    assert (purged.num_conversations, purged.num_nodes) == (1, 1)
    assert shown(store, fork.id) == ["shared"]
    assert store.search(LOCAL_USER, "alone") == ()
    with pytest.raises(NotFoundError, match="may have been purged"):
        store.restore_conversation(LOCAL_USER, conversation.id)
    store.delete_conversation(LOCAL_USER, fork.id)
    assert store.purge_deleted(before=LATER).num_nodes == 1
    assert {table: num_rows(store, table) for table in ("nodes", "conversation_nodes", "node_choice", "conversations")} == {
        "nodes": 0,
        "conversation_nodes": 0,
        "node_choice": 0,
        "conversations": 0,
    }


def test_a_purge_takes_a_deleted_branch_with_all_below_it(store: Store, conversation: Conversation) -> None:
    root = add(store, conversation, None, "root")
    branch = add(store, conversation, root, "branch")
    add(store, conversation, branch, "leaf")
    store.delete_node(LOCAL_USER, conversation.id, branch)
    assert store.purge_deleted(before=1).num_nodes == 0
    assert store.purge_deleted(before=LATER, user_id=store.create_user("eve").id).num_nodes == 0
    assert store.purge_deleted(before=LATER).num_nodes == 2
    assert shown(store, conversation.id) == ["root"]
    with pytest.raises(NotFoundError, match="may have been purged"):
        store.restore_node(LOCAL_USER, conversation.id, branch)


def test_a_conversation_with_orphans_and_cycles_opens(store: Store, conversation: Conversation) -> None:
    """Rows damaged by hand or by another program once made a conversation that could never be opened again."""
    ids = [add(store, conversation, None, text) for text in ("a", "b", "c")]
    add(store, conversation, ids[2], "d")

    def damage(db: sqlite_utils.Database) -> None:
        db.execute("UPDATE nodes SET parent_id = ? WHERE id = ?", (ids[1], ids[0]))
        db.execute("UPDATE nodes SET parent_id = ? WHERE id = ?", (ids[0], ids[1]))
        db.execute("UPDATE nodes SET parent_id = 'gone' WHERE id = ?", (ids[2],))

    store.database.write(damage).result()
    tree = tree_of(store, conversation.id)
    assert {node.text for node in tree.in_order()} == {"a", "b", "c", "d"}
    added = add(store, conversation, ids[1], "e")
    assert shown(store, conversation.id) == ["a", "b", "e"]
    assert [node.id for node in store.get_path(LOCAL_USER, conversation.id, leaf_id=added)] == [ids[0], ids[1], added]
    fork = store.fork_conversation(LOCAL_USER, conversation.id)
    assert shown(store, fork.id) == ["a", "b", "e"]


def test_the_path_to_a_leaf_that_is_not_shown_can_be_read(store: Store, conversation: Conversation) -> None:
    root = add(store, conversation, None, "root")
    first = add(store, conversation, root, "first")
    add(store, conversation, root, "second")
    assert [node.text for node in store.get_path(LOCAL_USER, conversation.id, leaf_id=first)] == ["root", "first"]
    assert [node.text for node in store.get_path(LOCAL_USER, conversation.id)] == ["root", "second"]
    with pytest.raises(NotFoundError, match="has no message"):
        store.get_path(LOCAL_USER, conversation.id, leaf_id=NodeId("nowhere"))


def test_an_unknown_conversation_is_not_found(store: Store) -> None:
    with pytest.raises(NotFoundError, match="There is no conversation nowhere"):
        store.get_tree(LOCAL_USER, ConversationId("nowhere"))
