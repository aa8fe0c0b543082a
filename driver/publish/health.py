# SPDX-License-Identifier: Apache-2.0
"""From what was last read of the GPUs to the health that kubelet shows in pod status. Pure.

Kubelet drops what it has not heard of for 30 s, so a reading that is too old is said to be UNKNOWN rather than repeated
(KEP-4680: health is information for people; it neither drains nor stops scheduling, taints do).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from discovery import model
from discovery.address import PciAddress
from driver import values


def build_health(
    published: Mapping[str, PciAddress],
    readings: Mapping[PciAddress, model.GpuReading],
    *,
    pool: str,
    read_at: float | None,
    fresh: bool,
    vanished: Collection[str] = (),
) -> tuple[values.DeviceHealth, ...]:
    """Health of each published device (name -> address), in order of name: that of its GPU, for a part of one too.

    `read_at`: when the GPUs were last looked at, seconds since the epoch, None before the first look. `fresh`: whether
    that is young enough to speak for now. `vanished`: names of the MIG instances that are not there any more.
    """
    return tuple(
        _health(name, readings.get(address), pool=pool, read_at=read_at, fresh=fresh, vanished=name in vanished)
        for name, address in sorted(published.items())
    )


def _health(
    name: str,
    reading: model.GpuReading | None,
    *,
    pool: str,
    read_at: float | None,
    fresh: bool,
    vanished: bool,
) -> values.DeviceHealth:
    if read_at is None:
        status, message = values.HealthStatus.UNKNOWN, "The GPUs of this node have not been read yet"
    elif not fresh:
        status, message = values.HealthStatus.UNKNOWN, "The GPUs of this node could not be read for a while"
    elif reading is None:
        status, message = values.HealthStatus.UNHEALTHY, "The GPU is not on the PCI bus any more"
    elif reading.state is model.GpuState.READY and vanished:
        status, message = values.HealthStatus.UNHEALTHY, "The MIG instance is not there any more"
    elif reading.state is model.GpuState.READY:
        status, message = values.HealthStatus.HEALTHY, ""
    else:
        status = values.HealthStatus.UNHEALTHY
        message = reading.state_reason or f"The GPU is not usable ({reading.state})"
    return values.DeviceHealth(
        pool=pool, device=name, status=status, checked_at=int(read_at) if read_at is not None else 0, message=message
    )
