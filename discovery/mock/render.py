# SPDX-License-Identifier: Apache-2.0
"""From a Recording to a directory: sys/, proc/, dev/ as files, nvml.json as state."""

from __future__ import annotations

import hashlib
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from discovery.errors import DocumentError
from discovery.mock import faults, live, migfiles, recording, treefiles, view


@dataclass(frozen=True, slots=True)
class MockTree:
    """A rendered machine."""

    directory: Path

    @property
    def sys(self) -> Path:
        """In the place of /sys."""
        return self.directory / "sys"

    @property
    def proc(self) -> Path:
        """In the place of /proc."""
        return self.directory / "proc"

    @property
    def dev(self) -> Path:
        """In the place of /dev; its nodes are regular files."""
        return self.directory / "dev"


def render(machine: recording.Recording, directory: Path, *, clock: Callable[[], float] = time.time) -> MockTree:
    """Writes a machine into a directory that is empty, not there, or holds a rendered machine.

    The same Recording again changes nothing: faults and MIG stay as they are, as hardware would over a restart of the
    agent. Another one replaces what is there. Faults of the Recording count from now. DocumentError if it cannot be
    written, or if the directory holds anything else.
    """
    dumped = recording.dump(machine)
    digest = hashlib.sha256(dumped).hexdigest()
    file = live.LiveFile(directory)
    try:
        directory.mkdir(mode=0o755, parents=True, exist_ok=True)
        _refuse_others(directory)
        with file.locked():
            if _rendered(file) == digest:
                migfiles.repair(directory, view.view(file.read(), now=clock()))
                return MockTree(directory)
            _clear(directory)
            (directory / faults.RECORDING_FILE).write_bytes(dumped)
            treefiles.write_all(directory, machine.files)
            since = clock()
            placed = faults.place(recording.Tree(machine.files), machine.faults, since=since)
            file.write(live.Live(recording=digest, nvml=machine.nvml, faults=placed))
            migfiles.repair(directory, view.view(file.read(), now=since))
    except OSError as err:
        raise DocumentError(f"{directory}: cannot write the mock machine {machine.name}: {err}") from err
    faults.Timeline(directory).advance(since, rendered=True)
    return MockTree(directory)


def stands(machine: recording.Recording, directory: Path) -> bool:
    """Whether a directory holds this Recording, completely rendered."""
    return _rendered(live.LiveFile(directory)) == hashlib.sha256(recording.dump(machine)).hexdigest()


def _rendered(file: live.LiveFile) -> str | None:
    """The digest of the machine that was completely rendered here. The state is written last."""
    try:
        return file.read().recording
    except DocumentError:
        return None


def _refuse_others(directory: Path) -> None:
    """A directory is ours if it is empty, or holds the lock that is made before anything else."""
    names = {entry.name for entry in os.scandir(directory)}
    if names and live.LOCK not in names:
        raise DocumentError(
            f"{directory}: holds files that are no mock machine; give an empty directory, or remove it yourself"
        )


def _clear(directory: Path) -> None:
    """Removes a machine that was rendered before, also one that was not finished."""
    for entry in os.scandir(directory):
        if entry.name == live.LOCK:
            continue
        if entry.is_dir(follow_symlinks=False):
            shutil.rmtree(entry.path)
        else:
            Path(entry.path).unlink()
