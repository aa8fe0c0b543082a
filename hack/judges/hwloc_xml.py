# SPDX-License-Identifier: Apache-2.0
"""What hwloc sees of a machine, from the XML that `lstopo` writes (version 2.0 of its format). Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from lxml import etree

from discovery import address
from discovery.address import PciAddress


class FormatError(ValueError):
    """What was read is no topology of hwloc."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where hwloc sees a PCI function. `cpus`: of the object that its host bridge hangs on."""

    bridges: tuple[PciAddress, ...]
    cpus: frozenset[int]
    link_gbytes: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NumaNode:
    """A NUMA node by hwloc. `gpu`: whose memory it is."""

    cpus: frozenset[int]
    memory_bytes: int
    gpu: PciAddress | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """What hwloc sees."""

    cpus: frozenset[int]
    functions: Mapping[PciAddress, Place] = field(default_factory=dict)
    nodes: Mapping[int, NumaNode] = field(default_factory=dict)
    sockets: Mapping[int, frozenset[int]] = field(default_factory=dict)
    distances: Mapping[tuple[int, int], int] = field(default_factory=dict)


def parse(xml: bytes) -> Topology:
    """The topology in hwloc's XML. Raises FormatError."""
    try:
        document = etree.fromstring(xml, etree.XMLParser(load_dtd=False, no_network=True, resolve_entities=False))
    except etree.XMLSyntaxError as err:
        raise FormatError(f"hwloc's XML cannot be read: {err}") from err
    machine = document.find("object[@type='Machine']")
    if machine is None:
        raise FormatError("hwloc's XML has no Machine")
    return Topology(
        cpus=_set(machine.get("complete_cpuset")),
        functions=dict(_functions(machine, (), frozenset())),
        nodes=dict(_nodes(machine)),
        sockets={
            int(package.get("os_index", "")): _set(package.get("complete_cpuset"))
            for package in machine.iter("object")
            if package.get("type") == "Package" and package.get("os_index") is not None
        },
        distances=_distances(document),
    )


def _functions(
    element: etree._Element, bridges: tuple[PciAddress, ...], cpus: frozenset[int]
) -> Iterator[tuple[PciAddress, Place]]:
    """All PCI functions below an object, with the bridges above them. Host bridges have no address."""
    if element.get("complete_cpuset") is not None:
        cpus = _set(element.get("complete_cpuset"))
    for child in element.iterfind("object"):
        busid = child.get("pci_busid")
        if busid is None:
            yield from _functions(child, bridges, cpus)
            continue
        where = address.parse(busid)
        speed = child.get("pci_link_speed")
        yield where, Place(bridges=bridges, cpus=cpus, link_gbytes=None if speed is None else float(speed))
        yield from _functions(child, (*bridges, where), cpus)


def _nodes(machine: etree._Element) -> Iterator[tuple[int, NumaNode]]:
    for node in machine.iter("object"):
        if node.get("type") != "NUMANode":
            continue
        gpu = None
        if node.get("subtype") == "GPUMemory":
            gpu = next(
                (address.parse(info.get("value", "")) for info in node.iterfind("info[@name='PCIBusID']")),
                None,
            )
        yield (
            int(node.get("os_index", "")),
            NumaNode(cpus=_set(node.get("complete_cpuset")), memory_bytes=int(node.get("local_memory", "0")), gpu=gpu),
        )


def _distances(document: etree._Element) -> dict[tuple[int, int], int]:
    """The table of the firmware; hwloc has none for a single node."""
    for table in document.iterfind("distances2[@name='NUMALatency']"):
        nodes = [int(text) for part in table.iterfind("indexes") for text in (part.text or "").split()]
        values = [int(text) for part in table.iterfind("u64values") for text in (part.text or "").split()]
        pairs = [(a, b) for a in nodes for b in nodes]
        return dict(zip(pairs, values, strict=True))
    return {}


def _set(text: str | None) -> frozenset[int]:
    """A set in hwloc's spelling: 32-bit words in hexadecimal, highest first; a word of zeros may be empty."""
    value = 0
    for word in (text or "0").split(","):
        value = value << 32 | int(word or "0", 16)
    return frozenset(bit for bit in range(value.bit_length()) if value >> bit & 1)
