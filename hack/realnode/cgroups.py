# SPDX-License-Identifier: Apache-2.0
"""A cluster's place in the cgroup tree, in version 1 (a folder in every hierarchy) and version 2 (one folder)."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

from hack.realnode.errors import ClusterError

MOUNTS = Path("/proc/self/mounts")
BUSY_S = 60.0
POLL_S = 0.02


def create(cgroup: str) -> None:
    """Makes the folder wherever cgroups are mounted, ready for children."""
    for top in _tops():
        folder = top / cgroup.lstrip("/")
        folder.mkdir(exist_ok=True)
        for name in ("cpuset.cpus", "cpuset.mems"):  # version 1 makes them empty, and an empty cpuset takes no process
            if (top / name).exists() and not (top / "cgroup.controllers").exists():
                (folder / name).write_text((top / name).read_text())
        if (top / "cgroup.controllers").exists():
            _delegate(top)
            _delegate(folder)


def remove(cgroup: str) -> None:
    """Removes the folder and all below; processes must have gone. Raises ClusterError where one has not."""
    for folder in _folders(cgroup):
        for child in (*sorted(folder.rglob("*/"), key=lambda path: len(path.parts), reverse=True), folder):
            _remove(child)


def _remove(folder: Path) -> None:
    deadline = time.monotonic() + BUSY_S
    while True:
        try:
            folder.rmdir()
        except FileNotFoundError:
            return
        except OSError as error:  # a process that has ended stays in it until somebody has asked for its exit status
            if time.monotonic() > deadline:
                raise ClusterError(f"{folder} cannot be removed: {error.strerror}") from error
            time.sleep(POLL_S)
        else:
            return


def thaw(cgroup: str) -> None:
    """Lets processes run that were stopped. runc stops those of a container while it kills them, and where runc itself is killed
    in between they stay so; in version 1 such a process does not even end.
    """
    for folder in _folders(cgroup):
        for file in (*folder.rglob("freezer.state"), *folder.rglob("cgroup.freeze")):
            with contextlib.suppress(OSError):
                file.write_text("THAWED" if file.name == "freezer.state" else "0")


def members(cgroup: str) -> set[int]:
    """The processes in it and below."""
    found: set[int] = set()
    for folder in _folders(cgroup):
        for file in folder.rglob("cgroup.procs"):
            with contextlib.suppress(OSError):
                found.update(int(line) for line in file.read_text().split())
    return found - {0}


def _folders(cgroup: str) -> Iterator[Path]:
    for top in _tops():
        folder = top / cgroup.lstrip("/")
        if folder.is_dir():
            yield folder


def _tops() -> Iterator[Path]:
    for line in MOUNTS.read_text().splitlines():
        fields = line.split()
        if fields[2] in {"cgroup", "cgroup2"}:
            yield Path(fields[1])


def _delegate(folder: Path) -> None:
    """Lets children have every controller that this cgroup has."""
    with contextlib.suppress(OSError):
        names = (folder / "cgroup.controllers").read_text().split()
        (folder / "cgroup.subtree_control").write_text(" ".join(f"+{name}" for name in names))
