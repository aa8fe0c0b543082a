# SPDX-License-Identifier: Apache-2.0
"""What the host says that a placement depends on, where it is not the usual two sockets.

- NUMA nodes without CPUs, without memory, with numbers left out; the row of distances is in order of online nodes
- CPUs that are offline, packages that the firmware does not tell, a function whose node has no CPUs
- memory of GPUs as NUMA nodes, which says nothing of the CPUs near them
- what a NIC needs to reach the memory of GPUs
- the same on rendered machines, through the whole probe
"""

from __future__ import annotations

from pathlib import Path

import pytest

from discovery import findings, model, system
from discovery.address import parse
from discovery.mock import render, zoo
from tests.fakes import mockmachine, pcitree

GPU = parse("0000:1b:00.0")
OPEN = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {}  Release Build  (dvs-builder@U22-I3-B08-02-2)"
CLOSED = (
    "NVRM version: NVIDIA UNIX x86_64 Kernel Module  {}  Thu Oct 19 18:56:32 UTC 2023\nGCC version:  gcc version 12"
)


@pytest.fixture
def tree(tmp_path: Path) -> pcitree.Tree:
    return pcitree.Tree(tmp_path)


def node(tree: pcitree.Tree, number: int, cpus: str, distance: str, memory_kib: int) -> None:
    here = f"sys/devices/system/node/node{number}"
    tree.write(f"{here}/cpulist", cpus)
    tree.write(f"{here}/distance", distance)
    tree.write(f"{here}/meminfo", f"Node {number} MemTotal:       {memory_kib} kB\nNode {number} MemFree:  0 kB")


def test_nodes_without_cpus_and_without_memory(tree: pcitree.Tree) -> None:
    tree.write("sys/devices/system/node/online", "0-1,4,9")
    node(tree, 0, "0-3", "10 20 80 255", 1024)
    node(tree, 1, "4-7", "20 10 120 255", 0)
    node(tree, 4, "", "80 120 10 255", 2048)
    node(tree, 9, "", "255 255 255 10", 0)
    found = findings.Findings()
    nodes = {each.node: each for each in system.numa_nodes(tree.files(), found)}
    assert [(each.cpus, each.memory_bytes) for each in nodes.values()] == [
        ((0, 1, 2, 3), 1 << 20),
        ((4, 5, 6, 7), 0),
        ((), 2 << 20),
        ((), 0),
    ]
    assert nodes[1].distances == {0: 20, 1: 10, 4: 120, 9: 255}
    assert found.result() == ()


def test_cpus_that_are_offline_are_in_no_socket(tree: pcitree.Tree) -> None:
    tree.write("sys/devices/system/cpu/online", "0,2-3,6")
    for cpu, package, siblings in ((0, 0, "05"), (2, 0, "05"), (3, 1, "c8"), (6, 1, "c8")):
        topology = f"sys/devices/system/cpu/cpu{cpu}/topology"
        tree.write(f"{topology}/physical_package_id", str(package))
        tree.write(f"{topology}/core_siblings", siblings)  # 7 is in this mask, as it goes offline in this moment
    host = system.host(tree.files(), None, findings.Findings())
    assert (host.online_cpus, host.sockets) == ((0, 2, 3, 6), {0: (0, 2), 1: (3, 6)})


def test_packages_that_the_firmware_does_not_tell_are_no_socket(tree: pcitree.Tree) -> None:
    tree.write("sys/devices/system/cpu/online", "0-3")
    for cpu in range(4):
        tree.write(f"sys/devices/system/cpu/cpu{cpu}/topology/physical_package_id", "-1")
        tree.write(f"sys/devices/system/cpu/cpu{cpu}/topology/core_siblings", "f")
    found = findings.Findings()
    assert system.host(tree.files(), None, found).sockets == {}
    assert found.result() == ()


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        ("Node: 4\nStatus: online\n", 4),
        ("Node:    255\nStatus:  online\n\nPhysical base address: 0x4000000000\n", 255),
        ("Node: 0\nStatus: online\n", 0),
        ("Node: -1\nStatus: disabled\n", None),
        ("Node: 4\nStatus: offline\n", None),
        ("Node: 4\nStatus: online_in_progress\n", None),
        ("Node: 4\n", None),
        ("Node: four\nStatus: online\n", None),
        ("Node: 99999\nStatus: online\n", None),
        ("", None),
        (None, None),
    ],
)
def test_the_node_of_a_gpus_memory_while_it_is_online(
    tree: pcitree.Tree, status: str | None, expected: int | None
) -> None:
    if status is not None:
        tree.write(f"proc/driver/nvidia/gpus/{GPU}/numa_status", status)
    found = findings.Findings()
    assert system.driver_gpu(tree.files(), GPU, found).memory_node == expected
    assert found.result() == ()


@pytest.mark.parametrize(
    ("version", "kernel", "expected"),
    [
        (OPEN, "6.8.0-1021-nvidia", True),
        (OPEN, "5.12.0", True),
        (OPEN, "5.4.0-150-generic", None),
        (OPEN, "4.18.0-553.el8_10.x86_64", None),  # which may have it all the same
        (OPEN, "nonsense", None),
        (OPEN, None, None),
        (CLOSED, "6.8.0", False),
        ("something else", "6.8.0", None),
        (None, "6.8.0", None),
    ],
)
def test_whether_gpu_memory_can_be_shared_as_dma_buf(
    tree: pcitree.Tree, version: str | None, kernel: str | None, *, expected: bool | None
) -> None:
    if version is not None:
        tree.write("proc/driver/nvidia/version", version.format("535.129.03"))
    if kernel is not None:
        tree.write("proc/sys/kernel/osrelease", kernel)
    assert system.host(tree.files(), None, findings.Findings()).gpu_direct.dma_buf is expected


