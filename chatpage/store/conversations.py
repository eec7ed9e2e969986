"""Conversations: make, find, rename, pin, tag, fork, delete, restore.

Invariant: a conversation points at nodes and never copies one. Deleting hides; only a purge removes.

    conversation A   -> n1 -> n2 -> n3            fork at n2:   B -> n1, n2
                               +--> n4            no node is new, and what A does next is not seen in B
"""

from collections.abc import Iterable

from sqlite_utils import Database

from chatpage.errors import InvalidRequestError, NotFoundError
from chatpage.store.records import (
    NO_JSON,
    Conversation,
    ConversationId,
    ConversationTree,
    Json,
    Node,
    NodeId,
    PresetId,
    UserId,
    clean_text,
    new_id,
    now,
)
from chatpage.store.rows import (
    CONVERSATION_COLUMNS,
    bump,
    conversation_from_row,
    dump_json,
    find_conversation,
    load_nodes,
    load_path,
    load_shape,
    load_tree,
    point_at,
    require_conversation,
    save_choices,
)

MAX_TITLE = 500
MAX_TAG = 100
MAX_TAGS = 64


def create_conversation(
    db: Database,
    user_id: UserId,
    *,
    title: str = "",
    params: Json = NO_JSON,
    preset_id: PresetId | None = None,
    tags: Iterable[str] = (),
    is_pinned: bool = False,
) -> Conversation:
    """Make an empty conversation.

    Raises:
        NotFoundError: There is no such user or preset.
        InvalidRequestError: The title or a tag is too long, or a value cannot be stored.
    """
    conversation_id = ConversationId(new_id())
    insert_conversation(db, user_id, conversation_id, title=title, params=params, preset_id=preset_id)
    db.execute("UPDATE conversations SET pinned = ? WHERE id = ?", (int(is_pinned), conversation_id))
    set_tags(db, conversation_id, tags)
    return require_conversation(db, user_id, conversation_id)


def insert_conversation(
    db: Database,
    user_id: UserId,
    conversation_id: ConversationId,
    *,
    title: str,
    params: Json = NO_JSON,
    preset_id: PresetId | None = None,
    forked_from: ConversationId | None = None,
    source: str | None = None,
    created_at: int | None = None,
    updated_at: int | None = None,
) -> None:
    if db.execute("SELECT 1 FROM users WHERE id = ?", (user_id,)).fetchone() is None:
        raise NotFoundError(f"There is no user {user_id}.")
    _check_preset(db, user_id, preset_id)
    created = created_at or now()
    db.execute(
        "INSERT INTO conversations (id, owner_id, title, version, created_at, updated_at, pinned, params, preset_id,"
        " forked_from, source) VALUES (?, ?, ?, 1, ?, ?, 0, ?, ?, ?, ?)",
        (
            *(conversation_id, user_id, _checked_title(title), created, updated_at or created),
            *(dump_json(params), preset_id, forked_from, source),
        ),
    )


def get_conversation(db: Database, user_id: UserId, conversation_id: ConversationId) -> Conversation:
    """Return one conversation.

    Raises:
        NotFoundError: There is none, it is another user's, or it is deleted.
    """
    return require_conversation(db, user_id, conversation_id)


def list_conversations(
    db: Database, user_id: UserId, *, tag: str | None = None, deleted: bool = False, limit: int = 100, offset: int = 0
) -> tuple[Conversation, ...]:
    """Return the user's conversations, pinned ones first, then by the time of their last change, newest first.

    Args:
        tag: Only those that have this tag.
        deleted: The deleted ones instead of the others.
        limit: Most to return.
        offset: How many to pass over.
    """
    rows = db.execute(
        f"SELECT {CONVERSATION_COLUMNS} FROM conversations c WHERE c.owner_id = :user"
        f" AND c.deleted_at IS {'NOT NULL' if deleted else 'NULL'}"
        " AND (:tag IS NULL OR EXISTS (SELECT 1 FROM tags t WHERE t.conversation_id = c.id AND t.name = :tag))"
        " ORDER BY c.pinned DESC, c.updated_at DESC, c.id LIMIT :limit OFFSET :offset",
        {"user": user_id, "tag": tag, "limit": limit, "offset": offset},
    )
    return tuple(conversation_from_row(row) for row in rows)


def list_tags(db: Database, user_id: UserId) -> tuple[tuple[str, int], ...]:
    """Return the user's tags with the number of conversations that have each, in alphabetical order."""
    return tuple(
        db.execute(
            "SELECT t.name, count(*) FROM tags t JOIN conversations c ON c.id = t.conversation_id"
            " WHERE c.owner_id = ? AND c.deleted_at IS NULL GROUP BY t.name ORDER BY t.name",
            (user_id,),
        )
    )


