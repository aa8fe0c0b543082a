# SPDX-License-Identifier: Apache-2.0
"""Machines with Grace CPUs: the published facts, as this probe sees them. Sources: the machines' own YAML."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from discovery import model, paths

Seen = Mapping[str, model.Snapshot]

TRAYS = {
    "gb200-tray": ("01", ("0000", "0002", "0010", "0012"), 489935 + 489795),
    "gb300-tray": ("06", ("0000", "0002", "0010", "0012"), 483137 + 481768),
}
"""Bus of the GPUs in their domains, domains of the NICs, MiB of memory."""


@pytest.mark.parametrize("name", TRAYS)
def test_a_tray(name: str, seen: Seen) -> None:
    """GPUs alone in their PCI domains, their memory as NUMA nodes, NVLinks to switches outside, a completed fabric."""
    machine = seen[name]
    bus, _, memory = TRAYS[name]
    domains = ("0008", "0009", "0018", "0019")
    assert [str(gpu.address) for gpu in machine.gpus] == [f"{domain}:{bus}:00.0" for domain in domains]
    assert [gpu.pci.numa_node for gpu in machine.gpus] == [0, 0, 1, 1]
    assert [node.node for node in machine.numa_nodes] == list(range(34))
    with_memory = [node.node for node in machine.numa_nodes if node.memory_bytes and not node.cpus]
    assert with_memory == [2, 10, 18, 26]
    assert [gpu.memory_numa_node for gpu in machine.gpus] == with_memory
    assert machine.numa_nodes[0].distances[2] == 80
    assert machine.numa_nodes[0].distances[18] == 120
    assert machine.numa_nodes[2].distances[3] == 11
    for gpu in machine.gpus:
        assert gpu.c2c is True
        assert [link.remote for link in gpu.nvlinks] == [None] * 18
        assert {(link.version, link.remote_kind, link.active) for link in gpu.nvlinks} == {
            (5, model.RemoteKind.SWITCH, True)
        }
        assert gpu.fabric is not None
        assert (gpu.fabric.state, gpu.fabric.clique_id) == ("completed", 32766)
    assert len({gpu.fabric.cluster_uuid for gpu in machine.gpus if gpu.fabric}) == 1
    assert machine.nvswitches == ()
    assert machine.host.memory_bytes == memory << 20


def test_nics_of_gb200_tray(seen: Seen) -> None:
    machine = seen["gb200-tray"]
    assert [gpu.pci.switches for gpu in machine.gpus] == [()] * 4
    rdma = [nic for nic in machine.nics if nic.rdma_devices and nic.rdma_devices[0].ports[0].link_layer == "InfiniBand"]
    assert [str(nic.address) for nic in rdma] == [f"{domain}:03:00.0" for domain in TRAYS["gb200-tray"][1]]


def test_nics_of_gb300_tray(seen: Seen) -> None:
    """Two functions a ConnectX-8; of `rdma_topo`: the NIC at 0000:03 has its DMA function at 0009:03, that at 0002:03 at 0008:03.
    GB300MP.xml: 64 GT/s x16 inside a card, 16 GT/s x1 to the CPU.
    """
    machine = seen["gb300-tray"]
    direct = {str(nic.address): nic.data_direct for nic in machine.nics if nic.data_direct is not None}
    assert {nic: str(function.address) for nic, function in direct.items() if nic.endswith(".0")} == {
        "0000:03:00.0": "0009:03:00.0",
        "0002:03:00.0": "0008:03:00.0",
        "0010:03:00.0": "0019:03:00.0",
        "0012:03:00.0": "0018:03:00.0",
    }
    assert len(direct) == 8
    names = {str(nic.address): nic.name for nic in machine.nics}
    assert [names[f"0000:03:00.{function}"] for function in (0, 1)] == ["mlx5_0", "mlx5_1"]
    assert (names["0007:01:00.0"], names["0017:01:00.0"]) == ("mlx5_4", "mlx5_9")
    for gpu in machine.gpus:
        assert gpu.nic is not None
        assert gpu.nic.data_direct is not None
        assert (gpu.nic.address.domain, gpu.nic.data_direct.domain) != (gpu.address.domain, gpu.nic.address.domain)
        assert gpu.nic.data_direct.domain == gpu.address.domain
        assert gpu.nic.distance is model.PathClass.PXB
        assert gpu.pci.link is not None
        assert (gpu.pci.link.max_width, gpu.pci.link.max_speed_gts) == (16, 64.0)
        assert gpu.pci.narrowest is not None
        assert (gpu.pci.narrowest.width, gpu.pci.narrowest.speed_gts) == (1, 16.0)
    by_class = {
        path.path_class for path in paths.between_all(machine) if path.a in {gpu.address for gpu in machine.gpus}
    }
    assert model.PathClass.PIX not in by_class


def test_gh200(seen: Seen) -> None:
    """`numactl --hardware`: the GPU's memory is node 1, 80 away; `nvidia-smi topo -m`: NODE to the NIC, PIX between its ports."""
    machine = seen["gh200"]
    (gpu,) = machine.gpus
    assert str(gpu.address) == "0009:01:00.0"
    assert (gpu.product, gpu.pci.numa_node, gpu.memory_numa_node) == ("NVIDIA GH200 480GB", 0, 1)
    assert gpu.c2c is True
    assert [node.node for node in machine.numa_nodes] == list(range(9))
    assert (machine.numa_nodes[0].distances[1], machine.numa_nodes[1].distances[2]) == (80, 255)
    assert machine.numa_nodes[1].memory_bytes == 97280 << 20
    assert [link.active for link in gpu.nvlinks] == [False] * len(gpu.nvlinks)
    assert gpu.groups.nvlink_domain is None
    found = {frozenset((str(path.a), str(path.b))): path.path_class for path in paths.between_all(machine)}
    assert found[frozenset(("0009:01:00.0", "0000:01:00.0"))] is model.PathClass.NODE
    assert found[frozenset(("0000:01:00.0", "0000:01:00.1"))] is model.PathClass.PIX
