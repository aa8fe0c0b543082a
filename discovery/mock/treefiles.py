# SPDX-License-Identifier: Apache-2.0
"""Writing the files of a rendered machine: the whole tree at once, and single files under the eyes of a reader."""

from __future__ import annotations

import contextlib
import os
import posixpath
from collections.abc import Mapping
from pathlib import Path

from discovery.mock.recording import Entry, Link

_SKELETON = (
    "sys/bus/pci/devices",
    "sys/class/net",
    "sys/devices/system/cpu",
    "sys/devices/system/node",
    "proc/driver",
    "dev",
)
"""Directories that every kernel has, even with nothing in them."""

_COME_AND_GO = ("sys/devices/", "sys/module/", "sys/kernel/iommu_groups/", "proc/driver/nvidia", "dev/nvidia")
"""Where a directory vanishes with its last file: those of devices, modules and groups."""


def write_all(root: Path, files: Mapping[str, Entry]) -> None:
    """Writes a whole tree below a directory in which nothing of it is yet."""
    base = str(root)
    for directory in sorted({posixpath.dirname(path) for path in files} | set(_SKELETON)):
        os.makedirs(f"{base}/{directory}", mode=0o755, exist_ok=True)  # noqa: PTH103 - thousands of files: no Path objects
    for path, entry in files.items():
        _create(f"{base}/{path}", entry)


def replace(root: Path, path: str, entry: Entry) -> None:
    """Puts one file in place of what is there, under the lock of the machine. A reader sees the old or the new one, and no other name
    beside it.
    """
    target = root / path
    target.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    temporary = root / "new"
    with contextlib.suppress(FileNotFoundError):
        temporary.unlink()
    _create(str(temporary), entry)
    temporary.replace(target)


def remove(root: Path, path: str) -> None:
    """Removes one file, and the directories of devices, modules and groups that it leaves empty."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        (root / path).unlink()
    directory = posixpath.dirname(path)
    while directory.startswith(_COME_AND_GO) and directory not in _SKELETON:
        try:
            (root / directory).rmdir()
        except OSError:
            return
        directory = posixpath.dirname(directory)


def _create(path: str, entry: Entry) -> None:
    if isinstance(entry, Link):
        os.symlink(entry.target, path)  # noqa: PTH211 - as above
        return
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    try:
        data = entry.encode() if isinstance(entry, str) else entry
        while data:
            data = data[os.write(file, data) :]
    finally:
        os.close(file)
