# SPDX-License-Identifier: Apache-2.0
"""database: durable writes in groups. Aspects: one group, one bad work among good ones, time-outs, damage, folding."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from driver.prepare import database
from tests.fakes.publishing import until


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[database.Database]:
    created = database.Database(tmp_path / "file #1?.db")
    created.write(lambda c: c.execute("CREATE TABLE t (k TEXT PRIMARY KEY)"), timeout_s=30)
    yield created
    created.close()


def keys(opened: database.Database) -> list[str]:
    return [key for (key,) in opened.scan(lambda c: c.execute("SELECT k FROM t ORDER BY k").fetchall())]


def insert(opened: database.Database, key: str) -> None:
    opened.write(lambda c: c.execute("INSERT INTO t VALUES (?)", (key,)), timeout_s=30)


class Crowd:
    """Callers that wait while the first commit is held up, so that they form one group."""

    def __init__(self, opened: database.Database) -> None:
        self._opened = opened
        self._gate = threading.Event()
        self._inside = threading.Event()
        self.commits = 0
        self.failed: list[str] = []
        self._threads = [threading.Thread(target=self._hold_up, daemon=True)]
        self._threads[0].start()
        assert self._inside.wait(40)

    def _hold_up(self) -> None:
        def work(_: sqlite3.Connection) -> None:
            self._inside.set()
            assert self._gate.wait(30)

        self._opened.write(work, timeout_s=30)

    def write(self, key: str) -> None:
        """One more caller."""

        def work(connection: sqlite3.Connection) -> int:
            connection.execute("INSERT INTO t VALUES (?)", (key,))
            return connection.total_changes

        def caller() -> None:
            try:
                self._opened.write(work, timeout_s=30, durable=lambda: None)
            except database.DatabaseError:
                self.failed.append(key)

        self._threads.append(self.joined_by(caller))

    def joined_by(self, caller: Callable[[], None]) -> threading.Thread:
        """One more caller waits by now."""
        waiting = len(self._opened._waiting)
        thread = threading.Thread(target=caller, daemon=True)
        thread.start()
        until(lambda: len(self._opened._waiting) > waiting)
        return thread

    def let_go(self) -> None:
        """Let them all commit."""
        self._gate.set()
        for thread in self._threads:
            thread.join(30)


def test_those_who_wait_are_committed_together(opened: database.Database) -> None:
    begun: list[str] = []
    opened._writer.set_trace_callback(lambda statement: begun.append(statement) if "BEGIN" in statement else None)
    crowd = Crowd(opened)
    for key in "abcdefgh":
        crowd.write(key)
    crowd.let_go()
    assert keys(opened) == list("abcdefgh")
    assert len(begun) <= 3


def test_one_that_fails_takes_nobody_with_it(opened: database.Database) -> None:
    insert(opened, "c")
    crowd = Crowd(opened)
    for key in "abcd":
        crowd.write(key)
    crowd.let_go()
    assert keys(opened) == list("abcd")
    assert crowd.failed == ["c"]


def test_work_that_is_wrong_in_itself_is_its_callers_error_alone(opened: database.Database) -> None:
    crowd = Crowd(opened)
    crowd.write("a")

    def wrong(connection: sqlite3.Connection) -> None:
        connection.execute("INSERT INTO t VALUES ('wrong')")
        raise KeyError("wrong")

    def caller() -> None:
        with pytest.raises(database.DatabaseError, match="wrong"):
            opened.write(wrong, timeout_s=30)
        done.append(True)

    done: list[bool] = []
    thread = crowd.joined_by(caller)
    crowd.write("b")
    crowd.let_go()
    thread.join(30)
    assert done
    assert keys(opened) == ["a", "b"]


def test_a_failed_work_leaves_nothing_of_itself(opened: database.Database) -> None:
    def half(connection: sqlite3.Connection) -> None:
        connection.execute("INSERT INTO t VALUES ('half')")
        connection.execute("INSERT INTO t VALUES ('half')")

    with pytest.raises(database.DatabaseError) as caught:
        opened.write(half, timeout_s=30)
    assert not caught.value.damaged
    assert keys(opened) == []
    insert(opened, "later")
    assert keys(opened) == ["later"]


def test_an_answer_comes_back_and_is_on_disk_by_then(opened: database.Database) -> None:
    def work(connection: sqlite3.Connection) -> str:
        connection.execute("INSERT INTO t VALUES ('a')")
        return "answer"

    seen: list[list[str]] = []
    assert opened.write(work, timeout_s=30, durable=lambda: seen.append(keys(opened))) == "answer"
    assert seen == [["a"]]


def test_a_caller_does_not_wait_for_a_hanging_commit_for_ever(opened: database.Database) -> None:
    crowd = Crowd(opened)
    with pytest.raises(database.DatabaseError, match="takes too long"):
        opened.write(lambda c: c.execute("INSERT INTO t VALUES ('late')"), timeout_s=0.01)
    crowd.let_go()
    insert(opened, "next")
    assert keys(opened) == ["late", "next"], "what timed out may still be done, by the next who commits"


def test_reading_waits_for_no_writer(opened: database.Database) -> None:
    crowd = Crowd(opened)
    assert opened.read(lambda c: c.execute("SELECT count(*) FROM t").fetchone()) == (0,)
    crowd.let_go()


def test_after_closing_every_call_fails(tmp_path: Path) -> None:
    opened = database.Database(tmp_path / "db")
    opened.close()
    opened.close()
    with pytest.raises(database.DatabaseError):
        opened.write(lambda c: c.execute("CREATE TABLE t (k)"), timeout_s=1)
    with pytest.raises(database.DatabaseError):
        opened.read(lambda c: c.execute("SELECT 1").fetchone())


def test_a_file_that_is_no_database_is_said_to_be_damaged(tmp_path: Path) -> None:
    (tmp_path / "db").write_bytes(b"something else entirely " * 100)
    with pytest.raises(database.DatabaseError) as caught:
        database.Database(tmp_path / "db")
    assert caught.value.damaged


def test_a_folder_that_is_not_there_is_an_error_and_no_damage(tmp_path: Path) -> None:
    with pytest.raises(database.DatabaseError) as caught:
        database.Database(tmp_path / "no" / "db")
    assert not caught.value.damaged


def test_the_log_is_folded_into_the_file_once_there_is_much_in_it(tmp_path: Path) -> None:
    path = tmp_path / "db"
    opened = database.Database(path)
    opened.write(lambda c: c.execute("CREATE TABLE t (k TEXT PRIMARY KEY)"), timeout_s=30)
    opened.tend()
    assert path.stat().st_size <= 4096, "not worth it yet"
    for number in range(database._FOLD_AFTER_COMMITS):
        insert(opened, f"{number:0100d}")
    opened.tend()
    assert path.stat().st_size > 4096
    opened.close()


def test_a_log_that_was_made_long_stays_so_and_holds_nothing(tmp_path: Path) -> None:
    opened = database.Database(tmp_path / "db")
    opened.write(lambda c: c.execute("CREATE TABLE t (k TEXT PRIMARY KEY)"), timeout_s=30)
    opened.write(lambda c: c.execute("PRAGMA user_version=7"), timeout_s=30)
    log = tmp_path / "db-wal"
    opened.tend()
    length = log.stat().st_size
    assert length > 3 * database._LOG_BYTES // 4
    for number in range(3 * database._FOLD_AFTER_COMMITS):
        insert(opened, f"{number:0100d}")
        if number % 20 == 0:
            opened.tend()
    assert log.stat().st_size == length
    opened.close()
    again = database.Database(tmp_path / "db")
    assert len(keys(again)) == 3 * database._FOLD_AFTER_COMMITS
    tables = again.read(lambda c: c.execute("SELECT name FROM sqlite_schema WHERE type = 'table'").fetchall())
    assert tables == [("t",)]
    assert again.read(lambda c: c.execute("PRAGMA user_version").fetchone()) == (7,)
    again.close()


def test_every_commit_is_synced(opened: database.Database) -> None:
    assert opened._writer.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    assert opened._writer.execute("PRAGMA synchronous").fetchone() == (2,)
