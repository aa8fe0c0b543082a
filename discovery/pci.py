# SPDX-License-Identifier: Apache-2.0
"""PCI functions as sysfs shows them (Documentation/ABI/testing/sysfs-bus-pci): which there are, and where each stands."""

from __future__ import annotations

import functools
import posixpath
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import Enum

from discovery import address, errors, findings, model, pcie, sysfs, upward
from discovery.address import PciAddress

NVIDIA = 0x10DE
MELLANOX = 0x15B3
DEVICES = "sys/bus/pci/devices"

_MAX_NUMA_NODE = 1023
"""CONFIG_NODES_SHIFT is at most 10."""

_DATA_DIRECT = 0x2100
"""The DMA function of a ConnectX-8 (drivers/infiniband/hw/mlx5/data_direct.c)."""

_NETWORK, _DISPLAY = 0x02, 0x03
_NON_VOLATILE_MEMORY, _OTHER_BRIDGE, _DMA_CONTROLLER, _INFINIBAND = 0x0108, 0x0680, 0x0801, 0x0C06
_WANTED_BASES = frozenset((_NETWORK, _DISPLAY))
_WANTED_CLASSES = frozenset((_NON_VOLATILE_MEMORY, _OTHER_BRIDGE, _DMA_CONTROLLER, _INFINIBAND))
_MAX_LANES = 32
_SPEED = re.compile(r"([0-9]{1,3}(?:\.[0-9])?) GT/s\b")


