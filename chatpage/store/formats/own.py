"""Our own format: everything a conversation is, token ids included, so that export and import lose nothing.

    {"chatpage": 1, "id", "title", "created_at", "updated_at", "pinned", "tags", "params", "choices": [[parent, child], ...],
     "nodes": [{"id", "parent_id", "role", "text", "token_ids", "status", "created_at", ...}, ...]}

Times are microseconds since 1970. Nodes may stand in any order.
"""

from collections.abc import Mapping
from typing import Any

from chatpage.store.formats.draft import (
    MAX_MOMENT,
    BadRecordError,
    Draft,
    DraftNode,
    as_key,
    as_list,
    as_map,
    as_name,
    as_tags,
    as_text,
)
from chatpage.store.records import ConversationTree, Node, NodeStatus, Role

NAME = "chatpage"
VERSION = 1


def is_ours(record: Mapping[str, Any]) -> bool:
    return "chatpage" in record


def read(record: Mapping[str, Any]) -> Draft:
    """Make a draft.

    Raises:
        BadRecordError: The version is unknown, there are no nodes, or too many.
    """
    if record.get("chatpage") != VERSION:
        raise BadRecordError(f"is of version {str(record.get('chatpage'))[:20]}; this chatpage knows version {VERSION}")
    nodes = record.get("nodes")
    if not isinstance(nodes, list):
        raise BadRecordError("has no list of nodes")
    draft = Draft(
        format=NAME,
        keeps_ids=True,
        source_id=as_key(record.get("id")),
        title=as_text(record.get("title")),
        created_at=_moment(record.get("created_at")),
        updated_at=_moment(record.get("updated_at")),
        is_pinned=record.get("pinned") is True,
        tags=as_tags(record.get("tags")),
        params=as_map(record.get("params")),
    )
    for index, node in enumerate(nodes):
        if problem := _read_node(draft, as_map(node)):
            draft.problems.append(f"node {index + 1}: {problem}")
    pairs = [pair for pair in as_list(record.get("choices")) if isinstance(pair, list) and len(pair) == 2]
    draft.shown = tuple(pair[1] for pair in pairs if isinstance(pair[1], str))
    return draft


def write(opened: ConversationTree) -> dict[str, Any]:
    """Return the record of a conversation."""
    conversation, tree = opened.conversation, opened.tree
    shown = ((parent, tree.chosen(parent)) for parent in (None, *tree.nodes))
    return {
        "chatpage": VERSION,
        "id": conversation.id,
        "title": conversation.title,
        "created_at": conversation.created_at,
        "updated_at": conversation.updated_at,
        "pinned": conversation.is_pinned,
        "tags": list(conversation.tags),
        "params": dict(conversation.params),
        "choices": [[parent, child] for parent, child in shown if child is not None],
        "nodes": [_write_node(node, tree.parents[node.id]) for node in tree.in_order()],
    }


def _read_node(draft: Draft, node: Mapping[str, Any]) -> str:
    """Add a node to the draft; return what is wrong with it, or ""."""
    key, text = as_key(node.get("id")), as_text(node.get("text"))
    role = {role.value: role for role in Role}.get(as_text(node.get("role")))
    status = {status.value: status for status in NodeStatus}.get(as_text(node.get("status")))
    token_ids = node.get("token_ids", [])
    if key is None or role is None or status is None or not isinstance(node.get("text"), str):
        return "its id, role, status or text is missing or unknown"
    if not isinstance(token_ids, list) or not all(type(token) is int and 0 <= token < 2**31 for token in token_ids):
        return "its token ids are not whole numbers between 0 and 2**31 - 1"
    created_at = _moment(node.get("created_at"))
    draft.add(
        DraftNode(
            key=key,
            parent_key=as_key(node.get("parent_id")),
            order=created_at or 0,
            role=role,
            text=text,
            created_at=created_at,
            # Nothing streams into a file.
            status=NodeStatus.INTERRUPTED if status is NodeStatus.STREAMING else status,
            finish_reason=as_name(node.get("finish_reason")),
            model=as_name(node.get("model")),
            token_ids=token_ids,
            params=as_map(node.get("params")),
            usage=as_map(node.get("usage")),
            timing=as_map(node.get("timing")),
            extra=as_map(node.get("extra")),
            detail=as_text(node.get("detail")) or None,
            is_marked=node.get("kept") is True,
        )
    )
    return ""


def _write_node(node: Node, parent_id: str | None) -> dict[str, Any]:
    return {
        "id": node.id,
        "parent_id": parent_id,
        "role": str(node.role),
        "text": node.text,
        "token_ids": list(node.token_ids),
        "status": str(node.status),
        "finish_reason": node.finish_reason,
        "model": node.model,
        "params": dict(node.params),
        "usage": dict(node.usage),
        "timing": dict(node.timing),
        "extra": dict(node.extra),
        "detail": node.detail,
        "kept": node.is_kept,
        "created_at": node.created_at,
    }


def _moment(value: object) -> int | None:
    return value if type(value) is int and 0 < value < MAX_MOMENT else None
