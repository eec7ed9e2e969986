"""From rows to records and back, and the reads that every part of the store shares.

Invariant: only this module knows the order of columns, and every query for a conversation names its owner.
"""

import json
from collections.abc import Iterable, Sequence
from typing import Any

from sqlite_utils import Database

from chatpage.errors import ConflictError, InvalidRequestError, NotFoundError
from chatpage.store.records import (
    NO_JSON,
    Conversation,
    ConversationId,
    Json,
    Node,
    NodeId,
    NodeStatus,
    Role,
    UserId,
    now,
)
from chatpage.store.tree import Link, Tree, build_tree

NODE_COLUMNS = ", ".join(
    "n." + name
    for name in (
        *("id", "parent_id", "role", "text", "token_ids", "status", "created_at", "finish_reason", "model"),
        *("params", "usage", "timing", "extra", "detail"),
    )
)
CONVERSATION_COLUMNS = """c.id, c.owner_id, c.title, c.version, c.created_at, c.updated_at, c.pinned,
    (SELECT json_group_array(name) FROM (SELECT name FROM tags WHERE conversation_id = c.id ORDER BY name)),
    c.params, c.preset_id, c.forked_from, c.source, c.deleted_at"""
_encode = json.JSONEncoder(allow_nan=False, separators=(",", ":")).encode
ROOT = ""  # in node_choice, the parent of roots: a key column cannot be NULL


def dump_json(value: Json) -> str:
    """Return compact JSON.

    Raises:
        InvalidRequestError: The value holds something JSON has no way to write.
    """
    if not value:
        return "{}"
    try:
        return _encode(dict(value))
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequestError(f"These values cannot be stored as JSON: {error}.") from error


def load_json(text: str | None) -> Json:
    if not text or text == "{}":
        return NO_JSON
    loaded: Json = json.loads(text)
    return loaded


def node_from_row(row: Sequence[Any]) -> Node:
    """Make a node from a row of `NODE_COLUMNS` and whether it is kept."""
    node_id, parent_id, role, text, token_ids, status, created_at, finish_reason, model, params, *rest = row
    usage, timing, extra, detail, is_kept = rest
    return Node(
        *(node_id, parent_id, Role(role), text, token_ids, NodeStatus(status), created_at, finish_reason, model),
        *(load_json(params), load_json(usage), load_json(timing), load_json(extra), detail, bool(is_kept)),
    )


def conversation_from_row(row: Sequence[Any]) -> Conversation:
    """Make a conversation from a row of `CONVERSATION_COLUMNS`."""
    conversation_id, owner_id, title, version, created_at, updated_at, pinned, tags, params, *rest = row
    return Conversation(
        *(conversation_id, owner_id, title, version, created_at, updated_at, bool(pinned)),
        *(tuple(json.loads(tags)), load_json(params), *rest),
    )


def find_conversation(db: Database, user_id: UserId, conversation_id: ConversationId) -> Conversation | None:
    """Return the user's conversation, a deleted one too; None if there is none."""
    sql = f"SELECT {CONVERSATION_COLUMNS} FROM conversations c WHERE c.id = ? AND c.owner_id = ?"
    row = db.execute(sql, (conversation_id, user_id)).fetchone()
    return None if row is None else conversation_from_row(row)


def require_conversation(
    db: Database, user_id: UserId, conversation_id: ConversationId, *, expected_version: int | None = None
) -> Conversation:
    """Return the user's conversation.

    Raises:
        NotFoundError: There is none, it is another user's, or it is deleted.
        ConflictError: It no longer stands at `expected_version`.
    """
    conversation = find_conversation(db, user_id, conversation_id)
    if conversation is None:
        raise NotFoundError(f"There is no conversation {conversation_id}.")
    if conversation.deleted_at is not None:
        raise NotFoundError(f"The conversation {conversation_id} was deleted; restore it first.")
    if expected_version is not None and expected_version != conversation.version:
        raise ConflictError(
            f"The conversation {conversation_id} is at version {conversation.version}, not {expected_version}: read it again.",
            conversation.version,
        )
    return conversation


def bump(db: Database, conversation: Conversation) -> Conversation:
    """Raise the version by one and return the conversation as it is now."""
    return bump_known(db, conversation.owner_id, conversation.id)


def bump_known(db: Database, owner_id: UserId, conversation_id: ConversationId) -> Conversation:
    """As `bump`, of a conversation that is there, a deleted one too."""
    db.execute("UPDATE conversations SET version = version + 1, updated_at = ? WHERE id = ?", (now(), conversation_id))
    changed = find_conversation(db, owner_id, conversation_id)
    assert changed is not None
    return changed


def load_nodes(db: Database, node_ids: Iterable[NodeId], conversation_id: ConversationId | None = None) -> tuple[Node, ...]:
    """Return the nodes in the order asked for; unknown ids are left out. Their marks are those of the conversation, if any."""
    wanted = list(node_ids)
    sql = (
        f"SELECT {NODE_COLUMNS}, m.kept_at IS NOT NULL FROM nodes n"
        " LEFT JOIN conversation_nodes m ON m.node_id = n.id AND m.conversation_id = ?"
        " WHERE n.id IN (SELECT value FROM json_each(?))"
    )
    found = {row[0]: node_from_row(row) for row in db.execute(sql, (conversation_id, json.dumps(wanted)))}
    return tuple(found[node_id] for node_id in wanted if node_id in found)


