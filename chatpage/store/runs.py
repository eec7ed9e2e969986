"""Runs: what users asked the engine for, and which nodes came of it.

Invariant: a run and the nodes it will stream into are committed together, before the first token, so that a crash at any
moment leaves nodes that can be found and continued. How a sample ended stands in its node and nowhere else.
"""

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from sqlite_utils import Database

from chatpage.errors import ConflictError, InvalidRequestError, NotFoundError
from chatpage.sampling_params import MAX_SAMPLES
from chatpage.store.nodes import NodeEnd, bump_all_with, can_reopen, end_node, insert_line, insert_siblings, next_moment
from chatpage.store.purging import drop_unreferenced_nodes
from chatpage.store.records import (
    NO_JSON,
    Conversation,
    ConversationId,
    Json,
    NewNode,
    Node,
    NodeId,
    NodeStatus,
    Role,
    Run,
    RunId,
    RunKind,
    RunStatus,
    Sample,
    TreeChange,
    UserId,
    clean_text,
    new_id,
    now,
)
from chatpage.store.rows import (
    ROOT,
    bump,
    dump_json,
    find_conversation,
    has_children,
    load_json,
    load_nodes,
    load_path,
    require_conversation,
    save_choices,
    show,
)
from chatpage.store.tree import Link, Tree

RUN_COLUMNS = """id, user_id, conversation_id, parent_id, kind, status, created_at, params, usage, client_msg_id, input_node_id,
    error_code, error_message, finished_at"""
_NO_ENDS: Mapping[NodeId, NodeEnd] = MappingProxyType({})
# Why a node had ended that goes on in place: a complete one does only if it was cut.
_REASONS = {NodeStatus.COMPLETE: "length", NodeStatus.ABORTED: "abort"}


@dataclass(frozen=True, slots=True)
class StartedRun:
    """A run with its nodes in place; `is_new` is False if `client_msg_id` had started it before, and then nothing changed."""

    run: Run
    changes: tuple[TreeChange, ...]
    is_new: bool


def start_run(
    db: Database,
    user_id: UserId,
    conversation_id: ConversationId,
    parent_id: NodeId | None,
    *,
    kind: RunKind,
    n: int = 1,
    news: Sequence[NewNode] = (),
    input: NewNode | None = None,
    text: str = "",
    token_ids: Sequence[int] = (),
    params: Json = NO_JSON,
    model: str | None = None,
    client_msg_id: str | None = None,
    expected_version: int | None = None,
) -> StartedRun:
    """Record a run, the user's message if there is one, and an empty streaming node per sample; show the first sample.

    Args:
        parent_id: What the message or the samples hang below; for `CONTINUE` the node that goes on. A node that ended early and
            has nothing below it goes on in place; otherwise the samples are siblings that begin with its text and tokens.
        n: Number of samples, 1 to 64.
        news: Messages below the parent, each below the one before it, such as a system prompt or a history from elsewhere.
        input: The user's message, between those and the samples.
        text: What every sample begins with (a prefill, or the part before the token where a reply is forked).
        token_ids: The tokens of `text`.
        client_msg_id: Starts at most one run per user, however often it is sent.

    Raises:
        NotFoundError: No such conversation, or it has no such message.
        ConflictError: The conversation is not at `expected_version`, or the `client_msg_id` stands for something else.
        InvalidRequestError: The arguments do not fit each other, or a value cannot be stored.
    """
    if client_msg_id is not None:
        known = find_run_of_message(db, user_id, client_msg_id, conversation_id, None if input is None else input.text)
        if known is not None:
            return StartedRun(known, (), is_new=False)
    if not 1 <= n <= MAX_SAMPLES:
        raise InvalidRequestError(f"n is {n}; it must be between 1 and {MAX_SAMPLES}.")
    conversation = require_conversation(db, user_id, conversation_id, expected_version=expected_version)
    tree = load_path(db, conversation_id, parent_id)
    reply = NewNode(
        role=Role.ASSISTANT, text=text, token_ids=token_ids, status=NodeStatus.STREAMING, model=model, params=params
    )
    run = Run(
        *(RunId(new_id()), user_id, conversation_id, parent_id, kind, RunStatus.RUNNING, (), now()),
        params=params,
        client_msg_id=client_msg_id,
    )
    if kind is RunKind.CONTINUE:
        if news or input is not None or text or len(token_ids) or parent_id is None:
            raise InvalidRequestError("To continue, name the message that goes on, and neither an input nor a prefill.")
        tree.path(parent_id)  # the node must be there and visible
        run = replace(run, parent_id=tree.parents[parent_id])
        (node,) = load_nodes(db, [parent_id])
        if n == 1 and can_reopen(db, node):
            return _start_in_place(db, run, node)
        reply = replace(reply, role=node.role, text=node.text, token_ids=node.token_ids, model=model or node.model)
    return _start_beside(db, run, conversation, tree, [reply] * n, news=news, input=input)


