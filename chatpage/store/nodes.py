"""Nodes: add, stream into, finish, reopen, choose, delete, restore.

Invariant: a node's role and parent never change, and its text and tokens only grow, only while it is `STREAMING`. An edit or
a regeneration is a new sibling. The only way back from an ended state to `STREAMING` is `reopen_node`, never once
the model itself ended the text.

    add (streaming) --append_partial*--> finish: complete, or complete by length --reopen--> streaming
                                         finish: aborted | error          --reopen--> streaming
                                         process died, at the next start: interrupted --reopen--> streaming
"""

from collections.abc import Sequence
from dataclasses import dataclass

from sqlite_utils import Database

from chatpage.errors import ConflictError, InvalidRequestError, NotFoundError
from chatpage.store.records import (
    NO_JSON,
    Conversation,
    ConversationId,
    Json,
    NewNode,
    Node,
    NodeId,
    NodeStatus,
    TreeChange,
    UserId,
    clean_text,
    new_id,
    now,
    pack_tokens,
)
from chatpage.store.rows import (
    bump,
    bump_known,
    dump_json,
    has_children,
    load_json,
    load_nodes,
    load_path,
    load_shape,
    point_at,
    require_conversation,
    show,
)
from chatpage.store.tree import Link, Tree

MAX_TEXT = 16 * 2**20  # characters


@dataclass(frozen=True, slots=True)
class NodeEnd:
    """How a streaming node ends. Fields as the arguments of `finish_node`."""

    status: NodeStatus
    finish_reason: str | None
    detail: str
    text: str
    token_ids: Sequence[int]
    usage: Json
    timing: Json


def add_node(
    db: Database,
    user_id: UserId,
    conversation_id: ConversationId,
    parent_id: NodeId | None,
    new: NewNode,
    *,
    expected_version: int | None = None,
) -> TreeChange:
    """Add a node below `parent_id` (None: a root) and show it.

    Raises:
        NotFoundError: No such conversation, or the parent is not in it or is deleted.
        ConflictError: The conversation is not at `expected_version`.
        InvalidRequestError: A value cannot be stored.
    """
    return add_siblings(db, user_id, conversation_id, parent_id, [new], expected_version=expected_version)


def add_siblings(
    db: Database,
    user_id: UserId,
    conversation_id: ConversationId,
    parent_id: NodeId | None,
    new: Sequence[NewNode],
    *,
    expected_version: int | None = None,
) -> TreeChange:
    """Add nodes beside each other below `parent_id` (None: roots) and show the first. Raises as `add_node` does."""
    conversation = require_conversation(db, user_id, conversation_id, expected_version=expected_version)
    tree = load_path(db, conversation_id, parent_id)
    nodes = insert_siblings(db, conversation, parent_id, new, created_at=next_moment(db, conversation_id, tree, parent_id))
    choices = show(db, conversation_id, tree, parent_id, [nodes[0].id])
    return TreeChange(bump(db, conversation), nodes, choices=choices)


def add_line(
    db: Database, user_id: UserId, conversation_id: ConversationId, parent_id: NodeId | None, new: Sequence[NewNode]
) -> TreeChange:
    """Add nodes, each below the one before it, the first below `parent_id`, and show them. Raises as `add_node` does."""
    conversation = require_conversation(db, user_id, conversation_id)
    tree = load_path(db, conversation_id, parent_id)
    nodes = insert_line(db, conversation, parent_id, new, created_at=next_moment(db, conversation_id, tree, parent_id))
    choices = show(db, conversation_id, tree, parent_id, [node.id for node in nodes])
    return TreeChange(bump(db, conversation), nodes, choices=choices)


def edit_node(
    db: Database,
    user_id: UserId,
    conversation_id: ConversationId,
    node_id: NodeId,
    new: NewNode,
    *,
    expected_version: int | None = None,
) -> TreeChange:
    """Put another version beside a node and show it. The original and all below it stay. Raises as `add_node` does."""
    require_conversation(db, user_id, conversation_id, expected_version=expected_version)
    tree = load_path(db, conversation_id, node_id)
    tree.path(node_id)  # the node must be there
    return add_siblings(db, user_id, conversation_id, tree.parents[node_id], [new])


