# SPDX-License-Identifier: Apache-2.0
"""The record of prepared claims: the truth about who has which device, over crashes, updates and damage.

Every instance of the agent uses the same file and holds a lock shared while it does. A file that is damaged or missing is
replaced only by an instance that holds that lock alone: what is left of it is moved aside with its log, and a new one is
filled with the entries that the CDI files carry. Where the lock cannot be had alone, and where a newer version forbids us
to touch the file, every call raises RecordError with the reason, and the next call tries again.
"""

from __future__ import annotations

import contextlib
import json
import logging
import sqlite3
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

from driver import values
from driver.errors import RecordError, StateLostError
from driver.prepare import crashpoints, database, ledger, locks, plan, recordfile, schema
from driver.prepare.crashpoints import Point

logger = logging.getLogger(__name__)

T = TypeVar("T")

FILE_NAME = "record.db"
_BACKGROUND_TIMEOUT_S = 30.0
_SELECT_ONE = f"SELECT {recordfile.COLUMNS} FROM claims WHERE claim_uid = ?"  # noqa: S608 - names of columns, not input
_COMMIT_POINTS = {
    ledger.ClaimState.STARTED: (Point.MIG_BEFORE_STARTED, Point.MIG_AFTER_STARTED),
    ledger.ClaimState.COMPLETED: (Point.PREPARE_BEFORE_COMMIT, Point.PREPARE_AFTER_COMMIT),
    ledger.ClaimState.RELEASING: (Point.MIG_BEFORE_RELEASING, Point.MIG_AFTER_RELEASING),
}
_HELD = " UNION ".join(f"SELECT device FROM {table}" for table in schema.HOLDERS)  # noqa: S608 - names of tables


class Summary(NamedTuple):
    """The little that is kept in memory of each claim."""

    claim: values.ClaimRef
    boot_id: str
    state: ledger.ClaimState


class RecordReports(Protocol):
    """Who is told of trouble and damage."""

    def record_failed(self) -> None:
        """A use of the record failed, or an attempt to open it."""

    def record_rebuilt(self, *, reason: str, claims: int) -> None:
        """A new record took the place of one that was damaged or lost; `claims` were found again."""