class Kind(Enum):
    """What a function is to us."""

    GPU = "GPU"
    NVSWITCH = "NVSwitch"
    NIC = "NIC"
    NVME = "NVMe"
    DATA_DIRECT = "Data Direct"
    """The function by which a NIC that stands elsewhere reads and writes the memory of a GPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Function:
    """The identity of a function: its address, what it is, and its directory as components below /sys/devices (none if the
    bus does not link there).
    """

    address: PciAddress
    kind: Kind
    vendor_id: int
    class_code: int
    device_id: int | None = None
    """None where `kind` follows without it."""
    components: tuple[str, ...] = ()

    @property
    def path(self) -> str:
        """Its directory."""
        return "sys/devices/" + "/".join(self.components) if self.components else f"{DEVICES}/{self.address}"


def device_components(link: str, target: str) -> tuple[str, ...]:
    """The components below /sys/devices of what a link in sysfs points to; none if it points elsewhere."""
    path = posixpath.normpath(posixpath.join(posixpath.dirname(link), target))
    return tuple(path.removeprefix("sys/devices/").split("/")) if path.startswith("sys/devices/") else ()


def functions(files: sysfs.Sysfs, rdma: Iterable[PciAddress], found: findings.Findings) -> tuple[Function, ...]:
    """The functions that matter here, ordered by address: NVIDIA GPUs and NVSwitches, NICs (classes 02 and 0c06, and those
    in `rdma`) and what belongs to them, NVMe controllers.

    Raises a ProbeError where no GPU is seen and a function cannot be read: that is no machine without GPUs.
    """
    with_rdma = frozenset(rdma)
    known = []
    unread: list[errors.SourceError] = []
    for name in _names(files):
        physical = None
        try:
            function = _identify(files, name, with_rdma)
            if function is not None and function.kind is Kind.GPU:
                physical = files.link(f"{function.path}/physfn")
        except errors.SourceError as err:
            found.failed(name, err)
            if err.kind != errors.MALFORMED:
                unread.append(err)
            continue
        if function is None:
            continue
        if physical is not None:
            found.info(
                "gpu-virtual-functions",
                posixpath.basename(physical),
                "its virtual functions are for virtual machines: left out",
            )
            continue
        if not function.components:
            found.warning(
                "pci-path-unknown",
                function.address,
                f"/{DEVICES}/{name} does not link below /sys/devices: no place is known",
            )
        known.append(function)
    if unread and all(function.kind is not Kind.GPU for function in known):
        raise errors.ProbeError(
            f"no NVIDIA GPU is seen, and {len(unread)} PCI functions, of which any may be one, cannot be read ({unread[0]}); "
            f"give the agent the right to read /sys"
        )
    return tuple(sorted(known, key=lambda function: function.address))


def _names(files: sysfs.Sysfs) -> tuple[str, ...]:
    try:
        return files.names(DEVICES)
    except errors.SourceError as err:
        raise errors.ProbeError(f"the PCI functions of this machine cannot be listed: {err}") from err


def _identify(files: sysfs.Sysfs, name: str, rdma: frozenset[PciAddress]) -> Function | None:
    try:
        where = address.parse(name)
    except ValueError:
        where = None
    if where is None or str(where) != name:
        raise errors.SourceError("sysfs", errors.MALFORMED, f"/{DEVICES}/{name[:40]} is no PCI address")
    link = f"{DEVICES}/{name}"
    target = files.link(link)
    components = device_components(link, target) if target is not None else ()
    if components and components[-1] != name:
        components = ()
    path = "sys/devices/" + "/".join(components) if components else link
    class_code = files.hexadecimal(f"{path}/class", 24)
    if class_code is None:
        return None
    base, subclass = class_code >> 16, class_code >> 8
    if base not in _WANTED_BASES and subclass not in _WANTED_CLASSES and where not in rdma:
        return None
    vendor_id = files.hexadecimal(f"{path}/vendor", 16)
    if vendor_id is None:
        return None
    device_id = files.hexadecimal(f"{path}/device", 16) if vendor_id == MELLANOX else None
    if vendor_id == MELLANOX and device_id == _DATA_DIRECT:
        kind = Kind.DATA_DIRECT
    elif base == _NETWORK or subclass == _INFINIBAND or where in rdma:
        kind = Kind.NIC
    elif vendor_id == NVIDIA and base == _DISPLAY:
        kind = Kind.GPU
    elif vendor_id == NVIDIA and subclass == _OTHER_BRIDGE:
        kind = Kind.NVSWITCH
    elif subclass == _NON_VOLATILE_MEMORY:
        kind = Kind.NVME
    else:
        return None
    return Function(
        address=where,
        kind=kind,
        vendor_id=vendor_id,
        class_code=class_code,
        device_id=device_id,
        components=components,
    )


class Locator:
    """Describes functions and the bridges above them; each bridge and IOMMU group is read once."""

    def __init__(self, files: sysfs.Sysfs, found: findings.Findings) -> None:
        self._files = files
        self._found = found
        self._bridges: dict[PciAddress, model.Bridge | None] = {}
        self._gaps: dict[PciAddress, pcie.ConfigGap] = {}
        self._ports: dict[PciAddress, model.PortType | None] = {}
        self._chains: dict[tuple[PciAddress, ...], None] = {}
        self._iommu_types: dict[int, str | None] = {}
        self._cpu_lists: dict[bytes, tuple[int, ...]] = {}

    def describe(self, function: Function) -> model.PciFunction | None:
        """A function and its place, switches and socket not yet filled in; None when its identity is not readable."""
        directory = self._directory(function.path, function.address)
        chain = pcie.parse_chain(function.address, function.components)
        device_id = directory.hexadecimal("device", 16) if function.device_id is None else function.device_id
        if device_id is None:
            self._found.warning("pci-identity", function.address, f"/{function.path}/device is missing: left out")
            return None
        for depth, bridge in enumerate(chain.bridges):
            above = len(function.components) - 1 - len(chain.bridges) + depth
            self._read_bridge(bridge, function.components[: above + 1], chain, depth)
        if chain.bridges:
            self._chains[chain.bridges] = None
        numa_node = self._numa_node(directory)
        physical = directory.link_name("physfn")
        group, group_type = self._iommu(directory)
        return model.PciFunction(
            address=function.address,
            vendor_id=function.vendor_id,
            device_id=device_id,
            class_code=function.class_code,
            subsystem_vendor_id=directory.hexadecimal("subsystem_vendor", 16),
            subsystem_device_id=directory.hexadecimal("subsystem_device", 16),
            host_bridge=chain.host_bridge,
            pcie_root=chain.pcie_root,
            bridges=chain.bridges,
            numa_node=numa_node,
            numa_source=None if numa_node is None else model.Provenance.SYSFS,
            cpus=None if numa_node is None else self._cpus(directory),
            iommu_group=group,
            iommu_type=group_type,
            driver=directory.link_name("driver"),
            link=self._link(directory),
            physical_function=_address_or_none(physical),
        )

    def bridges(self) -> tuple[model.Bridge, ...]:
        """All bridges above the functions described so far, ordered by address, with their port types."""
        inferred = self._infer()
        typed = {
            where: replace(bridge, port_type=inferred[where], port_type_inferred=True) if where in inferred else bridge
            for where, bridge in sorted(self._bridges.items())
            if bridge is not None
        }
        ways = upward.Ways(typed.values())
        return tuple(
            bridge if placed is bridge.pci else replace(bridge, pci=placed)
            for bridge in typed.values()
            for placed in [ways.placed(bridge.pci)]
        )

    def _read_bridge(self, where: PciAddress, components: tuple[str, ...], chain: pcie.Chain, depth: int) -> None:
        if where in self._bridges:
            return
        directory = self._directory("sys/devices/" + "/".join(components), where)
        registers = directory.pieces("config", pcie.read_bridge) or _NO_REGISTERS
        identity = registers.identity or _told_identity(directory)
        if identity is None:
            self._bridges[where] = None
            self._found.warning("pci-identity", where, f"/{directory.path} shows no identity: the bridge is left out")
            return
        subsystem = registers.subsystem or _told_subsystem(directory, identity)
        port = registers.port
        self._bridges[where] = model.Bridge(
            pci=model.PciFunction(
                address=where,
                vendor_id=identity.vendor_id,
                device_id=identity.device_id,
                class_code=identity.class_code,
                subsystem_vendor_id=subsystem and subsystem.vendor_id,
                subsystem_device_id=subsystem and subsystem.device_id,
                host_bridge=chain.host_bridge,
                pcie_root=chain.pcie_root,
                bridges=chain.bridges[:depth],
                link=self._link(directory),
            ),
            port_type=port if isinstance(port, model.PortType) else None,
            redirects=registers.redirects,
        )
        if isinstance(port, model.PortType):
            self._ports[where] = port
        elif port is pcie.ConfigGap.CONVENTIONAL:
            self._ports[where] = None
        else:
            self._gaps[where] = port

    def _infer(self) -> dict[PciAddress, model.PortType]:
        """Port types of the bridges whose configuration space told none; says so in Findings."""
        inferred: dict[PciAddress, model.PortType] = {}
        for chain in self._chains:
            inferred.update(pcie.infer_port_types(chain, self._ports))
        if pcie.ConfigGap.RESTRICTED in self._gaps.values():
            self._found.info(
                "pci-config-restricted",
                "sysfs",
                "the configuration space of bridges is readable up to 64 bytes only (it takes CAP_SYS_ADMIN): port types are "
                "inferred from the place of each bridge, and whether ports redirect peer-to-peer traffic is unknown",
            )
        for where, gap in self._gaps.items():
            if gap is not pcie.ConfigGap.RESTRICTED:
                self._found.warning(
                    "pci-config-unreadable", where, f"its configuration space is {gap.value}: the port type is inferred"
                )
        return inferred

    def _directory(self, path: str, subject: object) -> sysfs.Directory:
        return sysfs.Directory(self._files, path, subject=subject, found=self._found)

    def _numa_node(self, directory: sysfs.Directory) -> int | None:
        node = directory.number("numa_node")
        return node if node is not None and 0 <= node <= _MAX_NUMA_NODE else None

    def _cpus(self, directory: sysfs.Directory) -> tuple[int, ...] | None:
        """CPU lists are long, and there are few of them."""
        text = directory.read("local_cpulist")
        cpus = None if text is None else self._cpu_lists.get(text)
        if text is not None and cpus is None and (cpus := directory.cpu_list("local_cpulist")) is not None:
            self._cpu_lists[text] = cpus
        return cpus

    def _iommu(self, directory: sysfs.Directory) -> tuple[int | None, str | None]:
        name = directory.link_name("iommu_group")
        if name is None or not (name.isascii() and name.isdecimal() and len(name) <= 9):
            return None, None
        group = int(name)
        if group not in self._iommu_types:
            self._iommu_types[group] = self._directory(f"sys/kernel/iommu_groups/{group}", directory.subject).text(
                "type"
            )
        return group, self._iommu_types[group]

    def _link(self, directory: sysfs.Directory) -> model.PcieLink | None:
        max_width, current_width = (
            _lanes(directory.number("max_link_width")),
            _lanes(directory.number("current_link_width")),
        )
        best, current = _speed(directory.text("max_link_speed")), _speed(directory.text("current_link_speed"))
        if max_width is None and current_width is None and best is None and current is None:
            return None
        return model.PcieLink(
            max_width=max_width, current_width=current_width, max_speed_gts=best, current_speed_gts=current
        )


_NO_REGISTERS = pcie.Registers(port=pcie.ConfigGap.MALFORMED)


def _told_identity(directory: sysfs.Directory) -> pcie.Identity | None:
    """The identity by the kernel's own attributes, which it read when the function was found."""
    vendor_id, device_id = directory.hexadecimal("vendor", 16), directory.hexadecimal("device", 16)
    class_code = directory.hexadecimal("class", 24)
    if vendor_id is None or device_id is None or class_code is None:
        return None
    return pcie.Identity(vendor_id, device_id, class_code)


def _told_subsystem(directory: sysfs.Directory, identity: pcie.Identity) -> pcie.Subsystem | None:
    """The subsystem by the kernel's own attributes, where something follows from it."""
    if identity.vendor_id != pcie.BROADCOM:
        return None
    vendor_id, device_id = directory.hexadecimal("subsystem_vendor", 16), directory.hexadecimal("subsystem_device", 16)
    return None if vendor_id is None or device_id is None else pcie.Subsystem(vendor_id, device_id)


def _address_or_none(text: str | None) -> PciAddress | None:
    try:
        return None if text is None else address.parse(text)
    except ValueError:
        return None


def _lanes(width: int | None) -> int | None:
    """0 and 255 are what the kernel shows when it does not know."""
    return width if width is not None and 0 < width <= _MAX_LANES else None


@functools.lru_cache(maxsize=64)
def _speed(text: str | None) -> float | None:
    match = _SPEED.match(text or "")
    return float(match[1]) if match else None
