# SPDX-License-Identifier: Apache-2.0
"""A GPU that does not answer, on every machine: what the others publish, and their order, stays."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from discovery import model
from discovery.mock import recording, render, zoo
from discovery.mock.fault import Fault, Kind
from driver.publish import devices
from tests.fakes import mockmachine
from tests.machines.attributes import HEALTHY

OPTIONS = devices.PublishOptions(driver_name="gpu.nearfield.dev", numa_list=True, pcie_switches=True)


@pytest.mark.parametrize("name", HEALTHY)
def test_the_lowest_gpu_of_its_groups_dies_and_nothing_else_changes(
    name: str, seen: Mapping[str, model.Snapshot], tmp_path: Path
) -> None:
    """The lowest, as its address is the name of its groups; so it is the one that others could lose most by."""
    healthy = seen[name]
    lost = healthy.gpus[0].address
    machine = zoo.load(name)
    for kind in (Kind.GPU_LOST, Kind.VFIO_BOUND):
        snapshot = look(replace(machine, faults=(Fault(kind=kind, target=lost),)), tmp_path / kind)
        assert [gpu.state for gpu in snapshot.gpus if gpu.state is not model.GpuState.READY] == [
            model.GpuState.LOST if kind is Kind.GPU_LOST else model.GpuState.VFIO
        ]
        assert devices.build_devices(snapshot, options=OPTIONS) == tuple(
            device for device in devices.build_devices(healthy, options=OPTIONS) if device.address != lost
        )


def look(machine: recording.Recording, directory: Path) -> model.Snapshot:
    """What the prober sees of a machine."""
    return mockmachine.probed(render.render(machine, directory))
