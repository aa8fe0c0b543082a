# SPDX-License-Identifier: Apache-2.0
"""JSON messages over a pipe: four bytes of length, most significant first, then the text."""

from __future__ import annotations

import json
import os
import select
import struct
from collections.abc import Callable
from typing import Any

MAX_BYTES = 64 << 20
"""A Snapshot of the largest machine is below 2 MiB; a length above this means that the peer is not what we think."""

_HEADER = struct.Struct(">I")


class FrameError(Exception):
    """The peer closed the pipe, was too late, or sent what is no message."""


def write(descriptor: int, message: object) -> None:
    """Write a message. Raises OSError when nobody reads any more."""
    body = json.dumps(message, separators=(",", ":"), allow_nan=False).encode()
    data = memoryview(_HEADER.pack(len(body)) + body)
    while data:
        data = data[os.write(descriptor, data) :]


def read(descriptor: int, *, remaining_s: Callable[[], float] | None = None) -> Any:
    """Read a message. Raises FrameError; with `remaining_s`, also when its time is up: `TimeoutError` is then the cause."""
    (length,) = _HEADER.unpack(_read_exactly(descriptor, _HEADER.size, remaining_s))
    if length > MAX_BYTES:
        raise FrameError(f"a message of {length} bytes")
    try:
        return json.loads(_read_exactly(descriptor, length, remaining_s))
    except (ValueError, RecursionError) as err:
        raise FrameError(f"a message that is no JSON: {err}") from err


def _read_exactly(descriptor: int, count: int, remaining_s: Callable[[], float] | None) -> bytes:
    chunks = []
    while count:
        if remaining_s is not None:
            _wait(descriptor, remaining_s)
        chunk = os.read(descriptor, min(count, 1 << 20))
        if not chunk:
            raise FrameError("the pipe was closed")
        chunks.append(chunk)
        count -= len(chunk)
    return b"".join(chunks)


def _wait(descriptor: int, remaining_s: Callable[[], float]) -> None:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    left = remaining_s()
    if left <= 0 or not poll.poll(left * 1000):
        raise FrameError("no answer in time") from TimeoutError()
