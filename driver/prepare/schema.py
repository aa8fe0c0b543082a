# SPDX-License-Identifier: Apache-2.0
"""The tables of the record, their version, and what makes a file not ours.

Migrations only add tables, triggers and columns with defaults. `user_version` is the version that wrote the file, `min_reader` the
oldest one that may use it: an older agent works on with a newer file while `min_reader` allows it, and otherwise keeps its
hands off it; it rises with the first entry that needs it. `application_id` tells our file from any other SQLite file.
"""

from __future__ import annotations

import sqlite3
from pathlib import Path

from driver.errors import RecordError
from driver.prepare import ledger

APPLICATION_ID = 0x4E464C44
"""`NFLD`."""

HOLDERS = ("holdings", "sharings")
"""The tables of who has a device alone, and who in shares."""

_SHARINGS = """CREATE TABLE IF NOT EXISTS sharings (device TEXT NOT NULL, claim_uid TEXT NOT NULL,
PRIMARY KEY (device, claim_uid)) WITHOUT ROWID"""

_ALONE = """CREATE TRIGGER IF NOT EXISTS alone BEFORE INSERT ON holdings
WHEN EXISTS (SELECT 1 FROM sharings WHERE device = NEW.device)
BEGIN SELECT RAISE(ABORT, 'the device is given out in shares'); END"""

_SHARED = """CREATE TRIGGER IF NOT EXISTS shared BEFORE INSERT ON sharings
WHEN EXISTS (SELECT 1 FROM holdings WHERE device = NEW.device)
BEGIN SELECT RAISE(ABORT, 'the device is held by one claim alone'); END"""

TABLES = (
    "CREATE TABLE meta (key TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID",
    """CREATE TABLE claims (claim_uid TEXT PRIMARY KEY, namespace TEXT NOT NULL, name TEXT NOT NULL, state TEXT NOT NULL,
    boot_id TEXT NOT NULL, devices TEXT NOT NULL, results TEXT NOT NULL, cdi_ids TEXT NOT NULL, hardware TEXT NOT NULL,
    checksum INTEGER NOT NULL)""",
    # Who has a device. The key is what keeps two claims from one device, whatever the code above it believes.
    "CREATE TABLE holdings (device TEXT PRIMARY KEY, claim_uid TEXT NOT NULL) WITHOUT ROWID",
    # Who has a share of a device.
    _SHARINGS,
    # A device is one claim's alone or shared, never both; this holds also for an older version that is still at work beside us.
    _ALONE,
    _SHARED,
    # Devices that stand in the slices, so that one that vanishes is remembered over a restart.
    "CREATE TABLE published (device TEXT PRIMARY KEY, body TEXT NOT NULL) WITHOUT ROWID",
)

_MIN_READER = "min_reader"


class ForeignFileError(Exception):
    """The file is an intact database of somebody else, or of nobody yet known."""


def create(connection: sqlite3.Connection) -> None:
    """Make the tables, in the transaction of the caller."""
    for table in TABLES:
        connection.execute(table)
    connection.execute("INSERT INTO meta VALUES (?, ?)", (_MIN_READER, ledger.READABLE_SINCE))
    connection.execute(f"PRAGMA application_id={APPLICATION_ID}")
    connection.execute(f"PRAGMA user_version={ledger.VERSION}")


def migrate(connection: sqlite3.Connection) -> None:
    """Add what an older version has not made, in the transaction of the caller."""
    for addition in (_SHARINGS, _ALONE, _SHARED):
        connection.execute(addition)


def up_to_date(connection: sqlite3.Connection) -> bool:
    """Whether there is nothing to `migrate`."""
    names = {name for (name,) in connection.execute("SELECT name FROM sqlite_master")}
    return {"sharings", "alone", "shared"} <= names


def raise_reader(connection: sqlite3.Connection, since: int) -> None:
    """See that no version older than `since` uses the file from now on, in the transaction of the caller."""
    if since <= ledger.READABLE_SINCE:
        return
    connection.execute("UPDATE meta SET value = ? WHERE key = ? AND value < ?", (since, _MIN_READER, since))
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if version < since:
        connection.execute(f"PRAGMA user_version={since}")


def check(connection: sqlite3.Connection, *, path: Path) -> None:
    """See that this version may use the file. Raises ForeignFileError, and RecordError where it is too new for us."""
    (application,) = connection.execute("PRAGMA application_id").fetchone()
    if application != APPLICATION_ID:
        raise ForeignFileError(f"application id {application:#x} is not Nearfield's {APPLICATION_ID:#x}")
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    row = connection.execute("SELECT value FROM meta WHERE key = ?", (_MIN_READER,)).fetchone()
    if row is None or not isinstance(row[0], int):
        raise ForeignFileError("it does not say who may read it")
    if row[0] > ledger.VERSION:
        raise RecordError(
            f"The record {path} was written by a newer version (schema {version}, readable since {row[0]}; this agent has "
            f"{ledger.VERSION}): go back to the newer version, or drain the node and remove the record"
        )


def integrity(connection: sqlite3.Connection) -> str | None:
    """What SQLite finds wrong with its own structures, None if nothing."""
    (verdict,) = connection.execute("PRAGMA integrity_check(1)").fetchone()
    return None if verdict == "ok" else str(verdict)
