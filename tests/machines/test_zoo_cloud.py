# SPDX-License-Identifier: Apache-2.0
"""Virtual machines in clouds: the published facts, as this probe sees them, and what a guest is not told.

Sources: the machines' own YAML.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from discovery import model, paths
from discovery.mock import render, zoo

Seen = Mapping[str, model.Snapshot]


def test_cloud_vm_a100_8(seen: Seen) -> None:
    """ndv4-topo.xml: GPUs at 0001 to 0004 and 000b to 000e, InfiniBand at 0101 to 0108. Every device is alone below VMBus."""
    machine = seen["cloud-vm-a100-8"]
    domains = ["0001", "0002", "0003", "0004", "000b", "000c", "000d", "000e"]
    assert [str(gpu.address) for gpu in machine.gpus] == [f"{domain}:00:00.0" for domain in domains]
    assert [str(nic.address) for nic in machine.nics] == [f"010{number}:00:00.0" for number in range(1, 9)]
    assert [nic.name for nic in machine.nics] == [f"mlx5_ib{number}" for number in range(8)]
    assert {port.rate_mbps for nic in machine.nics for device in nic.rdma_devices for port in device.ports} == {200_000}
    assert [str(switch.address) for switch in machine.nvswitches] == [f"000{digit}:00:00.0" for digit in "56789a"]
    functions = [*(gpu.pci for gpu in machine.gpus), *(nic.pci for nic in machine.nics)]
    assert {(pci.pcie_root, pci.numa_node, pci.cpus, pci.bridges, pci.link) for pci in functions} == {
        (None, None, None, (), None)
    }
    assert {pci.host_bridge for pci in functions} == {f"pci{pci.address.domain:04x}:00" for pci in functions}
    gpus = {gpu.address for gpu in machine.gpus}
    for path in paths.between_all(machine):
        assert path.path_class is model.PathClass.UNKNOWN
        assert path.nvlinks == (12 if {path.a, path.b} <= gpus else 0)
    assert [gpu.nic for gpu in machine.gpus] == [None] * 8
    assert [len(node.cpus) for node in machine.numa_nodes] == [24] * 4


def test_cloud_vm_h100_8_efa(seen: Seen) -> None:
    """p5.48xl-topo.xml: four EFA functions with each GPU. Their RDMA devices have no interface, and one may be given to each GPU."""
    machine = seen["cloud-vm-h100-8-efa"]
    buses = [0x53, 0x64, 0x75, 0x86, 0x97, 0xA8, 0xB9, 0xCA]
    assert [gpu.address.bus for gpu in machine.gpus] == buses
    efa = [nic for nic in machine.nics if nic.rdma_devices]
    assert len(efa) == 32
    assert {nic.interfaces for nic in efa} == {()}
    assert [nic.name for nic in efa[:4]] == [f"rdmap{bus}s0" for bus in range(79, 83)]
    ports = {(port.link_layer, port.rate_mbps) for nic in efa for device in nic.rdma_devices for port in device.ports}
    assert ports == {("Unknown", 100_000)}
    for gpu in machine.gpus:
        assert gpu.nic is not None
        assert gpu.nic.distance is model.PathClass.PIX
        assert [nic.bus for nic in gpu.nic.ties] == [gpu.address.bus - back for back in (4, 3, 2, 1)]
        assert gpu.pci.narrowest is not None
        assert (gpu.pci.narrowest.width, gpu.pci.narrowest.speed_gts) == (8, 16.0)
        assert gpu.fabric is not None
        assert (gpu.fabric.state, gpu.fabric.cluster_uuid) == ("completed", None)
    (host,) = (nic for nic in machine.nics if not nic.rdma_devices)
    assert (host.name, host.management) == ("ens5", True)
    assert [gpu.pci.numa_node for gpu in machine.gpus] == [0] * 4 + [1] * 4
    assert len(machine.nvmes) == 8


def test_cloud_vm_t4(seen: Seen, tmp_path: Path) -> None:
    """Everything on the root bus, nothing told of nodes and links; an interface of a virtio device is found by its function."""
    machine = seen["cloud-vm-t4"]
    (gpu,) = machine.gpus
    (nic,) = machine.nics
    assert (gpu.product, str(gpu.address), gpu.pci.bridges) == ("Tesla T4", "0000:00:04.0", ())
    assert (gpu.pci.numa_node, gpu.pci.cpus, gpu.pci.link, gpu.pci.pcie_root) == (None, None, None, "pci0000:00")
    assert (nic.name, nic.pci.driver, nic.rdma_devices) == ("ens5", "virtio-pci", ())
    assert [path.path_class for path in paths.between_all(machine)] == [model.PathClass.PHB]
    tree = render.render(zoo.load("cloud-vm-t4"), tmp_path)
    interface = (tree.sys / "class/net/ens5").resolve()
    assert [part.name for part in interface.parents][1:3] == ["virtio0", "0000:00:05.0"]