@pytest.mark.parametrize(
    ("modules", "expected"),
    [
        ((), None),
        (("nvidia", "ib_core"), None),
        (("nvidia_peermem",), "nvidia_peermem"),
        (("nv_peer_mem",), "nv_peer_mem"),
        (("nv_peer_mem", "nvidia_peermem"), "nvidia_peermem"),
    ],
)
def test_the_module_for_peer_memory(tree: pcitree.Tree, modules: tuple[str, ...], expected: str | None) -> None:
    for module in modules:
        tree.write(f"sys/module/{module}/refcnt", "0")
    assert system.host(tree.files(), None, findings.Findings()).gpu_direct.peer_memory == expected


@pytest.mark.parametrize(
    ("driver", "codes", "direct"),
    [
        ("", [], model.GpuDirect(dma_buf=True)),
        (", openKernelModule: false", ["gpu-direct-missing"], model.GpuDirect(dma_buf=False)),
        (
            ", openKernelModule: false, peerMemory: true",
            [],
            model.GpuDirect(peer_memory="nvidia_peermem", dma_buf=False),
        ),
    ],
)
def test_what_nics_need_to_reach_gpus_on_a_rendered_machine(
    tmp_path: Path, driver: str, codes: list[str], direct: model.GpuDirect
) -> None:
    tree = mockmachine.rendered(tmp_path / "node", ('cuda: "13.0"', f'cuda: "13.0"{driver}'))
    snapshot = mockmachine.probed(tree)
    assert snapshot.host.gpu_direct == direct
    assert [finding.code for finding in snapshot.findings if finding.code.startswith("gpu-direct")] == codes


def test_without_a_gpu_in_use_or_an_rdma_nic_nothing_is_missing(tmp_path: Path) -> None:
    closed = ('cuda: "13.0"', 'cuda: "13.0", openKernelModule: false')
    for number, change in enumerate(
        (
            ("{nic: connectx-7-400g-ib}", "{nic: intel-x550}"),
            (
                "{gpu: nvidia-h100-sxm5-80gb}, {gpu: nvidia-h100-sxm5-80gb}",
                "{gpu: nvidia-h100-sxm5-80gb, driver: none}",
            ),
        )
    ):
        without_pairs = ("nvlink: {pairs: [{between: [gpu0, gpu1], links: 4}]}\n", "")
        tree = mockmachine.rendered(tmp_path / str(number), closed, change, without_pairs)
        assert "gpu-direct-missing" not in {finding.code for finding in mockmachine.probed(tree).findings}


def test_a_machine_whose_firmware_tells_no_packages_and_that_has_cpus_offline(tmp_path: Path) -> None:
    host = ("threads: 2,", 'threads: 2, packages: false, offline: "8-11",')
    snapshot = mockmachine.probed(mockmachine.rendered(tmp_path / "node", host))
    assert (snapshot.host.online_cpus, snapshot.host.sockets) == (tuple(range(8)), {})
    assert [(gpu.pci.numa_node, gpu.pci.cpu_socket, gpu.pci.cpus) for gpu in snapshot.gpus] == [
        (0, None, (0, 1, 4, 5)),
        (0, None, (0, 1, 4, 5)),
    ]


def test_a_gpu_on_a_node_without_cpus_keeps_the_node_and_has_no_socket(tmp_path: Path) -> None:
    nodes = (
        "  distances: [[10, 21], [21, 10]]",
        "    - {node: 2, memory: 0B}\n  distances: [[10, 21, 30], [21, 10, 30], [30, 30, 10]]",
    )
    snapshot = mockmachine.probed(mockmachine.rendered(tmp_path / "node", nodes, ("    numa: 0\n", "    numa: 2\n")))
    assert [(gpu.pci.numa_node, gpu.pci.cpu_socket, gpu.pci.cpus) for gpu in snapshot.gpus] == [(2, None, ())] * 2
    (empty,) = (each for each in snapshot.numa_nodes if each.node == 2)
    assert (empty.cpus, empty.memory_bytes, empty.distances) == ((), 0, {0: 30, 1: 30, 2: 10})
    assert {finding.code for finding in snapshot.findings} == {"nvlink-down"}


def test_the_memory_of_grace_gpus_is_apart_from_the_cpus_near_them(tmp_path: Path) -> None:
    snapshot = mockmachine.probed(render.render(zoo.load("gb200-tray"), tmp_path / "node"))
    nodes = {each.node: each for each in snapshot.numa_nodes}
    for gpu in snapshot.gpus:
        assert gpu.c2c is True
        assert gpu.memory_numa_node in (2, 10, 18, 26)
        assert nodes[gpu.memory_numa_node].cpus == ()
        assert gpu.pci.numa_node in (0, 1)
        assert gpu.pci.cpus == nodes[gpu.pci.numa_node].cpus
        assert {link.version for link in gpu.nvlinks} == {5}


def test_a_gpu_beside_an_ordinary_cpu_has_neither(tmp_path: Path) -> None:
    snapshot = mockmachine.probed(mockmachine.rendered(tmp_path / "node"))
    assert [(gpu.c2c, gpu.memory_numa_node) for gpu in snapshot.gpus] == [(None, None)] * 2
    assert {link.version for gpu in snapshot.gpus for link in gpu.nvlinks} == {4}
