# SPDX-License-Identifier: Apache-2.0
"""Devices that are given out in shares.

Aspects: what a whole GPU and an instance say of themselves; the capacities that a claim consumes and how; what an instance that
is too small says; order among devices that one claim has alone; what is offered where no shares are kept, by fallback; what
the record keeps, and what it does not take; every division that can be written down passes the API.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from discovery import mig, model
from driver.publish import absent, devices, limits, slices, wire
from driver.sharing import shares
from driver.sharing.rules import EXCLUSIVE, Fallback, Mode, Policy
from tests.fakes import migtables, publishing
from tests.fakes.migtables import instance

GIB = 1 << 30
SHARES = shares.Shares(
    memory_step=GIB, compute_step=5, max_sharers=8, memory=shares.Memory.NONE, compute=shares.Compute.NONE
)
BY_CGROUP = shares.Enforcement(memory=shares.Memory.CGROUP, compute=shares.Compute.MPS)
COOPERATIVE = shares.Enforcement(memory=shares.Memory.COOPERATIVE, compute=shares.Compute.COOPERATIVE)
TURNS = shares.Enforcement(memory=shares.Memory.NONE, compute=shares.Compute.TIMESLICE)
BIG = instance(1, 4, 9, size=4)
SHARED = Policy(mode=Mode.SHARES, shares=SHARES, enforcement=BY_CGROUP)
INSTANCES = Policy(mode=Mode.MIG_STATIC, shares=SHARES, enforcement=COOPERATIVE)
PLACE = slices.Place(driver_name=publishing.DRIVER, node_name=publishing.NODE)


def offer(*gpus: tuple[model.Gpu, Policy]) -> devices.Offer:
    return devices.build_offer(
        publishing.snapshot(*(gpu for gpu, _ in gpus)),
        options=publishing.OPTIONS,
        policies={gpu.address: how for gpu, how in gpus},
    )


def one(gpu: model.Gpu, how: Policy) -> devices.Device:
    (device,) = offer((gpu, how)).devices
    return device


def divided(bus: int, *there: mig.MigInstance) -> model.Gpu:
    return migtables.gpu(bus, mig_mode=migtables.ON, mig_instances=there)


def body(device: devices.Device) -> dict[str, Any]:
    return wire.device_to_json(device, driver_name=publishing.DRIVER)


def test_a_whole_gpu_in_shares() -> None:
    device = one(publishing.gpu(0x1B), SHARED)
    said = body(device)
    assert said["allowMultipleAllocations"] is True
    assert said["capacity"] == {
        "compute": {
            "value": "100",
            "requestPolicy": {"default": "100", "validRange": {"min": "5", "max": "100", "step": "5"}},
        },
        "memory": {
            "value": "81559Mi",
            "requestPolicy": {"default": "79Gi", "validRange": {"min": "1Gi", "max": "79Gi", "step": "1Gi"}},
        },
        "shares": {"value": "8", "requestPolicy": {"default": "1", "validValues": ["1"]}},
    }
    assert (device.attributes["memoryEnforcement"], device.attributes["computeEnforcement"]) == ("cgroup", "mps")
    assert (device.mode, device.shares, device.enforcement) == (Mode.SHARES, SHARES, BY_CGROUP)
    alone = one(publishing.gpu(0x1B), EXCLUSIVE)
    assert device.attributes.keys() == alone.attributes.keys()
    assert "allowMultipleAllocations" not in body(alone)


def test_what_is_not_asked_for_may_be_a_number() -> None:
    device = one(publishing.gpu(0x1B), replace(SHARED, shares=replace(SHARES, default_compute=25, max_sharers=1)))
    said = body(device)["capacity"]
    assert said["compute"]["requestPolicy"]["default"] == "25"
    assert said["shares"] == {"value": "1", "requestPolicy": {"default": "1", "validValues": ["1"]}}
    assert limits.violations(slices.build_slices([device], place=PLACE)) == ()


def test_where_shares_take_turns_there_is_no_compute() -> None:
    device = one(publishing.gpu(0x1B), replace(SHARED, enforcement=TURNS))
    assert body(device)["capacity"].keys() == {"memory", "shares"}
    assert device.attributes["computeEnforcement"] == "timeslice"


def test_instances_in_shares() -> None:
    """3g.40gb has 60 of the 132 multiprocessors."""
    found = offer((divided(0x1B, BIG), INSTANCES))
    (device,) = found.devices
    assert found.findings == ()
    compute = body(device)["capacity"]["compute"]
    assert compute == {
        "value": "45",
        "requestPolicy": {"default": "45", "validRange": {"min": "5", "max": "45", "step": "5"}},
    }
    assert body(device)["capacity"].keys() == {"memory", "compute", "shares"}
    assert (device.attributes["memoryEnforcement"], device.mode) == ("cooperative", Mode.MIG_STATIC)


def test_an_instance_of_less_than_two_steps_is_for_one_claim() -> None:
    coarse = replace(INSTANCES, shares=replace(SHARES, compute_step=25))
    found = offer((divided(0x1B, BIG), coarse))
    (device,) = found.devices
    assert (device.terms, device.attributes["memoryEnforcement"]) == (None, "mig")
    assert (device.shares, device.enforcement) == (coarse.shares, COOPERATIVE)
    assert [finding.code for finding in found.findings] == ["share-too-large"]
    assert "copyEngines" in device.capacity
    assert found.unshared is None


def test_what_is_shared_comes_last_and_instances_before_gpus() -> None:
    found = offer(
        (publishing.gpu(0x10), SHARED),
        (publishing.gpu(0x20), EXCLUSIVE),
        (divided(0x30, BIG), INSTANCES),
        (divided(0x40, BIG), Policy(mode=Mode.MIG_STATIC)),
        (publishing.gpu(0x50), SHARED),
        (publishing.gpu(0x60), EXCLUSIVE),
    )
    order = [device.address.bus for device in found.devices]
    assert order == [0x20, 0x60, 0x40, 0x30, 0x10, 0x50]
    assert found.unshared is not None
    assert [device.address.bus for device in found.unshared] == [0x10, 0x20, 0x50, 0x60, 0x40, 0x30]


@pytest.mark.parametrize("fallback", list(Fallback))
def test_what_is_offered_where_no_shares_are_kept(fallback: Fallback) -> None:
    gpus = publishing.gpu(0x10), divided(0x30, BIG)
    found = offer(
        (gpus[0], replace(SHARED, fallback=fallback)),
        (gpus[1], replace(INSTANCES, fallback=fallback)),
    )
    alone = offer((gpus[0], EXCLUSIVE), (gpus[1], Policy(mode=Mode.MIG_STATIC))).devices
    assert found.unshared == (alone if fallback is Fallback.WHOLE else ())


def test_nothing_else_is_offered_where_nothing_is_shared() -> None:
    assert offer((publishing.gpu(0x10), EXCLUSIVE)).unshared is None


@pytest.mark.parametrize(
    "device",
    [
        one(publishing.gpu(0x1B), SHARED),
        one(publishing.gpu(0x1B), replace(SHARED, enforcement=TURNS)),
        one(publishing.gpu(0x1B), replace(SHARED, shares=replace(SHARES, default_compute=25))),
        one(divided(0x1B, BIG), INSTANCES),
        one(divided(0x1B, BIG), replace(INSTANCES, shares=replace(SHARES, compute_step=25))),
        one(publishing.gpu(0x1B), EXCLUSIVE),
    ],
)
def test_the_record_keeps_it(device: devices.Device) -> None:
    kept, wrong = absent.from_json(absent.to_json({device.name: device}))
    assert (kept, wrong) == ({device.name: device}, ())


def test_what_the_record_says_of_shares() -> None:
    """Others read it, and versions of the agent after this one."""
    kept = wire.published_to_json(one(publishing.gpu(0x1B), SHARED))
    assert (kept["mode"], kept["enforcement"]) == ("shares", {"memory": "cgroup", "compute": "mps"})
    assert kept["shares"] == {
        "memoryStep": GIB,
        "computeStep": 5,
        "maxSharers": 8,
        "memory": "none",
        "compute": "none",
        "timeSlice": "default",
    }


def _without(kept: dict[str, Any], *path: str) -> dict[str, Any]:
    first, *rest = path
    if rest:
        return {**kept, first: _without(kept[first], *rest)}
    return {key: value for key, value in kept.items() if key != first}


def _with(kept: dict[str, Any], value: object, *path: str) -> dict[str, Any]:
    first, *rest = path
    return {**kept, first: _with(kept[first], value, *rest) if rest else value}


@pytest.mark.parametrize(
    "path",
    [
        ("enforcement",),
        ("shares",),
        ("shares", "memoryStep"),
        ("shares", "timeSlice"),
        ("enforcement", "compute"),
        ("capacity", "memory"),
        ("capacity", "memory", "requestPolicy"),
        ("capacity", "compute", "requestPolicy", "validRange", "max"),
        ("capacity", "shares", "value"),
    ],
)
@pytest.mark.parametrize("value", [None, 0, -1, True, "x", "1.5", [], {}])
def test_the_record_may_say_anything(path: tuple[str, ...], value: object) -> None:
    """An entry of another shape is left out, with its reason, and no other with it."""
    device, other = one(publishing.gpu(0x1B), SHARED), one(publishing.gpu(0x43), EXCLUSIVE)
    kept = absent.to_json({device.name: device, other.name: other})
    for broken in (_without(kept[device.name], *path), _with(kept[device.name], value, *path)):
        read, wrong = absent.from_json({**kept, device.name: broken})
        assert read == {other.name: other}
        assert device.name in wrong[0]


DIVISIONS = st.builds(
    shares.Shares,
    memory_step=st.integers(1, 200 << 10).map(lambda mebibytes: mebibytes << 20),
    compute_step=st.sampled_from([step for step in range(1, 101) if 100 % step == 0]),
    max_sharers=st.integers(1, 128),
    memory=st.just(shares.Memory.NONE),
    compute=st.just(shares.Compute.NONE),
    default_compute=st.none() | st.integers(1, 100),
)


@settings(max_examples=300)
@given(division=DIVISIONS, memory_bytes=st.integers(1, 1 << 50), turns=st.booleans())
def test_every_division_passes_the_api(division: shares.Shares, memory_bytes: int, *, turns: bool) -> None:
    if division.default_compute is not None:
        whole = -(-division.default_compute // division.compute_step) * division.compute_step
        division = replace(division, default_compute=whole)
    how = Policy(mode=Mode.SHARES, shares=division, enforcement=TURNS if turns else BY_CGROUP)
    device = one(publishing.gpu(0x1B, memory_bytes=memory_bytes), how)
    assert limits.violations(slices.build_slices([device], place=PLACE)) == ()
    read, wrong = absent.from_json(absent.to_json({device.name: device}))
    assert (read, wrong) == ({device.name: device}, ())


def test_a_capacity_that_the_first_claim_takes_whole_is_not_sent() -> None:
    (made,) = slices.build_slices([one(publishing.gpu(0x1B), SHARED)], place=PLACE)
    del made["spec"]["devices"][0]["capacity"]["memory"]["requestPolicy"]
    (wrong,) = limits.violations([made])
    assert "memory].requestPolicy.default: without it the first claim takes all" in wrong
    assert limits.slice_violations(made) == ()


@pytest.mark.parametrize("capacity", [None, [], {}, {"memory": None}, {"memory": {"requestPolicy": []}}, "x"])
def test_any_capacity_gets_an_answer(capacity: object) -> None:
    (made,) = slices.build_slices([one(publishing.gpu(0x1B), SHARED)], place=PLACE)
    made["spec"]["devices"][0]["capacity"] = capacity
    limits.violations([made])
