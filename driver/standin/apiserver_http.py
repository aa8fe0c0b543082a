# SPDX-License-Identifier: Apache-2.0
"""A small threaded HTTP/1.1 server with kept connections, one send an answer, and streams that can be cut.

The standard library's http.server parses headers as e-mail, which would cost more than everything else a GET of a claim
needs; this one reads just what the stand-in API server uses.
"""

from __future__ import annotations

import contextlib
import logging
import select
import socket
import ssl
import threading
import urllib.parse
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import BinaryIO

logger = logging.getLogger(__name__)

MAX_LINE = 64 * 1024
MAX_HEADERS = 100
MAX_BODY = 3 * 1024 * 1024
"""Of a request, as the API server's own limit (MaxRequestBodyBytes)."""

REASONS = {
    200: "OK",
    201: "Created",
    400: "Bad Request",
    401: "Unauthorized",
    403: "Forbidden",
    404: "Not Found",
    405: "Method Not Allowed",
    409: "Conflict",
    410: "Gone",
    413: "Request Entity Too Large",
    415: "Unsupported Media Type",
    422: "Unprocessable Entity",
    429: "Too Many Requests",
    500: "Internal Server Error",
    503: "Service Unavailable",
    504: "Gateway Timeout",
}


@dataclass(frozen=True, slots=True)
class HttpRequest:
    """One request as it came; header names in lower case."""

    method: str
    path: str
    query: Mapping[str, str]
    headers: Mapping[str, str]
    body: bytes


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer."""

    status: int
    body: bytes
    content_type: str = "application/json"
    headers: Mapping[str, str] = field(default_factory=dict)


class Hangup(Exception):  # noqa: N818 - not an error: the order to close the connection without an answer
    """Close the connection without another byte."""


class Channel:
    """The way back to the client of one connection."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def send_answer(self, answer: Answer) -> None:
        """Headers and body in one send."""
        extra = "".join(f"{name}: {value}\r\n" for name, value in answer.headers.items())
        head = (
            f"HTTP/1.1 {answer.status} {REASONS.get(answer.status, 'Unknown')}\r\n"
            f"Content-Type: {answer.content_type}\r\nContent-Length: {len(answer.body)}\r\n{extra}\r\n"
        )
        self._connection.sendall(head.encode() + answer.body)

    def start_stream(self) -> None:
        """Begin an answer of unknown length."""
        self._connection.sendall(
            b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
        )

    def send_chunk(self, data: bytes) -> None:
        """One piece of the stream."""
        self._connection.sendall(b"%x\r\n%b\r\n" % (len(data), data))

    def end_stream(self) -> None:
        """The orderly end; the connection stays."""
        self._connection.sendall(b"0\r\n\r\n")

    def client_gone(self) -> bool:
        """Whether the client has closed its end. Only while no further request is expected."""
        readable, _, _ = select.select([self._connection], [], [], 0)
        return bool(readable)


Handler = Callable[[HttpRequest, Channel], Answer | None]
"""Answers a request, or streams over the channel and returns None. May raise Hangup."""


