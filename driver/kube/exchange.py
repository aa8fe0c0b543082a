# SPDX-License-Identifier: Apache-2.0
"""One request and its whole answer over a connected socket: HTTP/1.1 as far as an API server speaks it (RFC 9112).

On the path a pod waits for, http.client calls some 300 functions for a GET, most of them to make a mail header of the server's
(email.parser), of which three fields are looked at. Here they are searched for in the bytes. What http.client raises for a
server that breaks the rules is raised here too.
"""

from __future__ import annotations

import http.client
import re
import socket
import ssl
import time
from collections.abc import Mapping
from typing import NamedTuple

MAX_HEAD_BYTES = 64 * 1024
"""As http.client: a line, and it allows a hundred of them."""

_CHUNK = 64 * 1024
_CHUNK_LINE_BYTES = 1024
_INTERIM_ANSWERS = 5

_END_OF_HEAD = re.compile(rb"\r?\n\r?\n")
_STATUS = re.compile(rb"HTTP/1\.([0-9]) ([1-9][0-9]{2})(?: [^\r\n]*)?\r?(?:\n|\Z)")
_FIELD = re.compile(rb"\n(content-length|transfer-encoding|connection):[ \t]*([^\r\n]*)", re.IGNORECASE)
_LENGTH = re.compile(rb"[0-9]{1,15}")
_CHUNK_SIZE = re.compile(rb"([0-9A-Fa-f]{1,12})[ \t]*(?:;[^\r\n]*)?\r?\n")
_BAD_TARGET = re.compile(r"[^\x21-\x7e]")
_BAD_VALUE = re.compile(r"[^\t\x20-\x7e]")


class TooLargeError(Exception):
    """The answer is longer than the caller allows."""


class Answered(NamedTuple):
    """A whole answer, and whether the connection takes another request."""

    status: int
    body: bytes
    reusable: bool


def ask(
    sock: socket.socket,
    method: str,
    target: str,
    *,
    headers: Mapping[str, str],
    body: bytes | None,
    max_bytes: int,
    ends: float,
) -> Answered:
    """Send a request and read its answer, until `ends` on the clock of time.monotonic.

    Raises OSError (TimeoutError among it), http.client.HTTPException or TooLargeError; the connection is of no use then.
    """
    sent = encode(method, target, headers=headers, body=body)
    sock.settimeout(left(ends))
    try:
        sock.sendall(sent)
    except ssl.SSLEOFError as error:  # under TLS no ConnectionError, though it is one
        raise ConnectionResetError("the server has closed the connection") from error
    return _Reader(sock, ends).answer(max_bytes)


