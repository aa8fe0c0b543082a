# SPDX-License-Identifier: Apache-2.0
"""One SQLite file: durable writes from any thread, committed in groups, and reads that wait for no writer.

A caller commits itself, at once, if nobody else is at it; those who come meanwhile wait, and the first of them commits for
all. So one claim costs no hand-over to another thread (on a busy node that takes longer than the commit), and eight at once
cost two or three commits, not eight. WAL with synchronous=FULL syncs the log at every commit (https://www.sqlite.org/wal.html);
`tend` copies it back into the file when nobody waits for that.

Knows nothing of what is stored. Errors are `DatabaseError`, with `damaged` where the file itself is at fault.
"""

from __future__ import annotations

import collections
import contextlib
import sqlite3
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

T = TypeVar("T")
Work = Callable[[sqlite3.Connection], T]

_BUSY_TIMEOUT_S = 5.0
"""How long a commit waits for that of another instance."""

_FOLD_AFTER_COMMITS = 50
"""Below this a fold is not worth its syncs."""

_LOG_BYTES = 2 << 20
"""Room for some 100 commits of claims, of about 5 pages of 4 KiB each."""

_FOLD_ALWAYS_PAGES = 20_000
"""SQLite itself folds inside a commit above this, should nobody call `tend`: a log of 80 MiB."""

_CACHE_KIB = 256
"""Page cache of a connection: rows are read by key, and the kernel has the file in memory anyway."""

_DAMAGED = frozenset({sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB})


class DatabaseError(Exception):
    """SQLite could not do it. `damaged`: the file is not what SQLite wrote; `foreign`: it has not the tables that were
    asked for.
    """

    def __init__(self, message: str, *, damaged: bool = False, foreign: bool = False) -> None:
        super().__init__(message)
        self.damaged = damaged
        self.foreign = foreign


def translated(error: Exception, path: Path) -> DatabaseError:
    """The only form in which an error of sqlite3, or of work on a connection, leaves this room."""
    # The low byte is the primary code; errors of the module itself, such as a closed connection, have none.
    code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_MISUSE) & 0xFF
    told = DatabaseError(f"{path}: {error}", damaged=code in _DAMAGED, foreign=code == sqlite3.SQLITE_ERROR)
    told.__cause__ = error
    return told


def connect(path: Path, *, read_only: bool = False, immutable: bool = False) -> sqlite3.Connection:
    """A connection in autocommit mode, usable by any one thread at a time. Raises DatabaseError."""
    options = "?mode=ro" + ("&immutable=1" if immutable else "") if read_only else "?mode=rwc"
    try:
        connection = sqlite3.connect(
            f"file:{_quoted(path)}{options}",
            uri=True,
            timeout=_BUSY_TIMEOUT_S,
            isolation_level=None,
            check_same_thread=False,
        )
        connection.text_factory = _text
        connection.execute(f"PRAGMA cache_size=-{_CACHE_KIB}")
    except sqlite3.Error as error:
        raise translated(error, path) from error
    return connection


def _text(data: bytes) -> str:
    """Text as it was stored. A flipped bit may have made it no UTF-8: the reader of the row finds that by its checksum."""
    return data.decode(errors="surrogateescape")


def _quoted(path: Path) -> str:
    return str(path.absolute()).replace("%", "%25").replace("?", "%3f").replace("#", "%23")


class _Task:
    """One caller's work, until it is done or has failed."""

    __slots__ = ("answer", "done", "durable", "error", "work")

    def __init__(self, work: Work[Any], durable: Callable[[], None] | None) -> None:
        self.work = work
        self.durable = durable
        self.done = False
        self.answer: Any = None
        self.error: DatabaseError | None = None


