# SPDX-License-Identifier: Apache-2.0
"""One gRPC server on one unix socket.

The socket is bound under a hidden name and renamed into place once the server serves. So nobody sees a socket that does
not answer; its mode is 0600 from the first moment; and grpcio, which unlinks the path it binds before bind and after
stop, whoever's socket lies there by then, only ever touches the hidden name. Kubelet takes the rename for a new socket
(fsnotify reports IN_MOVED_TO as a creation).

The caller holds the `sockets.InstanceLock` of the path during every call.
"""

from __future__ import annotations

import contextlib
import os
import urllib.parse
from collections.abc import Callable
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
"""How many servers whose socket was lost go on for those who are connected to them."""


@dataclass(frozen=True, slots=True)
class _Serving:
    server: grpc.Server
    pool: futures.ThreadPoolExecutor

    def stop(self, grace_s: float) -> None:
        self.server.stop(grace_s).wait(grace_s + _CANCEL_S)
        self.pool.shutdown(wait=False, cancel_futures=True)


class Endpoint:
    """Serves what `handlers` gives at `path`: `open`, `show`, `close` in this order, `reopen` once `intact` says no.

    At most `workers` calls run at a time; their threads are made as they are needed.
    """

    def __init__(
        self, path: Path, *, handlers: Callable[[], list[grpc.GenericRpcHandler]], workers: int, name: str
    ) -> None:
        self.path = path
        self._hidden = sockets.bind_path(path)
        self._handlers = handlers
        self._workers = workers
        self._name = name
        self._serving: _Serving | None = None
        self._retired: list[_Serving] = []
        self._inode: tuple[int, int] | None = None

    def open(self) -> None:
        """Serve under the hidden name. Raises SocketError."""
        self._serving = self._bind()

    def show(self) -> None:
        """Put the socket in its place, over one that nobody serves. Raises SocketError."""
        sockets.require_free(self.path)
        try:
            found = self._hidden.lstat()
            self._hidden.rename(self.path)
        except OSError as error:
            raise SocketError(f"Socket {self.path} cannot be put in place: {error.strerror}") from error
        self._inode = (found.st_dev, found.st_ino)

    def intact(self) -> bool:
        """Whether the socket that was shown still lies at its path. True while none is shown."""
        return self._inode is None or self._inode == _inode(self.path)

    def reopen(self) -> None:
        """Serve at the path again after the socket was lost. Raises SocketError, and may be called again then.

        A connection outlives the file: who is connected to the lost socket, kubelet first of all, is served on as if
        nothing had happened.
        """
        serving = self._bind()
        try:
            self.show()
        except SocketError:
            serving.stop(0)
            raise
        if self._serving is not None:
            self._retired.append(self._serving)
        self._serving = serving
        if len(self._retired) > _KEPT:
            self._retired.pop(0).stop(0)

    def hide(self) -> None:
        """Remove the socket if it is still ours; calls go on. Kubelet unregisters a plugin whose socket is gone."""
        if self._inode is not None and self.intact():
            with contextlib.suppress(OSError):
                self.path.unlink()
        self._inode = None

    def close(self, *, grace_s: float) -> None:
        """Remove the socket, refuse new calls, give those under way `grace_s`, then cancel them. May be called again."""
        self.hide()
        last, self._serving = self._serving, None
        if last is not None:
            last.stop(grace_s)
        while self._retired:
            self._retired.pop().stop(0)

    def _bind(self) -> _Serving:
        sockets.make_directory(self.path.parent)
        sockets.require_free(self.path)
        pool = futures.ThreadPoolExecutor(self._workers, thread_name_prefix=self._name)
        server = grpc.server(pool, handlers=self._handlers())
        try:
            self._hidden.unlink(missing_ok=True)
            # A target is a URI: unquoted, a directory with % or # in its name would be another directory.
            server.add_insecure_port(f"unix:{urllib.parse.quote(os.fspath(self._hidden))}")
            self._hidden.chmod(_SOCKET_MODE)
            server.start()
        except (OSError, RuntimeError) as error:
            _Serving(server, pool).stop(0)
            raise SocketError(f"Socket {self.path} cannot be bound: {error}") from error
        return _Serving(server, pool)


def _inode(path: Path) -> tuple[int, int] | None:
    try:
        found = path.lstat()
    except OSError:
        return None
    return found.st_dev, found.st_ino
