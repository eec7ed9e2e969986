"""The writer, the readers, and what happens when the file will not have it."""

import asyncio
import os
import sqlite3
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest
import sqlite_utils

from chatpage.chaos.disks import Disk
from chatpage.errors import (
    StoreBusyError,
    StoreDamagedError,
    StoreError,
    StoreFullError,
    StoreReadOnlyError,
)
from chatpage.store import LOCAL_USER, Conversation, NodeStatus, Store, database, database_path
from chatpage.store.database import Database
from tests.store.helpers import add, assistant, shown, tree_of, user


def test_the_file_and_its_folder_can_be_read_by_their_owner_alone(tmp_path: Path) -> None:
    with Store(tmp_path / "new" / "chatpage.db") as store:
        assert store.path.stat().st_mode & 0o077 == 0
        assert store.path.parent.stat().st_mode & 0o077 == 0


def test_the_default_place_is_the_folder_for_user_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    assert database_path() == tmp_path / "chatpage" / "chatpage.db"
    assert database_path(Path("/elsewhere")) == Path("/elsewhere/chatpage.db")


def test_the_log_is_written_ahead_and_flushed_at_each_commit(store: Store) -> None:
    def modes(db: sqlite_utils.Database) -> tuple[str, int, int]:
        pragmas = ("journal_mode", "synchronous", "foreign_keys")
        mode, synchronous, keys = (db.execute(f"PRAGMA {name}").fetchone()[0] for name in pragmas)
        return mode, synchronous, keys

    assert store.database.write(modes).result() == ("wal", 2, 1)


def test_a_reader_cannot_write(store: Store) -> None:
    with pytest.raises(StoreReadOnlyError):
        store.database.read(lambda db: db.execute("DELETE FROM users")).result()


def test_a_job_that_fails_undoes_itself_and_nothing_of_its_neighbours(store: Store) -> None:
    """Jobs that wait together share a commit; a bad one in the middle must not take the others with it."""
    gate = threading.Event()
    blocked = store.database.write(lambda db: gate.wait(30))

    def broken(db: sqlite_utils.Database) -> None:
        db.execute("UPDATE users SET name = 'half done' WHERE id = 'local'")
        raise RuntimeError("in the middle")

    before = store.create_conversation.submit(LOCAL_USER, title="before")
    failed = store.database.write(broken)
    after = store.create_conversation.submit(LOCAL_USER, title="after")
    gate.set()
    assert blocked.result()
    with pytest.raises(RuntimeError, match="in the middle"):
        failed.result()
    assert {before.result().title, after.result().title} == {c.title for c in store.list_conversations(LOCAL_USER)}
    assert store.get_user(LOCAL_USER).name == "local"


def test_a_job_that_loses_the_transaction_does_not_take_the_others_with_it(store: Store) -> None:
    """A full disk makes SQLite end the whole transaction; jobs before it in the same commit must be run again."""
    gate = threading.Event()
    store.database.write(lambda db: gate.wait(30))

    def lose(db: sqlite_utils.Database) -> None:
        db.execute("ROLLBACK")
        raise sqlite3.OperationalError("disk I/O error")

    before = store.create_conversation.submit(LOCAL_USER, title="before")
    failed = store.database.write(lose)
    after = store.create_conversation.submit(LOCAL_USER, title="after")
    gate.set()
    with pytest.raises(StoreError, match="disk I/O error"):
        failed.result()
    assert {before.result().id, after.result().id} == {c.id for c in store.list_conversations(LOCAL_USER)}


def test_a_finished_write_is_seen_by_every_later_read(store: Store, conversation: Conversation) -> None:
    for number in range(50):
        node_id = add(store, conversation, None, str(number))
        assert store.get_node(LOCAL_USER, conversation.id, node_id).text == str(number)


def test_many_threads_that_send_and_edit_lose_nothing(store: Store, conversation: Conversation) -> None:
    """Two sends at once elsewhere read the same list, each added its own message, and the last to save won."""
    root = add(store, conversation, None, "root")

    def work(worker: int) -> None:
        parent = root
        for step in range(10):
            parent = add(store, conversation, parent, f"{worker}-{step}")
            store.edit_node(LOCAL_USER, conversation.id, parent, user(f"{worker}-{step} edited"))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    texts = {node.text for node in tree_of(store, conversation.id).nodes.values()}
    assert texts == {"root"} | {f"{w}-{s}{e}" for w in range(8) for s in range(10) for e in ("", " edited")}
    assert store.get_conversation(LOCAL_USER, conversation.id).version == 1 + 1 + 8 * 10 * 2


def test_the_event_loop_goes_on_while_a_write_waits(store: Store, conversation: Conversation) -> None:
    async def turn_while_it_waits() -> None:
        gate = threading.Event()
        blocked = asyncio.wrap_future(store.database.write(lambda db: gate.wait(30)))
        waiting = asyncio.create_task(store.add_node.aio(LOCAL_USER, conversation.id, None, user("later")))
        await asyncio.sleep(0.05)  # returns only if neither of them holds the loop
        assert not waiting.done()
        gate.set()
        await blocked
        assert (await waiting).nodes[0].text == "later"

    asyncio.run(turn_while_it_waits())


def test_cancelling_the_wait_does_not_cancel_the_write(store: Store, conversation: Conversation) -> None:
    """A handler is cancelled when its client goes away; the reply it was about to save must not go with it."""

    async def cancel_while_it_waits() -> None:
        gate = threading.Event()
        blocked = asyncio.wrap_future(store.database.write(lambda db: gate.wait(30)))
        waiting = asyncio.create_task(store.add_node.aio(LOCAL_USER, conversation.id, None, user("kept")))
        await asyncio.sleep(0.01)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        gate.set()
        await blocked

    asyncio.run(cancel_while_it_waits())
    store.list_users()
    store.database.write(lambda db: None).result()
    assert shown(store, conversation.id) == ["kept"]


