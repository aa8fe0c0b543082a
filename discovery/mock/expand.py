# SPDX-License-Identifier: Apache-2.0
"""From a Machine to a Recording: all files and the whole NVML state of the node it describes. Pure and deterministic."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from discovery import address
from discovery.address import PciAddress
from discovery.mock import (
    cgroupfiles,
    devicefiles,
    fault,
    hostfiles,
    machine,
    netfiles,
    nvmlstate,
    pcifiles,
    pcitree,
    recording,
    slotfiles,
    sriov,
)
from discovery.mock import products as parts
from discovery.mock.pcitree import Function, MachineError
from discovery.mock.recording import Entry


def expand(described: machine.Machine, catalogue: parts.Products) -> recording.Recording:
    """The Recording of a machine built of a catalogue's parts. MachineError names the place of a contradiction."""
    functions = sriov.with_virtual(pcitree.build(described, catalogue))
    named = pcitree.by_name(functions)
    memory_nodes = _memory_nodes(described, named)
    every = hostfiles.cpus(described)
    node_cpus = {
        node: entry.cpus if node == entry.ids[0] else () for entry in described.numa.nodes for node in entry.ids
    }
    ports = devicefiles.nic_ports(functions)
    files: dict[str, Entry] = {
        **pcifiles.files(functions, node_cpus=node_cpus, iommu_type=described.host.iommu),
        **dict(sriov.files(functions)),
        **slotfiles.files(functions),
        **hostfiles.cpu_files(every, described.host),
        **hostfiles.node_files(described.numa),
        **hostfiles.proc_files(described, every),
        **cgroupfiles.files(described, _memory(functions)),
        **netfiles.files(described.name, ports, described.network),
        **devicefiles.rdma_files(described.name, ports),
        **devicefiles.nvme_files(described.name, functions),
    }
    if described.driver is not None:
        gpus = _driven(described, functions, memory_nodes)
        files |= devicefiles.nvidia_files(described.driver, described.host.architecture, gpus, functions)
    files["proc/devices"] = devicefiles.device_numbers(
        nvidia=described.driver is not None, rdma=any(port.rdma for port in ports)
    )
    if described.host.iommu != "off":
        files["dev/vfio/vfio"] = ""
    return recording.Recording(
        name=described.name,
        description=described.description,
        files=files,
        nvml=nvmlstate.build(described, functions, memory_nodes),
        faults=_faults(described, functions, named),
    )


def _memory_nodes(described: machine.Machine, named: Mapping[str, Function]) -> dict[PciAddress, int]:
    nodes = {}
    for number, entry in enumerate(described.numa.nodes):
        if entry.gpu is not None:
            function = named.get(entry.gpu)
            if function is None or function.kind != "gpu":
                raise MachineError(("numa", "nodes", number, "gpu"), f"there is no GPU called {entry.gpu}")
            nodes[function.address] = entry.ids[0]
    return nodes


def _memory(functions: Sequence[Function]) -> dict[PciAddress, int]:
    """The memory of the GPUs that the driver has."""
    return {
        function.address: function.part.memory
        for function in nvmlstate.bound_gpus(functions)
        if isinstance(function.part, parts.Gpu)
    }


def _driven(
    described: machine.Machine, functions: Sequence[Function], memory_nodes: Mapping[PciAddress, int]
) -> list[devicefiles.BoundGpu]:
    bound = nvmlstate.bound_gpus(functions)
    return [
        devicefiles.BoundGpu(
            function=function,
            uuid=nvmlstate.uuid_of(described, function),
            minor=minor,
            numa_node=memory_nodes.get(function.address),
        )
        for function, minor in zip(bound, nvmlstate.minors(bound), strict=True)
    ]


def _faults(
    described: machine.Machine, functions: Sequence[Function], named: Mapping[str, Function]
) -> tuple[fault.Fault, ...]:
    """The faults with their targets found and their times drawn."""
    draw = random.Random(described.seed)  # noqa: S311 - repeatable on purpose
    addresses = {function.address for function in functions}
    found = []
    for number, said in enumerate(described.faults):
        place: pcitree.Place = ("faults", number)
        begins = said.at if isinstance(said.at, float) else round(draw.uniform(*said.at), 3)
        item = fault.Fault(
            kind=said.kind,
            target=None if said.target is None else _target(said.target, named, addresses, (*place, "target")),
            at_s=begins,
            until_s=said.until,
            xid=said.xid,
            link=said.link,
            width=said.width,
            node=said.node,
            count=said.count,
            temperature_c=said.temperature,
            function=said.function,
            after=said.after,
            error=said.error,
            signal=said.signal,
        )
        for field, problem in fault.problems(item):
            key = {"temperature_c": "temperature", "at_s": "at", "until_s": "until"}.get(field, field)
            raise MachineError((*place, key), problem)
        nodes = {node for entry in described.numa.nodes for node in entry.ids}
        if item.node is not None and item.node not in nodes:
            raise MachineError((*place, "node"), f"there is no NUMA node {item.node}; numa.nodes has {sorted(nodes)}")
        found.append(item)
    return tuple(found)


def _target(said: str, named: Mapping[str, Function], addresses: set[PciAddress], place: pcitree.Place) -> PciAddress:
    if said in named:
        return named[said].address
    try:
        pci = address.parse(said)
    except ValueError:
        pci = None
    if pci not in addresses or pci is None:
        raise MachineError(place, f"there is no device called {said}, and no function at such an address")
    return pci
