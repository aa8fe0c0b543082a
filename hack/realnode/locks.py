# SPDX-License-Identifier: Apache-2.0
"""Locks of files, and the programs that are run under them.

A command that is killed leaves the program that it was running behind. Such a program inherits the locks of its command, so that
the next command waits for it, and does not meet a namespace or a mount that comes up behind its back.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

from hack.realnode.errors import ClusterError

_HELD: set[int] = set()
"""The descriptors of the locks that this process holds. Programs that `run` starts get them."""


@contextlib.contextmanager
def held(path: Path) -> Iterator[None]:
    """The lock is ours for the block; who has to wait for it is told so. The file stays: one that is removed locks nobody."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ClusterError(f"{path} cannot be locked: {error.strerror}") from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"Waiting for another command, which holds {path}", file=sys.stderr, flush=True)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        _HELD.add(descriptor)
        yield
    finally:
        _HELD.discard(descriptor)
        os.close(descriptor)


def run(
    arguments: Sequence[str],
    *,
    stdin: bytes | IO[bytes] | None = None,
    cwd: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[bytes]:
    """Runs a program to its end. Raises ClusterError where there is no such program."""
    descriptors = tuple(_HELD)
    try:
        if isinstance(stdin, bytes):
            return subprocess.run(
                arguments, input=stdin, capture_output=True, cwd=cwd, env=environment, pass_fds=descriptors, check=False
            )
        return subprocess.run(
            arguments,
            stdin=stdin or subprocess.DEVNULL,
            capture_output=True,
            cwd=cwd,
            env=environment,
            pass_fds=descriptors,
            check=False,
        )
    except OSError as error:
        raise ClusterError(f"{arguments[0]} cannot be run: {error.strerror}") from error


def output(
    arguments: Sequence[str],
    *,
    stdin: bytes | IO[bytes] | None = None,
    environment: Mapping[str, str] | None = None,
) -> str:
    """What a program prints. Raises ClusterError with what it said where it fails."""
    done = run(arguments, stdin=stdin, environment=environment)
    if done.returncode != 0:
        said = (done.stderr.strip() or done.stdout.strip() or f"status {done.returncode}".encode()).decode(
            errors="replace"
        )
        raise ClusterError(f"{' '.join(arguments)}: {said}")
    return done.stdout.decode(errors="replace")
