# SPDX-License-Identifier: Apache-2.0
"""Files that others read while we write them: placed whole or not at all."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Callable
from pathlib import Path

_PRIVATE = 0o700


def make_private_directory(path: Path) -> None:
    """A folder for the agent alone, made if it is missing, and closed to others if it is open to them."""
    path.mkdir(mode=_PRIVATE, parents=True, exist_ok=True)
    if path.stat().st_mode & 0o077:
        path.chmod(_PRIVATE)


def temporary_name(name: str) -> str:
    """The name under which a file is written before it is placed. Hidden, and without an extension that CDI reads."""
    return f".{name}.tmp"


def whole_name(temporary: str) -> str | None:
    """The name that a temporary one stands for, None where it is none."""
    if temporary.startswith(".") and temporary.endswith(".tmp"):
        return temporary[1 : -len(".tmp")]
    return None


def write_atomic(
    directory: str, name: str, data: bytes, *, mode: int, written: Callable[[], None] | None = None
) -> os.stat_result:
    """Place a file: temporary file, rename; its status as placed. Raises OSError, and then the old one stands.

    A reader sees the old file or the new one, whatever happens to this process. Nothing is synced: what is placed so is made
    from the record, and is made again after a machine lost power, before anybody may use it. The caller excludes other
    writers of the same path, so the temporary name is fixed and what lies there is of nobody. `written` is called when
    the temporary file is complete.
    """
    temporary = f"{directory}/{temporary_name(name)}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    try:
        fd = os.open(temporary, flags, mode)
    except FileExistsError:
        # Left by a writer that was killed, or a link or pipe that somebody put there: opening that may lead or hang anywhere.
        Path(temporary).unlink()
        fd = os.open(temporary, flags, mode)
    try:
        try:
            rest = data[os.write(fd, data) :]
            while rest:
                rest = rest[os.write(fd, rest) :]
            if written is not None:
                written()
            os.rename(temporary, f"{directory}/{name}")  # noqa: PTH104 - strings: every Prepare comes by
            return os.fstat(fd)
        finally:
            os.close(fd)
    except OSError:
        with contextlib.suppress(OSError):
            Path(temporary).unlink()
        raise


def read_limited(path: Path, *, limit: int) -> bytes:
    """The content of a regular file. Raises OSError, also for anything else of that name (a link may change its target
    unseen, opening a pipe may never end), and where it is longer than `limit` bytes.
    """
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(fd, "rb", buffering=0) as file:  # noqa: PTH123 - Path.open takes no descriptor
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(f"{path} is no regular file")
        data = file.read(limit + 1) or b""
        if len(data) > limit:
            raise OSError(f"{path} is longer than {limit} bytes")
        return data


def remove(path: Path) -> bool:
    """Remove a file; False when there was none. Raises OSError."""
    try:
        path.unlink()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def sync_directory(path: Path) -> None:
    """Make what was placed in a folder survive a loss of power."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
