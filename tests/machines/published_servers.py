# SPDX-License-Identifier: Apache-2.0
"""What servers of one PCI domain offer whose GPUs are PCIe cards, and a DGX H100."""

from __future__ import annotations

from typing import Any

from tests.machines.attributes import BUS_ID, DRIVER_535, DRIVER_550, DRIVER_580, H100, L40S, NUMA, ROOT, WHOLE, Offer

A30 = {"productName": "NVIDIA A30", "architecture": "Ampere", "cudaComputeCapability": "8.0.0"}
A40 = {"productName": "NVIDIA A40", "architecture": "Ampere", "cudaComputeCapability": "8.6.0"}
H100_PCIE = {"productName": "NVIDIA H100 PCIe", "architecture": "Hopper", "cudaComputeCapability": "9.0.0"}
ADA = {
    "productName": "NVIDIA RTX 6000 Ada Generation",
    "architecture": "Ada Lovelace",
    "cudaComputeCapability": "8.9.0",
}

# Bus of the GPU, root, switch, NUMA node and socket, pair, quad, NIC, its bus, its distance, rail.
DGX_H100 = (
    ("1b", "15", "19", 0, "1b", "1b", "mlx5_0", "18", "PXB", 0),
    ("43", "3d", "41", 0, "1b", "1b", "mlx5_3", "40", "PXB", 1),
    ("52", "4c", "50", 0, "52", "1b", "mlx5_4", "4f", "PXB", 2),
    ("61", "5b", "5f", 0, "52", "1b", "mlx5_5", "5e", "PXB", 3),
    ("9d", "97", "9b", 1, "9d", "9d", "mlx5_6", "9a", "PXB", 4),
    ("c3", "bd", "c1", 1, "9d", "9d", "mlx5_9", "c0", "PXB", 5),
    ("d1", "cb", "cf", 1, "d1", "9d", "mlx5_10", "ce", "PXB", 6),
    ("df", "d9", "dd", 1, "d1", "9d", "mlx5_11", "dc", "PXB", 7),
)
L40S_8 = (
    ("03", "00", "01", 0, "03", "03", "mlx5_0", "05", "PIX", 0),
    ("04", "00", "01", 0, "03", "03", "mlx5_0", "05", "PIX", 0),
    ("23", "20", "21", 0, "23", "03", "mlx5_1", "25", "PIX", 1),
    ("24", "20", "21", 0, "23", "03", "mlx5_1", "25", "PIX", 1),
    ("83", "80", "81", 1, "83", "83", "mlx5_4", "85", "PIX", 2),
    ("84", "80", "81", 1, "83", "83", "mlx5_4", "85", "PIX", 2),
    ("a3", "a0", "a1", 1, "a3", "83", "mlx5_5", "a5", "PIX", 3),
    ("a4", "a0", "a1", 1, "a3", "83", "mlx5_5", "a5", "PIX", 3),
)
# Five GPUs at a switch: four are a quad, and the two that are left are a pair across the switches. In that order they are offered.
SINGLE_ROOT_10 = (
    ("1e", "17", "18", 0, "1e", None, "mlx5_0", "26", "PXB", 0),
    ("25", "17", "1f", 0, "1e", None, "mlx5_0", "26", "PIX", 0),
    ("1a", "17", "18", 0, "1a", "1a", "mlx5_0", "26", "PXB", 0),
    ("1b", "17", "18", 0, "1a", "1a", "mlx5_0", "26", "PXB", 0),
    ("1c", "17", "18", 0, "1c", "1a", "mlx5_0", "26", "PXB", 0),
    ("1d", "17", "18", 0, "1c", "1a", "mlx5_0", "26", "PXB", 0),
    ("21", "17", "1f", 0, "21", "21", "mlx5_0", "26", "PIX", 0),
    ("22", "17", "1f", 0, "21", "21", "mlx5_0", "26", "PIX", 0),
    ("23", "17", "1f", 0, "23", "21", "mlx5_0", "26", "PIX", 0),
    ("24", "17", "1f", 0, "23", "21", "mlx5_0", "26", "PIX", 0),
)
# Bus of the GPU, its switch, pair, quad, NIC, its bus, rail.
H100_16 = (
    ("87", "85", "87", "87", "mlx5_2", "91", 0),
    ("88", "85", "87", "87", "mlx5_2", "91", 0),
    ("89", "85", "89", "87", "mlx5_2", "91", 0),
    ("8a", "85", "89", "87", "mlx5_2", "91", 0),
    ("8d", "8b", "8d", "8d", "mlx5_2", "91", 0),
    ("8e", "8b", "8d", "8d", "mlx5_2", "91", 0),
    ("8f", "8b", "8f", "8d", "mlx5_2", "91", 0),
    ("90", "8b", "8f", "8d", "mlx5_2", "91", 0),
    ("97", "95", "97", "97", "mlx5_3", "a1", 1),
    ("98", "95", "97", "97", "mlx5_3", "a1", 1),
    ("99", "95", "99", "97", "mlx5_3", "a1", 1),
    ("9a", "95", "99", "97", "mlx5_3", "a1", 1),
    ("9d", "9b", "9d", "9d", "mlx5_3", "a1", 1),
    ("9e", "9b", "9d", "9d", "mlx5_3", "a1", 1),
    ("9f", "9b", "9f", "9d", "mlx5_3", "a1", 1),
    ("a0", "9b", "9f", "9d", "mlx5_3", "a1", 1),
)
# Bus of the GPU, root, NUMA node and socket, its bridge's first GPU, NIC, its function, its distance, rail.
A30_4 = (
    ("17", "16", 0, "17", "mlx5_0", "0", "NODE", 0),
    ("65", "64", 0, "17", "mlx5_1", "1", "NODE", 1),
    ("ca", "c9", 1, "ca", "mlx5_0", "0", "SYS", 0),
    ("e3", "e2", 1, "ca", "mlx5_1", "1", "SYS", 1),
)
NVSWITCHES = {"nvlinkDomain": "0000:1b:00.0", "nvlinkClique": "0000:1b:00.0"}


