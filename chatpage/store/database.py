"""The SQLite file: one thread that writes, a few that read, none of them the caller's.

Invariant: only the writer thread ever holds a write transaction, and a future it was asked for resolves after the commit, so
whoever saw a write succeed will read it. A write that was submitted happens, even if nobody waits for it any more: cancelling
an `await` stops the waiting, not the write.

Jobs that wait together are committed together (one fsync), each in a savepoint of its own: one that fails undoes itself alone.
"""

import asyncio
import contextlib
import errno
import os
import queue
import shutil
import sqlite3
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, TypeVar, overload
from urllib.parse import quote

import sqlite_utils
from platformdirs import user_data_path

from chatpage.errors import (
    StoreBusyError,
    StoreDamagedError,
    StoreError,
    StoreFullError,
    StoreReadOnlyError,
)
from chatpage.store.migrations import migrations

P = ParamSpec("P")
T = TypeVar("T")

NUM_READERS = 4
MAX_JOBS_PER_COMMIT = 256
BUSY_TIMEOUT_S = 10.0
WRITER_CACHE_KIB = 16 * 2**10  # ids are random, so a write touches pages all over the indexes


def database_path(data_dir: Path | None = None) -> Path:
    """Return where the conversations lie: in `data_dir`, or in the platform's folder for user data."""
    return (data_dir or user_data_path("chatpage")) / "chatpage.db"


@dataclass(slots=True)
class _Job:
    run: Callable[[sqlite_utils.Database], Any]
    future: "Future[Any]"


