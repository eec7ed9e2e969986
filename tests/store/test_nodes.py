"""Nodes: streamed into, ended, continued; edited by siblings, deleted with a way back."""

import pytest
import sqlite_utils

from chatpage.errors import ConflictError, InvalidRequestError, NotFoundError
from chatpage.store import LOCAL_USER, Conversation, NewNode, NodeId, NodeStatus, Role, Store
from chatpage.store import nodes as nodes_module
from tests.store.helpers import add, assistant, shown, tree_of, user

STREAMING = NewNode(role=Role.ASSISTANT, status=NodeStatus.STREAMING)
ENDED_EARLY = [NodeStatus.INTERRUPTED, NodeStatus.ABORTED, NodeStatus.ERROR]


def test_token_ids_come_back_as_they_went_in(store: Store, conversation: Conversation) -> None:
    ids = (0, 1, 255, 256, 65536, 2**31 - 1)
    node = store.get_node(LOCAL_USER, conversation.id, add(store, conversation, None, assistant("x", token_ids=ids)))
    assert node.token_ids == ids
    assert node.num_tokens == 6
    assert node.token_bytes[:8] == bytes([0, 0, 0, 0, 1, 0, 0, 0])


@pytest.mark.parametrize("token_id", [-1, 2**31, 1.5, "1"])
def test_a_token_id_that_is_none_is_refused(store: Store, conversation: Conversation, token_id: int) -> None:
    with pytest.raises(InvalidRequestError, match="Token ids must be whole numbers"):
        add(store, conversation, None, assistant("x", token_ids=[token_id]))
    assert shown(store, conversation.id) == []


def test_all_that_is_said_about_a_node_comes_back(store: Store, conversation: Conversation) -> None:
    new = NewNode(role=Role.ASSISTANT, status=NodeStatus.STREAMING, model="smol", params={"top_p": 0.5}, extra={"name": "Ada"})
    node_id = add(store, conversation, None, new)
    store.finish_node(
        node_id, NodeStatus.COMPLETE, finish_reason="length", usage={"completion_tokens": 2}, timing={"ttft_ms": 12.5}
    )
    node = store.get_node(LOCAL_USER, conversation.id, node_id)
    assert (node.model, node.params, node.extra) == ("smol", {"top_p": 0.5}, {"name": "Ada"})
    assert (node.finish_reason, node.usage, node.timing) == ("length", {"completion_tokens": 2}, {"ttft_ms": 12.5})


def test_what_is_told_of_a_new_node_is_what_is_read_of_it(store: Store, conversation: Conversation) -> None:
    new = NewNode(
        role=Role.ASSISTANT,
        text="half a pair \ud800",
        token_ids=[1, 2],
        finish_reason="length",
        model="smol",
        params={"stop": ("a", "b")},
        extra={"name": "Ada"},
    )
    (node,) = store.add_node(LOCAL_USER, conversation.id, None, new).nodes
    assert node == store.get_node(LOCAL_USER, conversation.id, node.id)


def test_partial_text_and_tokens_add_up_to_the_reply(store: Store, conversation: Conversation) -> None:
    node_id = add(store, conversation, None, STREAMING)
    store.append_partial(node_id, "Hel", [1, 2])
    store.append_partial(node_id, "lo \0 wörld", [3])
    half = store.get_node(LOCAL_USER, conversation.id, node_id)
    assert (half.text, half.token_ids, half.status) == ("Hello \0 wörld", (1, 2, 3), NodeStatus.STREAMING)
    (change,) = store.finish_node(node_id, NodeStatus.COMPLETE, text="!", token_ids=[4], finish_reason="stop")
    assert (change.nodes[0].text, change.nodes[0].token_ids) == ("Hello \0 wörld!", (1, 2, 3, 4))


def test_a_flush_does_not_raise_the_version(store: Store, conversation: Conversation) -> None:
    node_id = add(store, conversation, None, STREAMING)
    store.append_partial(node_id, "text", [1])
    assert store.get_conversation(LOCAL_USER, conversation.id).version == 2


def test_a_flush_reads_and_writes_nothing_of_the_rest_of_the_conversation(store: Store, conversation: Conversation) -> None:
    """The cost of a delta must not grow with the conversation: at 2,000 messages streaming once slowed to a crawl."""
    parent: NodeId | None = None
    for number in range(50):
        parent = add(store, conversation, parent, str(number))
    node_id = add(store, conversation, parent, STREAMING)

    def statements(db: sqlite_utils.Database) -> list[str]:
        seen: list[str] = []
        with db.tracer(lambda sql, params: seen.append(sql)):
            nodes_module.append_partial(db, node_id, "text", [1])
        return seen

    assert [sql.split()[0] for sql in store.database.write(statements).result()] == ["SELECT", "UPDATE"]


