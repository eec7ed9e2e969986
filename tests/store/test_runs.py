"""Runs: recorded with their nodes before the first token, started once, and taken back when they come to nothing."""

import itertools
from dataclasses import replace

import pytest
import sqlite_utils

from chatpage.errors import ConflictError, InvalidRequestError, NotFoundError
from chatpage.store import LOCAL_USER, Conversation, NewNode, NodeId, NodeStatus, Role, RunKind, RunStatus, Store
from chatpage.store import runs as runs_module
from chatpage.store.nodes import NodeEnd
from tests.store.helpers import add, assistant, shown, tree_of, user


def test_a_run_is_there_with_all_its_nodes_before_the_first_token(store: Store, conversation: Conversation) -> None:
    started = store.start_run(
        *(LOCAL_USER, conversation.id, None),
        kind=RunKind.REPLY,
        n=3,
        input=user("question"),
        params={"temperature": 0.5},
        model="smol",
    )
    tree = tree_of(store, conversation.id)
    samples = [sample.node_id for sample in started.run.samples]
    assert started.run == store.get_run(LOCAL_USER, started.run.id)
    assert tree.children[started.run.input_node_id] == tuple(samples)
    assert {tree.nodes[node_id].status for node_id in samples} == {NodeStatus.STREAMING}
    assert {(tree.nodes[node_id].model, tree.nodes[node_id].params["temperature"]) for node_id in samples} == {("smol", 0.5)}
    assert tree.active_leaf() == samples[0]
    (change,) = started.changes
    assert [node.id for node in change.nodes] == [started.run.input_node_id, *samples]
    assert change.conversation.version == 2


def test_the_same_client_message_starts_one_run(store: Store, conversation: Conversation) -> None:
    """A client that did not hear back sent again, and the question stood there twice."""
    first = store.start_run(LOCAL_USER, conversation.id, None, kind=RunKind.REPLY, input=user("q"), client_msg_id="m1")
    again = store.start_run(LOCAL_USER, conversation.id, None, kind=RunKind.REPLY, input=user("q"), client_msg_id="m1")
    assert (first.is_new, again.is_new, again.changes) == (True, False, ())
    assert again.run == first.run
    assert len(tree_of(store, conversation.id).nodes) == 2


def test_two_users_may_use_the_same_client_message_id(store: Store, conversation: Conversation) -> None:
    other = store.create_user("bob").id
    theirs = store.create_conversation(other)
    first = store.start_run(LOCAL_USER, conversation.id, None, kind=RunKind.REPLY, client_msg_id="m1")
    second = store.start_run(other, theirs.id, None, kind=RunKind.REPLY, client_msg_id="m1")
    assert second.is_new
    with pytest.raises(NotFoundError, match="There is no run"):
        store.get_run(other, first.run.id)


def test_regenerating_adds_siblings_and_shows_the_first(store: Store, conversation: Conversation) -> None:
    question = add(store, conversation, None, "question")
    old = add(store, conversation, question, assistant("old"))
    run = store.start_run(LOCAL_USER, conversation.id, question, kind=RunKind.REGENERATE, n=2).run
    tree = tree_of(store, conversation.id)
    assert tree.siblings(old) == (old, run.samples[0].node_id, run.samples[1].node_id)
    assert tree.active_leaf() == run.samples[0].node_id


def test_a_prefill_is_what_every_sample_begins_with(store: Store, conversation: Conversation) -> None:
    run = store.start_run(LOCAL_USER, conversation.id, None, kind=RunKind.FORK, n=2, text="Once upon", token_ids=[5, 6]).run
    for sample in run.samples:
        assert sample.num_prefix_tokens == 2
        store.append_partial(sample.node_id, f" {sample.sample}", [7])
    tree = tree_of(store, conversation.id)
    assert [(node.text, node.token_ids) for node in tree.in_order()] == [("Once upon 0", (5, 6, 7)), ("Once upon 1", (5, 6, 7))]


def test_continuing_a_cut_reply_goes_on_in_place(store: Store, conversation: Conversation) -> None:
    reply = add(store, conversation, None, assistant("cut", token_ids=[1], status=NodeStatus.INTERRUPTED))
    started = store.start_run(LOCAL_USER, conversation.id, reply, kind=RunKind.CONTINUE)
    assert [(sample.node_id, sample.num_prefix_tokens) for sample in started.run.samples] == [(reply, 1)]
    store.finish_node(reply, NodeStatus.COMPLETE, text=" and mended", token_ids=[2])
    assert shown(store, conversation.id) == ["cut and mended"]


