# SPDX-License-Identifier: Apache-2.0
"""A request and its answer over a socket.

- the bytes of a request; what would make another request of it is refused
- answers by length, in chunks, until the end, without a body; whatever the pieces in which they come
- the connection takes another request only where the answer has ended as it said, and nothing came behind it
- answers that break the rules, end early, are too long or too late are errors
- a connection that the server has reset is a ConnectionError under TLS too: who asks may ask again
"""

from __future__ import annotations

import contextlib
import http.client
import socket
import ssl
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from driver.kube import exchange

TLS = Path(__file__).parents[3] / "fakes" / "tls"
MAX = 1000
T = 30.0
HEAD = b"HTTP/1.1 200 OK\r\n"


def _ask(
    answer: bytes, *, pieces: Iterator[int] | None = None, ends_connection: bool = True, timeout_s: float = T
) -> exchange.Answered:
    """What is read of an answer that comes in pieces of these sizes."""
    ours, theirs = socket.socketpair()

    def play() -> None:
        theirs.recv(4096)
        rest = answer
        while rest:
            size = next(pieces, len(rest)) if pieces is not None else len(rest)
            theirs.sendall(rest[:size])
            rest = rest[size:]
        if ends_connection:
            theirs.shutdown(socket.SHUT_WR)

    player = threading.Thread(target=play)
    player.start()
    with ours, theirs:
        try:
            return exchange.ask(
                ours, "GET", "/x", headers={}, body=None, max_bytes=MAX, ends=time.monotonic() + timeout_s
            )
        finally:
            with contextlib.suppress(OSError):
                ours.shutdown(socket.SHUT_WR)  # where time was over before anything was asked
            player.join()


def test_the_bytes_of_a_request() -> None:
    assert exchange.encode("PUT", "/a?b=c", headers={"Host": "h", "X": "y z"}, body=b"{}") == (
        b"PUT /a?b=c HTTP/1.1\r\nHost: h\r\nX: y z\r\nContent-Length: 2\r\n\r\n{}"
    )
    assert exchange.encode("GET", "/", headers={}, body=None) == b"GET / HTTP/1.1\r\n\r\n"


@pytest.mark.parametrize("target", ["/a b", "/a\r\nX: y", "/\x7f", "/é"])
def test_a_path_that_is_none_is_refused(target: str) -> None:
    with pytest.raises(http.client.InvalidURL):
        exchange.encode("GET", target, headers={}, body=None)


@pytest.mark.parametrize("value", ["t\r\nX: y", "t\n", "t\x00", "té"])
def test_a_header_that_is_two_is_refused_and_its_value_not_told(value: str) -> None:
    with pytest.raises(http.client.HTTPException, match="the header Authorization has characters"):
        exchange.encode("GET", "/", headers={"Authorization": value}, body=None)


@pytest.mark.parametrize(
    ("answer", "status", "body", "reusable"),
    [
        (HEAD + b"Content-Length: 2\r\n\r\n{}", 200, b"{}", True),
        (HEAD + b"CONTENT-LENGTH:2\r\n\r\n{}", 200, b"{}", True),
        (HEAD + b"Content-Length: 0\r\n\r\n", 200, b"", True),
        (HEAD + b"Content-Length: 2\r\nContent-Length: 2\r\n\r\n{}", 200, b"{}", True),
        (b"HTTP/1.1 200\nContent-Length: 2\n\n{}", 200, b"{}", True),
        (HEAD + b"X-Content-Length: 9\r\nContent-Length: 2\r\n\r\n{}", 200, b"{}", True),
        (HEAD + b"Connection: close\r\nContent-Length: 2\r\n\r\n{}", 200, b"{}", False),
        (b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\n{}", 200, b"{}", False),
        (HEAD + b"Content-Length: 2\r\n\r\n{}more", 200, b"{}", False),
        (HEAD + b"\r\nuntil the end", 200, b"until the end", False),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n2;x=y\r\nde\r\n0\r\n\r\n", 200, b"abcde", True),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\nA\r\n0123456789\r\n0\r\nX: y\r\n\r\n", 200, b"0123456789", True),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\nmore", 200, b"", False),
        (b"HTTP/1.1 204 No Content\r\n\r\n", 204, b"", True),
        (b"HTTP/1.1 409 Conflict\r\nContent-Length: 2\r\n\r\n{}", 409, b"{}", True),
        (b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n" + HEAD + b"Content-Length: 2\r\n\r\n{}", 200, b"{}", True),
    ],
)
def test_an_answer(answer: bytes, status: int, body: bytes, *, reusable: bool) -> None:
    assert _ask(answer) == (status, body, reusable)


@given(st.lists(st.integers(1, 7)), st.binary(max_size=40), st.integers(1, 9))
@settings(max_examples=30, deadline=None)
def test_an_answer_comes_in_any_pieces(pieces: list[int], body: bytes, size: int) -> None:
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in _split(body, size))
    for head, sent in (
        (b"Content-Length: %d" % len(body), body),
        (b"Transfer-Encoding: chunked", chunks + b"0\r\n\r\n"),
    ):
        assert _ask(HEAD + head + b"\r\n\r\n" + sent, pieces=iter(pieces)) == (200, body, True)


