# SPDX-License-Identifier: Apache-2.0
"""The files of network interfaces: those of NICs, what the host builds upon them, and its routes in the procfs of process 1.

As the kernel shows them: Documentation/ABI/testing/sysfs-class-net; `upper_` and `lower_` links of net/core/dev.c;
/proc/<pid>/net of net/core/net-procfs.c, net/ipv4/fib_trie.c and net/ipv6/route.c. Addresses are those of documentation.
"""

from __future__ import annotations

import posixpath
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from discovery.mock import identity, network, procnet
from discovery.mock.devicefiles import NicPort
from discovery.mock.pcifiles import up
from discovery.mock.pcitree import MachineError, Place
from discovery.mock.recording import Entry, Link

_ARPHRD = {"Ethernet": 1, "InfiniBand": 32}
_ARPHRD_LOOPBACK = 772
_VIRTUAL = "virtual/net"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Upper:
    """An interface that the host made."""

    name: str
    kind: str
    lower: tuple[str, ...]
    place: Place
    enslaves: bool = True


def files(name: str, ports: Sequence[NicPort], above: network.Network) -> dict[str, Entry]:
    """Network interfaces of a machine called `name`, and its routes. MachineError where a name is not one, or is taken."""
    tree: dict[str, Entry] = {}
    directories = {"lo": f"{_VIRTUAL}/lo"}
    index = 2
    for port in ports:
        if port.interface is not None:
            tree.update(_netdev(name, port, index=index))
            directories[port.interface] = f"{port.device}/net/{port.interface}"
            index += 1
    for upper in _uppers(above):
        if upper.name in directories:
            raise MachineError((*upper.place, "name"), f"there is already an interface called {upper.name}")
        directories[upper.name] = f"{_VIRTUAL}/{upper.name}"
        tree.update(_virtual(name, upper, index=index))
        index += 1
    tree.update(_loopback())
    for upper in _uppers(above):
        for lower in upper.lower:
            if lower not in directories or lower in ("lo", upper.name):
                raise MachineError((*upper.place, "on" if upper.kind == "vlan" else "of"), _unknown(lower, directories))
            ends = [(each, f"sys/devices/{directories[each]}") for each in (upper.name, lower)]
            tree.update(tie(ends[0], ends[1], enslaves=upper.enslaves))
    route = above.default_route
    if route is not None and route not in directories:
        raise MachineError(("network", "defaultRoute"), _unknown(route, directories))
    tree.update(procnet.files(directories, [route] if route else []))
    return tree


def _uppers(above: network.Network) -> Iterator[_Upper]:
    """All that the section describes, in the order in which it may stand upon each other, which is nobody's to say."""
    for number, bond in enumerate(above.bonds):
        yield _Upper(name=bond.name, kind="bond", lower=bond.of, place=("network", "bonds", number))
    for number, vlan in enumerate(above.vlans):
        place: Place = ("network", "vlans", number)
        yield _Upper(name=vlan.name, kind="vlan", lower=(vlan.on,), place=place, enslaves=False)
    for number, bridge in enumerate(above.bridges):
        yield _Upper(name=bridge.name, kind="bridge", lower=bridge.of, place=("network", "bridges", number))


def tie(above: tuple[str, str], below: tuple[str, str], *, enslaves: bool) -> Iterator[tuple[str, Entry]]:
    """The links between an interface and one that it stands on, each by name and directory."""
    (upper, up_there), (lower, down_there) = above, below
    yield f"{up_there}/lower_{lower}", Link(posixpath.relpath(down_there, up_there))
    yield f"{down_there}/upper_{upper}", Link(posixpath.relpath(up_there, down_there))
    if enslaves:
        yield f"{down_there}/master", Link(posixpath.relpath(up_there, down_there))


def _unknown(name: str, known: Iterable[str]) -> str:
    return f"there is no interface called {name}; there are {', '.join(sorted(set(known) - {'lo'})) or 'none'}"


def _netdev(name: str, port: NicPort, *, index: int) -> Iterator[tuple[str, Entry]]:
    inner = f"{port.device}/net/{port.interface}"
    here = f"sys/devices/{inner}"
    fields = {
        "address": _hardware_address(name, port),
        "type": _ARPHRD[port.link],
        "operstate": "up" if port.up else "down",
        "carrier": int(port.up),
        "mtu": 2044 if port.link == "InfiniBand" else 1500,
        "ifindex": index,
        "dev_id": "0x0",
        "dev_port": 0,
        "flags": "0x1003" if port.up else "0x1002",
        "uevent": f"INTERFACE={port.interface}\nIFINDEX={index}",
    }
    if port.up:
        fields["speed"] = port.rate * 1000
    if port.function.driver == "mlx5_core":
        fields["phys_port_name"] = f"p{port.function.address.function}"
    yield from ((f"{here}/{field}", f"{value}\n") for field, value in fields.items())
    yield f"{here}/device", Link(f"../../../{posixpath.basename(port.device)}")
    yield f"{here}/subsystem", Link(f"{up(inner)}class/net")
    yield f"sys/class/net/{port.interface}", Link(f"../../devices/{inner}")


def _hardware_address(name: str, port: NicPort) -> str:
    if port.link == "Ethernet":
        return identity.mac_of(name, port.function.address)
    guid = identity.guid_of(name, port.function.address).replace(":", "")
    octets = "00000127fe80000000000000" + guid
    return ":".join(octets[start : start + 2] for start in range(0, len(octets), 2))


def _virtual(name: str, upper: _Upper, *, index: int) -> Iterator[tuple[str, Entry]]:
    here = f"sys/devices/{_VIRTUAL}/{upper.name}"
    fields = {
        "address": identity.mac_of(name, upper.name),
        "type": _ARPHRD["Ethernet"],
        "operstate": "up",
        "carrier": 1,
        "mtu": 1500,
        "ifindex": index,
        "flags": "0x1003",
        "uevent": f"DEVTYPE={upper.kind}\nINTERFACE={upper.name}\nIFINDEX={index}",
    }
    yield from ((f"{here}/{field}", f"{value}\n") for field, value in fields.items())
    yield f"{here}/subsystem", Link("../../../../class/net")
    yield f"sys/class/net/{upper.name}", Link(f"../../devices/{_VIRTUAL}/{upper.name}")


def _loopback() -> Iterator[tuple[str, Entry]]:
    here = f"sys/devices/{_VIRTUAL}/lo"
    fields = {
        "type": _ARPHRD_LOOPBACK,
        "operstate": "unknown",
        "carrier": 1,
        "mtu": 65536,
        "ifindex": 1,
        "address": "00:00:00:00:00:00",
        "uevent": "INTERFACE=lo\nIFINDEX=1",
    }
    yield from ((f"{here}/{field}", f"{value}\n") for field, value in fields.items())
    yield "sys/class/net/lo", Link(f"../../devices/{_VIRTUAL}/lo")