def next_moment(db: Database, conversation_id: ConversationId, tree: Tree[Link], parent_id: NodeId | None) -> int:
    """Return a time for a new child of a visible node (None: a new root) that puts it after the children there are.

    Not merely now: a clock set back must not put a new sibling before an old one.
    """
    if parent_id is not None and parent_id not in tree.nodes:
        raise NotFoundError(f"The conversation has no message {parent_id} to add to; it may have been deleted.")
    if parent_id is not None:
        found = db.execute("SELECT max(created_at) FROM nodes WHERE parent_id = ?", (parent_id,))
    else:  # any message may stand at the root, if only because what was above it is gone
        sql = "SELECT max(created_at) FROM conversation_nodes JOIN nodes ON id = node_id WHERE conversation_id = ?"
        found = db.execute(sql, (conversation_id,))
    (latest,) = found.fetchone()
    return max(now(), (latest or 0) + 1)


def insert_siblings(
    db: Database, conversation: Conversation, parent_id: NodeId | None, new: Sequence[NewNode], *, created_at: int
) -> tuple[Node, ...]:
    """Insert nodes that the conversation points at, each a microsecond younger than the one before."""
    if not new:
        raise InvalidRequestError("No message was given to add.")
    nodes = tuple(
        insert_node(db, conversation.owner_id, node, parent_id=parent_id, created_at=created_at + offset)
        for offset, node in enumerate(new)
    )
    point_at(db, conversation.id, [node.id for node in nodes])
    return nodes


def insert_line(
    db: Database, conversation: Conversation, parent_id: NodeId | None, new: Sequence[NewNode], *, created_at: int
) -> tuple[Node, ...]:
    """Insert nodes, each below the one before it."""
    nodes: tuple[Node, ...] = ()
    for node in new:
        above = nodes[-1].id if nodes else parent_id
        nodes += insert_siblings(db, conversation, above, [node], created_at=created_at + len(nodes))
    return nodes


def insert_node(db: Database, owner_id: UserId, new: NewNode, *, parent_id: NodeId | None, created_at: int) -> Node:
    """Insert one row, and return what would be read from it."""
    if len(new.text) > MAX_TEXT:
        raise InvalidRequestError(f"The message has {len(new.text)} characters; at most {MAX_TEXT} are allowed.")
    params, extra = dump_json(new.params), dump_json(new.extra)
    node = Node(
        *(NodeId(new_id()), parent_id, new.role, clean_text(new.text), pack_tokens(new.token_ids), new.status, created_at),
        *(new.finish_reason, new.model, load_json(params), NO_JSON, NO_JSON, load_json(extra)),
    )
    db.execute(
        "INSERT INTO nodes (id, owner_id, parent_id, role, text, token_ids, status, finish_reason, model, params, extra,"
        " created_at) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (
            *(node.id, owner_id, parent_id, str(node.role), node.text, node.token_bytes, str(node.status)),
            *(node.finish_reason, node.model, params, extra, created_at),
        ),
    )
    return node


def get_node(db: Database, user_id: UserId, conversation_id: ConversationId, node_id: NodeId) -> Node:
    """Return one node of a conversation; a deleted one too, so that its end can still be seen.

    Raises:
        NotFoundError: No such conversation, or it never had this message.
    """
    require_conversation(db, user_id, conversation_id)
    row = db.execute(
        "SELECT 1 FROM conversation_nodes WHERE conversation_id = ? AND node_id = ?", (conversation_id, node_id)
    ).fetchone()
    if row is None:
        raise NotFoundError(f"The conversation has no message {node_id}.")
    return load_nodes(db, [node_id], conversation_id)[0]


def append_partial(db: Database, node_id: NodeId, text: str, token_ids: Sequence[int]) -> None:
    """Append to a streaming node. Costs as much as the node is long, whatever the size of its conversation.

    For the run that made the node; there is no user to check.

    Args:
        text: What was generated since the last call.
        token_ids: The tokens of `text`, [num_new_tokens].

    Raises:
        NotFoundError: The node is gone.
        ConflictError: The node is not streaming.
        InvalidRequestError: The text would grow beyond the limit, or a token id is not one.
    """
    _append(db, _require_streaming(db, node_id), text, token_ids)


def finish_node(
    db: Database,
    node_id: NodeId,
    status: NodeStatus,
    *,
    finish_reason: str | None = None,
    detail: str = "",
    text: str = "",
    token_ids: Sequence[int] = (),
    usage: Json = NO_JSON,
    timing: Json = NO_JSON,
) -> tuple[TreeChange, ...]:
    """End a streaming node, and return the change in each conversation that points at it.

    For the run that made the node; there is no user to check.

    Args:
        status: Anything but `STREAMING`.
        finish_reason: Why the engine ended.
        detail: The same in words, where there is more to say.
        text: What `append_partial` was not given yet.
        token_ids: The tokens of `text`, [num_new_tokens].
        usage: Token counts.
        timing: Such as the time to the first token.

    Raises:
        NotFoundError: The node is gone.
        ConflictError: The node has ended already.
        InvalidRequestError: A value cannot be stored.
    """
    end_node(db, node_id, NodeEnd(status, finish_reason, detail, text, token_ids, usage, timing))
    return bump_all_with(db, node_id)


