# SPDX-License-Identifier: Apache-2.0
"""The processes that are measured: started, ended, and what they use of memory and CPU, from /proc."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from hack.bench.errors import BenchError

STOP_TIMEOUT_S = 10.0
PROC = Path("/proc")

_CPUCLOCK_SCHED = 2
"""include/linux/posix-timers_types.h: the clock of CPU time as the scheduler counts it, in nanoseconds."""

_MAPPING = re.compile(r"[0-9a-f]+-[0-9a-f]+ .{4} ([0-9a-f]+) ([0-9a-f]+:[0-9a-f]+) (\d+)")
_KILOBYTES = re.compile(r"(\w+): +(\d+) kB")


class Process:
    """A process of its own, its output in a file. A context manager: at its end the process is ended too."""

    def __init__(self, command: Sequence[str], *, log: Path, environment: Mapping[str, str] | None = None) -> None:
        self._command = tuple(command)
        self._log = log
        with log.open("ab") as output:
            self.started = time.perf_counter()
            self._popen = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**os.environ, **(environment or {})},
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._popen.pid

    def check(self) -> None:
        """Raise BenchError, with the end of its log, if it has ended."""
        if self._popen.poll() is not None:
            tail = self._log.read_text(errors="replace")[-2000:]
            raise BenchError(f"{self._command[0]} ended with {self._popen.returncode}; its last words:\n{tail}")

    def stop(self) -> float:
        """SIGTERM, and the seconds until it has ended; SIGKILL if that takes too long. Repeats do nothing."""
        began = time.perf_counter()
        if self._popen.poll() is None:
            self._popen.send_signal(signal.SIGTERM)
            try:
                self._popen.wait(timeout=STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self._popen.kill()
                self._popen.wait()
        return time.perf_counter() - began

    def tree(self) -> tuple[int, ...]:
        """Its process id and those of all its descendants."""
        return descendants(self.pid)


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes that a group of processes uses.

    `pss`: the sum of the proportional set sizes, as the kernel counts them: a page of a file that processes outside the
    group map too (this benchmark runs on the same Python and the same gRPC) is charged to the group in part only.
    `alone`: the same as if nobody outside mapped those files: every page once. A node gives that, so it is the honest one.
    """

    pss: int
    alone: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryMapping:
    """One mapping of /proc/PID/smaps, in bytes. `file` is its place in a file; None where there is none."""

    file: tuple[str, int, int] | None
    rss: int
    pss: int
    anonymous: int


def descendants(pid: int, *, proc: Path = PROC) -> tuple[int, ...]:
    """The process and everything it started, directly or not, while they live."""
    children: dict[int, list[int]] = {}
    for entry in proc.iterdir():
        if not entry.name.isdecimal():
            continue
        try:
            stat = (entry / "stat").read_text(errors="replace")
        except OSError:
            continue  # ended between the listing and the reading
        parent = int(stat.rpartition(")")[2].split()[1])
        children.setdefault(parent, []).append(int(entry.name))
    found = [pid]
    for member in found:
        found.extend(children.get(member, ()))
    return tuple(found)


def parse_smaps(text: str) -> Iterator[MemoryMapping]:
    """The mappings of one process (Documentation/filesystems/proc.rst, smaps)."""
    file: tuple[str, int, int] | None = None
    sizes: dict[str, int] = {}
    for line in text.splitlines():
        if head := _MAPPING.match(line):
            if sizes:
                yield _mapping(file, sizes)
            offset, device, inode = head.groups()
            file = (device, int(inode), int(offset, 16)) if int(inode) else None
            sizes = {}
        elif size := _KILOBYTES.match(line):
            sizes[size[1]] = int(size[2]) * 1024
    if sizes:
        yield _mapping(file, sizes)


def _mapping(file: tuple[str, int, int] | None, sizes: Mapping[str, int]) -> MemoryMapping:
    return MemoryMapping(file=file, rss=sizes["Rss"], pss=sizes["Pss"], anonymous=sizes["Anonymous"])


def sum_memory(processes: Iterable[Iterable[MemoryMapping]]) -> Memory:
    """The memory of a group. Of one place in a file that several members map, the one that touched most of it counts: they
    share its pages.
    """
    pss = alone = 0
    files: dict[tuple[str, int, int], int] = {}
    for mappings in processes:
        for mapping in mappings:
            pss += mapping.pss
            if mapping.file is None:
                alone += mapping.pss
            else:
                alone += mapping.anonymous
                files[mapping.file] = max(files.get(mapping.file, 0), mapping.rss - mapping.anonymous)
    return Memory(pss=pss, alone=alone + sum(files.values()))


def memory(pids: Sequence[int], *, proc: Path = PROC) -> Memory:
    """What these processes use now."""
    return sum_memory(parse_smaps((proc / str(pid) / "smaps").read_text()) for pid in pids)


def cpu_seconds(pids: Sequence[int]) -> float:
    """CPU time of these processes since their start, ended threads included, to the nanosecond (clock_getcpuclockid(3):
    the id of another process's clock is made from its process id).
    """
    return sum(time.clock_gettime((~pid << 3) | _CPUCLOCK_SCHED) for pid in pids)
