# SPDX-License-Identifier: Apache-2.0
"""The names under which a device describes itself. People's selectors depend on them: they only ever grow. Pure.

Bare names belong to the domain of the driver. Those that NVIDIA's driver also has keep its spelling and type, so that a
CEL selector moves over by changing the domain. Two kinds:

- *Keys* are matched on (`matchAttribute`). An unknown key is left out, which makes the device ineligible, as it must be.
- *Descriptions* are always there: CEL that reads a missing attribute is an error, and one such error ends the allocation
  of the whole pod, on every node.
"""

from __future__ import annotations

STANDARD = "resource.kubernetes.io"
"""Domain of the names that Kubernetes has set for all drivers."""

PCI_BUS_ID = f"{STANDARD}/pciBusID"
PCIE_ROOT = f"{STANDARD}/pcieRoot"
NUMA_NODE = f"{STANDARD}/numaNode"

TYPE = "type"
PRODUCT_NAME = "productName"
ARCHITECTURE = "architecture"
CUDA_COMPUTE_CAPABILITY = "cudaComputeCapability"
DRIVER_VERSION = "driverVersion"
CUDA_DRIVER_VERSION = "cudaDriverVersion"
UUID = "uuid"
PARENT_UUID = "parentUUID"
PROFILE = "profile"

CPU_SOCKET = "cpuSocket"
PCIE_SWITCH = "pcieSwitch"
PCIE_SWITCHES = "pcieSwitches"
NVLINK_DOMAIN = "nvlinkDomain"
NVLINK_CLIQUE = "nvlinkClique"
FABRIC_CLIQUE = "fabricClique"
ALIGNED_PAIR = "alignedPair"
ALIGNED_QUAD = "alignedQuad"

NIC = "nic"
NIC_PCI_BUS_ID = "nicPciBusID"
NIC_DISTANCE = "nicDistance"
RAIL = "rail"

MEMORY_ENFORCEMENT = "memoryEnforcement"
COMPUTE_ENFORCEMENT = "computeEnforcement"

DESCRIPTIONS = (
    TYPE,
    PRODUCT_NAME,
    ARCHITECTURE,
    CUDA_COMPUTE_CAPABILITY,
    DRIVER_VERSION,
    CUDA_DRIVER_VERSION,
    UUID,
    NIC_DISTANCE,
    MEMORY_ENFORCEMENT,
    COMPUTE_ENFORCEMENT,
)
"""Attributes that every whole GPU has."""

MIG_DESCRIPTIONS = (*(name for name in DESCRIPTIONS if name != UUID), PARENT_UUID, PROFILE)
"""Attributes that every MIG device has. A MIG instance that does not exist yet has no UUID."""

TYPE_GPU = "gpu"
TYPE_MIG = "mig"
UNKNOWN = "UNKNOWN"
"""Value of a description in words that nobody could tell. A version has no such value."""

DISTANCE_NONE = "NONE"
"""`nicDistance` of a GPU on a node without NICs."""

ENFORCED_WHOLE = "whole"
"""The claim has the whole GPU: nothing needs to be enforced."""

ENFORCED_MIG = "mig"
"""The hardware keeps MIG instances apart."""

MEMORY = "memory"
COMPUTE = "compute"
MULTIPROCESSORS = "multiprocessors"
"""Capacities: bytes, percent of the multiprocessors of the whole GPU, and their number."""

SHARES = "shares"
"""Capacity of a device that is given out in shares: how many claims may have one."""

COPY_ENGINES = "copyEngines"
DECODERS = "decoders"
ENCODERS = "encoders"
JPEG_ENGINES = "jpegEngines"
OFA_ENGINES = "ofaEngines"
"""Capacities of a MIG device: how many engines are its own."""

MOST = 28
"""Attributes and capacities of a device together; the API allows 32, and the rest is for what comes later."""

COMPUTE_WHOLE = 100
