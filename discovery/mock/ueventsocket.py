# SPDX-License-Identifier: Apache-2.0
"""The socket of a rendered machine in the place of the kernel's: who listens has a datagram socket in a folder of the
machine, and what is sent goes to every one of them. The bytes are the kernel's, and so is all that reads them.

Who may write into the folder may send; the folder lies in one that only root can enter.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path

from discovery import errors, uevents

FOLDER = "uevents"

_PATIENCE_S = 1.0
"""How long one listener may take for all messages. The kernel would not wait, but its queue holds hundreds of messages and
this one perhaps ten (net.unix.max_dgram_qlen).
"""


def listen(directory: Path) -> uevents.Listener:
    """Listens to a rendered machine. Raises SourceError."""
    folder = directory / FOLDER
    name = os.urandom(8).hex()
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        channel = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
        try:
            with _short(folder) as short:
                channel.bind(f"{short}/{name}")
        except OSError:
            channel.close()
            raise
    except OSError as err:
        kind = errno.errorcode.get(err.errno or 0, "unreadable").lower()
        text = f"{folder}: the uevents of the machine cannot be heard: {err.strerror}"
        raise errors.SourceError(uevents.SOURCE, kind, text) from err
    return uevents.Listener(channel, genuine=lambda _: True, ended=lambda: (folder / name).unlink(missing_ok=True))


def send(directory: Path, messages: Sequence[bytes]) -> None:
    """Sends messages to all who listen, in order. Who does not read in time misses some; who is gone is forgotten."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError), _short(directory / FOLDER) as short:
        for name in os.listdir(short):  # noqa: PTH208 - names are all that is needed
            _send(f"{short}/{name}", messages)


def _send(path: str, messages: Sequence[bytes]) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as channel:
        try:
            channel.connect(path)
            channel.settimeout(_PATIENCE_S / max(1, len(messages)))
            for message in messages:
                with contextlib.suppress(TimeoutError):
                    channel.send(message)
        except ConnectionRefusedError:
            Path(path).unlink(missing_ok=True)
        except OSError:
            return  # it went away just now, or is no socket: nobody hears


@contextlib.contextmanager
def _short(folder: Path) -> Iterator[str]:
    """A name of the folder that leaves room for one below it: a socket's path has at most 107 bytes (unix(7))."""
    descriptor = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)
