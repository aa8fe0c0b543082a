# SPDX-License-Identifier: Apache-2.0
"""Where built things are kept, and the folder of one build, of which nothing stays, however it ends."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import NoReturn

from hack.agentimage.errors import ImageError
from hack.tools import cache

ALONE = (
    *("setpriv", "--pdeathsig", "KILL"),
    *("unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "--propagation", "private"),
)
"""Mounts and processes of a command that needs root are its own, and end with it; it ends with us."""


def images() -> Path:
    """The folder that outlives a build, made if it is not there."""
    folder = cache.folder() / "images"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Holds the lock file; it stays, because a lock file that is removed locks nobody."""
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def temporary(kept: Path) -> Iterator[Path]:
    """A folder for one build, beside what is kept, because /tmp may be small. Those of builds that were killed are removed first."""
    with locked(kept / "builds.lock"):
        for left in kept.glob("build-*"):
            _remove_if_abandoned(left)
        folder = Path(tempfile.mkdtemp(prefix="build-", dir=kept))
        lock = (folder / "lock").open("w")
        fcntl.flock(lock, fcntl.LOCK_EX)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        lock.close()


def _remove_if_abandoned(folder: Path) -> None:
    with contextlib.suppress(FileNotFoundError), (folder / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return
    shutil.rmtree(folder, ignore_errors=True)


def keep_newest(kept: Path, pattern: str, count: int) -> None:
    """Removes what was used longest ago. Whoever has such a file open still reads it to its end."""
    newest = sorted(kept.glob(pattern), key=lambda path: path.stat().st_mtime, reverse=True)
    for path in newest[count:]:
        path.unlink(missing_ok=True)


def run(command: Sequence[str | Path], *, quiet: bool = False, temporary_files: Path | None = None) -> str:
    """Runs a step of the build; what it prints goes to stderr, or into the error. Returns its stdout. Raises ImageError."""
    words = [str(word) for word in command]
    environment = {**os.environ, "TMPDIR": str(temporary_files)} if temporary_files else None
    with subprocess.Popen(
        words,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=environment,
    ) as process:
        assert process.stdout is not None
        lines: list[str] = []
        try:
            for line in process.stdout:
                lines.append(line)
                if not quiet:
                    print(line, end="", file=sys.stderr, flush=True)
        except BaseException:
            process.kill()
            raise
    text = "".join(lines)
    if process.returncode != 0:
        program = next(word for word in words[_prefix(words) :])
        raise ImageError(
            f"{program} failed with status {process.returncode}" + (f": {text.strip()[-4000:]}" if quiet else "")
        )
    return text


def _prefix(words: Sequence[str]) -> int:
    return len(ALONE) if tuple(words[: len(ALONE)]) == ALONE else 0


def end_by_exception_when_told_to() -> None:
    """Makes SIGTERM and SIGHUP leave through every `finally`, as an interrupt does; under nohup SIGHUP still does nothing."""

    def leave(number: int, _frame: FrameType | None) -> NoReturn:
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, leave)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        signal.signal(signal.SIGHUP, leave)
