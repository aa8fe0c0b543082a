# SPDX-License-Identifier: Apache-2.0
"""What servers with GPUs on a baseboard (V100 to B200), and an L40S server of which a table is published, offer."""

from __future__ import annotations

from typing import Any

from tests.machines.attributes import BUS_ID, DRIVER_580, H100, L40S, NUMA, ROOT, WHOLE, Offer

V100 = {"architecture": "Volta", "cudaComputeCapability": "7.0.0"}
A100 = {"productName": "NVIDIA A100-SXM4-40GB", "architecture": "Ampere", "cudaComputeCapability": "8.0.0"}
H200 = {"productName": "NVIDIA H200", "architecture": "Hopper", "cudaComputeCapability": "9.0.0"}
B200 = {"productName": "NVIDIA B200", "architecture": "Blackwell", "cudaComputeCapability": "10.0.0"}

# Bus of the GPU, root, switch, NUMA node, socket, pair, quad, NVLink clique, NIC, its bus, rail.
DGX_1_V100 = (
    ("06", "00", "03", 0, 0, "06", "06", "06", "mlx5_0", "05", 0),
    ("0b", "00", "08", 0, 0, "06", "06", "06", "mlx5_1", "0c", 1),
    ("07", "00", "03", 0, 0, "07", "06", "06", "mlx5_0", "05", 0),
    ("0a", "00", "08", 0, 0, "07", "06", "06", "mlx5_1", "0c", 1),
    ("85", "80", "82", 1, 1, "85", "85", "85", "mlx5_2", "84", 2),
    ("8a", "80", "87", 1, 1, "85", "85", "85", "mlx5_3", "8b", 3),
    ("86", "80", "82", 1, 1, "86", "85", "85", "mlx5_2", "84", 2),
    ("89", "80", "87", 1, 1, "86", "85", "85", "mlx5_3", "8b", 3),
)
DGX_2_V100 = (
    ("34", "2b", "32", 0, 0, "34", "34", "34", "mlx5_0", "35", 0),
    ("36", "2b", "32", 0, 0, "34", "34", "34", "mlx5_0", "35", 0),
    ("39", "2b", "37", 0, 0, "39", "34", "34", "mlx5_1", "3a", 1),
    ("3b", "2b", "37", 0, 0, "39", "34", "34", "mlx5_1", "3a", 1),
    ("57", "4e", "55", 0, 0, "57", "57", "34", "mlx5_2", "58", 2),
    ("59", "4e", "55", 0, 0, "57", "57", "34", "mlx5_2", "58", 2),
    ("5c", "4e", "5a", 0, 0, "5c", "57", "34", "mlx5_3", "5d", 3),
    ("5e", "4e", "5a", 0, 0, "5c", "57", "34", "mlx5_3", "5d", 3),
    ("b7", "ae", "b5", 1, 1, "b7", "b7", "34", "mlx5_6", "b8", 4),
    ("b9", "ae", "b5", 1, 1, "b7", "b7", "34", "mlx5_6", "b8", 4),
    ("bc", "ae", "ba", 1, 1, "bc", "b7", "34", "mlx5_7", "bd", 5),
    ("be", "ae", "ba", 1, 1, "bc", "b7", "34", "mlx5_7", "bd", 5),
    ("e0", "d7", "de", 1, 1, "e0", "e0", "34", "mlx5_8", "e1", 6),
    ("e2", "d7", "de", 1, 1, "e0", "e0", "34", "mlx5_8", "e1", 6),
    ("e5", "d7", "e3", 1, 1, "e5", "e0", "34", "mlx5_9", "e6", 7),
    ("e7", "d7", "e3", 1, 1, "e5", "e0", "34", "mlx5_9", "e6", 7),
)
DGX_A100_40GB = (
    ("47", "40", "45", 1, 0, "47", "07", "07", "mlx5_3", "54", 3),
    ("4e", "40", "4c", 1, 0, "47", "07", "07", "mlx5_2", "4b", 2),
    ("07", "00", "05", 3, 0, "07", "07", "07", "mlx5_1", "12", 1),
    ("0f", "00", "0d", 3, 0, "07", "07", "07", "mlx5_0", "0c", 0),
    ("b7", "b0", "b5", 5, 1, "b7", "87", "07", "mlx5_9", "cc", 7),
    ("bd", "b0", "bb", 5, 1, "b7", "87", "07", "mlx5_8", "ba", 6),
    ("87", "80", "85", 7, 1, "87", "87", "07", "mlx5_7", "94", 5),
    ("90", "80", "8e", 7, 1, "87", "87", "07", "mlx5_6", "8d", 4),
)
HGX_H100 = (
    ("18", "15", "16", 0, 0, "18", "18", "18", "mlx5_0", "19", 0),
    ("29", "26", "27", 0, 0, "18", "18", "18", "mlx5_1", "2a", 1),
    ("3a", "37", "38", 0, 0, "3a", "18", "18", "mlx5_2", "3b", 2),
    ("5c", "59", "5a", 0, 0, "3a", "18", "18", "mlx5_3", "5d", 3),
    ("9a", "97", "98", 1, 1, "9a", "9a", "18", "mlx5_4", "9b", 4),
    ("b8", "b5", "b6", 1, 1, "9a", "9a", "18", "mlx5_5", "b9", 5),
    ("c9", "c6", "c7", 1, 1, "c9", "9a", "18", "mlx5_6", "ca", 6),
    ("d9", "d6", "d7", 1, 1, "c9", "9a", "18", "mlx5_7", "da", 7),
)
HGX_H200 = (
    ("18", "15", "16", 0, 0, "18", "18", "18", "mlx5_0", "19", 0),
    ("2a", "26", "27", 0, 0, "18", "18", "18", "mlx5_1", "29", 1),
    ("3a", "37", "38", 0, 0, "3a", "18", "18", "mlx5_2", "3b", 2),
    ("5d", "59", "5a", 1, 0, "3a", "18", "18", "mlx5_4", "5c", 3),
    ("9a", "97", "98", 2, 1, "9a", "9a", "18", "mlx5_5", "9b", 4),
    ("ab", "a7", "a8", 2, 1, "9a", "9a", "18", "mlx5_6", "aa", 5),
    ("ba", "b7", "b8", 2, 1, "ba", "9a", "18", "mlx5_7", "bb", 6),
    ("db", "d7", "d8", 3, 1, "ba", "9a", "18", "mlx5_8", "da", 7),
)
DGX_B200 = (
    ("1b", "15", "19", 0, 0, "1b", "1b", "1b", "mlx5_4", "18", 0),
    ("43", "3d", "41", 0, 0, "1b", "1b", "1b", "mlx5_7", "40", 1),
    ("52", "4c", "50", 0, 0, "52", "1b", "1b", "mlx5_8", "4f", 2),
    ("61", "5b", "5f", 0, 0, "52", "1b", "1b", "mlx5_9", "5e", 3),
    ("9d", "97", "9b", 1, 1, "9d", "9d", "1b", "mlx5_10", "9a", 4),
    ("c3", "bd", "c1", 1, 1, "9d", "9d", "1b", "mlx5_13", "c0", 5),
    ("d1", "cb", "cf", 1, 1, "d1", "9d", "1b", "mlx5_14", "ce", 6),
    ("df", "d9", "dd", 1, 1, "d1", "9d", "1b", "mlx5_15", "dc", 7),
)
# Bus of the GPU, root, NUMA node and socket, pair, NIC, its function, distance, rail.
L40S_4 = (
    ("01", "00", 0, "01", "mlx5_0", "0", "SYS", 0),
    ("41", "40", 0, "01", "mlx5_1", "1", "SYS", 1),
    ("81", "80", 1, "81", "mlx5_0", "0", "NODE", 0),
    ("c1", "c0", 1, "81", "mlx5_1", "1", "NODE", 1),
)


