# SPDX-License-Identifier: Apache-2.0
"""Where the unix sockets lie, who owns them, and which left-over ones may go. No gRPC here.

Kubelet looks for `*.sock` in its registry directory, recursively, except names that start with a dot, and dials the
absolute path of the service socket that the plugin tells it. During a rolling update two instances of the agent run side
by side and tell their sockets apart by pod UID. The names are those of Kubernetes' own helper (dynamic-resource-allocation,
kubeletplugin/draplugin.go), so that people recognise them.

An instance owns its sockets while it holds an flock on a file beside its service socket; the file lists them. The lock is
taken before any bind, because a gRPC server removes whatever lies at the path it binds, a live sibling's socket too. A
socket of somebody else is removed only when its owner's lock is free and connect() is refused.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import hashlib
import json
import os
import re
import socket
import stat
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from driver.errors import SocketError

MAX_PATH_BYTES = 107
"""sockaddr_un.sun_path has 108 bytes, one of them for the final NUL (unix(7))."""

_POD_UID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_LOCK_SUFFIX = ".lock"
_LOCK_POLL_S = 0.05
_LOCK_FILE_MAX_BYTES = 4096
_DIRECTORY_MODE = 0o750
"""As kubelet creates its plugin directories."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SocketPaths:
    """The files of one instance: the socket kubelet registers, the socket it then calls, and the lock on both."""

    registration: Path
    service: Path
    lock: Path


def socket_paths(*, driver_name: str, registry_dir: Path, plugin_dir: Path, pod_uid: str | None) -> SocketPaths:
    """The paths of this instance, absolute. With a pod UID the longest telling form that fits is taken, else a hash.

    Raises SocketError when even the shortest form is too long, or a name cannot be part of a file name.
    """
    if pod_uid is not None and not _POD_UID.fullmatch(pod_uid):
        raise SocketError(f"Pod UID {pod_uid!r} cannot be part of a socket's name; pass the pod's metadata.uid")
    if "/" in driver_name or driver_name.startswith("."):
        raise SocketError(f"Driver name {driver_name!r} cannot be part of a socket's name")
    if pod_uid is None:
        registrations: tuple[str, ...] = (f"{driver_name}-reg.sock",)
        services: tuple[str, ...] = ("dra.sock",)
    else:
        registrations = (
            f"{driver_name}-{pod_uid}-reg.sock",
            f"{driver_name}-{_digest(pod_uid, size=8)}-reg.sock",
            f"dra-{_digest(driver_name, pod_uid, size=16)}-reg.sock",
        )
        # Six bytes: then a driver name of 63, the longest there is, fits below /var/lib/kubelet/plugins.
        services = (f"dra-{pod_uid}.sock", f"dra-{_digest(pod_uid, size=6)}.sock")
    service = _first_that_fits(plugin_dir, services)
    return SocketPaths(
        registration=_first_that_fits(registry_dir, registrations),
        service=service,
        lock=service.with_name(service.name + _LOCK_SUFFIX),
    )


def bind_path(path: Path) -> Path:
    """Where a socket is bound before it is renamed to `path`: in the same directory, never longer, out of kubelet's sight.

    It depends on `path` alone, so the owner of `path` finds what a killed predecessor left there.
    """
    return path.with_name("." + _digest(path.name, size=5)[:7])


def is_live(path: Path) -> bool:
    """Whether a process listens at `path`. What cannot be told counts as yes: it must not be removed."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.setblocking(False)
        try:
            client.connect(os.fspath(path))
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except OSError:
            return True
    return True


def require_free(path: Path) -> None:
    """Raise SocketError unless a socket may be put at `path`: nothing is there, or a socket that nobody listens on."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    except OSError as error:
        raise SocketError(f"Socket {path} cannot be looked at: {error.strerror}") from error
    if not stat.S_ISSOCK(mode):
        raise SocketError(f"{path} exists and is no socket; remove it")
    if is_live(path):
        raise SocketError(f"Socket {path} is served by a live process; stop it, or run this one with its own --pod-uid")


def make_directory(path: Path) -> None:
    """Have a directory of kubelet's, with those above it. The mode applies to what is created only."""
    try:
        for missing in reversed([path, *path.parents]):
            if not missing.is_dir():
                missing.mkdir(mode=_DIRECTORY_MODE, exist_ok=True)
    except OSError as error:
        raise SocketError(f"Directory {path} for sockets cannot be had: {error.strerror} ({error.filename})") from error


