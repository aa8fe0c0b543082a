# SPDX-License-Identifier: Apache-2.0
"""The socket of the MPS supervisor: what is no conversation, and supervisors that are not what a client expects."""

from __future__ import annotations

import json
import os
import socket
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from discovery import frames
from driver.errors import MpsError, SocketError
from driver.mps import client, server, shares
from tests.fakes import mps
from tests.fakes.publishing import until

HELLO = {"request": "hello", "versions": [1]}


def talk(path: Path, *messages: Any) -> list[Any]:
    """What is answered to messages; shorter where the other side hangs up."""
    answers: list[Any] = []
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(mps.PATIENCE_S)
        connection.connect(str(path))
        for message in messages:
            try:
                if isinstance(message, bytes):
                    connection.sendall(message)
                else:
                    frames.write(connection.fileno(), message)
                answers.append(frames.read(connection.fileno(), remaining_s=lambda: mps.PATIENCE_S))
            except (frames.FrameError, OSError):
                break
    return answers


def test_a_conversation_begins_with_hello_and_a_version_of_both() -> None:
    with mps.node() as node:
        path = node.directory / shares.SOCKET
        (answer,) = talk(path, {"request": "status"}, {"request": "status"})
        assert answer["error"] == {"message": "a conversation begins with hello", "retryable": False}
        (answer,) = talk(path, {"request": "hello", "versions": [2, 7]})
        assert "speaks version 1 of its protocol" in answer["error"]["message"]
        first, second = talk(
            path, {"request": "hello", "versions": [7, 1], "more": True}, {"request": "status", "more": 1}
        )
        assert first["ok"]["version"] == 1
        assert second["ok"]["daemons"] == []


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ({"request": "make-coffee"}, "request 'make-coffee' is not known here"),
        ({}, "request is no text"),
        ([], "message is no object"),
        ({"request": "place"}, "share is no object"),
        ({"request": "place", "share": {}, "timeout": 1}, "protocol is no text"),
        ({"request": "remove", "device": "gpu-0"}, "shareID is no text"),
        ({"request": "remove", "device": "gpu-0", "shareID": "s", "timeout": "x"}, "timeout 'x' is no time"),
        ({"request": "wait", "timeout": 1, "instance": "i"}, "change is no number"),
    ],
)
def test_what_is_not_understood_is_said_and_the_conversation_goes_on(message: Any, words: str) -> None:
    with mps.node() as node:
        _, answer, status = talk(node.directory / shares.SOCKET, HELLO, message, {"request": "status"})
        assert words in answer["error"]["message"]
        assert "ok" in status


@pytest.mark.parametrize(
    "garbage", [b"\xff\xff\xff\xff", b"\0\0\0\x02{]", struct.pack(">I", 100 << 20), b"GET / HTTP/1.1\r\n\r\n"]
)
def test_what_is_no_message_ends_the_conversation_and_nothing_else(garbage: bytes) -> None:
    with mps.node() as node:
        assert talk(node.directory / shares.SOCKET, garbage) == []
        assert node.client.status(timeout_s=mps.PATIENCE_S).daemons == {}


def test_silent_clients_and_too_many_of_them_hold_nobody_up_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "REQUEST_S", 1.0)
    with mps.node() as node:
        path = str(node.directory / shares.SOCKET)
        silent = [socket.socket(socket.AF_UNIX) for _ in range(server.CONVERSATIONS_MAX)]
        try:
            for connection in silent:
                connection.connect(path)
            assert all(connection.recv(1) == b"" for connection in silent)
            monkeypatch.undo()  # who speaks may take longer than that on a busy machine
            assert node.client.status(timeout_s=mps.PATIENCE_S).daemons == {}
        finally:
            for connection in silent:
                connection.close()


def test_a_wait_ends_with_a_change_or_its_time() -> None:
    with mps.node() as node:
        seen = node.client.status(timeout_s=mps.PATIENCE_S)
        assert node.client.wait(seen, timeout_s=0.1) == seen
        assert node.client.wait(None, timeout_s=60).instance == seen.instance
        found = []
        waiter = threading.Thread(target=lambda: found.append(node.client.wait(seen, timeout_s=60)))
        waiter.start()
        node.client.place(mps.share(1), timeout_s=mps.PATIENCE_S)
        waiter.join(mps.PATIENCE_S)
        assert found[0].change > seen.change


