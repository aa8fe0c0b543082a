# SPDX-License-Identifier: Apache-2.0
"""A small HTTP server for a few fixed pages: metrics and health for the cluster, and the pages for people.

Every request is bounded in size and time and every server in connections, so that whoever reaches the port can cost the
agent neither its memory nor its health probe. GET and HEAD only; one request a connection.
"""

from __future__ import annotations

import contextlib
import http.server
import io
import json
import logging
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from urllib.parse import urlsplit

from driver.version import VERSION

logger = logging.getLogger(__name__)

REQUEST_MAX_BYTES = 16 * 1024
"""Request line and headers together."""

REQUEST_MAX_S = 5.0
"""From the connection to the end of the headers; for the answer, between two pieces that the client takes."""

CONNECTIONS_MAX = 32

ACCEPT_RETRY_S = 0.2
"""After an accept() that failed, which it does at once and again while the process has no file descriptor left."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What a page may look at. `accept` is the Accept header, empty without one."""

    accept: str = ""

    @property
    def wants_json(self) -> bool:
        """Whether the client asked for JSON by name."""
        return "application/json" in self.accept


@dataclass(frozen=True, slots=True, kw_only=True)
class Response:
    """An answer."""

    body: bytes
    content_type: str
    status: HTTPStatus = HTTPStatus.OK
    headers: Mapping[str, str] = field(default_factory=dict)


Page = Callable[[Request], Response]
Check = Callable[[], tuple[bool, Sequence[str]]]
"""Whether it is so, and the reasons: of a no what is missing, of a yes what a person should know."""


def answer_check(check: Check) -> Page:
    """A page that answers 200 or 503, with the reasons as text or JSON."""

    def page(request: Request) -> Response:
        ok, reasons = check()
        status = HTTPStatus.OK if ok else HTTPStatus.SERVICE_UNAVAILABLE
        if request.wants_json:
            body = json.dumps({"ok": ok, "reasons": list(reasons)}) + "\n"
            return Response(body=body.encode(), content_type="application/json", status=status)
        lines = ["ok" if ok else "not ready", *reasons]
        return Response(
            body=("\n".join(lines) + "\n").encode(), content_type="text/plain; charset=utf-8", status=status
        )

    return page


class Server:
    """Serves pages on a listening socket, which it owns. `start` and `stop` once each.

    `loopback_only`: refuse requests whose Host header is a name other than localhost. A browser on this machine then
    cannot be led here by a foreign page whose name was made to point at 127.0.0.1.
    """

    def __init__(
        self,
        listener: socket.socket,
        pages: Mapping[str, Page],
        *,
        name: str,
        loopback_only: bool = False,
        request_max_s: float = REQUEST_MAX_S,
        connections_max: int = CONNECTIONS_MAX,
    ) -> None:
        self._server = _Server(
            listener,
            pages,
            loopback_only=loopback_only,
            request_max_s=request_max_s,
            slots=threading.BoundedSemaphore(connections_max),
        )
        self._listener = listener
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._accept, name=f"http-{name}", daemon=True)

    @property
    def port(self) -> int:
        """The port that is served, also where a free one was asked for."""
        port = self._listener.getsockname()[1]
        assert isinstance(port, int)
        return port

    def start(self) -> None:
        """Begin to answer."""
        self._thread.start()

    def stop(self) -> None:
        """Stop to listen. Answers under way end with the process at the latest."""
        self._stopping.set()
        with contextlib.suppress(OSError):
            # On Linux this ends an accept() in another thread, which close() alone does not.
            self._listener.shutdown(socket.SHUT_RDWR)
        if self._thread.is_alive():
            self._thread.join()
        self._server.server_close()

    def _accept(self) -> None:
        # Not serve_forever(): it wakes several times a second to look whether it shall stop.
        while not self._stopping.is_set():
            try:
                connection, client = self._listener.accept()
            except OSError as err:
                if not self._stopping.wait(ACCEPT_RETRY_S):
                    logger.debug("A connection could not be taken: %s", err)
                continue
            self._server.process_request(connection, client)


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def __init__(
        self,
        listener: socket.socket,
        pages: Mapping[str, Page],
        *,
        loopback_only: bool,
        request_max_s: float,
        slots: threading.BoundedSemaphore,
    ) -> None:
        self.pages = pages
        self.loopback_only = loopback_only
        self.request_max_s = request_max_s
        self._slots = slots
        super().__init__(("", 0), _Handler, bind_and_activate=False)
        self.socket.close()
        self.socket = listener

    def process_request(self, request: socket.socket | tuple[bytes, socket.socket], client_address: object) -> None:
        if not self._slots.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except RuntimeError:
            # No thread can be started; the next request may find one.
            self._slots.release()
            self.shutdown_request(request)

    def process_request_thread(
        self, request: socket.socket | tuple[bytes, socket.socket], client_address: object
    ) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._slots.release()

    def handle_error(self, _request: object, client_address: object) -> None:
        logger.debug("The connection of %s ended early", client_address, exc_info=True)  # noqa: LOG014 - called by socketserver in its handler