class InstanceLock:
    """The flock that makes the sockets of `paths` ours. Every method may be called again."""

    def __init__(self, paths: SocketPaths, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._paths = paths
        self._clock = clock
        self._fd: int | None = None

    def held(self) -> bool:
        """Whether the lock is held on the file that lies at the path now, and not on one that was removed."""
        return self._fd is not None and _same_file(self._fd, self._paths.lock)

    def acquire(self, *, timeout_s: float, stop: threading.Event) -> None:
        """Take the lock, or take it again when its file was removed; wait for an instance that is just ending.

        Raises SocketError when the time is over or `stop` is set.
        """
        if self.held():
            return
        self._close()
        deadline = self._clock() + timeout_s
        while not self._try_acquire():
            if self._clock() >= deadline or stop.wait(_LOCK_POLL_S):
                raise SocketError(
                    f"Socket {self._paths.service} belongs to another running instance of the agent, which holds"
                    f" {self._paths.lock}; stop it, or run this one with its own --pod-uid"
                )

    def release(self) -> None:
        """Give the lock up and remove its file. Whoever waits on the removed file notices, see `_try_acquire`."""
        if self.held():
            with contextlib.suppress(OSError):
                self._paths.lock.unlink()
        self._close()

    def _close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _try_acquire(self) -> bool:
        fd = _lock_or_none(self._paths.lock, os.O_CREAT)
        if fd is None:
            return False
        content = json.dumps({"sockets": [str(self._paths.registration), str(self._paths.service)]})
        try:
            os.ftruncate(fd, 0)
            os.pwrite(fd, content.encode(), 0)
        except OSError as error:
            os.close(fd)
            raise SocketError(f"Lock file {self._paths.lock} cannot be written: {error.strerror}") from error
        self._fd = fd
        return True


def siblings(paths: SocketPaths) -> frozenset[str]:
    """Names of the lock files of other instances, alive or not."""
    try:
        with os.scandir(paths.lock.parent) as entries:
            names = {entry.name for entry in entries if entry.name.endswith(_LOCK_SUFFIX)}
    except OSError:
        return frozenset()
    return frozenset(names - {paths.lock.name})


def remove_stale(paths: SocketPaths) -> tuple[Path, ...]:
    """Remove the sockets of instances that were killed, so that kubelet forgets them; what was removed, for the log.

    A sibling is dead when its lock is free, and its socket when connect() is refused: both are asked for.
    """
    removed: list[Path] = []
    for name in sorted(siblings(paths)):
        lock = paths.lock.with_name(name)
        try:
            fd = _lock_or_none(lock)
        except SocketError:
            continue
        if fd is None:
            continue
        try:
            for path in _listed_sockets(lock):
                if path.parent in (paths.registration.parent, paths.service.parent):
                    removed += (left for left in (path, bind_path(path)) if _remove_dead_socket(left))
            lock.unlink(missing_ok=True)
        except OSError:
            continue
        finally:
            os.close(fd)
    return tuple(removed)


def _remove_dead_socket(path: Path) -> bool:
    try:
        if not stat.S_ISSOCK(path.lstat().st_mode) or is_live(path):
            return False
        path.unlink()
    except OSError:
        return False
    return True


def _digest(*parts: str, size: int) -> str:
    data = hashlib.sha256("\0".join(parts).encode()).digest()
    return base64.urlsafe_b64encode(data[:size]).rstrip(b"=").decode()


def _first_that_fits(directory: Path, names: tuple[str, ...]) -> Path:
    paths = [Path(os.path.abspath(directory), name) for name in names]  # noqa: PTH100 -- resolve() would follow links
    for path in paths:
        if len(os.fsencode(path)) <= MAX_PATH_BYTES:
            return path
    raise SocketError(
        f"Socket path {paths[-1]} has {len(os.fsencode(paths[-1]))} bytes, a unix socket takes {MAX_PATH_BYTES};"
        " use a shorter --kubelet-dir or --driver-name"
    )


def _same_file(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), path.lstat())
    except OSError:
        return False


def _lock_or_none(path: Path, flags: int = 0) -> int | None:
    """A descriptor that holds the flock of the file at `path`, or None when somebody else holds it.

    Between open and flock the owner may have removed the file: a lock on that one is worth nothing.
    """
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | flags, 0o600)
    except OSError as error:
        raise SocketError(f"Lock file {path} cannot be opened: {error.strerror}") from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    except OSError as error:
        os.close(fd)
        raise SocketError(f"Lock file {path} cannot be locked: {error.strerror}") from error
    if _same_file(fd, path):
        return fd
    os.close(fd)
    return None


def _listed_sockets(lock: Path) -> tuple[Path, ...]:
    """The sockets an owner wrote down; none where the file is not as we write it."""
    try:
        with lock.open("rb") as file:
            names = json.loads(file.read(_LOCK_FILE_MAX_BYTES))["sockets"]
        paths = tuple(Path(name) for name in names if b"\0" not in os.fsencode(name))
    except (ValueError, TypeError, KeyError, RecursionError):
        return ()
    return tuple(path for path in paths if path.suffix == ".sock" and ".." not in path.parts)
