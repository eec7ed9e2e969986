"""Open WebUI's export: trees by parentId and childrenIds."""

from pathlib import Path
from typing import Any

import pytest

from chatpage.errors import ImportFileError
from chatpage.store import LOCAL_USER, NodeStatus, Store
from tests.store.helpers import import_json, outline, shown, tree_of


def message(key: str, parent: str | None, children: list[str], role: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"id": key, "parentId": parent, "childrenIds": children, "role": role, "content": content, **more}


def chat(*messages: dict[str, Any], current: str | None = None) -> dict[str, Any]:
    history = {"messages": {found["id"]: found for found in messages}, "currentId": current}
    inner = {"title": "Trees", "history": history, "timestamp": 1_700_000_000_000}
    return {
        "id": "c1",
        "title": "Trees",
        "pinned": True,
        "meta": {"tags": ["work"]},
        "created_at": 1_700_000_000,
        "chat": inner,
    }


BRANCHED = chat(
    message("q", None, ["a1", "a2"], "user", "question", timestamp=1_700_000_000),
    message("a1", "q", ["q2"], "assistant", "first", model="llama", done=True),
    message("a2", "q", [], "assistant", "second", done=False),
    message("q2", "a1", [], "user", [{"type": "text", "text": "typed"}, {"type": "image_url"}]),
    current="q2",
)


def test_tree_tags_pin_and_states_are_read(store: Store, tmp_path: Path) -> None:
    report = import_json(store, tmp_path, [BRANCHED])
    conversation = store.get_conversation(LOCAL_USER, report.conversation_ids[0])
    tree = tree_of(store, conversation.id)
    branches = [["assistant", "first", [["user", "typed", []]]], ["assistant", "second", []]]
    assert outline(tree) == [["user", "question", branches]]
    assert shown(store, conversation.id) == ["question", "first", "typed"]
    assert (conversation.tags, conversation.is_pinned, conversation.source) == (("work",), True, "openwebui")
    assert conversation.created_at == 1_700_000_000_000_000
    assert [node.status for node in tree.in_order()][-1] is NodeStatus.INTERRUPTED
    assert tree.in_order()[1].model == "llama"


def test_a_single_chat_and_a_bare_one_are_read_too(store: Store, tmp_path: Path) -> None:
    assert import_json(store, tmp_path, BRANCHED).num_added == 1
    assert import_json(store, tmp_path, BRANCHED["chat"]).num_added == 1


def test_an_empty_reply_left_by_a_failed_regeneration_is_passed_over(store: Store, tmp_path: Path) -> None:
    """Elsewhere such a reply, without a parent and without text, kept the whole chat from opening."""
    record = chat(
        message("q", None, ["a"], "user", "question"),
        message("a", "q", [], "assistant", "answer"),
        message("broken", None, [], "assistant", ""),
        current="broken",
    )
    report = import_json(store, tmp_path, [record])
    assert shown(store, report.conversation_ids[0]) == ["question", "answer"]
    assert [skip.reason for skip in report.skips] == ["message broken: it is empty"]


def test_an_error_is_a_state_of_its_message(store: Store, tmp_path: Path) -> None:
    record = chat(message("a", None, [], "assistant", "so far", error={"content": "out of memory"}))
    report = import_json(store, tmp_path, [record])
    assert tree_of(store, report.conversation_ids[0]).in_order()[0].status is NodeStatus.ERROR


@pytest.mark.parametrize("inner", [None, {}, {"history": None}, {"history": {"messages": []}}, {"history": {"messages": {}}}])
def test_a_chat_without_messages_says_so(store: Store, tmp_path: Path, inner: Any) -> None:
    with pytest.raises(ImportFileError, match=r"it has no (history of )?messages"):
        import_json(store, tmp_path, [{"chat": inner}], format="openwebui")
