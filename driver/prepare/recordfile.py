# SPDX-License-Identifier: Apache-2.0
"""The record as a file: opened and checked whole, created with what is known, moved aside.

A check reads everything once, at start and after damage: SQLite's own structures, every row against its checksum, and the
holdings against the rows. A bit that flips in a row is found by its checksum, one in a holding by its row.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sqlite3
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from driver import values
from driver.errors import RecordError
from driver.prepare import crashpoints, database, files, ledger, schema, shareuse
from driver.prepare.crashpoints import Point

logger = logging.getLogger(__name__)

MODE = 0o600
_LOG_FILES = ("-wal", "-shm")
_FILES = ("", *_LOG_FILES)
COLUMNS = ", ".join(ledger.Columns._fields)
_PLACES = ", ".join("?" for _ in ledger.Columns._fields)
_AFTER_PARTS = "."
"""Follows upon `-`."""

_SHARING = f"""SELECT {COLUMNS} FROM claims WHERE claim_uid IN (SELECT claim_uid FROM sharings)
ORDER BY claim_uid"""  # noqa: S608 - names of columns, not input
_HOLDERS_ON = " UNION ALL ".join(
    f"SELECT h.device, {', '.join(f'c.{column}' for column in ledger.Columns._fields)} "  # noqa: S608 - names of columns and tables
    f"FROM {table} h JOIN claims c ON c.claim_uid = h.claim_uid WHERE h.device >= ?1 AND h.device < ?2"
    for table in schema.HOLDERS
)
_TAKE = tuple(f"INSERT INTO {table} (device, claim_uid) VALUES (?, ?)" for table in schema.HOLDERS)  # noqa: S608
_LET_GO = tuple(f"DELETE FROM {table} WHERE device = ? AND claim_uid = ?" for table in schema.HOLDERS)  # noqa: S608

_PUBLISHED = "SELECT device, body FROM published"

_MIGRATE_S = 30.0

_Holding = tuple[str, str, str]
"""The table, the device, and the UID of the claim."""


class UnusableError(Exception):
    """There is no file, or it is not what an agent wrote; the text says which."""


def open_checked(path: Path, *, boot_id: str) -> database.Database:
    """Open an existing record. Raises UnusableError; RecordError where it is in order but not for us or not now."""
    try:
        found = path.stat()
    except FileNotFoundError as error:
        raise UnusableError("it is gone") from error
    except OSError as error:
        raise RecordError(f"The record {path} cannot be read: {error.strerror}") from error
    if not found.st_size:
        raise UnusableError("it is empty")
    try:
        path.chmod(MODE)
        opened = database.Database(path)
    except OSError as error:
        raise RecordError(f"The record {path} cannot be opened: {error.strerror}") from error
    except database.DatabaseError as error:
        raise _refused(error) from error
    try:
        opened.scan(lambda connection: schema.check(connection, path=path))
        if not opened.scan(schema.up_to_date):
            opened.write(schema.migrate, timeout_s=_MIGRATE_S)
        opened.scan(lambda connection: _check(connection, boot_id=boot_id))
    except database.DatabaseError as error:
        opened.close()
        raise _refused(error) from error
    except (schema.ForeignFileError, ledger.DamagedError) as error:
        opened.close()
        raise UnusableError(str(error)) from error
    except RecordError:
        opened.close()
        raise
    return opened


def create(path: Path, entries: Iterable[ledger.Entry]) -> int:
    """Place a new record with those entries that do not contradict the ones before them; how many those are.

    Nothing lies at the path, and the caller holds the lock of the record alone. It is made under another name and renamed,
    so that a record is whole or not there. Raises RecordError.
    """
    new = path.with_name(f"{path.name}.new")
    try:
        for suffix in ("", "-journal", *_LOG_FILES):
            Path(f"{new}{suffix}").unlink(missing_ok=True)
        os.close(os.open(new, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, MODE))
        with contextlib.closing(database.connect(new)) as connection:
            try:
                connection.execute("BEGIN IMMEDIATE")
                schema.create(connection)
                adopted = adopt(connection, entries)
                crashpoints.reach(Point.RECOVER_BEFORE_COMMIT)
                connection.execute("COMMIT")
            except sqlite3.Error as error:
                raise database.translated(error, new) from error
        new.rename(path)
        files.sync_directory(path.parent)
    except OSError as error:
        raise RecordError(f"The record {path} cannot be made: {error.strerror}") from error
    except database.DatabaseError as error:
        raise RecordError(f"The record {path} cannot be made: {error}") from error
    return len(adopted)


def adopt(connection: sqlite3.Connection, entries: Iterable[ledger.Entry]) -> tuple[ledger.Entry, ...]:
    """Insert the entries of unknown claims whose devices are free, in the order given; those that were inserted."""
    adopted = []
    for entry in entries:
        known = connection.execute("SELECT 1 FROM claims WHERE claim_uid = ?", (entry.claim.uid,)).fetchone()
        if known is None and not any(_taken(connection, device, entry) for device in entry.devices_held()):
            insert(connection, ledger.to_columns(entry), entry)
            schema.raise_reader(connection, ledger.readable_since(entry))
            adopted.append(entry)
    return tuple(adopted)


def _taken(connection: sqlite3.Connection, wanted: ledger.HeldDevice, by: ledger.Entry) -> bool:
    """Whether somebody has a device, or a part of its GPU that it needs, so that an entry cannot have it: shares of one device
    stand beside each other as long as there is room.
    """
    uses = list(ledger.uses_of(by, wanted.name))
    for name, entry in holders_on(connection, values.gpu_of(wanted.name)):
        for device in entry.devices:
            if device.name != name or not ledger.overlap(wanted, device):
                continue
            if name != wanted.name or device.room is None or wanted.room is None:
                return True
            uses += ledger.uses_of(entry, name) if entry.boot_id == by.boot_id else ()
    return wanted.room is not None and not shareuse.fits(wanted.room, uses)


def holders_on(connection: sqlite3.Connection, gpu: str) -> list[tuple[str, ledger.Entry]]:
    """The devices of a GPU that are held, it as a whole or parts of it, with the entries of the claims that hold them. One walk
    over a stretch of the index, as the names of parts go on with `-` where that of the GPU ends. Raises DamagedError.
    """
    rows = connection.execute(_HOLDERS_ON, (gpu, f"{gpu}{_AFTER_PARTS}")).fetchall()
    return [(row[0], ledger.from_columns(ledger.Columns(*row[1:]))) for row in rows]


def insert(connection: sqlite3.Connection, columns: ledger.Columns, entry: ledger.Entry) -> None:
    """Write a row and what it holds, in the transaction of the caller; fails where a device is held."""
    connection.execute(
        f"INSERT OR REPLACE INTO claims ({COLUMNS}) VALUES ({_PLACES})",  # noqa: S608 - names of columns, not input
        columns,
    )
    shared = entry.held_in_shares
    for device in entry.holds:
        connection.execute(_TAKE[device in shared], (device, columns.claim_uid))


def let_go(connection: sqlite3.Connection, holdings: Iterable[tuple[str, str]]) -> None:
    """Forget that claims hold devices, alone or in shares: (device, claim UID), in the transaction of the caller."""
    pairs = tuple(holdings)
    for statement in _LET_GO if pairs else ():
        connection.executemany(statement, pairs)


def read_published(connection: sqlite3.Connection, names: Collection[str] | None = None) -> dict[str, str]:
    """What was last published of some devices, or of all, as text by name."""
    if names is None:
        return dict(connection.execute(f"{_PUBLISHED} ORDER BY device").fetchall())
    return {
        name: body for device in names for name, body in connection.execute(f"{_PUBLISHED} WHERE device = ?", (device,))
    }


def published(device: str, body: str) -> Mapping[str, Any] | None:
    """What was published of a device, from its text; None where that cannot be read."""
    try:
        document = json.loads(body)
    except (ValueError, TypeError, RecursionError):
        document = None
    if isinstance(document, dict):
        return document
    logger.warning("What was published of device %r cannot be read and is forgotten", device)
    return None


def read_entries(connection: sqlite3.Connection) -> tuple[ledger.Entry, ...]:
    """All entries, by claim UID. Raises DamagedError."""
    return tuple(ledger.from_columns(columns) for columns in _read_columns(connection))


def any_sharing(connection: sqlite3.Connection) -> bool:
    """Whether there is any share."""
    return connection.execute("SELECT 1 FROM sharings LIMIT 1").fetchone() is not None


def read_sharing(connection: sqlite3.Connection) -> tuple[ledger.Entry, ...]:
    """The entries that have a share of a device, by claim UID. Raises DamagedError."""
    rows = connection.execute(_SHARING)
    return tuple(ledger.from_columns(ledger.Columns(*row)) for row in rows)


def _read_columns(connection: sqlite3.Connection) -> Iterator[ledger.Columns]:
    for row in connection.execute(f"SELECT {COLUMNS} FROM claims ORDER BY claim_uid"):  # noqa: S608
        yield ledger.Columns(*row)


def move_aside(path: Path, *, now_s: float) -> Path | None:
    """Put what there is of a record and its log out of the way under a name that tells when; that name, None if nothing
    was there. A log without its record was left by a process that was killed just here.
    """
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(now_s))
    aside, number = path.with_name(f"{path.name}.damaged-{stamp}"), 0
    while any(Path(f"{aside}{suffix}").exists() for suffix in _FILES):
        number += 1
        aside = path.with_name(f"{path.name}.damaged-{stamp}.{number}")
    moved = [suffix for suffix in _FILES if Path(f"{path}{suffix}").exists()]
    for suffix in moved:
        Path(f"{path}{suffix}").rename(f"{aside}{suffix}")
    crashpoints.reach(Point.RECOVER_MOVED_ASIDE)
    return aside if moved else None


def _refused(error: database.DatabaseError) -> UnusableError | RecordError:
    if error.damaged or error.foreign:
        return UnusableError(str(error))
    return RecordError(f"The record cannot be opened: {error}", retryable=True)


def _check(connection: sqlite3.Connection, *, boot_id: str) -> None:
    if (fault := schema.integrity(connection)) is not None:
        raise ledger.DamagedError(fault)
    said: set[_Holding] = set()
    needed: set[_Holding] = set()
    for columns in _read_columns(connection):
        holds = {
            (table, device, columns.claim_uid)
            for table, devices in zip(schema.HOLDERS, ledger.held_devices(columns), strict=True)
            for device in devices
        }
        said |= holds
        # Only a row of another boot may have lost a device to a later claim.
        needed |= holds if columns.boot_id == boot_id else set()
    kept = {
        (table, device, uid)
        for table in schema.HOLDERS
        for device, uid in connection.execute(f"SELECT device, claim_uid FROM {table}")  # noqa: S608 - names of tables
    }
    if odd := (kept - said) | (needed - kept):
        _, device, uid = min(odd)
        raise ledger.DamagedError(f"rows and holdings differ about device {device!r} and claim {uid!r}")
