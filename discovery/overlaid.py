# SPDX-License-Identifier: Apache-2.0
"""A Snapshot with what an overlay says about its machine: NUMA nodes, groups as switches, rails. Pure.

The machine is the judge. A document that contradicts what sysfs is sure of is refused whole, as it was written for another
machine: a NUMA node that is not there, a group across the switches that sysfs shows, more than half of its devices missing.
A few missing devices cost their own entries and no more, since a GPU that fell off the bus must not take the place of
all others with it. What sysfs only may know (a NUMA node) is corrected, and each correction is a Finding.

Never touched: addresses, host bridges, PCIe roots, bridges. Switches that sysfs shows stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from discovery import findings, model, overlay, topology
from discovery.address import PciAddress

MAX_PROBLEMS = 20
"""More contradictions than this are counted, not listed: the document is for another machine."""

_MAX_NAMED = 8
"""Devices that one message lists."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Applied:
    """A Snapshot in which the overlay counts, and the rails that it gives."""

    snapshot: model.Snapshot
    rails: Mapping[PciAddress, int] = field(default_factory=dict)


def apply(snapshot: model.Snapshot, document: overlay.Overlay | None, found: findings.Findings) -> Applied:
    """Apply the first of the document's machines that is this one. What does not fit is a Finding; it raises nothing."""
    if document is None:
        return Applied(snapshot=snapshot)
    machine = next((machine for machine in document.machines if _matches(machine.match, snapshot)), None)
    if machine is None:
        seen = (
            f"vendor {snapshot.host.vendor!r}, product {snapshot.host.product!r}, GPUs {_gpu_ids(snapshot) or 'none'}"
        )
        found.info("overlay-not-for-this-machine", document.file, f"none of its machines matches this one ({seen})")
        return Applied(snapshot=snapshot)
    held = _Held(snapshot, machine)
    problems = held.problems()
    if problems:
        for line, message in problems[:MAX_PROBLEMS]:
            found.error(
                "overlay-refused", machine.place(line), f"{message}; nothing of this overlay is applied: correct it"
            )
        if len(problems) > MAX_PROBLEMS:
            found.error("overlay-refused", machine.file, f"and {len(problems) - MAX_PROBLEMS} more contradictions")
        return Applied(snapshot=snapshot)
    return held.apply(found)


