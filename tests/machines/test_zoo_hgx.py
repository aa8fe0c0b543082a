# SPDX-License-Identifier: Apache-2.0
"""Servers with V100 to B200 on baseboards, and an L40S server: the published facts, as this probe sees them.

Their `nvidia-smi topo -m` is in test_matrices.py. Here is what that does not say. Sources: the machines' own YAML.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import pytest

from discovery import model, paths

Seen = Mapping[str, model.Snapshot]

# Name: GPUs, buses of the GPUs of each NUMA node, cores with their threads of each socket, NVSwitches, NVLinks of a GPU.
FACTS: dict[str, tuple[str, dict[int, list[str]], list[int], int, int]] = {
    "dgx-1-v100": ("Tesla V100-SXM2-32GB", {0: ["06", "07", "0a", "0b"], 1: ["85", "86", "89", "8a"]}, [40, 40], 0, 6),
    "dgx-2-v100": (
        "Tesla V100-SXM3-32GB",
        {0: ["34", "36", "39", "3b", "57", "59", "5c", "5e"], 1: ["b7", "b9", "bc", "be", "e0", "e2", "e5", "e7"]},
        [48, 48],
        12,
        6,
    ),
    "dgx-a100-40gb": (
        "NVIDIA A100-SXM4-40GB",
        {1: ["47", "4e"], 3: ["07", "0f"], 5: ["b7", "bd"], 7: ["87", "90"]},
        [128, 128],
        6,
        12,
    ),
    "hgx-h100": (
        "NVIDIA H100 80GB HBM3",
        {0: ["18", "29", "3a", "5c"], 1: ["9a", "b8", "c9", "d9"]},
        [112, 112],
        4,
        18,
    ),
    "hgx-h200": ("NVIDIA H200", {0: ["18", "2a", "3a"], 1: ["5d"], 2: ["9a", "ab", "ba"], 3: ["db"]}, [96, 96], 4, 18),
    "dgx-b200": ("NVIDIA B200", {0: ["1b", "43", "52", "61"], 1: ["9d", "c3", "d1", "df"]}, [112, 112], 0, 18),
    "l40s-4-pcie": ("NVIDIA L40S", {0: ["01", "41"], 1: ["81", "c1"]}, [192, 192], 0, 0),
}
MACHINES = pytest.mark.parametrize("name", FACTS)


def bus(function: model.PciFunction) -> str:
    return str(function.address)[5:7]


def between(snapshot: model.Snapshot) -> dict[tuple[str, str], model.Path]:
    """The path between any two buses, both ways."""
    known = {}
    for path in paths.between_all(snapshot):
        a, b = str(path.a)[5:7], str(path.b)[5:7]
        known[a, b] = known[b, a] = path
    return known


def grouped(snapshot: model.Snapshot, field: str) -> list[str]:
    """The groups of that kind, each as the buses of its GPUs in order of address."""
    groups: dict[object, list[str]] = {}
    for gpu in snapshot.gpus:
        groups.setdefault(getattr(gpu.groups, field), []).append(bus(gpu.pci))
    groups.pop(None, None)
    return sorted(" ".join(sorted(group)) for group in groups.values())


@MACHINES
def test_gpus_numa_nodes_cpus_and_nvswitches(name: str, seen: Seen) -> None:
    product, nodes, cpus, nvswitches, links = FACTS[name]
    machine = seen[name]
    assert {gpu.product for gpu in machine.gpus} == {product}
    at: dict[int | None, list[str]] = {}
    for gpu in machine.gpus:
        at.setdefault(gpu.pci.numa_node, []).append(bus(gpu.pci))
    assert at == nodes
    assert [len(of_socket) for of_socket in machine.host.sockets.values()] == cpus
    assert len(machine.nvswitches) == nvswitches
    assert {sum(link.active for link in gpu.nvlinks) for gpu in machine.gpus} == {links}


@pytest.mark.parametrize(
    ("name", "pairing"),
    [
        ("dgx-1-v100", "PIX: 06 05, 07 05, 0a 0c, 0b 0c, 85 84, 86 84, 89 8b, 8a 8b"),
        (
            "dgx-2-v100",
            (
                "PIX: 34 35, 36 35, 39 3a, 3b 3a, 57 58, 59 58, 5c 5d, 5e 5d, "
                "b7 b8, b9 b8, bc bd, be bd, e0 e1, e2 e1, e5 e6, e7 e6"
            ),
        ),
        ("hgx-h100", "PIX: 18 19, 29 2a, 3a 3b, 5c 5d, 9a 9b, b8 b9, c9 ca, d9 da"),
        ("hgx-h200", "PIX: 18 19, 2a 29, 3a 3b, 5d 5c, 9a 9b, ab aa, ba bb, db da"),
        ("dgx-b200", "PXB: 1b 18, 43 40, 52 4f, 61 5e, 9d 9a, c3 c0, d1 ce, df dc"),
    ],
)
def test_a_gpu_is_paired_with_the_nic_of_its_own_switch(name: str, pairing: str, seen: Seen) -> None:
    machine = seen[name]
    distance = {gpu.nic.distance.value for gpu in machine.gpus if gpu.nic is not None}
    found = [f"{bus(gpu.pci)} {str(gpu.nic.address)[5:7]}" for gpu in machine.gpus if gpu.nic is not None]
    assert f"{' '.join(distance)}: {', '.join(found)}" == pairing


def test_dgx_1_is_a_hybrid_cube_mesh(seen: Seen) -> None:
    """Two quads, all to all, and four NVLinks across: two of the four pairs across by two links, two by one."""
    machine = seen["dgx-1-v100"]
    buses = ["06", "07", "0a", "0b", "85", "86", "89", "8a"]
    known = between(machine)
    table = [[known[a, b].nvlinks if a != b else 0 for b in buses] for a in buses]
    assert table == [
        [0, 1, 1, 2, 2, 0, 0, 0],
        [1, 0, 2, 1, 0, 2, 0, 0],
        [1, 2, 0, 2, 0, 0, 1, 0],
        [2, 1, 2, 0, 0, 0, 0, 1],
        [2, 0, 0, 0, 0, 1, 1, 2],
        [0, 2, 0, 0, 1, 0, 2, 1],
        [0, 0, 1, 0, 1, 2, 0, 2],
        [0, 0, 0, 1, 2, 1, 2, 0],
    ]
    assert grouped(machine, "nvlink_domain") == ["06 07 0a 0b 85 86 89 8a"]
    assert grouped(machine, "nvlink_clique") == ["06 07 0a 0b", "85 86 89 8a"]
    assert grouped(machine, "aligned_quad") == ["06 07 0a 0b", "85 86 89 8a"]
    assert grouped(machine, "aligned_pair") == ["06 0b", "07 0a", "85 8a", "86 89"], "the pairs of two links"
    remotes = {link.remote_kind for gpu in machine.gpus for link in gpu.nvlinks}
    assert remotes == {model.RemoteKind.GPU}
    assert {link.version for gpu in machine.gpus for link in gpu.nvlinks} == {2}


@pytest.mark.parametrize("name", ["dgx-2-v100", "dgx-a100-40gb", "hgx-h100", "hgx-h200", "dgx-b200"])
def test_nvswitches_make_one_island_of_all_gpus(name: str, seen: Seen) -> None:
    machine = seen[name]
    everyone = " ".join(sorted(bus(gpu.pci) for gpu in machine.gpus))
    assert grouped(machine, "nvlink_domain") == [everyone]
    assert grouped(machine, "nvlink_clique") == [everyone]
    links = FACTS[name][4]
    gpus = {gpu.address for gpu in machine.gpus}
    assert {path.nvlinks for path in paths.between_all(machine) if {path.a, path.b} <= gpus} == {links}


def test_dgx_2_has_two_baseboards(seen: Seen) -> None:
    """A GPU has one link to each NVSwitch of its own board, and none to the other board's."""
    machine = seen["dgx-2-v100"]
    boards = {node: {pci.address for pci in machine.nvswitches if pci.numa_node == node} for node in (0, 1)}
    assert [len(board) for board in boards.values()] == [6, 6]
    for gpu in machine.gpus:
        assert gpu.pci.numa_node is not None
        assert Counter(link.remote for link in gpu.nvlinks) == dict.fromkeys(boards[gpu.pci.numa_node], 1)
    assert {link.version for gpu in machine.gpus for link in gpu.nvlinks} == {2}


