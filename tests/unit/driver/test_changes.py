# SPDX-License-Identifier: Apache-2.0
"""Hearing of changes: what is counted, what asks for a look, and what is said where nothing can be heard."""

from __future__ import annotations

import contextlib
import logging
import queue
import socket
import threading
from collections.abc import Iterator

import pytest

from discovery import uevents
from discovery.errors import SourceError
from driver import changes

WAIT_S = 40.0
HINT = b"add@/devices/x\0ACTION=add\0DEVPATH=/devices/x\0SUBSYSTEM=pci\0"
OTHER = HINT.replace(b"=pci", b"=net")


class Seen:
    """Everything that was asked for and counted, in order, and whether the socket was given back."""

    def __init__(self) -> None:
        self.said: queue.Queue[str] = queue.Queue()
        self.closed = threading.Event()

    def uevent(self, result: str) -> None:
        self.said.put(f"counted {result}")

    def stir(self) -> None:
        self.said.put("stirred")

    def take(self, count: int) -> list[str]:
        return [self.said.get(timeout=WAIT_S) for _ in range(count)]


@contextlib.contextmanager
def hearing() -> Iterator[tuple[changes.Changes, Seen, socket.socket]]:
    seen = Seen()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    listener = uevents.Listener(ours, genuine=lambda _: True, ended=seen.closed.set)
    with theirs:
        own = changes.Changes(lambda: listener, stir=seen.stir, observer=seen)
        own.start()
        yield own, seen, theirs
        own.stop()
        assert seen.closed.is_set()
        own.stop()


def test_what_matters_asks_for_a_look_and_everything_is_counted() -> None:
    with hearing() as (_, seen, sender):
        for message in (OTHER, HINT, b"nonsense", HINT):
            sender.send(message)
        assert seen.take(6) == [
            "counted ignored",
            "counted heeded",
            "stirred",
            "counted malformed",
            "counted heeded",
            "stirred",
        ]


def test_a_socket_that_breaks_is_said_and_a_last_look_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    seen = Seen()

    class Broken(uevents.Listener):
        def hear(self) -> uevents.Heard | None:
            raise SourceError("uevents", "ebadf", "the kernel's uevents cannot be heard: broken")

    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    with theirs, caplog.at_level(logging.INFO):
        broken = Broken(ours, genuine=lambda _: True, ended=seen.closed.set)
        own = changes.Changes(lambda: broken, stir=seen.stir, observer=seen)
        own.start()
        assert seen.take(1) == ["stirred"]
        assert seen.closed.wait(WAIT_S)
        own.stop()
    assert [record.levelname for record in caplog.records if "broken" in record.message] == ["WARNING"]


def test_where_nothing_can_be_heard_that_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    seen = Seen()

    def refuse() -> uevents.Listener:
        raise SourceError("uevents", "eperm", "the kernel's uevents cannot be heard: Operation not permitted")

    own = changes.Changes(refuse, stir=seen.stir, observer=seen)
    with caplog.at_level(logging.INFO):
        own.start()
        own.stop()
    (record,) = caplog.records
    assert record.levelname == "INFO"
    assert "Operation not permitted; changes of the hardware are found by the look of every interval" in record.message
    assert seen.said.empty()


def test_what_was_stopped_does_not_start() -> None:
    seen = Seen()
    asked: list[str] = []

    def listen() -> uevents.Listener:
        asked.append("listen")
        raise AssertionError

    own = changes.Changes(listen, stir=seen.stir, observer=seen)
    own.stop()
    own.start()
    assert asked == []
