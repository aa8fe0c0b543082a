# SPDX-License-Identifier: Apache-2.0
"""One watch: events line by line from a connection of its own, until the server, the silence or `close` ends it."""

from __future__ import annotations

import http.client
import json
import socket
import threading
from collections.abc import Callable
from typing import Any, Self

from driver import errors
from driver.kube import connections

SILENCE_S = 90.0
"""The API server sends a bookmark about every minute: a watch that is silent for longer has lost its server."""

MAX_EVENT_BYTES = 8 * 1024 * 1024
_CHUNK = 64 * 1024

Event = tuple[str, dict[str, Any]]
"""Type (ADDED, MODIFIED, DELETED, BOOKMARK) and object."""


class Open:
    """The watches that run now, so that they can be ended together."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._watches: set[Watch] = set()
        self._closed = False

    def add(self, watch: Watch) -> None:
        """It runs; one that begins after all were ended is ended, too."""
        with self._lock:
            self._watches.add(watch)
            closed = self._closed
        if closed:
            watch.close()

    def discard(self, watch: Watch) -> None:
        """It has ended."""
        with self._lock:
            self._watches.discard(watch)

    def close(self) -> None:
        """End all of them, for good."""
        with self._lock:
            self._closed = True
            watches = list(self._watches)
        for watch in watches:
            watch.close()


class Watch:
    """An iterator of events, for one thread. It ends when the server ends it in good order, or after `close`, which whoever does not
    iterate to the end has to call.

    Raises ApiError otherwise, GONE when the resource version is too old.
    """

    def __init__(
        self,
        connection: http.client.HTTPConnection,
        response: http.client.HTTPResponse,
        *,
        sock: socket.socket,
        registry: Open,
        fail: Callable[[connections.Answer | Exception], errors.ApiError],
    ) -> None:
        self._connection = connection
        self._response = response
        self._sock = sock
        self._registry = registry
        self._fail = fail
        self._lock = threading.Lock()
        self._reading = False
        self._closing = threading.Event()
        self._received = b""
        registry.add(self)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Event:
        with self._lock:
            if self._closing.is_set():
                raise StopIteration
            self._reading = True
        event: Event | connections.Answer | None = None
        try:
            event = self._next()
        except (OSError, http.client.HTTPException, connections.TooLargeError, ValueError, RecursionError) as error:
            if self._closing.is_set():
                raise StopIteration from None
            raise self._fail(error) from error
        finally:
            with self._lock:
                self._reading = False
                ended = self._closing.is_set() or not isinstance(event, tuple)
            if ended:
                self._end()
        match event:
            case None:
                raise StopIteration
            case connections.Answer():
                raise self._fail(event)
            case _:
                return event

    def _next(self) -> Event | connections.Answer | None:
        """The next event; a refusal where the server sent one as an event; None at the end."""
        line = self._line()
        # The end that http.client reads as a clean one may be our own doing.
        if not line or self._closing.is_set():
            return None
        decoded = json.loads(line)
        kind = decoded.get("type") if isinstance(decoded, dict) else None
        body = decoded.get("object") if isinstance(decoded, dict) else None
        if not isinstance(kind, str) or not isinstance(body, dict):
            raise ValueError("the server sent something that is no watch event")  # noqa: TRY004 - bad data, not a bad call
        if kind == "ERROR":
            code = body.get("code")
            return connections.Answer(code if isinstance(code, int) else 500, json.dumps(body).encode())
        return kind, body

    def _line(self) -> bytes:
        """The next line; empty at the end. HTTPResponse.readline takes a broken connection for the end of a chunked body."""
        while b"\n" not in self._received:
            part = self._response.read1(_CHUNK)
            if not part:
                return b""
            self._received += part
            if len(self._received) > MAX_EVENT_BYTES:
                raise connections.TooLargeError(f"an event of more than {MAX_EVENT_BYTES} bytes")
        line, _, self._received = self._received.partition(b"\n")
        return line

    def close(self) -> None:
        """End it, from any thread; whoever iterates is let go at once, and closes the connection."""
        with self._lock:
            self._closing.set()
            reading = self._reading
            if reading:
                connections.shut(self._sock)
        if not reading:
            self._end()

    def _end(self) -> None:
        self._registry.discard(self)
        self._response.close()
        self._connection.close()


def begin(
    opened: connections.Connections,
    path: str,
    headers: dict[str, str],
    *,
    silence_s: float,
    registry: Open,
    fail: Callable[[connections.Answer | Exception], errors.ApiError],
) -> Watch:
    """Start a watch. Raises OSError, http.client.HTTPException or RefusedError."""
    connection = connections.open_connection(opened.access, timeout_s=silence_s)
    sock = connection.sock  # the connection forgets it where the server says that it closes it
    try:
        connection.request("GET", connections.prefix_of(opened.access) + path, headers=headers)
        response = connection.getresponse()
        refusal = response.read(connections.MAX_STATUS_BYTES) if response.status != http.client.OK else None
    except BaseException:
        connection.close()
        raise
    if refusal is not None:
        connection.close()
        raise connections.RefusedError(connections.Answer(response.status, refusal))
    return Watch(connection, response, sock=sock, registry=registry, fail=fail)
