# SPDX-License-Identifier: Apache-2.0
"""A Snapshot as a NCCL topology, for NCCL_TOPO_FILE: the way back from `ncclxml`. Pure.

Written for NCCL's own reader (src/graph/xml.cc), which is no XML parser: no declaration, no DTD, no tabs, one space before an
attribute, no entities, 254 characters a value, 16 attributes and 640 children an element, 256 elements (topo.h). The tree is
that of NCCL's own detection: a bridge is the upstream port of a switch, both levels of a part that shows two (NCCL joins them by
their identity), ports are left out, and devices without a NUMA node stand in a cpu with numaid -1.

What is not known is left out, as NCCL then asks the machine it runs on: family of the CPU, bandwidth of groups that an overlay
gives, C2C, network devices with several ports. What belongs to a job is left out too: `dev` and `rank` of a GPU, `dev` of a
network, and `gdr`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from discovery import model
from discovery.address import PciAddress
from discovery.errors import DocumentError

MAX_ELEMENTS = 256
"""NCCL_TOPO_XML_MAX_NODES: NCCL refuses a longer file."""

ROOMY = 192
"""NCCL adds elements of its own; a file with more than these says the same with fewer."""

_BRIDGE_CLASS = "0x060400"
_SWITCH_CLASS = "0x068000"
_UNSEEN = "fffffff:ffff:ff"
"""What NVML names an NVSwitch that the virtual machine does not have, and NCCL takes for one."""

_NAME = re.compile(r"[A-Za-z0-9_.:-]{1,64}")
"""Names of RDMA devices that need no escapes, which NCCL would not undo."""


_Level = tuple[str, PciAddress, int]
"""A switch or a group above a device: which of the two, its address, and the depth, as groups may share an address."""


@dataclass(slots=True)
class _Element:
    tag: str
    attributes: list[tuple[str, str]] = field(default_factory=list)
    inside: list[_Element] = field(default_factory=list)

    def count(self) -> int:
        """It, and all in it."""
        return 1 + sum(element.count() for element in self.inside)

    def lines(self, depth: int = 0) -> Iterator[str]:
        """As NCCL dumps it."""
        head = "".join((f"<{self.tag}", *(f' {name}="{value}"' for name, value in self.attributes)))
        indent = "  " * depth
        if not self.inside:
            yield f"{indent}{head}/>"
            return
        yield f"{indent}{head}>"
        for element in self.inside:
            yield from element.lines(depth + 1)
        yield f"{indent}</{self.tag}>"


def build(snapshot: model.Snapshot) -> str:
    """The text of the file. Raises DocumentError for a machine with more devices than NCCL takes."""
    system = _Building(snapshot, brief=False).system()
    if system.count() > ROOMY:
        system = _Building(snapshot, brief=True).system()
    if system.count() > MAX_ELEMENTS:
        raise DocumentError(
            f"NCCL takes a topology of {MAX_ELEMENTS} elements, and this machine has {system.count()}: "
            f"{len(snapshot.gpus)} GPUs and {len(snapshot.nics)} NICs"
        )
    return "\n".join((*system.lines(), ""))


class _Building:
    """One file in the making. `brief`: without networks, and with one element for all NVLinks of a GPU to switches."""

    def __init__(self, snapshot: model.Snapshot, *, brief: bool) -> None:
        self._snapshot = snapshot
        self._brief = brief
        self._bridges = {bridge.pci.address: bridge for bridge in snapshot.bridges}
        self._classes = {gpu.address: _class(gpu.pci) for gpu in snapshot.gpus}
        self._cpus: dict[int | None, _Element] = {}
        self._made: dict[_Level, _Element] = {}
        self._nodes: dict[_Level, int] = {}
        """NUMA node of what stands directly in a cpu: that of the devices below it."""

    def system(self) -> _Element:
        """The whole."""
        devices: list[tuple[model.PciFunction, _Element | None]] = [
            *((gpu.pci, self._gpu(gpu)) for gpu in self._snapshot.gpus if gpu.pci.physical_function is None),
            *((nic.pci, self._nic(nic)) for nic in self._snapshot.nics if nic.pci.physical_function is None),
        ]
        devices.sort(key=lambda device: device[0].address)
        for function, _ in devices:
            for level in self._chain(function)[:1]:
                if function.numa_node is not None:
                    self._nodes.setdefault(level, function.numa_node)
        for function, holds in devices:
            element = self._pci(function)
            if holds is not None:
                element.inside.append(holds)
            self._above(function).inside.append(element)
        nodes = sorted(self._cpus, key=lambda node: (node is None, node or 0))
        return _Element("system", [("version", "1")], [self._cpus[node] for node in nodes])

    def _chain(self, function: model.PciFunction) -> tuple[_Level, ...]:
        """What stands above a device, outermost first."""
        if function.switch_source is model.Provenance.OVERLAY:
            return tuple(("group", group, depth) for depth, group in enumerate(reversed(function.switches)))
        return tuple(("switch", bridge, 0) for bridge in function.bridges if self._is_switch(bridge))

    def _above(self, function: model.PciFunction) -> _Element:
        """The element that a device stands in, made with all above it where it is the first one there."""
        holder: _Element | None = None
        for level in self._chain(function):
            element = self._made.get(level)
            if element is None:
                kind, address, _ = level
                element = self._group() if kind == "group" else self._pci(self._bridges[address].pci)
                self._made[level] = element
                around = self._cpu(self._nodes.get(level)) if holder is None else holder
                around.inside.append(element)
            holder = element
        return self._cpu(function.numa_node) if holder is None else holder

    def _cpu(self, node: int | None) -> _Element:
        if node not in self._cpus:
            told = [("numaid", str(-1 if node is None else node))]
            cpus = next((known.cpus for known in self._snapshot.numa_nodes if known.node == node), ())
            if cpus:
                told.append(("affinity", _mask(cpus, self._width())))
            self._cpus[node] = _Element("cpu", told)
        return self._cpus[node]

    def _width(self) -> int:
        """Words of 32 bits in a mask: enough for every CPU that is known."""
        return max((cpu for node in self._snapshot.numa_nodes for cpu in node.cpus), default=0) // 32 + 1

    def _is_switch(self, bridge: PciAddress) -> bool:
        known = self._bridges.get(bridge)
        return known is not None and known.port_type is model.PortType.UPSTREAM

    def _group(self) -> _Element:
        """A bridge that no sysfs shows gets an address of nothing, as clouds give it."""
        number = 1 + sum(kind == "group" for kind, _, _ in self._made)
        return _Element(
            "pci", [("busid", f"ffff:{0xFF - number // 32:02x}:{number % 32:02x}.0"), ("class", _BRIDGE_CLASS)]
        )

    def _pci(self, function: model.PciFunction) -> _Element:
        told = [
            ("busid", str(function.address)),
            ("class", _class(function)),
            ("vendor", f"0x{function.vendor_id:04x}"),
            ("device", f"0x{function.device_id:04x}"),
        ]
        if function.subsystem_vendor_id is not None and function.subsystem_device_id is not None:
            told += [
                ("subsystem_vendor", f"0x{function.subsystem_vendor_id:04x}"),
                ("subsystem_device", f"0x{function.subsystem_device_id:04x}"),
            ]
        return _Element("pci", told + self._link(function))

    def _link(self, function: model.PciFunction) -> list[tuple[str, str]]:
        """The link up to the port: the best speed that both ends can, as an idle device lowers its own, and the lanes in use."""
        port = self._bridges.get(function.bridges[-1]) if function.bridges else None
        ends = [link for link in (function.link, None if port is None else port.pci.link) if link is not None]
        speeds = [link.max_speed_gts for link in ends if link.max_speed_gts is not None]
        widths = [width for link in ends for width in (link.max_width, link.current_width) if width is not None]
        return [
            *([("link_speed", f"{min(speeds):.1f} GT/s PCIe")] if speeds else []),
            *([("link_width", str(min(widths)))] if widths else []),
        ]

    def _gpu(self, gpu: model.Gpu) -> _Element | None:
        told = []
        if gpu.compute_capability is not None:
            major, minor = gpu.compute_capability
            told.append(("sm", str(10 * major + minor)))
        links = self._nvlinks(gpu)
        return _Element("gpu", told, links) if told or links else None

    def _nvlinks(self, gpu: model.Gpu) -> list[_Element]:
        """The active NVLinks by far end. None where one of them is not known: with any, NCCL would not ask for the others."""
        active = [link for link in gpu.nvlinks if link.active]
        ends: Counter[tuple[str, str]] = Counter()
        for link in active:
            if link.remote_kind is model.RemoteKind.SWITCH:
                ends[_UNSEEN if link.remote is None else str(link.remote), _SWITCH_CLASS] += 1
            elif link.remote in self._classes:
                ends[str(link.remote), self._classes[link.remote]] += 1
            else:
                return []
        if self._brief:
            ends = _joined(ends)
        return [
            _Element("nvlink", [("target", target), ("count", str(count)), ("tclass", kind)])
            for (target, kind), count in sorted(ends.items())
        ]

    def _nic(self, nic: model.Nic) -> _Element | None:
        if self._brief:
            return None
        nets = [
            _net(device, device.ports[0], nic)
            for device in nic.rdma_devices
            if len(device.ports) == 1 and _NAME.fullmatch(device.name)
        ]
        return _Element("nic", [], nets) if nets else None


def _net(device: model.RdmaDevice, port: model.RdmaPort, nic: model.Nic) -> _Element:
    told = [("name", device.name), ("port", str(port.port))]
    if port.rate_mbps:
        told.append(("speed", str(port.rate_mbps)))
    if nic.rail is not None and nic.rail_source is model.Provenance.OVERLAY:
        told.append(("rail", str(nic.rail)))
    return _Element("net", told)


def _joined(ends: Mapping[tuple[str, str], int]) -> Counter[tuple[str, str]]:
    """All links to switches as one: NCCL makes one of all NVSwitches."""
    joined: Counter[tuple[str, str]] = Counter()
    switches = sorted(target for target, kind in ends if kind == _SWITCH_CLASS)
    for (target, kind), count in ends.items():
        joined[switches[0] if kind == _SWITCH_CLASS else target, kind] += count
    return joined


def _class(function: model.PciFunction) -> str:
    return f"0x{function.class_code:06x}"


def _mask(cpus: Iterable[int], words: int) -> str:
    """CPUs as the kernel writes them in cpumap: words of 32 bits, the highest first."""
    bits = sum(1 << cpu for cpu in cpus)
    return ",".join(f"{bits >> 32 * word & 0xFFFFFFFF:08x}" for word in reversed(range(words)))
