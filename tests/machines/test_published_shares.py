# SPDX-License-Identifier: Apache-2.0
"""What machines publish of GPUs, and of MIG instances, that are given out in shares. `shared.txt` has the memory of each product, and
of each instance that stands on a machine, with what steps of 1 GiB and 5 percent make of it.

Aspects: the table; every machine under every kind of shares is valid, says all that it must, keeps what people select by, and
offers to one claim the same as without shares.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from discovery import model
from discovery.mock import zoo
from driver.publish import attributes, devices, limits, slices, wire
from driver.sharing import rules, shares
from tests.machines.attributes import DIVIDED

TABLE = Path(__file__).parent / "shared.txt"
OPTIONS = devices.PublishOptions(driver_name="gpu.nearfield.dev")
ALL_LISTS = devices.PublishOptions(driver_name="gpu.nearfield.dev", numa_list=True, pcie_switches=True)
PLACE = slices.Place(driver_name="gpu.nearfield.dev", node_name="n1")
GIB = 1 << 30
USUAL = shares.Shares(
    memory_step=GIB, compute_step=5, max_sharers=8, memory=shares.Memory.NONE, compute=shares.Compute.NONE
)
KINDS = {
    "usual": USUAL,
    "fine": replace(USUAL, memory_step=1 << 20, compute_step=1, max_sharers=128, default_compute=1),
    "coarse": replace(USUAL, memory_step=7 * GIB, compute_step=50, max_sharers=1),
}
BY_MPS = shares.Enforcement(memory=shares.Memory.CGROUP, compute=shares.Compute.MPS)
TURNS = shares.Enforcement(memory=shares.Memory.CGROUP, compute=shares.Compute.TIMESLICE)
Seen = Mapping[str, model.Snapshot]


def offer(
    seen: model.Snapshot,
    mode: rules.Mode,
    division: shares.Shares | None = USUAL,
    enforcement: shares.Enforcement = BY_MPS,
    how: devices.PublishOptions = OPTIONS,
) -> devices.Offer:
    policy = rules.Policy(mode=mode, shares=division, enforcement=enforcement if division is not None else None)
    return devices.build_offer(seen, options=how, policies={gpu.address: policy for gpu in seen.gpus})


def row(device: devices.Device) -> tuple[str, ...]:
    """As it stands in the table."""
    said = wire.device_to_json(device, driver_name=OPTIONS.driver_name)["capacity"]
    bounds = {name: said[name]["requestPolicy"]["validRange"]["max"] for name in ("memory", "compute")}
    mebibytes = device.capacity["memory"] / (1 << 20)
    what = device.attributes.get("profile", "whole")
    product = str(device.attributes["productName"]).replace(" ", "_")
    return product, str(what), f"{mebibytes:g}", bounds["memory"], said["compute"]["value"], bounds["compute"]


def written() -> list[tuple[str, ...]]:
    lines = TABLE.read_text(encoding="utf-8").splitlines()
    return [tuple(line.split()) for line in lines if line and not line.startswith("#")]


def products(name: str) -> Iterator[tuple[str, str]]:
    """The products of a machine, and the MIG profiles of the instances that stand on it, as its description has them."""
    nvml = zoo.load(name).nvml
    for gpu in nvml.gpus if nvml is not None else ():
        product = str(gpu.name).replace(" ", "_")
        yield product, "whole"
        if gpu.mig is not None:
            profiles = {profile.id: profile.name for profile in gpu.mig.profiles}
            yield from ((product, profiles[instance.profile_id]) for instance in gpu.mig.instances)


@pytest.mark.parametrize("name", zoo.names())
def test_the_table(name: str, seen: Seen) -> None:
    """One test a machine, as each takes long to read."""
    found = {row(device) for device in offer(seen[name], rules.Mode.SHARES).devices}
    if name in DIVIDED:
        found |= {row(device) for device in offer(seen[name], rules.Mode.MIG_STATIC).devices if device.terms}
    assert found <= set(written())
    assert found or not any(gpu.state is model.GpuState.READY for gpu in seen[name].gpus)


def test_the_table_has_one_row_of_each_product_and_instance() -> None:
    """And so none that no machine has."""
    assert sorted(line[:2] for line in written()) == sorted({each for name in zoo.names() for each in products(name)})


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())
@pytest.mark.parametrize("name", zoo.names())
def test_a_machine_in_shares(name: str, kind: shares.Shares, seen: Seen) -> None:
    for mode in (rules.Mode.SHARES, rules.Mode.MIG_STATIC) if name in DIVIDED else (rules.Mode.SHARES,):
        alone = offer(seen[name], rules.Mode.EXCLUSIVE if mode is rules.Mode.SHARES else mode, None)
        for enforcement in (BY_MPS, TURNS):
            found = offer(seen[name], mode, kind, enforcement)
            shared = [device for device in found.devices if device.terms is not None]
            if shared:
                assert found.unshared == alone.devices
            every_slice_is_valid(found)
            every_slice_is_valid(offer(seen[name], mode, kind, enforcement, ALL_LISTS))
            assert {device.name for device in found.devices} == {device.name for device in alone.devices}
            before = {device.name: device for device in alone.devices}
            for device in shared:
                says_the_same(device, before[device.name])
            if mode is rules.Mode.SHARES:
                assert len(shared) == len(found.devices)


def says_the_same(shared: devices.Device, alone: devices.Device) -> None:
    """But how it is given out."""
    own = {attributes.MEMORY_ENFORCEMENT, attributes.COMPUTE_ENFORCEMENT}
    assert {name: value for name, value in shared.attributes.items() if name not in own} == {
        name: value for name, value in alone.attributes.items() if name not in own
    }
    assert all(shared.capacity[name] == alone.capacity[name] for name in shared.capacity if name != "shares")
    assert shared.capacity.keys() <= {"memory", "compute", "shares"}


def every_slice_is_valid(offered: devices.Offer) -> None:
    bodies = slices.build_slices(offered.devices, place=PLACE)
    assert limits.violations(bodies) == ()
    for device in offered.devices:
        is_part = device.attributes["type"] == "mig"
        assert set(attributes.MIG_DESCRIPTIONS if is_part else attributes.DESCRIPTIONS) <= device.attributes.keys()
        assert len(device.attributes) + len(device.capacity) <= attributes.MOST
    said: list[dict[str, Any]] = [device for body in bodies for device in body["spec"].get("devices", [])]
    for entry in said:
        for capacity in entry["capacity"].values():
            assert ("requestPolicy" in capacity) == entry.get("allowMultipleAllocations", False)
