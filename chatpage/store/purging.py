"""What removes for good: purging what was deleted.

Invariant: a node goes only when no conversation points at it any more. The pointers are counted in `conversation_nodes`
itself; there is no counter beside it that could differ.

    A -> n1, n2, n3, n4     B -> n1, n2        purge A:  n3 and n4 go, n1 and n2 stay for B
"""

from dataclasses import dataclass

from sqlite_utils import Database

from chatpage.store.records import ConversationId, NodeId, UserId
from chatpage.store.rows import find_conversation, load_shape


@dataclass(frozen=True, slots=True)
class Purged:
    """What a purge removed for good."""

    num_conversations: int
    num_nodes: int


def purge_deleted(db: Database, *, before: int, user_id: UserId | None = None) -> Purged:
    """Remove for good what was deleted before a time.

    Args:
        before: Microseconds since 1970.
        user_id: Only what belongs to this user; None: everybody's.
    """
    owned = "(:user IS NULL OR owner_id = :user)"
    args = {"before": before, "user": user_id}
    gone = [row[0] for row in db.execute(f"SELECT id FROM conversations WHERE deleted_at < :before AND {owned}", args)]
    for conversation_id in gone:
        forget_conversation(db, conversation_id)
    thinned = db.execute(
        "SELECT DISTINCT conversation_id FROM conversation_nodes JOIN conversations c ON c.id = conversation_id"
        f" WHERE conversation_nodes.deleted_at < :before AND {owned}",
        args,
    ).fetchall()
    for (conversation_id,) in thinned:
        _drop_hidden(db, conversation_id, before)
    return Purged(len(gone), drop_unreferenced_nodes(db))


def discard_empty_conversation(db: Database, user_id: UserId, conversation_id: ConversationId) -> None:
    """Remove for good a conversation that was made for a message which then did not come; one with messages stays."""
    conversation = find_conversation(db, user_id, conversation_id)
    has_nodes = db.execute("SELECT 1 FROM conversation_nodes WHERE conversation_id = ?", (conversation_id,)).fetchone()
    if conversation is not None and has_nodes is None:
        forget_conversation(db, conversation_id)


def forget_conversation(db: Database, conversation_id: ConversationId) -> None:
    """Remove a conversation and its pointers, not its nodes."""
    db.execute("DELETE FROM run_samples WHERE run_id IN (SELECT id FROM runs WHERE conversation_id = ?)", (conversation_id,))
    for table in ("runs", "node_choice", "tags", "conversation_nodes"):
        db.execute(f"DELETE FROM {table} WHERE conversation_id = ?", (conversation_id,))
    db.execute("DELETE FROM conversations WHERE id = ?", (conversation_id,))


def drop_unreferenced_nodes(db: Database, node_id: NodeId | None = None) -> int:
    """Remove the nodes no conversation points at, or (`node_id`) this one if none does; return how many went."""
    return db.execute(
        "DELETE FROM nodes WHERE (:node IS NULL OR id = :node)"
        " AND NOT EXISTS (SELECT 1 FROM conversation_nodes m WHERE m.node_id = nodes.id)",
        {"node": node_id},
    ).rowcount


def _drop_hidden(db: Database, conversation_id: ConversationId, before: int) -> None:
    """Drop the pointers below nodes deleted before a time; what was deleted later stays hidden and can come back."""
    rows = db.execute(
        "SELECT node_id FROM conversation_nodes WHERE conversation_id = ? AND deleted_at < ?", (conversation_id, before)
    ).fetchall()
    shape = load_shape(db, conversation_id)
    children: dict[NodeId | None, list[NodeId]] = {}
    for node_id, parent_id in shape.parents.items():
        children.setdefault(parent_id, []).append(node_id)
    doomed: set[NodeId] = set()
    stack = [row[0] for row in rows]
    while stack:
        node_id = stack.pop()
        doomed.add(node_id)
        stack.extend(children.get(node_id, ()))
    db.conn.executemany(
        "DELETE FROM conversation_nodes WHERE conversation_id = ? AND node_id = ?", [(conversation_id, n) for n in doomed]
    )