@pytest.mark.parametrize("status", [NodeStatus.COMPLETE, *ENDED_EARLY])
def test_an_ended_reply_does_not_grow(store: Store, conversation: Conversation, status: NodeStatus) -> None:
    node_id = add(store, conversation, None, STREAMING)
    store.finish_node(node_id, status, text="done")
    with pytest.raises(ConflictError, match="only a streaming message grows"):
        store.append_partial(node_id, "more", [1])
    with pytest.raises(ConflictError, match="only a streaming message grows"):
        store.finish_node(node_id, NodeStatus.COMPLETE, text="more")
    assert shown(store, conversation.id) == ["done"]


def test_a_reply_cannot_end_as_streaming(store: Store, conversation: Conversation) -> None:
    with pytest.raises(InvalidRequestError, match="cannot end as 'streaming'"):
        store.finish_node(add(store, conversation, None, STREAMING), NodeStatus.STREAMING)


def test_a_text_beyond_the_limit_is_refused(store: Store, conversation: Conversation, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes_module, "MAX_TEXT", 10)
    with pytest.raises(InvalidRequestError, match="has 11 characters; at most 10"):
        add(store, conversation, None, "x" * 11)
    node_id = add(store, conversation, None, STREAMING)
    store.append_partial(node_id, "x" * 10, [])
    with pytest.raises(InvalidRequestError, match="more than 10 characters"):
        store.append_partial(node_id, "x", [])


@pytest.mark.parametrize("status", ENDED_EARLY)
def test_a_reply_that_ended_early_streams_on_from_its_partial_text(
    store: Store, conversation: Conversation, status: NodeStatus
) -> None:
    """Stopping kept the text on the screen only, and "continue" began from nothing."""
    node_id = add(store, conversation, None, STREAMING)
    store.finish_node(node_id, status, text="Once upon", token_ids=[1, 2])
    (change,) = store.reopen_node(LOCAL_USER, conversation.id, node_id)
    assert (change.nodes[0].status, change.nodes[0].text) == (NodeStatus.STREAMING, "Once upon")
    store.finish_node(node_id, NodeStatus.COMPLETE, text=" a time", token_ids=[3])
    node = store.get_node(LOCAL_USER, conversation.id, node_id)
    assert (node.text, node.token_ids, node.status) == ("Once upon a time", (1, 2, 3), NodeStatus.COMPLETE)


def test_a_complete_reply_is_for_ever(store: Store, conversation: Conversation) -> None:
    node_id = add(store, conversation, None, assistant("done"))
    with pytest.raises(ConflictError, match="add a sibling instead"):
        store.reopen_node(LOCAL_USER, conversation.id, node_id)


def test_a_reply_that_something_hangs_below_does_not_grow_again(store: Store, conversation: Conversation) -> None:
    """What follows was said to the text as it stood; in a fork that has the reply too it counts as well."""
    node_id = add(store, conversation, None, assistant("cut", status=NodeStatus.ABORTED))
    fork = store.fork_conversation(LOCAL_USER, conversation.id)
    below = add(store, fork, node_id, "go on")
    with pytest.raises(ConflictError, match="other messages follow it"):
        store.reopen_node(LOCAL_USER, conversation.id, node_id)
    store.delete_node(LOCAL_USER, fork.id, below)
    with pytest.raises(ConflictError, match="other messages follow it"):  # it may be restored
        store.reopen_node(LOCAL_USER, conversation.id, node_id)


def test_a_message_sent_after_the_first_token_of_a_reply_hangs_below_it(store: Store, conversation: Conversation) -> None:
    """It was attached to the question before, because the reply had no place in the tree until it was complete."""
    question = add(store, conversation, None, "question")
    reply = add(store, conversation, question, STREAMING)
    store.append_partial(reply, "Well", [1])
    add(store, conversation, reply, "quick")
    store.finish_node(reply, NodeStatus.COMPLETE, text=", no.")
    assert shown(store, conversation.id) == ["question", "Well, no.", "quick"]


def test_stop_then_a_quick_message_keeps_the_partial_reply_in_the_path(store: Store, conversation: Conversation) -> None:
    reply = add(store, conversation, None, STREAMING)
    store.append_partial(reply, "Partial", [1])
    store.finish_node(reply, NodeStatus.ABORTED, text=" text", finish_reason="abort")
    last = add(store, conversation, reply, "next")
    path = store.get_path(LOCAL_USER, conversation.id, leaf_id=last)
    assert [(node.text, node.status) for node in path] == [("Partial text", "aborted"), ("next", "complete")]