def test_dgx_2_pairs_stand_below_a_switch_and_quads_below_a_host_bridge(seen: Seen) -> None:
    machine = seen["dgx-2-v100"]
    assert grouped(machine, "aligned_pair") == ["34 36", "39 3b", "57 59", "5c 5e", "b7 b9", "bc be", "e0 e2", "e5 e7"]
    assert grouped(machine, "aligned_quad") == ["34 36 39 3b", "57 59 5c 5e", "b7 b9 bc be", "e0 e2 e5 e7"]
    roots = {bus(gpu.pci): str(gpu.pci.pcie_root) for gpu in machine.gpus}
    for quad, root in zip(grouped(machine, "aligned_quad"), ("2b", "4e", "ae", "d7"), strict=True):
        assert {roots[member] for member in quad.split()} == {f"pci0000:{root}"}


def test_dgx_2_drives_and_their_gpus(seen: Seen) -> None:
    """NVIDIA's GPUDirect Storage guide: nvme2 to nvme9, two below each second-level switch, PXB to the GPUs beside them."""
    machine = seen["dgx-2-v100"]
    drives = {nvme.controllers[0]: bus(nvme.pci) for nvme in machine.nvmes}
    assert [drives[f"nvme{number}"] for number in range(2, 10)] == ["2e", "2f", "51", "52", "b1", "b2", "da", "db"]
    known = between(machine)
    assert {known[drive, gpu].path_class for drive in ("2e", "2f") for gpu in ("34", "36", "39", "3b")} == {
        model.PathClass.PXB
    }
    assert known["2e", "57"].path_class is model.PathClass.NODE
    assert known["2e", "b7"].path_class is model.PathClass.SYS


