# SPDX-License-Identifier: Apache-2.0
"""One gRPC server on the agent's unix sockets.

A socket is bound under a hidden name and renamed into place once the server serves. So nobody sees a socket that does not
answer; its mode is 0600 from the first moment; and grpcio, which unlinks the path it binds before bind and after stop,
whoever's socket lies there by then, only ever touches the hidden name. Kubelet takes the rename for a new socket
(fsnotify reports IN_MOVED_TO as a creation).

One server for all sockets, as each costs ten wake-ups a second though nothing happens. Whoever connects to one socket
finds the services of the others as well, which harms nobody: kubelet itself knows plugins with one socket for both.

The caller holds the `sockets.InstanceLock` of the paths during every call.
"""

from __future__ import annotations

import contextlib
import os
import urllib.parse
from collections.abc import Callable, Sequence
from concurrent import futures
from dataclasses import dataclass
from pathlib import Path

import grpc

from driver.errors import SocketError
from driver.kubelet import sockets

_SOCKET_MODE = 0o600
_CANCEL_S = 0.3
"""How long a cancelled call may take to end before it is left behind."""

_KEPT = 2
"""How many servers that have lost their sockets go on for those who are connected to them."""


@dataclass(frozen=True, slots=True, eq=False)
class _Serving:
    server: grpc.Server
    pool: futures.ThreadPoolExecutor

    def stop(self, grace_s: float) -> None:
        self.server.stop(grace_s).wait(grace_s + _CANCEL_S)
        self.pool.shutdown(wait=False, cancel_futures=True)


class Endpoint:
    """Serves what `handlers` gives at `paths`: `open`, `show` each, `close`; `reopen` what `lost` names.

    At most `workers` calls run at a time; their threads are made as they are needed.
    """

    def __init__(
        self, paths: Sequence[Path], *, handlers: Callable[[], list[grpc.GenericRpcHandler]], workers: int
    ) -> None:
        self._paths = tuple(paths)
        self._handlers = handlers
        self._workers = workers
        self._serving: dict[Path, _Serving] = {}
        self._retired: list[_Serving] = []
        self._shown: dict[Path, tuple[int, int]] = {}

    def open(self) -> None:
        """Serve under the hidden names. Raises SocketError."""
        self._serving = dict.fromkeys(self._paths, self._bind(self._paths))

    def show(self, path: Path) -> None:
        """Put a socket in its place, over one that nobody serves. Raises SocketError."""
        sockets.require_free(path)
        hidden = sockets.bind_path(path)
        try:
            found = hidden.lstat()
            hidden.rename(path)
        except OSError as error:
            raise SocketError(f"Socket {path} cannot be put in place: {error.strerror}") from error
        self._shown[path] = (found.st_dev, found.st_ino)

    def lost(self) -> tuple[Path, ...]:
        """The sockets that were shown and do not lie at their paths any more."""
        return tuple(path for path, inode in self._shown.items() if inode != _inode(path))

    def reopen(self, path: Path) -> None:
        """Serve at a path again after its socket was lost. Raises SocketError, and may be called again then.

        A connection outlives the file: who is connected to the lost socket, kubelet first of all, is served on as if
        nothing had happened, and the other sockets stay as they are.
        """
        serving = self._bind((path,))
        try:
            self.show(path)
        except SocketError:
            serving.stop(0)
            raise
        before, self._serving[path] = self._serving[path], serving
        if before not in self._serving.values():
            self._retired.append(before)
        if len(self._retired) > _KEPT:
            self._retired.pop(0).stop(0)

    def close(self, *, grace_s: float) -> None:
        """Remove the sockets that are still ours, the last one first; refuse new calls, give those under way `grace_s`,
        then cancel them. May be called again.
        """
        for path in reversed(self._paths):
            self._hide(path)
        current = list(dict.fromkeys(self._serving.values()))
        self._serving = {}
        retired, self._retired = self._retired, []
        for serving in retired:
            serving.server.stop(grace_s)
        for serving in current + retired:
            serving.stop(grace_s)

    def _hide(self, path: Path) -> None:
        inode = self._shown.pop(path, None)
        if inode is not None and inode == _inode(path):
            with contextlib.suppress(OSError):
                path.unlink()

    def _bind(self, paths: Sequence[Path]) -> _Serving:
        for path in paths:
            sockets.make_directory(path.parent)
            sockets.require_free(path)
        pool = futures.ThreadPoolExecutor(self._workers, thread_name_prefix="rpc")
        serving = _Serving(grpc.server(pool, handlers=self._handlers()), pool)
        hidden = [sockets.bind_path(path) for path in paths]
        try:
            for path in hidden:
                path.unlink(missing_ok=True)
                # A target is a URI: unquoted, a directory with % or # in its name would be another directory.
                serving.server.add_insecure_port(f"unix:{urllib.parse.quote(os.fspath(path))}")
                path.chmod(_SOCKET_MODE)
            serving.server.start()
        except (OSError, RuntimeError) as error:
            serving.stop(0)
            for path in hidden:
                with contextlib.suppress(OSError):
                    path.unlink(missing_ok=True)
            raise SocketError(f"Nothing can be bound for {', '.join(map(str, paths))}: {error}") from error
        return serving


def _inode(path: Path) -> tuple[int, int] | None:
    try:
        found = path.lstat()
    except OSError:
        return None
    return found.st_dev, found.st_ino
