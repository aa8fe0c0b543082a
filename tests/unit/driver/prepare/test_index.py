# SPDX-License-Identifier: Apache-2.0
"""index and devnodes: from the name in an allocation to a GPU, and whether its device node is there."""

from __future__ import annotations

from pathlib import Path

import pytest

from discovery import address, model
from driver import inventory
from driver.prepare import devnodes, index, plan

FIRST, SECOND = address.PciAddress(0, 0x10, 0, 0), address.PciAddress(0, 0x11, 0, 0)


def gpu(
    place: address.PciAddress, *, state: model.GpuState = model.GpuState.READY, uuid: str | None = "GPU-1"
) -> model.Gpu:
    pci = model.PciFunction(address=place, vendor_id=0x10DE, device_id=0x2330, class_code=0x030200)
    reason = None if state is model.GpuState.READY else "a reason"
    return model.Gpu(pci=pci, state=state, state_reason=reason, uuid=uuid, minor=place.bus)


def snapshot(*gpus: model.Gpu) -> model.Snapshot:
    return model.Snapshot(origin=model.Origin.RECORDING, taken_at=0, host=model.Host(), gpus=gpus)


class Held:
    """What the inventory holds, as a test sets it."""

    def __init__(self, state: inventory.InventoryState) -> None:
        self.now = state
        self.asked = 0

    def state(self) -> inventory.InventoryState:
        return self.now

    def request_probe(self) -> None:
        self.asked += 1


def look_up(held: Held) -> index.InventoryIndex:
    return index.InventoryIndex(held.state, look_again=held.request_probe)


def test_before_the_first_reading_a_device_may_come() -> None:
    held = Held(inventory.InventoryState())
    found = look_up(held).find("gpu-0000-10-00-0")
    assert isinstance(found, plan.NotThere)
    assert found.retryable
    held.now = inventory.InventoryState(error="The probe of the hardware failed: hung")
    found = look_up(held).find("gpu-0000-10-00-0")
    assert found == plan.NotThere(reason="The probe of the hardware failed: hung", retryable=True)


def test_a_gpu_is_found_by_its_name_as_it_was_last_seen() -> None:
    held = Held(inventory.InventoryState(snapshot=snapshot(gpu(FIRST), gpu(SECOND))))
    devices = look_up(held)
    expected = plan.GpuDevice(
        name="gpu-0000-10-00-0", address=FIRST, state=model.GpuState.READY, uuid="GPU-1", minor=0x10
    )
    assert devices.find("gpu-0000-10-00-0") == expected
    lost = model.GpuReading(address=FIRST, state=model.GpuState.LOST, state_reason="fell off the bus")
    held.now = inventory.InventoryState(snapshot=held.now.snapshot, readings={FIRST: lost})
    found = devices.find("gpu-0000-10-00-0")
    assert isinstance(found, plan.GpuDevice)
    assert (found.state, found.reason) == (model.GpuState.LOST, "fell off the bus")
    assert isinstance(devices.find("gpu-0000-11-00-0"), plan.GpuDevice)


def test_a_gpu_that_left_the_node_is_not_found_any_more() -> None:
    held = Held(inventory.InventoryState(snapshot=snapshot(gpu(FIRST), gpu(SECOND))))
    devices = look_up(held)
    devices.find("gpu-0000-11-00-0")
    held.now = inventory.InventoryState(snapshot=snapshot(gpu(FIRST)))
    found = devices.find("gpu-0000-11-00-0")
    assert isinstance(found, plan.NotThere)
    assert not found.retryable


def test_the_name_of_nothing_is_not_found() -> None:
    found = look_up(Held(inventory.InventoryState(snapshot=snapshot()))).find("gpu-\ud800")
    assert isinstance(found, plan.NotThere)


@pytest.mark.parametrize("mock", [False, True])
def test_device_nodes_are_looked_for_where_the_agent_sees_them(tmp_path: Path, mock: bool) -> None:
    (tmp_path / "nvidia0").touch()
    (tmp_path / "nvidia1").symlink_to("/dev/null")
    (tmp_path / "nvidia-caps").mkdir()
    nodes = devnodes.DeviceNodes(tmp_path, mock=mock)
    paths = ["/dev/nvidia0", "/dev/nvidia1", "/dev/nvidia2", "/dev/nvidia-caps/cap1"]
    expected = paths[2:] if mock else [paths[0], *paths[2:]]
    assert list(nodes.missing(paths)) == expected, "on real hardware only a character device counts"
