# SPDX-License-Identifier: Apache-2.0
"""The values that rooms hand to each other, and the names that more than one room spells."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import NewType, Protocol

from discovery.address import PciAddress

DRIVER_NAME = "gpu.nearfield.dev"
"""Default driver name: ResourceSlice.spec.driver, the domain of our bare attributes, and the CDI vendor."""

ClaimUid = NewType("ClaimUid", str)

_PARTITION = "-mig-"
_GPU_NAME = re.compile(r"gpu-([0-9a-f]{4,8})-([0-9a-f]{2})-([01][0-9a-f])-([0-7])")
_WORD = re.compile(r"[0-9a-z]+")


def gpu_device_name(address: PciAddress) -> str:
    """The device name of a whole GPU: from its PCI address, so that it is the same after any reboot, drain or rebinding."""
    return f"gpu-{address.label}"


def partition_device_name(address: PciAddress, *, profile: str, profile_id: int, start: int) -> str:
    """The device name of a part of a GPU: `gpu-0000-1b-00-0-mig-1g-10gb-19-0` of profile `1g.10gb` with id 19 at memory slice 0.
    The id tells profiles apart whose names differ in signs only.
    """
    label = "-".join(_WORD.findall(profile.lower()))
    return f"{gpu_device_name(address)}{_PARTITION}{label}-{profile_id}-{start}"


def gpu_of(device: str) -> str:
    """The device name of the GPU that a device is, or is a part of."""
    return device.partition(_PARTITION)[0]


def address_of(device: str) -> PciAddress | None:
    """The address of the GPU that a device is, or is a part of; None where it is no name of a device of ours."""
    match = _GPU_NAME.fullmatch(gpu_of(device))
    if match is None:
        return None
    domain, bus, slot, function = (int(part, 16) for part in match.groups())
    return PciAddress(domain, bus, slot, function)


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class ClaimRef:
    """A ResourceClaim as kubelet names it. `str()` is for messages."""

    uid: ClaimUid
    namespace: str
    name: str

    def __str__(self) -> str:
        return f"ResourceClaim {self.namespace}/{self.name} (UID {self.uid})"


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedDevice:
    """One entry of kubelet's answer (dra v1 Device). `request_names` are base names, without a subrequest."""

    request_names: tuple[str, ...]
    pool: str
    device: str
    cdi_device_ids: tuple[str, ...]
    share_id: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A claim is prepared and durably recorded."""

    devices: tuple[PreparedDevice, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Unprepared:
    """A claim is not prepared here (any more, or never was)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """A claim could not be prepared or unprepared; the message goes to the pod's events."""

    message: str


class Call(Protocol):
    """The RPC on whose behalf work is done."""

    def remaining_s(self) -> float:
        """Seconds until its deadline; 0 or less once it has passed."""

    def over(self) -> bool:
        """Whether nobody waits for the answer any more (deadline passed, or cancelled)."""


class HealthStatus(StrEnum):
    """Health of a device in kubelet's words."""

    UNKNOWN = "UNKNOWN"
    HEALTHY = "HEALTHY"
    UNHEALTHY = "UNHEALTHY"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceHealth:
    """Health of one published device. `checked_at`: seconds since the epoch when it was last looked at."""

    pool: str
    device: str
    status: HealthStatus
    checked_at: int
    message: str = ""
