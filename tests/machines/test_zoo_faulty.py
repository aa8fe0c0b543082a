# SPDX-License-Identifier: Apache-2.0
"""Machines of the zoo with a fault: exactly the right Findings and states, and nothing else changes.

What they publish is in published_faulty.py: the keys of the others stay.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from discovery import document, model
from discovery.mock import shelf
from tests.machines.attributes import FAULTY

Seen = Mapping[str, model.Snapshot]
Severity = model.Severity

FINDINGS = {
    "faulty-gpu-dead": {
        (Severity.WARNING, "gpu-not-ready", "0000:61:00.0"),
        (Severity.WARNING, "nvml-gpu-is-lost", "nvml index 3"),
        (Severity.INFO, "nvlink-inferred", "0000:61:00.0"),
    },
    "faulty-gpu-vfio": {
        (Severity.WARNING, "gpu-not-ready", "0000:d1:00.0"),
        (Severity.INFO, "nvlink-inferred", "0000:d1:00.0"),
    },
    "faulty-link-narrow": {(Severity.WARNING, "pcie-link-narrow", "0000:84:00.0")},
    "faulty-numa-wrong": {(Severity.INFO, "numa-alike", "node")},
    "faulty-nvlink-down": {
        (Severity.WARNING, "nvlink-down", "0000:17:00.0"),
        (Severity.WARNING, "nvlink-down", "0000:65:00.0"),
    },
}
"""What the probe says of each, but of faulty-numa-unknown."""

CONCERNED = {
    "faulty-gpu-dead": {"0000:61:00.0"},
    "faulty-gpu-vfio": {"0000:d1:00.0"},
    "faulty-link-narrow": {"0000:84:00.0"},
    "faulty-nvlink-down": {"0000:17:00.0", "0000:65:00.0"},
}
"""The GPUs that a fault of a GPU concerns."""


def base_of(name: str) -> str:
    described = document.read(shelf.path(name)).value
    assert isinstance(described, dict)
    return str(described["base"])


def test_every_faulty_machine_stands_here() -> None:
    assert {*FINDINGS, "faulty-numa-unknown"} == set(FAULTY)


@pytest.mark.parametrize("name", FINDINGS)
def test_the_findings_are_these_and_no_others(name: str, seen: Seen) -> None:
    found = [(finding.severity, finding.code, finding.subject) for finding in seen[name].findings]
    assert len(found) == len(FINDINGS[name])
    assert set(found) == FINDINGS[name]


@pytest.mark.parametrize("name", CONCERNED)
def test_nothing_changes_for_the_other_gpus(name: str, seen: Seen) -> None:
    healthy = {gpu.address: gpu for gpu in seen[base_of(name)].gpus}
    faulty = {gpu.address: gpu for gpu in seen[name].gpus}
    assert faulty.keys() == healthy.keys()
    differing = {
        str(address)
        for address, gpu in faulty.items()
        if replace(gpu, uuid=None) != replace(healthy[address], uuid=None)
    }
    assert differing == CONCERNED[name]
    for address, gpu in faulty.items():
        before = healthy[address]
        assert (gpu.groups, gpu.nic, gpu.pci.bridges) == (before.groups, before.nic, before.pci.bridges)
    assert [nic.rail for nic in seen[name].nics] == [nic.rail for nic in seen[base_of(name)].nics]


@pytest.mark.parametrize(
    ("name", "bus", "state"),
    [("faulty-gpu-dead", 0x61, model.GpuState.LOST), ("faulty-gpu-vfio", 0xD1, model.GpuState.VFIO)],
)
def test_a_gpu_that_does_not_work(name: str, bus: int, state: model.GpuState, seen: Seen) -> None:
    states = {gpu.address.bus: gpu.state for gpu in seen[name].gpus}
    assert states.pop(bus) is state
    assert set(states.values()) == {model.GpuState.READY}


def test_a_narrow_link(seen: Seen) -> None:
    (gpu,) = (gpu for gpu in seen["faulty-link-narrow"].gpus if gpu.address.bus == 0x84)
    assert gpu.state is model.GpuState.READY
    assert gpu.pci.link is not None
    assert (gpu.pci.link.current_width, gpu.pci.link.max_width) == (4, 16)
    assert gpu.pci.narrowest is not None
    assert gpu.pci.narrowest.width == 4


def test_an_nvlink_that_is_down_is_down_at_both_ends(seen: Seen) -> None:
    links = {gpu.address.bus: [link.active for link in gpu.nvlinks] for gpu in seen["faulty-nvlink-down"].gpus}
    assert links == {
        0x17: [True, True, False, True],
        0x65: [True, True, False, True],
        0xCA: [True] * 4,
        0xE3: [True] * 4,
    }


def test_a_firmware_that_tells_no_node(seen: Seen) -> None:
    """Groups and NICs are those of the healthy machine: PCIe and NVLink tell them."""
    machine, healthy = seen["faulty-numa-unknown"], seen["dgx-h100"]
    assert {(gpu.pci.numa_node, gpu.pci.cpu_socket, gpu.pci.cpus) for gpu in machine.gpus} == {(None, None, None)}
    gpus = {str(gpu.address) for gpu in machine.gpus}
    others = {
        *(str(nic.address) for nic in machine.nics),
        *(str(nvme.pci.address) for nvme in machine.nvmes),
        *(str(switch.address) for switch in machine.nvswitches),
    }
    assert {(finding.severity, finding.code, finding.subject) for finding in machine.findings} == {
        (Severity.WARNING, "numa-unknown", address) for address in gpus
    } | {(Severity.INFO, "numa-unknown", address) for address in others}
    assert [(gpu.groups, gpu.nic) for gpu in machine.gpus] == [(gpu.groups, gpu.nic) for gpu in healthy.gpus]


def test_a_firmware_that_tells_one_node_for_all(seen: Seen) -> None:
    """It is believed: nothing here contradicts it. PCIe still tells which GPUs and NICs are near each other."""
    machine, healthy = seen["faulty-numa-wrong"], seen["l40s-8-pcie"]
    assert {(gpu.pci.numa_node, gpu.pci.cpu_socket) for gpu in machine.gpus} == {(0, 0)}
    assert {gpu.pci.cpus for gpu in machine.gpus} == {machine.numa_nodes[0].cpus}
    assert [(gpu.groups, gpu.nic) for gpu in machine.gpus] == [(gpu.groups, gpu.nic) for gpu in healthy.gpus]
