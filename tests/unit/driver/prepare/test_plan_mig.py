# SPDX-License-Identifier: Apache-2.0
"""plan: parts of GPUs. Aspects: what is recorded and done, who overlaps whom, admin access, instances that somebody made, what is
made again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from discovery import mig, model
from driver.prepare import cdi, claims, ledger, plan
from tests.fakes import mighands, preparing
from tests.fakes.preparing import ADDRESSES, NAMES, part_name

REF, OTHER = preparing.ref(1), preparing.ref(2)
DIALECT = cdi.Dialect(driver=preparing.DRIVER, mock=False)
CAPS = tuple(mig.CapabilityNode(path=f"/dev/nvidia-caps/nvidia-cap{n}", major=237, minor=n) for n in (66, 67))


def divided(*, toggle: bool = True) -> dict[str, plan.Device | plan.NotThere]:
    index = preparing.FixedIndex()
    index.divide(toggle=toggle)
    return index.devices


DEVICES = divided()


def wanted(device: str, *, admin: bool = False) -> ledger.Result:
    return ledger.Result(request="gpu", pool=preparing.POOL, device=device, admin=admin)


def planned(
    *devices: str | ledger.Result,
    known: dict[str, plan.Device | plan.NotThere] = DEVICES,
    holders: Sequence[plan.Holder] = (),
) -> plan.PreparePlan | plan.Rejection:
    results = tuple(wanted(device) if isinstance(device, str) else device for device in devices)
    return plan.plan_prepare(
        claims.Allocation(claim=REF, results=results),
        devices=known,
        holders=holders,
        dialect=DIALECT,
        boot_id=preparing.BOOT_ID,
    )


def accepted(*devices: str | ledger.Result, **more: Any) -> plan.PreparePlan:
    answer = planned(*devices, **more)
    assert isinstance(answer, plan.PreparePlan), answer
    return answer


def refused(*devices: str | ledger.Result, **more: Any) -> plan.Rejection:
    answer = planned(*devices, **more)
    assert isinstance(answer, plan.Rejection), answer
    return answer


def held(name: str, *, boot_id: str = preparing.BOOT_ID, uuid: str = "MIG-1") -> list[plan.Holder]:
    device = DEVICES[name]
    gpu = device if isinstance(device, plan.GpuDevice) else device.gpu  # type: ignore[union-attr]
    place = None if isinstance(device, plan.GpuDevice) else device.place  # type: ignore[union-attr]
    kept = ledger.HeldDevice(
        name=name, address=str(gpu.address), uuid=uuid, nodes=("/dev/nvidia0",), caps=CAPS, place=place
    )
    return [preparing.holder(OTHER, kept, boot_id=boot_id)]


def instance(
    profile: int, start: int, *, uuid: str = "MIG-7", nodes: tuple[mig.CapabilityNode, ...] = CAPS
) -> mig.MigInstance:
    return mig.MigInstance(
        gpu_instance=7 + start,
        profile_id=profile,
        placement=mig.MigPlacement(start=start, size=mighands.SIZES[profile]),
        compute_instance=0,
        uuid=uuid,
        nodes=nodes,
    )


def test_a_part_is_recorded_as_begun_with_its_place_and_completed_with_what_was_made() -> None:
    name, other = part_name(0, 9, 4), part_name(1, 19, 6)
    first = accepted(name, other, NAMES[2])
    assert first.entry.state is ledger.ClaimState.STARTED
    assert [(device.uuid, device.place) for device in first.entry.devices] == [
        ("", mig.MigPlacement(start=4, size=4)),
        ("", mig.MigPlacement(start=6, size=1)),
        ("GPU-2", None),
    ]
    assert first.entry.hardware == {
        "mig": [
            {"gpu": str(ADDRESSES[0]), "profileID": 9, "start": 4},
            {"gpu": str(ADDRESSES[1]), "profileID": 19, "start": 6},
        ]
    }
    assert [(item.gpu, item.toggle, tuple(item.wanted)) for item in first.work] == [
        (ADDRESSES[0], True, (name,)),
        (ADDRESSES[1], True, (other,)),
        (ADDRESSES[2], True, ()),
    ]
    made = {name: instance(9, 4), other: instance(19, 6, uuid="MIG-8")}
    second = plan.completed(first, made, at=12.5)
    assert isinstance(second, plan.PreparePlan)
    assert second.entry.state is ledger.ClaimState.COMPLETED
    assert [(device.uuid, device.caps) for device in second.entry.devices] == [
        ("MIG-7", CAPS),
        ("MIG-8", CAPS),
        ("GPU-2", ()),
    ]
    assert (second.entry.partitions, second.entry.made_at) == (first.entry.partitions, 12.5)
    assert second.columns == ledger.to_columns(second.entry)
    assert second.entry.cdi_ids == first.entry.cdi_ids


def test_instances_whose_nodes_cannot_be_read_are_given_to_nobody() -> None:
    name = part_name(0, 19, 0)
    answer = plan.completed(accepted(name), {name: instance(19, 0, nodes=())}, at=0.0)
    assert isinstance(answer, plan.Rejection)
    assert "/proc/driver/nvidia/capabilities" in answer.message


def test_a_gpu_that_nobody_divides_needs_no_work() -> None:
    known = preparing.FixedIndex().devices
    assert accepted(NAMES[0], known=known).work == ()


def test_a_gpu_that_somebody_else_divides_is_not_given_as_a_whole() -> None:
    known = {NAMES[0]: replace(preparing.gpu(0), divided=True)}
    answer = refused(NAMES[0], known=known)
    assert "MIG is enabled" in answer.message
    assert not answer.retryable
    assert accepted(wanted(NAMES[0], admin=True), known=known).work == ()


@pytest.mark.parametrize(
    ("mine", "theirs", "overlapping"),
    [
        (NAMES[0], part_name(0, 19, 6), True),
        (part_name(0, 19, 6), NAMES[0], True),
        (part_name(0, 5, 0), part_name(0, 14, 2), True),
        (part_name(0, 14, 2), part_name(0, 5, 0), True),
        (part_name(0, 19, 0), part_name(0, 19, 0), True),
        (part_name(0, 9, 0), part_name(0, 5, 0), True),
        (part_name(0, 5, 0), part_name(0, 9, 4), False),
        (part_name(0, 19, 4), part_name(0, 5, 0), False),
        (part_name(0, 5, 0), part_name(1, 5, 0), False),
        (NAMES[0], part_name(1, 19, 6), False),
    ],
)
def test_slices_decide_who_keeps_whom_out(mine: str, theirs: str, overlapping: bool) -> None:
    answer = planned(mine, holders=held(theirs))
    if not overlapping:
        assert isinstance(answer, plan.PreparePlan)
        return
    assert isinstance(answer, plan.Rejection)
    assert answer.retryable
    assert all(part in answer.message for part in (str(REF), str(OTHER), mine, theirs))
    before = accepted(mine, holders=held(theirs, boot_id="before"))
    assert before.displaced == ((theirs, OTHER.uid),)


def test_parts_of_a_claim_may_stand_beside_each_other_but_not_overlap() -> None:
    assert len(accepted(part_name(0, 9, 4), part_name(0, 9, 0)).work[0].wanted) == 2
    answer = refused(part_name(0, 9, 0), part_name(0, 19, 3))
    assert "overlap" in answer.message
    assert not answer.retryable
    assert not isinstance(planned(part_name(0, 9, 0), wanted(NAMES[0], admin=True)), plan.Rejection)


def test_admin_access_gets_what_is_there_and_makes_nothing() -> None:
    name = part_name(0, 19, 0)
    watching = wanted(name, admin=True)
    answer = refused(watching)
    assert "admin access makes none" in answer.message
    assert (answer.retryable, answer.look_again) == (True, True)
    beside = accepted(watching, holders=held(name))
    assert (beside.entry.devices[0].uuid, beside.entry.devices[0].caps) == ("MIG-1", CAPS)
    assert (beside.work, beside.entry.hardware, beside.entry.holds) == ((), {}, ())
    begun = refused(watching, holders=held(name, uuid=""))
    assert "admin access makes none" in begun.message
    device = DEVICES[name]
    assert isinstance(device, plan.PartitionDevice)
    seen = accepted(watching, known={name: replace(device, instance=instance(19, 0))})
    assert seen.entry.devices[0].uuid == "MIG-7"


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (instance(19, 0), None),
        (instance(19, 0, nodes=()), "capability nodes"),
        (replace(instance(19, 0), compute_instance=None), "no MIG instance"),
        (None, "no MIG instance"),
    ],
)
def test_an_instance_that_somebody_made_is_used_as_it_is(found: mig.MigInstance | None, expected: str | None) -> None:
    name = part_name(0, 19, 0)
    device = DEVICES[name]
    assert isinstance(device, plan.PartitionDevice)
    answer = planned(name, known={name: replace(device, instance=found, dynamic=False)})
    if expected is not None:
        assert isinstance(answer, plan.Rejection)
        assert expected in answer.message
        assert answer.look_again
        return
    assert isinstance(answer, plan.PreparePlan)
    assert (answer.work, answer.entry.hardware, answer.entry.state) == ((), {}, ledger.ClaimState.COMPLETED)
    assert answer.entry.devices[0].uuid == "MIG-7"


def test_a_gpu_that_is_not_ready_has_no_usable_part() -> None:
    name = part_name(0, 19, 0)
    device = DEVICES[name]
    assert isinstance(device, plan.PartitionDevice)
    lost = replace(device, gpu=preparing.gpu(0, state=model.GpuState.LOST, reason="fell off the bus"))
    answer = refused(name, known={name: lost})
    assert "fell off the bus" in answer.message
    assert not answer.retryable


def test_a_claim_that_is_put_back_later_keeps_everything_but_its_state() -> None:
    entry = accepted(part_name(0, 19, 0)).entry
    left = plan.releasing(entry)
    assert left.entry == replace(entry, state=ledger.ClaimState.RELEASING)
    assert left.columns == ledger.to_columns(left.entry)


def test_only_what_is_lost_is_made_again() -> None:
    names = [part_name(0, 19, 0), part_name(0, 19, 1), part_name(1, 9, 4), NAMES[2]]
    first = accepted(*names)
    whole = plan.completed(
        first, {names[0]: instance(19, 0), names[1]: instance(19, 1), names[2]: instance(9, 4)}, at=1.0
    )
    assert isinstance(whole, plan.PreparePlan)
    again = plan.again(whole.entry, {names[1], names[2]}, toggle={NAMES[0]: True, NAMES[1]: False})
    assert [(item.gpu, item.toggle, tuple(item.wanted)) for item in again.work] == [
        (ADDRESSES[0], True, (names[1],)),
        (ADDRESSES[1], False, (names[2],)),
    ]
    back = plan.completed(again, {names[1]: instance(19, 1, uuid="MIG-9"), names[2]: instance(9, 4)}, at=2.0)
    assert isinstance(back, plan.PreparePlan)
    assert [device.uuid for device in back.entry.devices] == ["MIG-7", "MIG-9", "MIG-7", "GPU-2"]
    assert (back.entry.partitions, back.entry.made_at) == (whole.entry.partitions, 2.0)


PLACES = st.sampled_from([(profile, start) for profile, starts in mighands.PLACES.items() for start in starts])


@settings(max_examples=60, deadline=None)
@given(mine=PLACES, theirs=PLACES, gpu=st.integers(0, 1))
def test_two_claims_never_share_a_slice(mine: tuple[int, int], theirs: tuple[int, int], gpu: int) -> None:
    slices = [set(range(start, start + mighands.SIZES[profile])) for profile, start in (mine, theirs)]
    answer = planned(part_name(0, *mine), holders=held(part_name(gpu, *theirs)))
    assert isinstance(answer, plan.PreparePlan) is (gpu == 1 or not slices[0] & slices[1])
