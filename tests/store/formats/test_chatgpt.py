"""ChatGPT's export, and the odd things real ones hold."""

from pathlib import Path
from typing import Any

import pytest

from chatpage.errors import ImportFileError
from chatpage.store import LOCAL_USER, NodeStatus, Store
from tests.store.helpers import import_json, outline, shown, tree_of


def entry(key: str, parent: str | None, children: list[str], role: str = "", *parts: Any, **message: Any) -> dict[str, Any]:
    body = {"id": key, "author": {"role": role}, "content": {"content_type": "text", "parts": list(parts)}, **message}
    return {"id": key, "parent": parent, "children": children, "message": body if role else None}


def export(*entries: dict[str, Any], current: str = "", **record: Any) -> dict[str, Any]:
    mapping = {found["id"]: found for found in entries}
    return {"title": "Trees", "mapping": mapping, "current_node": current, "conversation_id": "c1", **record}


BRANCHED = export(
    entry("root", None, ["sys"]),
    entry("sys", "root", ["q"], "system", ""),
    entry("q", "sys", ["a2", "a1"], "user", "question", create_time=1_700_000_000.25),
    entry("a1", "q", [], "assistant", "first", metadata={"model_slug": "gpt-4o"}),
    entry("a2", "q", ["q2"], "assistant", "second"),
    entry("q2", "a2", [], "user", "next"),
    current="a1",
)


def test_the_tree_its_order_and_what_is_shown_are_read(store: Store, tmp_path: Path) -> None:
    report = import_json(store, tmp_path, [BRANCHED])
    (conversation,) = store.list_conversations(LOCAL_USER)
    tree = tree_of(store, conversation.id)
    branches = [["assistant", "second", [["user", "next", []]]], ["assistant", "first", []]]
    assert outline(tree) == [["user", "question", branches]]
    assert shown(store, conversation.id) == ["question", "first"]
    assert (conversation.title, conversation.source) == ("Trees", "chatgpt")
    assert (report.num_added, report.num_nodes_added, report.num_skipped) == (1, 4, 0)
    question, _, _, first = tree.in_order()
    assert question.created_at == 1_700_000_000_250_000
    assert first.model == "gpt-4o"


def test_hidden_and_empty_messages_are_passed_over_and_what_hangs_below_moves_up(store: Store, tmp_path: Path) -> None:
    record = export(
        entry("root", None, ["h"]),
        entry("h", "root", ["q"], "user", "about me", metadata={"is_visually_hidden_from_conversation": True}),
        entry("q", "h", ["e"], "user", "question"),
        entry("e", "q", ["a"], "assistant", "", ""),
        entry("a", "e", [], "assistant", "answer"),
        current="e",
    )
    report = import_json(store, tmp_path, [record])
    assert outline(tree_of(store, report.conversation_ids[0])) == [["user", "question", [["assistant", "answer", []]]]]
    assert [skip.reason for skip in report.skips] == ["message h: it is hidden"]


def test_parts_that_are_not_text_are_reported(store: Store, tmp_path: Path) -> None:
    picture = {"content_type": "image_asset_pointer", "asset_pointer": "file-service://x"}
    record = export(entry("q", None, [], "user", picture, "what is this?", {"text": "spoken"}))
    report = import_json(store, tmp_path, [record])
    assert shown(store, report.conversation_ids[0]) == ["what is this?\nspoken"]
    assert report.skips[0].reason == "message q: a part that is not text (image_asset_pointer)"


def test_code_tools_and_thoughts_are_messages(store: Store, tmp_path: Path) -> None:
    record = export(
        entry("q", None, ["t"], "user", "compute"),
        entry("t", "q", ["c"], "assistant", content={"content_type": "thoughts", "thoughts": [{"content": "hm"}]}),
        entry("c", "t", ["o"], "assistant", content={"content_type": "code", "text": "1+1"}, recipient="python"),
        entry("o", "c", [], "tool", content={"content_type": "execution_output", "text": "2"}),
    )
    record["mapping"]["o"]["message"]["author"]["name"] = "python"
    report = import_json(store, tmp_path, [record])
    nodes = tree_of(store, report.conversation_ids[0]).in_order()
    assert [(str(node.role), node.text) for node in nodes] == [
        *(("user", "compute"), ("assistant", "hm"), ("assistant", "1+1"), ("tool", "2")),
    ]
    assert (nodes[2].extra, nodes[3].extra) == ({"recipient": "python"}, {"name": "python"})


def test_a_reply_that_was_cut_is_not_complete(store: Store, tmp_path: Path) -> None:
    details = {"finish_details": {"type": "max_tokens"}}
    record = export(entry("a", None, [], "assistant", "cut", status="in_progress", metadata=details))
    report = import_json(store, tmp_path, [record])
    (node,) = tree_of(store, report.conversation_ids[0]).in_order()
    assert (node.status, node.finish_reason) == (NodeStatus.INTERRUPTED, "length")


def test_missing_parents_and_cycles_lose_no_message(store: Store, tmp_path: Path) -> None:
    record = export(
        entry("a", "c", ["b"], "user", "a"),
        entry("b", "a", ["c"], "user", "b"),
        entry("c", "b", ["a"], "user", "c"),
        entry("orphan", "gone", [], "user", "orphan"),
        entry("listed", "also gone", [], "user", "listed by b"),
        current="nowhere",
    )
    record["mapping"]["b"]["children"].append("listed")
    report = import_json(store, tmp_path, [record])
    tree = tree_of(store, report.conversation_ids[0])
    assert {node.text for node in tree.in_order()} == {"a", "b", "c", "orphan", "listed by b"}
    listed = next(node for node in tree.in_order() if node.text == "listed by b")
    assert tree.nodes[tree.path(listed.id)[-2]].text == "b"
    assert {skip.reason.split(":")[0] for skip in report.skips} >= {"message orphan"}


@pytest.mark.parametrize(
    "record",
    [
        {"mapping": None},
        {"mapping": []},
        {"mapping": {}},
        {"mapping": {"a": None, "b": 5, "c": {"message": "x"}, "d": {"message": {"author": [], "content": 5}}}},
        export(entry("a", None, [], "wizard", "abracadabra")),
    ],
)
def test_a_record_without_messages_is_a_typed_error_with_the_reason(store: Store, tmp_path: Path, record: Any) -> None:
    with pytest.raises(ImportFileError, match="Nothing in the file could be imported"):
        import_json(store, tmp_path, [record])
    assert store.list_conversations(LOCAL_USER) == ()


def test_wrong_types_everywhere_leave_what_is_right(store: Store, tmp_path: Path) -> None:
    record = {
        "title": ["no"], "create_time": "soon", "current_node": {}, "conversation_id": [1],
        "mapping": {
            "a": {"parent": 5, "children": "abc", "message": {
                "author": {"role": "user", "name": 7}, "create_time": {}, "status": [], "recipient": 3,
                "content": {"parts": ["fine", 5, None, [], {"text": 5}]}, "metadata": "none",
            }},
        },
    }  # fmt: skip
    report = import_json(store, tmp_path, [record])
    assert shown(store, report.conversation_ids[0]) == ["fine"]
