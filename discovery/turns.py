# SPDX-License-Identifier: Apache-2.0
"""Whose turn it is to change a GPU, over all processes of a node: a locked file for each GPU. The lock is the kernel's
(flock(2)) and ends with whoever holds it, however that ends; a worker that outlives its agent keeps it until it has ended.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from discovery import errors, work
from discovery.address import PciAddress


@contextlib.contextmanager
def turn(folder: Path, gpu: PciAddress, waits: Callable[[], None]) -> Iterator[None]:
    """Holds the turn at a GPU. `waits` is called once where somebody else has it, before it waits, for as long as that takes.
    Raises WorkError where there can be no such file.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(folder / f"{gpu}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as err:
        raise errors.WorkError(
            f"{gpu}: no lock below {folder}, without which nobody may change it: {err}",
            kind=work.Kind.FAILED,
            retryable=True,
        ) from err
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waits()
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
