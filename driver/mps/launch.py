# SPDX-License-Identifier: Apache-2.0
"""Becomes a program of the driver root: run as a script, with what to do as JSON and then the program and its arguments.

It is a process of its own because what it does before it becomes the program cannot be done in a process that has threads, and
imports nothing of the project, so that it starts in milliseconds. What may be asked for:

- `parent`: the process that is to be outlived by nobody: the program is killed when that dies (prctl(2), PR_SET_PDEATHSIG);
- `root`: the root directory that the program is to have, so that it finds the C library and the driver that it was built for;
- `visible`: folders that must be the same inside of that root as outside;
- `shm`: the folder that is to be its /dev/shm.

The last two take a mount namespace of its own, which needs CAP_SYS_ADMIN.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

FAILED = 126
"""Exit status when it cannot become the program, as a shell's."""

_PR_SET_PDEATHSIG = 1
_CLONE_NEWNS = 0x20000
_MS_NOSUID, _MS_NODEV, _MS_BIND, _MS_REC, _MS_SLAVE = 0x2, 0x4, 0x1000, 0x4000, 0x80000


class _System:
    """The calls of the C library that Python lacks. They raise OSError."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)

    def die_with_parent(self) -> None:
        self._check(self._libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "prctl")

    def own_mounts(self) -> None:
        """Mounts made from here on are seen by this process alone; those of the host still come in."""
        self._check(self._libc.unshare(_CLONE_NEWNS), "unshare")
        self.mount(b"none", Path("/"), None, _MS_REC | _MS_SLAVE)

    def mount(self, source: bytes, target: Path, kind: bytes | None, flags: int) -> None:
        self._check(
            self._libc.mount(source, os.fsencode(target), kind, ctypes.c_ulong(flags), None), f"mount on {target}"
        )

    @staticmethod
    def _check(status: int, what: str) -> None:
        if status != 0:
            number = ctypes.get_errno()
            raise OSError(number, f"{what}: {os.strerror(number)}")


def main(arguments: Sequence[str]) -> NoReturn:
    """Become the program, or say on standard error why not."""
    wanted: dict[str, Any] = json.loads(arguments[0])
    try:
        _become(wanted, arguments[1:])
    except OSError as error:
        sys.stderr.write(f"{arguments[1]} cannot be started: {error.strerror or error}\n")
    sys.exit(FAILED)


def _become(wanted: dict[str, Any], command: Sequence[str]) -> NoReturn:
    system = _System()
    if "parent" in wanted:
        system.die_with_parent()
        if os.getppid() != wanted["parent"]:
            sys.exit(FAILED)  # it died before it could be followed
    root = Path(wanted.get("root") or "/")
    hidden = [Path(path) for path in wanted.get("visible", ()) if not _same(Path(path), _below(root, Path(path)))]
    if hidden or wanted.get("shm"):
        system.own_mounts()
    for path in hidden:
        _show(system, root, path)
    if wanted.get("shm"):
        system.mount(os.fsencode(wanted["shm"]), _below(root, Path("/dev/shm")), None, _MS_BIND)  # noqa: S108 - the place itself
    if wanted.get("root"):
        os.chroot(root)
    os.chdir("/")
    os.execv(command[0], list(command))  # noqa: S606 - a fixed program, no shell


def _show(system: _System, root: Path, path: Path) -> None:
    """Have a folder at its own path below a root that may be read-only: then with an empty /run in it."""
    place = _below(root, path)
    try:
        place.mkdir(parents=True, exist_ok=True)
    except OSError:
        top = _below(root, Path("/", path.parts[1]))
        system.mount(b"tmpfs", top, b"tmpfs", _MS_NOSUID | _MS_NODEV)
        place.mkdir(parents=True)
    system.mount(os.fsencode(path), place, None, _MS_BIND | _MS_REC)


def _below(root: Path, path: Path) -> Path:
    return root / path.relative_to("/")


def _same(one: Path, other: Path) -> bool:
    try:
        return one.samefile(other)
    except OSError:
        return False


if __name__ == "__main__":
    main(sys.argv[1:])
