# SPDX-License-Identifier: Apache-2.0
"""What a probe is told: where the machine is, and what the user's configuration adds. Plain values, cheap to import."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from discovery.address import PciAddress
from discovery.model import Origin
from discovery.overlay import Overlay


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeOptions:
    """What the user's configuration adds to a probe. `rails`: rail by NIC address; wins over one that the overlay gives."""

    rails: Mapping[PciAddress, int] = field(default_factory=dict)
    overlay: Overlay | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Where the machine is seen: the places of /sys, /proc and /dev. `mock`: a rendered machine, whose NVML library is
    taken; the three then lie in it. `driver_root`: where libnvidia-ml is looked for, if not in this file system. `cgroups`: the
    hierarchy that pods are in, if not that of `sys`.
    """

    sys: Path = Path("/sys")
    proc: Path = Path("/proc")
    dev: Path = Path("/dev")
    mock: Path | None = None
    driver_root: Path = Path("/")
    cgroups: Path | None = None

    @classmethod
    def rendered(cls, mock: Path, *, cgroups: Path | None = None) -> Source:
        """A rendered machine."""
        return cls(sys=mock / "sys", proc=mock / "proc", dev=mock / "dev", mock=mock, cgroups=cgroups)

    @property
    def origin(self) -> Origin:
        """Whether what is seen there is this node."""
        return Origin.THIS_NODE if self.mock is None else Origin.RECORDING

    @property
    def cgroup_root(self) -> Path:
        """Below which the cgroups are that may be limited."""
        return self.sys / "fs/cgroup" if self.cgroups is None else self.cgroups