def encode(method: str, target: str, *, headers: Mapping[str, str], body: bytes | None) -> bytes:
    """The bytes of a request. Raises http.client.HTTPException where they would be those of another one too."""
    if _BAD_TARGET.search(target):
        raise http.client.InvalidURL(f"the path {target!r} has characters that a path cannot have")
    for name, value in headers.items():
        if _BAD_VALUE.search(value):
            raise http.client.HTTPException(f"the header {name} has characters that a header cannot have")
    lines = [f"{method} {target} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items())]
    if body is not None:
        lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join((*lines, "", "")).encode("ascii") + (body or b"")


def left(ends: float) -> float:
    """Seconds until then. Raises TimeoutError when there are none."""
    seconds = ends - time.monotonic()
    if seconds <= 0:
        raise TimeoutError("timed out")
    return seconds


class _Reader:
    """Reads one answer. Bytes that come behind it make the connection useless, and are noticed."""

    def __init__(self, sock: socket.socket, ends: float) -> None:
        self._sock = sock
        self._ends = ends
        self._buffer = b""

    def answer(self, max_bytes: int) -> Answered:
        """The whole answer; interim ones (1xx) are passed over."""
        for _ in range(_INTERIM_ANSWERS):
            head = self._head()
            found = _STATUS.match(head)
            if found is None:
                raise http.client.BadStatusLine(repr(head[:64]))
            status = int(found[2])
            if status >= http.client.OK:
                break
        else:
            raise http.client.HTTPException("the server sends one interim answer after another")
        fields: dict[bytes, bytes] = {}
        for name, value in _FIELD.findall(head):
            if fields.setdefault(name.lower(), value.strip()) != value.strip():
                raise http.client.HTTPException(f"the server sends two different {name.decode()} headers")
        closing = found[1] == b"0" or b"close" in fields.get(b"connection", b"").lower()
        if status in {http.client.NO_CONTENT, http.client.NOT_MODIFIED}:
            return Answered(status, b"", not closing and not self._buffer)
        if b"transfer-encoding" in fields:
            if fields[b"transfer-encoding"].lower() != b"chunked":
                raise http.client.HTTPException("the server sends a transfer encoding that nobody asked for")
            body = self._chunks(max_bytes)
        elif b"content-length" in fields:
            if not _LENGTH.fullmatch(fields[b"content-length"]):
                raise http.client.HTTPException("the server sends a Content-Length that is no number")
            body = self._exactly(int(fields[b"content-length"]), max_bytes)
        else:
            return Answered(status, self._rest(max_bytes), reusable=False)
        return Answered(status, body, not closing and not self._buffer)

    def _more(self) -> bool:
        """Read what has come; False at the end of the connection. A byte now and then does not outlive the time limit."""
        self._sock.settimeout(left(self._ends))
        part = self._sock.recv(_CHUNK)
        self._buffer += part
        return bool(part)

    def _head(self) -> bytes:
        """Everything before the body, with the buffer at its begin afterwards."""
        while (end := _END_OF_HEAD.search(self._buffer)) is None:
            if len(self._buffer) > MAX_HEAD_BYTES:
                raise http.client.LineTooLong("headers")
            if not self._more():
                if self._buffer:
                    raise http.client.IncompleteRead(self._buffer[:64])
                raise http.client.RemoteDisconnected("Remote end closed connection without response")
        if end.start() > MAX_HEAD_BYTES:
            raise http.client.LineTooLong("headers")
        head, self._buffer = self._buffer[: end.start()], self._buffer[end.end() :]
        return head

    def _exactly(self, size: int, max_bytes: int) -> bytes:
        if size > max_bytes:
            raise TooLargeError(f"{size} bytes, more than {max_bytes}")
        if len(self._buffer) < size:
            parts = [self._buffer]
            missing = size - len(self._buffer)
            while missing > 0:
                self._buffer = b""
                if not self._more():
                    raise http.client.IncompleteRead(b"", missing)
                parts.append(self._buffer)
                missing -= len(self._buffer)
            self._buffer = b"".join(parts)
        body, self._buffer = self._buffer[:size], self._buffer[size:]
        return body

    def _chunks(self, max_bytes: int) -> bytes:
        parts: list[bytes] = []
        total = 0
        while size := self._chunk_size():
            total += size
            if total > max_bytes:
                raise TooLargeError(f"more than {max_bytes} bytes")
            parts.append(self._exactly(size, max_bytes))
            if self._line() != b"":
                raise http.client.HTTPException("the server sends a chunk that is longer than it says")
        while self._line() != b"":  # fields behind the body, which nobody asked for
            pass
        return b"".join(parts)

    def _chunk_size(self) -> int:
        line = self._line() + b"\n"
        found = _CHUNK_SIZE.fullmatch(line)
        if found is None:
            raise http.client.HTTPException(f"the server sends a chunk without its size: {line[:64]!r}")
        return int(found[1], 16)

    def _line(self) -> bytes:
        while (end := self._buffer.find(b"\n")) < 0:
            if len(self._buffer) > _CHUNK_LINE_BYTES:
                raise http.client.LineTooLong("chunk")
            if not self._more():
                raise http.client.IncompleteRead(self._buffer[:64])
        line, self._buffer = self._buffer[:end], self._buffer[end + 1 :]
        return line.rstrip(b"\r")

    def _rest(self, max_bytes: int) -> bytes:
        parts = [self._buffer]
        size = len(self._buffer)
        while True:
            if size > max_bytes:
                raise TooLargeError(f"more than {max_bytes} bytes")
            self._buffer = b""
            if not self._more():
                return b"".join(parts)
            parts.append(self._buffer)
            size += len(self._buffer)