def update_conversation(
    db: Database,
    user_id: UserId,
    conversation_id: ConversationId,
    *,
    title: str | None = None,
    is_pinned: bool | None = None,
    tags: Iterable[str] | None = None,
    params: Json | None = None,
    preset_id: PresetId | None = None,
    without_preset: bool = False,
    expected_version: int | None = None,
) -> Conversation:
    """Change what is given (None: leave as it is); `without_preset` takes the preset away.

    Raises:
        NotFoundError: No such conversation or preset.
        ConflictError: The conversation is not at `expected_version`.
        InvalidRequestError: A value is out of bounds.
    """
    if preset_id is not None and without_preset:
        raise InvalidRequestError("A preset was given and asked to be taken away: choose one of the two.")
    conversation = require_conversation(db, user_id, conversation_id, expected_version=expected_version)
    _check_preset(db, user_id, preset_id)
    values = {
        "title": None if title is None else _checked_title(title),
        "pinned": None if is_pinned is None else int(is_pinned),
        "params": None if params is None else dump_json(params),
        "preset_id": preset_id,
    }
    for column, value in values.items():
        if value is not None:
            db.execute(f"UPDATE conversations SET {column} = ? WHERE id = ?", (value, conversation_id))
    if without_preset:
        db.execute("UPDATE conversations SET preset_id = NULL WHERE id = ?", (conversation_id,))
    if tags is not None:
        set_tags(db, conversation_id, tags)
    return bump(db, conversation)


def delete_conversation(
    db: Database, user_id: UserId, conversation_id: ConversationId, *, expected_version: int | None = None
) -> Conversation:
    """Hide a conversation; `restore_conversation` undoes it until a purge.

    Raises:
        NotFoundError: No such conversation.
        ConflictError: The conversation is not at `expected_version`.
    """
    conversation = require_conversation(db, user_id, conversation_id, expected_version=expected_version)
    db.execute("UPDATE conversations SET deleted_at = ? WHERE id = ?", (now(), conversation_id))
    return bump(db, conversation)


def restore_conversation(db: Database, user_id: UserId, conversation_id: ConversationId) -> Conversation:
    """Bring a deleted conversation back; one that is not deleted is left as it is.

    Raises:
        NotFoundError: No such conversation, or it is purged.
    """
    conversation = find_conversation(db, user_id, conversation_id)
    if conversation is None:
        raise NotFoundError(f"There is no conversation {conversation_id}; it may have been purged.")
    if conversation.deleted_at is None:
        return conversation
    db.execute("UPDATE conversations SET deleted_at = NULL WHERE id = ?", (conversation_id,))
    return bump(db, conversation)


def fork_conversation(
    db: Database,
    user_id: UserId,
    conversation_id: ConversationId,
    *,
    node_id: NodeId | None = None,
    title: str | None = None,
) -> Conversation:
    """Make a conversation that points at the same nodes: the path to `node_id`, or (None) the whole visible tree.

    Raises:
        NotFoundError: No such conversation, or it has no such message.
        InvalidRequestError: The title is too long.
    """
    original = require_conversation(db, user_id, conversation_id)
    tree = load_shape(db, conversation_id)
    kept = tuple(tree.nodes) if node_id is None else tree.path(node_id)
    fork_id = ConversationId(new_id())
    insert_conversation(
        db,
        user_id,
        fork_id,
        title=original.title if title is None else title,
        params=original.params,
        preset_id=original.preset_id,
        forked_from=conversation_id,
    )
    point_at(db, fork_id, kept)
    db.execute(
        "UPDATE conversation_nodes AS m SET kept_at = o.kept_at FROM conversation_nodes AS o"
        " WHERE m.conversation_id = ? AND o.conversation_id = ? AND o.node_id = m.node_id",
        (fork_id, conversation_id),
    )
    shown = {parent: child for parent in (None, *kept) if (child := tree.chosen(parent)) is not None}
    save_choices(db, fork_id, shown if node_id is None else {tree.parents[step]: step for step in kept})
    return require_conversation(db, user_id, fork_id)


def get_tree(db: Database, user_id: UserId, conversation_id: ConversationId) -> ConversationTree:
    """Return a conversation with all its visible nodes.

    Raises:
        NotFoundError: No such conversation.
    """
    return ConversationTree(require_conversation(db, user_id, conversation_id), load_tree(db, conversation_id))


def get_path(
    db: Database, user_id: UserId, conversation_id: ConversationId, *, leaf_id: NodeId | None = None
) -> tuple[Node, ...]:
    """Return the nodes from the root to `leaf_id`, or (None) those that are shown now, root first.

    Raises:
        NotFoundError: No such conversation, or it has no such message.
    """
    require_conversation(db, user_id, conversation_id)
    tree = load_shape(db, conversation_id) if leaf_id is None else load_path(db, conversation_id, leaf_id)
    leaf = leaf_id or tree.active_leaf()
    return () if leaf is None else load_nodes(db, tree.path(leaf), conversation_id)


def set_tags(db: Database, conversation_id: ConversationId, tags: Iterable[str]) -> None:
    wanted = sorted({clean_text(tag).strip() for tag in tags})
    if len(wanted) > MAX_TAGS or any(not 0 < len(tag) <= MAX_TAG for tag in wanted):
        raise InvalidRequestError(f"A conversation has at most {MAX_TAGS} tags, each 1 to {MAX_TAG} characters long.")
    db.execute("DELETE FROM tags WHERE conversation_id = ?", (conversation_id,))
    db.conn.executemany("INSERT INTO tags (conversation_id, name) VALUES (?, ?)", [(conversation_id, t) for t in wanted])


def _checked_title(title: str) -> str:
    if len(title) > MAX_TITLE:
        raise InvalidRequestError(f"The title has {len(title)} characters; at most {MAX_TITLE} are allowed.")
    return clean_text(title)


def _check_preset(db: Database, user_id: UserId, preset_id: PresetId | None) -> None:
    if preset_id is None:
        return
    if db.execute("SELECT 1 FROM presets WHERE id = ? AND owner_id = ?", (preset_id, user_id)).fetchone() is None:
        raise NotFoundError(f"There is no preset {preset_id}.")