class _BoundedReader(io.RawIOBase):
    """Reads from a socket until a number of bytes or a point in time."""

    def __init__(self, connection: socket.socket, *, max_s: float) -> None:
        self._connection = connection
        self._left = REQUEST_MAX_BYTES
        self._until = time.monotonic() + max_s

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        remaining = self._until - time.monotonic()
        if remaining <= 0 or self._left <= 0:
            raise TimeoutError("The request is larger or slower than any that is answered here")
        self._connection.settimeout(remaining)
        read = self._connection.recv_into(buffer[: self._left])
        self._left -= read
        return read


class _Handler(http.server.BaseHTTPRequestHandler):
    server: _Server

    def version_string(self) -> str:
        return f"nearfield/{VERSION}"

    def setup(self) -> None:
        super().setup()
        self.rfile.close()
        self.rfile = io.BufferedReader(
            _BoundedReader(self.connection, max_s=self.server.request_max_s), buffer_size=4096
        )

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def __getattr__(self, name: str) -> Callable[[], None]:
        # http.server answers 501 to a method that it finds no do_... for; here every other method is known and refused.
        if name.startswith("do_"):
            return self._refuse_method
        raise AttributeError(name)

    def _answer(self) -> None:
        if self.server.loopback_only and not _is_local(self.headers.get("Host", "")):
            self._send(_text(HTTPStatus.FORBIDDEN, "This page answers to localhost and to IP addresses only"))
            return
        page = self.server.pages.get(self.path.partition("?")[0])
        if page is None:
            known = " ".join(sorted(self.server.pages))
            self._send(_text(HTTPStatus.NOT_FOUND, f"There is no such page; there are: {known}"))
            return
        try:
            response = page(Request(accept=self.headers.get("Accept", "")))
        except Exception:
            # The door of a page: its trouble is a 500 for this client and a line in the log.
            logger.exception("The page %s cannot be made", self.path)
            response = _text(HTTPStatus.INTERNAL_SERVER_ERROR, "The page cannot be made; the agent's log says why")
        self._send(response)

    def _refuse_method(self) -> None:
        response = _text(HTTPStatus.METHOD_NOT_ALLOWED, "GET and HEAD only")
        self._send(
            Response(
                body=response.body,
                content_type=response.content_type,
                status=response.status,
                headers={"Allow": "GET, HEAD"},
            )
        )

    def _send(self, response: Response) -> None:
        self.connection.settimeout(self.server.request_max_s)
        self.send_response(response.status)
        headers = {
            "Content-Type": response.content_type,
            "Content-Length": str(len(response.body)),
            "Cache-Control": "no-store",
            "X-Content-Type-Options": "nosniff",
            "Connection": "close",
        }
        for name, value in {**headers, **response.headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(response.body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the name is http.server's
        logger.debug(format, *args)


def _text(status: HTTPStatus, message: str) -> Response:
    return Response(body=f"{message}\n".encode(), content_type="text/plain; charset=utf-8", status=status)


def _is_local(host: str) -> bool:
    """Whether a Host header is no name that somebody else's DNS could answer."""
    try:
        name = urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return False
    return name == "localhost" or ":" in name or name.replace(".", "").isdigit()
