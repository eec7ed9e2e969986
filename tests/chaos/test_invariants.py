"""The checks see what they are there for: each test damages a real database, or names what a server holds."""

import contextlib
import shutil
import sqlite3
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from chatpage.chaos.invariants import MORE_FILES, MORE_THREADS, check_database, check_process, check_rest
from chatpage.chaos.ledger import Ledger
from chatpage.chaos.processes import Taken
from chatpage.chaos.trial import make_users
from chatpage.chaos.weather import Weather
from chatpage.store import ConversationId, NewNode, NodeStatus, Role, Store, UserId, database_path

WEATHER = Weather(max_lost_s=2.0)


@dataclass(slots=True)
class Place:
    """A database with two users who said something each, and what they know of it."""

    path: Path
    ledgers: dict[str, Ledger]
    chats: dict[str, str]
    nodes: dict[str, str]

    @property
    def users(self) -> list[str]:
        return list(self.ledgers)

    def damage(self, sql: str, *values: object) -> None:
        with contextlib.closing(sqlite3.connect(self.path)) as db, db:
            db.execute("PRAGMA foreign_keys = OFF")
            assert db.execute(sql, values).rowcount > 0

    def findings(self) -> set[tuple[str, str]]:
        return {(finding.kind, finding.who) for finding in check_database(self.path, self.ledgers, WEATHER)}


@pytest.fixture
def place(tmp_path: Path) -> Place:
    ledgers, _ = make_users(tmp_path, 2)
    chats: dict[str, str] = {}
    nodes: dict[str, str] = {}
    with Store(database_path(tmp_path)) as store:
        for user_id, ledger in ledgers.items():
            text = f"{ledger.marker} tell me of rivers"
            chat = store.create_conversation(UserId(user_id), title="Rivers", tags=["new"])
            change = store.add_node(UserId(user_id), chat.id, None, NewNode(role=Role.USER, text=text))
            ledger.said(chat.id, change.nodes[0].id, text)
            ledger.knows(("title", chat.id), "Rivers")
            ledger.knows(("tags", chat.id), ("new",))
            ledger.knows(("deleted", chat.id), False)
            chats[user_id], nodes[user_id] = chat.id, change.nodes[0].id
    return Place(database_path(tmp_path), ledgers, chats, nodes)


def test_a_database_in_order_has_no_findings(place: Place) -> None:
    assert place.findings() == set()


def test_a_text_that_is_shorter_by_a_letter_is_seen(place: Place) -> None:
    place.damage("UPDATE nodes SET text = substr(text, 1, length(text) - 1) WHERE owner_id = ?", place.users[0])
    assert place.findings() == {("text changed", "user0")}


def test_a_message_that_is_gone_is_seen(place: Place) -> None:
    place.damage("DELETE FROM conversation_nodes WHERE node_id = ?", place.nodes[place.users[1]])
    assert place.findings() == {("text lost", "user1")}


def test_a_message_that_may_be_gone_is_missed_by_nobody(place: Place) -> None:
    """A reply of which nothing was heard is taken back when its run fails."""
    place.ledgers[place.users[1]].messages[place.nodes[place.users[1]]].may_be_gone = True
    place.damage("DELETE FROM conversation_nodes WHERE node_id = ?", place.nodes[place.users[1]])
    assert place.findings() == set()


@pytest.mark.parametrize(
    ("sql", "kind"),
    [
        ("UPDATE conversations SET title = 'Lakes' WHERE id = ?", "title changed"),
        ("UPDATE conversations SET deleted_at = 1 WHERE id = ?", "deleted changed"),
        ("DELETE FROM tags WHERE conversation_id = ?", "tags changed"),
    ],
)
def test_a_conversation_that_is_not_as_its_user_left_it_is_seen(place: Place, sql: str, kind: str) -> None:
    place.damage(sql, place.chats[place.users[0]])
    assert place.findings() == {(kind, "user0")}


def test_a_message_that_is_hidden_though_its_deletion_was_undone_is_seen(place: Place) -> None:
    chat, node = place.chats[place.users[0]], place.nodes[place.users[0]]
    place.ledgers[place.users[0]].knows(("hidden", chat, node), False)
    assert place.findings() == set()
    place.damage("UPDATE conversation_nodes SET deleted_at = 1 WHERE node_id = ?", node)
    assert place.findings() == {("hidden changed", "user0")}


