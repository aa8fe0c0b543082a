# SPDX-License-Identifier: Apache-2.0
"""What the host has built on the interfaces of NICs (bonds, bridges, VLANs), and by which NIC its default route leaves.

sysfs ties interfaces that stand on each other by `upper_<name>` and `lower_<name>` links (net/core/dev.c). Routes are those of
process 1 in the procfs that we were given, whose network namespace need not be the one that our sysfs shows: in a pod without
hostNetwork, process 1 is the pod's. So they are believed only if both show the same interfaces by name. A pod that is connected
by a veth pair fails that, as the node has the other end; so does one that was given a NIC.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from discovery import errors, findings, model, sysfs

_INTERFACES = "sys/class/net"
_OF_PROCESS_1 = "proc/1/net"
_NO_INTERFACE = "bonding_masters"
"""A file that the bonding driver puts beside the interfaces."""

_MAX_STACK = 256
"""More stand on one interface only where it feeds containers (macvlan); they are not asked for."""

_MAX_ROUTES_BYTES = 16 << 20
"""A table with the routes of the whole Internet is larger: the default route is unknown then."""

_TRIES = 3
"""Interfaces of pods come and go between the reading of two lists."""

_UP, _REJECT = 0x1, 0x200
"""RTF_UP and RTF_REJECT (uapi/linux/route.h)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Upper:
    """An interface that stands on another, directly or not."""

    name: str
    vlan: bool


class Stack:
    """The interfaces of the network namespace that sysfs shows, and what stands on what. Each is read once."""

    def __init__(self, files: sysfs.Sysfs, found: findings.Findings) -> None:
        self._files = files
        self._found = found
        self._above: dict[str, tuple[Upper, ...]] = {}

    def names(self) -> frozenset[str]:
        """All interfaces."""
        return frozenset(self._directory().names()) - {_NO_INTERFACE}

    def above(self, interface: str) -> tuple[Upper, ...]:
        """Everything that stands on an interface, nearest first."""
        if interface not in self._above:
            self._above[interface] = tuple(
                Upper(name=name, vlan="DEVTYPE=vlan" in (self._directory(name).text("uevent") or "").splitlines())
                for name in self._reached(interface, "upper_")
            )
        return self._above[interface]

    def directly_above(self, interface: str) -> tuple[str, ...]:
        """What stands on an interface without another one in between."""
        return self._next(interface, "upper_")

    def master(self, interface: str) -> str | None:
        """The bond or bridge that it belongs to."""
        return self._directory(interface).link_name("master")

    def shows_hardware(self, interface: str) -> bool:
        """Whether it is a device, or sysfs tells a device below it. Open vSwitch and tunnels do not show what carries them."""
        below = (interface, *self._reached(interface, "lower_"))
        return any(self._directory(name).link("device") is not None for name in below)

    def _reached(self, interface: str, way: str) -> tuple[str, ...]:
        reached: dict[str, None] = {interface: None}
        queue = [interface]
        for name in queue:
            for other in self._next(name, way):
                if other not in reached and len(reached) <= _MAX_STACK:
                    reached[other] = None
                    queue.append(other)
        return tuple(queue[1:])

    def _next(self, interface: str, way: str) -> tuple[str, ...]:
        links = (link.removeprefix(way) for link in self._directory(interface).names() if link.startswith(way))
        return tuple(name for name in links if name not in ("", ".", ".."))

    def _directory(self, name: str | None = None) -> sysfs.Directory:
        path = _INTERFACES if name is None else f"{_INTERFACES}/{name}"
        return sysfs.Directory(self._files, path, subject=name or "net", found=self._found)


def with_management(
    nics: Sequence[model.Nic], stack: Stack, files: sysfs.Sysfs, found: findings.Findings
) -> tuple[model.Nic, ...]:
    """The NICs, each with whether the default route of the node leaves by it. Where that is not known, a Finding says why."""
    if not nics:
        return ()
    try:
        leaving = default_interfaces(files, stack)
    except errors.SourceError as err:
        _note_unknown(str(err), found)
        return tuple(nics)
    reached = [
        {name for own in nic.interfaces for name in (own.name, *(upper.name for upper in stack.above(own.name)))}
        for nic in nics
    ]
    hidden = sorted(
        name for name in leaving if not any(name in own for own in reached) and not stack.shows_hardware(name)
    )
    if hidden:
        _note_unknown(f"it leaves by {' and '.join(hidden)}, and sysfs does not tell which device carries that", found)
    return tuple(
        replace(nic, management=True if not leaving.isdisjoint(own) else None if hidden else False)
        for nic, own in zip(nics, reached, strict=True)
    )


def _note_unknown(why: str, found: findings.Findings) -> None:
    found.info("default-route-unknown", "net", f"which NIC the default route of the node leaves by is not known: {why}")


def default_interfaces(files: sysfs.Sysfs, stack: Stack) -> frozenset[str]:
    """The interfaces by which default routes leave; none if there is no such route. SourceError where it is not known."""
    for _ in range(_TRIES):
        shown = stack.names()
        devices = _lines(files, "dev")
        if devices is None:
            raise errors.SourceError(
                "sysfs", "missing", f"/{_OF_PROCESS_1}/dev is not there; give --procfs the /proc of the node"
            )
        if shown == {line.partition(":")[0].strip() for line in devices if ":" in line}:
            return _best(files, "route", _default_v4) | _best(files, "ipv6_route", _default_v6)
    raise errors.SourceError(
        "sysfs",
        "another-namespace",
        f"/{_OF_PROCESS_1} is of another network namespace than /{_INTERFACES}, as they show different interfaces; give "
        "--procfs the /proc of the node",
    )


def _best(files: sysfs.Sysfs, name: str, read: Callable[[list[str]], tuple[int, str] | None]) -> frozenset[str]:
    """The interfaces of the default routes of the lowest metric, which are the ones in use."""
    try:
        routes = [route for line in _lines(files, name) or () if (route := read(line.split())) is not None]
    except (ValueError, IndexError) as err:
        raise errors.SourceError("sysfs", errors.MALFORMED, f"/{_OF_PROCESS_1}/{name} holds what is no route") from err
    best = min((metric for metric, _ in routes), default=0)
    return frozenset(interface for metric, interface in routes if metric == best)


def _default_v4(fields: list[str]) -> tuple[int, str] | None:
    """Metric and interface of a default route in the table `main`, of several hops the first (net/ipv4/fib_trie.c):
    Iface Destination Gateway Flags RefCnt Use Metric Mask MTU Window IRTT.
    """
    if not fields or fields[0] == "Iface" or int(fields[1], 16) or int(fields[7], 16):
        return None
    return (int(fields[6]), fields[0]) if int(fields[3], 16) & (_UP | _REJECT) == _UP else None


def _default_v6(fields: list[str]) -> tuple[int, str] | None:
    """Metric and interface of a default route in any table (net/ipv6/route.c): destination and length, source and length,
    next hop, metric, references, uses, flags, interface.
    """
    if not fields or int(fields[0], 16) or int(fields[1], 16) or int(fields[3], 16):
        return None
    return (int(fields[5], 16), fields[9]) if int(fields[8], 16) & (_UP | _REJECT) == _UP else None


def _lines(files: sysfs.Sysfs, name: str) -> list[str] | None:
    """The lines of a file about the network of process 1; None where it is not there. SourceError."""
    data = files.read(f"{_OF_PROCESS_1}/{name}", limit=_MAX_ROUTES_BYTES)
    return None if data is None else data.decode(errors="replace").splitlines()
