# SPDX-License-Identifier: Apache-2.0
"""Where a PCI function stands, from the two places the kernel tells it: its path below /sys/devices, and the capabilities in
the configuration space of the bridges above it. Pure: text and bytes in, values out.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from discovery import address
from discovery.address import HostBridge, PciAddress
from discovery.model import Bridge, PciFunction, PortType

ConfigReader = Callable[[int, int], bytes]
"""Reads from an offset of a configuration space as many bytes as asked for; fewer where there are no more to be seen."""

UNPRIVILEGED_CONFIG_BYTES = 64
"""All of the configuration space that a reader without CAP_SYS_ADMIN gets (pci_read_config, drivers/pci/pci-sysfs.c)."""

_CONVENTIONAL_BYTES = 256
_EXTENDED_BYTES = 4096
_STATUS = 0x06
_STATUS_CAPABILITIES = 0x10
_CAPABILITY_POINTER = 0x34
_SUBSYSTEM = 0x0D
_PCI_EXPRESS = 0x10
_MAX_CAPABILITIES = 48
"""As many as fit the 192 bytes after the header, so a loop in the list ends."""

_ACCESS_CONTROL = 0x000D
_REQUEST_REDIRECT = 1 << 2
_EGRESS_CONTROL = 1 << 5

_PORT_TYPES = {
    4: PortType.ROOT,
    5: PortType.UPSTREAM,
    6: PortType.DOWNSTREAM,
    7: PortType.PCIE_TO_PCI,
    8: PortType.PCI_TO_PCIE,
}

BROADCOM = 0x1000
_GENERATION_4 = 0xC010
_GENERATION_5 = 0xC030


class ConfigGap(Enum):
    """Why the configuration space tells no port type."""

    RESTRICTED = "restricted"
    """Only the first 64 bytes came: the reader lacks CAP_SYS_ADMIN."""
    DEAD = "dead"
    """All ones: the function no longer answers."""
    MALFORMED = "malformed"
    CONVENTIONAL = "conventional"
    """Readable, and there is no PCI Express capability: a conventional PCI bridge."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """The way down to a function. `host_bridge` is the nearest one above it, `bridges` what stands between the two."""

    host_bridge: HostBridge | None = None
    pcie_root: HostBridge | None = None
    bridges: tuple[PciAddress, ...] = ()


def parse_chain(function: PciAddress, components: Sequence[str]) -> Chain:
    """The chain of a function whose directory is `/sys/devices/` + `components`.

    The PCIe root is known by the rule that all DRA drivers share: the path starts with a host bridge, ends in the
    function, and the domain has four digits. So what hangs below VMD (a second host bridge, domain 10000 and up), VMBus
    or a platform device has a host bridge but no PCIe root.
    """
    if not components or components[-1] != str(function):
        return Chain()
    nearest = -1
    for index, component in enumerate(components):
        if address.parse_host_bridge(component) is not None:
            nearest = index
    if nearest < 0:
        return Chain()
    try:
        bridges = tuple(address.parse(component) for component in components[nearest + 1 : -1])
    except ValueError:
        return Chain()
    first = address.parse_host_bridge(components[0])
    return Chain(
        host_bridge=HostBridge(components[nearest]),
        pcie_root=first if function.domain <= 0xFFFF else None,
        bridges=bridges,
    )


class Identity(NamedTuple):
    """What a function says it is. Class code: base class, subclass and interface, 24 bits."""

    vendor_id: int
    device_id: int
    class_code: int


class Subsystem(NamedTuple):
    """Who made the thing that a function is part of."""

    vendor_id: int
    device_id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Registers:
    """What the configuration space of a bridge tells. `identity` is None where the function does not answer; `redirects` as
    in `model.Bridge`.
    """

    port: PortType | ConfigGap
    identity: Identity | None = None
    subsystem: Subsystem | None = None
    redirects: bool | None = None


def read_bridge(read: ConfigReader) -> Registers:
    """The configuration space of a bridge (PCI Express base specification, 7.5.1, 7.5.3 and 7.7.11). Whatever the bytes, it
    ends, and what they do not say is None.
    """
    config = read(0, _CONVENTIONAL_BYTES)
    if len(config) < UNPRIVILEGED_CONFIG_BYTES:
        return Registers(port=ConfigGap.MALFORMED)
    vendor_id, device_id, status, revision_and_class = struct.unpack_from("<HHxxHI", config)
    if vendor_id == 0xFFFF:
        return Registers(port=ConfigGap.DEAD)
    identity = Identity(vendor_id, device_id, revision_and_class >> 8)
    if not status & _STATUS_CAPABILITIES:
        return Registers(port=ConfigGap.CONVENTIONAL, identity=identity, redirects=False)
    if len(config) == UNPRIVILEGED_CONFIG_BYTES:
        return Registers(port=ConfigGap.RESTRICTED, identity=identity)
    places, complete = capabilities(config)
    subsystem = places.get(_SUBSYSTEM)
    express = places.get(_PCI_EXPRESS)
    port: PortType | ConfigGap = ConfigGap.CONVENTIONAL if complete else ConfigGap.MALFORMED
    if express is not None:
        (flags,) = struct.unpack_from("<H", config, express + 2)
        port = _PORT_TYPES.get(flags >> 4 & 0xF, ConfigGap.MALFORMED)
    return Registers(
        port=port,
        identity=identity,
        subsystem=None
        if subsystem is None or subsystem + 8 > len(config)
        else Subsystem(*struct.unpack_from("<HH", config, subsystem + 4)),
        redirects=_redirects(read) if isinstance(port, PortType) else False if port is ConfigGap.CONVENTIONAL else None,
    )


def capabilities(config: bytes) -> tuple[dict[int, int], bool]:
    """Where each capability stands, the first of a kind, and whether the list came to its end."""
    places: dict[int, int] = {}
    at = config[_CAPABILITY_POINTER] & 0xFC
    for _ in range(_MAX_CAPABILITIES):
        if at == 0:
            return places, True
        if at < UNPRIVILEGED_CONFIG_BYTES or at + 4 > len(config):
            break
        places.setdefault(config[at], at)
        at = config[at + 1] & 0xFC
    return places, False


def _redirects(read: ConfigReader) -> bool | None:
    """The P2P Request Redirect bit of the access control services. Under egress control a vector decides port by port, which
    is not read: None, unless all is redirected anyway. None too where the extended space, or a part of its list, is not there
    to be read (a bridge that the kernel reaches by the old way only has 256 bytes).
    """
    at = _CONVENTIONAL_BYTES
    seen: set[int] = set()
    while at not in seen and _CONVENTIONAL_BYTES <= at <= _EXTENDED_BYTES - 8:
        seen.add(at)
        piece = read(at, 8)
        if len(piece) < 8:
            return None
        header, control = struct.unpack("<IxxH", piece)
        if header & 0xFFFF == _ACCESS_CONTROL:
            if control & _REQUEST_REDIRECT:
                return True
            return None if control & _EGRESS_CONTROL else False
        at = header >> 20 & 0xFFC
        if at == 0:
            return False
    return None


def infer_port_types(
    bridges: Sequence[PciAddress], known: Mapping[PciAddress, PortType | None]
) -> Mapping[PciAddress, PortType]:
    """Port types by place for the bridges of one chain (outermost first) that are not in `known`: a root port, then pairs
    of upstream and downstream ports. `known` holds what the configuration space told, None for a conventional bridge.
    """
    inferred: dict[PciAddress, PortType] = {}
    above: PortType | None = None
    for index, bridge in enumerate(bridges):
        if bridge in known:
            above = known[bridge]
            continue
        if index == 0:
            above = PortType.ROOT
        elif above in (PortType.ROOT, PortType.DOWNSTREAM):
            above = PortType.UPSTREAM
        elif above is PortType.UPSTREAM:
            above = PortType.DOWNSTREAM
        else:
            above = None
        if above is not None:
            inferred[bridge] = above
    return inferred


def shared(a: PciFunction, b: PciFunction) -> int:
    """How many bridges, from the host bridge down, are above both of two functions of one host bridge."""
    both = zip(a.bridges, b.bridges, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], both))


def switches(
    bridges: Sequence[PciAddress],
    ports: Mapping[PciAddress, PortType | None],
    second_levels: Container[PciAddress] = frozenset(),
) -> tuple[PciAddress, ...]:
    """The upstream ports among the bridges of a chain, innermost first: a switch is one upstream port and the downstream
    ports below it. `second_levels` are not counted: they are inside the part that the switch above them belongs to.
    """
    return tuple(
        bridge for bridge in reversed(bridges) if ports.get(bridge) is PortType.UPSTREAM and bridge not in second_levels
    )


def second_levels(bridges: Mapping[PciAddress, Bridge]) -> frozenset[PciAddress]:
    """The upstream ports inside switches that show themselves as two levels, although all their ports are alike (Broadcom
    PEX880xx and PEX890xx in base mode). Told by their subsystem, as NCCL does (getBcmGen in src/graph/topo.cc): 1000:a0xx at
    both levels of generation 4, 1000:0xxx and below it 1000:1xxx in generation 5. Three of the former in a row are a part of
    two levels and one more switch, as a part has no third level.
    """
    found: set[PciAddress] = set()
    for where in sorted(bridges, key=lambda bridge: len(bridges[bridge].pci.bridges)):
        inner = bridges[where]
        if inner.port_type is not PortType.UPSTREAM or len(inner.pci.bridges) < 2:
            continue
        outer, between = (bridges.get(above) for above in inner.pci.bridges[-2:])
        if outer is None or between is None or outer.pci.address in found:
            continue
        if outer.port_type is not PortType.UPSTREAM or between.port_type is not PortType.DOWNSTREAM:
            continue
        generation = _broadcom_generation(inner.pci, level=1)
        if generation is not None and _broadcom_generation(outer.pci, level=0) == generation:
            found.add(where)
    return frozenset(found)


def _broadcom_generation(pci: PciFunction, *, level: int) -> int | None:
    if pci.vendor_id != BROADCOM or pci.subsystem_vendor_id != BROADCOM or pci.subsystem_device_id is None:
        return None
    kind = pci.subsystem_device_id >> 12
    if pci.device_id == _GENERATION_4 and kind == 0xA:
        return 4
    if pci.device_id == _GENERATION_5 and kind == level:
        return 5
    return None