def test_words_of_another_user_are_seen_wherever_they_are(place: Place) -> None:
    words = f"as {place.ledgers[place.users[1]].marker} said"
    with Store(place.path) as store:
        owner = UserId(place.users[0])
        store.add_node(owner, ConversationId(place.chats[owner]), None, NewNode(role=Role.ASSISTANT, text=words))
    assert place.findings() == {("foreign text", "user0")}


def test_a_message_that_hangs_in_the_conversation_of_another_user_is_seen(place: Place) -> None:
    place.damage(
        "INSERT INTO conversation_nodes (conversation_id, node_id) VALUES (?, ?)",
        place.chats[place.users[0]],
        place.nodes[place.users[1]],
    )
    assert place.findings() == {("foreign text", "server")}


def test_a_row_that_points_nowhere_is_seen(place: Place) -> None:
    place.damage("DELETE FROM users WHERE name = 'watch'")
    assert place.findings() == {("database damaged", "server")}


@pytest.mark.parametrize("damage", [lambda path: path.write_bytes(b"x" * 5000), lambda path: _overwrite(path, 8192)])
def test_a_file_that_is_damaged_is_seen(place: Place, damage: Callable[[Path], None]) -> None:
    damage(place.path)
    assert ("database damaged", "server") in place.findings()


def _overwrite(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(b"\xff" * 30_000)


def test_a_cut_reply_may_miss_what_came_in_the_last_seconds_before_a_crash(place: Place) -> None:
    user = place.users[0]
    with Store(place.path) as store:
        new = NewNode(role=Role.ASSISTANT, text="The cat", status=NodeStatus.INTERRUPTED)
        node = store.add_node(UserId(user), ConversationId(place.chats[user]), None, new).nodes[0]
    weather = Weather(max_lost_s=2.0)
    ledger = place.ledgers[user]
    ledger.begins(place.chats[user], node.id, 0.0, "run")
    for at_s, text in ((1.0, "The cat"), (2.0, "The cat sat"), (3.5, "The cat sat on")):
        ledger.hears("run", node.id, text, at_s, 0.0)
    assert [finding.kind for finding in check_database(place.path, place.ledgers, weather)] == ["text lost"]  # no crash
    weather.begin("kill_server")
    assert list(check_database(place.path, place.ledgers, weather)) == []
    ledger.hears("run", node.id, "The cat sat on the mat", 9.0, 0.0)
    assert [finding.kind for finding in check_database(place.path, place.ledgers, weather)] == ["text lost"]


def test_a_copy_without_its_log_misses_what_was_written_last(place: Place, tmp_path: Path) -> None:
    """The log belongs to the database: whoever copies one without the other loses text, and the check says so."""
    user = place.users[0]
    with Store(place.path) as store:
        node = store.add_node(
            UserId(user), ConversationId(place.chats[user]), None, NewNode(role=Role.USER, text="Late")
        ).nodes[0]
        place.ledgers[user].said(place.chats[user], node.id, "Late")
        copy = tmp_path / "copy.db"
        shutil.copy(place.path, copy)
    assert place.findings() == set()
    place.path = copy
    assert place.findings() == {("text lost", "user0")}


def test_whatever_a_server_at_rest_holds_is_a_leak() -> None:
    rest = {"chatpage_runs_live": 0.0, "chatpage_blocks:used": 0.0, "chatpage_sequences:running": 0.0}
    assert list(check_rest(rest)) == []
    for name in rest:
        [finding] = check_rest(rest | {name: 1.0})
        assert finding.kind == "leak"


def test_handles_and_threads_that_pile_up_are_a_leak() -> None:
    idle = Taken(memory_bytes=1, peak_bytes=1, num_files=40, num_threads=20)
    most = Taken(memory_bytes=9, peak_bytes=9, num_files=40 + MORE_FILES, num_threads=20 + MORE_THREADS)
    assert list(check_process("server", idle, most)) == []
    more = Taken(memory_bytes=9, peak_bytes=9, num_files=41 + MORE_FILES, num_threads=21 + MORE_THREADS)
    assert [finding.kind for finding in check_process("server", idle, more)] == ["leak", "leak"]
