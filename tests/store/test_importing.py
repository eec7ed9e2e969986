"""Importing: twice adds nothing, strangers' files reach nobody, and every file ends in a report or a typed error."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from chatpage.errors import ImportFileError
from chatpage.store import (
    LOCAL_USER,
    Conversation,
    NewNode,
    NodeStatus,
    Role,
    Store,
    import_file,
    importing,
    summarize,
)
from tests.store.formats import test_chatgpt, test_openwebui, test_sharegpt, test_sillytavern
from tests.store.helpers import add, import_json, outline, shown, tree_of

FILES: dict[str, object] = {
    "chatgpt": [test_chatgpt.BRANCHED],
    "openwebui": [test_openwebui.BRANCHED],
    "sharegpt": [test_sharegpt.RECORD],
    "sillytavern": test_sillytavern.lines(*test_sillytavern.CHAT),
    "chatpage": [
        {
            **{"chatpage": 1, "id": "c1", "title": "Own", "tags": ["a"], "pinned": True, "params": {"top_p": 0.5}},
            **{"created_at": 5, "updated_at": 7, "choices": [[None, "n1"], ["n1", "n2"]]},
            "nodes": [
                {"id": "n3", "parent_id": "n1", "role": "assistant", "text": "b", "status": "streaming", "created_at": 9},
                {"id": "n2", "parent_id": "n1", "role": "assistant", "text": "a", "status": "complete", "token_ids": [1, 2]},
                {"id": "n1", "parent_id": None, "role": "user", "text": "q", "status": "complete", "created_at": 6},
            ],
        }
    ],
}


@pytest.mark.parametrize("format", FILES)
def test_importing_twice_adds_nothing(store: Store, tmp_path: Path, format: str) -> None:
    first = import_json(store, tmp_path, FILES[format])
    (conversation,) = store.list_conversations(LOCAL_USER)
    before = tree_of(store, conversation.id)
    again = import_json(store, tmp_path, FILES[format], format=format)
    assert (first.num_added, again.num_added, again.num_grown, again.num_unchanged, again.num_nodes_added) == (1, 0, 0, 1, 0)
    assert tree_of(store, conversation.id) == before
    assert store.list_conversations(LOCAL_USER) == (conversation,)


@pytest.mark.parametrize("format", FILES)
def test_two_users_who_import_the_same_file_share_nothing(store: Store, tmp_path: Path, format: str) -> None:
    import_json(store, tmp_path, FILES[format])
    bob = store.create_user("bob").id
    report = import_file(store, bob, tmp_path / "import.json")
    assert report.num_added == 1
    (mine,), (theirs,) = store.list_conversations(LOCAL_USER), store.list_conversations(bob)
    assert mine.id != theirs.id
    tree, other = tree_of(store, mine.id), store.get_tree(bob, theirs.id).tree
    assert outline(tree) == outline(other)
    assert not tree.nodes.keys() & other.nodes.keys()
    assert import_file(store, bob, tmp_path / "import.json").num_unchanged == 1


def test_our_own_nodes_in_any_order_build_the_tree_and_nothing_streams_in_a_file(store: Store, tmp_path: Path) -> None:
    import_json(store, tmp_path, FILES["chatpage"])
    (conversation,) = store.list_conversations(LOCAL_USER)
    tree = tree_of(store, conversation.id)
    assert conversation.id == "c1"
    assert shown(store, conversation.id) == ["q", "a"]
    assert [(node.id, node.status) for node in tree.in_order()][-1] == ("n3", NodeStatus.INTERRUPTED)
    assert (conversation.tags, conversation.is_pinned, conversation.params) == (("a",), True, {"top_p": 0.5})


def test_a_file_cannot_reach_another_users_conversation_by_its_id(
    store: Store, tmp_path: Path, conversation: Conversation
) -> None:
    """An id in a file is a claim. Taken at its word it would add messages to anybody's conversation, or show theirs."""
    secret = add(store, conversation, None, "secret")
    bob = store.create_user("bob").id
    nodes = [
        {"id": secret, "parent_id": None, "role": "user", "text": "secret", "status": "complete"},
        {"id": "mine", "parent_id": secret, "role": "user", "text": "injected", "status": "complete"},
    ]
    path = tmp_path / "forged.json"
    path.write_text(json.dumps({"chatpage": 1, "id": conversation.id, "title": "forged", "nodes": nodes}))
    report = import_file(store, bob, path)
    assert shown(store, conversation.id) == ["secret"]
    assert report.conversation_ids != [conversation.id]
    assert secret not in store.get_tree(bob, report.conversation_ids[0]).tree.nodes


def test_a_changed_text_under_a_known_id_becomes_a_sibling(store: Store, tmp_path: Path) -> None:
    """Nodes never change; a file that says otherwise adds another version beside the first."""
    import_json(store, tmp_path, FILES["chatpage"])
    changed = json.loads(json.dumps(FILES["chatpage"]))
    changed[0]["nodes"][1]["text"] = "rewritten"
    assert import_json(store, tmp_path, changed).num_nodes_added == 1
    (conversation,) = store.list_conversations(LOCAL_USER)
    assert [node.text for node in tree_of(store, conversation.id).in_order()].count("a") == 1
    assert shown(store, conversation.id) == ["q", "a"]
    assert import_json(store, tmp_path, changed).num_nodes_added == 0