def finish_run(
    db: Database,
    run_id: RunId,
    status: RunStatus,
    *,
    ends: Mapping[NodeId, NodeEnd] = _NO_ENDS,
    usage: Json = NO_JSON,
    sum_logprobs: Sequence[float | None] = (),
    error_code: str | None = None,
    error_message: str | None = None,
) -> tuple[TreeChange, ...]:
    """Record how a run ended, and return the change in each conversation that points at its nodes.

    A run that is gone was purged with its conversation; its nodes may live on in a fork, and end there.

    Args:
        ends: Those of its nodes that have not ended yet; one that is gone, or has ended, is passed over.
        sum_logprobs: Per sample, in order; may be left out.

    Raises:
        NotFoundError: No such run, and nothing to end.
        ConflictError: It has ended already.
    """
    if status is RunStatus.RUNNING:
        raise InvalidRequestError("A run cannot end as 'running'.")
    ended = db.execute(
        "UPDATE runs SET status = ?, usage = ?, error_code = ?, error_message = ?, finished_at = ?"
        " WHERE id = ? AND status = 'running'",
        (str(status), dump_json(usage), error_code, error_message, now(), run_id),
    )
    if not ended.rowcount:
        changes = _end_nodes(db, ends) if _find_run(db, "id = ?", run_id) is None else ()
        if not changes:
            _require_running(db, run_id)  # it says why not
        return changes
    db.conn.executemany(
        "UPDATE run_samples SET sum_logprob = ? WHERE run_id = ? AND sample = ?",
        [(logprob, run_id, sample) for sample, logprob in enumerate(sum_logprobs)],
    )
    return _end_nodes(db, ends)


def discard_run(
    db: Database, run_id: RunId, *, error_code: str, error_message: str, ends: Mapping[NodeId, NodeEnd] = _NO_ENDS
) -> tuple[TreeChange, ...]:
    """Take back the nodes of a run that failed before it generated anything, so that it leaves no empty reply behind.

    A sample that has text of its own, or something below it, stays and ends as `ERROR`. The user's message stays, and says why
    if it is left without an answer. What was shown before the run is shown again.

    Args:
        ends: As of `finish_run`, of samples that ended before it failed.

    Raises:
        NotFoundError: No such run.
        ConflictError: It has ended already.
    """
    run = _require_running(db, run_id)
    changes = list(_end_nodes(db, ends))
    changes += [change for sample in run.samples for change in _take_back(db, run, sample, error_message)]
    conversation = find_conversation(db, run.user_id, run.conversation_id)
    (previous,) = db.execute("SELECT previous_choice FROM runs WHERE id = ?", (run_id,)).fetchone()
    if previous is not None and conversation is not None and any(change.removed for change in changes):
        save_choices(db, run.conversation_id, {run.parent_id: previous})
        changes.append(TreeChange(bump(db, conversation), choices={run.parent_id: previous}))
    if run.parent_id is not None and not has_children(db, run.parent_id):
        _say_why_unanswered(db, run.parent_id, clean_text(error_message))
        changes.extend(bump_all_with(db, run.parent_id))
    finish_run(db, run_id, RunStatus.ERROR, error_code=error_code, error_message=error_message)
    return tuple(changes)


