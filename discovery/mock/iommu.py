# SPDX-License-Identifier: Apache-2.0
"""IOMMU groups of mock functions, as the kernel makes them (pci_device_group, drivers/iommu/iommu.c): what can reach each
other behind its back is one group. A root port that does not redirect is one with all below it, a downstream port with all
below its switch; otherwise a function is alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from discovery.address import PciAddress
from discovery.mock.pcitree import Function, PortType


def groups(functions: Sequence[Function]) -> Mapping[PciAddress, int]:
    """The group of every function, numbered as the kernel meets them, which is in order of address."""
    shared = {
        function.directory.rpartition("/")[0] if function.port_type is PortType.DOWNSTREAM else function.directory
        for function in functions
        if function.redirects is False
    }
    numbers: dict[str, int] = {}
    return {
        function.address: numbers.setdefault(_leader(function.directory, shared), len(numbers))
        for function in sorted(functions, key=lambda function: function.address)
    }


def _leader(directory: str, shared: set[str]) -> str:
    """The outermost directory above, or its own, that all below share."""
    components = directory.split("/")
    above = ("/".join(components[: count + 1]) for count in range(len(components)))
    return next((path for path in above if path in shared), directory)