def test_an_import_that_grows_a_conversation_keeps_what_is_shown_and_what_is_deleted(store: Store, tmp_path: Path) -> None:
    record = test_chatgpt.export(
        test_chatgpt.entry("q", None, ["a"], "user", "question"), test_chatgpt.entry("a", "q", [], "assistant", "answer")
    )
    report = import_json(store, tmp_path, [record])
    conversation_id = report.conversation_ids[0]
    question = tree_of(store, conversation_id).in_order()[0]
    own = store.add_node(LOCAL_USER, conversation_id, question.id, NewNode(role=Role.ASSISTANT, text="mine")).nodes[0]
    store.delete_node(LOCAL_USER, conversation_id, tree_of(store, conversation_id).siblings(own.id)[0])
    record["mapping"]["b"] = test_chatgpt.entry("b", "q", [], "assistant", "another")
    report = import_json(store, tmp_path, [record])
    assert (report.num_grown, report.num_nodes_added) == (1, 1)
    assert shown(store, conversation_id) == ["question", "mine"]
    assert {node.text for node in tree_of(store, conversation_id).in_order()} == {"question", "mine", "another"}


def test_importing_a_deleted_conversation_brings_it_back(store: Store, tmp_path: Path) -> None:
    report = import_json(store, tmp_path, FILES["chatgpt"])
    store.delete_conversation(LOCAL_USER, report.conversation_ids[0])
    again = import_json(store, tmp_path, FILES["chatgpt"])
    assert (again.num_added, again.num_grown, again.num_nodes_added) == (0, 1, 0)
    assert len(store.list_conversations(LOCAL_USER)) == 1


def test_one_bad_conversation_does_not_keep_the_others_out(store: Store, tmp_path: Path) -> None:
    mixed = [test_sharegpt.RECORD, {"mapping": 5}, {"chatpage": 99}, {"what": "ever"}, 7, test_openwebui.BRANCHED]
    report = import_json(store, tmp_path, mixed)
    assert report.num_added == 2
    assert [skip.where for skip in report.skips] == ["record 2", "record 3", "record 4", "record 5"]
    lines = list(summarize(report))
    assert lines[0] == "2 conversations added, 0 grown, 0 unchanged; 7 messages added; 4 things skipped."
    assert "record 3: it is of version 99; this chatpage knows version 1" in lines[2]


def test_a_format_that_is_named_is_held_to(store: Store, tmp_path: Path) -> None:
    with pytest.raises(ImportFileError, match="does not look like chatgpt"):
        import_json(store, tmp_path, FILES["sharegpt"], format="chatgpt")
    with pytest.raises(ImportFileError, match="known are chatpage, chatgpt, sharegpt, openwebui, sillytavern"):
        import_json(store, tmp_path, FILES["sharegpt"], format="word")


def test_a_file_that_is_not_there_is_a_typed_error(store: Store, tmp_path: Path) -> None:
    with pytest.raises(ImportFileError, match=r"Cannot read .*: No such file"):
        import_file(store, LOCAL_USER, tmp_path / "nothing.json")
    with pytest.raises(ImportFileError, match=r"Cannot read .*: Is a directory"):
        import_file(store, LOCAL_USER, tmp_path)


def test_a_message_beyond_the_limit_is_left_out_and_its_children_move_up(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importing, "MAX_TEXT", 12)
    report = import_json(store, tmp_path, [test_chatgpt.BRANCHED, test_sharegpt.RECORD])
    assert report.num_nodes_added == 4 + 1
    assert any("at most 12 are allowed" in skip.reason for skip in report.skips)


def test_a_long_list_of_problems_is_counted_and_cut(store: Store, tmp_path: Path) -> None:
    report = import_json(store, tmp_path, [test_sharegpt.RECORD, *range(1500)])
    assert (report.num_skipped, len(report.skips)) == (1500, 1000)
    assert list(summarize(report))[-1] == "  and 500 more"


def test_twenty_megabytes_are_read_one_conversation_at_a_time(store: Store, tmp_path: Path) -> None:
    path = tmp_path / "big.json"
    turns = [{"from": "human" if number % 2 else "gpt", "value": f"{number} " + "x" * 20_000} for number in range(100)]
    with path.open("w") as stream:
        stream.write("[")
        for number in range(11):
            stream.write(("," if number else "") + json.dumps({"title": str(number), "conversations": [*turns, {"n": number}]}))
        stream.write("]")
    assert path.stat().st_size > 20 * 2**20
    report = import_file(store, LOCAL_USER, path)
    assert report.num_added == 1  # the same turns eleven times over are one conversation
    assert report.num_unchanged == 10


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


def mutate(draw: st.DrawFn, value: Any, depth: int = 0) -> Any:
    """Replace parts of a value by junk, here and there."""
    if draw(st.integers(0, 9)) == 0:
        return draw(JUNK)
    if isinstance(value, dict):
        return {key: mutate(draw, inner, depth + 1) for key, inner in value.items()}
    if isinstance(value, list):
        return [mutate(draw, inner, depth + 1) for inner in value]
    return value


@st.composite
def spoiled_files(draw: st.DrawFn) -> Any:
    originals = [value for value in FILES.values() if isinstance(value, list)]
    originals.append([json.loads(line) for line in test_sillytavern.lines(*test_sillytavern.CHAT).splitlines()])
    return mutate(draw, draw(st.sampled_from(originals)))


@given(content=spoiled_files())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], deadline=None, max_examples=150)
def test_a_spoiled_file_ends_in_a_report_or_a_typed_error_and_what_it_brought_opens(
    store: Store, tmp_path: Path, content: object
) -> None:
    try:
        report = import_json(store, tmp_path, content)
    except ImportFileError:
        return
    for conversation_id in report.conversation_ids:
        assert tree_of(store, conversation_id).active_path() is not None
    again = import_json(store, tmp_path, content)
    assert (again.num_added, again.num_nodes_added) == (0, 0)
