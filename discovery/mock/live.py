# SPDX-License-Identifier: Apache-2.0
"""The one file that changes in a rendered machine: `nvml.json`, the state behind NVML and the faults in place.

Whoever changes it (the library on a MIG call, `faults.apply`) does so under a lock and replaces it whole; whoever reads
it notices by inode and time. Several processes may hold the same machine, as two instances of an agent do in an update.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from discovery import codec
from discovery.errors import DocumentError
from discovery.mock import fault, state

FILE = "nvml.json"
LOCK = "nvml.lock"


@dataclass(frozen=True, slots=True, kw_only=True)
class Live:
    """The changing part of a rendered machine. `recording`: digest of the Recording it was rendered from. `applied`: the
    faults that the files of the tree show. `seqnum`: number of the last uevent that was sent.
    """

    recording: str
    nvml: state.Nvml | None = None
    faults: tuple[fault.Placed, ...] = ()
    applied: tuple[fault.Fault, ...] = ()
    seqnum: int = 0


class LiveFile:
    """Reads and changes the state of one rendered directory. Thread-safe."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / FILE
        self._lock_path = directory / LOCK
        self._mutex = threading.Lock()
        self._seen: tuple[int, int, int] | None = None
        self._live: Live | None = None

    def read(self) -> Live:
        """The state as it is now. DocumentError when there is none, or it is damaged."""
        with self._mutex:
            try:
                found = os.stat(self._path)  # noqa: PTH116 - at every call of the library, and half as dear
                key = (found.st_ino, found.st_mtime_ns, found.st_size)
                if self._live is None or key != self._seen:
                    self._live, self._seen = _parse(self._path), key
            except OSError as err:
                raise DocumentError(f"{self._path}: not the state of a rendered machine: {err.strerror}") from err
            return self._live

    def update(self, change: Callable[[Live], Live]) -> Live:
        """Replaces the state by what `change` makes of it; nobody else changes it meanwhile."""
        with self.locked():
            live = change(self.read())
            self.write(live)
            return live

    def write(self, live: Live) -> None:
        """Writes the state whole. A reader sees the old or the new one."""
        temporary = self._path.with_name(f"{FILE}.{os.getpid()}.{threading.get_ident()}.tmp")
        temporary.write_text(json.dumps(codec.encode(live)), encoding="utf-8")
        temporary.replace(self._path)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Held by whoever changes the state or, because of it, files of the tree."""
        try:
            lock = os.open(self._lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as err:
            raise DocumentError(f"{self._lock_path}: cannot lock the rendered machine: {err.strerror}") from err
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
        finally:
            os.close(lock)


def _parse(path: Path) -> Live:
    try:
        obj = json.loads(path.read_bytes())
    except ValueError as err:
        raise DocumentError(f"{path}: damaged: {err}") from err
    return codec.decode(Live, obj, place=str(path))