def test_dgx_a100_has_four_pcie_switches_of_two_levels(seen: Seen) -> None:
    """Of each: two GPUs below a second level on their board, two NICs and a drive or two below the first."""
    machine = seen["dgx-a100-40gb"]
    assert len(machine.numa_nodes) == 8
    assert [len(node.cpus) for node in machine.numa_nodes] == [32] * 8
    switches = {bus(gpu.pci): [str(switch)[5:7] for switch in gpu.pci.switches] for gpu in machine.gpus}
    assert switches["07"] == ["05", "01"]
    assert Counter(of_gpu[-1] for of_gpu in switches.values()) == dict.fromkeys(
        {of_gpu[-1] for of_gpu in switches.values()}, 2
    )
    assert len({of_gpu[-1] for of_gpu in switches.values()}) == 4
    assert grouped(machine, "aligned_pair") == ["07 0f", "47 4e", "87 90", "b7 bd"]
    assert grouped(machine, "aligned_quad") == ["07 0f 47 4e", "87 90 b7 bd"]
    assert {link.version for gpu in machine.gpus for link in gpu.nvlinks} == {3}
    for gpu in machine.gpus:
        assert sorted(Counter(link.remote for link in gpu.nvlinks).values()) == [2] * 6


def test_dgx_a100_gpus_and_nics_of_a_switch_are_paired_one_to_one(seen: Seen) -> None:
    """NVIDIA's GPUDirect Storage guide: 0f with 0c, as both stand below one half of their switch, and 07 with 12.

    The two NICs of the storage network, alone below root ports, serve no GPU.
    """
    machine = seen["dgx-a100-40gb"]
    of_gpu = {bus(gpu.pci): gpu.nic for gpu in machine.gpus}
    used = {}
    for name, nic in of_gpu.items():
        assert nic is not None
        assert nic.distance is model.PathClass.PXB
        used[name] = str(nic.address)[5:7]
    assert used == {"07": "12", "0f": "0c", "47": "54", "4e": "4b", "87": "94", "90": "8d", "b7": "cc", "bd": "ba"}
    assert {str(nic.address)[:-2] for nic in machine.nics if nic.rdma_devices} == {
        f"0000:{card}:00" for card in ("0c", "12", "4b", "54", "61", "8d", "94", "ba", "cc", "e1")
    }


def test_hgx_h100_and_h200_have_a_switch_for_each_gpu_and_its_nic(seen: Seen) -> None:
    for name in ("hgx-h100", "hgx-h200"):
        machine = seen[name]
        assert len({gpu.pci.switch for gpu in machine.gpus}) == 8
        assert len({gpu.pci.pcie_root for gpu in machine.gpus}) == 8
        nics = {nic.address: nic for nic in machine.nics}
        for gpu in machine.gpus:
            assert gpu.nic is not None
            assert nics[gpu.nic.address].pci.switch == gpu.pci.switch
        for gpu in machine.gpus:
            assert {link.version for link in gpu.nvlinks} == {4}
            assert sorted(Counter(link.remote for link in gpu.nvlinks).values()) == [4, 4, 5, 5]


def test_hgx_h200_sees_half_a_socket_as_a_numa_node(seen: Seen) -> None:
    """Sub-NUMA clustering: three GPUs of a socket at one node, one at the other; quads are of the socket all the same."""
    machine = seen["hgx-h200"]
    assert [len(node.cpus) for node in machine.numa_nodes] == [48] * 4
    assert [gpu.pci.cpu_socket for gpu in machine.gpus] == [0] * 4 + [1] * 4
    assert grouped(machine, "aligned_quad") == ["18 2a 3a 5d", "9a ab ba db"]


def test_dgx_b200_shows_its_nvswitches_by_nics_alone(seen: Seen) -> None:
    """NVLink 5: switches without a PCI function of their own, managed through ConnectX-7 functions; a completed fabric."""
    machine = seen["dgx-b200"]
    assert machine.nvswitches == ()
    for gpu in machine.gpus:
        assert [link.remote for link in gpu.nvlinks] == [None] * 18
        assert {(link.version, link.remote_kind) for link in gpu.nvlinks} == {(5, model.RemoteKind.SWITCH)}
        assert gpu.fabric == model.Fabric(state="completed")
    bridges = [nic for nic in machine.nics if str(nic.address).startswith("0000:05:00.")]
    assert [nic.rdma_devices[0].ports[0].link_layer for nic in bridges] == ["InfiniBand"] * 4
    assert not {gpu.nic.address for gpu in machine.gpus if gpu.nic is not None} & {nic.address for nic in bridges}


def test_l40s_4_has_one_nic_at_the_second_socket(seen: Seen) -> None:
    machine = seen["l40s-4-pcie"]
    assert all(gpu.nvlinks == () and gpu.fabric is None for gpu in machine.gpus)
    assert [gpu.pci.switch for gpu in machine.gpus] == [None] * 4
    assert grouped(machine, "aligned_pair") == ["01 41", "81 c1"]
    assert grouped(machine, "aligned_quad") == []
    distances = [gpu.nic.distance for gpu in machine.gpus if gpu.nic is not None]
    assert distances == [model.PathClass.SYS] * 2 + [model.PathClass.NODE] * 2
