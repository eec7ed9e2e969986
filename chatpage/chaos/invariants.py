"""What must hold of a database and of a server at rest, whatever happened to them.

Invariant: a check looks from outside, at rows and at numbers of the system, and trusts no code of the server.
"""

import contextlib
import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from chatpage.chaos.findings import Finding
from chatpage.chaos.ledger import Ledger
from chatpage.chaos.processes import Taken
from chatpage.chaos.weather import Weather

SERVER = "server"
MORE_FILES, MORE_THREADS = 24, 44  # than at the first start: pools that fill up when they are used, of 40 threads and of a few
_AT_REST = ("chatpage_runs_live", "chatpage_sequences:running", "chatpage_sequences:waiting", "chatpage_blocks:used")


def check_database(
    path: Path, ledgers: Mapping[str, Ledger], weather: Weather, *, is_purged: bool = False
) -> Iterator[Finding]:
    """Yield what is wrong with the database of a server that is down.

    Args:
        ledgers: What each user was told, by the ids of the users.
        weather: What faults there were.
        is_purged: What was deleted may be gone for good.
    """
    try:
        with contextlib.closing(sqlite3.connect(path)) as db:
            yield from _check_file(db)
            yield from _check_owners(db)
            yield from _check_foreign(db, ledgers)
            for ledger in ledgers.values():
                yield from _check_messages(db, ledger, weather, is_purged=is_purged)
                if not is_purged:
                    yield from _check_values(db, ledger)
    except sqlite3.Error as error:
        yield Finding("database damaged", SERVER, f"{type(error).__name__}: {error}")


def _check_file(db: sqlite3.Connection) -> Iterator[Finding]:
    for (line,) in db.execute("PRAGMA integrity_check"):
        if line != "ok":
            yield Finding("database damaged", SERVER, str(line))
    for row in db.execute("PRAGMA foreign_key_check"):
        yield Finding("database damaged", SERVER, f"a row points nowhere: {row}")


def _check_owners(db: sqlite3.Connection) -> Iterator[Finding]:
    rows = db.execute(
        "SELECT n.id, n.owner_id, c.id, c.owner_id FROM nodes n JOIN conversation_nodes m ON m.node_id = n.id"
        " JOIN conversations c ON c.id = m.conversation_id WHERE c.owner_id != n.owner_id"
    )
    for node_id, owner, conversation_id, other in rows:
        yield Finding("foreign text", SERVER, f"message {node_id} of {owner} is in conversation {conversation_id} of {other}")


def _check_foreign(db: sqlite3.Connection, ledgers: Mapping[str, Ledger]) -> Iterator[Finding]:
    texts = "SELECT owner_id, id, text FROM nodes UNION ALL SELECT owner_id, id, title FROM conversations"
    for owner, row_id, text in db.execute(texts):
        yield from foreign_in(text, ledgers.get(owner), ledgers.values(), f"row {row_id} of {owner}")


def foreign_in(text: str, own: Ledger | None, all_ledgers: Iterable[Ledger], where: str) -> Iterator[Finding]:
    """Yield if a text holds what another user said."""
    for ledger in all_ledgers:
        if ledger is not own and ledger.marker in text:
            yield Finding("foreign text", own.who if own else SERVER, f"{where} holds words of {ledger.who}: {text[:200]!r}")


def _check_messages(db: sqlite3.Connection, ledger: Ledger, weather: Weather, *, is_purged: bool) -> Iterator[Finding]:
    rows = db.execute("SELECT n.id, n.text, m.conversation_id FROM nodes n JOIN conversation_nodes m ON m.node_id = n.id")
    stored = {(node_id, conversation_id): text for node_id, text, conversation_id in rows}
    for node_id, told in ledger.messages.items():
        text = stored.get((node_id, told.conversation_id))
        if text is None:
            if not (told.may_be_gone or is_purged):
                yield Finding("text lost", ledger.who, f"message {node_id} is gone: {told.text[:200]!r}")
        elif finding := ledger.compare(node_id, text, is_ended=True, max_lost_s=weather.most_lost_s(told.began)):
            yield finding


def _check_values(db: sqlite3.Connection, ledger: Ledger) -> Iterator[Finding]:
    conversations = {row[0]: row[1:] for row in db.execute("SELECT id, title, deleted_at IS NOT NULL FROM conversations")}
    for key in ledger.keys("title"):
        row = conversations.get(key[1])
        if row is None:
            yield Finding("conversation lost", ledger.who, key[1])
            continue
        tags = db.execute("SELECT name FROM tags WHERE conversation_id = ? ORDER BY name", key[1:]).fetchall()
        values = (("title", row[0]), ("deleted", bool(row[1])), ("tags", tuple(name for (name,) in tags)))
        for kind, value in values:
            if finding := ledger.compare_value((kind, key[1]), value):
                yield finding
    hidden = {
        row[:2]: bool(row[2])
        for row in db.execute("SELECT conversation_id, node_id, deleted_at IS NOT NULL FROM conversation_nodes")
    }
    for key in ledger.keys("hidden"):
        if finding := ledger.compare_value(key, hidden.get((key[1], key[2]), False)):
            yield finding


def check_rest(numbers: Mapping[str, float]) -> Iterator[Finding]:
    """Yield what a server still holds while nobody wants anything from it."""
    for name in _AT_REST:
        if numbers.get(name, 0) != 0:
            yield Finding("leak", SERVER, f"{name} is {numbers[name]:g} while nobody asks for anything")


def check_process(name: str, idle: Taken, now: Taken) -> Iterator[Finding]:
    """Yield if a process at rest holds more handles or threads than it had at its first rest."""
    if now.num_files > idle.num_files + MORE_FILES:
        yield Finding("leak", SERVER, f"{name}: {now.num_files} open files at rest, {idle.num_files} at first")
    if now.num_threads > idle.num_threads + MORE_THREADS:
        yield Finding("leak", SERVER, f"{name}: {now.num_threads} threads at rest, {idle.num_threads} at first")
