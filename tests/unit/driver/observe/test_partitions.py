# SPDX-License-Identifier: Apache-2.0
"""Whose MIG instances are, and what there is room for.

- ours, static and foreign; what was removed since the GPU was read is there no more, what was made since then is there
- room: by policy, by its patterns, by architecture; none on a GPU that is held whole, sick, or not divided by us
- a GPU that can be had whole: not one that is divided, even by somebody else
- a node: everything together
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from discovery import mig, model
from driver import values
from driver.observe import partitions
from driver.sharing import rules
from tests.fakes import divided, publishing

DYNAMIC = rules.Policy(mode=rules.Mode.MIG_DYNAMIC)
STATIC = rules.Policy(mode=rules.Mode.MIG_STATIC)
ONE = publishing.at(1)
WHOLE = values.gpu_device_name(ONE)
SMALL = f"{WHOLE}-mig-1g-10gb-19-0"
HALF = f"{WHOLE}-mig-3g-40gb-9-4"


def shared(policy: rules.Policy, *released: str) -> partitions.Sharing:
    return partitions.Sharing(policies={ONE: policy, publishing.at(2): policy}, released=frozenset(released))


def origins(gpu: model.Gpu, policy: rules.Policy, *held: str, released: tuple[str, ...] = ()) -> dict[str, str]:
    found = partitions.instances(gpu, sharing=shared(policy, *released), held=held)
    return {entry.device.removeprefix(WHOLE): entry.origin for entry in found}


def placeable(gpu: model.Gpu, policy: rules.Policy, *held: str) -> dict[str, int] | None:
    found = partitions.left(gpu, sharing=shared(policy), held=held)
    names = {profile.id: profile.name for profile in gpu.mig_profiles}
    return None if found is None else {names[number]: count for number, count in found.placeable.items() if count}


def test_whose_an_instance_is() -> None:
    gpu = divided.gpu(1, divided.instance(19, 0), divided.instance(9, 4))
    assert origins(gpu, DYNAMIC, SMALL) == {"-mig-1g-10gb-19-0": "ours", "-mig-3g-40gb-9-4": "foreign"}
    assert origins(gpu, STATIC, SMALL) == {"-mig-1g-10gb-19-0": "static", "-mig-3g-40gb-9-4": "static"}
    assert origins(gpu, rules.EXCLUSIVE) == {"-mig-1g-10gb-19-0": "foreign", "-mig-3g-40gb-9-4": "foreign"}


def test_what_was_made_and_removed_since_the_look() -> None:
    gpu = divided.gpu(1, divided.instance(19, 0))
    assert origins(gpu, DYNAMIC, released=(SMALL,)) == {}
    assert origins(gpu, DYNAMIC, SMALL, released=(SMALL,)) == {"-mig-1g-10gb-19-0": "ours"}
    assert origins(divided.gpu(1, enabled=False), DYNAMIC, HALF) == {"-mig-3g-40gb-9-4": "ours"}
    assert origins(gpu, DYNAMIC, HALF.replace("01-00", "02-00"), released=(SMALL,)) == {}


def test_an_instance_of_an_unknown_profile() -> None:
    (found,) = partitions.instances(divided.gpu(1, divided.instance(77, 2, size=2)), sharing=shared(DYNAMIC), held=())
    assert (found.profile, found.origin, found.device) == ("other", "foreign", f"{WHOLE}-mig-other-77-2")


def test_room_by_policy() -> None:
    empty = divided.gpu(1)
    assert placeable(empty, rules.EXCLUSIVE) is None
    assert placeable(empty, STATIC) is None
    everything = {profile.name for profile in divided.H100}
    assert placeable(empty, DYNAMIC) == placeable(divided.gpu(1, enabled=False), DYNAMIC)
    assert set(placeable(empty, DYNAMIC) or ()) == everything
    assert placeable(empty, replace(DYNAMIC, profiles=("3g.*", "1g.10gb"))) == {"3g.40gb": 2, "1g.10gb": 7}
    assert placeable(empty, DYNAMIC, HALF) == placeable(divided.gpu(1, divided.instance(9, 4)), DYNAMIC)
    assert placeable(empty, DYNAMIC, WHOLE) == {}
    assert partitions.left(empty, sharing=shared(DYNAMIC), held=[WHOLE]) is not None
    assert placeable(divided.gpu(1, divided.instance(19, 0)), replace(DYNAMIC, profiles=("",))) is None


@pytest.mark.parametrize(
    ("changes", "whole", "parts"),
    [
        ({"architecture": "Ampere", "enabled": False}, True, False),
        ({"architecture": "Ampere", "enabled": True}, False, True),
        ({"architecture": None, "enabled": True}, False, True),
        ({"architecture": "Hopper", "enabled": False}, True, True),
        ({"architecture": "Blackwell", "enabled": True}, True, True),
        ({"state": model.GpuState.LOST}, False, False),
    ],
)
def test_room_by_architecture_and_state(changes: dict[str, object], whole: object, parts: object) -> None:
    gpu = divided.gpu(1, **changes)  # type: ignore[arg-type]
    assert (placeable(gpu, DYNAMIC) is not None) is parts
    assert partitions.free_whole(gpu, sharing=shared(DYNAMIC), held=()) is whole


def test_a_gpu_without_mig() -> None:
    gpu = publishing.gpu(1)
    assert placeable(gpu, DYNAMIC) is None
    assert partitions.instances(gpu, sharing=shared(DYNAMIC), held=[WHOLE]) == ()
    assert partitions.free_whole(gpu, sharing=shared(DYNAMIC), held=())
    assert not partitions.free_whole(gpu, sharing=shared(DYNAMIC), held=[WHOLE])
    assert list(partitions.slots(gpu, ())) == []


def test_a_gpu_that_can_be_had_whole() -> None:
    sharing = partitions.Sharing()
    assert partitions.free_whole(divided.gpu(1, enabled=False), sharing=sharing, held=())
    assert not partitions.free_whole(divided.gpu(1), sharing=sharing, held=())
    assert not partitions.free_whole(divided.gpu(1, enabled=False), sharing=shared(STATIC), held=())
    assert not partitions.free_whole(divided.gpu(1, divided.instance(19, 0)), sharing=shared(DYNAMIC), held=())
    assert not partitions.free_whole(divided.gpu(1), sharing=shared(DYNAMIC), held=[SMALL])


def test_a_node() -> None:
    snapshot = publishing.snapshot(
        divided.gpu(1, divided.instance(19, 6), divided.instance(19, 0)),
        divided.gpu(
            2, divided.instance(9, 0), divided.instance(19, 4), divided.instance(19, 5), divided.instance(19, 6)
        ),
        publishing.gpu(3),
    )
    found = partitions.count(snapshot, sharing=shared(DYNAMIC), held=[SMALL])
    assert found.instances == {("1g.10gb", "ours"): 1, ("1g.10gb", "foreign"): 4, ("3g.40gb", "foreign"): 1}
    assert found.placeable == {
        "7g.80gb": 0,
        "4g.40gb": 0,
        "3g.40gb": 0,
        "2g.20gb": 2,
        "1g.20gb": 2,
        "1g.10gb": 5,
        "1g.10gb+me": 1,
    }
    assert found.stranded == 2
    nothing = partitions.count(snapshot, sharing=partitions.Sharing(), held=())
    assert (nothing.placeable, nothing.stranded) == ({}, 0)


def test_the_slots_of_a_gpu() -> None:
    gpu = divided.gpu(1, divided.instance(9, 4), divided.instance(19, 1))
    there = partitions.instances(gpu, sharing=shared(DYNAMIC), held=())
    names = [entry.profile if entry is not None else "" for entry in partitions.slots(gpu, there)]
    assert names == ["", "1g.10gb", "", "", "3g.40gb", "3g.40gb", "3g.40gb", "3g.40gb"]
    beyond = partitions.instances(divided.gpu(1, divided.instance(77, 6, size=9)), sharing=shared(DYNAMIC), held=())
    assert [entry is not None for entry in partitions.slots(gpu, beyond)] == [False] * 6 + [True] * 2
    assert mig.memory_slices(gpu.mig_profiles) == 8
