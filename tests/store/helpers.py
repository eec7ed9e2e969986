"""Short ways to say what the tests of the store say often."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from chatpage.store import (
    LOCAL_USER,
    Conversation,
    ConversationId,
    ImportReport,
    NewNode,
    NodeId,
    NodeStatus,
    Role,
    Store,
    Tree,
    import_file,
)
from chatpage.store.records import Node


def user(text: str) -> NewNode:
    return NewNode(role=Role.USER, text=text)


def assistant(text: str, *, token_ids: Sequence[int] = (), status: NodeStatus = NodeStatus.COMPLETE) -> NewNode:
    return NewNode(role=Role.ASSISTANT, text=text, token_ids=token_ids, status=status)


def add(store: Store, conversation: Conversation, parent_id: NodeId | None, new: NewNode | str) -> NodeId:
    """Add one node, a user's if only its text is given, and return its id."""
    node = user(new) if isinstance(new, str) else new
    return store.add_node(LOCAL_USER, conversation.id, parent_id, node).nodes[0].id


def tree_of(store: Store, conversation_id: ConversationId) -> Tree[Node]:
    return store.get_tree(LOCAL_USER, conversation_id).tree


def shown(store: Store, conversation_id: ConversationId) -> list[str]:
    """Return the texts of the shown path."""
    return [node.text for node in tree_of(store, conversation_id).active_path()]


def outline(tree: Tree[Node]) -> list[Any]:
    """Return the tree as nested [role, text, [children]] lists, siblings in order: what must survive, without the ids."""
    outlines: dict[NodeId | None, list[Any]] = {None: []}
    for node in tree.in_order():
        outlines[node.id] = []
        outlines[tree.parents[node.id]].append([str(node.role), node.text, outlines[node.id]])
    return outlines[None]


def import_json(store: Store, folder: Path, content: object, *, format: str | None = None) -> ImportReport:
    """Write `content` to a file, as JSON unless it is bytes, and import it."""
    path = folder / "import.json"
    path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    return import_file(store, LOCAL_USER, path, format=format)