def test_editing_keeps_the_original_with_all_below_it(store: Store, conversation: Conversation) -> None:
    """Editing a reply elsewhere cut off everything that had been said after it."""
    question = add(store, conversation, None, "question")
    reply = add(store, conversation, question, assistant("answer"))
    add(store, conversation, reply, "follow-up")
    change = store.edit_node(LOCAL_USER, conversation.id, reply, assistant("better answer"))
    assert shown(store, conversation.id) == ["question", "better answer"]
    assert change.choices == {question: change.nodes[0].id}
    store.choose_node(LOCAL_USER, conversation.id, reply)
    assert shown(store, conversation.id) == ["question", "answer", "follow-up"]


def test_editing_the_first_message_makes_a_second_root(store: Store, conversation: Conversation) -> None:
    first = add(store, conversation, None, "first")
    store.edit_node(LOCAL_USER, conversation.id, first, user("second"))
    tree = tree_of(store, conversation.id)
    assert [tree.nodes[root].text for root in tree.children[None]] == ["first", "second"]
    assert shown(store, conversation.id) == ["second"]


def test_siblings_keep_their_order_when_the_clock_is_set_back(
    store: Store, conversation: Conversation, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = add(store, conversation, None, "first")
    monkeypatch.setattr(nodes_module, "now", lambda: 1000)
    store.add_siblings(LOCAL_USER, conversation.id, None, [user("second"), user("third")])
    tree = tree_of(store, conversation.id)
    assert [tree.nodes[node_id].text for node_id in tree.siblings(first)] == ["first", "second", "third"]


def test_siblings_below_a_message_keep_their_order_when_the_clock_is_set_back(
    store: Store, conversation: Conversation, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = add(store, conversation, None, "root")
    first = add(store, conversation, root, "first")
    monkeypatch.setattr(nodes_module, "now", lambda: 1000)
    second = add(store, conversation, root, "second")
    assert tree_of(store, conversation.id).siblings(first) == (first, second)


def test_the_chosen_sibling_survives_a_restart(store: Store, conversation: Conversation) -> None:
    root = add(store, conversation, None, "root")
    first = add(store, conversation, root, "first")
    add(store, conversation, first, "below the first")
    add(store, conversation, root, "second")
    change = store.choose_node(LOCAL_USER, conversation.id, first)
    assert change.choices == {root: first}
    store.close()
    with Store(store.path) as again:
        assert shown(again, conversation.id) == ["root", "first", "below the first"]


def test_choosing_a_node_shows_the_branch_that_holds_it(store: Store, conversation: Conversation) -> None:
    root = add(store, conversation, None, "root")
    left = add(store, conversation, root, "left")
    deep = add(store, conversation, left, "deep")
    add(store, conversation, left, "other")
    add(store, conversation, root, "right")
    store.choose_node(LOCAL_USER, conversation.id, deep)
    assert shown(store, conversation.id) == ["root", "left", "deep"]


def test_sending_in_a_branch_that_is_not_shown_shows_it(store: Store, conversation: Conversation) -> None:
    root = add(store, conversation, None, "root")
    left = add(store, conversation, root, "left")
    add(store, conversation, root, "right")
    add(store, conversation, left, "sent from another tab")
    assert shown(store, conversation.id) == ["root", "left", "sent from another tab"]


def test_deleting_hides_a_branch_and_undo_brings_it_back_as_it_was(store: Store, conversation: Conversation) -> None:
    root = add(store, conversation, None, "root")
    add(store, conversation, root, "left")
    right = add(store, conversation, root, "right")
    leaf = add(store, conversation, right, "leaf")
    change = store.delete_node(LOCAL_USER, conversation.id, right)
    assert change.removed == (right, leaf)
    assert shown(store, conversation.id) == ["root", "left"]
    change = store.restore_node(LOCAL_USER, conversation.id, right)
    assert [node.id for node in change.nodes] == [right, leaf]
    assert shown(store, conversation.id) == ["root", "right", "leaf"]


def test_two_deletions_can_be_undone_in_any_order(store: Store, conversation: Conversation) -> None:
    """Undoing the first of two deletions once brought a message back whose parent was still gone."""
    root = add(store, conversation, None, "root")
    child = add(store, conversation, root, "child")
    leaf = add(store, conversation, child, "leaf")
    store.delete_node(LOCAL_USER, conversation.id, leaf)
    store.delete_node(LOCAL_USER, conversation.id, child)
    assert store.restore_node(LOCAL_USER, conversation.id, leaf).nodes == ()
    assert shown(store, conversation.id) == ["root"]
    assert [node.id for node in store.restore_node(LOCAL_USER, conversation.id, child).nodes] == [child, leaf]
    assert shown(store, conversation.id) == ["root", "child", "leaf"]


def test_nothing_can_be_added_below_a_deleted_message(store: Store, conversation: Conversation) -> None:
    root = add(store, conversation, None, "root")
    child = add(store, conversation, root, "child")
    store.delete_node(LOCAL_USER, conversation.id, root)
    for parent_id in (root, child):
        with pytest.raises(NotFoundError, match="may have been deleted"):
            add(store, conversation, parent_id, "late")
    with pytest.raises(NotFoundError, match="may have been deleted"):
        store.delete_node(LOCAL_USER, conversation.id, child)


def test_a_reply_deleted_while_it_streams_does_not_come_back(store: Store, conversation: Conversation) -> None:
    """The run's last write recreated the message a user had just deleted."""
    question = add(store, conversation, None, "question")
    reply = add(store, conversation, question, STREAMING)
    store.delete_node(LOCAL_USER, conversation.id, question)
    store.append_partial(reply, "late", [1])
    store.finish_node(reply, NodeStatus.ABORTED)
    assert shown(store, conversation.id) == []
    assert store.search(LOCAL_USER, "late") == ()
    assert store.get_node(LOCAL_USER, conversation.id, reply).status is NodeStatus.ABORTED


def test_a_reply_purged_while_it_streams_is_not_found(store: Store, conversation: Conversation) -> None:
    reply = add(store, conversation, None, STREAMING)
    store.delete_node(LOCAL_USER, conversation.id, reply)
    store.purge_deleted(before=2**53)
    with pytest.raises(NotFoundError, match="deleted and purged"):
        store.append_partial(reply, "late", [1])


def test_what_streamed_when_the_process_ended_is_interrupted_and_can_go_on(store: Store, conversation: Conversation) -> None:
    reply = add(store, conversation, None, STREAMING)
    store.append_partial(reply, "up to here", [1, 2])
    store.close()
    with Store(store.path) as again:
        node = again.get_node(LOCAL_USER, conversation.id, reply)
        assert (node.status, node.text) == (NodeStatus.INTERRUPTED, "up to here")
        assert again.get_conversation(LOCAL_USER, conversation.id).version == 3
        assert [hit.node_id for hit in again.search(LOCAL_USER, "here")] == [reply]
        again.reopen_node(LOCAL_USER, conversation.id, reply)
        again.finish_node(reply, NodeStatus.COMPLETE, text=" and on", token_ids=[3])
        assert shown(again, conversation.id) == ["up to here and on"]


def test_a_second_opening_of_the_file_interrupts_nothing(store: Store, conversation: Conversation) -> None:
    """An import from the command line must not mark as dead what a running server streams."""
    reply = add(store, conversation, None, STREAMING)
    with Store(store.path) as second:
        assert second.get_node(LOCAL_USER, conversation.id, reply).status is NodeStatus.STREAMING
    store.append_partial(reply, "still going", [1])
    assert shown(store, conversation.id) == ["still going"]


def test_a_lone_surrogate_in_a_text_is_replaced(store: Store, conversation: Conversation) -> None:
    node_id = add(store, conversation, None, "a\ud800b")
    assert store.get_node(LOCAL_USER, conversation.id, node_id).text == "a\ufffdb"


def test_a_line_of_messages_is_added_whole_and_shown(store: Store) -> None:
    chat = store.create_conversation(LOCAL_USER)
    news = [NewNode(role=Role.SYSTEM, text="Be brief."), NewNode(role=Role.USER, text="Hi")]
    change = store.add_line(LOCAL_USER, chat.id, None, news)
    assert [node.text for node in change.nodes] == ["Be brief.", "Hi"]
    assert [node.id for node in store.get_path(LOCAL_USER, chat.id)] == [node.id for node in change.nodes]
    with pytest.raises(InvalidRequestError):
        store.add_line(LOCAL_USER, chat.id, change.nodes[1].id, [*news, NewNode(role=Role.USER, text="x" * (16 * 2**20 + 1))])
    assert len(store.get_path(LOCAL_USER, chat.id)) == 2, "all or none"
