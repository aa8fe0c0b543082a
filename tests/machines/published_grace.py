# SPDX-License-Identifier: Apache-2.0
"""What machines with Grace CPUs offer: every GPU is in a PCI domain of its own."""

from __future__ import annotations

from typing import Any

from tests.machines.attributes import BUS_ID, DRIVER_580, NUMA, ROOT, WHOLE, Offer

GB200 = {"productName": "NVIDIA GB200", "architecture": "Blackwell", "cudaComputeCapability": "10.0.0"}
GB300 = {"productName": "NVIDIA GB300", "architecture": "Blackwell", "cudaComputeCapability": "10.3.0"}
GH200 = {"productName": "NVIDIA GH200 480GB", "architecture": "Hopper", "cudaComputeCapability": "9.0.0"}

# PCI domain of the GPU, NUMA node and socket, pair, NIC, its domain, rail.
GB200_TRAY = (
    ("0008", 0, "0008", "mlx5_0", "0000", 0),
    ("0009", 0, "0008", "mlx5_1", "0002", 1),
    ("0018", 1, "0018", "mlx5_4", "0010", 2),
    ("0019", 1, "0018", "mlx5_5", "0012", 3),
)
# The NIC is that whose Data Direct function is beside the GPU, in another domain than the NIC itself.
GB300_TRAY = (
    ("0008", 0, "0008", "mlx5_2", "0002", 1),
    ("0009", 0, "0008", "mlx5_0", "0000", 0),
    ("0018", 1, "0018", "mlx5_7", "0012", 3),
    ("0019", 1, "0018", "mlx5_5", "0010", 2),
)


def _tray(row: tuple[Any, ...], product: dict[str, Any], *, bus: str, distance: str) -> dict[str, Any]:
    domain, node, pair, nic, nic_domain, rail = row
    return {
        **WHOLE,
        **DRIVER_580,
        **product,
        BUS_ID: f"{domain}:{bus}:00.0",
        ROOT: f"pci{domain}:00",
        NUMA: node,
        "cpuSocket": node,
        "nvlinkDomain": f"0008:{bus}:00.0",
        "nvlinkClique": f"0008:{bus}:00.0",
        "alignedPair": f"{pair}:{bus}:00.0",
        "alignedQuad": f"0008:{bus}:00.0",
        "nic": nic,
        "nicPciBusID": f"{nic_domain}:03:00.0",
        "nicDistance": distance,
        "rail": rail,
    }


def _gb300(row: tuple[Any, ...]) -> dict[str, Any]:
    clique = {"fabricClique": "5cf09b5c-82ef-5b6d-b930-17445828418f.32766"}
    return _tray(row, GB300 | clique, bus="06", distance="PXB") | {"pcieSwitch": f"{row[0]}:04:00.0"}


CLIQUE = {"fabricClique": "2eccfb21-670e-5e64-8dc6-1520f1991801.32766"}
SUPERCHIP = {
    **WHOLE,
    **DRIVER_580,
    **GH200,
    BUS_ID: "0009:01:00.0",
    ROOT: "pci0009:00",
    NUMA: 0,
    "cpuSocket": 0,
    "nic": "mlx5_0",
    "nicPciBusID": "0000:01:00.0",
    "nicDistance": "NODE",
    "rail": 0,
}

MACHINES: dict[str, Offer] = {
    "gb200-tray": (
        [_tray(row, GB200 | CLIQUE, bus="01", distance="NODE") for row in GB200_TRAY],
        {"memory": "189471Mi", "multiprocessors": "152"},
    ),
    "gb300-tray": ([_gb300(row) for row in GB300_TRAY], {"memory": "284208Mi", "multiprocessors": "152"}),
    "gh200": ([SUPERCHIP], {"memory": "97871Mi", "multiprocessors": "132"}),
}
