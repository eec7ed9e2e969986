"""ChatGPT's export: `conversations.json`, a list of conversations, each a `mapping` of nodes with parents and children.

    {"title", "create_time", "mapping": {id: {"id", "parent", "children", "message": null | {
        "author": {"role", "name"}, "content": {"content_type", "parts" | "text" | ...}, "create_time", "status", "metadata"}}},
     "current_node"}

Roots without a message, hidden system messages and messages without text hold nothing: what hangs below them moves up.
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
    as_text,
    to_seconds,
)
from chatpage.store.records import ConversationTree, Node, NodeStatus, Role

NAME = "chatgpt"
_AFTER_LISTED = 10**9  # children the parent does not list come after those it does


def is_ours(record: Mapping[str, Any]) -> bool:
    return "mapping" in record


def read(record: Mapping[str, Any]) -> Draft:
    """Make a draft.

    Raises:
        BadRecordError: There is no mapping, or it has too many messages.
    """
    mapping = record.get("mapping")
    if not isinstance(mapping, dict):
        raise BadRecordError("has no mapping of messages")
    draft = Draft(
        format=NAME,
        source_id=as_key(record.get("conversation_id")) or as_key(record.get("id")),
        title=as_text(record.get("title")),
        created_at=as_moment(record.get("create_time")),
        updated_at=as_moment(record.get("update_time")),
    )
    listed = {
        child: (parent, place)
        for parent, entry in mapping.items()
        for place, child in enumerate(as_list(as_map(entry).get("children")))
        if isinstance(child, str)
    }
    for index, (key, entry) in enumerate(mapping.items()):
        if not isinstance(entry, dict):
            draft.problems.append(f"message {key}: it is not an object")
        parent, place = listed.get(key, (None, _AFTER_LISTED + index))
        own_parent = as_map(entry).get("parent")
        # The node's own word counts; the lists are asked when it names nobody, or somebody who is not there.
        parent_key = own_parent if isinstance(own_parent, str) and own_parent in mapping else parent or as_key(own_parent)
        draft.add(_read_node(draft, key, parent_key, place, as_map(as_map(entry).get("message"))))
    draft.current = as_key(record.get("current_node"))
    return draft


def write(opened: ConversationTree) -> dict[str, Any]:
    """Return the record of a conversation."""
    conversation, tree = opened.conversation, opened.tree
    root = f"root-{conversation.id}"
    mapping: dict[str, Any] = {root: {"id": root, "message": None, "parent": None, "children": tree.children.get(None, ())}}
    for node in tree.in_order():
        mapping[node.id] = {
            "id": node.id,
            "message": _write_message(node),
            "parent": tree.parents[node.id] or root,
            "children": tree.children.get(node.id, ()),
        }
    return {
        "title": conversation.title,
        "create_time": to_seconds(conversation.created_at),
        "update_time": to_seconds(conversation.updated_at),
        "mapping": mapping,
        "current_node": tree.active_leaf() or root,
        "conversation_id": conversation.id,
        "id": conversation.id,
    }


def _read_node(draft: Draft, key: str, parent_key: str | None, order: int, message: Mapping[str, Any]) -> DraftNode:
    author, metadata = as_map(message.get("author")), as_map(message.get("metadata"))
    role_name = as_text(author.get("role"))
    role = {role.value: role for role in Role}.get(role_name)
    text = _text_of(draft, key, as_map(message.get("content"))) if message else ""
    is_hidden = metadata.get("is_visually_hidden_from_conversation") is True
    if message and (role is None or is_hidden):
        draft.problems.append(f"message {key}: " + ("it is hidden" if is_hidden else f"its role {role_name[:40]!r} is unknown"))
    is_done = message.get("status") in (None, "finished_successfully", "finished_partial_completion")
    details = as_map(metadata.get("finish_details"))
    extra = {"name": as_name(author.get("name")), "recipient": as_name(message.get("recipient"))}
    return DraftNode(
        key=key,
        parent_key=parent_key,
        order=order,
        role=role or Role.SYSTEM,
        text=text,
        is_kept=bool(text) and role is not None and not is_hidden,
        created_at=as_moment(message.get("create_time")),
        status=NodeStatus.COMPLETE if is_done else NodeStatus.INTERRUPTED,
        finish_reason={"stop": "stop", "max_tokens": "length", "interrupted": "abort"}.get(as_text(details.get("type"))),
        model=as_name(metadata.get("model_slug")),
        extra={name: value for name, value in extra.items() if value and value != "all"},
    )


def _text_of(draft: Draft, key: str, content: Mapping[str, Any]) -> str:
    """Return the text of any of the content types: parts, code, output of tools, thoughts."""
    parts = [_text_of_part(draft, key, part) for part in as_list(content.get("parts"))]
    thoughts = [as_text(as_map(thought).get("content")) for thought in as_list(content.get("thoughts"))]
    single = [as_text(content.get(name)) for name in ("text", "result", "content")]
    return "\n".join(piece for piece in (*parts, *thoughts, *single) if piece)


def _text_of_part(draft: Draft, key: str, part: object) -> str:
    if isinstance(part, str):
        return part
    text = as_text(as_map(part).get("text"))
    if not text:
        kind = as_text(as_map(part).get("content_type"))[:40] or type(part).__name__
        draft.problems.append(f"message {key}: a part that is not text ({kind})")
    return text


def _write_message(node: Node) -> dict[str, Any]:
    is_complete = node.status is NodeStatus.COMPLETE
    reason = {"stop": "stop", "length": "max_tokens", "abort": "interrupted"}.get(node.finish_reason or "")
    return {
        "id": node.id,
        "author": {"role": str(node.role), "name": node.extra.get("name"), "metadata": {}},
        "create_time": to_seconds(node.created_at),
        "update_time": None,
        "content": {"content_type": "text", "parts": [node.text]},
        "status": "finished_successfully" if is_complete else "in_progress",
        "end_turn": is_complete,
        "weight": 1.0,
        "metadata": {
            **({"model_slug": node.model} if node.model else {}),
            **({"finish_details": {"type": reason}} if reason else {}),
        },
        "recipient": node.extra.get("recipient", "all"),
    }
