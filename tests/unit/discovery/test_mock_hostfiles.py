# SPDX-License-Identifier: Apache-2.0
"""The files of a mock machine around its devices: CPUs and their siblings, nodes, memory, drivers' names and numbers."""

from __future__ import annotations

import pytest

from discovery.mock.recording import Tree
from tests.fakes import mockmachine

CPU = "sys/devices/system/cpu"
NODE = "sys/devices/system/node"


def _tree(*changes: tuple[str, str]) -> Tree:
    return Tree(mockmachine.parsed(*changes).files)


@pytest.mark.parametrize(
    ("changes", "siblings"),
    [
        ((), {0: "0,4", 1: "1,5", 4: "0,4", 2: "2,6", 7: "3,7"}),
        ((("threads: 2", "threads: 2, siblings: adjacent"),), {0: "0-1", 1: "0-1", 4: "4-5", 2: "2-3", 7: "6-7"}),
        ((("threads: 2", "threads: 1"),), {0: "0", 7: "7"}),
        ((("0-1,4-5", "0-1,4"),), {0: "0,4", 1: "1", 4: "0,4"}),
    ],
)
def test_threads_of_a_core(changes: tuple[tuple[str, str], ...], siblings: dict[int, str]) -> None:
    tree = _tree(*changes)
    assert {cpu: tree.text(f"{CPU}/cpu{cpu}/topology/thread_siblings_list") for cpu in siblings} == siblings


def test_cores_and_packages() -> None:
    tree = _tree()

    def topology(name: str) -> list[str | None]:
        return [tree.text(f"{CPU}/cpu{cpu}/topology/{name}") for cpu in range(8)]

    assert topology("physical_package_id") == ["0", "0", "1", "1", "0", "0", "1", "1"]
    assert topology("core_id") == ["0", "1", "0", "1", "0", "1", "0", "1"]
    assert topology("core_siblings") == ["33", "33", "cc", "cc", "33", "33", "cc", "cc"]
    assert topology("thread_siblings")[1] == "22"
    assert tree.text(f"{CPU}/online") == "0-7"


def test_nodes() -> None:
    tree = _tree()
    assert (tree.text(f"{NODE}/online"), tree.text(f"{NODE}/has_cpu")) == ("0-1", "0-1")
    assert (tree.text(f"{NODE}/node1/cpulist"), tree.text(f"{NODE}/node1/cpumap")) == ("2-3,6-7", "cc")
    assert tree.text(f"{NODE}/node1/distance") == "21 10"
    assert "Node 1 MemTotal:       67108864 kB" in str(tree.files[f"{NODE}/node1/meminfo"])


def test_memory_of_gpus_is_none_of_the_hosts() -> None:
    gpu_node = '- {nodes: "4-6", gpu: gpu0, memory: 32GiB}\n  distances: [[10, 21, 80], [21, 10, 90], [80, 90, 10]]\n  within: 11'
    tree = _tree(("distances: [[10, 21], [21, 10]]", f"  {gpu_node}"))
    assert (tree.text(f"{NODE}/online"), tree.text(f"{NODE}/has_memory")) == ("0-1,4-6", "0-1,4")
    assert tree.text(f"{NODE}/node5/distance") == "80 90 11 10 11"
    assert tree.text(f"{NODE}/node4/cpulist") == ""
    assert "MemTotal:       134217728 kB" in str(tree.files["proc/meminfo"])
    assert tree.text(f"proc/driver/nvidia/gpus/{mockmachine.GPU0}/numa_status") == "Node: 4\nStatus: online"


def test_the_driver_has_its_devices_and_numbers() -> None:
    tree = _tree()
    devices = str(tree.files["proc/devices"])
    assert "195 nvidia\n" in devices
    assert "nvidia-uvm\n" in devices
    assert {
        "dev/nvidia0",
        "dev/nvidia1",
        "dev/nvidiactl",
        "dev/nvidia-uvm",
        "dev/nvidia-uvm-tools",
    } <= tree.files.keys()
    assert tree.text("sys/module/nvidia/version") == "580.95.05"
    assert "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05" in str(
        tree.files["proc/driver/nvidia/version"]
    )


def test_peer_memory_is_there_when_it_is_loaded() -> None:
    assert _tree().text("sys/module/nvidia_peermem/version") is None
    loaded = _tree(('cuda: "13.0"', 'cuda: "13.0", peerMemory: true'))
    assert loaded.text("sys/module/nvidia_peermem/version") == "580.95.05"
    assert loaded.text("sys/kernel/mm/memory_peers/nv_mem/version") == "580.95.05"


def test_a_nic_with_its_names_given() -> None:
    port = "{nic: connectx-7-400g-ib, functions: [{interface: rail0, rdma: mlx5_rail0, link: Ethernet, rate: 200, up: false}]}"
    tree = _tree(("{nic: connectx-7-400g-ib}", port))
    net, rdma = tree.resolve("sys/class/net/rail0"), tree.resolve("sys/class/infiniband/mlx5_rail0")
    assert (tree.text(f"{net}/operstate"), tree.text(f"{net}/speed"), tree.text(f"{net}/type")) == ("down", None, "1")
    assert tree.text(f"{rdma}/ports/1/state") == "1: DOWN"
    assert tree.text(f"{rdma}/ports/1/rate") == "200 Gb/sec (4X HDR)"
    assert tree.text(f"{tree.function(mockmachine.NIC)}/class") == "0x020000"


def test_a_nic_without_its_driver_shows_nothing() -> None:
    tree = _tree(("{nic: connectx-7-400g-ib}", "{nic: connectx-7-400g-ib, driver: none}"))
    assert not tree.below("sys/class/infiniband")
    assert {path.rpartition("/")[2] for path in tree.below("sys/class/net")} == {"lo"}