def test_what_was_queued_is_written_before_the_file_is_closed(tmp_path: Path) -> None:
    store = Store(tmp_path / "chatpage.db")
    queued = [store.create_conversation.submit(LOCAL_USER, title=str(number)) for number in range(100)]
    store.close()
    store.close()
    assert len({future.result().id for future in queued}) == 100
    with Store(tmp_path / "chatpage.db") as again:
        assert len(again.list_conversations(LOCAL_USER, limit=200)) == 100


def test_a_closed_store_says_so(tmp_path: Path) -> None:
    store = Store(tmp_path / "chatpage.db")
    store.close()
    with pytest.raises(StoreError, match="is closed"):
        store.list_users()
    with pytest.raises(StoreError, match="is closed"):
        store.create_conversation(LOCAL_USER)


def test_a_full_disk_is_a_typed_error_and_what_was_written_stays(disk: Disk) -> None:
    with Store(disk.path / "chatpage.db") as store:
        conversation = store.create_conversation(LOCAL_USER)
        add(store, conversation, None, "kept")

        def fill() -> None:
            for number in range(100):
                add(store, conversation, None, assistant(f"{number} " + "x" * 200_000))

        with pytest.raises(StoreFullError, match="is full"):
            fill()
        texts = [node.text[:4] for node in tree_of(store, conversation.id).in_order()]
        assert texts[0] == "kept"
        version = store.get_conversation(LOCAL_USER, conversation.id).version
        assert version == 1 + len(texts)


def test_a_read_only_file_system_is_a_typed_error(disk: Disk) -> None:
    Store(disk.path / "chatpage.db").close()
    subprocess.run(["mount", "-o", "remount,ro", disk.path], check=True)
    with pytest.raises(StoreReadOnlyError, match="Cannot write"):
        Store(disk.path / "chatpage.db")


def test_a_folder_that_cannot_be_made_is_a_typed_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(StoreReadOnlyError, match="Cannot write"):
        Store(tmp_path / "file" / "chatpage.db")


@pytest.mark.parametrize("content", [b"not a database " * 1000, b"SQLite format 3\0" + b"\xff" * 5000])
def test_a_file_that_is_no_database_is_refused_and_left_alone(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "chatpage.db"
    path.write_bytes(content)
    with pytest.raises(StoreDamagedError, match="is not a database, or is damaged"):
        Store(path)
    assert path.read_bytes() == content


def test_a_database_of_a_newer_version_is_refused(tmp_path: Path) -> None:
    Store(tmp_path / "chatpage.db").close()
    with sqlite_utils.Database(tmp_path / "chatpage.db") as db:
        row = {"migration_set": "chatpage", "name": "time_travel", "applied_at": "2099"}
        db.table("_sqlite_migrations").insert(row)
    with pytest.raises(StoreDamagedError, match=r"newer version of chatpage .*time_travel"):
        Store(tmp_path / "chatpage.db")


def test_a_file_that_another_process_holds_is_a_typed_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database, "BUSY_TIMEOUT_S", 0.05)
    with Store(tmp_path / "chatpage.db") as store:
        with closing(sqlite3.connect(store.path, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            with pytest.raises(StoreBusyError, match="Another process has held"):
                store.create_conversation(LOCAL_USER)
        store.create_conversation(LOCAL_USER)


def test_a_lock_that_cannot_be_made_is_a_typed_error_and_leaves_no_thread(tmp_path: Path) -> None:
    (tmp_path / "chatpage.db.lock").mkdir()
    with pytest.raises(StoreReadOnlyError, match=r"chatpage\.db\.lock"):
        Store(tmp_path / "chatpage.db")
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("chatpage-store")]


def test_two_processes_that_open_a_new_file_at_once_both_succeed(tmp_path: Path) -> None:
    code = f"from pathlib import Path; from chatpage.store import Store; Store(Path({str(tmp_path / 'c.db')!r})).close()"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    started = [subprocess.Popen([sys.executable, "-c", code], env=environment) for _ in range(3)]
    assert [process.wait(60) for process in started] == [0, 0, 0]


def test_threads_end_when_the_store_is_closed(tmp_path: Path) -> None:
    opened = Database(tmp_path / "chatpage.db")
    opened.read(lambda db: db.execute("SELECT 1").fetchone()).result()
    opened.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("chatpage-store")]


@pytest.mark.parametrize("damage", [b"", b"x", b"x" * 5000])
def test_a_damaged_lock_keeps_nobody_out(tmp_path: Path, damage: bytes) -> None:
    """Found by poisoned state files: a server would not start any more, though nothing is ever in its lock."""
    lock = tmp_path / "chatpage.db.lock"
    lock.write_bytes(damage)
    with Store(tmp_path / "chatpage.db") as first:
        conversation = first.create_conversation(LOCAL_USER)
        node_id = add(first, conversation, None, assistant("The cat", status=NodeStatus.STREAMING))
        lock.write_bytes(damage)
        with Store(first.path) as second:  # sees that the first still holds it, so the node streams on
            assert second.get_node(LOCAL_USER, conversation.id, node_id).status is NodeStatus.STREAMING
    with Store(first.path) as third:
        assert third.get_node(LOCAL_USER, conversation.id, node_id).status is NodeStatus.INTERRUPTED
