# SPDX-License-Identifier: Apache-2.0
"""Serves the supervisor's socket. Root alone may talk to it: by the mode of the socket and of its folder, and by the credentials of
who connects (unix(7), SO_PEERCRED).
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from discovery import frames
from driver.errors import MpsError, SocketError
from driver.mps import shares, wire
from driver.mps.supervisor import Supervisor

logger = logging.getLogger(__name__)

CONVERSATIONS_MAX = 64
"""An agent has a few at a time: one for every Prepare that is under way, and one that waits."""

REQUEST_S = 10.0
"""How long a client may take for its next request, and for taking its answer."""

_CREDENTIALS = struct.Struct("3i")
_PATH_MAX = 107


class Server:
    """The socket of a supervisor, in its folder. `stop` ends it."""

    def __init__(self, supervisor: Supervisor, directory: Path) -> None:
        """Serve from now on. Raises SocketError."""
        self._supervisor = supervisor
        self._path = directory / shares.SOCKET
        self._free = threading.Semaphore(CONVERSATIONS_MAX)
        self._answers: Final[Mapping[str, Callable[[Mapping[str, Any]], Any]]] = {
            "place": self._place,
            "remove": self._remove,
            "status": self._status,
            "wait": self._wait,
        }
        self._listener = self._listen()
        self._thread = threading.Thread(target=self._accept, name="mps-server", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Take no more requests. Idempotent."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()
        self._path.unlink(missing_ok=True)

    def _listen(self) -> socket.socket:
        if len(os.fsencode(self._path)) > _PATH_MAX:
            raise SocketError(
                f"Socket {self._path} has more than {_PATH_MAX} bytes in its path: take a shorter --mps-dir"
            )
        new = self._path.with_name("." + shares.SOCKET[:8])
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            new.unlink(missing_ok=True)
            listener.bind(os.fspath(new))
            new.chmod(0o600)
            listener.listen(CONVERSATIONS_MAX)
            new.rename(self._path)  # the lock of the folder says that whatever lies there is nobody's
        except OSError as error:
            listener.close()
            raise SocketError(f"Socket {self._path} cannot be served: {error.strerror}") from error
        return listener

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            if not self._free.acquire(blocking=False):
                logger.warning("More than %d conversations at once: one is turned away", CONVERSATIONS_MAX)
                connection.close()
                continue
            threading.Thread(target=self._converse, args=(connection,), name="mps-request", daemon=True).start()

    def _converse(self, connection: socket.socket) -> None:
        try:
            with connection:
                if not _allowed(connection):
                    logger.warning("A program of another user was turned away from %s", self._path)
                    return
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(REQUEST_S), 0))
                self._talk(connection.fileno())
        except (frames.FrameError, OSError):
            pass  # the client went away, or was too slow
        except Exception:
            logger.exception("A defect ended a conversation")
        finally:
            self._free.release()

    def _talk(self, descriptor: int) -> None:
        """One conversation: hello, then requests until the client has none any more."""
        answer, greeted = self._hello(_next(descriptor))
        frames.write(descriptor, answer)
        while greeted:
            frames.write(descriptor, self._answer(_next(descriptor)))

    def _hello(self, document: Any) -> tuple[Mapping[str, Any], bool]:
        request = document if isinstance(document, dict) else {}
        if request.get("request") != "hello":
            return wire.error_json("a conversation begins with hello", retryable=False), False
        version = wire.agreed(request.get("versions"))
        if version is None:
            spoken = ", ".join(map(str, sorted(wire.VERSIONS)))
            return wire.error_json(
                f"the MPS supervisor speaks version {spoken} of its protocol, and its client another: update the older one",
                retryable=False,
            ), False
        return {"ok": {"version": version, "ability": wire.ability_json(self._supervisor.ability())}}, True

    def _answer(self, document: Any) -> Mapping[str, Any]:
        try:
            request = wire.read_message(document)
            answer = self._answers.get(wire.read_text(request, "request"))
            if answer is None:
                return wire.error_json(f"request {request['request']!r} is not known here", retryable=False)
            return {"ok": answer(request)}
        except wire.WireError as error:
            return wire.error_json(f"the request is not understood: {error}", retryable=False)
        except MpsError as error:
            return wire.error_json(str(error), retryable=error.retryable)

    def _place(self, request: Mapping[str, Any]) -> None:
        self._supervisor.place(wire.read_share(request.get("share")), timeout_s=wire.read_timeout(request))

    def _remove(self, request: Mapping[str, Any]) -> None:
        self._supervisor.remove(
            wire.read_text(request, "device"), wire.read_text(request, "shareID"), timeout_s=wire.read_timeout(request)
        )

    def _status(self, _request: Mapping[str, Any]) -> Any:
        return wire.status_json(self._supervisor.status())

    def _wait(self, request: Mapping[str, Any]) -> Any:
        seen = wire.read_change(request)
        return wire.status_json(self._supervisor.wait(seen, timeout_s=wire.read_timeout(request)))


def _next(descriptor: int) -> Any:
    """The next request. Raises FrameError."""
    deadline = time.monotonic() + REQUEST_S
    return frames.read(descriptor, remaining_s=lambda: deadline - time.monotonic())


def _allowed(connection: socket.socket) -> bool:
    """Whether who connects is root, or who runs this."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, uid, _ = _CREDENTIALS.unpack(credentials)
    return uid in {0, os.geteuid()}