def _board(row: tuple[Any, ...], *, domain: str, distance: str, product: dict[str, Any]) -> dict[str, Any]:
    bus, root, switch, node, socket, pair, quad, clique, nic, nic_bus, rail = row
    return {
        **WHOLE,
        **DRIVER_580,
        **product,
        BUS_ID: f"0000:{bus}:00.0",
        ROOT: f"pci0000:{root}",
        NUMA: node,
        "cpuSocket": socket,
        "pcieSwitch": f"0000:{switch}:00.0",
        "nvlinkDomain": f"0000:{domain}:00.0",
        "nvlinkClique": f"0000:{clique}:00.0",
        "alignedPair": f"0000:{pair}:00.0",
        "alignedQuad": f"0000:{quad}:00.0",
        "nic": nic,
        "nicPciBusID": f"0000:{nic_bus}:00.0",
        "nicDistance": distance,
        "rail": rail,
    }


def _alone(row: tuple[Any, ...]) -> dict[str, Any]:
    bus, root, node, pair, nic, function, distance, rail = row
    return {
        **WHOLE,
        **DRIVER_580,
        **L40S,
        BUS_ID: f"0000:{bus}:00.0",
        ROOT: f"pci0000:{root}",
        NUMA: node,
        "cpuSocket": node,
        "alignedPair": f"0000:{pair}:00.0",
        "nic": nic,
        "nicPciBusID": f"0000:a1:00.{function}",
        "nicDistance": distance,
        "rail": rail,
    }


SXM2 = V100 | {"productName": "Tesla V100-SXM2-32GB"}
SXM3 = V100 | {"productName": "Tesla V100-SXM3-32GB"}

MACHINES: dict[str, Offer] = {
    "dgx-1-v100": (
        [_board(row, domain="06", distance="PIX", product=SXM2) for row in DGX_1_V100],
        {"memory": "32Gi", "multiprocessors": "80"},
    ),
    "dgx-2-v100": (
        [_board(row, domain="34", distance="PIX", product=SXM3) for row in DGX_2_V100],
        {"memory": "32Gi", "multiprocessors": "80"},
    ),
    "dgx-a100-40gb": (
        [_board(row, domain="07", distance="PXB", product=A100) for row in DGX_A100_40GB],
        {"memory": "40Gi", "multiprocessors": "108"},
    ),
    "hgx-h100": (
        [_board(row, domain="18", distance="PIX", product=H100) for row in HGX_H100],
        {"memory": "81559Mi", "multiprocessors": "132"},
    ),
    "hgx-h200": (
        [_board(row, domain="18", distance="PIX", product=H200) for row in HGX_H200],
        {"memory": "143771Mi", "multiprocessors": "132"},
    ),
    "dgx-b200": (
        [_board(row, domain="1b", distance="PXB", product=B200) for row in DGX_B200],
        {"memory": "183359Mi", "multiprocessors": "148"},
    ),
    "l40s-4-pcie": ([_alone(row) for row in L40S_4], {"memory": "46068Mi", "multiprocessors": "142"}),
}
