# SPDX-License-Identifier: Apache-2.0
"""The machine around the devices: sockets, NUMA nodes and their distances, host names, what the NVIDIA driver says in /proc."""

from __future__ import annotations

from pathlib import Path

import pytest

from discovery import errors, findings, host, model, system
from discovery.address import parse
from tests.fakes import pcitree

INFORMATION = """\
Model: \t\t NVIDIA H100 80GB HBM3
IRQ:   \t\t 512
GPU UUID: \t GPU-4cf8db2d-06c0-7d70-1a51-e59b25b2c16c
Bus Location: \t 0000:1b:00.0
Device Minor: \t 3
GPU Excluded:\t No
"""


@pytest.fixture
def tree(tmp_path: Path) -> pcitree.Tree:
    return pcitree.Tree(tmp_path)


def codes(found: findings.Findings) -> list[str]:
    return [finding.code for finding in found.result()]


def test_sockets_and_nodes_of_two_packages(tree: pcitree.Tree) -> None:
    tree.cpus("0-1,4-5", "2-3")
    tree.write("sys/devices/system/node/node0/meminfo", "\nNode 0 MemTotal:       131841940 kB\nNode 0 MemFree: 5 kB")
    found = findings.Findings()
    machine = system.host(tree.files(), 7, found)
    assert machine == model.Host(memory_bytes=7, online_cpus=(0, 1, 2, 3, 4, 5), sockets={0: (0, 1, 4, 5), 1: (2, 3)})
    assert system.numa_nodes(tree.files(), found) == (
        model.NumaNode(node=0, cpus=(0, 1, 4, 5), memory_bytes=131841940 * 1024, distances={0: 10, 1: 21}),
        model.NumaNode(node=1, cpus=(2, 3), distances={0: 21, 1: 10}),
    )
    assert codes(found) == []


def test_sockets_without_siblings_are_read_cpu_by_cpu(tree: pcitree.Tree) -> None:
    tree.write("sys/devices/system/cpu/online", "0-3")
    for cpu, package in enumerate(("0", "1", "0", "-1")):
        tree.write(f"sys/devices/system/cpu/cpu{cpu}/topology/physical_package_id", package)
    assert system.host(tree.files(), None, findings.Findings()).sockets == {0: (0, 2), 1: (1,)}


def test_distances_are_in_the_order_of_online_nodes(tree: pcitree.Tree) -> None:
    tree.write("sys/devices/system/node/online", "0,2")
    tree.write("sys/devices/system/node/node0/cpulist", "0-3")
    tree.write("sys/devices/system/node/node0/distance", "10 80")
    tree.write("sys/devices/system/node/node2/cpulist", "")
    tree.write("sys/devices/system/node/node2/distance", "80 10 10")
    found = findings.Findings()
    assert system.numa_nodes(tree.files(), found) == (
        model.NumaNode(node=0, cpus=(0, 1, 2, 3), distances={0: 10, 2: 80}),
        model.NumaNode(node=2, cpus=()),
    )
    assert codes(found) == ["sysfs-malformed"]


def test_a_node_that_went_offline_in_between_is_left_out(tree: pcitree.Tree) -> None:
    tree.write("sys/devices/system/node/online", "0")
    found = findings.Findings()
    assert system.numa_nodes(tree.files(), found) == ()
    assert codes(found) == ["numa-node-unreadable"]


def test_nothing_is_said_of_a_node_that_was_left_out(tree: pcitree.Tree) -> None:
    tree.cpus("0", "1")
    tree.write("sys/devices/system/node/node1/cpulist", "what")
    found = findings.Findings()
    assert system.numa_nodes(tree.files(), found) == (model.NumaNode(node=0, cpus=(0,), distances={0: 10}),)
    assert codes(found) == ["numa-node-unreadable", "sysfs-malformed"]


def test_names_of_the_host(tree: pcitree.Tree) -> None:
    tree.write("sys/class/dmi/id/sys_vendor", "NVIDIA")
    tree.write("sys/class/dmi/id/product_name", "DGXH100")
    tree.write("proc/sys/kernel/osrelease", "6.8.0-45-generic")
    tree.write("proc/sys/kernel/random/boot_id", "8f1c")
    assert system.host(tree.files(), None, findings.Findings()) == model.Host(
        boot_id="8f1c", kernel="6.8.0-45-generic", vendor="NVIDIA", product="DGXH100"
    )


@pytest.mark.parametrize(
    "text",
    [
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.129.03  Thu Oct 19 18:56:32 UTC 2023\nGCC version: gcc 12",
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  535.129.03  Release Build  (dvs-builder@U16)",
    ],
)
def test_the_version_of_the_kernel_driver(tree: pcitree.Tree, text: str) -> None:
    assert system.nvidia_module_version(tree.files(), findings.Findings()) is None
    tree.write("proc/driver/nvidia/version", text)
    assert system.nvidia_module_version(tree.files(), findings.Findings()) == "535.129.03"
    tree.write("sys/module/nvidia/version", "580.65.06")
    assert system.nvidia_module_version(tree.files(), findings.Findings()) == "580.65.06"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (INFORMATION, system.DriverGpu(uuid="GPU-4cf8db2d-06c0-7d70-1a51-e59b25b2c16c", minor=3)),
        (
            "GPU UUID: \t GPU-????????-????-????-????-????????????\nGPU Excluded:\t Yes\nDevice Minor: -\n",
            system.DriverGpu(excluded=True),
        ),
        ("", system.DriverGpu()),
        (None, system.DriverGpu()),
    ],
)
def test_what_the_driver_says_of_a_gpu(tree: pcitree.Tree, text: str | None, expected: system.DriverGpu) -> None:
    if text is not None:
        tree.write("proc/driver/nvidia/gpus/0000:1b:00.0/information", text)
    assert system.driver_gpu(tree.files(), parse("0000:1b:00.0"), findings.Findings()) == expected


def test_the_memory_of_the_host(tree: pcitree.Tree) -> None:
    tree.write("proc/meminfo", "MemTotal:  1024 kB\nMemFree: 512 kB")
    assert host.memory_bytes(tree.proc) == 1 << 20
    assert host.memory_bytes() > 1 << 20


@pytest.mark.parametrize(
    "text", [None, "", "MemTotal: x kB", "MemTotal:", "MemTotal: 99999999999999999999 kB\nMemFree: 1 kB"]
)
def test_a_memory_size_that_cannot_be_read_is_an_error(tree: pcitree.Tree, text: str | None) -> None:
    if text is not None:
        tree.write("proc/meminfo", text)
    with pytest.raises(errors.SourceError, match="meminfo"):
        host.memory_bytes(tree.proc)
