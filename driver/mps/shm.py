# SPDX-License-Identifier: Apache-2.0
"""The /dev/shm that a legacy daemon and its clients have in common: a small file system in memory of its own, as a container must
not be able to fill that of the host. Containers get it by its path, so the mount has to reach the host.
"""

from __future__ import annotations

import ctypes
import logging
import os
from pathlib import Path

logger = logging.getLogger(__name__)

SIZE = "64m"
"""As much as a container has without it."""

_MS_NOSUID, _MS_NODEV, _MS_NOEXEC = 0x2, 0x4, 0x8
_MNT_DETACH = 0x2


def provide(path: Path) -> Path | None:
    """Have it at a path. None, with a plain folder there, where nothing may be mounted: the daemon then has its own."""
    path.mkdir(parents=True, exist_ok=True)
    if os.path.ismount(path):
        return path
    libc = ctypes.CDLL(None, use_errno=True)
    flags = ctypes.c_ulong(_MS_NOSUID | _MS_NODEV | _MS_NOEXEC)
    if libc.mount(b"shm", os.fsencode(path), b"tmpfs", flags, f"mode=1777,size={SIZE}".encode()) == 0:
        return path
    logger.warning(
        "Nothing can be mounted on %s (%s): programs that share by legacy MPS do not share memory with its server",
        path,
        os.strerror(ctypes.get_errno()),
    )
    plain(path)
    return None


def plain(path: Path) -> None:
    """Have a plain folder at a path."""
    path.mkdir(parents=True, exist_ok=True)
    path.chmod(0o1777)


def release(path: Path) -> None:
    """Take the mount away, if there is one; who still uses it keeps it."""
    if os.path.ismount(path):
        ctypes.CDLL(None).umount2(os.fsencode(path), _MNT_DETACH)
