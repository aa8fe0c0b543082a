# SPDX-License-Identifier: Apache-2.0
"""What every machine of the zoo offers: within all limits, uniform, and in an order that packs."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from discovery import child, model, options
from discovery.mock import render, zoo
from driver.publish import attributes, devices, limits, slices, wanted

OPTIONS = devices.PublishOptions(driver_name="gpu.nearfield.dev")
PLACE = slices.Place(driver_name="gpu.nearfield.dev", node_name="n1", node_uid="u")
MACHINES = zoo.names()
GROUPS = {attributes.ALIGNED_PAIR: 2, attributes.ALIGNED_QUAD: 4}
"""Keys that a GPU may lack that others have: where their number is odd, one is left over."""


def read(name: str, directory: Path) -> model.Snapshot:
    tree = render.render(zoo.load(name), directory)
    source = options.Source(sys=tree.sys, proc=tree.proc, dev=tree.dev, mock=tree.directory)
    prober = child.InProcessProber(source=source, options=options.ProbeOptions())
    try:
        return prober.probe(timeout_s=60.0)
    finally:
        prober.close()


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as made:
        yield Path(made)


@pytest.fixture(scope="module", params=MACHINES)
def snapshot(request: pytest.FixtureRequest, folder: Path) -> model.Snapshot:
    return read(request.param, folder / request.param)


@pytest.mark.parametrize("lists", [False, True])
def test_the_slices_pass_every_limit_of_the_api(snapshot: model.Snapshot, lists: bool) -> None:
    chosen = replace(OPTIONS, numa_list=lists, pcie_switches=lists)
    offered = devices.build_devices(snapshot, options=chosen)
    assert limits.violations(slices.build_slices(offered, place=PLACE)) == ()
    assert all(len(device.attributes) + len(device.capacity) <= 28 for device in offered)
    everything = tuple(replace(device, absent=True) for device in offered)
    assert limits.violations(slices.build_slices(everything, place=PLACE)) == ()


def test_every_ready_gpu_is_offered_and_nothing_is_odd(snapshot: model.Snapshot) -> None:
    now = wanted.from_snapshot(snapshot, options=OPTIONS)
    assert isinstance(now, wanted.Offering)
    ready = [gpu for gpu in snapshot.gpus if gpu.state is model.GpuState.READY]
    divided = {str(gpu.address) for gpu in ready if gpu.mig_mode is not None and gpu.mig_mode.current}
    assert len(now.offer.devices) == len(ready) - len(divided) > 0
    assert {(finding.code, finding.subject) for finding in now.offer.findings} == {
        ("mig-enabled", address) for address in divided
    }


def test_devices_of_a_machine_say_the_same_kinds_of_things(snapshot: model.Snapshot) -> None:
    offered = devices.build_devices(snapshot, options=OPTIONS)
    kinds = {
        tuple((name, type(value)) for name, value in device.attributes.items() if name not in GROUPS)
        for device in offered
    }
    assert len(kinds) == 1
    assert set(attributes.DESCRIPTIONS) <= set(offered[0].attributes)


def test_the_first_free_devices_are_whole_groups(snapshot: model.Snapshot) -> None:
    offered = devices.build_devices(snapshot, options=OPTIONS)
    for key, size in GROUPS.items():
        grouped = [device.attributes.get(key) for device in offered]
        if set(Counter(grouped).values()) == {
            size
        }:  # else a GPU is in no group, or its group is not whole: see docs/ordering.md
            assert all(len(set(grouped[start : start + size])) == 1 for start in range(0, len(grouped), size))
