# SPDX-License-Identifier: Apache-2.0
"""Device health: before the first look, stale, gone from the bus, ready, and every way not to be; parts of a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest

from discovery import address, model
from driver import values
from driver.publish import health

ADDRESS = address.parse("0000:1b:00.0")
NAME = values.gpu_device_name(ADDRESS)


def only(reading: model.GpuReading | None, *, read_at: float | None = 100.5, fresh: bool = True) -> values.DeviceHealth:
    readings = {} if reading is None else {ADDRESS: reading}
    (device,) = health.build_health({NAME: ADDRESS}, readings, pool="n1", read_at=read_at, fresh=fresh)
    return device


def reading(state: model.GpuState, reason: str | None = None) -> model.GpuReading:
    return model.GpuReading(address=ADDRESS, state=state, state_reason=reason)


def test_ready_gpu_is_healthy() -> None:
    assert only(reading(model.GpuState.READY)) == values.DeviceHealth(
        pool="n1", device="gpu-0000-1b-00-0", status=values.HealthStatus.HEALTHY, checked_at=100
    )


def test_nothing_is_known_before_the_first_look() -> None:
    assert only(None, read_at=None, fresh=False).status is values.HealthStatus.UNKNOWN


def test_an_old_reading_is_not_repeated() -> None:
    assert only(reading(model.GpuState.READY), fresh=False).status is values.HealthStatus.UNKNOWN


def test_gpu_gone_from_the_bus_is_unhealthy() -> None:
    device = only(None)
    assert device.status is values.HealthStatus.UNHEALTHY
    assert "bus" in device.message


@pytest.mark.parametrize("state", [state for state in model.GpuState if state is not model.GpuState.READY])
def test_every_other_state_is_unhealthy_with_its_reason(state: model.GpuState) -> None:
    device = only(reading(state, "Fell over at 12:01"))
    assert (device.status, device.message) == (values.HealthStatus.UNHEALTHY, "Fell over at 12:01")
    assert state in only(reading(state)).message


def test_devices_come_in_order_of_name() -> None:
    other = address.parse("0000:0a:00.0")
    devices = health.build_health(
        {NAME: ADDRESS, values.gpu_device_name(other): other}, {}, pool="n1", read_at=1.0, fresh=True
    )
    assert [device.device for device in devices] == ["gpu-0000-0a-00-0", "gpu-0000-1b-00-0"]


PART = values.partition_device_name(ADDRESS, profile="1g.10gb", profile_id=19, start=3)


def part(state: model.GpuState, *, vanished: bool) -> values.DeviceHealth:
    (device,) = health.build_health(
        {PART: ADDRESS},
        {ADDRESS: reading(state)},
        pool="n1",
        read_at=100.5,
        fresh=True,
        vanished={PART} if vanished else (),
    )
    return device


def test_a_part_is_as_its_gpu() -> None:
    assert part(model.GpuState.READY, vanished=False).status is values.HealthStatus.HEALTHY
    assert part(model.GpuState.LOST, vanished=False) == replace(only(reading(model.GpuState.LOST)), device=PART)


def test_an_instance_that_vanished_is_unhealthy() -> None:
    device = part(model.GpuState.READY, vanished=True)
    assert (device.status, device.message) == (
        values.HealthStatus.UNHEALTHY,
        "The MIG instance is not there any more",
    )
    assert "MIG" not in part(model.GpuState.LOST, vanished=True).message
