# SPDX-License-Identifier: Apache-2.0
"""PCI addresses and host bridge names. Nothing else may take such a string apart.

The kernel writes an address as `%04x:%02x:%02x.%d` (drivers/pci/probe.c), so a domain above 0xffff (VMD, Hyper-V)
has five to eight digits. NVML writes `%08X:%02X:%02X.0` (nvmlPciInfo_t.busId).
"""

from __future__ import annotations

import functools
import re
from typing import NamedTuple, NewType

HostBridge = NewType("HostBridge", str)
"""A PCI host bridge as sysfs names its directory: `pci<domain>:<bus>`, e.g. `pci0000:3a`."""

_ADDRESS = re.compile(r"([0-9a-fA-F]{1,8}):([0-9a-fA-F]{2}):([0-9a-fA-F]{2})(?:\.([0-7]))?")
_HOST_BRIDGE = re.compile(r"pci([0-9a-f]{4,8}):([0-9a-f]{2})")


class PciAddress(NamedTuple):
    """Domain, bus, device, function; ordered as the kernel would number them. `str()` is the kernel's own spelling.

    A tuple, because addresses are the keys of nearly everything, and tuples hash and compare without running Python.
    """

    domain: int
    bus: int
    device: int
    function: int

    def __str__(self) -> str:
        return f"{self.domain:04x}:{self.bus:02x}:{self.device:02x}.{self.function:x}"

    @property
    def label(self) -> str:
        """The address as part of a DNS label: `0000-1b-00-0`."""
        return str(self).replace(":", "-").replace(".", "-")


@functools.lru_cache(maxsize=4096)
def parse(text: str) -> PciAddress:
    """An address in the spelling of the kernel or of NVML, any case; a missing function is 0.

    Raises ValueError that names the text. A machine has few addresses, and each is met many times.
    """
    match = _ADDRESS.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not a PCI address (domain:bus:device.function)")
    domain, bus, device, function = match.groups()
    if int(device, 16) > 0x1F:
        raise ValueError(f"{text!r} is not a PCI address: device above 1f")
    return PciAddress(int(domain, 16), int(bus, 16), int(device, 16), int(function or "0", 16))


def parse_host_bridge(text: str) -> HostBridge | None:
    """The host bridge that a directory name spells, or None when it is no host bridge."""
    return HostBridge(text) if _HOST_BRIDGE.fullmatch(text) else None
