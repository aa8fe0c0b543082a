# SPDX-License-Identifier: Apache-2.0
"""How two PCI functions reach each other: the path class of every pair of devices. Pure.

The classes are those of `nvidia-smi topo -m`, computed from the tree that sysfs shows and never asked of a tool. Where
the host bridges differ and a NUMA node is unknown the class is UNKNOWN: a guess would look like knowledge.

An overlay speaks where a virtual machine hides the wiring, so what it says wins over what the hypervisor shows: a group is a
switch (PIX inside one, PXB where groups nest), whatever host bridges and bridges stand above its devices; two devices in
groups that nothing holds together share no bridge; and NUMA nodes that differ make SYS of one made-up host bridge.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from discovery import model, pcie, peering
from discovery.address import PciAddress

Ports = Mapping[PciAddress, model.PortType | None]
"""Port types by bridge; None or missing: a conventional bridge, or nothing is known."""

Nvlinks = Mapping[tuple[PciAddress, PciAddress], int]
"""Active NVLinks between two GPUs, lower address first."""

NEARNESS: Mapping[model.PathClass, int] = {path_class: rank for rank, path_class in enumerate(model.PathClass)}
"""0 is nearest. UNKNOWN ranks last, and is near to nothing."""


def port_types(bridges: Iterable[model.Bridge]) -> dict[PciAddress, model.PortType | None]:
    """The port types of a Snapshot's bridges."""
    return {bridge.pci.address: bridge.port_type for bridge in bridges}


def endpoints(
    gpus: Iterable[model.Gpu], nics: Iterable[model.Nic], nvmes: Iterable[model.Nvme]
) -> tuple[model.PciFunction, ...]:
    """The functions that have paths. A virtual function has those of its physical function, if that is among them, and there
    may be thousands.
    """
    functions = [device.pci for devices in (gpus, nics, nvmes) for device in devices]
    listed = {pci.address for pci in functions}
    return tuple(pci for pci in functions if pci.physical_function not in listed)


def path_class(a: model.PciFunction, b: model.PciFunction, ports: Ports) -> model.PathClass:
    """The path class between two functions; the same whichever comes first."""
    grouped = _in_groups(a) and _in_groups(b)
    if grouped and not set(a.switches).isdisjoint(b.switches):
        return model.PathClass.PIX if a.switches[0] == b.switches[0] else model.PathClass.PXB
    if a.host_bridge is None or b.host_bridge is None:
        return model.PathClass.UNKNOWN
    if a.host_bridge == b.host_bridge and _same_slot(a.address, b.address):
        return model.PathClass.PIX
    if a.host_bridge != b.host_bridge or _told_apart(a, b):
        if a.numa_node is None or b.numa_node is None:
            return model.PathClass.UNKNOWN
        return model.PathClass.NODE if a.numa_node == b.numa_node else model.PathClass.SYS
    shared = pcie.shared(a, b)
    if shared == 0 or grouped:
        return model.PathClass.PHB
    crossed = _crossed(a.bridges, shared, ports) | _crossed(b.bridges, shared, ports)
    return model.PathClass.PIX if len(crossed) <= 1 else model.PathClass.PXB


def paths(devices: Sequence[model.PciFunction], bridges: peering.Bridges, nvlinks: Nvlinks) -> tuple[model.Path, ...]:
    """The path of every pair of `devices`, ordered by address.

    There are many pairs and few places, and a path is a matter of the places, but for functions of one slot, of which an
    overlay may say different things.
    """
    ports = port_types(bridges.values())
    ordered = sorted(devices, key=lambda device: device.address)
    slots = [device.address[:3] for device in ordered]
    places: dict[object, int] = {}
    place_of = [
        places.setdefault(
            (device.host_bridge, device.bridges, device.switches, device.numa_node, device.numa_source), len(places)
        )
        for device in ordered
    ]
    linked = {address for pair in nvlinks for address in pair}
    has_nvlinks = [device.address in linked for device in ordered]
    known: dict[tuple[int, int], tuple[model.PathClass, bool | None]] = {}
    found = []
    for i, a in enumerate(ordered):
        for j in range(i + 1, len(ordered)):
            b = ordered[j]
            one_slot = slots[i] == slots[j]
            between = None if one_slot else known.get((place_of[i], place_of[j]))
            if between is None:
                between = path_class(a, b, ports), peering.direct(a, b, bridges)
                if not one_slot:
                    known[place_of[i], place_of[j]] = between
            count = nvlinks.get((a.address, b.address), 0) if has_nvlinks[i] and has_nvlinks[j] else 0
            found.append(model.Path(a=a.address, b=b.address, path_class=between[0], nvlinks=count, direct=between[1]))
    return tuple(found)


def socket_of(cpus: tuple[int, ...] | None, sockets: Mapping[int, tuple[int, ...]]) -> int | None:
    """The one physical package that all of `cpus` are in."""
    packages = {package for package, members in sockets.items() if cpus and not set(members).isdisjoint(cpus)}
    return packages.pop() if len(packages) == 1 else None


def _in_groups(function: model.PciFunction) -> bool:
    """Whether its switches are groups of an overlay."""
    return function.switch_source is model.Provenance.OVERLAY


def _told_apart(a: model.PciFunction, b: model.PciFunction) -> bool:
    """Whether an overlay puts them near different NUMA nodes; not where sysfs shows both below one switch, as that is sure."""
    return (
        a.numa_node is not None
        and b.numa_node is not None
        and a.numa_node != b.numa_node
        and model.Provenance.OVERLAY in (a.numa_source, b.numa_source)
        and set(a.switches).isdisjoint(b.switches)
    )


def _same_slot(a: PciAddress, b: PciAddress) -> bool:
    """Functions of one device reach each other inside it, wherever it is plugged."""
    return (a.domain, a.bus, a.device) == (b.domain, b.bus, b.device)


def _crossed(bridges: Sequence[PciAddress], shared: int, ports: Ports) -> set[PciAddress]:
    """The switches (by upstream port) that one leg of a path goes through, when its first `shared` bridges are those of
    the other leg too. The last shared bridge is where the legs meet: a port there is only turned at, unless it is an
    upstream port, whose switch then joins them. A conventional bridge counts as a switch of its own.
    """
    crossed: set[PciAddress] = set()
    for index in range(shared - 1, len(bridges)):
        bridge = bridges[index]
        port = ports.get(bridge)
        if index == shared - 1 and port in (model.PortType.ROOT, model.PortType.DOWNSTREAM):
            continue
        if port is model.PortType.DOWNSTREAM and index > 0:
            crossed.add(bridges[index - 1])
        elif port is not model.PortType.ROOT:
            crossed.add(bridge)
    return crossed
