# SPDX-License-Identifier: Apache-2.0
"""Every attribute of every GPU of every machine is a fact of the Snapshot, and every fact that has an attribute is published.

- attribute by attribute: the value is the Snapshot's; unknown keys are absent, nothing else is there
- list forms stand behind their options, and begin with the value of the plain form
- with all lists too a device has at most 28 attributes and capacities together
- no attribute is one that no machine ever publishes
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest

from discovery import model
from discovery.mock import zoo
from driver.publish import attributes, devices

PLAIN = devices.PublishOptions(driver_name="gpu.nearfield.dev")
LISTS = replace(PLAIN, numa_list=True, pcie_switches=True)
MOST = 28
"""Of the 32 attributes and capacities that the API allows a device."""

Fact = Callable[[model.Snapshot, model.Gpu], object]


def _version(text: str) -> devices.Version:
    """Numbers without leading zeros, three of them."""
    numbers = [str(int(number)) for number in re.findall(r"\d+", text)]
    return devices.Version(".".join([*numbers, "0"][:3]))


def _nic(read: Callable[[model.NicPairing], object]) -> Fact:
    return lambda _, gpu: read(gpu.nic) if gpu.nic is not None else None


def _fabric_clique(_: model.Snapshot, gpu: model.Gpu) -> object:
    fabric = gpu.fabric
    if (
        fabric is None
        or fabric.state != "completed"
        or fabric.cluster_uuid is None
        or not fabric.cluster_uuid.strip("0-")
    ):
        return None
    return f"{fabric.cluster_uuid}.{fabric.clique_id}"


def _driver_version(snapshot: model.Snapshot, _: model.Gpu) -> object:
    assert snapshot.nvidia_driver is not None
    return _version(snapshot.nvidia_driver.version)


def _cuda_version(snapshot: model.Snapshot, _: model.Gpu) -> object:
    assert snapshot.nvidia_driver is not None
    return _version("{}.{}".format(*(snapshot.nvidia_driver.cuda_version or ())))


FACTS: Mapping[str, Fact] = {
    attributes.PCI_BUS_ID: lambda _, gpu: gpu.address,
    attributes.PCIE_ROOT: lambda _, gpu: gpu.pci.pcie_root,
    attributes.NUMA_NODE: lambda _, gpu: gpu.pci.numa_node,
    attributes.TYPE: lambda *_: "gpu",
    attributes.PRODUCT_NAME: lambda _, gpu: gpu.product,
    attributes.ARCHITECTURE: lambda _, gpu: gpu.architecture,
    attributes.CUDA_COMPUTE_CAPABILITY: lambda _, gpu: _version("{}.{}".format(*(gpu.compute_capability or ()))),
    attributes.DRIVER_VERSION: _driver_version,
    attributes.CUDA_DRIVER_VERSION: _cuda_version,
    attributes.UUID: lambda _, gpu: gpu.uuid,
    attributes.CPU_SOCKET: lambda _, gpu: gpu.pci.cpu_socket,
    attributes.PCIE_SWITCH: lambda _, gpu: gpu.pci.switch,
    attributes.NVLINK_DOMAIN: lambda _, gpu: gpu.groups.nvlink_domain,
    attributes.NVLINK_CLIQUE: lambda _, gpu: gpu.groups.nvlink_clique,
    attributes.FABRIC_CLIQUE: _fabric_clique,
    attributes.ALIGNED_PAIR: lambda _, gpu: gpu.groups.aligned_pair,
    attributes.ALIGNED_QUAD: lambda _, gpu: gpu.groups.aligned_quad,
    attributes.NIC: _nic(lambda nic: nic.name),
    attributes.NIC_PCI_BUS_ID: _nic(lambda nic: nic.address),
    attributes.NIC_DISTANCE: lambda snapshot, gpu: (
        gpu.nic.distance if gpu.nic is not None else "UNKNOWN" if snapshot.nics else "NONE"
    ),
    attributes.RAIL: _nic(lambda nic: nic.rail),
    attributes.MEMORY_ENFORCEMENT: lambda *_: "whole",
    attributes.COMPUTE_ENFORCEMENT: lambda *_: "whole",
}


def said(value: object) -> object:
    """A fact as an attribute has it: numbers and versions as they are, all else in words."""
    return value if isinstance(value, int | devices.Version) else str(value)


def offered(snapshot: model.Snapshot, options: devices.PublishOptions) -> dict[str, devices.Device]:
    return {str(device.address): device for device in devices.build_devices(snapshot, options=options)}


ALL = pytest.mark.parametrize("name", zoo.names())


@ALL
def test_every_attribute_is_a_fact_and_every_fact_an_attribute(name: str, seen: Mapping[str, model.Snapshot]) -> None:
    snapshot = seen[name]
    found = offered(snapshot, PLAIN)
    whole = {
        str(gpu.address): gpu
        for gpu in snapshot.gpus
        if gpu.state is model.GpuState.READY and not (gpu.mig_mode is not None and gpu.mig_mode.current)
    }
    assert found.keys() == whole.keys()
    for address, gpu in whole.items():
        facts: dict[str, Any] = {attribute: fact(snapshot, gpu) for attribute, fact in FACTS.items()}
        expected = {attribute: said(fact) for attribute, fact in facts.items() if fact is not None}
        assert dict(found[address].attributes) == expected
        assert found[address].capacity == {
            attributes.MEMORY: gpu.memory_bytes,
            attributes.COMPUTE: 100,
            attributes.MULTIPROCESSORS: gpu.multiprocessors,
        }


@ALL
def test_lists_stand_behind_their_options_and_leave_room(name: str, seen: Mapping[str, model.Snapshot]) -> None:
    snapshot = seen[name]
    plain, lists = offered(snapshot, PLAIN), offered(snapshot, LISTS)
    for gpu in snapshot.gpus:
        if (address := str(gpu.address)) not in plain:
            continue
        with_lists = dict(lists[address].attributes)
        assert not any(isinstance(value, tuple) for value in plain[address].attributes.values())
        switches = with_lists.pop(attributes.PCIE_SWITCHES, ())
        assert switches == tuple(str(switch) for switch in gpu.pci.switches)
        assert switches[:1] == ((str(gpu.pci.switch),) if gpu.pci.switch is not None else ())
        nodes = with_lists.pop(attributes.NUMA_NODE, ())
        assert isinstance(nodes, tuple)
        assert nodes[:1] == (() if gpu.pci.numa_node is None else (gpu.pci.numa_node,))
        known = {entry.node for entry in snapshot.numa_nodes}
        assert set(nodes) <= known
        assert len(set(nodes)) == len(nodes)
        assert with_lists == {
            attribute: value
            for attribute, value in plain[address].attributes.items()
            if attribute != attributes.NUMA_NODE
        }
        assert devices.without_lists(lists[address]) == plain[address]
        assert len(lists[address].attributes) + len(lists[address].capacity) <= MOST


def test_there_is_a_machine_for_every_attribute(seen: Mapping[str, model.Snapshot]) -> None:
    """These two have them all between them; that no other has one more is what the tests above say of each."""
    published = {
        attribute
        for name in ("dgx-h100", "gb200-tray")
        for device in offered(seen[name], LISTS).values()
        for attribute in device.attributes
    }
    assert published == {*FACTS, attributes.PCIE_SWITCHES}