class _Held:
    """One machine of an overlay, held against a Snapshot."""

    def __init__(self, snapshot: model.Snapshot, machine: overlay.Machine) -> None:
        self._snapshot = snapshot
        self._machine = machine
        self._functions = {function.address: function for function in _functions(snapshot)}
        self._kinds = dict(_kinds(snapshot))
        self._nodes = {node.node: node for node in snapshot.numa_nodes}
        self._bridges = {bridge.pci.address for bridge in snapshot.bridges}
        self._missing = {
            device.address: device.line
            for device in reversed(tuple(overlay.devices(machine)))
            if device.address not in self._functions and device.address not in self._bridges
        }
        self._numa = {device.address: node for node in machine.numa_nodes for device in node.devices}
        self._chains = overlay.chains(machine)
        self._lines = {device.address: device.line for group in machine.groups for device in group.devices}

    def problems(self) -> Sequence[overlay.Problem]:
        """Why this is not the machine that was meant, or what a person got wrong; by line."""
        named = {device.address for device in overlay.devices(self._machine)}
        if 2 * len(self._missing) > len(named):
            missing = f"{len(self._missing)} of its {len(named)} devices are not on this machine"
            return [(self._machine.line, f"{missing} ({_listed(sorted(self._missing))})")]
        return sorted({*self._misnamed(), *self._numa_problems(), *self._group_problems()})

    def apply(self, found: findings.Findings) -> Applied:
        """The Snapshot that follows, with a Finding for everything that came from the overlay or did not fit."""
        self._tell(found)
        groups = overlay.switches(self._chains)

        def place(function: model.PciFunction) -> model.PciFunction:
            leader = function.physical_function or function.address
            node, above = self._numa.get(leader), groups.get(leader, ())
            if node is not None and function.numa_node != node.node:
                cpus = self._nodes[node.node].cpus
                function = replace(
                    function,
                    numa_node=node.node,
                    numa_source=model.Provenance.OVERLAY,
                    cpus=cpus,
                    cpu_socket=topology.socket_of(cpus, self._snapshot.host.sockets),
                )
            if above and not function.switches:
                function = replace(function, switches=above, switch=above[0], switch_source=model.Provenance.OVERLAY)
            return function

        snapshot = self._snapshot
        return Applied(
            snapshot=replace(
                snapshot,
                gpus=tuple(replace(gpu, pci=place(gpu.pci)) for gpu in snapshot.gpus),
                nvswitches=tuple(map(place, snapshot.nvswitches)),
                nics=tuple(replace(nic, pci=place(nic.pci)) for nic in snapshot.nics),
                nvmes=tuple(replace(nvme, pci=place(nvme.pci)) for nvme in snapshot.nvmes),
            ),
            rails={rail.nic: rail.rail for rail in self._machine.rails if rail.nic in self._functions},
        )

    def _misnamed(self) -> Iterator[overlay.Problem]:
        """Devices that are there and are not what the document takes them for."""
        for device in overlay.devices(self._machine):
            function = self._functions.get(device.address)
            if function is None:
                if device.address in self._bridges:
                    yield device.line, f"{device.address} is a PCI bridge: name the devices below it"
            elif function.physical_function is not None:
                where = function.physical_function
                yield (
                    device.line,
                    f"{device.address} is a virtual function of {where}: name that one, it counts for all",
                )
            elif device.base_class is not None and device.base_class != function.class_code >> 16:
                classes = (
                    f"class 0x{device.base_class:02x} here and class 0x{function.class_code >> 16:02x} on this machine"
                )
                yield device.line, f"{device.address} is of {classes}"
        for rail in self._machine.rails:
            if rail.nic in self._functions and self._kinds[rail.nic] != "NIC":
                yield rail.line, f"{rail.nic} is no NIC but {_with_article(self._kinds[rail.nic])}"

    def _numa_problems(self) -> Iterator[overlay.Problem]:
        for node in self._machine.numa_nodes:
            if node.node not in self._nodes:
                there = ", ".join(map(str, self._nodes)) or "none"
                yield node.line, f"there is no NUMA node {node.node} on this machine, but {there}"
        lines = {device.address: device.line for node in self._machine.numa_nodes for device in node.devices}
        yield from self._split_cards(self._node_of, lines, "NUMA nodes")
        first: dict[PciAddress, PciAddress] = {}
        for address in sorted(self._numa.keys() & self._functions.keys()):
            for switch in self._functions[address].switches:
                other = first.setdefault(switch, address)
                if self._numa[address].node != self._numa[other].node:
                    yield (
                        lines[address],
                        f"sysfs shows {address} and {other} below one switch {switch}, which is near one NUMA node",
                    )

    def _group_problems(self) -> Iterator[overlay.Problem]:
        present = [address for address in sorted(self._chains) if address in self._functions]
        first: dict[str, PciAddress] = {}
        for address in present:
            for name in self._chains[address]:
                other = first.setdefault(name, address)
                mine, its = self._node_of(address), self._node_of(other)
                if mine is not None and its is not None and mine != its:
                    yield (
                        self._lines[address],
                        f"{address} is near NUMA node {mine} and {other} near {its}: one group {name!r} cannot hold both",
                    )
        yield from self._against_switches(present)
        yield from self._split_cards(self._chains.get, self._lines, "groups")

    def _against_switches(self, present: Sequence[PciAddress]) -> Iterator[overlay.Problem]:
        """Groups and the switches of sysfs must hold the same devices together, as far as both speak of them."""
        first_in_group: dict[str, PciAddress] = {}
        first_below: dict[PciAddress, PciAddress] = {}
        for address in present:
            chain, switches = self._chains[address], self._functions[address].switches
            for name in chain:
                other = first_in_group.setdefault(name, address)
                others = self._functions[other].switches
                if (switches or others) and set(switches).isdisjoint(others):
                    shown = f"sysfs shows {_below(switches)} above the one and {_below(others)} above the other"
                    yield self._lines[address], f"group {name!r} holds {address} and {other}, and {shown}"
            for switch in switches:
                other = first_below.setdefault(switch, address)
                if set(chain).isdisjoint(self._chains[other]):
                    yield (
                        self._lines[address],
                        f"sysfs shows {address} and {other} below one switch {switch}, and no group holds both",
                    )

    def _split_cards(
        self, place_of: Callable[[PciAddress], object], lines: Mapping[PciAddress, int], what: str
    ) -> Iterator[overlay.Problem]:
        """Functions of one card are in one place."""
        cards: dict[tuple[int, int, int], PciAddress] = {}
        for address in sorted(lines):
            other = cards.setdefault((address.domain, address.bus, address.device), address)
            if place_of(address) != place_of(other):
                yield lines[address], f"{address} and {other} are functions of one device and stand in two {what}"

    def _node_of(self, address: PciAddress) -> int | None:
        """The NUMA node of a device once the overlay counts."""
        told = self._numa.get(address)
        function = self._functions.get(address)
        return told.node if told is not None else None if function is None else function.numa_node

    def _tell(self, found: findings.Findings) -> None:
        machine = self._machine
        for address, line in sorted(self._missing.items()):
            found.error(
                "overlay-unknown-device",
                machine.place(line),
                f"{address} is not on this machine: correct the address, or look where the device is; "
                "the rest of the overlay is applied",
            )
        for node in machine.numa_nodes:
            self._tell_numa(node, found)
        grouped = [
            address for address in self._chains if address in self._functions and not self._functions[address].switches
        ]
        if grouped:
            count = len({name for address in grouped for name in self._chains[address]})
            found.info(
                "switch-from-overlay",
                machine.place(machine.line),
                f"the PCIe switches of {len(grouped)} devices are {count} group{'s' if count > 1 else ''} of this overlay",
            )

    def _tell_numa(self, node: overlay.NumaNode, found: findings.Findings) -> None:
        supplied = []
        for device in node.devices:
            function = self._functions.get(device.address)
            if function is None or function.numa_node == node.node:
                continue
            if function.numa_node is None:
                supplied.append(device.address)
            else:
                found.warning(
                    "numa-from-overlay",
                    device.address,
                    f"{self._machine.place(device.line)} says NUMA node {node.node} and is believed; sysfs says "
                    f"{function.numa_node}",
                )
        if supplied:
            found.info(
                "numa-from-overlay",
                self._machine.place(node.line),
                f"the firmware tells no NUMA node for {_listed(supplied)}; node {node.node} comes from this overlay",
            )
        has = self._nodes[node.node].cpus
        if node.cpus is not None and node.cpus and has and set(node.cpus).isdisjoint(has):
            found.warning(
                "overlay-affinity-differs",
                self._machine.place(node.line),
                f"its affinity has no CPU of NUMA node {node.node}, which the kernel gives the CPUs; the kernel is believed. "
                "If the file has its nodes the wrong way round, correct it",
            )


