"""SillyTavern's chats: swipes are siblings."""

import json
from pathlib import Path
from typing import Any

from chatpage.store import LOCAL_USER, Store
from tests.store.helpers import import_json, outline, shown, tree_of

HEADER = {"user_name": "You", "character_name": "Ada", "create_date": "2023-11-14@22h13m20s", "chat_metadata": {}}


def line(name: str, text: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "is_user": name == "You", "is_system": False, "mes": text, "send_date": 1_700_000_000_000, **more}


def lines(*records: dict[str, Any]) -> bytes:
    return "\n".join(json.dumps(record) for record in records).encode()


CHAT = (
    HEADER,
    line("Ada", "Hello.", extra={"model": "smol"}),
    line("You", "Hi!"),
    line("Ada", "two", swipes=["one", "two", "three"], swipe_id=1),
    line("You", "Nice."),
)


def test_swipes_are_siblings_and_the_chat_goes_on_below_the_chosen_one(store: Store, tmp_path: Path) -> None:
    report = import_json(store, tmp_path, lines(*CHAT))
    (conversation,) = store.list_conversations(LOCAL_USER)
    swipes = [["assistant", "one", []], ["assistant", "two", [["user", "Nice.", []]]], ["assistant", "three", []]]
    tree = tree_of(store, conversation.id)
    assert outline(tree) == [["assistant", "Hello.", [["user", "Hi!", swipes]]]]
    assert shown(store, conversation.id) == ["Hello.", "Hi!", "two", "Nice."]
    assert (conversation.title, report.num_skipped) == ("Ada", 0)
    assert (tree.active_path()[0].model, tree.active_path()[0].extra) == ("smol", {"name": "Ada"})


def test_an_edited_message_counts_more_than_its_swipe(store: Store, tmp_path: Path) -> None:
    report = import_json(store, tmp_path, lines(HEADER, line("Ada", "edited", swipes=["as it was", "other"], swipe_id=0)))
    assert shown(store, report.conversation_ids[0]) == ["edited"]


def test_odd_swipes_lose_nothing(store: Store, tmp_path: Path) -> None:
    odd = [
        line("Ada", "a", swipes=["", "a", None], swipe_id=1),
        line("Ada", "b", swipes=["b", "c"], swipe_id=99),
        line("Ada", "d", swipes="no list", swipe_id=True),
    ]
    report = import_json(store, tmp_path, lines(HEADER, *odd))
    assert shown(store, report.conversation_ids[0]) == ["a", "c", "d"]


def test_hidden_empty_and_broken_lines_are_named(store: Store, tmp_path: Path) -> None:
    content = lines(*CHAT, line("Ada", "comment") | {"is_system": True}, line("Ada", "")) + b'\n{"mes": broken\n'
    report = import_json(store, tmp_path, content)
    assert [skip.reason.split(" (")[0] for skip in report.skips] == [
        "line 6: it is hidden",
        "line 7: it is empty",
        "line 8: it is not valid JSON",
    ]
    assert report.num_nodes_added == 6


def test_a_chat_that_has_grown_gets_only_what_is_new(store: Store, tmp_path: Path) -> None:
    import_json(store, tmp_path, lines(*CHAT))
    report = import_json(store, tmp_path, lines(*CHAT, line("Ada", "Goodbye.")))
    assert (report.num_added, report.num_grown, report.num_nodes_added) == (0, 1, 1)
    (conversation,) = store.list_conversations(LOCAL_USER)
    assert shown(store, conversation.id)[-1] == "Goodbye."
