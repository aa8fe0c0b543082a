# SPDX-License-Identifier: Apache-2.0
"""What each machine of the zoo publishes, attribute by attribute, written down by hand.

People's selectors depend on these values: a change here is a change for them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from discovery import child, options
from discovery.mock import render, zoo
from driver.publish import devices, wire

DRIVER = "gpu.nearfield.dev"
BUS_ID, ROOT, NUMA = (f"resource.kubernetes.io/{name}" for name in ("pciBusID", "pcieRoot", "numaNode"))
WHOLE = {"type": "gpu", "memoryEnforcement": "whole", "computeEnforcement": "whole"}
DRIVER_580 = {"driverVersion": "580.95.5", "cudaDriverVersion": "13.0.0"}

H100 = {"productName": "NVIDIA H100 80GB HBM3", "architecture": "Hopper", "cudaComputeCapability": "9.0.0"}
L40S = {"productName": "NVIDIA L40S", "architecture": "Ada Lovelace", "cudaComputeCapability": "8.9.0"}
GB200 = {"productName": "NVIDIA GB200", "architecture": "Blackwell", "cudaComputeCapability": "10.0.0"}
ADA = {
    "productName": "NVIDIA RTX 6000 Ada Generation",
    "architecture": "Ada Lovelace",
    "cudaComputeCapability": "8.9.0",
}

# Bus of the GPU, root, switch, NUMA node and socket, pair, quad, NIC, its bus, rail.
DGX_H100 = (
    ("1b", "15", "19", 0, "1b", "1b", "mlx5_0", "18", 0),
    ("43", "3d", "41", 0, "1b", "1b", "mlx5_3", "40", 1),
    ("52", "4c", "50", 0, "52", "1b", "mlx5_4", "4f", 2),
    ("61", "5b", "5f", 0, "52", "1b", "mlx5_5", "5e", 3),
    ("9d", "97", "9b", 1, "9d", "9d", "mlx5_6", "9a", 4),
    ("c3", "bd", "c1", 1, "9d", "9d", "mlx5_9", "c0", 5),
    ("d1", "cb", "cf", 1, "d1", "9d", "mlx5_10", "ce", 6),
    ("df", "d9", "dd", 1, "d1", "9d", "mlx5_11", "dc", 7),
)
L40S_8 = (
    ("03", "00", "01", 0, "03", "03", "mlx5_0", "05", 0),
    ("04", "00", "01", 0, "03", "03", "mlx5_0", "05", 0),
    ("23", "20", "21", 0, "23", "03", "mlx5_1", "25", 1),
    ("24", "20", "21", 0, "23", "03", "mlx5_1", "25", 1),
    ("83", "80", "81", 1, "83", "83", "mlx5_4", "85", 2),
    ("84", "80", "81", 1, "83", "83", "mlx5_4", "85", 2),
    ("a3", "a0", "a1", 1, "a3", "83", "mlx5_5", "a5", 3),
    ("a4", "a0", "a1", 1, "a3", "83", "mlx5_5", "a5", 3),
)
# PCI domain of the GPU, NUMA node and socket, pair, NIC, its domain, rail.
GB200_TRAY = (
    ("0008", 0, "0008", "mlx5_0", "0000", 0),
    ("0009", 0, "0008", "mlx5_1", "0002", 1),
    ("0018", 1, "0018", "mlx5_4", "0010", 2),
    ("0019", 1, "0018", "mlx5_5", "0012", 3),
)


def _hgx(row: tuple[Any, ...], product: dict[str, Any], distance: str) -> dict[str, Any]:
    bus, root, switch, node, pair, quad, nic, nic_bus, rail = row
    return {
        **WHOLE,
        **DRIVER_580,
        **product,
        BUS_ID: f"0000:{bus}:00.0",
        ROOT: f"pci0000:{root}",
        NUMA: node,
        "cpuSocket": node,
        "pcieSwitch": f"0000:{switch}:00.0",
        "alignedPair": f"0000:{pair}:00.0",
        "alignedQuad": f"0000:{quad}:00.0",
        "nic": nic,
        "nicPciBusID": f"0000:{nic_bus}:00.0",
        "nicDistance": distance,
        "rail": rail,
    }


def _tray(row: tuple[Any, ...]) -> dict[str, Any]:
    domain, node, pair, nic, nic_domain, rail = row
    return {
        **WHOLE,
        **DRIVER_580,
        **GB200,
        BUS_ID: f"{domain}:01:00.0",
        ROOT: f"pci{domain}:00",
        NUMA: node,
        "cpuSocket": node,
        "nvlinkDomain": "0008:01:00.0",
        "nvlinkClique": "0008:01:00.0",
        "fabricClique": "2eccfb21-670e-5e64-8dc6-1520f1991801.32766",
        "alignedPair": f"{pair}:01:00.0",
        "alignedQuad": "0008:01:00.0",
        "nic": nic,
        "nicPciBusID": f"{nic_domain}:03:00.0",
        "nicDistance": "NODE",
        "rail": rail,
    }


ISLAND = {"nvlinkDomain": "0000:1b:00.0", "nvlinkClique": "0000:1b:00.0"}
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
MACHINES: dict[str, tuple[list[dict[str, Any]], dict[str, str]]] = {
    "dgx-h100": (
        [_hgx(row, H100 | ISLAND, "PXB") for row in DGX_H100],
        {"memory": "81559Mi", "multiprocessors": "132"},
    ),
    "gb200-tray": ([_tray(row) for row in GB200_TRAY], {"memory": "189471Mi", "multiprocessors": "152"}),
    "l40s-8-pcie": ([_hgx(row, L40S, "PIX") for row in L40S_8], {"memory": "46068Mi", "multiprocessors": "142"}),
    "workstation-rtx": ([WORKSTATION], {"memory": "49140Mi", "multiprocessors": "142"}),
}
"""In the order in which they are offered."""


def test_every_machine_stands_here() -> None:
    assert tuple(sorted(MACHINES)) == zoo.names()


@pytest.mark.parametrize("name", zoo.names())
def test_a_machine_publishes(name: str, tmp_path: Path) -> None:
    tree = render.render(zoo.load(name), tmp_path / "tree")
    source = options.Source(sys=tree.sys, proc=tree.proc, dev=tree.dev, mock=tree.directory)
    prober = child.InProcessProber(source=source, options=options.ProbeOptions())
    try:
        snapshot = prober.probe(timeout_s=60.0)
    finally:
        prober.close()
    offered = devices.build_devices(snapshot, options=devices.PublishOptions(driver_name=DRIVER))
    bodies = [wire.device_to_json(device, driver_name=DRIVER) for device in offered]
    said = [{key: next(iter(value.values())) for key, value in body["attributes"].items()} for body in bodies]
    uuids = [attributes.pop("uuid") for attributes in said]
    expected, capacity = MACHINES[name]
    assert said == expected
    assert len({uuid for uuid in uuids if uuid.startswith("GPU-")}) == len(expected)
    for body, attributes in zip(bodies, expected, strict=True):
        assert body["name"] == "gpu-" + attributes[BUS_ID].replace(":", "-").replace(".", "-")
        assert {key: value["value"] for key, value in body["capacity"].items()} == capacity | {"compute": "100"}
