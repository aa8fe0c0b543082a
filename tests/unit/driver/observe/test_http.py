# SPDX-License-Identifier: Apache-2.0
"""The HTTP server.

- GET and HEAD of a known page; query strings are ignored; one request a connection
- 404, 405, 500; health checks answer 200 or 503 with reasons, as text or JSON
- slow, large and many requests are cut off, and others are answered meanwhile
- a server for the loopback refuses foreign names
- addresses: IPv4, IPv6, all, a free port; a port that is taken is a configuration error
- stop gives the port back
"""

from __future__ import annotations

import http.client
import json
import logging
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from driver import config
from driver.errors import ConfigError
from driver.observe import http as web
from driver.observe import listen

LOOPBACK = config.Listen(host="127.0.0.1", port=0)


def hello(request: web.Request) -> web.Response:
    return web.Response(body=f"hello {request.accept}".encode(), content_type="text/plain")


def broken(_request: web.Request) -> web.Response:
    raise RuntimeError("a defect")


PAGES = {"/hello": hello, "/broken": broken}


@contextmanager
def serving(
    pages: dict[str, web.Page] | None = None,
    *,
    address: config.Listen = LOOPBACK,
    loopback_only: bool = False,
    request_max_s: float = web.REQUEST_MAX_S,
    connections_max: int = web.CONNECTIONS_MAX,
) -> Iterator[int]:
    server = web.Server(
        listen.bind(address, option="--http"),
        pages or dict(PAGES),
        name="test",
        loopback_only=loopback_only,
        request_max_s=request_max_s,
        connections_max=connections_max,
    )
    server.start()
    try:
        yield server.port
    finally:
        server.stop()


def ask(
    port: int, path: str, *, method: str = "GET", host: str = "127.0.0.1", headers: dict[str, str] | None = None
) -> tuple[int, str, http.client.HTTPMessage]:
    connection = http.client.HTTPConnection(host, port, timeout=40)
    try:
        connection.request(method, path, headers=headers or {})
        response = connection.getresponse()
        return response.status, response.read().decode(), response.headers
    finally:
        connection.close()


def test_a_page() -> None:
    with serving() as port:
        status, body, headers = ask(port, "/hello?name[]=x", headers={"Accept": "text/x"})
    assert (status, body) == (200, "hello text/x")
    assert headers["Content-Type"] == "text/plain"
    assert headers["Content-Length"] == str(len(body))
    assert headers["Connection"] == "close"
    assert headers["Server"] == "nearfield/0.1.0"


def test_head_has_no_body() -> None:
    with serving() as port, socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(b"HEAD /hello HTTP/1.1\r\nHost: x\r\n\r\n")
        answer = read_all(connection)
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.0 200 OK\r\n")
    assert b"\r\nContent-Length: 6\r\n" in head
    assert body == b""


@pytest.mark.parametrize("path", ["/", "/hello/", "/hellO", "/../hello", "*", "http://x/hello"])
def test_other_paths_are_not_found(path: str) -> None:
    with serving() as port:
        status, body, _ = ask(port, path)
    assert (status, body) == (404, "There is no such page; there are: /broken /hello\n")


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "TRACE", "BREW"])
def test_other_methods_are_refused(method: str) -> None:
    with serving() as port:
        status, body, headers = ask(port, "/hello", method=method)
    assert (status, body, headers["Allow"]) == (405, "GET and HEAD only\n", "GET, HEAD")


def test_a_page_that_fails_is_a_500_and_a_log_line(caplog: pytest.LogCaptureFixture) -> None:
    with serving() as port, caplog.at_level(logging.ERROR):
        assert ask(port, "/broken")[:2] == (500, "The page cannot be made; the agent's log says why\n")
        assert ask(port, "/hello")[0] == 200
    assert "RuntimeError: a defect" in caplog.text


@pytest.mark.parametrize(
    ("answer", "status", "text"),
    [
        ((True, ()), 200, "ok\n"),
        (
            (True, ("nothing is published: another driver is here",)),
            200,
            "ok\nnothing is published: another driver is here\n",
        ),
        ((False, ("not registered", "no slices yet")), 503, "not ready\nnot registered\nno slices yet\n"),
    ],
)
def test_checks(answer: tuple[bool, tuple[str, ...]], status: int, text: str) -> None:
    with serving({"/readyz": web.answer_check(lambda: answer)}) as port:
        assert ask(port, "/readyz")[:2] == (status, text)
        as_json = ask(port, "/readyz", headers={"Accept": "application/json"})
    assert as_json[0] == status
    assert as_json[2]["Content-Type"] == "application/json"
    assert json.loads(as_json[1]) == {"ok": answer[0], "reasons": list(answer[1])}


