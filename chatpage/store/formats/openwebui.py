"""Open WebUI's export: a list of chats, or one, whose `history.messages` name their parents and children.

{"id", "title", "created_at", "pinned", "meta": {"tags"}, "chat": {"title", "history": {"currentId", "messages": {
    id: {"id", "parentId", "childrenIds", "role", "content", "timestamp", "model", "done", "error"}}}}}
"""

from collections.abc import Mapping
from typing import Any

from chatpage.store.formats.draft import (
    BadRecordError,
    Draft,
    DraftNode,
    as_key,
    as_list,
    as_map,
    as_moment,
    as_name,
    as_tags,
    as_text,
)
from chatpage.store.records import ConversationTree, Node, NodeStatus, Role

NAME = "openwebui"
_AFTER_LISTED = 10**9


def is_ours(record: Mapping[str, Any]) -> bool:
    return "chat" in record or "history" in record


def read(record: Mapping[str, Any]) -> Draft:
    """Make a draft.

    Raises:
        BadRecordError: There is no history of messages, or it has too many.
    """
    chat = as_map(record.get("chat")) or record
    history = as_map(chat.get("history"))
    messages = history.get("messages")
    if not isinstance(messages, dict):
        raise BadRecordError("has no history of messages")
    draft = Draft(
        format=NAME,
        source_id=as_key(record.get("id")) or as_key(chat.get("id")),
        title=as_text(record.get("title")) or as_text(chat.get("title")),
        created_at=as_moment(record.get("created_at")) or as_moment(chat.get("timestamp")),
        updated_at=as_moment(record.get("updated_at")),
        is_pinned=record.get("pinned") is True,
        tags=as_tags(as_map(record.get("meta")).get("tags")) or as_tags(chat.get("tags")),
    )
    listed = {
        child: (parent, place)
        for parent, message in messages.items()
        for place, child in enumerate(as_list(as_map(message).get("childrenIds")))
        if isinstance(child, str)
    }
    for index, (key, message) in enumerate(messages.items()):
        parent, place = listed.get(key, (None, _AFTER_LISTED + index))
        own_parent = as_map(message).get("parentId")
        parent_key = own_parent if isinstance(own_parent, str) and own_parent in messages else parent or as_key(own_parent)
        draft.add(_read_node(draft, key, parent_key, place, as_map(message)))
    draft.current = as_key(history.get("currentId"))
    return draft


def write(opened: ConversationTree) -> dict[str, Any]:
    """Return the record of a conversation."""
    conversation, tree = opened.conversation, opened.tree
    messages = {
        node.id: {
            **_write_message(node),
            "parentId": tree.parents[node.id],
            "childrenIds": list(tree.children.get(node.id, ())),
        }
        for node in tree.in_order()
    }
    return {
        "id": conversation.id,
        "title": conversation.title,
        "created_at": conversation.created_at // 1_000_000,
        "updated_at": conversation.updated_at // 1_000_000,
        "pinned": conversation.is_pinned,
        "archived": False,
        "meta": {"tags": list(conversation.tags)},
        "chat": {
            "id": conversation.id,
            "title": conversation.title,
            "models": sorted({node.model for node in tree.nodes.values() if node.model}),
            "history": {"messages": messages, "currentId": tree.active_leaf()},
            "messages": [messages[node.id] for node in tree.active_path()],
            "tags": list(conversation.tags),
            "timestamp": conversation.created_at // 1000,
        },
    }


def _read_node(draft: Draft, key: str, parent_key: str | None, order: int, message: Mapping[str, Any]) -> DraftNode:
    role = {role.value: role for role in Role}.get(as_text(message.get("role")))
    text = _text_of(message.get("content"))
    error = message.get("error")
    if role is None:
        draft.problems.append(f"message {key}: its role {as_text(message.get('role'))[:40]!r} is unknown")
    elif not text:
        draft.problems.append(f"message {key}: it is empty")
    status = NodeStatus.INTERRUPTED if message.get("done") is False else NodeStatus.COMPLETE
    return DraftNode(
        key=key,
        parent_key=parent_key,
        order=order,
        role=role or Role.SYSTEM,
        text=text,
        is_kept=bool(text) and role is not None,
        created_at=as_moment(message.get("timestamp")),
        status=NodeStatus.ERROR if error else status,
        model=as_name(message.get("model")),
    )


def _text_of(content: object) -> str:
    """Return a message's text; newer versions write a list of typed parts."""
    parts = [as_text(as_map(part).get("text")) for part in as_list(content)]
    return as_text(content) or "\n".join(part for part in parts if part)


def _write_message(node: Node) -> dict[str, Any]:
    message: dict[str, Any] = {
        "id": node.id,
        "role": str(node.role),
        "content": node.text,
        "timestamp": node.created_at // 1_000_000,
    }
    if node.role is Role.ASSISTANT:
        message |= {"model": node.model or "", "done": node.status is NodeStatus.COMPLETE}
    if node.status is NodeStatus.ERROR:
        message |= {"done": True, "error": {"content": "The reply ended with an error."}}
    return message