def has_children(db: Database, node_id: NodeId) -> bool:
    """Whether any conversation has a node below this one, a deleted one counted."""
    sql = "SELECT 1 FROM nodes n JOIN conversation_nodes m ON m.node_id = n.id WHERE n.parent_id = ? LIMIT 1"
    return db.execute(sql, (node_id,)).fetchone() is not None


def load_choices(db: Database, conversation_id: ConversationId) -> dict[NodeId | None, NodeId]:
    rows = db.execute("SELECT parent_id, child_id FROM node_choice WHERE conversation_id = ?", (conversation_id,))
    return {parent_id or None: child_id for parent_id, child_id in rows}


def load_path(db: Database, conversation_id: ConversationId, leaf_id: NodeId | None) -> Tree[Link]:
    """Read of the tree of a conversation the path to a node (None: no node) and what is chosen along it and below it.

    Costs as much as the path is long. Other children are not in it; the path and its parents are those of the whole tree: of a
    cycle all is above each of its nodes.
    """
    rows = db.execute(
        "WITH RECURSIVE above (id, parent_id, created_at, deleted_at) AS ("
        " SELECT n.id, n.parent_id, n.created_at, m.deleted_at FROM nodes n"
        " JOIN conversation_nodes m ON m.node_id = n.id AND m.conversation_id = :conversation WHERE n.id = :leaf"
        " UNION"  # not ALL: a cycle ends where it began
        " SELECT n.id, n.parent_id, n.created_at, m.deleted_at FROM above JOIN nodes n ON n.id = above.parent_id"
        " JOIN conversation_nodes m ON m.node_id = n.id AND m.conversation_id = :conversation"
        ") SELECT * FROM above",
        {"conversation": conversation_id, "leaf": leaf_id},
    ).fetchall()
    chosen = db.execute(
        "SELECT parent_id, child_id FROM node_choice WHERE conversation_id = ?"
        " AND parent_id IN (SELECT value FROM json_each(?))",
        (conversation_id, json.dumps([ROOT, *(row[0] for row in rows)])),
    )
    choices = {parent_id or None: child_id for parent_id, child_id in chosen}
    deleted = frozenset(row[0] for row in rows if row[3] is not None)
    return build_tree([Link(*row[:3]) for row in rows], choices, deleted)


def load_shape(db: Database, conversation_id: ConversationId) -> Tree[Link]:
    """Read the tree of a conversation without its texts."""
    rows = db.execute(
        "SELECT n.id, n.parent_id, n.created_at, m.deleted_at FROM conversation_nodes m JOIN nodes n ON n.id = m.node_id"
        " WHERE m.conversation_id = ?",
        (conversation_id,),
    ).fetchall()
    deleted = frozenset(row[0] for row in rows if row[3] is not None)
    return build_tree([Link(*row[:3]) for row in rows], load_choices(db, conversation_id), deleted)


def load_tree(db: Database, conversation_id: ConversationId) -> Tree[Node]:
    """Read the tree of a conversation, texts and all."""
    rows = db.execute(
        f"SELECT {NODE_COLUMNS}, m.kept_at IS NOT NULL, m.deleted_at FROM conversation_nodes m JOIN nodes n ON n.id = m.node_id"
        " WHERE m.conversation_id = ?",
        (conversation_id,),
    ).fetchall()
    deleted = frozenset(row[0] for row in rows if row[-1] is not None)
    return build_tree([node_from_row(row[:-1]) for row in rows], load_choices(db, conversation_id), deleted)


def point_at(db: Database, conversation_id: ConversationId, node_ids: Iterable[NodeId]) -> None:
    db.conn.executemany(
        "INSERT INTO conversation_nodes (conversation_id, node_id) VALUES (?, ?)"
        " ON CONFLICT (conversation_id, node_id) DO UPDATE SET deleted_at = NULL",
        [(conversation_id, node_id) for node_id in node_ids],
    )


def save_choices(db: Database, conversation_id: ConversationId, choices: dict[NodeId | None, NodeId]) -> None:
    db.conn.executemany(
        "INSERT OR REPLACE INTO node_choice (conversation_id, parent_id, child_id) VALUES (?, ?, ?)",
        [(conversation_id, parent_id or ROOT, child_id) for parent_id, child_id in choices.items()],
    )


def show(
    db: Database, conversation_id: ConversationId, tree: Tree[Any], node_id: NodeId | None, below: Sequence[NodeId] = ()
) -> dict[NodeId | None, NodeId]:
    """Choose every node on the path to `node_id` (None: no path), and below it a chain of nodes the tree does not know yet.

    Returns:
        The choices that were not stored like this before.
    """
    path = () if node_id is None else tree.path(node_id)
    wanted: dict[NodeId | None, NodeId] = {tree.parents[step]: step for step in path}
    for step in below:
        wanted[node_id] = step
        node_id = step
    changed = {parent_id: step for parent_id, step in wanted.items() if tree.choices.get(parent_id) != step}
    save_choices(db, conversation_id, changed)
    return changed
