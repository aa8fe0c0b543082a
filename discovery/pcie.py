# SPDX-License-Identifier: Apache-2.0
"""Where a PCI function stands, from the two places the kernel tells it: its path below /sys/devices, and the PCI Express
capability in a bridge's configuration space. Pure: text and bytes in, values out.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from discovery import address
from discovery.address import HostBridge, PciAddress
from discovery.model import PortType

UNPRIVILEGED_CONFIG_BYTES = 64
"""All of the configuration space that a reader without CAP_SYS_ADMIN gets (pci_read_config, drivers/pci/pci-sysfs.c)."""

_STATUS = 0x06
_STATUS_CAPABILITIES = 0x10
_CAPABILITY_POINTER = 0x34
_PCI_EXPRESS = 0x10
_MAX_CAPABILITIES = 48
"""As many as fit the 192 bytes after the header, so a loop in the list ends."""

_PORT_TYPES = {
    4: PortType.ROOT,
    5: PortType.UPSTREAM,
    6: PortType.DOWNSTREAM,
    7: PortType.PCIE_TO_PCI,
    8: PortType.PCI_TO_PCIE,
}


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


def parse_identity(config: bytes) -> Identity | None:
    """The identity in a configuration space; None where the function does not answer."""
    if len(config) < UNPRIVILEGED_CONFIG_BYTES or config[:2] == b"\xff\xff":
        return None
    vendor_id, device_id, revision_and_class = struct.unpack_from("<HH4xI", config)
    return Identity(vendor_id, device_id, revision_and_class >> 8)


def parse_port_type(config: bytes) -> PortType | ConfigGap:
    """The port type from a bridge's configuration space (PCI Express base specification, 7.5.1 and 7.5.3)."""
    if len(config) < UNPRIVILEGED_CONFIG_BYTES:
        return ConfigGap.MALFORMED
    if config[:4] == b"\xff\xff\xff\xff":
        return ConfigGap.DEAD
    (status,) = struct.unpack_from("<H", config, _STATUS)
    if not status & _STATUS_CAPABILITIES:
        return ConfigGap.CONVENTIONAL
    if len(config) == UNPRIVILEGED_CONFIG_BYTES:
        return ConfigGap.RESTRICTED
    at = config[_CAPABILITY_POINTER] & 0xFC
    for _ in range(_MAX_CAPABILITIES):
        if at == 0:
            return ConfigGap.CONVENTIONAL
        if at < UNPRIVILEGED_CONFIG_BYTES or at + 4 > len(config):
            return ConfigGap.MALFORMED
        identifier, following = config[at], config[at + 1]
        if identifier == _PCI_EXPRESS:
            (capabilities,) = struct.unpack_from("<H", config, at + 2)
            return _PORT_TYPES.get(capabilities >> 4 & 0xF, ConfigGap.MALFORMED)
        at = following & 0xFC
    return ConfigGap.MALFORMED


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


def switches(bridges: Sequence[PciAddress], ports: Mapping[PciAddress, PortType | None]) -> tuple[PciAddress, ...]:
    """The upstream ports among the bridges of a chain, innermost first: a switch is one upstream port and the downstream
    ports below it.
    """
    return tuple(bridge for bridge in reversed(bridges) if ports.get(bridge) is PortType.UPSTREAM)