class Database:
    """An open database file.

    Args:
        path: The file; it and its folder are made if missing, readable by their owner alone.

    Raises:
        StoreReadOnlyError, StoreFullError, StoreBusyError, StoreDamagedError: The file cannot be opened for writing.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._closing = threading.Lock()
        self._is_closed = False
        self._local = threading.local()
        self._reader_connections: list[sqlite_utils.Database] = []
        self._writer_connection = self._open_for_writing()
        self._readers = ThreadPoolExecutor(NUM_READERS, thread_name_prefix="chatpage-store-read")
        self._writer = threading.Thread(target=self._write_loop, name="chatpage-store-write", daemon=True)
        self._writer.start()

    def write(self, function: Callable[[sqlite_utils.Database], T]) -> "Future[T]":
        """Queue a write; the future resolves to what `function` returned, after the commit.

        `function` may run twice, if a commit it shared with others failed: it must have no effect but on the database.
        """
        future: Future[T] = Future()
        future.set_running_or_notify_cancel()  # from here on it cannot be cancelled
        with self._closing:
            if self._is_closed:
                raise StoreError(f"The store {self.path} is closed.")
            self._jobs.put(_Job(function, future))
        return future

    def read(self, function: Callable[[sqlite_utils.Database], T]) -> "Future[T]":
        """Queue a read; everything `function` reads is one snapshot."""
        with self._closing:
            if self._is_closed:
                raise StoreError(f"The store {self.path} is closed.")
            return self._readers.submit(self._read, function)

    def close(self) -> None:
        """Write what is queued, then close the file. Closing twice is fine."""
        with self._closing:
            if self._is_closed:
                return
            self._is_closed = True
            self._jobs.put(None)
        self._writer.join()
        self._readers.shutdown()
        for reader in self._reader_connections:
            reader.close()
        self._writer_connection.close()  # last, so that SQLite folds the write-ahead log into the file

    def _open_for_writing(self) -> sqlite_utils.Database:
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            os.close(os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600))
        except OSError as error:
            raise _from_os_error(error, self.path) from error
        db = _connect(str(self.path))
        try:
            db.execute("PRAGMA foreign_keys = ON")
            db.enable_wal()
            db.execute("PRAGMA synchronous = FULL")
            db.execute(f"PRAGMA cache_size = -{WRITER_CACHE_KIB}")
            _check_not_newer(db, self.path)
            # Two processes that open a new file at once must not both create the tables.
            db.execute("BEGIN IMMEDIATE")
            migrations.apply(db)
            db.commit()
        except sqlite3.Error as error:
            db.close()
            raise as_store_error(error, self.path) from error
        except BaseException:
            db.close()
            raise
        return db

    def _write_loop(self) -> None:
        is_open = True
        while is_open:
            jobs = [self._jobs.get()]
            while len(jobs) < MAX_JOBS_PER_COMMIT:
                try:
                    jobs.append(self._jobs.get_nowait())
                except queue.Empty:
                    break
            is_open = None not in jobs
            self._commit([job for job in jobs if job is not None])

    def _commit(self, jobs: list[_Job]) -> None:
        """Run the jobs in one transaction; if that fails as a whole, each in its own, so that a failure hits only its cause."""
        if not jobs:
            return
        try:
            outcomes = self._run_in_transaction(jobs)
        except sqlite3.Error as error:
            with contextlib.suppress(sqlite3.Error):  # the transaction may be gone already; the first error is the one to tell
                self._writer_connection.rollback()
            if len(jobs) == 1:
                jobs[0].future.set_exception(as_store_error(error, self.path))
                return
            for job in jobs:
                self._commit([job])
            return
        for job, (result, problem) in zip(jobs, outcomes, strict=True):
            if problem is None:
                job.future.set_result(result)
            else:
                job.future.set_exception(problem)

    def _run_in_transaction(self, jobs: list[_Job]) -> list[tuple[Any, BaseException | None]]:
        db = self._writer_connection
        outcomes: list[tuple[Any, BaseException | None]] = []
        db.execute("BEGIN IMMEDIATE")
        for job in jobs:
            try:
                with db.atomic():
                    outcomes.append((job.run(db), None))
            except sqlite3.Error as error:
                if not db.conn.in_transaction:
                    raise  # a full disk ends the whole transaction, and with it the work of the jobs before
                outcomes.append((None, as_store_error(error, self.path)))
            except BaseException as error:  # noqa: BLE001 - it belongs to the caller, who gets it through the future
                outcomes.append((None, error))
        db.commit()
        return outcomes

    def _read(self, function: Callable[[sqlite_utils.Database], T]) -> T:
        try:
            db = getattr(self._local, "db", None) or self._open_for_reading()
            with db.atomic():
                return function(db)
        except sqlite3.Error as error:
            raise as_store_error(error, self.path) from error

    def _open_for_reading(self) -> sqlite_utils.Database:
        db = _connect(f"file:{quote(str(self.path.absolute()))}?mode=ro", uri=True)
        self._reader_connections.append(db)
        self._local.db = db
        return db


def _connect(name: str, *, uri: bool = False) -> sqlite_utils.Database:
    connection = sqlite3.connect(name, uri=uri, timeout=BUSY_TIMEOUT_S, check_same_thread=False, isolation_level=None)
    return sqlite_utils.Database(connection, execute_plugins=False)


def _check_not_newer(db: sqlite_utils.Database, path: Path) -> None:
    with sqlite_utils.Database(memory=True) as empty:
        known = {migration.name for migration in migrations.pending(empty)}
    unknown = [applied.name for applied in migrations.applied(db) if applied.name not in known]
    if unknown:
        raise StoreDamagedError(
            f"{path} was written by a newer version of chatpage (its schema has {', '.join(unknown)}): update chatpage, or use"
            " another data folder."
        )


def as_store_error(error: sqlite3.Error, path: Path) -> StoreError:
    """Return the typed error for what SQLite reports."""
    name = getattr(error, "sqlite_errorname", "") or ""
    if name.startswith(("SQLITE_READONLY", "SQLITE_CANTOPEN", "SQLITE_PERM")):
        return StoreReadOnlyError(
            f"Cannot write {path}: {error}. Make the file and its folder writable, or use another --data."
        )
    if name == "SQLITE_FULL" or (name.startswith("SQLITE_IOERR") and _is_disk_full(path)):
        return StoreFullError(f"The disk that holds {path} is full: free some space; nothing of the last change was written.")
    if name.startswith(("SQLITE_BUSY", "SQLITE_LOCKED")):
        return StoreBusyError(f"Another process has held {path} for more than {BUSY_TIMEOUT_S:g} s: try again, or stop it.")
    if name.startswith(("SQLITE_CORRUPT", "SQLITE_NOTADB")):
        return StoreDamagedError(f"{path} is not a database, or is damaged ({error}): restore a copy, or move it away.")
    return StoreError(f"The database {path} failed: {error} ({name or type(error).__name__}).")


def _from_os_error(error: OSError, path: Path) -> StoreError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return StoreFullError(f"The disk that holds {path} is full: free some space.")
    return StoreReadOnlyError(f"Cannot write {path}: {error.strerror}. Make it writable, or use another --data.")


def _is_disk_full(path: Path) -> bool:
    try:
        return shutil.disk_usage(path.parent).free < 2**16
    except OSError:
        return False


class HasDatabase(Protocol):
    """What operations can be bound to."""

    @property
    def database(self) -> Database: ...


class Operation(Generic[P, T]):
    """A database function of an open store. Call it to wait for the result, `submit` it for a future, or `await` its `aio`."""

    def __init__(
        self, function: Callable[Concatenate[sqlite_utils.Database, P], T], queue_job: Callable[..., "Future[T]"]
    ) -> None:
        self.__doc__ = function.__doc__
        self._function = function
        self._queue_job = queue_job

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T:
        return self.submit(*args, **kwargs).result()

    def submit(self, *args: P.args, **kwargs: P.kwargs) -> "Future[T]":
        """Queue the operation and return at once."""
        return self._queue_job(lambda db: self._function(db, *args, **kwargs))

    async def aio(self, *args: P.args, **kwargs: P.kwargs) -> T:
        """Run the operation without blocking the event loop. Cancelling stops the waiting; a write happens all the same."""
        return await asyncio.wrap_future(self.submit(*args, **kwargs))


class _Declared(Generic[P, T]):
    def __init__(self, function: Callable[Concatenate[sqlite_utils.Database, P], T], *, is_write: bool) -> None:
        self.function = function
        self.is_write = is_write

    @overload
    def __get__(self, instance: None, owner: type) -> "_Declared[P, T]": ...
    @overload
    def __get__(self, instance: HasDatabase, owner: type) -> Operation[P, T]: ...
    def __get__(self, instance: HasDatabase | None, owner: type) -> "_Declared[P, T] | Operation[P, T]":
        if instance is None:
            return self
        return Operation(self.function, instance.database.write if self.is_write else instance.database.read)


def reads(function: Callable[Concatenate[sqlite_utils.Database, P], T]) -> _Declared[P, T]:
    """Declare an operation that runs on a reader: any number at once, each on one snapshot."""
    return _Declared(function, is_write=False)


def writes(function: Callable[Concatenate[sqlite_utils.Database, P], T]) -> _Declared[P, T]:
    """Declare an operation that runs on the writer, whole or not at all."""
    return _Declared(function, is_write=True)
