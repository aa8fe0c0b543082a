# SPDX-License-Identifier: Apache-2.0
"""The metadata files of prepared claims on the host: a folder for each claim, with a file for each request.

A claim is prepared whether or not they can be written: what cannot be written is said in the log, and not mounted. The folder is
named by the UID, as a claim that is made again with the name of another is another. Nothing is synced: after a loss of power
kubelet has every claim prepared again before a container may use it. Whoever calls for a claim's files holds its lock.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from driver import condition
from driver.errors import RecordError
from driver.prepare import claims, files, ledger, metadata

logger = logging.getLogger(__name__)

FOLDER = "dra-device-metadata"
"""In the plugin's folder, whose path in the agent's container is that on the host, as its sockets need it."""

_DIRECTORY_MODE = 0o755
_FILE_MODE = 0o644
"""Containers read them as any user."""


class MetadataDirectory:
    """The folder of all of them. No method raises."""

    def __init__(
        self,
        path: Path,
        *,
        driver: str,
        published: Callable[[Collection[str]], Mapping[str, metadata.Attributes]],
    ) -> None:
        """`path` is the same on the host. `published`: what is published of some devices, by name; the same values while it stays
        the same. It may raise RecordError.
        """
        self.path = path
        self._folder = str(path)
        self._driver = driver
        self._published = published
        self._known: dict[str, tuple[metadata.Attributes, metadata.Published]] = {}
        self._writing = condition.Condition(logger, recovered="Metadata of claims is written again")
        self._removing = condition.Condition(logger, recovered="Metadata of claims is removed again")

    def write(self, entry: ledger.Entry) -> str | None:
        """Write the files of a claim, whatever was there; their folder on the host, None where not all could be written."""
        if not metadata.requests(entry):
            return None
        folder = self._folder_of(entry)
        try:
            devices = self._devices(entry)
            self._make(folder)
            for name, data in metadata.documents(entry, driver=self._driver, devices=devices):
                files.write_atomic(folder, name, data, mode=_FILE_MODE)
        except (OSError, RecordError) as error:
            self._writing.failed(f"Containers of {entry.claim} get no metadata of their devices: {error}")
            return None
        self._writing.passed()
        return folder

    def folder(self, entry: ledger.Entry) -> str | None:
        """The folder of a claim on the host, None where it has no files, or not all of them are there."""
        names = metadata.requests(entry)
        folder = self._folder_of(entry)
        there = bool(names) and all(_is_file(f"{folder}/{metadata.file_name(name)}") for name in names)
        return folder if there else None

    def remove(self, uid: str) -> None:
        """Remove what a claim has. What cannot be removed is found again by `uids`."""
        folder = f"{self._folder}/{uid}"
        try:
            fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                for name in os.listdir(fd):  # noqa: PTH208 - of what was opened, whatever its path leads to now
                    os.unlink(name, dir_fd=fd)
            finally:
                os.close(fd)
            os.rmdir(folder)  # noqa: PTH106 - strings: every Unprepare comes by
        except FileNotFoundError:
            return
        except OSError as error:
            self._removing.failed(f"The metadata of claim {uid} cannot be removed: {error}")
        else:
            self._removing.passed()

    def uids(self) -> frozenset[str]:
        """The claims that have a folder."""
        try:
            return frozenset(path.name for path in self.path.iterdir() if claims.acceptable_uid(path.name))
        except OSError:
            return frozenset()

    def _devices(self, entry: ledger.Entry) -> Mapping[str, metadata.Published]:
        """What is published of the devices of a claim. Raises RecordError."""
        found = {}
        for name, attributes in self._published({device.name for device in entry.devices}).items():
            known = self._known.get(name)
            if known is None or known[0] is not attributes:
                known = self._known[name] = (attributes, metadata.published(attributes))
            found[name] = known[1]
        return found

    def _folder_of(self, entry: ledger.Entry) -> str:
        return f"{self._folder}/{entry.claim.uid}"

    def _make(self, folder: str) -> None:
        try:
            os.mkdir(folder, _DIRECTORY_MODE)  # noqa: PTH102 - strings: every Prepare comes by
        except FileExistsError:
            return
        except FileNotFoundError:
            self.path.mkdir(mode=_DIRECTORY_MODE, parents=True, exist_ok=True)
            os.mkdir(folder, _DIRECTORY_MODE)  # noqa: PTH102 - as above


def _is_file(path: str) -> bool:
    return os.path.isfile(path)  # noqa: PTH113 - strings: every repeated Prepare comes by
