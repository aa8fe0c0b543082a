# SPDX-License-Identifier: Apache-2.0
"""The file system that the NVIDIA driver is installed in: the host's own, or that of a driver container.

A path in it has three spellings: inside (`/usr/lib64/libcuda.so.1`), as the agent sees it (below the mount), and on the
host (below the root), which is what CDI names. Links are followed inside: an absolute link of a driver container means a
path of that container, and none leads out of it.
"""

from __future__ import annotations

import stat
from collections.abc import Callable
from pathlib import Path

_LINKS_MAX = 40
"""As the kernel (MAXSYMLINKS)."""


class DriverRoot:
    """A root that is called `host` on the host and seen by the agent at `mount`."""

    def __init__(self, host: Path, *, mount: Path) -> None:
        self.host = host
        self.mount = mount

    def seen(self, inside: str) -> Path:
        """Where the agent sees a resolved path."""
        return self.mount / inside.lstrip("/")

    def on_host(self, inside: str) -> str:
        """What a resolved path is called on the host."""
        return str(self.host / inside.lstrip("/"))

    def resolve(self, inside: str) -> str | None:
        """The path without links, None where it leads to nothing."""
        pending = inside.split("/")[::-1]
        done: list[str] = []
        links = 0
        while pending:
            part = pending.pop()
            if part in ("", "."):
                continue
            if part == "..":
                del done[-1:]
                continue
            place = self.mount.joinpath(*done, part)
            try:
                if stat.S_ISLNK(place.lstat().st_mode):
                    target = str(place.readlink())
                else:
                    done.append(part)
                    continue
            except OSError:
                return None
            links += 1
            if links > _LINKS_MAX:
                return None
            if target.startswith("/"):
                done = []
            pending.extend(target.split("/")[::-1])
        return "/" + "/".join(done)

    def file(self, inside: str) -> str | None:
        """The resolved path of a regular file, None where there is none."""
        return self._of_kind(inside, stat.S_ISREG)

    def directory(self, inside: str) -> str | None:
        """The resolved path of a folder, None where there is none."""
        return self._of_kind(inside, stat.S_ISDIR)

    def names(self, directory: str) -> tuple[str, ...]:
        """What is in a resolved folder, in order of name; nothing where it cannot be read."""
        try:
            return tuple(sorted(path.name for path in self.seen(directory).iterdir()))
        except OSError:
            return ()

    def _of_kind(self, inside: str, kind: Callable[[int], bool]) -> str | None:
        resolved = self.resolve(inside)
        if resolved is None:
            return None
        try:
            return resolved if kind(self.seen(resolved).lstat().st_mode) else None
        except OSError:
            return None


def installed(host: Path, *, mount: Path | None, mocked: bool) -> DriverRoot | None:
    """Where the driver's files are. A mock machine has those of a root that somebody named: the files of this host, if any, are not
    those of that machine.
    """
    if mocked and host == Path("/"):
        return None
    return DriverRoot(host, mount=host if mount is None else mount)