def read_all(connection: socket.socket) -> bytes:
    connection.settimeout(40)
    answer = b""
    try:
        while piece := connection.recv(4096):
            answer += piece
    except ConnectionResetError:
        # The server closed while bytes of ours were unread.
        pass
    return answer


def test_a_request_that_is_too_large_is_cut_off() -> None:
    with serving() as port, socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(b"GET /hello HTTP/1.1\r\n")
        try:
            for _ in range(3):
                connection.sendall(b"X: " + b"x" * web.REQUEST_MAX_BYTES + b"\r\n")
        except OSError:
            pass
        assert not read_all(connection).startswith(b"HTTP/1.0 200")
        assert ask(port, "/hello")[0] == 200


@pytest.mark.parametrize(
    "sent",
    [b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", b"\r\n\r\n", b"GET\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n"],
)
def test_what_is_no_http_gets_no_page(sent: bytes) -> None:
    with serving() as port, socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(sent)
        connection.shutdown(socket.SHUT_WR)
        assert b"hello" not in read_all(connection)
        assert ask(port, "/hello")[0] == 200


def test_a_request_that_never_ends_is_cut_off() -> None:
    with serving(request_max_s=0.2) as port, socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(b"GET /hel")
        assert read_all(connection) == b""


def test_too_many_connections_are_closed_and_room_comes_back() -> None:
    with serving(connections_max=2, request_max_s=40) as port:
        idle = [socket.create_connection(("127.0.0.1", port)) for _ in range(2)]
        with socket.create_connection(("127.0.0.1", port)) as third:
            assert read_all(third) == b""
        for connection in idle:
            connection.shutdown(socket.SHUT_WR)
            assert read_all(connection) == b""
            connection.close()
        # The slot is given back right after the connection is closed; ask until it is.
        while True:
            try:
                assert ask(port, "/hello")[0] == 200
            except (http.client.RemoteDisconnected, ConnectionResetError):
                continue
            break


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200),
        ("localhost:9418", 200),
        ("127.0.0.1:9418", 200),
        ("[::1]:9418", 200),
        ("10.1.2.3", 200),
        ("rebound.example.com", 403),
        ("rebound.example.com:9418", 403),
        ("127.0.0.1.example.com", 403),
        ("", 403),
        ("[", 403),
    ],
)
def test_a_loopback_server_refuses_foreign_names(host: str, status: int) -> None:
    with serving(loopback_only=True) as port:
        assert ask(port, "/hello", headers={"Host": host})[0] == status


def test_all_addresses_are_ipv4_and_ipv6() -> None:
    with serving(address=config.Listen(host="", port=0)) as port:
        assert ask(port, "/hello")[0] == 200
        if socket.has_dualstack_ipv6():
            assert ask(port, "/hello", host="::1")[0] == 200


def test_a_taken_port_is_a_configuration_error() -> None:
    with serving() as port, pytest.raises(ConfigError) as raised:
        listen.bind(config.Listen(host="127.0.0.1", port=port), option="--http")
    assert str(raised.value) == (
        f"--http 127.0.0.1:{port}: another process listens there; stop it, or give another port"
    )


@pytest.mark.parametrize(
    ("host", "message"),
    [
        ("192.0.2.1", "--inspect 192.0.2.1:0: this machine has no such address"),
        ("nothing.invalid", "--inspect nothing.invalid:0: cannot listen there: "),
    ],
)
def test_an_address_that_is_not_ours_is_a_configuration_error(host: str, message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        listen.bind(config.Listen(host=host, port=0), option="--inspect")
    assert str(raised.value).startswith(message)


def test_stop_gives_the_port_back() -> None:
    with serving() as port:
        assert ask(port, "/hello")[0] == 200
    with serving(address=config.Listen(host="127.0.0.1", port=port)) as again:
        assert again == port
        assert ask(port, "/hello")[0] == 200


def test_a_server_that_never_started_stops() -> None:
    server = web.Server(listen.bind(LOOPBACK, option="--http"), dict(PAGES), name="test")
    server.stop()
