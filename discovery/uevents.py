# SPDX-License-Identifier: Apache-2.0
"""What the kernel says of devices that come, go, and get or lose their driver: uevents, over a netlink socket.

A message is `action@devpath` and `KEY=value` texts, each ended by a NUL (lib/kobject_uevent.c). Messages about devices
without a network namespace of their own, PCI functions among them, reach every network namespace that belongs to the
initial user namespace, so those of pods too; messages about network interfaces and RDMA devices reach their own namespace
only. Nothing is decided by what a message says: it is a hint that a look at sysfs may find something new.

Law: the sender is the kernel or the message counts for nothing. A netlink message from port 0 comes from the kernel, no
process can have that port (netlink(7)); who may have the kernel send one for him has CAP_SYS_ADMIN over this namespace.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import select
import socket
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from discovery import errors

SOURCE = "uevents"

MAX_BYTES = 8192
"""The variables are at most 2048 bytes (UEVENT_BUFFER_SIZE), the path before them at most 4096."""

_NETLINK_KOBJECT_UEVENT = 15
_KERNEL = (0, 1)
"""Port 0, multicast group 1: the kernel's own messages; those of udev come over group 2."""

_ACTIONS = frozenset({"add", "remove", "change", "move", "online", "offline", "bind", "unbind"})
_VARIABLE = re.compile(r"[A-Za-z0-9_.]+=.*", re.DOTALL)

_HEEDED = {
    # `change`: virtual functions were switched on or off, or error recovery began or ended (drivers/pci/pci-driver.c).
    "pci": frozenset({"add", "remove", "change", "bind", "unbind"}),
    # RDMA drivers bind to parts of a NIC (mlx5_core.rdma.0); infiniband itself is told in one namespace only.
    "auxiliary": frozenset({"bind"}),
    "infiniband": frozenset({"add"}),
    "module": frozenset({"add", "remove"}),
}
_MODULES = "/module/nvidia"


class Heard(StrEnum):
    """What became of a message."""

    HEEDED = "heeded"
    """A look may find something new."""
    IGNORED = "ignored"
    """It is about something else."""
    MALFORMED = "malformed"
    """It is no uevent."""
    FOREIGN = "foreign"
    """The kernel did not send it."""
    OVERRUN = "overrun"
    """Messages came faster than they were read, and some are lost: a look may find something new."""

    @property
    def hint(self) -> bool:
        """Whether it is a reason to look."""
        return self in (Heard.HEEDED, Heard.OVERRUN)


@dataclass(frozen=True, slots=True)
class Uevent:
    """One message: what happened to which object, the path below /sys."""

    action: str
    devpath: str
    subsystem: str


def parse(message: bytes) -> Uevent:
    """The message in some bytes. Raises ValueError where it is none, or says two things at once."""
    if not message.endswith(b"\0") or len(message) > MAX_BYTES:
        raise ValueError("it does not end as a uevent")
    header, *variables = message[:-1].decode().split("\0")  # a UnicodeDecodeError is a ValueError
    told: dict[str, str] = {}
    for variable in variables:
        if not _VARIABLE.fullmatch(variable):
            raise ValueError("a variable is none")
        key, _, value = variable.partition("=")
        if told.setdefault(key, value) != value:
            raise ValueError(f"{key} is said twice")
    action, at, devpath = header.partition("@")
    if not at or action not in _ACTIONS or not devpath.startswith("/"):
        raise ValueError("it begins with no action and path")
    if (told.get("ACTION"), told.get("DEVPATH")) != (action, devpath):
        raise ValueError("its head and its variables differ")
    if not told.get("SUBSYSTEM"):
        raise ValueError("it is about no subsystem")
    return Uevent(action, devpath, told["SUBSYSTEM"])


def matters(event: Uevent) -> bool:
    """Whether a probe may find something else after it. Links that go up and down, and interfaces that move, change nothing
    that is published.
    """
    if event.action not in _HEEDED.get(event.subsystem, ()):
        return False
    return event.subsystem != "module" or event.devpath.startswith(_MODULES)


class Listener:
    """A socket on which uevents arrive. One thread hears; `stop` from any."""

    def __init__(
        self, channel: socket.socket, *, genuine: Callable[[Any], bool], ended: Callable[[], None] = lambda: None
    ) -> None:
        """Takes the socket over. `genuine`: whether a sender's address is the kernel's. `ended` is called by `close`."""
        self._channel = channel
        self._genuine = genuine
        self._ended = ended
        self._stop = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._ready = select.poll()
        self._ready.register(channel, select.POLLIN)
        self._ready.register(self._stop, select.POLLIN)
        channel.setblocking(False)

    def hear(self) -> Heard | None:
        """Wait for a message, for as long as none comes; None after `stop`. Raises SourceError when the socket is of no use
        any more.
        """
        while True:
            ready = dict(self._ready.poll())
            if self._stop in ready:
                return None
            try:
                message, _, flags, sender = self._channel.recvmsg(MAX_BYTES)
            except (BlockingIOError, InterruptedError):
                continue
            except OSError as err:
                if err.errno == errno.ENOBUFS:
                    return Heard.OVERRUN
                raise _failed(err) from err
            return self._judge(message, flags, sender)

    def stop(self) -> None:
        """Make `hear` give None."""
        with contextlib.suppress(OSError):
            os.eventfd_write(self._stop, 1)

    def close(self) -> None:
        """Give back what is held, after the last `hear`."""
        self._channel.close()
        os.close(self._stop)
        self._ended()

    def _judge(self, message: bytes, flags: int, sender: Any) -> Heard:
        if not self._genuine(sender):
            return Heard.FOREIGN
        if flags & socket.MSG_TRUNC:
            return Heard.MALFORMED
        try:
            event = parse(message)
        except ValueError:
            return Heard.MALFORMED
        return Heard.HEEDED if matters(event) else Heard.IGNORED


def kernel() -> Listener:
    """Listens to this machine's kernel. Raises SourceError where that is not allowed, or there is no such socket."""
    family = getattr(socket, "AF_NETLINK", None)
    if family is None:
        raise errors.SourceError(SOURCE, "unsupported", "this system has no netlink sockets")
    try:
        channel = socket.socket(family, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC, _NETLINK_KOBJECT_UEVENT)
        try:
            channel.bind(_KERNEL)
            return Listener(channel, genuine=lambda sender: sender == _KERNEL)
        except OSError:
            channel.close()
            raise
    except OSError as err:
        raise _failed(err) from err


def _failed(err: OSError) -> errors.SourceError:
    kind = errno.errorcode.get(err.errno or 0, "unreadable").lower()
    return errors.SourceError(SOURCE, kind, f"the kernel's uevents cannot be heard: {err.strerror}")
