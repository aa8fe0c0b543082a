# SPDX-License-Identifier: Apache-2.0
"""Locks that threads of this process and another instance of the agent respect.

Between processes a lock is one byte of a lock file, held by an open file description (F_OFD_SETLK, fcntl(2), Linux 3.15):
the kernel drops it when the holder dies, one description never lends its locks to another thread, a conversion from
shared to exclusive either happens or changes nothing, and no file has to be made and removed for each claim. Between
threads a mutex stands before it, so that a waiter wakes at once; only a waiter for another process has to look again.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import struct
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Protocol

from discovery.address import PciAddress
from driver.errors import RecordError
from driver.prepare import files

_FLOCK = struct.Struct("hhqqi4x")
"""struct flock of 64-bit Linux: l_type, l_whence, l_start, l_len, l_pid."""

_DIRECTORY = "locks"
_FILE_MODE = 0o600
_SPARE_MAX = 16
_LOOK_AGAIN_S = 0.01
"""How often a lock that another process holds is tried: both instances live only while one replaces the other."""


class LockUnavailableError(Exception):
    """The lock was not obtained in time, or the agent is stopping."""


class Patience(Protocol):
    """How long a caller may wait."""

    def remaining_s(self) -> float:
        """Seconds left; 0 or less once the time is up."""


def directory(state: Path) -> Path:
    """The folder of the lock files in a state folder, made if it is missing. Raises RecordError."""
    path = state / _DIRECTORY
    try:
        files.make_private_directory(path)
    except OSError as error:
        raise RecordError(f"The folder {path} cannot be used: {error.strerror}") from error
    return path


class Deadline:
    """Patience until a number of seconds from now, for work that no RPC waits for."""

    def __init__(self, seconds: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._end = clock() + seconds

    def remaining_s(self) -> float:
        """Seconds left; 0 or less once the time is up."""
        return self._end - self._clock()

    def over(self) -> bool:
        """Whether the time is up."""
        return self.remaining_s() <= 0


def _set(fd: int, kind: int, start: int, length: int = 1) -> bool:
    """Try to set a lock; False when another description holds a conflicting one."""
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _FLOCK.pack(kind, os.SEEK_SET, start, length, 0))
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return False
        raise
    return True


def _conflict(fd: int, start: int) -> int | None:
    """Where a lock of another description at `start` or above begins, None if there is none.

    F_OFD_GETLK answers one lock that conflicts, in no promised order.
    """
    answer = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, start, 0, 0))
    kind, _, found, _, _ = _FLOCK.unpack(answer)
    return None if kind == fcntl.F_UNLCK else max(found, start)


def _open(path: str | Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, _FILE_MODE)


def _closed(fd: int) -> int:
    """Close a descriptor once: the number may be somebody else's the next moment."""
    if fd >= 0:
        os.close(fd)
    return -1


class _Mutex:
    __slots__ = ("lock", "users")

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.users = 0


class KeyedLocks:
    """Any number of exclusive locks, told apart by a number (0 to 2**62), each one byte of the file at `path`."""

    def __init__(self, path: Path, *, stop: threading.Event) -> None:
        self.path = str(path)
        self.stop = stop
        self._guard = threading.Lock()
        self._mutexes: dict[int, _Mutex] = {}
        self._spare: list[int] = []

    def hold(self, keys: Sequence[int], *, patience: Patience) -> Hold:
        """Locks to hold for the length of a `with` block, taken in the order given, which every caller must keep.

        Entering raises LockUnavailableError when they are not obtained in time.
        """
        return Hold(self, keys, patience)

    def acquire(self, key: int, timeout_s: float) -> bool:
        """Take the lock among the threads of this process. For Hold."""
        with self._guard:
            mutex = self._mutexes.get(key)
            if mutex is None:
                mutex = self._mutexes[key] = _Mutex()
            mutex.users += 1
        if mutex.lock.acquire(timeout=max(0.0, min(timeout_s, threading.TIMEOUT_MAX))):
            return True
        self._leave(key, mutex)
        return False

    def release(self, key: int) -> None:
        """Let another thread of this process have it. For Hold."""
        mutex = self._mutexes[key]
        mutex.lock.release()
        self._leave(key, mutex)

    def lend(self) -> int:
        """An open file description that holds no lock; one that was given back, as opening costs more. For Hold."""
        try:
            return self._spare.pop()
        except IndexError:
            return _open(self.path)

    def give_back(self, fd: int) -> None:
        """Drop every lock of a description, and keep it. For Hold."""
        if len(self._spare) >= _SPARE_MAX or not _set(fd, fcntl.F_UNLCK, 0, 0):
            os.close(fd)
        else:
            self._spare.append(fd)

    def _leave(self, key: int, mutex: _Mutex) -> None:
        with self._guard:
            mutex.users -= 1
            if not mutex.users:
                del self._mutexes[key]