def end_node(db: Database, node_id: NodeId, end: NodeEnd) -> None:
    """As `finish_node`, without telling any conversation."""
    if end.status is NodeStatus.STREAMING:
        raise InvalidRequestError("A message cannot end as 'streaming'.")
    _append(db, _require_streaming(db, node_id), end.text, end.token_ids)
    db.execute(
        "UPDATE nodes SET status = ?, finish_reason = ?, detail = ?, usage = ?, timing = ? WHERE id = ?",
        (
            *(str(end.status), end.finish_reason, clean_text(end.detail) or None),
            *(dump_json(end.usage), dump_json(end.timing), node_id),
        ),
    )


def reopen_node(
    db: Database,
    user_id: UserId,
    conversation_id: ConversationId,
    node_id: NodeId,
    *,
    expected_version: int | None = None,
) -> tuple[TreeChange, ...]:
    """Let an unfinished node stream on, in place.

    Raises:
        NotFoundError: No such conversation, or it has no such message.
        ConflictError: The node is complete, streams already, or something hangs below it; then add a sibling instead. Or the
            conversation is not at `expected_version`.
    """
    require_conversation(db, user_id, conversation_id, expected_version=expected_version)
    load_path(db, conversation_id, node_id).path(node_id)
    (node,) = load_nodes(db, [node_id])
    if not can_reopen(db, node):
        raise ConflictError(
            f"The message {node_id} is {node.status} and cannot grow, or other messages follow it: add a sibling instead."
        )
    db.execute("UPDATE nodes SET status = 'streaming', finish_reason = NULL WHERE id = ?", (node_id,))
    return bump_all_with(db, node_id)


def can_reopen(db: Database, node: Node) -> bool:
    """Whether the node ended early and no conversation has anything below it, so that growing changes nobody's context."""
    is_cut = node.status is NodeStatus.COMPLETE and node.finish_reason == "length"
    has_ended_early = is_cut or node.status not in (NodeStatus.COMPLETE, NodeStatus.STREAMING)
    return has_ended_early and not has_children(db, node.id)


def choose_node(
    db: Database,
    user_id: UserId,
    conversation_id: ConversationId,
    node_id: NodeId,
    *,
    expected_version: int | None = None,
) -> TreeChange:
    """Show the branch that holds a node; below the node, what was shown there last. Raises as `add_node` does."""
    conversation = require_conversation(db, user_id, conversation_id, expected_version=expected_version)
    choices = show(db, conversation_id, load_path(db, conversation_id, node_id), node_id)
    return TreeChange(bump(db, conversation) if choices else conversation, choices=choices)


def delete_node(
    db: Database,
    user_id: UserId,
    conversation_id: ConversationId,
    node_id: NodeId,
    *,
    expected_version: int | None = None,
) -> TreeChange:
    """Hide a node and all below it in this conversation; `restore_node` undoes it until a purge. Raises as `add_node` does."""
    conversation = require_conversation(db, user_id, conversation_id, expected_version=expected_version)
    removed = load_shape(db, conversation_id).subtree(node_id)
    db.execute(
        "UPDATE conversation_nodes SET deleted_at = ? WHERE conversation_id = ? AND node_id = ?",
        (now(), conversation_id, node_id),
    )
    return TreeChange(bump(db, conversation), removed=removed)


def restore_node(db: Database, user_id: UserId, conversation_id: ConversationId, node_id: NodeId) -> TreeChange:
    """Undo `delete_node`: the node, and what below it was not deleted by itself, is back, shown where it was shown.

    If a node above it is deleted too, it comes back when that one does.

    Raises:
        NotFoundError: No such conversation, or the node is not in it, or is purged.
    """
    conversation = require_conversation(db, user_id, conversation_id)
    before = load_shape(db, conversation_id)
    if node_id not in before.parents:
        raise NotFoundError(f"The conversation has no message {node_id}; it may have been purged.")
    db.execute(
        "UPDATE conversation_nodes SET deleted_at = NULL WHERE conversation_id = ? AND node_id = ?", (conversation_id, node_id)
    )
    after = load_shape(db, conversation_id)
    back = [link.id for link in after.in_order() if link.id in before.hidden]
    return TreeChange(bump(db, conversation), load_nodes(db, back, conversation_id))


