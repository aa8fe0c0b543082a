# SPDX-License-Identifier: Apache-2.0
"""The processes of this machine by their command lines."""

from __future__ import annotations

import time
from pathlib import Path

_BEGINS_S = 5.0


def running(*words: str) -> list[int]:
    """Those whose command line has all these words, zombies left out."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                command = _command(entry)
            except OSError:
                continue
            if all(word.encode() in command for word in words):
                found.append(int(entry.name))
    return found


def _command(entry: Path) -> bytes:
    """A process that has just begun has its program a moment before its command line; a zombie has neither."""
    deadline = time.monotonic() + _BEGINS_S
    while not (command := (entry / "cmdline").read_bytes()) and time.monotonic() < deadline:
        (entry / "exe").readlink()
        time.sleep(0.001)
    return command