class Hold:
    """Some locks of a KeyedLocks, as a context manager. A class, not a generator: every Prepare passes through two."""

    __slots__ = ("_fd", "_keys", "_locks", "_patience", "_taken")

    def __init__(self, owner: KeyedLocks, keys: Sequence[int], patience: Patience) -> None:
        self._locks = owner
        self._keys = keys
        self._patience = patience
        self._taken = 0
        self._fd = -1

    def __enter__(self) -> None:
        try:
            obtained = self._obtain()
        except BaseException:
            self.__exit__()
            raise
        if not obtained:
            self.__exit__()
            raise LockUnavailableError

    def _obtain(self) -> bool:
        for key in self._keys:
            if not self._locks.acquire(key, self._patience.remaining_s()):
                return False
            self._taken += 1
        self._fd = self._locks.lend()
        for key in self._keys:
            while not _set(self._fd, fcntl.F_WRLCK, key):
                if self._patience.remaining_s() <= 0 or self._locks.stop.wait(_LOOK_AGAIN_S):
                    return False
        return True

    def __exit__(self, *_: object) -> None:
        if self._fd >= 0:
            self._locks.give_back(self._fd)
            self._fd = -1
        while self._taken:
            self._taken -= 1
            self._locks.release(self._keys[self._taken])


class SharedLock:
    """One lock that every instance holds shared while it lives, and that one may hold alone for a moment."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd = _open(path)

    def in_place(self) -> bool:
        """Whether the file that is locked still lies where other instances look for it. True where that cannot be told."""
        try:
            return os.path.samestat(os.fstat(self._fd), self._path.stat())
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError:
            return True

    def share(self) -> bool:
        """Hold it shared, also after `take_alone`. False when another instance holds it alone."""
        return _set(self._fd, fcntl.F_RDLCK, 0)

    def take_alone(self) -> bool:
        """Hold it exclusively. False, and nothing changed, when another instance holds it in any way."""
        return _set(self._fd, fcntl.F_WRLCK, 0)

    def release(self) -> None:
        """Hold it no more."""
        _set(self._fd, fcntl.F_UNLCK, 0)

    def close(self) -> None:
        """Let go of it for good. Idempotent."""
        self._fd = _closed(self._fd)


class NumberLocks:
    """Numbers that processes hold while they live, each one byte of the file at `path`; one number a process."""

    def __init__(self, path: Path) -> None:
        self._fd = _open(path)

    def hold(self, number: int) -> bool:
        """Hold a number for the life of this object. False when another process holds it."""
        return _set(self._fd, fcntl.F_WRLCK, number)

    def held_above(self, number: int) -> bool:
        """Whether another process holds a higher number."""
        return _conflict(self._fd, number + 1) is not None

    def highest(self) -> int:
        """The highest number that another process holds, 0 if there is none."""
        highest = 0
        while (found := _conflict(self._fd, highest + 1)) is not None:
            highest = found
        return highest

    def close(self) -> None:
        """Let go of the number. Idempotent."""
        self._fd = _closed(self._fd)


class Locks:
    """The locks of claims and of GPUs, in a state folder. Order: a claim first, then GPUs by address."""

    def __init__(self, state: Path, *, stop: threading.Event) -> None:
        self._claims = KeyedLocks(directory(state) / "claims.lock", stop=stop)
        self._gpus = KeyedLocks(directory(state) / "gpus.lock", stop=stop)

    def claim(self, name: str, *, patience: Patience) -> Hold:
        """The lock of a claim, by UID (or of another thing of ours that is named and written like a claim's file)."""
        digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
        return self._claims.hold((int.from_bytes(digest) >> 2,), patience=patience)

    def gpus(self, addresses: Iterable[PciAddress], *, patience: Patience) -> Hold:
        """The locks of some GPUs, taken in the order of their addresses, so that no two callers wait for each other."""
        return self._gpus.hold(sorted({_offset(address) for address in addresses}), patience=patience)


def _offset(address: PciAddress) -> int:
    """The byte of a GPU: its address as the kernel numbers it, which keeps the order and has at most 48 bits."""
    return address.domain << 16 | address.bus << 8 | address.device << 3 | address.function
