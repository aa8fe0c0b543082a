# SPDX-License-Identifier: Apache-2.0
"""Kept HTTP connections to one API server: opened with TLS as `access` says, bounded in time and size, never trusted.

On the path a pod waits for, urllib3's pool, which the official client uses, adds 0.2 ms to each GET. What a pool must do for one
host is little and stands below; what goes over a connection is `exchange`.
"""

from __future__ import annotations

import contextlib
import http.client
import select
import socket
import threading
import time
import urllib.parse
from collections import deque
from dataclasses import dataclass

from driver.kube import access, exchange

MAX_IDLE = 16
"""Connections kept for reuse; kubelet prepares at most this many claims at once in practice."""

_KEEPALIVE = (
    (socket.TCP_KEEPIDLE, 15),
    (socket.TCP_KEEPINTVL, 5),
    (socket.TCP_KEEPCNT, 3),
)
"""A peer that is gone without a word is noticed after half a minute, also under a watch that waits for events."""

MAX_STATUS_BYTES = 256 * 1024
"""As much of a refusal is read."""


TooLargeError = exchange.TooLargeError


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer."""

    status: int
    body: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One request. `max_bytes`: the longest answer that is read."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes | None = None
    max_bytes: int


class RefusedError(Exception):
    """The server answered, and not with what was asked."""

    def __init__(self, answer: Answer) -> None:
        super().__init__(answer.status)
        self.answer = answer


class _TlsConnection(http.client.HTTPSConnection):
    """HTTPS where the name in the certificate may be another than the host that is dialled."""

    def __init__(self, host: str, port: int, opened: access.Access, *, timeout: float) -> None:
        context = opened.tls()
        super().__init__(host, port, timeout=timeout, context=context)
        self._tls = context
        self._name = opened.server_name or urllib.parse.urlsplit(opened.server).hostname or host

    def connect(self) -> None:
        http.client.HTTPConnection.connect(self)
        self.sock = self._tls.wrap_socket(self.sock, server_hostname=self._name)


def open_connection(opened: access.Access, *, timeout_s: float) -> http.client.HTTPConnection:
    """A new connection, TLS handshake done. Raises OSError or http.client.HTTPException."""
    place = urllib.parse.urlsplit(opened.server)
    tls = place.scheme == "https"
    host, port = place.hostname or "", place.port or (443 if tls else 80)
    dial, dial_port = host, port
    if opened.proxy is not None:
        dial, _, proxy_port = opened.proxy.rpartition(":")
        dial_port = int(proxy_port)
    connection = (
        _TlsConnection(dial, dial_port, opened, timeout=timeout_s)
        if tls
        else http.client.HTTPConnection(dial, dial_port, timeout=timeout_s)
    )
    if opened.proxy is not None:
        connection.set_tunnel(host, port)
    try:
        connection.connect()
    except BaseException:
        connection.close()
        raise
    connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE:
        connection.sock.setsockopt(socket.IPPROTO_TCP, option, value)
    return connection


def prefix_of(opened: access.Access) -> str:
    """What stands before every path: some servers are one of many behind an address (`https://host/k8s/clusters/c1`)."""
    return urllib.parse.urlsplit(opened.server).path.rstrip("/")


def _host_header(opened: access.Access) -> str:
    place = urllib.parse.urlsplit(opened.server)
    host = place.hostname or ""
    name = f"[{host}]" if ":" in host else host.encode("idna").decode()
    return name if place.port in {None, 443 if place.scheme == "https" else 80} else f"{name}:{place.port}"


def shut(sock: socket.socket) -> None:
    """End a connection that another thread reads from: its read returns at once."""
    # SSLSocket.shutdown takes the TLS state away under the reader's feet; the plain socket's does not.
    with contextlib.suppress(OSError):
        socket.socket.shutdown(sock, socket.SHUT_RDWR)


class Connections:
    """Connections of one Access, for any number of threads."""

    def __init__(self, opened: access.Access) -> None:
        self.access = opened
        self._prefix = prefix_of(opened)
        self._fixed = {"Host": _host_header(opened), "Accept-Encoding": "identity"}
        self._idle: deque[http.client.HTTPConnection] = deque()
        self._lock = threading.Lock()
        self._closed = False

    def request(self, ask: Ask, *, timeout_s: float) -> Answer:
        """Ask and read the whole answer, within one time limit for everything.

        A kept connection that turns out to be closed is replaced once for a GET; for other methods nobody can know
        whether the server has seen it. Raises OSError, http.client.HTTPException, TooLargeError or RefusedError.
        """
        ends = time.monotonic() + timeout_s
        connection = self._take()
        if connection is not None:
            try:
                return self._exchange(connection, ask, ends)
            except (ConnectionError, http.client.RemoteDisconnected):
                if ask.method != "GET":
                    raise
        connection = open_connection(self.access, timeout_s=exchange.left(ends))
        return self._exchange(connection, ask, ends)

    def close(self) -> None:
        """Close what is idle; what is in use is closed when it comes back."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, deque()
        for connection in idle:
            connection.close()

    def _take(self) -> http.client.HTTPConnection | None:
        """The connection used last; those that the server has closed meanwhile are dropped."""
        while True:
            with self._lock:
                if not self._idle:
                    return None
                connection = self._idle.pop()
            if not _readable(connection.sock):
                return connection
            connection.close()

    def _exchange(self, connection: http.client.HTTPConnection, ask: Ask, ends: float) -> Answer:
        kept = False
        try:
            answered = exchange.ask(
                connection.sock,
                ask.method,
                self._prefix + ask.path,
                headers={**self._fixed, **ask.headers},
                body=ask.body,
                max_bytes=ask.max_bytes,
                ends=ends,
            )
            kept = answered.reusable
        finally:
            if not kept or not self._put_back(connection):
                connection.close()
        answer = Answer(answered.status, answered.body)
        if answer.status >= http.client.MULTIPLE_CHOICES:
            raise RefusedError(answer)
        return answer

    def _put_back(self, connection: http.client.HTTPConnection) -> bool:
        with self._lock:
            if self._closed or len(self._idle) >= MAX_IDLE:
                return False
            self._idle.append(connection)
            return True


def _readable(sock: socket.socket) -> bool:
    """Whether an idle connection has something to read: it can only be the end, or noise."""
    poll = select.poll()
    poll.register(sock, select.POLLIN | select.POLLHUP | select.POLLERR)
    return bool(poll.poll(0))
