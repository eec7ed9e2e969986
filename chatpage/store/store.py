"""The store: one object for everything that outlives the process.

Invariant: every operation below is whole or not at all, and none runs on the caller's thread. What is declared with `reads`
sees one snapshot; what is declared with `writes` is committed when it returns. Call an operation to wait for it, `.submit` it
for a future, or `await` its `.aio`:

    with Store(database_path()) as store:
        conversation = store.create_conversation(LOCAL_USER, title="Trees")
        tree = await store.get_tree.aio(LOCAL_USER, conversation.id)
"""

import os
import sqlite3
from pathlib import Path
from types import TracebackType
from typing import Self

from chatpage.store import conversations, logins, nodes, presets, purging, runs, search, users
from chatpage.store.database import Database, as_store_error, reads, writes


class Store:
    """The conversations of all users, in one SQLite file.

    Args:
        path: The file; it and its folder are made if missing. `database_path()` says where it lies by default.

    Raises:
        StoreError: The file cannot be opened, or is not one of ours; the subclass says why.
    """

    def __init__(self, path: Path) -> None:
        self.database = Database(path)
        self._lock: sqlite3.Connection | None = None
        try:
            self._lock = take_lock(path, "lock")
            if self._lock is not None:  # else another process may stream into these nodes right now
                self._recover()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    @property
    def path(self) -> Path:
        return self.database.path

    def close(self) -> None:
        """Write what is queued and close the file. Closing twice is fine."""
        self.database.close()
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    # conversations
    create_conversation = writes(conversations.create_conversation)
    get_conversation = reads(conversations.get_conversation)
    list_conversations = reads(conversations.list_conversations)
    list_tags = reads(conversations.list_tags)
    update_conversation = writes(conversations.update_conversation)
    delete_conversation = writes(conversations.delete_conversation)
    restore_conversation = writes(conversations.restore_conversation)
    fork_conversation = writes(conversations.fork_conversation)
    get_tree = reads(conversations.get_tree)
    get_path = reads(conversations.get_path)
    purge_deleted = writes(purging.purge_deleted)
    discard_empty_conversation = writes(purging.discard_empty_conversation)

    # nodes
    add_node = writes(nodes.add_node)
    add_siblings = writes(nodes.add_siblings)
    add_line = writes(nodes.add_line)
    edit_node = writes(nodes.edit_node)
    get_node = reads(nodes.get_node)
    append_partial = writes(nodes.append_partial)
    finish_node = writes(nodes.finish_node)
    reopen_node = writes(nodes.reopen_node)
    choose_node = writes(nodes.choose_node)
    delete_node = writes(nodes.delete_node)
    restore_node = writes(nodes.restore_node)
    keep_node = writes(nodes.keep_node)

    # runs
    start_run = writes(runs.start_run)
    finish_run = writes(runs.finish_run)
    discard_run = writes(runs.discard_run)
    get_run = reads(runs.get_run)
    list_runs = reads(runs.list_runs)
    find_run_of_message = reads(runs.find_run_of_message)

    # presets
    create_preset = writes(presets.create_preset)
    get_preset = reads(presets.get_preset)
    list_presets = reads(presets.list_presets)
    update_preset = writes(presets.update_preset)
    delete_preset = writes(presets.delete_preset)

    # users
    create_user = writes(users.create_user)
    get_user = reads(users.get_user)
    find_user = reads(users.find_user)
    list_users = reads(users.list_users)
    set_password_hash = writes(users.set_password_hash)
    delete_user = writes(users.delete_user)
    create_api_key = writes(users.create_api_key)
    find_user_by_api_key = reads(users.find_user_by_api_key)
    mark_api_key_used = writes(users.mark_api_key_used)
    list_api_keys = reads(users.list_api_keys)
    revoke_api_key = writes(users.revoke_api_key)

    # logins
    create_login = writes(logins.create_login)
    find_user_by_login = reads(logins.find_user_by_login)
    end_login = writes(logins.end_login)

    search = reads(search.search)
    _recover = writes(nodes.recover_interrupted)


def take_lock(path: Path, suffix: str) -> sqlite3.Connection | None:
    """Hold a lock beside a database, until it is closed or the process ends; None if another process holds it.

    A second SQLite file does it on every platform, and the system lets go of it when the process dies, however it dies. Nothing
    is ever in that file: what damage left there is emptied, not removed, since another process may be holding the very file.
    """
    name = path.with_name(f"{path.name}.{suffix}")
    try:
        return _lock_file(name)
    except sqlite3.Error as error:
        if error.sqlite_errorcode == sqlite3.SQLITE_BUSY:
            return None
        if error.sqlite_errorcode != sqlite3.SQLITE_NOTADB:
            raise as_store_error(error, name) from error
        try:
            os.truncate(name, 0)
        except OSError as problem:
            raise as_store_error(error, name) from problem
    return take_lock(path, suffix)


def _lock_file(name: Path) -> sqlite3.Connection:
    lock = sqlite3.connect(name, timeout=0, isolation_level=None, check_same_thread=False)
    try:
        lock.execute("BEGIN EXCLUSIVE")
    except sqlite3.Error:
        lock.close()
        raise
    return lock
