# SPDX-License-Identifier: Apache-2.0
"""How a mock machine is wired, read from its rendered files by rules of our own here, so that slices can be judged by it.

Where a function hangs is in its path below `/sys/devices`; which bridges begin a switch is in their PCI Express capability;
which GPUs NVLink joins is in what the machine's NVML tells of each link.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tests.e2e.kit.api import Json

_ADDRESS = re.compile(r"[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
_NVIDIA = 0x10DE
_DISPLAY_3D = 0x0302
_DISPLAY_VGA = 0x0300
_NETWORK = 0x02
_CAPABILITIES = 0x34
_EXPRESS = 0x10
_UPSTREAM_PORT = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Function:
    """A PCI function and where it hangs."""

    address: str
    root: str | None
    """The host bridge as sysfs names it, `pci0000:15`, where it stands at the top of /sys/devices."""
    bridges: tuple[str, ...]
    """From the root port down to the function."""
    switches: tuple[str, ...]
    """Those bridges that begin a switch, the nearest one first."""
    numa: int | None
    directory: Path

    @property
    def gpu(self) -> str:
        """The name that the device of a GPU here has in slices."""
        return "gpu-" + self.address.replace(":", "-").replace(".", "-")

    @property
    def switch(self) -> str | None:
        """The nearest switch."""
        return self.switches[0] if self.switches else None

    def shares_switch(self, other: Function) -> bool:
        """Whether both hang below one switch, perhaps with more switches between."""
        return not set(self.switches).isdisjoint(other.switches)


@dataclass(frozen=True, slots=True)
class Wiring:
    """A machine."""

    gpus: tuple[Function, ...]
    nics: tuple[Function, ...]
    islands: tuple[frozenset[str], ...]
    """Addresses of GPUs that NVLink joins; those without are in none."""
    fabric: dict[str, str]
    """Address of a GPU -> cluster and clique that it registered with."""

    def gpu(self, device: str) -> Function:
        """The GPU of a device name."""
        (found,) = (function for function in self.gpus if function.gpu == device)
        return found

    def nic(self, address: str) -> Function:
        """The NIC at an address."""
        (found,) = (function for function in self.nics if function.address == address)
        return found

    def island(self, device: str) -> frozenset[str] | None:
        """The GPUs that NVLink joins with this one, by address."""
        address = self.gpu(device).address
        return next((island for island in self.islands if address in island), None)

    def numa_nodes(self, devices: Iterable[str]) -> frozenset[int | None]:
        """The NUMA nodes of some GPUs."""
        return frozenset(self.gpu(device).numa for device in devices)

    def roots(self, devices: Iterable[str]) -> frozenset[str | None]:
        """Their host bridges."""
        return frozenset(self.gpu(device).root for device in devices)

    def switches(self, devices: Iterable[str]) -> frozenset[str | None]:
        """Their nearest switches."""
        return frozenset(self.gpu(device).switch for device in devices)

    def joined(self, devices: Iterable[str]) -> frozenset[frozenset[str] | None]:
        """Their NVLink islands."""
        return frozenset(self.island(device) for device in devices)


def read(machine: Path) -> Wiring:
    """The wiring of a rendered machine."""
    functions = tuple(_function(link) for link in sorted((machine / "sys/bus/pci/devices").iterdir()))
    state: Json = json.loads((machine / "nvml.json").read_text())
    gpus = state["nvml"]["gpus"]
    return Wiring(
        gpus=tuple(
            f for f in functions if _number(f, "vendor") == _NVIDIA and _class(f) in {_DISPLAY_3D, _DISPLAY_VGA}
        ),
        nics=tuple(f for f in functions if _class(f) >> 8 == _NETWORK),
        islands=_islands(
            {gpu["pci"]: [end(link) for link in gpu.get("nvlinks") or () if link.get("remoteBusId")] for gpu in gpus}
        ),
        fabric={
            gpu["pci"]: f"{gpu['fabric']['clusterUuid']}.{gpu['fabric']['cliqueId']}"
            for gpu in gpus
            if gpu.get("fabric")
        },
    )


def end(link: Json) -> str:
    """What an NVLink ends in: a peer's address, a switch's, or that of all switches outside of the node."""
    domain, _, rest = str(link["remoteBusId"]).lower().partition(":")
    return f"{domain[-4:]}:{rest}"


def _function(link: Path) -> Function:
    directory = link.resolve()
    parts = directory.parts[directory.parts.index("devices") + 1 :]
    bridges = tuple(part for part in parts[1:-1] if _ADDRESS.fullmatch(part))
    above = [directory.parents[len(bridges) - 1 - index] for index in range(len(bridges))]
    upstream = [path.name for path in above if _port_type(path) == _UPSTREAM_PORT]
    numa = int((directory / "numa_node").read_text())
    return Function(
        address=directory.name,
        root=parts[0] if parts[0].startswith("pci") else None,
        bridges=bridges,
        switches=tuple(reversed(upstream)),
        numa=numa if numa >= 0 else None,
        directory=directory,
    )


def _port_type(bridge: Path) -> int | None:
    """What the PCI Express capability says (PCIe base specification, 7.5.3.2)."""
    config = (bridge / "config").read_bytes()
    at = config[_CAPABILITIES]
    while at:
        capability, after = config[at], config[at + 1]
        if capability == _EXPRESS:
            (flags,) = struct.unpack_from("<H", config, at + 2)
            return int(flags) >> 4 & 0xF
        at = after
    return None


def _class(function: Function) -> int:
    """Base class and subclass."""
    return _number(function, "class") >> 8


def _number(function: Function, file: str) -> int:
    return int((function.directory / file).read_text(), 16)


def _islands(ends: dict[str, list[str]]) -> tuple[frozenset[str], ...]:
    """GPUs that share an end or are one another's."""
    islands: list[set[str]] = []
    for gpu, reached in ends.items():
        if not reached:
            continue
        group = {gpu, *reached}
        for other in [island for island in islands if island & group]:
            islands.remove(other)
            group |= other
        islands.append(group)
    return tuple(frozenset(island & ends.keys()) for island in islands)
