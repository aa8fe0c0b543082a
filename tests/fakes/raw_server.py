# SPDX-License-Identifier: Apache-2.0
"""A TCP server that plays a script, for answers no API server would give: bytes, pauses, sudden ends."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator

Script = Callable[[socket.socket, int], None]
"""Given a connection, whose request headers were read, and its number from 0."""


@contextlib.contextmanager
def playing(script: Script, *, heard: Callable[[bytes], None] = lambda _request: None) -> Iterator[str]:
    """Serve the script to every connection; the URL. One request a connection, which `heard` is told."""
    listener = socket.create_server(("127.0.0.1", 0))
    connections: list[socket.socket] = []
    threads: list[threading.Thread] = []

    def serve(connection: socket.socket, number: int) -> None:
        with contextlib.suppress(OSError):
            received = b""
            while b"\r\n\r\n" not in received:
                part = connection.recv(65536)
                if not part:
                    return
                received += part
            heard(received)
            script(connection, number)
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)

    def accept() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            connections.append(connection)
            thread = threading.Thread(target=serve, args=(connection, len(connections) - 1))
            threads.append(thread)
            thread.start()

    acceptor = threading.Thread(target=accept)
    acceptor.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        acceptor.join()
        for connection in connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        for thread in threads:
            thread.join()
        for connection in connections:
            connection.close()
        listener.close()
