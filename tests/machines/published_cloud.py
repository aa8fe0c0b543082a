# SPDX-License-Identifier: Apache-2.0
"""What virtual machines in clouds offer. What a guest is not told is no attribute: there is no default that means "unknown"."""

from __future__ import annotations

from typing import Any

from tests.machines.attributes import BUS_ID, DRIVER_535, DRIVER_550, DRIVER_580, H100, NUMA, ROOT, WHOLE, Offer

A100 = {"productName": "NVIDIA A100-SXM4-40GB", "architecture": "Ampere", "cudaComputeCapability": "8.0.0"}
T4 = {"productName": "Tesla T4", "architecture": "Turing", "cudaComputeCapability": "7.5.0"}

# PCI domain of the GPU, pair, quad.
VMBUS = (
    ("0001", "0001", "0001"),
    ("0002", "0001", "0001"),
    ("0003", "0003", "0001"),
    ("0004", "0003", "0001"),
    ("000b", "000b", "000b"),
    ("000c", "000b", "000b"),
    ("000d", "000d", "000b"),
    ("000e", "000d", "000b"),
)
# Bus of the GPU, root, switch, NUMA node and socket, pair, quad, first of its four EFA functions, rail.
EFA = (
    ("53", "44", "45", 0, "53", "53", 0x4F, 0),
    ("64", "55", "56", 0, "53", "53", 0x60, 1),
    ("75", "66", "67", 0, "75", "53", 0x71, 2),
    ("86", "77", "78", 0, "75", "53", 0x82, 3),
    ("97", "88", "89", 1, "97", "97", 0x93, 4),
    ("a8", "99", "9a", 1, "97", "97", 0xA4, 5),
    ("b9", "aa", "ab", 1, "b9", "97", 0xB5, 6),
    ("ca", "bb", "bc", 1, "b9", "97", 0xC6, 7),
)


def _vmbus(row: tuple[str, str, str]) -> dict[str, Any]:
    """A host bridge of VMBus is no root complex, no node is told, and any NIC may be the nearest."""
    domain, pair, quad = row
    return {
        **WHOLE,
        **DRIVER_535,
        **A100,
        BUS_ID: f"{domain}:00:00.0",
        "nvlinkDomain": "0001:00:00.0",
        "nvlinkClique": "0001:00:00.0",
        "alignedPair": f"{pair}:00:00.0",
        "alignedQuad": f"{quad}:00:00.0",
        "nicDistance": "UNKNOWN",
    }


def _efa(row: tuple[Any, ...]) -> dict[str, Any]:
    bus, root, switch, node, pair, quad, nic, rail = row
    return {
        **WHOLE,
        **DRIVER_580,
        **H100,
        BUS_ID: f"0000:{bus}:00.0",
        ROOT: f"pci0000:{root}",
        NUMA: node,
        "cpuSocket": node,
        "pcieSwitch": f"0000:{switch}:00.0",
        "nvlinkDomain": "0000:53:00.0",
        "nvlinkClique": "0000:53:00.0",
        "alignedPair": f"0000:{pair}:00.0",
        "alignedQuad": f"0000:{quad}:00.0",
        "nic": f"rdmap{nic}s0",
        "nicPciBusID": f"0000:{nic:02x}:00.0",
        "nicDistance": "PIX",
        "rail": rail,
    }


ROOT_BUS = {
    **WHOLE,
    **DRIVER_550,
    **T4,
    BUS_ID: "0000:00:04.0",
    ROOT: "pci0000:00",
    "nic": "ens5",
    "nicPciBusID": "0000:00:05.0",
    "nicDistance": "PHB",
    "rail": 0,
}

MACHINES: dict[str, Offer] = {
    "cloud-vm-a100-8": ([_vmbus(row) for row in VMBUS], {"memory": "40Gi", "multiprocessors": "108"}),
    "cloud-vm-h100-8-efa": ([_efa(row) for row in EFA], {"memory": "81559Mi", "multiprocessors": "132"}),
    "cloud-vm-t4": ([ROOT_BUS], {"memory": "15Gi", "multiprocessors": "40"}),
}
