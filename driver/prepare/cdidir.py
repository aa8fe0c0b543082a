# SPDX-License-Identifier: Apache-2.0
"""The folder where container runtimes look for CDI specs, as far as our files in it go.

Whoever calls for a claim's file holds the lock of that claim; then a file has one writer, and what lies under its temporary
name was left by somebody who died. A file is taken to be as it was while inode, times and size stay the same. As a change in
the same tick of the kernel's clock as our own would leave them the same, what was just written counts as `fresh` until
its content was read once more, later (git judges its index that way).
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from driver.prepare import cdi, crashpoints, files, ledger, metadata, metadatadir
from driver.prepare.crashpoints import Point

logger = logging.getLogger(__name__)

_DIRECTORY_MODE = 0o755
_FILE_MODE = 0o644
_SETTLED_NS = 30_000_000
"""The times of files move in ticks of up to 10 ms."""


_Seen = tuple[int, int, int, int]


def _seen(found: os.stat_result) -> _Seen:
    return found.st_ino, found.st_mtime_ns, found.st_ctime_ns, found.st_size


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """What lies there of claims, by UID: files that are surely as they were written, all others, left-over temporary ones."""

    untouched: frozenset[str]
    others: frozenset[str]
    temporaries: frozenset[str]


class CdiDirectory:
    """Our files in one CDI folder. Methods raise OSError."""

    def __init__(
        self,
        path: Path,
        *,
        dialect: cdi.Dialect,
        described: metadatadir.MetadataDirectory | None = None,
        clock_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        """`described`: the metadata that the files of claims mount, which come and go with them; None: there is none."""
        self.path = path
        self._folder = str(path)
        self._dialect = dialect
        self._described = described
        self._clock_ns = clock_ns
        self._known: dict[str, _Seen] = {}
        self._fresh: set[str] = set()

    def make(self) -> None:
        """See that the folder is there: on most nodes it is on a tmpfs and gone after a reboot."""
        self.path.mkdir(mode=_DIRECTORY_MODE, parents=True, exist_ok=True)

    def write_claim(self, entry: ledger.Entry, columns: ledger.Columns) -> None:
        """Place the file of a claim, whatever was there."""
        described = None if self._described is None else self._described.write(entry)
        self._write(
            self._dialect.claim_file(entry.claim.uid),
            self._dialect.claim_spec(entry, columns, described=described),
            written=lambda: crashpoints.reach(Point.PREPARE_TEMPORARY_FILE),
        )
        crashpoints.reach(Point.PREPARE_AFTER_CDI_FILE)

    def ensure_claim(self, entry: ledger.Entry) -> bool:
        """See that the file of a claim is there and unchanged; True where it had to be written."""
        name = self._dialect.claim_file(entry.claim.uid)
        described = self._folder_of(entry)
        complete = described is not None or self._described is None or not metadata.requests(entry)
        if complete and self.untouched(name):
            return False
        if described is None and self._described is not None:
            described = self._described.write(entry)
        return self.place(name, self._dialect.claim_spec(entry, described=described))

    def verify_claim(self, entry: ledger.Entry) -> bool:
        """Whether the file of a claim has its content, read also where it looks untouched. Needs no lock."""
        spec = self._dialect.claim_spec(entry, described=self._folder_of(entry))
        return self._matches(self._dialect.claim_file(entry.claim.uid), spec)

    def place(self, name: str, data: bytes) -> bool:
        """See that a file has this content, read also where it looks untouched; True where it had to be written."""
        if self._matches(name, data):
            return False
        self._write(name, data)
        return True

    def _folder_of(self, entry: ledger.Entry) -> str | None:
        """The folder of what the file of a claim mounts, None where nothing is there, or not all of it."""
        return None if self._described is None else self._described.folder(entry)

    def _matches(self, name: str, data: bytes) -> bool:
        path = self.path / name
        try:
            found = path.lstat()
            if files.read_limited(path, limit=cdi.FILE_MAX_BYTES) != data:
                return False
        except OSError:
            return False  # not there, or no file of ours: writing it says what is wrong
        self._known[name] = _seen(found)
        if self._clock_ns() - found.st_mtime_ns > _SETTLED_NS:
            self._fresh.discard(name)
        return True

    def untouched(self, name: str) -> bool:
        """Whether a file is as it was when its content was last seen."""
        known = self._known.get(name)
        if known is None:
            return False
        try:
            return _seen(os.lstat(f"{self._folder}/{name}")) == known
        except OSError:
            return False

    def remove_claim(self, uid: str) -> bool:
        """Remove the file of a claim and what was left of an earlier one; False when there was none."""
        self.remove_temporary(uid)
        name = self._dialect.claim_file(uid)
        self._known.pop(name, None)
        self._fresh.discard(name)
        found = files.remove(self.path / name)
        self.remove_metadata(uid)
        return found

    @property
    def describes(self) -> bool:
        """Whether claims get metadata."""
        return self._described is not None

    def remove_metadata(self, uid: str) -> None:
        """Remove what the file of a claim mounted."""
        if self._described is not None:
            self._described.remove(uid)

    def with_metadata(self) -> frozenset[str]:
        """The claims that have metadata, also those whose file is gone."""
        return frozenset() if self._described is None else self._described.uids()

    def remove_temporary(self, uid: str) -> None:
        """Remove what a writer that died left of the file of a claim."""
        files.remove(self.path / files.temporary_name(self._dialect.claim_file(uid)))

    def stamp(self) -> tuple[int, int] | None:
        """What changes when a file comes into the folder, goes or is replaced; None where there is no folder."""
        try:
            found = self.path.stat()
        except FileNotFoundError:
            return None
        return found.st_ino, found.st_mtime_ns

    def listing(self) -> Listing:
        """What lies there of ours, in one pass: with many claims this is what the agent does when it does nothing."""
        untouched, others, temporaries = set(), set(), set()
        start = len(self._dialect.claim_file("")) - len(".json")
        try:
            found = os.scandir(self.path)
        except FileNotFoundError:
            return Listing(untouched=frozenset(), others=frozenset(), temporaries=frozenset())
        with found:
            for item in found:
                name = item.name
                if (seen := self._known.get(name)) is not None and name not in self._fresh:
                    with contextlib.suppress(FileNotFoundError):
                        if _seen(item.stat(follow_symlinks=False)) == seen:
                            untouched.add(name[start : -len(".json")])
                            continue
                if (uid := self._dialect.claim_of(name)) is not None:
                    others.add(uid)
                elif (uid := self._dialect.claim_of(files.whole_name(name) or "")) is not None:
                    temporaries.add(uid)
        return Listing(untouched=frozenset(untouched), others=frozenset(others), temporaries=frozenset(temporaries))

    def entry(self, uid: str) -> ledger.Entry:
        """The entry that a claim's file carries. Raises DamagedError as well."""
        data = files.read_limited(self.path / self._dialect.claim_file(uid), limit=cdi.FILE_MAX_BYTES)
        entry = self._dialect.entry_of(data)
        if entry.claim.uid != uid:
            raise ledger.DamagedError(f"it carries the record of claim {entry.claim.uid}")
        return entry

    def entries(self, *, boot_id: str) -> Iterator[ledger.Entry]:
        """The entries of all files that carry one: those of this boot first, the newest file first."""
        found = []
        listing = self.listing()
        for uid in listing.untouched | listing.others:
            try:
                written = (self.path / self._dialect.claim_file(uid)).stat().st_mtime_ns
                found.append((written, self.entry(uid)))
            except (OSError, ledger.DamagedError) as error:
                logger.warning("The CDI file of claim %s says nothing about it: %s", uid, error)
        found.sort(key=lambda pair: (pair[1].boot_id == boot_id, pair[0]), reverse=True)
        return iter([entry for _, entry in found])

    def _write(self, name: str, data: bytes, *, written: Callable[[], None] | None = None) -> None:
        try:
            found = files.write_atomic(self._folder, name, data, mode=_FILE_MODE, written=written)
        except FileNotFoundError:
            self.make()
            found = files.write_atomic(self._folder, name, data, mode=_FILE_MODE, written=written)
        self._known[name] = _seen(found)
        self._fresh.add(name)
