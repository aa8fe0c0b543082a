# SPDX-License-Identifier: Apache-2.0
"""Ends what is left of MPS daemons: a server that outlived its control daemon, or both of them their supervisor.

A server that is left holds its GPU, so that in compute mode EXCLUSIVE_PROCESS no other could start. It is known by its name and by
the pipe folder in its environment, which it has from its control daemon (MPS documentation, Environment Variables).
"""

from __future__ import annotations

import logging
import os
import select
import signal
import time
from collections.abc import Callable
from pathlib import Path

logger = logging.getLogger(__name__)

_NAME = "nvidia-cuda-mps"
"""/proc/<pid>/comm has the first 15 bytes of a name (proc(5)), which control daemon and server have in common."""

_VARIABLE = b"CUDA_MPS_PIPE_DIRECTORY="
_ENVIRONMENT_MAX = 128 << 10
GONE_S = 2.0


def end(of: Callable[[Path], bool], *, proc: Path = Path("/proc")) -> int:
    """Kill the MPS processes whose pipe folder is one `of` ours, and wait for their end; how many there were. One that hangs inside
    the kernel is not waited for long.
    """
    handles = []
    for entry in proc.iterdir():
        if entry.name.isdecimal() and (pipes := _pipes(entry)) is not None and of(pipes):
            handle = _kill(int(entry.name))
            if handle is not None:
                logger.warning("Ended process %s, which was left of the MPS daemon at %s", entry.name, pipes)
                handles.append(handle)
    deadline = time.monotonic() + GONE_S
    for handle in handles:
        poll = select.poll()
        poll.register(handle, select.POLLIN)
        if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
            logger.error("What was left of an MPS daemon hangs inside the kernel and cannot be killed yet")
        os.close(handle)
    return len(handles)


def _pipes(entry: Path) -> Path | None:
    """The pipe folder of an MPS process; None for any other process, and for one that is gone."""
    try:
        if not (entry / "comm").read_text(errors="replace").startswith(_NAME):
            return None
        with (entry / "environ").open("rb") as file:
            variables = file.read(_ENVIRONMENT_MAX).split(b"\0")
    except OSError:
        return None
    found = next((text for text in variables if text.startswith(_VARIABLE)), None)
    return None if found is None else Path(os.fsdecode(found.removeprefix(_VARIABLE)))


def _kill(pid: int) -> int | None:
    """Kill a process; a descriptor that becomes readable with its end (pidfd_open(2))."""
    try:
        handle = os.pidfd_open(pid)
    except OSError:
        return None
    try:
        signal.pidfd_send_signal(handle, signal.SIGKILL)
    except OSError as error:
        logger.warning("Process %d, which was left of an MPS daemon, cannot be killed: %s", pid, error.strerror)
        os.close(handle)
        return None
    return handle
