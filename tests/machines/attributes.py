# SPDX-License-Identifier: Apache-2.0
"""Words for writing down what a machine publishes: names of attributes, and values that many machines share."""

from __future__ import annotations

from typing import Any

from discovery.mock import zoo

Offer = tuple[list[dict[str, Any]], dict[str, str]]
"""The attributes of each GPU of a machine but its UUID, in the order in which they are offered, and the capacities of every GPU."""

BUS_ID, ROOT, NUMA = (f"resource.kubernetes.io/{name}" for name in ("pciBusID", "pcieRoot", "numaNode"))
WHOLE = {"type": "gpu", "memoryEnforcement": "whole", "computeEnforcement": "whole"}
DRIVER_535 = {"driverVersion": "535.247.1", "cudaDriverVersion": "12.2.0"}
DRIVER_550 = {"driverVersion": "550.127.5", "cudaDriverVersion": "12.4.0"}
DRIVER_580 = {"driverVersion": "580.95.5", "cudaDriverVersion": "13.0.0"}

H100 = {"productName": "NVIDIA H100 80GB HBM3", "architecture": "Hopper", "cudaComputeCapability": "9.0.0"}
L40S = {"productName": "NVIDIA L40S", "architecture": "Ada Lovelace", "cudaComputeCapability": "8.9.0"}

FAULTY = tuple(name for name in zoo.names() if name.startswith("faulty-"))
"""Machines of the zoo with a fault: of them alone some rules of the others do not hold."""
HEALTHY = tuple(name for name in zoo.names() if name not in FAULTY)
