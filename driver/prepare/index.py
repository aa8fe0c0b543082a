# SPDX-License-Identifier: Apache-2.0
"""From the name of a device, as an allocation has it, to the GPU that it stands for now."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from discovery import model
from driver import inventory, values
from driver.prepare import plan


class InventoryIndex:
    """Looks devices up in the inventory, which it asks anew each time."""

    def __init__(self, state: Callable[[], inventory.InventoryState], *, look_again: Callable[[], None]) -> None:
        """`look_again`: asks for a full probe soon."""
        self._state = state
        self.look_again = look_again
        self._built: tuple[model.Snapshot, Mapping[str, plan.GpuDevice]] | None = None

    def find(self, name: str) -> plan.GpuDevice | plan.NotThere:
        """The GPU of this name as it was last seen, or why there is none."""
        state = self._state()
        if state.snapshot is None:
            return plan.NotThere(
                reason=state.error or "the GPUs of this node have not been read yet, as the agent has just started",
                retryable=True,
            )
        device = self._devices(state.snapshot).get(name)
        if device is None:
            return plan.NotThere(
                reason="no GPU of this name is on this node (any more); `nearfield devices` lists those that are",
                retryable=False,
            )
        reading = state.readings.get(device.address)
        if reading is not None and reading.state is not device.state:
            return replace(device, state=reading.state, reason=reading.state_reason)
        return device

    def _devices(self, snapshot: model.Snapshot) -> Mapping[str, plan.GpuDevice]:
        if self._built is None or self._built[0] is not snapshot:
            devices = {}
            for gpu in snapshot.gpus:
                name = values.gpu_device_name(gpu.address)
                devices[name] = plan.GpuDevice(
                    name=name,
                    address=gpu.address,
                    state=gpu.state,
                    reason=gpu.state_reason,
                    uuid=gpu.uuid,
                    minor=gpu.minor,
                )
            self._built = (snapshot, devices)
        return self._built[1]