def find_run_of_message(
    db: Database, user_id: UserId, client_msg_id: str, conversation_id: ConversationId, input: str | None
) -> Run | None:
    """Return the run of the user that a message started before.

    Args:
        conversation_id: Where the message belongs.
        input: What it says.

    Raises:
        ConflictError: It was another message: answering with its run would lose this one without a word.
    """
    run = _find_run(db, "user_id = ? AND client_msg_id = ?", user_id, client_msg_id)
    if run is None:
        return None
    is_same = run.conversation_id == conversation_id and (run.input_node_id is None) == (input is None)
    if is_same and run.input_node_id is not None:
        is_same = all(node.text == clean_text(input or "") for node in load_nodes(db, [run.input_node_id]))  # none: purged
    if not is_same:
        raise ConflictError(
            f"The client_msg_id {client_msg_id!r} started another run before, {run.id}: give every message an id of its own,"
            " such as a UUID, and send the same one only to send the same message again."
        )
    return run


def get_run(db: Database, user_id: UserId, run_id: RunId) -> Run:
    """Return a run of the user.

    Raises:
        NotFoundError: There is none, or it is another user's.
    """
    run = _find_run(db, "id = ? AND user_id = ?", run_id, user_id)
    if run is None:
        raise NotFoundError(f"There is no run {run_id}.")
    return run


def list_runs(db: Database, user_id: UserId, conversation_id: ConversationId, *, limit: int = 100) -> tuple[Run, ...]:
    """Return the runs of a conversation, newest first.

    Raises:
        NotFoundError: No such conversation.
    """
    require_conversation(db, user_id, conversation_id)
    rows = db.execute(
        f"SELECT {RUN_COLUMNS} FROM runs WHERE conversation_id = ? ORDER BY created_at DESC, id LIMIT ?",
        (conversation_id, limit),
    ).fetchall()
    return tuple(_run_from_row(db, row) for row in rows)


def _start_in_place(db: Database, run: Run, node: Node) -> StartedRun:
    """Let a node that ended early stream on."""
    db.execute("UPDATE nodes SET status = 'streaming', finish_reason = NULL WHERE id = ?", (node.id,))
    run = replace(run, samples=(Sample(0, node.id, node.num_tokens),))
    _insert_run(db, run, previous_status=node.status)
    return StartedRun(run, bump_all_with(db, node.id), is_new=True)


def _start_beside(
    db: Database,
    run: Run,
    conversation: Conversation,
    tree: Tree[Link],
    replies: Sequence[NewNode],
    *,
    news: Sequence[NewNode],
    input: NewNode | None,
) -> StartedRun:
    """Add the new messages in a line, and the replies beside each other below it, or below `run.parent_id`."""
    above = run.parent_id
    moment = next_moment(db, conversation.id, tree, above)
    if above is not None:
        _say_why_unanswered(db, above, None)
    line = insert_line(db, conversation, above, (*news, *(() if input is None else (input,))), created_at=moment)
    if line:
        run = replace(run, parent_id=line[-1].id, input_node_id=None if input is None else line[-1].id)
    nodes = insert_siblings(db, conversation, run.parent_id, replies, created_at=moment + len(line))
    run = replace(run, samples=tuple(Sample(i, node.id, node.num_tokens) for i, node in enumerate(nodes)))
    _insert_run(db, run, previous_choice=None if line else tree.choices.get(above))
    choices = show(db, conversation.id, tree, above, [node.id for node in (*line, nodes[0])])
    change = TreeChange(bump(db, conversation), (*line, *nodes), choices=choices)
    return StartedRun(run, (change,), is_new=True)


