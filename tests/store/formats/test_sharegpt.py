"""ShareGPT: rows of turns in, accepted replies out."""

import io
import json
from pathlib import Path

from chatpage.store import LOCAL_USER, Conversation, NodeStatus, Store, export_conversations
from tests.store.helpers import add, assistant, import_json, shown, tree_of

RECORD = {
    "conversations": [
        {"from": "system", "value": "Be brief."},
        {"from": "human", "value": "What is a tree?\nReally."},
        {"from": "gpt", "value": "A graph without cycles."},
    ]
}


def exported(store: Store) -> list[dict[str, object]]:
    stream = io.StringIO()
    export_conversations(store, LOCAL_USER, stream, format="sharegpt")
    written: list[dict[str, object]] = json.loads(stream.getvalue())
    return written


def test_turns_become_a_path_with_a_title_from_the_first_question(store: Store, tmp_path: Path) -> None:
    report = import_json(store, tmp_path, [RECORD])
    conversation = store.get_conversation(LOCAL_USER, report.conversation_ids[0])
    nodes = tree_of(store, conversation.id).active_path()
    assert [str(node.role) for node in nodes] == ["system", "user", "assistant"]
    assert conversation.title == "What is a tree?"


def test_lines_are_read_like_a_list(store: Store, tmp_path: Path) -> None:
    other = {"conversations": [{"from": "user", "value": "hi"}, {"from": "assistant", "value": "ho"}], "system": "Sing."}
    report = import_json(store, tmp_path, b"\n".join(json.dumps(record).encode() for record in (RECORD, other)))
    assert report.num_added == 2
    assert shown(store, report.conversation_ids[1]) == ["Sing.", "hi", "ho"]


def test_empty_and_unknown_turns_are_left_out_and_named(store: Store, tmp_path: Path) -> None:
    turns = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": ""}, {"from": "owl", "value": "hoo"}, "x"]
    report = import_json(store, tmp_path, [{"conversations": [*turns, {"from": "gpt", "value": "ho"}]}])
    assert shown(store, report.conversation_ids[0]) == ["hi", "ho"]
    assert [skip.reason for skip in report.skips] == [
        "turn 2: it is empty",
        "turn 3: its speaker 'owl' is unknown",
        "turn 4: its speaker '' is unknown",
    ]


def test_only_shown_and_complete_replies_are_written(store: Store, conversation: Conversation) -> None:
    """Training data held the replies a user had rejected, and halves of stopped ones."""
    question = add(store, conversation, None, "question")
    add(store, conversation, question, assistant("rejected"))
    accepted = add(store, conversation, question, assistant("accepted"))
    second = add(store, conversation, accepted, "second question")
    add(store, conversation, second, assistant("half of", status=NodeStatus.ABORTED))
    turns = [{"from": "human", "value": "question"}, {"from": "gpt", "value": "accepted"}]
    assert exported(store) == [{"id": conversation.id, "title": "Trees", "conversations": turns}]


def test_a_conversation_without_an_accepted_reply_is_named_and_not_written(store: Store, conversation: Conversation) -> None:
    add(store, conversation, None, "question")
    stream = io.StringIO()
    report = export_conversations(store, LOCAL_USER, stream, format="sharegpt")
    assert json.loads(stream.getvalue()) == []
    assert (report.num_written, report.without_content) == (0, (conversation.id,))
