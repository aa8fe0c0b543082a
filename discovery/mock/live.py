# SPDX-License-Identifier: Apache-2.0
"""The one file that changes in a rendered machine: `nvml.json`, the state behind NVML and the faults in place.

Whoever changes it (the library on a MIG call, `faults.apply`) does so under a lock and replaces it whole; whoever reads
it notices by inode and time. Several processes may hold the same machine, as two instances of an agent do in an update.

It is one JSON document in which each GPU has a line of its own. What a change left alone is neither written nor read anew:
a GPU with its profiles and peers is most of a millisecond, and the time of a MIG call is to be the hardware's.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from discovery import codec
from discovery.errors import DocumentError
from discovery.mock import fault, state

FILE = "nvml.json"
LOCK = "nvml.lock"

T = TypeVar("T")

_BEFORE_GPUS = ', "gpus": [\n'
_BETWEEN_GPUS = ",\n"
_AFTER_GPUS = "\n]}}"


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
        self._lines: dict[str, state.Gpu] = {}
        """The lines of the GPUs of `_live`."""

    def read(self) -> Live:
        """The state as it is now. DocumentError when there is none, or it is damaged."""
        with self._mutex:
            try:
                found = os.stat(self._path)  # noqa: PTH116 - at every call of the library, and half as dear
                key = (found.st_ino, found.st_mtime_ns, found.st_size)
                if self._live is None or key != self._seen:
                    self._live, self._seen = self._parse(self._path.read_text(encoding="utf-8")), key
            except OSError as err:
                raise DocumentError(f"{self._path}: not the state of a rendered machine: {err.strerror}") from err
            except ValueError as err:
                raise DocumentError(f"{self._path}: damaged: {err}") from err
            return self._live

    def update(self, change: Callable[[Live], Live]) -> Live:
        """Replaces the state by what `change` makes of it; nobody else changes it meanwhile."""
        with self.locked():
            live = change(self.read())
            self.write(live)
            return live

    def write(self, live: Live) -> None:
        """Writes the state whole, under the lock. A reader sees the old or the new one."""
        temporary = self._path.with_name(f"{FILE}.new")
        with self._mutex:
            text, lines = self._text(live)
            with temporary.open("w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                self._date(file.fileno())
                written = os.fstat(file.fileno())
            temporary.replace(self._path)
            self._seen = (written.st_ino, written.st_mtime_ns, written.st_size)
            self._live, self._lines = live, lines

    def _date(self, descriptor: int) -> None:
        """Gives a file a later time than the one that it replaces has, which clocks that tick a few hundred times a second may not:
        with the inode and the size of one before that, a reader would take it for that one.
        """
        now = time.time_ns()
        with contextlib.suppress(FileNotFoundError):
            now = max(now, self._path.stat().st_mtime_ns + 1)
        os.utime(descriptor, ns=(now, now))

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

    def _text(self, live: Live) -> tuple[str, dict[str, state.Gpu]]:
        if live.nvml is None or not live.nvml.gpus:
            return json.dumps(codec.encode(live)), {}
        head = json.dumps(codec.encode(dataclasses.replace(live, nvml=None)))
        known = {id(gpu): line for line, gpu in self._lines.items()}
        lines = {known.get(id(gpu)) or json.dumps(codec.encode(gpu)): gpu for gpu in live.nvml.gpus}
        system = json.dumps(codec.encode(live.nvml.system))
        before = f'{head[:-1]}, "nvml": {{"system": {system}{_BEFORE_GPUS}'
        return f"{before}{_BETWEEN_GPUS.join(lines)}{_AFTER_GPUS}", lines

    def _parse(self, text: str) -> Live:
        head, written_so, rest = text.partition(_BEFORE_GPUS)
        if not written_so or not rest.endswith(_AFTER_GPUS):  # by another hand than `write`, or without GPUs
            return self._decode(Live, json.loads(text), "")
        live = self._decode(Live, json.loads(f"{head}}}}}"), "")
        assert live.nvml is not None
        lines = rest.removesuffix(_AFTER_GPUS).split(_BETWEEN_GPUS)
        gpus = tuple(
            self._lines.get(line) or self._decode(state.Gpu, json.loads(line), f".nvml.gpus[{number}]")
            for number, line in enumerate(lines)
        )
        self._lines = dict(zip(lines, gpus, strict=True))
        return dataclasses.replace(live, nvml=dataclasses.replace(live.nvml, gpus=gpus))

    def _decode(self, cls: type[T], obj: object, place: str) -> T:
        return codec.decode(cls, obj, place=f"{self._path}{place}")