class HttpServer:
    """Serves one handler. `start` and `stop` may follow each other; after the first start the port stays the same, and nobody else
    gets it before `close`.
    """

    def __init__(self, handler: Handler, *, host: str, port: int, tls: ssl.SSLContext | None) -> None:
        self._handler = handler
        self._host = host
        self._port = port
        self._tls = tls
        self._listener: socket.socket | None = None
        self._kept: socket.socket | None = None
        """Has the port while nobody listens there: who connects is refused."""
        self._threads: set[threading.Thread] = set()
        self._connections: set[socket.socket] = set()
        self._lock = threading.Lock()

    @property
    def port(self) -> int:
        """The port, known after the first start."""
        return self._port

    def start(self) -> None:
        """Listen and serve in the background."""
        kept, self._kept = self._kept, None
        listener = kept or _bound(self._host, self._port)
        listener.listen(128)
        self._port = listener.getsockname()[1]
        self._listener = listener
        self._spawn(self._accept, listener)

    def stop(self) -> None:
        """Close the listener and every connection, and wait for their threads."""
        listener, self._listener = self._listener, None
        if listener is None:
            return
        # Closing alone does not wake a thread that is blocked in accept.
        with contextlib.suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)
        self.cut()
        while True:
            with self._lock:
                thread = next(iter(self._threads), None)
            if thread is None:
                break
            thread.join()
        self._kept = _bound(self._host, self._port)
        listener.close()

    def close(self) -> None:
        """Stop for good. Idempotent."""
        self.stop()
        if self._kept is not None:
            self._kept.close()
            self._kept = None

    def cut(self) -> None:
        """Break every connection at once, as a crash would."""
        with self._lock:
            connections = list(self._connections)
        for connection in connections:
            with contextlib.suppress(OSError):
                socket.socket.shutdown(connection, socket.SHUT_RDWR)

    def _spawn(self, target: Callable[[socket.socket], None], argument: socket.socket) -> None:
        def run() -> None:
            try:
                target(argument)
            finally:
                with self._lock:
                    self._threads.discard(thread)

        thread = threading.Thread(target=run, name="apiserver", daemon=True)
        with self._lock:
            self._threads.add(thread)
        thread.start()

    def _accept(self, listener: socket.socket) -> None:
        while self._listener is listener:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with self._lock:
                self._connections.add(connection)
            if self._listener is not listener:
                self._drop(connection)
                return
            self._spawn(self._serve, connection)

    def _drop(self, connection: socket.socket) -> None:
        with self._lock:
            self._connections.discard(connection)
        connection.close()

    def _serve(self, connection: socket.socket) -> None:
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            served = connection
            if self._tls is not None:
                served = self._tls.wrap_socket(connection, server_side=True)
                with self._lock:
                    self._connections.discard(connection)
                    self._connections.add(served)
                connection = served
            with served.makefile("rb") as reader:
                channel = Channel(served)
                while (request := _read_request(reader)) is not None:
                    answer = self._handler(request, channel)
                    if answer is not None:
                        channel.send_answer(answer)
        except (OSError, ValueError, Hangup):
            # A broken connection or no HTTP: nobody is left to be told.
            return
        except Exception:
            logger.exception("A request of the stand-in API server failed")
        finally:
            self._drop(connection)


def _read_request(reader: BinaryIO) -> HttpRequest | None:
    """The next request, None when the client has closed. Raises ValueError for what is no HTTP/1.1."""
    line = reader.readline(MAX_LINE)
    if not line:
        return None
    method, target, version = line.decode("latin-1").split()
    if version != "HTTP/1.1":
        raise ValueError(version)
    headers: dict[str, str] = {}
    for _ in range(MAX_HEADERS):
        line = reader.readline(MAX_LINE)
        if line in {b"\r\n", b"\n"}:
            break
        name, colon, value = line.decode("latin-1").partition(":")
        if not colon:
            raise ValueError("malformed header")
        headers[name.lower()] = value.strip()
    else:
        raise ValueError("too many headers")
    path, _, query = target.partition("?")
    return HttpRequest(
        method,
        urllib.parse.unquote(path),
        dict(urllib.parse.parse_qsl(query, keep_blank_values=True)) if query else {},
        headers,
        _read_body(reader, headers),
    )


def _read_body(reader: BinaryIO, headers: Mapping[str, str]) -> bytes:
    if headers.get("transfer-encoding", "").lower() == "chunked":
        body = b""
        while size := int(reader.readline(MAX_LINE).split(b";")[0], 16):
            if len(body) + size > MAX_BODY:
                raise ValueError("body too large")
            body += reader.read(size)
            reader.readline(MAX_LINE)
        reader.readline(MAX_LINE)
        return body
    length = int(headers.get("content-length") or 0)
    if not 0 <= length <= MAX_BODY:
        raise ValueError("body too large")
    return reader.read(length) if length else b""


def _bound(host: str, port: int) -> socket.socket:
    """A socket with a port, which is free or one that was served from before."""
    made = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind((host, port))
    except OSError:
        made.close()
        raise
    return made
