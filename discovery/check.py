# SPDX-License-Identifier: Apache-2.0
"""Every invariant of a Snapshot. Pure. The probe turns a violation into a Finding; tests and readers of files ask directly.

A violation means that a source contradicts itself, or that this code is wrong. It is never a reason to drop a Snapshot.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator

from discovery import checkmig, model, peering, topology, upward
from discovery import nics as pairing
from discovery.address import PciAddress

_MAX_NUMA_NODE = 1023


def violations(snapshot: model.Snapshot) -> tuple[str, ...]:
    """What does not hold, one sentence each, in a stable order; empty for a Snapshot that is sound."""
    return tuple(itertools.chain.from_iterable(rule(snapshot) for rule in _RULES))


def functions(snapshot: model.Snapshot) -> Iterator[model.PciFunction]:
    """All endpoints: GPUs, NVSwitches, NICs and their Data Direct functions, NVMe controllers."""
    yield from _devices(snapshot)
    shared = {nic.data_direct.address: nic.data_direct for nic in snapshot.nics if nic.data_direct is not None}
    yield from shared.values()


def _devices(snapshot: model.Snapshot) -> Iterator[model.PciFunction]:
    yield from (gpu.pci for gpu in snapshot.gpus)
    yield from snapshot.nvswitches
    yield from (nic.pci for nic in snapshot.nics)
    yield from (nvme.pci for nvme in snapshot.nvmes)


def _addresses(snapshot: model.Snapshot) -> Iterator[str]:
    bridges = [bridge.pci.address for bridge in snapshot.bridges]
    everything = [pci.address for pci in functions(snapshot)] + bridges
    for address, count in sorted(Counter(everything).items()):
        if count > 1:
            yield f"{address} stands {count} times in the Snapshot"
    for name, addresses in (
        ("gpus", [gpu.address for gpu in snapshot.gpus]),
        ("nvswitches", [pci.address for pci in snapshot.nvswitches]),
        ("nics", [nic.address for nic in snapshot.nics]),
        ("nvmes", [nvme.address for nvme in snapshot.nvmes]),
        ("bridges", bridges),
    ):
        if addresses != sorted(addresses):
            yield f"{name} are not ordered by address"


def _places(snapshot: model.Snapshot) -> Iterator[str]:
    ways = upward.Ways(snapshot.bridges)
    for bridge in snapshot.bridges:
        if bridge.port_type_inferred and (bridge.port_type is None or bridge.redirects is not None):
            yield f"{bridge.pci.address}: its port type is inferred, and yet {bridge.port_type} or what it redirects is read"
    for pci in itertools.chain(functions(snapshot), (bridge.pci for bridge in snapshot.bridges)):
        where = pci.address
        if len({where, *pci.bridges}) <= len(pci.bridges):
            yield f"{where}: the chain of bridges above it has a loop"
        for depth, above in enumerate(pci.bridges):
            near = ways.bridges.get(above)
            if near is None:
                continue
            if near.pci.bridges != pci.bridges[:depth] or near.pci.host_bridge != pci.host_bridge:
                yield f"{where}: its bridge {above} stands in another place than its chain says"
        if pci.switch_source is not model.Provenance.OVERLAY and pci.switches != ways.switches(pci):
            yield f"{where}: its switches are not the upstream ports above it, innermost first"
        if len(set(pci.switches)) < len(pci.switches):
            yield f"{where}: a switch stands twice above it"
        if pci.switch != (pci.switches[0] if pci.switches else None):
            yield f"{where}: its switch is not the innermost of its switches"
        if pci.switch_source is not None and not pci.switches:  # Snapshots before there were overlays name no source
            yield f"{where}: it has no switches, and they come from {pci.switch_source}"
        if pci.narrowest is not None and pci.narrowest != ways.narrowest(pci):
            yield f"{where}: {pci.narrowest} is not the narrowest link above it"
        if pci.host_bridge is None and (pci.bridges or pci.pcie_root is not None):
            yield f"{where}: it has bridges or a PCIe root, but no host bridge"
        if pci.pcie_root is not None and where.domain > 0xFFFF:
            yield f"{where}: a domain of more than four digits has no PCIe root"


def _locality(snapshot: model.Snapshot) -> Iterator[str]:
    sockets = snapshot.host.sockets
    for pci in functions(snapshot):
        where = pci.address
        if (pci.numa_node is None) != (pci.numa_source is None):
            yield f"{where}: NUMA node {pci.numa_node} comes from {pci.numa_source}"
        if pci.numa_node is not None and not 0 <= pci.numa_node <= _MAX_NUMA_NODE:
            yield f"{where}: NUMA node {pci.numa_node} cannot be"
        if pci.numa_node is None and (pci.cpus is not None or pci.cpu_socket is not None):
            yield f"{where}: it has CPUs or a socket, but no NUMA node"
        if pci.cpu_socket is not None and pci.cpu_socket not in sockets:
            yield f"{where}: socket {pci.cpu_socket} is none of the host's"
        if not (pci.vendor_id < 1 << 16 and pci.device_id < 1 << 16 and pci.class_code < 1 << 24):
            yield f"{where}: its identity does not fit the fields of PCI"
    nodes = [node.node for node in snapshot.numa_nodes]
    if nodes != sorted(set(nodes)):
        yield "NUMA nodes are not ordered, or one stands twice"
    for node in snapshot.numa_nodes:
        if not set(node.distances) <= set(nodes):
            yield f"NUMA node {node.node} has a distance to a node that is not there"
    for kind, sets in (("sockets", sockets.values()), ("NUMA nodes", [node.cpus for node in snapshot.numa_nodes])):
        for cpu, count in Counter(itertools.chain.from_iterable(sets)).items():
            if count > 1:
                yield f"CPU {cpu} is in {count} {kind}"


def _gpus(snapshot: model.Snapshot) -> Iterator[str]:
    for gpu in snapshot.gpus:
        complete = gpu.uuid is not None and gpu.product is not None and gpu.memory_bytes is not None
        if gpu.state is model.GpuState.READY and not complete:
            yield f"{gpu.address}: READY without UUID, product and memory"
        if (gpu.state is model.GpuState.READY) != (gpu.state_reason is None):
            yield f"{gpu.address}: {gpu.state}, and the reason is {gpu.state_reason!r}"
        numbers = [link.link for link in gpu.nvlinks]
        if numbers != sorted(set(numbers)):
            yield f"{gpu.address}: NVLinks are not ordered, or one stands twice"
        if any(link.remote == gpu.address for link in gpu.nvlinks):
            yield f"{gpu.address}: an NVLink ends where it begins"
        fabric = model.Fabric(state="") if gpu.fabric is None else gpu.fabric
        if (fabric.cluster_uuid is None) != (fabric.clique_id is None):
            yield f"{gpu.address}: it has the cluster of a GPU fabric or a clique of one, but not both"
        if fabric.cluster_uuid is not None and fabric.state != "completed":
            yield f"{gpu.address}: it has a GPU fabric, and its registration is {fabric.state}"
        yield from checkmig.violations(gpu)
    yield from _twice("UUID", ((gpu.uuid, gpu.address) for gpu in snapshot.gpus))
    yield from _twice("minor", ((gpu.minor, gpu.address) for gpu in snapshot.gpus))


def _twice(what: str, values: Iterable[tuple[object, PciAddress]]) -> Iterator[str]:
    first: dict[object, PciAddress] = {}
    for value, address in values:
        if value is not None and first.setdefault(value, address) != address:
            yield f"{first[value]} and {address} have the same {what} {value}"


def _nvlinks(snapshot: model.Snapshot) -> Iterator[str]:
    """Links that are active are so at both ends."""
    active = {
        gpu.address: Counter(link.remote for link in gpu.nvlinks if link.active and link.remote is not None)
        for gpu in snapshot.gpus
        if gpu.state is model.GpuState.READY
    }
    for a, b in itertools.combinations(sorted(active), 2):
        if active[a][b] != active[b][a]:
            yield f"{a} has {active[a][b]} active NVLinks to {b}, which has {active[b][a]} back"


def _groups(snapshot: model.Snapshot) -> Iterator[str]:
    kinds: tuple[tuple[str, int | None, Callable[[model.GpuGroups], PciAddress | None]], ...] = (
        ("NVLink domain", None, lambda groups: groups.nvlink_domain),
        ("NVLink clique", None, lambda groups: groups.nvlink_clique),
        ("aligned pair", 2, lambda groups: groups.aligned_pair),
        ("aligned quad", 4, lambda groups: groups.aligned_quad),
    )
    known = {gpu.address: gpu for gpu in snapshot.gpus}
    for name, size, key_of in kinds:
        members: dict[PciAddress, list[PciAddress]] = {}
        for gpu in snapshot.gpus:
            key = key_of(gpu.groups)
            if key is not None:
                members.setdefault(key, []).append(gpu.address)
        for key, addresses in members.items():
            if key not in known or min(addresses) < key:
                yield f"{name} {key} is not named by the lowest GPU in it"
            if size is not None and len(addresses) > size:
                yield f"{name} {key} has {len(addresses)} members"
            if len({known[address].groups.nvlink_domain for address in addresses}) > 1:
                yield f"{name} {key} reaches over several NVLink domains"
            if size == 2 and len({known[address].groups.aligned_quad for address in addresses}) > 1:
                yield f"{name} {key} is not inside one aligned quad"
    for gpu in snapshot.gpus:
        if (gpu.groups.nvlink_domain is None) != (gpu.groups.nvlink_clique is None):
            yield f"{gpu.address}: it has an NVLink domain or a clique, but not both"


def _nics(snapshot: model.Snapshot) -> Iterator[str]:
    nics = {nic.address: nic for nic in snapshot.nics}
    for nic in snapshot.nics:
        if nic.data_direct is not None and nic.pci.physical_function is not None:
            yield f"{nic.address}: a virtual function has a Data Direct function"
        if nic.rail_source is not None and nic.rail is None:
            yield f"{nic.address}: it has no rail, and that comes from {nic.rail_source}"
    bridges = {bridge.pci.address: bridge for bridge in snapshot.bridges}
    ports = topology.port_types(snapshot.bridges)
    for gpu in snapshot.gpus:
        if gpu.nic is None:
            continue
        chosen = nics.get(gpu.nic.address)
        if chosen is None or chosen.pci.physical_function is not None:
            yield f"{gpu.address}: its NIC {gpu.nic.address} is no physical function of this node"
        if gpu.nic.address not in gpu.nic.ties:
            yield f"{gpu.address}: its NIC {gpu.nic.address} is not among the nearest"
        for tie in gpu.nic.ties:
            near = nics.get(tie)
            between, by = (None, None) if near is None else pairing.distance(gpu.pci, near, ports)
            if near is None or between is not gpu.nic.distance:
                yield f"{gpu.address}: the path to {tie} is not {gpu.nic.distance}"
            elif tie == gpu.nic.address:
                if (by and by.address) != gpu.nic.data_direct:
                    yield f"{gpu.address}: {gpu.nic.data_direct} is not what makes its NIC so near"
                if gpu.nic.direct not in (None, peering.reaches(by or near.pci, gpu.pci, bridges)):
                    yield f"{gpu.address}: whether its NIC reaches it directly is not {gpu.nic.direct}"
        if chosen is not None and gpu.nic.rail != chosen.rail:
            yield f"{gpu.address}: its rail {gpu.nic.rail} is not that of its NIC"


def _findings(snapshot: model.Snapshot) -> Iterator[str]:
    if len(set(snapshot.findings)) != len(snapshot.findings):
        yield "a Finding stands twice"


_RULES: tuple[Callable[[model.Snapshot], Iterator[str]], ...] = (
    _addresses, _places, _locality, _gpus, _nvlinks, _groups, _nics, _findings,
)  # fmt: skip