def _functions(snapshot: model.Snapshot) -> Iterator[model.PciFunction]:
    yield from (gpu.pci for gpu in snapshot.gpus)
    yield from snapshot.nvswitches
    yield from (nic.pci for nic in snapshot.nics)
    yield from (nvme.pci for nvme in snapshot.nvmes)


def _kinds(snapshot: model.Snapshot) -> Iterator[tuple[PciAddress, str]]:
    yield from ((gpu.address, "GPU") for gpu in snapshot.gpus)
    yield from ((pci.address, "NVSwitch") for pci in snapshot.nvswitches)
    yield from ((nvme.address, "NVMe controller") for nvme in snapshot.nvmes)
    yield from ((nic.address, "NIC") for nic in snapshot.nics)


def _matches(match: overlay.Match | None, snapshot: model.Snapshot) -> bool:
    if match is None:
        return True
    return (
        match.vendor in (None, snapshot.host.vendor)
        and match.product in (None, snapshot.host.product)
        and (match.gpu is None or match.gpu in {(gpu.pci.vendor_id, gpu.pci.device_id) for gpu in snapshot.gpus})
    )


def _gpu_ids(snapshot: model.Snapshot) -> str:
    return ", ".join(sorted({f"{gpu.pci.vendor_id:04x}:{gpu.pci.device_id:04x}" for gpu in snapshot.gpus}))


def _listed(addresses: Iterable[PciAddress]) -> str:
    every = list(map(str, addresses))
    more = len(every) - _MAX_NAMED
    return ", ".join(every[:_MAX_NAMED]) + (f" and {more} more" if more > 0 else "")


def _below(switches: Sequence[PciAddress]) -> str:
    return f"switch {switches[0]}" if switches else "no switch"


def _with_article(kind: str) -> str:
    return f"a{'n' if kind[0] == 'N' else ''} {kind}"
