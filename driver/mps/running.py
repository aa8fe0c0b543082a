# SPDX-License-Identifier: Apache-2.0
"""Runs a program to its end, within a time and with an end to what it may say."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

OUTPUT_MAX = 256 << 10
"""Bytes of each stream that are kept; more is read and dropped."""

WORDS_MAX = 400


class RunningError(Exception):
    """A program did not start, or did not end in time; the text says which and how."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """How a program ended: its exit status (negative: the signal that ended it), and what it wrote."""

    status: int
    out: str
    err: str

    @property
    def words(self) -> str:
        """What it said, for a message: its errors, or else its output, on one line."""
        return one_line(self.err.strip() or self.out.strip()) or "nothing was said"


def one_line(text: str) -> str:
    """The end of a text of a program on one line, without control characters."""
    joined = " | ".join(filter(None, map(str.strip, text.splitlines())))
    shown = "".join(character if character.isprintable() else "?" for character in joined)
    return shown if len(shown) <= WORDS_MAX else f"...{shown[-WORDS_MAX:]}"


def run(command: Sequence[str], *, environment: Mapping[str, str], timeout_s: float, given: str = "") -> Result:
    """Run a command. With all that it started it is killed when its time is over. Raises RunningError."""
    deadline = time.monotonic() + timeout_s
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE if given else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=dict(environment),
            start_new_session=True,
        )
    except OSError as error:
        raise RunningError(f"{command[0]} cannot be started: {error.strerror or error}") from error
    with process:
        try:
            out, err = _converse(process, given.encode(), deadline)
            status = process.wait(max(0.0, deadline - time.monotonic()))
        except (TimeoutError, subprocess.TimeoutExpired):
            kill_group(process.pid)
            raise RunningError(f"no answer within {timeout_s:.0f} s") from None
        except BaseException:
            kill_group(process.pid)
            raise
    return Result(status=status, out=out.decode(errors="replace"), err=err.decode(errors="replace"))


def kill_group(pid: int) -> None:
    """End a process that leads its group, and the group."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _converse(process: subprocess.Popen[bytes], given: bytes, deadline: float) -> tuple[bytes, bytes]:
    """Give it its input, which fits into a pipe, and hear it out. Raises TimeoutError."""
    assert process.stdout is not None
    assert process.stderr is not None
    if process.stdin is not None:
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(given)
            process.stdin.flush()
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
    heard: dict[int, bytearray] = {process.stdout.fileno(): bytearray(), process.stderr.fileno(): bytearray()}
    out, err = heard.values()
    poll = select.poll()
    for descriptor in heard:
        poll.register(descriptor, select.POLLIN)
    while heard:
        left = deadline - time.monotonic()
        ready = poll.poll(left * 1000) if left > 0 else ()
        if not ready:
            raise TimeoutError
        for descriptor, _ in ready:
            chunk = os.read(descriptor, 1 << 16)
            if chunk:
                kept = heard[descriptor]
                kept += chunk[: OUTPUT_MAX - len(kept)]
            else:
                poll.unregister(descriptor)
                del heard[descriptor]
    return bytes(out), bytes(err)