@pytest.mark.parametrize(("status", "n"), [(NodeStatus.COMPLETE, 1), (NodeStatus.ABORTED, 2)])
def test_continuing_otherwise_makes_siblings_that_begin_with_the_same_tokens(
    store: Store, conversation: Conversation, status: NodeStatus, n: int
) -> None:
    question = add(store, conversation, None, "question")
    reply = add(store, conversation, question, assistant("so far", token_ids=[1, 2], status=status))
    run = store.start_run(LOCAL_USER, conversation.id, reply, kind=RunKind.CONTINUE, n=n).run
    tree = tree_of(store, conversation.id)
    assert run.parent_id == question
    assert tree.siblings(reply) == (reply, *(sample.node_id for sample in run.samples))
    assert {(tree.nodes[s.node_id].text, tree.nodes[s.node_id].token_ids) for s in run.samples} == {("so far", (1, 2))}
    assert tree.nodes[reply].status is status


@pytest.mark.parametrize("n", [0, 65])
def test_n_out_of_range_is_refused(store: Store, conversation: Conversation, n: int) -> None:
    with pytest.raises(InvalidRequestError, match=f"n is {n}; it must be between 1 and 64"):
        store.start_run(LOCAL_USER, conversation.id, None, kind=RunKind.REPLY, n=n)


def test_continuing_takes_no_input_and_no_prefill(store: Store, conversation: Conversation) -> None:
    reply = add(store, conversation, None, assistant("x"))
    with pytest.raises(InvalidRequestError, match="neither an input nor a prefill"):
        store.start_run(LOCAL_USER, conversation.id, reply, kind=RunKind.CONTINUE, input=user("y"))
    with pytest.raises(InvalidRequestError, match="neither an input nor a prefill"):
        store.start_run(LOCAL_USER, conversation.id, None, kind=RunKind.CONTINUE)


def test_a_run_that_cannot_start_leaves_nothing_behind(store: Store, conversation: Conversation) -> None:
    with pytest.raises(NotFoundError):
        store.start_run(LOCAL_USER, conversation.id, NodeId("gone"), kind=RunKind.REPLY, input=user("question"))
    with pytest.raises(InvalidRequestError):
        store.start_run(LOCAL_USER, conversation.id, None, kind=RunKind.REPLY, input=user("question"), token_ids=[-1])
    assert tree_of(store, conversation.id).nodes == {}
    assert store.list_runs(LOCAL_USER, conversation.id) == ()


def test_a_run_ends_once(store: Store, conversation: Conversation) -> None:
    run = store.start_run(LOCAL_USER, conversation.id, None, kind=RunKind.REPLY, n=2).run
    store.finish_run(run.id, RunStatus.COMPLETE, usage={"prompt_tokens": 3}, sum_logprobs=[-1.5, None])
    ended = store.get_run(LOCAL_USER, run.id)
    assert (ended.status, ended.usage) == (RunStatus.COMPLETE, {"prompt_tokens": 3})
    assert [sample.sum_logprob for sample in ended.samples] == [-1.5, None]
    assert ended.finished_at is not None
    with pytest.raises(ConflictError, match="has ended already: it is complete"):
        store.finish_run(run.id, RunStatus.ERROR)
    with pytest.raises(NotFoundError, match="There is no run gone"):
        store.finish_run(type(run.id)("gone"), RunStatus.ERROR)


def end_of(status: NodeStatus, text: str = "") -> NodeEnd:
    return NodeEnd(status, finish_reason="stop", detail="", text=text, token_ids=[7], usage={}, timing={})


