# SPDX-License-Identifier: Apache-2.0
"""Reaches the MPS supervisor over its socket.

A connection a call: a supervisor that was restarted is another one, and nothing of the old conversation counts.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from discovery import frames
from driver.errors import MpsError
from driver.mps import shares, values, wire

HELLO_S = 2.0
"""How long a supervisor may take to say what it can do: it knows it before it listens."""

KNOWN_S = 10.0
UNKNOWN_S = 2.0
"""How long an answer, or none, to the question for its ability counts."""

MARGIN_S = 1.0
"""What the supervisor may take to say that its time is up."""


class Client:
    """A client of the supervisor whose folder is `directory`. Thread-safe. All methods but `ability` raise MpsError."""

    def __init__(self, directory: Path, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = directory / shares.SOCKET
        self._clock = clock
        self._lock = threading.Lock()
        self._known: tuple[float, values.Ability | None] | None = None

    def ability(self) -> values.Ability | None:
        """What the supervisor can do, None where none answers. An answer counts for a while."""
        with self._lock:
            if self._known is not None and self._clock() < self._known[0]:
                return self._known[1]
            began = self._clock()
            try:
                with self._conversation(began + HELLO_S) as talk:
                    ability = talk.ability
            except MpsError:
                ability = None
            # One that hangs is not asked all the time: that would hold up whoever asks.
            now = self._clock()
            hold_s = UNKNOWN_S if ability is None and now - began < HELLO_S else KNOWN_S
            self._known = (now + hold_s, ability)
            return ability

    def place(self, share: shares.Share, *, timeout_s: float) -> None:
        """Have a share in place: its daemon runs, and its limits were read back. Idempotent; another share of this id takes the place of
        the one before.
        """
        deadline = self._clock() + timeout_s
        with self._conversation(deadline) as talk:
            talk.ask({"request": "place", "share": wire.share_json(share), "timeout": self._left(deadline)}, deadline)

    def place_all(self, wanted: Sequence[shares.Share], *, timeout_s: float) -> Mapping[tuple[str, str], MpsError]:
        """Have many shares in place; those that are not, by device and share id. A device whose first share fails is not waited for
        again: its others are asked for, and what they get is what they have at once.
        """
        failed: dict[tuple[str, str], MpsError] = {}
        deadline = self._clock() + timeout_s
        broken: set[str] = set()
        for share in wanted:
            try:
                self.place(share, timeout_s=0.0 if share.device in broken else max(0.0, self._left(deadline)))
            except MpsError as error:
                failed[share.device, share.share_id] = error
                broken.add(share.device)
        return failed

    def remove(self, device: str, share_id: str, *, timeout_s: float) -> None:
        """Have a share gone, with MPS v3 also the programs that use it; with the last one of a device goes its daemon. Idempotent."""
        deadline = self._clock() + timeout_s
        with self._conversation(deadline) as talk:
            talk.ask(
                {"request": "remove", "device": device, "shareID": share_id, "timeout": self._left(deadline)}, deadline
            )

    def status(self, *, timeout_s: float) -> values.Status:
        """All daemons."""
        deadline = self._clock() + timeout_s
        with self._conversation(deadline) as talk:
            return talk.status({"request": "status"}, deadline)

    def wait(self, seen: values.Status | None, *, timeout_s: float) -> values.Status:
        """All daemons, once it is another state of affairs than what was seen, or the time is over."""
        deadline = self._clock() + timeout_s
        request = {"request": "wait", "timeout": timeout_s}
        if seen is not None:
            request |= {"instance": seen.instance, "change": seen.change}
        with self._conversation(deadline) as talk:
            return talk.status(request, deadline)

    def _left(self, deadline: float) -> float:
        return max(0.0, deadline - self._clock())

    @contextlib.contextmanager
    def _conversation(self, deadline: float) -> Iterator[_Conversation]:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with connection:
            # A supervisor that does not accept must not hold up its client; a socket's own time bounds connect and every write.
            bound = max(1, int(min(self._left(deadline), HELLO_S) * 1_000_000))
            connection.setsockopt(
                socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", bound // 1_000_000, bound % 1_000_000)
            )
            try:
                connection.connect(os.fspath(self._path))
            except OSError as error:
                raise MpsError(
                    f"No MPS supervisor answers at {self._path} ({error.strerror or error}): does `nearfield mps` run on this"
                    " node?",
                    retryable=True,
                ) from error
            yield _Conversation(
                connection, self._path, clock=self._clock, deadline=max(deadline, self._clock() + MARGIN_S)
            )


class _Conversation:
    """One connection, after hello."""

    def __init__(self, connection: socket.socket, path: Path, *, clock: Callable[[], float], deadline: float) -> None:
        self._connection = connection
        self._path = path
        self._clock = clock
        answer = self.ask({"request": "hello", "versions": list(wire.VERSIONS)}, min(deadline, clock() + HELLO_S))
        with self._understood():
            self.ability = wire.read_ability(wire.read_message(answer).get("ability"))

    def ask(self, request: Mapping[str, Any], deadline: float) -> Any:
        """What is answered. Raises MpsError."""
        descriptor = self._connection.fileno()
        try:
            frames.write(descriptor, request)
            answer = frames.read(descriptor, remaining_s=lambda: deadline + MARGIN_S - self._clock())
        except (frames.FrameError, OSError) as error:
            raise MpsError(
                f"The MPS supervisor at {self._path} did not answer {request['request']}: {error}", retryable=True
            ) from error
        with self._understood():
            message = wire.read_message(answer)
            refusal = wire.read_error(message)
        if refusal is not None:
            raise MpsError(refusal[0], retryable=refusal[1])
        return message["ok"]

    def status(self, request: Mapping[str, Any], deadline: float) -> values.Status:
        """The status that is answered. Raises MpsError."""
        answer = self.ask(request, deadline)
        with self._understood():
            return wire.read_status(answer)

    @contextlib.contextmanager
    def _understood(self) -> Iterator[None]:
        try:
            yield
        except wire.WireError as error:
            raise MpsError(
                f"The MPS supervisor at {self._path} is not understood: {error}; agent and supervisor may be of different"
                " versions",
                retryable=False,
            ) from error