def test_something_else_in_the_place_of_the_socket_is_said(tmp_path: Path) -> None:
    with mps.node() as node:
        assert node.supervisor is not None
        with pytest.raises(SocketError, match="cannot be served"):
            server.Server(node.supervisor, tmp_path / "none")
        with pytest.raises(SocketError, match="take a shorter --mps-dir"):
            server.Server(node.supervisor, tmp_path / ("x" * 100))


class Odd:
    """A supervisor that answers what it likes."""

    def __init__(self, directory: Path, answer: Callable[[Any], Any]) -> None:
        directory.mkdir()
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(directory / shares.SOCKET))
        self._listener.listen()
        self._answer = answer
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with connection:
                try:
                    while True:
                        answer = self._answer(frames.read(connection.fileno()))
                        if isinstance(answer, bytes):
                            os.write(connection.fileno(), answer)
                        else:
                            frames.write(connection.fileno(), answer)
                except (frames.FrameError, OSError):
                    pass

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()


ABILITY: dict[str, Any] = {"instance": "i", "program": None, "version": None, "protocols": [], "reasons": {}}


@pytest.mark.parametrize(
    ("answer", "words", "retryable"),
    [
        ({"ok": {"version": 1}}, "is not understood: ability is no object", False),
        ({"ok": 3}, "is not understood: message is no object", False),
        ({}, "neither ok nor an error", False),
        ([1], "is not understood", False),
        ({"error": {"message": "not today", "retryable": True}}, "^not today$", True),
        (b"\xff\xff\xff\xff", "did not answer hello: a message of", True),
        (json.dumps(ABILITY).encode(), "did not answer hello", True),
    ],
)
def test_a_client_says_what_is_wrong_with_a_supervisor(
    tmp_path: Path, answer: Any, words: str, retryable: bool
) -> None:
    odd = Odd(tmp_path / "m", lambda _: answer)
    try:
        reached = client.Client(tmp_path / "m")
        with pytest.raises(MpsError, match=words) as raised:
            reached.status(timeout_s=mps.PATIENCE_S)
        assert raised.value.retryable is retryable
        assert reached.ability() is None
    finally:
        odd.close()


def test_a_supervisor_that_never_answers_is_given_up(tmp_path: Path) -> None:
    gate = threading.Event()
    odd = Odd(
        tmp_path / "m", lambda request: {"ok": {"ability": ABILITY}} if request["request"] == "hello" else gate.wait(60)
    )
    try:
        with pytest.raises(MpsError, match="did not answer status: no answer in time") as raised:
            client.Client(tmp_path / "m").status(timeout_s=2)
        assert raised.value.retryable
    finally:
        gate.set()
        odd.close()


def test_a_supervisor_that_hangs_is_not_asked_for_its_ability_all_the_time(tmp_path: Path) -> None:
    gate, asked = threading.Event(), []

    def answer(request: Any) -> Any:
        asked.append(request)
        gate.wait(60)
        return {}

    odd = Odd(tmp_path / "m", answer)
    try:
        reached = client.Client(tmp_path / "m")
        began = time.monotonic()
        assert [reached.ability(), reached.ability()] == [None, None]
        assert time.monotonic() >= began + client.HELLO_S
        until(lambda: asked)
        assert len(asked) == 1
    finally:
        gate.set()
        odd.close()


def test_an_ability_counts_for_a_while(tmp_path: Path) -> None:
    asked: list[Any] = []

    def answer(request: Any) -> Any:
        asked.append(request)
        return {"ok": {"ability": ABILITY | {"instance": str(len(asked))}}}

    now = 0.0
    reached = client.Client(tmp_path / "m", clock=lambda: now)
    assert reached.ability() is None
    odd = Odd(tmp_path / "m", answer)
    try:
        assert reached.ability() is None
        now += client.UNKNOWN_S
        told = [reached.ability() for _ in range(3)]
        now += client.KNOWN_S
        told.append(reached.ability())
        assert [one.instance if one else None for one in told] == ["1", "1", "1", "2"]
    finally:
        odd.close()