def _end_nodes(db: Database, ends: Mapping[NodeId, NodeEnd]) -> tuple[TreeChange, ...]:
    for node_id, end in ends.items():
        with contextlib.suppress(NotFoundError, ConflictError):
            end_node(db, node_id, end)
    return bump_all_with(db, *ends)


def _insert_run(
    db: Database, run: Run, *, previous_choice: NodeId | None = None, previous_status: NodeStatus | None = None
) -> None:
    db.execute(
        "INSERT INTO runs (id, user_id, conversation_id, parent_id, kind, status, params, client_msg_id, input_node_id,"
        " previous_choice, created_at) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (
            *(run.id, run.user_id, run.conversation_id, run.parent_id, str(run.kind), str(run.status), dump_json(run.params)),
            *(run.client_msg_id, run.input_node_id, previous_choice, run.created_at),
        ),
    )
    db.conn.executemany(
        "INSERT INTO run_samples (run_id, sample, node_id, num_prefix_tokens, previous_status) VALUES (?, ?, ?, ?, ?)",
        [(run.id, s.sample, s.node_id, s.num_prefix_tokens, previous_status) for s in run.samples],
    )


def _say_why_unanswered(db: Database, node_id: NodeId, reason: str | None) -> None:
    db.execute("UPDATE nodes SET detail = ? WHERE id = ? AND role = 'user'", (reason, node_id))


def _take_back(db: Database, run: Run, sample: Sample, reason: str) -> tuple[TreeChange, ...]:
    found = load_nodes(db, [sample.node_id])
    if not found or found[0].status is not NodeStatus.STREAMING:
        return ()
    has_grown = found[0].num_tokens > sample.num_prefix_tokens
    (previous_status,) = db.execute(
        "SELECT previous_status FROM run_samples WHERE run_id = ? AND sample = ?", (run.id, sample.sample)
    ).fetchone()
    if has_grown or previous_status is not None or has_children(db, sample.node_id):
        status = NodeStatus.ERROR if has_grown or previous_status is None else previous_status
        db.execute(
            "UPDATE nodes SET status = ?, finish_reason = ? WHERE id = ?", (str(status), _REASONS.get(status), sample.node_id)
        )
        if status is NodeStatus.ERROR:
            db.execute("UPDATE nodes SET detail = ? WHERE id = ?", (clean_text(reason), sample.node_id))
        return bump_all_with(db, sample.node_id)
    changes = bump_all_with(db, sample.node_id)
    db.execute("DELETE FROM conversation_nodes WHERE node_id = ?", (sample.node_id,))
    db.execute("DELETE FROM node_choice WHERE parent_id = ? AND child_id = ?", (run.parent_id or ROOT, sample.node_id))
    drop_unreferenced_nodes(db, sample.node_id)
    return tuple(TreeChange(change.conversation, removed=(sample.node_id,)) for change in changes)


def _require_running(db: Database, run_id: RunId) -> Run:
    run = _find_run(db, "id = ?", run_id)
    if run is None:
        raise NotFoundError(f"There is no run {run_id}; it may have been purged.")
    if run.status is not RunStatus.RUNNING:
        raise ConflictError(f"The run {run_id} has ended already: it is {run.status}.")
    return run


def _find_run(db: Database, where: str, *args: str) -> Run | None:
    row = db.execute(f"SELECT {RUN_COLUMNS} FROM runs WHERE {where}", args).fetchone()
    return None if row is None else _run_from_row(db, row)


def _run_from_row(db: Database, row: Sequence[Any]) -> Run:
    run_id, user_id, conversation_id, parent_id, kind, status, created_at, params, usage, *rest = row
    samples = db.execute(
        "SELECT sample, node_id, num_prefix_tokens, sum_logprob FROM run_samples WHERE run_id = ? ORDER BY sample", (run_id,)
    )
    return Run(
        *(run_id, user_id, conversation_id, parent_id, RunKind(kind), RunStatus(status)),
        *(tuple(Sample(*sample) for sample in samples), created_at, load_json(params), load_json(usage), *rest),
    )
