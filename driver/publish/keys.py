# SPDX-License-Identifier: Apache-2.0
"""The keys of a GPU: what people match on, and what is left out where it is not known. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator

from discovery import model
from discovery.address import PciAddress
from driver.publish import attributes

MAX_NUMA_NODE = 1023
"""Above this the kernel has none (MAX_NUMNODES), and the standard attribute allows none."""

_MAX_STANDARD_DOMAIN = 0xFFFF
_NIL_UUID = re.compile(r"[0-]*")

Key = int | str | tuple[int, ...] | tuple[str, ...]
"""The value of a key."""


def of_place(
    snapshot: model.Snapshot, gpu: model.Gpu, *, numa_list: bool, pcie_switches: bool
) -> Iterator[tuple[str, Key | None]]:
    """What a GPU and all its parts have: where it is, and its NIC. `numa_list`: numaNode as a list; `pcie_switches`: all of them."""
    pci, nic = gpu.pci, gpu.nic
    # The standard names exist for addresses with a domain of four digits only; a GPU behind VMD or Hyper-V has none.
    standard = pci.address.domain <= _MAX_STANDARD_DOMAIN
    yield attributes.PCI_BUS_ID, str(pci.address) if standard else None
    yield attributes.PCIE_ROOT, pci.pcie_root if standard else None
    yield attributes.NUMA_NODE, _numa_node(snapshot, gpu, as_list=numa_list)
    yield attributes.CPU_SOCKET, pci.cpu_socket
    yield attributes.PCIE_SWITCH, _spelled(pci.switch)
    if pcie_switches and pci.switches:
        yield attributes.PCIE_SWITCHES, tuple(str(switch) for switch in pci.switches)
    if nic is not None:
        yield attributes.NIC, nic.name or None
        yield attributes.NIC_PCI_BUS_ID, str(nic.address)


def of_whole(gpu: model.Gpu) -> Iterator[tuple[str, Key | None]]:
    """What a MIG instance has no part in: NVLink and peer access end where a GPU is divided, and who aligns GPUs wants wholes."""
    groups = gpu.groups
    yield attributes.NVLINK_DOMAIN, _spelled(groups.nvlink_domain)
    yield attributes.NVLINK_CLIQUE, _spelled(groups.nvlink_clique)
    yield attributes.FABRIC_CLIQUE, _fabric_clique(gpu.fabric)
    yield attributes.ALIGNED_PAIR, _spelled(groups.aligned_pair)
    yield attributes.ALIGNED_QUAD, _spelled(groups.aligned_quad)
    yield attributes.RAIL, gpu.nic.rail if gpu.nic is not None else None


def _spelled(address: PciAddress | None) -> str | None:
    return str(address) if address is not None else None


def _fabric_clique(fabric: model.Fabric | None) -> str | None:
    """As NVIDIA's driver spells it. An all-zero UUID is what hardware without a fabric reports."""
    if fabric is None or fabric.state != "completed" or not fabric.cluster_uuid or fabric.clique_id is None:
        return None
    if _NIL_UUID.fullmatch(fabric.cluster_uuid):
        return None
    return f"{fabric.cluster_uuid}.{fabric.clique_id}"


def _numa_node(snapshot: model.Snapshot, gpu: model.Gpu, *, as_list: bool) -> int | tuple[int, ...] | None:
    node = gpu.pci.numa_node
    if node is None or not 0 <= node <= MAX_NUMA_NODE:
        return None
    return _near_nodes(snapshot, node) if as_list else node


def _near_nodes(snapshot: model.Snapshot, node: int) -> tuple[int, ...]:
    """The list form of numaNode: the node itself, then all others at the least distance from it whose socket is not known
    to be another (dynamic-resource-allocation, deviceattribute/numa_linux.go).
    """
    nodes = {entry.node: entry for entry in snapshot.numa_nodes}
    distances = {
        other: distance for other, distance in (nodes[node].distances if node in nodes else {}).items() if other != node
    }
    if not distances:
        return (node,)
    nearest = min(distances.values())
    sockets = {cpu: socket for socket, cpus in snapshot.host.sockets.items() for cpu in cpus}

    def socket_of(number: int) -> int | None:
        cpus = nodes[number].cpus if number in nodes else ()
        return sockets.get(cpus[0]) if cpus else None

    own = socket_of(node)
    near = [
        other
        for other in sorted(distances)
        if distances[other] == nearest and (own is None or socket_of(other) in {None, own})
    ]
    return (node, *near)