def _split(body: bytes, size: int) -> Iterator[bytes]:
    for start in range(0, len(body), size):
        yield body[start : start + size]


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (b"", http.client.RemoteDisconnected),
        (b"HTTP/1.1 2", http.client.IncompleteRead),
        (b"SSH-2.0-x\r\n\r\n", http.client.BadStatusLine),
        (b"HTTP/2 200\r\n\r\n", http.client.BadStatusLine),
        (b"HTTP/1.1 100 Continue\r\n\r\n" * 9, http.client.HTTPException),
        (HEAD + b"Content-Length: 5\r\n\r\n{}", http.client.IncompleteRead),
        (HEAD + b"Content-Length: -2\r\n\r\n{}", http.client.HTTPException),
        (HEAD + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{} ", http.client.HTTPException),
        (HEAD + b"Content-Length: 1001\r\n\r\n", exchange.TooLargeError),
        (HEAD + b"Transfer-Encoding: gzip\r\n\r\n", http.client.HTTPException),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n", http.client.HTTPException),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n-1\r\n", http.client.HTTPException),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n1\r\nab\r\n0\r\n\r\n", http.client.HTTPException),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n2\r\nab\r\n", http.client.IncompleteRead),
        (
            HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + b"1f4\r\n" + b" " * 500 + b"\r\n" + b"1f5\r\n",
            exchange.TooLargeError,
        ),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + b"1" * 5000, http.client.LineTooLong),
        (HEAD + b"\r\n" + b" " * 1001, exchange.TooLargeError),
        (HEAD + b"X: y\r\n" * 20_000, http.client.LineTooLong),
    ],
)
def test_an_answer_that_breaks_the_rules(answer: bytes, error: type[Exception]) -> None:
    with pytest.raises(error):
        _ask(answer)


def test_an_answer_that_does_not_end_is_late() -> None:
    with pytest.raises(TimeoutError):
        _ask(HEAD + b"Content-Length: 2\r\n\r\n{", ends_connection=False, timeout_s=0.05)


def test_a_tls_connection_that_was_reset_is_a_connection_error() -> None:
    listener = socket.create_server(("127.0.0.1", 0))

    def reset() -> None:
        accepted, _ = listener.accept()
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(TLS / "server.pem", TLS / "server.key")
        with context.wrap_socket(accepted, server_side=True) as theirs:
            theirs.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    server = threading.Thread(target=reset)
    server.start()
    context = ssl.create_default_context(cafile=TLS / "ca.pem")
    context.check_hostname = False
    with listener, socket.create_connection(listener.getsockname()) as plain, context.wrap_socket(plain) as ours:
        server.join()
        with pytest.raises(ConnectionError):
            exchange.ask(ours, "GET", "/", headers={}, body=None, max_bytes=MAX, ends=time.monotonic() + T)
