# SPDX-License-Identifier: Apache-2.0
"""What is offered of GPUs that can be divided.

Aspects: what a partition says of itself, at most 28 things; names and order; architecture rules; our instances change
nothing; foreign ones take their part and no more; existing instances; what is withheld is said; servers without counters;
profiles by policy; a GPU that tells nonsense; record there and back.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from discovery import mig, model
from driver import values
from driver.publish import attributes, counters, devices, limits, slices, wire
from driver.sharing.rules import EXCLUSIVE, Fallback, Mode, Policy
from tests.fakes import migtables, publishing
from tests.fakes.migtables import ON, ampere, gpu, instance

DYNAMIC = Policy(mode=Mode.MIG_DYNAMIC)
STATIC = Policy(mode=Mode.MIG_STATIC)
PLACE = slices.Place(driver_name=publishing.DRIVER, node_name=publishing.NODE)
OPTIONS = devices.PublishOptions(driver_name=publishing.DRIVER, numa_list=True, pcie_switches=True)


def offer(*gpus: model.Gpu, how: Policy = DYNAMIC, **more: Any) -> devices.Offer:
    policies = {each.address: how for each in gpus}
    return devices.build_offer(publishing.snapshot(*gpus), options=publishing.OPTIONS, policies=policies, **more)


def codes(offered: devices.Offer) -> list[str]:
    return [finding.code for finding in offered.findings]


def by_name(offered: devices.Offer) -> dict[str, devices.Device]:
    return {device.name: device for device in offered.devices}


def name(bus: int, profile: str, profile_id: int, start: int) -> str:
    return values.partition_device_name(publishing.at(bus), profile=profile, profile_id=profile_id, start=start)


def test_a_whole_gpu_and_every_profile_at_every_placement() -> None:
    offered = offer(gpu(0x1B))
    assert offered.findings == ()
    whole, *parts = offered.devices
    assert whole.name == "gpu-0000-1b-00-0"
    assert len(parts) == 25
    assert len(by_name(offered)) == 26
    assert [part.name for part in parts[:8]] == [
        *(f"gpu-0000-1b-00-0-mig-1g-10gb-19-{start}" for start in range(6, -1, -1)),
        "gpu-0000-1b-00-0-mig-1g-10gb-me-20-6",
    ]
    totals = counters.totals(migtables.H100)
    assert whole.consumes == counters.Consumption(counter_set=whole.name, counters=totals, totals=totals)
    for part in parts:
        assert part.consumes is not None
        assert (part.consumes.counter_set, part.consumes.totals) == (whole.name, totals)


def test_the_whole_gpu_says_the_same_whatever_its_policy() -> None:
    (alone,) = offer(gpu(0x1B), how=EXCLUSIVE).devices
    whole = offer(gpu(0x1B)).devices[0]
    assert (whole.attributes, whole.capacity) == (alone.attributes, alone.capacity)
    assert alone.consumes is None


def complete() -> tuple[model.Gpu, model.Snapshot]:
    """A GPU of which everything is known that can be published."""
    groups = model.GpuGroups(
        nvlink_domain=publishing.at(1),
        nvlink_clique=publishing.at(1),
        aligned_pair=publishing.at(1),
        aligned_quad=publishing.at(1),
    )
    nic = model.NicPairing(address=publishing.at(0x20), name="mlx5_0", distance=model.PathClass.PIX, rail=3)
    fabric = model.Fabric(state="completed", cluster_uuid="6d2f7a5e-0000-0000-0000-000000000001", clique_id=1)
    pci = {"cpu_socket": 0, "switch": publishing.at(0x19), "switches": (publishing.at(0x19), publishing.at(0x18))}
    made = gpu(0x1B, groups=groups, nic=nic, fabric=fabric, pci=pci)
    return made, publishing.snapshot(made)


def test_a_part_says_less_than_its_gpu_and_never_more_than_28_things() -> None:
    made, snapshot = complete()
    there = replace(made, mig_mode=ON, mig_instances=(instance(1, 6),))
    (static,) = devices.build_devices(
        replace(snapshot, gpus=(there,)), options=OPTIONS, policies={made.address: STATIC}
    )
    whole, part, *_ = devices.build_devices(snapshot, options=OPTIONS, policies={made.address: DYNAMIC})
    assert static.name == part.name == name(0x1B, "1g.10gb", 19, 6)
    assert static.attributes.keys() - part.attributes.keys() == {"uuid"}
    assert whole.attributes.keys() - part.attributes.keys() == {
        "uuid",
        "nvlinkDomain",
        "nvlinkClique",
        "fabricClique",
        "alignedPair",
        "alignedQuad",
        "rail",
    }
    assert part.attributes.keys() - whole.attributes.keys() == {"parentUUID", "profile"}
    for device in (whole, part, static):
        assert len(device.attributes) + len(device.capacity) <= attributes.MOST
    assert len(static.attributes) + len(static.capacity) == attributes.MOST


def test_the_parts_of_a_3g() -> None:
    part = by_name(offer(gpu(0x1B)))[name(0x1B, "3g.40gb", 9, 4)]
    assert {key: part.attributes[key] for key in ("type", "profile", "parentUUID", "productName")} == {
        "type": "mig",
        "profile": "3g.40gb",
        "parentUUID": "GPU-0000001b-0000-0000-0000-000000000000",
        "productName": "NVIDIA H100 80GB HBM3",
    }
    assert (part.attributes["memoryEnforcement"], part.attributes["computeEnforcement"]) == ("mig", "mig")
    assert set(attributes.MIG_DESCRIPTIONS) <= part.attributes.keys()
    assert part.capacity == {
        "memory": 40000 << 20,
        "compute": 45,
        "multiprocessors": 60,
        "copyEngines": 3,
        "decoders": 3,
        "encoders": 0,
        "jpegEngines": 3,
        "ofaEngines": 0,
    }


def test_wholes_and_parts_stand_at_opposite_ends() -> None:
    offered = offer(gpu(0x1B), gpu(0x43), gpu(0x52))
    names = publishing.names(offered.devices)
    assert names[:3] == ["gpu-0000-1b-00-0", "gpu-0000-43-00-0", "gpu-0000-52-00-0"]
    owners = list(dict.fromkeys(map(values.gpu_of, names[3:])))
    assert owners == ["gpu-0000-52-00-0", "gpu-0000-43-00-0", "gpu-0000-1b-00-0"]


@pytest.mark.parametrize(
    ("made", "wholes", "parts"),
    [
        (gpu(1), 1, 25),
        (gpu(1, mig_mode=ON, mig_instances=()), 1, 25),
        (ampere(1), 1, 0),
        (ampere(1, mig_mode=ON, mig_instances=()), 0, 25),
        (gpu(1, architecture=None), 1, 0),
        (gpu(1, architecture="Blackwell", mig_profiles=migtables.RTX, multiprocessors=188), 1, 21),
        (gpu(1, mig_mode=None, mig_profiles=()), 1, 0),
    ],
    ids=["hopper", "hopper-on", "ampere", "ampere-on", "unknown", "blackwell", "no-mig"],
)
def test_what_each_architecture_offers(made: model.Gpu, wholes: int, parts: int) -> None:
    offered = offer(made)
    found = [device.attributes["type"] for device in offered.devices]
    assert (found.count("gpu"), found.count("mig")) == (wholes, parts)
    if not parts:
        assert all(device.consumes is None for device in offered.devices)


@pytest.mark.parametrize("mode", [migtables.OFF, ON, model.MigMode(current=True, pending=False)])
def test_what_the_agent_makes_and_removes_changes_nothing(mode: model.MigMode) -> None:
    before = offer(gpu(0x1B))
    made = (instance(3, 0), instance(2, 4, 9, size=4, compute_instance=None, uuid=None))
    ours = {name(0x1B, "1g.10gb", 19, 0), name(0x1B, "3g.40gb", 9, 4)}
    now = gpu(0x1B, mig_mode=mode, mig_instances=made if mode.current else None)
    assert offer(now, ours=ours) == before


def test_a_foreign_instance_takes_its_part_and_what_it_excludes() -> None:
    foreign = instance(2, 4, 9, size=4)
    offered = offer(gpu(0x1B, mig_mode=ON, mig_instances=(foreign,)))
    assert codes(offered) == ["mig-instance-foreign"]
    assert "3g.40gb (GPU instance 2, memory slices from 4, MIG-" in offered.findings[0].message
    left = [(device.attributes["profile"], device.name.rpartition("-")[2]) for device in offered.devices]
    assert left == [
        *(("1g.10gb", str(start)) for start in (3, 2, 1, 0)),
        *(("1g.10gb+me", str(start)) for start in (3, 2, 1, 0)),
        *(("1g.20gb", str(start)) for start in (2, 0)),
        *(("2g.20gb", str(start)) for start in (2, 0)),
        ("3g.40gb", "0"),
        ("4g.40gb", "0"),
    ]
    (totals,) = {tuple(device.consumes.totals.items()) for device in offered.devices if device.consumes is not None}
    assert dict(totals) == counters.left(
        counters.totals(migtables.H100), [counters.taken(migtables.H100[4], foreign.placement, dict(totals))]
    )
    assert offered.full == {"gpu-0000-1b-00-0": counters.totals(migtables.H100)}


def test_a_foreign_instance_with_the_only_engine_makes_other_profiles_impossible() -> None:
    offered = offer(gpu(0x1B, mig_mode=ON, mig_instances=(instance(2, 6, 20),)))
    profiles = {device.attributes["profile"] for device in offered.devices}
    assert profiles == {"1g.10gb", "1g.20gb", "2g.20gb", "3g.40gb", "4g.40gb"}


def test_a_foreign_instance_of_an_unknown_profile_takes_its_slices() -> None:
    offered = offer(gpu(0x1B, mig_mode=ON, mig_instances=(instance(2, 0, 99, size=7),)))
    assert "its profile is not known" in offered.findings[0].message
    assert [device.name for device in offered.devices] == []
    half = offer(gpu(0x1B, mig_mode=ON, mig_instances=(instance(2, 0, 99, size=4),)))
    assert {device.name.rpartition("-")[2] for device in half.devices} == {"4", "5", "6"}


def test_an_instance_at_a_place_of_ours_with_another_profile_is_foreign() -> None:
    offered = offer(gpu(0x1B, mig_mode=ON, mig_instances=(instance(2, 0, 20),)), ours={name(0x1B, "1g.10gb", 19, 0)})
    assert codes(offered) == ["mig-instance-foreign"]


def test_instances_that_somebody_made_are_offered_by_themselves() -> None:
    made = gpu(
        0x1B,
        mig_mode=ON,
        mig_instances=(instance(2, 0, 9, size=4), instance(7, 4), instance(8, 5, 20), instance(9, 6)),
    )
    offered = offer(made, how=STATIC)
    assert offered.findings == ()
    assert publishing.names(offered.devices) == [
        name(0x1B, "1g.10gb", 19, 6),
        name(0x1B, "1g.10gb", 19, 4),
        name(0x1B, "1g.10gb+me", 20, 5),
        name(0x1B, "3g.40gb", 9, 0),
    ]
    assert all(device.consumes is None for device in offered.devices)
    assert offered.devices[0].attributes["uuid"] == "MIG-00000009-0006-0000-0000-000000000000"


def test_instances_that_cannot_be_handed_out_are_said() -> None:
    made = gpu(
        0x1B,
        mig_mode=ON,
        mig_instances=(instance(7, 4, compute_instance=None, uuid=None), instance(8, 5, 99), instance(9, 6)),
    )
    offered = offer(made, how=STATIC)
    assert publishing.names(offered.devices) == [name(0x1B, "1g.10gb", 19, 6)]
    assert codes(offered) == ["mig-instance-not-offered"], "the other one is said with the GPU"
    assert "of profile 99 (GPU instance 8" in offered.findings[0].message


def test_mig_without_instances_is_said_once() -> None:
    """Under mig-static it is said with the policy (mig-no-instances)."""
    divided = gpu(0x1B, mig_mode=ON, mig_instances=())
    assert offer(divided, how=STATIC) == devices.Offer(devices=())
    offered = offer(divided, how=EXCLUSIVE)
    assert (offered.devices, codes(offered)) == ((), ["mig-enabled"])
    assert "-mig 0" in offered.findings[0].message


def test_instances_that_could_not_be_read_are_not_said_to_be_none() -> None:
    offered = offer(gpu(0x1B, mig_mode=ON, mig_instances=None), how=STATIC)
    assert (offered.devices, codes(offered)) == ((), ["mig-not-divided"])


def test_static_without_mig_offers_nothing() -> None:
    assert offer(gpu(0x1B), how=STATIC).devices == ()


@pytest.mark.parametrize("changes", [{"multiprocessors": None}, {"multiprocessors": 0}, {"mig_profiles": ()}])
def test_a_gpu_that_cannot_be_counted_is_whole_while_mig_is_off(changes: Mapping[str, Any]) -> None:
    offered = offer(gpu(0x1B, **changes))
    assert codes(offered) == ["mig-not-divided"]
    (whole,) = offered.devices
    assert whole.consumes is None
    assert offer(gpu(0x1B, mig_mode=ON, **changes)).devices == ()


def test_profiles_are_chosen_by_the_policy() -> None:
    how = replace(DYNAMIC, profiles=("1g.10gb", "3g*"))
    found = [device.attributes.get("profile") for device in offer(gpu(0x1B), how=how).devices]
    assert found == [None, *["1g.10gb"] * 7, *["3g.40gb"] * 2]
    (whole,) = offer(gpu(0x1B), how=replace(DYNAMIC, profiles=("9g*",))).devices
    assert whole.consumes is None


@pytest.mark.parametrize(("fallback", "wholes"), [(Fallback.WHOLE, 1), (Fallback.NONE, 0)])
def test_a_server_without_counters_gets_whole_gpus_or_nothing(fallback: Fallback, wholes: int) -> None:
    mixed = (gpu(0x1B), gpu(0x43))
    policies = {mixed[0].address: replace(DYNAMIC, fallback=fallback)}
    offered = devices.build_devices(
        publishing.snapshot(*mixed), options=publishing.OPTIONS, policies=policies, counters=False
    )
    assert publishing.names(offered) == [*["gpu-0000-1b-00-0"][:wholes], "gpu-0000-43-00-0"]
    assert all(device.consumes is None for device in offered)


def test_instances_without_counters_stand_on_any_server() -> None:
    made = gpu(0x1B, mig_mode=ON, mig_instances=(instance(9, 6),))
    assert len(offer(made, how=STATIC, counters=False).devices) == 1


def test_the_record_keeps_what_parts_consume() -> None:
    for device in offer(gpu(0x1B)).devices:
        assert wire.published_from_json(device.name, wire.published_to_json(device)) == device
    old = wire.published_to_json(offer(gpu(0x1B), how=EXCLUSIVE).devices[0])
    assert old.keys() == {"address", "attributes", "capacity"}
    read = wire.published_from_json("x", old)
    assert (read.mode, read.consumes, read.uncounted) == (Mode.EXCLUSIVE, None, False)


@pytest.mark.parametrize(
    "consumes",
    [
        {},
        [],
        {"counterSet": "s", "counters": {}, "totals": {"a": 1}},
        {"counterSet": "s", "counters": {"a": 1}, "totals": {}},
        {"counterSet": "s", "counters": {"a": -1}, "totals": {"a": 1}},
        {"counterSet": "s", "counters": {"a": True}, "totals": {"a": 1}},
        {"counterSet": "s", "counters": ["a"], "totals": {"a": 1}},
    ],
)
def test_a_damaged_record_is_refused(consumes: object) -> None:
    body = wire.published_to_json(offer(gpu(0x1B)).devices[0]) | {"consumes": consumes}
    with pytest.raises(ValueError, match="device x"):
        wire.published_from_json("x", body)


def test_a_mode_that_nobody_knows_is_refused() -> None:
    body = wire.published_to_json(offer(gpu(0x1B)).devices[0]) | {"mode": "halves"}
    with pytest.raises(ValueError, match="halves"):
        wire.published_from_json("x", body)


def sixteen() -> tuple[model.Gpu, ...]:
    return tuple(gpu(bus) for bus in range(0x10, 0x20))


def test_sixteen_gpus_publish_within_every_limit() -> None:
    bodies = slices.build_slices(offer(*sixteen()).devices, place=PLACE)
    assert limits.violations(bodies) == ()
    assert [len(body["spec"].get("devices", ())) for body in bodies] == [64] * 6 + [32, 0, 0]
    assert [len(body["spec"].get("sharedCounters", ())) for body in bodies] == [0] * 7 + [8, 8]
    assert all(("devices" in body["spec"]) is not ("sharedCounters" in body["spec"]) for body in bodies)
    # etcd refuses what is above 1.5 MiB, and a replica of the API server reads all of it.
    assert max(len(str(body)) for body in bodies) < 150_000


def test_an_instance_beyond_the_places_that_are_known_adds_no_counters() -> None:
    offered = offer(gpu(0x1B, mig_mode=ON, mig_instances=(instance(5, 28, 99, size=40),)))
    assert limits.violations(slices.build_slices(offered.devices, place=PLACE)) == ()
    assert len(offered.devices) == 25
    for device in offered.devices:
        assert device.consumes is not None
        assert device.consumes.totals == counters.totals(migtables.H100)


NONSENSE = st.builds(
    mig.MigProfile,
    id=st.integers(0, 4),
    number=st.just(0),
    compute_number=st.just(0),
    name=st.sampled_from(["1g.5gb", "1g.5gb+me", "", "x" * 80, "7g.80gb", "Ü"]),
    slices=st.integers(0, 8),
    memory_bytes=st.integers(0, 1 << 40),
    multiprocessors=st.integers(0, 200),
    copy_engines=st.integers(0, 9),
    decoders=st.integers(0, 9),
    ofa_engines=st.integers(0, 1),
    instances=st.integers(0, 9),
    placements=st.lists(st.builds(mig.MigPlacement, start=st.integers(0, 40), size=st.integers(0, 9)), max_size=6).map(
        tuple
    ),
)
FOREIGN = st.builds(instance, st.integers(0, 9), st.integers(0, 40), st.integers(0, 6), size=st.integers(0, 9))


@settings(max_examples=150, deadline=None)
@given(st.lists(NONSENSE, max_size=6), st.lists(FOREIGN, max_size=4), st.booleans(), st.sampled_from([DYNAMIC, STATIC]))
def test_whatever_nvml_says_the_slices_are_valid(
    profiles: list[mig.MigProfile], foreign: list[mig.MigInstance], enabled: bool, how: Policy
) -> None:
    made = gpu(
        0x1B,
        mig_mode=ON if enabled else migtables.OFF,
        mig_profiles=tuple(profiles),
        mig_instances=tuple(foreign) if enabled else None,
    )
    offered = offer(made, gpu(0x43), how=how)
    assert limits.violations(slices.build_slices(offered.devices, place=PLACE)) == ()
    for device in offered.devices:
        if device.consumes is not None:
            assert counters.fits(device.consumes.counters, device.consumes.totals)
            assert min(device.consumes.totals.values()) >= 0