def keep_node(db: Database, user_id: UserId, conversation_id: ConversationId, node_id: NodeId, *, is_kept: bool) -> TreeChange:
    """Mark a node in this conversation, or take the mark away. Raises as `add_node` does."""
    conversation = require_conversation(db, user_id, conversation_id)
    load_path(db, conversation_id, node_id).path(node_id)
    (node,) = load_nodes(db, [node_id], conversation_id)
    if node.is_kept == is_kept:
        return TreeChange(conversation)
    db.execute(
        "UPDATE conversation_nodes SET kept_at = ? WHERE conversation_id = ? AND node_id = ?",
        (now() if is_kept else None, conversation_id, node_id),
    )
    return TreeChange(bump(db, conversation), load_nodes(db, [node_id], conversation_id))


def recover_interrupted(db: Database) -> tuple[NodeId, ...]:
    """Mark what streamed when the last process ended as interrupted, nodes and runs. Not while another process streams."""
    left = [NodeId(row[0]) for row in db.execute("SELECT id FROM nodes WHERE status = 'streaming'").fetchall()]
    for node_id in left:
        db.execute("UPDATE nodes SET status = 'interrupted', detail = NULL WHERE id = ?", (node_id,))
        bump_all_with(db, node_id)
    db.execute("UPDATE runs SET status = 'interrupted', finished_at = ? WHERE status = 'running'", (now(),))
    return tuple(left)


def bump_all_with(db: Database, *node_ids: NodeId) -> tuple[TreeChange, ...]:
    """Raise, once, the version of every conversation that shows one of the nodes."""
    pointed_at: dict[tuple[UserId, ConversationId], list[NodeId]] = {}
    for node_id in node_ids:
        owners = db.execute(
            "SELECT c.owner_id, c.id FROM conversation_nodes m JOIN conversations c ON c.id = m.conversation_id"
            " WHERE m.node_id = ? AND m.deleted_at IS NULL",
            (node_id,),
        )
        for owner_id, conversation_id in owners.fetchall():
            if not _is_below_deleted(db, conversation_id, node_id):
                pointed_at.setdefault((owner_id, conversation_id), []).append(node_id)
    return tuple(
        TreeChange(bump_known(db, owner_id, conversation_id), load_nodes(db, found, conversation_id))
        for (owner_id, conversation_id), found in pointed_at.items()
    )


def _is_below_deleted(db: Database, conversation_id: ConversationId, node_id: NodeId) -> bool:
    deleted = "SELECT 1 FROM conversation_nodes WHERE conversation_id = ? AND deleted_at IS NOT NULL LIMIT 1"
    if db.execute(deleted, (conversation_id,)).fetchone() is None:
        return False
    (is_below,) = db.execute(
        "WITH RECURSIVE path (id) AS (SELECT ? UNION SELECT n.parent_id FROM nodes n JOIN path ON n.id = path.id"
        " WHERE n.parent_id IS NOT NULL) SELECT EXISTS (SELECT 1 FROM path JOIN conversation_nodes m ON m.node_id = path.id"
        " WHERE m.conversation_id = ? AND m.deleted_at IS NOT NULL)",
        (node_id, conversation_id),
    ).fetchone()
    return bool(is_below)


def _require_streaming(db: Database, node_id: NodeId) -> tuple[NodeId, str, bytes]:
    row = db.execute("SELECT status, text, token_ids FROM nodes WHERE id = ?", (node_id,)).fetchone()
    if row is None:
        raise NotFoundError(f"The message {node_id} is gone; it was deleted and purged.")
    status, text, token_bytes = row
    if status != NodeStatus.STREAMING:
        raise ConflictError(f"The message {node_id} is {status}; only a streaming message grows.")
    return node_id, text, token_bytes


def _append(db: Database, streaming: tuple[NodeId, str, bytes], text: str, token_ids: Sequence[int]) -> None:
    if not text and not token_ids:
        return
    node_id, old_text, token_bytes = streaming
    if len(old_text) + len(text) > MAX_TEXT:
        raise InvalidRequestError(f"The message would have more than {MAX_TEXT} characters.")
    db.execute(
        "UPDATE nodes SET text = ?, token_ids = ? WHERE id = ?",
        (old_text + clean_text(text), token_bytes + pack_tokens(token_ids), node_id),
    )