def _switched(row: tuple[Any, ...], product: dict[str, Any]) -> dict[str, Any]:
    bus, root, switch, node, pair, quad, nic, nic_bus, distance, rail = row
    return {
        **WHOLE,
        **product,
        BUS_ID: f"0000:{bus}:00.0",
        ROOT: f"pci0000:{root}",
        NUMA: node,
        "cpuSocket": node,
        "pcieSwitch": f"0000:{switch}:00.0",
        "alignedPair": f"0000:{pair}:00.0",
        **({} if quad is None else {"alignedQuad": f"0000:{quad}:00.0"}),
        "nic": nic,
        "nicPciBusID": f"0000:{nic_bus}:00.0",
        "nicDistance": distance,
        "rail": rail,
    }


def _composed(row: tuple[Any, ...]) -> dict[str, Any]:
    bus, switch, pair, quad, nic, nic_bus, rail = row
    return _switched((bus, "80", switch, 1, pair, quad, nic, nic_bus, "PXB", rail), DRIVER_580 | H100_PCIE)


def _bridged(row: tuple[Any, ...]) -> dict[str, Any]:
    bus, root, node, first, nic, function, distance, rail = row
    return {
        **WHOLE,
        **DRIVER_535,
        **A30,
        BUS_ID: f"0000:{bus}:00.0",
        ROOT: f"pci0000:{root}",
        NUMA: node,
        "cpuSocket": node,
        "nvlinkDomain": f"0000:{first}:00.0",
        "nvlinkClique": f"0000:{first}:00.0",
        "alignedPair": f"0000:{first}:00.0",
        "nic": nic,
        "nicPciBusID": f"0000:31:00.{function}",
        "nicDistance": distance,
        "rail": rail,
    }


WORKSTATION = {
    **WHOLE,
    **DRIVER_580,
    **ADA,
    BUS_ID: "0000:01:00.0",
    ROOT: "pci0000:00",
    "nic": "enp2s0",
    "nicPciBusID": "0000:02:00.0",
    "nicDistance": "PHB",
    "rail": 0,
}

MACHINES: dict[str, Offer] = {
    "a30-4-pcie": ([_bridged(row) for row in A30_4], {"memory": "24Gi", "multiprocessors": "56"}),
    "dgx-h100": (
        [_switched(row, DRIVER_580 | H100 | NVSWITCHES) for row in DGX_H100],
        {"memory": "81559Mi", "multiprocessors": "132"},
    ),
    "h100-16-pcie": ([_composed(row) for row in H100_16], {"memory": "81559Mi", "multiprocessors": "114"}),
    "l40s-8-pcie": (
        [_switched(row, DRIVER_580 | L40S) for row in L40S_8],
        {"memory": "46068Mi", "multiprocessors": "142"},
    ),
    "single-root-10": (
        [_switched(row, DRIVER_550 | A40) for row in SINGLE_ROOT_10],
        {"memory": "46068Mi", "multiprocessors": "84"},
    ),
    "workstation-rtx": ([WORKSTATION], {"memory": "49140Mi", "multiprocessors": "142"}),
}