class Database:
    """An open file, for all threads."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._writer = connect(path)
        try:
            try:
                self._writer.execute("PRAGMA journal_mode=WAL")
                self._writer.execute("PRAGMA synchronous=FULL")
                self._writer.execute(f"PRAGMA wal_autocheckpoint={_FOLD_ALWAYS_PAGES}")
            except sqlite3.Error as error:
                raise translated(error, path) from error
            self._reader = connect(path)
        except DatabaseError:
            self._writer.close()
            raise
        self._reading = threading.Lock()
        self._writing = threading.Lock()
        self._waiting: collections.deque[_Task] = collections.deque()
        self._unfolded = 0
        self._grown = False

    def write(self, work: Work[T], *, timeout_s: float, durable: Callable[[], None] | None = None) -> T:
        """Do `work` in a transaction; it is on disk when this returns. Raises DatabaseError; after a time-out the work may
        still be done.

        `work` may run in another thread, and again after a failure of another's in the same group. `durable` is called
        between the commit and the return.
        """
        task = _Task(work, durable)
        self._waiting.append(task)
        if not self._writing.acquire(timeout=max(0.0, timeout_s)):
            raise DatabaseError(f"{self._path}: a commit takes too long: does its disk hang?")
        try:
            if not task.done:
                self._commit([self._waiting.popleft() for _ in range(len(self._waiting))])
        finally:
            self._writing.release()
        if task.error is not None:
            raise task.error from task.error.__cause__
        return cast("T", task.answer)

    def read(self, work: Work[T]) -> T:
        """Do quick reading work on what is committed. Raises DatabaseError."""
        with self._reading:
            try:
                return work(self._reader)
            except sqlite3.Error as error:
                raise translated(error, self._path) from error

    def scan(self, work: Work[T]) -> T:
        """Do reading work that may take long, beside `read`. Raises DatabaseError."""
        with contextlib.closing(connect(self._path)) as connection:
            try:
                return work(connection)
            except sqlite3.Error as error:
                raise translated(error, self._path) from error

    def tend(self) -> None:
        """What is to do now and then, while others go on: copy the log into the file if there is much in it; before
        anything else, make it long enough for what comes in between. Raises DatabaseError.

        A commit that only writes over a part of the log costs the disk one flush; one that makes the file longer has it
        write its journal as well (ext4: a fifth to a third more).
        """
        try:
            if not self._grown:
                self._grown = True
                self._grow()
        except sqlite3.Error as error:
            raise translated(error, self._path) from error
        if self._unfolded >= _FOLD_AFTER_COMMITS:
            self._unfolded = 0
            self.scan(lambda connection: connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone())

    def _grow(self) -> None:
        """Write more into the log than the page cache can hold back, take it back, and commit the version it has anyway:
        the log stays as long as it became.
        """
        with self._writing:
            self._writer.execute("BEGIN IMMEDIATE")
            try:
                self._writer.execute("CREATE TABLE filling (page)")
                self._writer.execute("INSERT INTO filling VALUES (zeroblob(?))", (_LOG_BYTES,))
            finally:
                if self._writer.in_transaction:  # SQLite itself takes it back when the disk is full
                    self._writer.execute("ROLLBACK")
            (version,) = self._writer.execute("PRAGMA user_version").fetchone()
            self._writer.execute(f"PRAGMA user_version={version}")

    def close(self) -> None:
        """Close it; later calls fail."""
        with self._writing, self._reading:
            self._reader.close()
            self._writer.close()

    def _commit(self, tasks: list[_Task]) -> None:
        """Commit the work of all together, or, where that fails, of each alone."""
        self._unfolded += 1
        try:
            self._writer.execute("BEGIN IMMEDIATE")
            try:
                for task in tasks:
                    task.answer = task.work(self._writer)
                self._writer.execute("COMMIT")
            except BaseException:
                if self._writer.in_transaction:
                    self._writer.execute("ROLLBACK")
                raise
        except Exception as error:  # noqa: BLE001 - it is raised to the caller whose work it is, and to no other
            if len(tasks) > 1:
                for task in tasks:
                    self._commit([task])
                return
            tasks[0].error = translated(error, self._path)
        for task in tasks:
            if task.durable is not None and task.error is None:
                task.durable()
            task.done = True
