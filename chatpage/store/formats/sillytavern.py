"""SillyTavern's chats: JSON Lines, a header and then one message a line; alternatives of a message are its swipes.

    {"user_name", "character_name", "create_date", "chat_metadata"}
    {"name", "is_user", "is_system", "send_date", "mes", "swipes": [text, ...], "swipe_id", "extra": {"model"}}

Swipes are siblings, and the next line hangs below the chosen one. So the format holds one path and the siblings beside it;
what hangs below a sibling that is not shown has no place in it.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from chatpage.store.formats.draft import Draft, DraftNode, as_key, as_list, as_map, as_moment, as_name, as_text, to_seconds
from chatpage.store.formats.reading import Record
from chatpage.store.records import ConversationTree, Node, Role

NAME = "sillytavern"


def is_ours(record: Mapping[str, Any]) -> bool:
    return "chat_metadata" in record or ("user_name" in record and "character_name" in record) or "mes" in record


def read_lines(records: Iterable[Record]) -> Draft:
    """Make one draft of a whole file."""
    draft = Draft(format=NAME)
    parent_key: str | None = None
    for record in records:
        line = record.value
        if line is None:
            draft.problems.append(f"line {record.number}: {record.problem}")
        elif "mes" not in line:
            _read_header(draft, line)
        elif line.get("is_system") is True:
            draft.problems.append(f"line {record.number}: it is hidden")
        elif texts := _swipes(line):
            chosen = _chosen_swipe(line, len(texts))
            for swipe, text in enumerate(texts):
                draft.add(_read_node(line, f"{record.number}.{swipe}", parent_key, swipe, text))
            parent_key = f"{record.number}.{chosen}"
        else:
            draft.problems.append(f"line {record.number}: it is empty")
    draft.current = parent_key
    return draft


def write(opened: ConversationTree) -> Iterator[dict[str, Any]]:
    """Yield the lines of a conversation."""
    conversation, tree = opened.conversation, opened.tree
    yield {
        "user_name": "User",
        "character_name": conversation.title or "Assistant",
        "create_date": conversation.created_at // 1000,
        "chat_metadata": {"integrity": conversation.id},
    }
    for node in tree.active_path():
        siblings = [tree.nodes[sibling] for sibling in tree.siblings(node.id)]
        swipes = [sibling for sibling in siblings if sibling.role is node.role]
        yield _write_message(node, swipes)


def _read_header(draft: Draft, line: Mapping[str, Any]) -> None:
    character = as_text(line.get("character_name"))
    metadata = as_map(line.get("chat_metadata"))
    draft.title = draft.title or character[:200]
    draft.created_at = draft.created_at or as_moment(line.get("create_date"))
    # A chat file grows; what stays is its mark, or the time it was begun.
    identity = as_name(metadata.get("integrity")) or as_key(line.get("create_date"))
    if identity is not None and draft.source_id is None:
        draft.source_id = f"{character[:200]} {identity}"


def _swipes(line: Mapping[str, Any]) -> list[str]:
    """Return the texts of a message and its alternatives, empty ones left out; `mes` stands for the chosen one."""
    swipes = [as_text(swipe) for swipe in as_list(line.get("swipes"))]
    message = as_text(line.get("mes"))
    place = line.get("swipe_id")
    if message and not swipes:
        return [message]
    if message and isinstance(place, int) and 0 <= place < len(swipes):
        swipes[place] = message  # an edit of the message is not always written back to its swipe
    return [swipe for swipe in swipes if swipe]


def _chosen_swipe(line: Mapping[str, Any], count: int) -> int:
    """Return which of the kept swipes is shown."""
    place = line.get("swipe_id")
    if not isinstance(place, int) or isinstance(place, bool) or place < 0:
        return 0
    num_empty = sum(1 for swipe in as_list(line.get("swipes"))[:place] if not as_text(swipe))
    return min(max(0, place - num_empty), count - 1)


def _read_node(line: Mapping[str, Any], key: str, parent_key: str | None, swipe: int, text: str) -> DraftNode:
    extra = as_map(line.get("extra"))
    infos = as_list(line.get("swipe_info"))
    info = as_map(infos[swipe]) if swipe < len(infos) else {}
    is_narrator = extra.get("type") == "narrator"
    speaker = Role.USER if line.get("is_user") is True else Role.ASSISTANT
    name = as_name(line.get("name"))
    return DraftNode(
        key=key,
        parent_key=parent_key,
        order=swipe,
        role=Role.SYSTEM if is_narrator else speaker,
        text=text,
        created_at=as_moment(info.get("send_date")) or as_moment(line.get("send_date")),
        model=as_name(as_map(info.get("extra")).get("model")) or as_name(extra.get("model")),
        extra={"name": name} if name else {},
    )


def _write_message(node: Node, swipes: list[Node]) -> dict[str, Any]:
    names = {Role.USER: "User", Role.ASSISTANT: "Assistant", Role.SYSTEM: "System", Role.TOOL: "Tool"}
    extra: dict[str, Any] = {"model": node.model} if node.model else {}
    if node.role is Role.SYSTEM:
        extra["type"] = "narrator"
    line: dict[str, Any] = {
        "name": node.extra.get("name", names[node.role]),
        "is_user": node.role is Role.USER,
        "is_system": False,
        "send_date": round(to_seconds(node.created_at) * 1000),
        "mes": node.text,
        "extra": extra,
    }
    if len(swipes) > 1:
        line["swipes"] = [swipe.text for swipe in swipes]
        line["swipe_id"] = [swipe.id for swipe in swipes].index(node.id)
        line["swipe_info"] = [
            {"send_date": round(to_seconds(s.created_at) * 1000), "extra": {"model": s.model} if s.model else {}}
            for s in swipes
        ]
    return line