def test_a_run_and_its_replies_end_in_one_change(store: Store, conversation: Conversation) -> None:
    """Each reply raised the version by one, and was a commit of its own: stopping 64 samples told followers 64 times."""
    run = store.start_run(LOCAL_USER, conversation.id, None, kind=RunKind.REPLY, n=3).run
    fork = store.fork_conversation(LOCAL_USER, conversation.id, node_id=run.samples[1].node_id)
    node_ids = [sample.node_id for sample in run.samples]
    ends = {node_id: end_of(NodeStatus.COMPLETE, f"reply {i}") for i, node_id in enumerate(node_ids)}
    changes = {change.conversation.id: change for change in store.finish_run(run.id, RunStatus.COMPLETE, ends=ends)}
    assert [node.text for node in changes[conversation.id].nodes] == ["reply 0", "reply 1", "reply 2"]
    assert {node.status for node in changes[conversation.id].nodes} == {NodeStatus.COMPLETE}
    assert changes[conversation.id].conversation.version == 3
    assert [node.id for node in changes[fork.id].nodes] == node_ids[1:2]
    assert store.get_run(LOCAL_USER, run.id).status is RunStatus.COMPLETE


def test_the_end_of_a_run_passes_over_replies_that_ended_before_or_are_gone(store: Store, conversation: Conversation) -> None:
    run = store.start_run(LOCAL_USER, conversation.id, None, kind=RunKind.REPLY, n=3).run
    ended, gone, left = (sample.node_id for sample in run.samples)
    store.finish_node(ended, NodeStatus.ABORTED, text="stopped")
    store.delete_node(LOCAL_USER, conversation.id, gone)
    store.purge_deleted(before=2**53)
    ends = {node_id: end_of(NodeStatus.COMPLETE, "late") for node_id in (ended, gone, left)}
    store.finish_run(run.id, RunStatus.COMPLETE, ends=ends)
    tree = tree_of(store, conversation.id)
    assert [(node.text, node.status) for node in tree.in_order()] == [
        ("stopped", NodeStatus.ABORTED),
        ("late", NodeStatus.COMPLETE),
    ]


def test_replies_that_ended_before_the_run_failed_are_not_taken_back(store: Store, conversation: Conversation) -> None:
    run = store.start_run(LOCAL_USER, conversation.id, None, kind=RunKind.REPLY, n=2).run
    ended, empty = (sample.node_id for sample in run.samples)
    store.discard_run(run.id, ends={ended: end_of(NodeStatus.COMPLETE)}, error_code="engine_step_failed", error_message="oops")
    tree = tree_of(store, conversation.id)
    assert empty not in tree.nodes
    assert tree.nodes[ended].status is NodeStatus.COMPLETE


def test_a_run_starts_as_fast_beside_many_branches_as_beside_few(store: Store, conversation: Conversation) -> None:
    """Every start read the whole conversation: after 450 messages that was most of what a start cost."""
    question = add(store, conversation, None, "question")

    def instructions(db: sqlite_utils.Database) -> int:
        seen = itertools.count()
        db.conn.set_progress_handler(lambda: next(seen) and 0, 1)
        runs_module.start_run(db, LOCAL_USER, conversation.id, question, kind=RunKind.REPLY, input=user("again"))
        db.conn.set_progress_handler(None, 1)
        return next(seen)

    few = store.database.write(instructions).result()
    for branch in range(20):
        parent = add(store, conversation, question, f"branch {branch}")
        for _ in range(10):
            parent = add(store, conversation, parent, "and so on")
    assert store.database.write(instructions).result() < few + 200 * 2


def test_a_failed_regeneration_leaves_no_orphan_and_shows_what_was_shown(store: Store, conversation: Conversation) -> None:
    """A regeneration the model refused left an empty reply with no parent, and the conversation would not open again."""
    question = add(store, conversation, None, "question")
    first = add(store, conversation, question, assistant("first"))
    add(store, conversation, question, assistant("second"))
    store.choose_node(LOCAL_USER, conversation.id, first)
    before = tree_of(store, conversation.id)
    run = store.start_run(LOCAL_USER, conversation.id, question, kind=RunKind.REGENERATE, n=3).run
    changes = store.discard_run(run.id, error_code="context_length_exceeded", error_message="too long")
    assert {node_id for change in changes for node_id in change.removed} == {sample.node_id for sample in run.samples}
    after = tree_of(store, conversation.id)
    assert (after.nodes, after.children) == (before.nodes, before.children)
    assert shown(store, conversation.id) == ["question", "first"]
    failed = store.get_run(LOCAL_USER, run.id)
    assert (failed.status, failed.error_code, failed.error_message) == ("error", "context_length_exceeded", "too long")
    assert changes[-1].conversation.version == store.get_conversation(LOCAL_USER, conversation.id).version


