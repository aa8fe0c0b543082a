# SPDX-License-Identifier: Apache-2.0
"""Servers of one PCI domain whose GPUs are PCIe cards, and a DGX H100: the published facts, as this probe sees them.

Sources: the machines' own YAML.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from itertools import combinations
from pathlib import Path

from discovery import model, paths
from discovery.address import PciAddress, parse
from discovery.mock import render, zoo

Seen = Mapping[str, model.Snapshot]


def _paths(snapshot: model.Snapshot) -> dict[frozenset[str], model.Path]:
    return {frozenset((str(path.a), str(path.b))): path for path in paths.between_all(snapshot)}


def _between_gpus(snapshot: model.Snapshot) -> list[model.Path]:
    gpus = {gpu.address for gpu in snapshot.gpus}
    return [path for path in paths.between_all(snapshot) if {path.a, path.b} <= gpus]


def test_dgx_h100(seen: Seen) -> None:
    """DGX H100/H200 User Guide, network modules; `nvidia-smi topo -m` of such systems: PXB to the own NIC, NV18 to all;
    nvidia_dgx_h100.rs: the bridges above the NICs for storage and management.
    """
    machine = seen["dgx-h100"]
    gpus = ["1b", "43", "52", "61", "9d", "c3", "d1", "df"]
    nics = ["18", "40", "4f", "5e", "9a", "c0", "ce", "dc"]
    rdma = ["mlx5_0", "mlx5_3", "mlx5_4", "mlx5_5", "mlx5_6", "mlx5_9", "mlx5_10", "mlx5_11"]
    interfaces = ["ibp24s0", "ibp64s0", "ibp79s0", "ibp94s0", "ibp154s0", "ibp192s0", "ibp206s0", "ibp220s0"]
    assert [str(gpu.address) for gpu in machine.gpus] == [f"0000:{bus}:00.0" for bus in gpus]
    assert [gpu.pci.numa_node for gpu in machine.gpus] == [0] * 4 + [1] * 4
    by_address = {str(nic.address): nic for nic in machine.nics}
    for bus, device, interface in zip(nics, rdma, interfaces, strict=True):
        nic = by_address[f"0000:{bus}:00.0"]
        assert (nic.name, nic.interfaces[0].name) == (device, interface)
        assert nic.rdma_devices[0].ports[0].rate_mbps == 400_000
    known = _paths(machine)
    for gpu_bus, nic_bus in zip(gpus, nics, strict=True):
        path = known[frozenset((f"0000:{gpu_bus}:00.0", f"0000:{nic_bus}:00.0"))]
        assert path.path_class is model.PathClass.PXB
    between = _between_gpus(machine)
    assert {path.nvlinks for path in between} == {18}
    assert Counter(path.path_class for path in between) == {model.PathClass.NODE: 12, model.PathClass.SYS: 16}
    assert len(machine.nvswitches) == 4
    assert len({nic.address for nic in machine.nics if nic.rdma_devices}) == 8 + 2 * 2
    storage, management = by_address["0000:29:00.0"].pci, by_address["0000:0b:00.0"]
    assert [str(bridge)[5:] for bridge in storage.bridges] == ["24:01.0", "25:00.0", "26:00.0", "27:00.0", "28:00.0"]
    assert [str(bridge)[5:] for bridge in management.pci.bridges] == ["00:10.0"]
    assert (management.interfaces[0].name, management.management) == ("eno3", True)
    assert len(machine.nvmes) == 10
    assert [len(cpus) for cpus in machine.host.sockets.values()] == [112, 112]
    assert {gpu.groups.nvlink_domain for gpu in machine.gpus} == {parse("0000:1b:00.0")}
    assert {link.remote_kind for gpu in machine.gpus for link in gpu.nvlinks} == {model.RemoteKind.SWITCH}


def test_l40s_8_pcie(seen: Seen) -> None:
    machine = seen["l40s-8-pcie"]
    assert {gpu.product for gpu in machine.gpus} == {"NVIDIA L40S"}
    assert len(machine.gpus) == 8
    assert all(gpu.nvlinks == () and gpu.fabric is None and gpu.mig_mode is None for gpu in machine.gpus)
    assert {gpu.multiprocessors for gpu in machine.gpus} == {142}
    classes = Counter(path.path_class for path in _between_gpus(machine))
    assert classes == {model.PathClass.PIX: 4, model.PathClass.NODE: 8, model.PathClass.SYS: 16}
    assert [gpu.nic.distance for gpu in machine.gpus if gpu.nic] == [model.PathClass.PIX] * 8


def test_workstation_rtx(seen: Seen) -> None:
    machine = seen["workstation-rtx"]
    (gpu,) = machine.gpus
    assert gpu.product == "NVIDIA RTX 6000 Ada Generation"
    assert (gpu.pci.numa_node, gpu.pci.cpus, gpu.pci.iommu_group) == (None, None, None)
    assert {path.path_class for path in paths.between_all(machine)} == {model.PathClass.PHB}


def test_a30_4_pcie(seen: Seen) -> None:
    """Two cards at each CPU without a switch; four NVLinks over the bridge of the two of a CPU, and none to the others."""
    machine = seen["a30-4-pcie"]
    assert [(gpu.product, gpu.pci.numa_node, gpu.pci.switches) for gpu in machine.gpus] == [
        ("NVIDIA A30", node, ()) for node in (0, 0, 1, 1)
    ]
    assert {gpu.memory_bytes for gpu in machine.gpus} == {24 << 30}
    links = {(path.path_class, path.nvlinks): 0 for path in _between_gpus(machine)}
    assert links.keys() == {(model.PathClass.NODE, 4), (model.PathClass.SYS, 0)}
    assert [{str(link.remote) for link in gpu.nvlinks} for gpu in machine.gpus] == [
        {"0000:65:00.0"},
        {"0000:17:00.0"},
        {"0000:e3:00.0"},
        {"0000:ca:00.0"},
    ]
    assert {link.version for gpu in machine.gpus for link in gpu.nvlinks} == {3}
    assert {gpu.mig_mode for gpu in machine.gpus} == {model.MigMode(current=False, pending=False)}


def test_single_root_10(seen: Seen) -> None:
    """All GPUs below one root port of sixteen lanes Gen3; five at a switch."""
    machine = seen["single-root-10"]
    assert len(machine.gpus) == 10
    assert {gpu.pci.pcie_root for gpu in machine.gpus} == {"pci0000:17"}
    assert {(gpu.pci.bridges[0], gpu.pci.numa_node) for gpu in machine.gpus} == {(parse("0000:17:00.0"), 0)}
    assert {len(gpu.pci.switches) for gpu in machine.gpus} == {1, 2}
    classes = Counter(path.path_class for path in _between_gpus(machine))
    assert classes == {model.PathClass.PIX: 2 * 10, model.PathClass.PXB: 5 * 5}
    for gpu in machine.gpus:
        assert {link.active for link in gpu.nvlinks} == {False}  # no bridge on them
        assert gpu.pci.link is not None
        assert (gpu.pci.link.current_speed_gts, gpu.pci.link.current_width) == (8.0, 16)


def test_h100_16_pcie(seen: Seen) -> None:
    """Three switches above each GPU; every pair below one root port."""
    machine = seen["h100-16-pcie"]
    assert len(machine.gpus) == 16
    assert {len(gpu.pci.switches) for gpu in machine.gpus} == {3}
    assert {gpu.pci.pcie_root for gpu in machine.gpus} == {"pci0000:80"}
    shared = Counter(len(_shared(a.pci.switches, b.pci.switches)) for a, b in combinations(machine.gpus, 2))
    assert shared == {3: 4 * 6, 2: 2 * 4 * 4, 1: 8 * 8}
    classes = Counter(path.path_class for path in _between_gpus(machine))
    assert classes == {model.PathClass.PIX: 4 * 6, model.PathClass.PXB: 120 - 4 * 6}
    own = [gpu.nic.address if gpu.nic else None for gpu in machine.gpus]
    assert own == [parse("0000:91:00.0")] * 8 + [parse("0000:a1:00.0")] * 8


def _shared(a: tuple[PciAddress, ...], b: tuple[PciAddress, ...]) -> set[PciAddress]:
    return set(a) & set(b)


def test_the_cards_of_h100_16_pcie_stand_in_slots(seen: Seen, tmp_path: Path) -> None:
    tree = render.render(zoo.load("h100-16-pcie"), tmp_path)
    slots = {path.name: (path / "address").read_text().strip() for path in (tree.sys / "bus/pci/slots").iterdir()}
    assert sorted(slots, key=int) == [str(number) for number in range(1, 21)]
    assert [slots[str(number)] for number in range(1, 17)] == [
        str(gpu.address).removesuffix(".0") for gpu in seen["h100-16-pcie"].gpus
    ]
    powered = {path.name for path in (tree.sys / "bus/pci/slots").iterdir() if (path / "adapter").read_text() == "1\n"}
    assert slots.keys() - powered == {"18", "20"}