class Store:
    """The open record. Methods from any thread; all raise RecordError while it cannot be used."""

    def __init__(
        self,
        directory: Path,
        *,
        boot_id: str,
        salvage: Callable[[], Iterable[ledger.Entry]],
        reports: RecordReports,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`salvage` gives the entries that CDI files carry, those to be believed first in front."""
        self.path = directory / FILE_NAME
        self._boot_id = boot_id
        self._salvage = salvage
        self._reports = reports
        self._clock = clock
        self._lock = locks.SharedLock(locks.directory(directory) / "record.lock")
        self._opening = threading.Lock()
        self._database: database.Database | None = None
        self._inode: tuple[int, int] | None = None
        self._openings = 0
        self._attributes: dict[str, tuple[str, Mapping[str, Any]]] = {}
        self._problem: str | None = "The record is not open yet"
        self._closed = False

    def open(self) -> str | None:
        """Open it, repairing what can be repaired; why it cannot be used now, None if it can."""
        try:
            self._use()
        except RecordError as error:
            return str(error)
        return None

    def problem(self) -> str | None:
        """Why the record could not be used when that was last tried, None if it could."""
        return self._problem

    def require_place(self) -> None:
        """Raise StateLostError where the state folder was removed or replaced while the agent runs."""
        if not self._closed and not self._lock.in_place():
            raise StateLostError(
                f"The state folder {self.path.parent} was removed or replaced under the running agent, which has to start "
                "anew; prepared claims are found again in their CDI files"
            )

    def look_after(self) -> str | None:
        """What is to do every few seconds: open it if it is not, replace it if the file was taken away under us, tend its
        log. Why it cannot be used now, None if it can.
        """
        used = self._database
        try:
            if used is not None and self._inode != _inode(self.path):
                self._failed(used, recordfile.UnusableError("the file was removed or replaced while it was in use"))
            self._use().tend()
        except RecordError as error:
            return str(error)
        except database.DatabaseError as error:
            logger.warning("The log of the record could not be tended: %s", error)
        return None

    def close(self) -> None:
        """Let go of file and lock for good. Idempotent."""
        with self._opening:
            if self._closed:
                return
            self._closed = True
            self._problem = "The record is closed"
            if self._database is not None:
                self._database.close()
                self._database = None
            self._lock.close()

    def get(self, uid: str) -> ledger.Entry | None:
        """The entry of a claim."""

        def work(connection: sqlite3.Connection) -> ledger.Entry | None:
            row = connection.execute(_SELECT_ONE, (uid,)).fetchone()
            return None if row is None else ledger.from_columns(ledger.Columns(*row))

        return self._read(work)

    def holders(self, devices: Iterable[str]) -> tuple[plan.Holder, ...]:
        """Who has any part of the GPUs that some devices are, or are parts of: one for each claim and device."""

        def work(connection: sqlite3.Connection) -> tuple[plan.Holder, ...]:
            return tuple(
                plan.Holder(entry=entry, device=next(device for device in entry.devices if device.name == name))
                for gpu in sorted({values.gpu_of(device) for device in devices})
                for name, entry in recordfile.holders_on(connection, gpu)
            )

        return self._read(work)

    def releasing(self) -> tuple[str, ...]:
        """UIDs of claims whose hardware is still to be put back."""
        state = ledger.ClaimState.RELEASING.value
        return self._read(
            lambda c: tuple(uid for (uid,) in c.execute("SELECT claim_uid FROM claims WHERE state = ?", (state,)))
        )

    def held_devices(self) -> frozenset[str]:
        """The devices that some claim has."""
        return frozenset(self._read(lambda c: [device for (device,) in c.execute(_HELD)]))

    def rows(self) -> tuple[ledger.Entry, ...]:
        """All entries, by claim UID."""
        return self._read(recordfile.read_entries, apart=True)

    def sharing(self) -> tuple[ledger.Entry, ...]:
        """The entries that have a share of a device, by claim UID."""
        if not self._read(recordfile.any_sharing):
            return ()
        return self._read(recordfile.read_sharing, apart=True)

    def summaries(self) -> tuple[Summary, ...]:
        """All claims, by UID, without what they have."""

        def work(connection: sqlite3.Connection) -> tuple[Summary, ...]:
            return tuple(
                Summary(
                    values.ClaimRef(uid=values.ClaimUid(uid), namespace=namespace, name=name),
                    boot_id,
                    ledger.ClaimState(state),
                )
                for uid, namespace, name, boot_id, state in connection.execute(
                    "SELECT claim_uid, namespace, name, boot_id, state FROM claims ORDER BY claim_uid"
                )
            )

        return self._read(work, apart=True)

    def count(self) -> int:
        """How many claims have an entry."""
        return self._read(lambda c: int(c.execute("SELECT count(*) FROM claims").fetchone()[0]))

    def version(self) -> tuple[int, int]:
        """A value that changes whenever anybody changes the record."""
        changes = self._read(lambda c: int(c.execute("PRAGMA data_version").fetchone()[0]))
        return self._openings, changes

    def put(self, planned: plan.PreparePlan, *, previous: ledger.Entry | None, timeout_s: float) -> None:
        """Record a claim in the place of its `previous` entry, on disk when this returns. Fails where another claim has a
        device; after a time-out it may still get there.
        """
        entry = planned.entry
        freed = [*planned.displaced, *((device, entry.claim.uid) for device in (previous.holds if previous else ()))]
        before, after = _COMMIT_POINTS[entry.state]

        def work(connection: sqlite3.Connection) -> None:
            recordfile.let_go(connection, freed)
            recordfile.insert(connection, planned.columns, entry)
            schema.raise_reader(connection, ledger.readable_since(entry))
            crashpoints.reach(before)

        self._write(work, timeout_s=timeout_s, durable=lambda: crashpoints.reach(after))

    def remove(self, entry: ledger.Entry, *, timeout_s: float) -> None:
        """Forget a claim, on disk when this returns."""

        def work(connection: sqlite3.Connection) -> None:
            connection.execute("DELETE FROM claims WHERE claim_uid = ?", (entry.claim.uid,))
            recordfile.let_go(connection, [(device, entry.claim.uid) for device in entry.holds])
            crashpoints.reach(Point.UNPREPARE_BEFORE_COMMIT)

        self._write(work, timeout_s=timeout_s, durable=lambda: crashpoints.reach(Point.UNPREPARE_AFTER_COMMIT))

    def adopt(self, entry: ledger.Entry) -> bool:
        """Take up an entry whose row was lost, on disk when this returns. False where a claim or a device of it is known."""
        return bool(self._write(lambda c: recordfile.adopt(c, (entry,))))

    def next_epoch(self, above: int) -> int:
        """A number above `above` and above all that were given before, on disk when this returns."""

        def work(connection: sqlite3.Connection) -> int:
            row = connection.execute("SELECT value FROM meta WHERE key = 'epoch'").fetchone()
            epoch = max(above, int(row[0]) if row else 0) + 1
            connection.execute("INSERT OR REPLACE INTO meta VALUES ('epoch', ?)", (epoch,))
            return epoch

        return self._write(work)

    def load_published(self) -> dict[str, Mapping[str, Any]]:
        """The devices that were last published, by name."""
        bodies = self._read(recordfile.read_published)
        return {name: found for name, body in bodies.items() if (found := recordfile.published(name, body)) is not None}

    def published_attributes(self, names: Collection[str]) -> dict[str, Mapping[str, Any]]:
        """The attributes with which some devices were last published, by name, as in a ResourceSlice. They are the same values again
        while what was published is the same.
        """
        bodies = self._read(lambda c: recordfile.read_published(c, names))
        for name, body in bodies.items():
            if self._attributes.get(name, (None,))[0] != body:
                attributes = (recordfile.published(name, body) or {}).get("attributes")
                self._attributes[name] = body, attributes if isinstance(attributes, dict) else {}
        return {name: self._attributes[name][1] for name in bodies}

    def save_published(self, devices: Mapping[str, Mapping[str, Any]]) -> None:
        """Remember what is published now, on disk when this returns."""
        rows = [(device, json.dumps(body, separators=(",", ":"))) for device, body in devices.items()]

        def work(connection: sqlite3.Connection) -> None:
            connection.execute("DELETE FROM published")
            connection.executemany("INSERT INTO published (device, body) VALUES (?, ?)", rows)

        self._write(work)

    def _failed(self, used: database.Database, error: Exception) -> RecordError:
        """What became of a call that failed: where the file is at fault it is opened and checked anew, which replaces one
        that is damaged, or empty because somebody cut it off in its place.
        """
        self._reports.record_failed()
        if isinstance(error, database.DatabaseError) and not (error.damaged or error.foreign):
            return RecordError(f"The record cannot be used: {error}", retryable=True)
        with self._opening:
            if self._database is used:
                used.close()
                self._database = None
        try:
            self._use()
        except RecordError as refusal:
            return refusal
        return RecordError(f"The record was damaged and has been opened anew: {error}", retryable=True)

    def _read(self, work: database.Work[T], *, apart: bool = False) -> T:
        used = self._use()
        try:
            return used.scan(work) if apart else used.read(work)
        except (database.DatabaseError, ledger.DamagedError) as error:
            raise self._failed(used, error) from error

    def _write(
        self,
        work: database.Work[T],
        *,
        timeout_s: float = _BACKGROUND_TIMEOUT_S,
        durable: Callable[[], None] | None = None,
    ) -> T:
        used = self._use()
        try:
            return used.write(work, timeout_s=timeout_s, durable=durable)
        except database.DatabaseError as error:
            raise self._failed(used, error) from error

    def _use(self) -> database.Database:
        """The open file, opened or replaced if it must be."""
        used = self._database
        if used is not None:
            return used
        with self._opening:
            if self._closed:
                raise RecordError("The record is closed")
            if self._database is None:
                try:
                    self._database = self._open()
                except (RecordError, OSError) as error:
                    self._lock.release()
                    self._problem = str(error)
                    self._reports.record_failed()
                    if isinstance(error, RecordError):
                        raise
                    raise RecordError(f"The record {self.path} cannot be replaced: {error}") from error
                self._inode = _inode(self.path)
                self._openings += 1
                self._problem = None
            return self._database

    def _open(self) -> database.Database:
        if not self._lock.share():
            raise RecordError(f"Another instance of the agent is repairing the record {self.path}", retryable=True)
        try:
            return recordfile.open_checked(self.path, boot_id=self._boot_id)
        except recordfile.UnusableError as error:
            reason = str(error)
        # Both of two instances may stand here: each lets go, one gets it alone, and looks again at what the other left.
        self._lock.release()
        if not self._lock.take_alone():
            raise RecordError(
                f"The record {self.path} cannot be used ({reason}), and not be replaced while another instance of the agent "
                "is at work with it",
                retryable=True,
            )
        try:
            opened = recordfile.open_checked(self.path, boot_id=self._boot_id)
        except recordfile.UnusableError as error:
            opened = self._replace(str(error))
        self._lock.share()
        return opened

    def _replace(self, reason: str) -> database.Database:
        aside = recordfile.move_aside(self.path, now_s=self._clock())
        claims = recordfile.create(self.path, self._salvage())
        if aside is not None or claims:
            logger.error(
                "The record %s could not be used: %s. %s; %d claims were found again in CDI files",
                self.path,
                reason,
                f"It was moved to {aside}" if aside else "A new one was made",
                claims,
            )
            self._reports.record_rebuilt(reason=reason, claims=claims)
        try:
            return recordfile.open_checked(self.path, boot_id=self._boot_id)
        except recordfile.UnusableError as error:
            raise RecordError(f"The record {self.path} was made anew and cannot be used: {error}") from error


def _inode(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def read_rows(path: Path) -> tuple[ledger.Entry, ...]:
    """The entries of a record that an agent may be using or may have left, without a trace in it. Raises RecordError.

    Where there is no log, nobody has the file open, and SQLite is told so, as it would make one for a reader.
    """
    file = path / FILE_NAME if path.is_dir() else path
    try:
        file.stat()
    except OSError as error:
        raise RecordError(
            f"There is no record at {file} ({error.strerror}): does --state-dir name the agent's?"
        ) from error
    running = Path(f"{file}-wal").exists()
    try:
        with contextlib.closing(database.connect(file, read_only=True, immutable=not running)) as connection:
            try:
                schema.check(connection, path=file)
                return recordfile.read_entries(connection)
            except sqlite3.Error as error:
                raise database.translated(error, file) from error
    except (database.DatabaseError, ledger.DamagedError, schema.ForeignFileError) as error:
        raise RecordError(f"The record {file} cannot be read: {error}") from error
