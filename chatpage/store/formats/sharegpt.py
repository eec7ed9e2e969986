"""ShareGPT, the training format: turns of one conversation in a row, without branches.

    {"id", "conversations": [{"from": "human" | "gpt" | "system" | "tool", "value": text}, ...]}

Only accepted replies are written: those shown, and complete. What follows a reply that was cut off answers to a text that
would be missing, so a conversation is written up to the last accepted reply before it.
"""

from collections.abc import Mapping
from typing import Any

from chatpage.store.formats.draft import BadRecordError, Draft, DraftNode, as_map, as_text, title_from
from chatpage.store.records import ConversationTree, Node, NodeStatus, Role

NAME = "sharegpt"
_ROLES = {
    **dict.fromkeys(("human", "user"), Role.USER),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "model", "bing", "bard", "function_call"), Role.ASSISTANT),
    **dict.fromkeys(("tool", "function", "function_response", "observation"), Role.TOOL),
    "system": Role.SYSTEM,
}
_NAMES = {Role.USER: "human", Role.ASSISTANT: "gpt", Role.TOOL: "tool", Role.SYSTEM: "system"}


def is_ours(record: Mapping[str, Any]) -> bool:
    return isinstance(record.get("conversations"), list)


def read(record: Mapping[str, Any]) -> Draft:
    """Make a draft.

    Raises:
        BadRecordError: There are no turns, or too many.
    """
    turns = record.get("conversations")
    if not isinstance(turns, list):
        raise BadRecordError("has no list of turns")
    draft = Draft(format=NAME, title=as_text(record.get("title")))
    if system := as_text(record.get("system")):
        turns = [{"from": "system", "value": system}, *turns]
    parent_key: str | None = None
    for index, turn in enumerate(turns):
        role = _ROLES.get(as_text(as_map(turn).get("from")).lower())
        text = as_text(as_map(turn).get("value"))
        if role is None or not text:
            reason = "it is empty" if role is not None else f"its speaker {as_text(as_map(turn).get('from'))[:40]!r} is unknown"
            draft.problems.append(f"turn {index + 1}: {reason}")
            continue
        draft.add(DraftNode(key=str(index), parent_key=parent_key, order=0, role=role, text=text))
        parent_key = str(index)
    first_question = next((node.text for node in draft.nodes if node.role is Role.USER), "")
    draft.title = draft.title or title_from(first_question)
    return draft


def write(opened: ConversationTree) -> dict[str, Any] | None:
    """Return the record of a conversation; None if it has no accepted reply."""
    accepted: list[Node] = []
    num_written = 0
    for node in opened.tree.active_path():
        if node.role is Role.ASSISTANT and node.status is not NodeStatus.COMPLETE:
            break
        accepted.append(node)
        if node.role is Role.ASSISTANT:
            num_written = len(accepted)
    if not num_written:
        return None
    turns = [{"from": _NAMES[node.role], "value": node.text} for node in accepted[:num_written]]
    return {"id": opened.conversation.id, "title": opened.conversation.title, "conversations": turns}