def test_a_failed_reply_keeps_the_users_message(store: Store, conversation: Conversation) -> None:
    run = store.start_run(LOCAL_USER, conversation.id, None, kind=RunKind.REPLY, input=user("question")).run
    store.discard_run(run.id, error_code="engine_dead", error_message="gone")
    assert shown(store, conversation.id) == ["question"]


def test_a_message_says_why_it_has_no_answer_until_it_is_asked_again(store: Store, conversation: Conversation) -> None:
    """After a reload a question stood there alone, and nothing said that it had failed."""
    run = store.start_run(LOCAL_USER, conversation.id, None, kind=RunKind.REPLY, input=user("question")).run
    changes = store.discard_run(run.id, error_code="engine_dead", error_message="gone")
    assert run.input_node_id is not None
    assert changes[-1].nodes == (store.get_node(LOCAL_USER, conversation.id, run.input_node_id),)
    assert changes[-1].nodes[0].detail == "gone"
    store.start_run(LOCAL_USER, conversation.id, run.input_node_id, kind=RunKind.REGENERATE)
    assert store.get_node(LOCAL_USER, conversation.id, run.input_node_id).detail is None


def test_a_failed_continuation_leaves_the_reply_as_it_was(store: Store, conversation: Conversation) -> None:
    reply = add(store, conversation, None, assistant("cut", token_ids=[1], status=NodeStatus.ABORTED))
    run = store.start_run(LOCAL_USER, conversation.id, reply, kind=RunKind.CONTINUE).run
    store.discard_run(run.id, error_code="engine_dead", error_message="gone")
    node = store.get_node(LOCAL_USER, conversation.id, reply)
    assert (node.text, node.status, node.detail) == ("cut", NodeStatus.ABORTED, None)


def test_discarding_keeps_what_was_generated_or_answered(store: Store, conversation: Conversation) -> None:
    run = store.start_run(LOCAL_USER, conversation.id, None, kind=RunKind.REPLY, n=3).run
    grown, answered, empty = (sample.node_id for sample in run.samples)
    store.append_partial(grown, "text", [1])
    add(store, conversation, answered, "but")
    store.discard_run(run.id, error_code="engine_step_failed", error_message="oops")
    tree = tree_of(store, conversation.id)
    assert tree.children[None] == (grown, answered)
    assert {(tree.nodes[id].status, tree.nodes[id].detail) for id in (grown, answered)} == {(NodeStatus.ERROR, "oops")}
    assert empty not in tree.nodes


def test_runs_left_running_are_interrupted_at_the_next_start(store: Store, conversation: Conversation) -> None:
    run = store.start_run(LOCAL_USER, conversation.id, None, kind=RunKind.REPLY).run
    store.close()
    with Store(store.path) as again:
        assert again.get_run(LOCAL_USER, run.id).status is RunStatus.INTERRUPTED
        assert [found.id for found in again.list_runs(LOCAL_USER, conversation.id)] == [run.id]


def test_messages_before_the_input_are_stored_in_a_line_with_the_run(store: Store) -> None:
    chat = store.create_conversation(LOCAL_USER)
    news = [NewNode(role=Role.SYSTEM, text="Be brief."), NewNode(role=Role.USER, text="Hi", extra={"from": "elsewhere"})]
    started = store.start_run(LOCAL_USER, chat.id, None, kind=RunKind.REPLY, news=news, n=2)
    path = store.get_path(LOCAL_USER, chat.id)
    assert [node.text for node in path] == ["Be brief.", "Hi", ""]
    assert (started.run.parent_id, started.run.input_node_id) == (path[1].id, None)
    assert path[1].extra == {"from": "elsewhere"}
    assert {sample.node_id for sample in started.run.samples} >= {path[2].id}


def test_only_an_empty_conversation_is_discarded(store: Store) -> None:
    empty, kept = (store.create_conversation(LOCAL_USER) for _ in range(2))
    store.add_node(LOCAL_USER, kept.id, None, NewNode(role=Role.USER, text="Hi"))
    for chat in (empty, kept):
        store.discard_empty_conversation(LOCAL_USER, chat.id)
    assert [chat.id for chat in store.list_conversations(LOCAL_USER)] == [kept.id]
    assert store.list_conversations(LOCAL_USER, deleted=True) == ()


def test_a_reply_cut_by_its_limit_is_that_again_if_going_on_fails(store: Store, conversation: Conversation) -> None:
    """It had become a complete one, which could only be continued beside it."""
    run = store.start_run(LOCAL_USER, conversation.id, None, kind=RunKind.REPLY, input=user("q")).run
    node_id = run.samples[0].node_id
    store.finish_run(
        run.id, RunStatus.COMPLETE, ends={node_id: replace(end_of(NodeStatus.COMPLETE, "cut off"), finish_reason="length")}
    )
    for _ in range(2):
        more = store.start_run(LOCAL_USER, conversation.id, node_id, kind=RunKind.CONTINUE).run
        assert [sample.node_id for sample in more.samples] == [node_id]
        store.discard_run(more.id, error_code="engine_dead", error_message="gone")
        node = store.get_node(LOCAL_USER, conversation.id, node_id)
        assert (node.status, node.finish_reason, node.text) == (NodeStatus.COMPLETE, "length", "cut off")


@pytest.mark.parametrize("deleted", ["question", "reply"])
def test_a_message_deleted_in_a_fork_stays_so_while_it_goes_on_elsewhere(
    store: Store, conversation: Conversation, deleted: str
) -> None:
    """Who looked at the fork saw it come back until they reloaded."""
    question = add(store, conversation, None, "question")
    reply = add(store, conversation, question, assistant("half", token_ids=[1], status=NodeStatus.ABORTED))
    fork = store.fork_conversation(LOCAL_USER, conversation.id)
    store.delete_node(LOCAL_USER, fork.id, {"question": question, "reply": reply}[deleted])
    started = store.start_run(LOCAL_USER, conversation.id, reply, kind=RunKind.CONTINUE)
    assert [change.conversation.id for change in started.changes] == [conversation.id]
    changes = store.finish_run(started.run.id, RunStatus.COMPLETE, ends={reply: end_of(NodeStatus.COMPLETE, " whole")})
    assert [change.conversation.id for change in changes] == [conversation.id]
    store.restore_node(LOCAL_USER, fork.id, {"question": question, "reply": reply}[deleted])
    assert shown(store, fork.id) == ["question", "half whole"]


def test_a_reply_shared_with_a_fork_ends_though_its_run_was_purged(store: Store, conversation: Conversation) -> None:
    """Its last words were lost, and the fork showed it as being written until the next start."""
    run = store.start_run(LOCAL_USER, conversation.id, None, kind=RunKind.REPLY, input=user("q")).run
    node_id = run.samples[0].node_id
    fork = store.fork_conversation(LOCAL_USER, conversation.id)
    store.delete_conversation(LOCAL_USER, conversation.id)
    store.purge_deleted(before=2**53)
    changes = store.finish_run(run.id, RunStatus.ABORTED, ends={node_id: end_of(NodeStatus.ABORTED, "the text")})
    assert [change.conversation.id for change in changes] == [fork.id]
    node = store.get_node(LOCAL_USER, fork.id, node_id)
    assert (node.status, node.text) == (NodeStatus.ABORTED, "the text")


def test_the_run_of_a_message_is_found_by_its_user_alone(store: Store, conversation: Conversation) -> None:
    run = store.start_run(LOCAL_USER, conversation.id, None, kind=RunKind.REPLY, client_msg_id="m1").run
    other = store.create_user("bob").id
    assert store.find_run_of_message(LOCAL_USER, "m1", conversation.id, None) == run
    assert store.find_run_of_message(LOCAL_USER, "m2", conversation.id, None) is None
    assert store.find_run_of_message(other, "m1", conversation.id, None) is None


def test_another_message_with_an_id_that_was_used_is_refused(store: Store, conversation: Conversation) -> None:
    """It was answered with the run of the first one, in whatever conversation that was, and stored nowhere."""
    other = store.create_conversation(LOCAL_USER)
    store.start_run(LOCAL_USER, conversation.id, None, kind=RunKind.REPLY, input=user("a colour"), client_msg_id="1")
    for chat, said in [(other, "a colour"), (conversation, "a town"), (conversation, None)]:
        with pytest.raises(ConflictError, match="started another run before"):
            store.start_run(
                *(LOCAL_USER, chat.id, None),
                kind=RunKind.REPLY,
                input=None if said is None else user(said),
                client_msg_id="1",
            )
    assert not tree_of(store, other.id).nodes
