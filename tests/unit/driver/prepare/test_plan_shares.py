# SPDX-License-Identifier: Apache-2.0
"""plan: shares. Aspects: what is recorded, limits, room beside others, whole devices, admin access, pods, configuration, MIG, reboot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from discovery import mig
from driver.prepare import cdi, claimconfig, claims, ledger, plan, shareuse
from driver.sharing import shares
from tests.fakes import mighands, preparing
from tests.fakes.preparing import GIB, NAMES, part_name

GPU, SECOND = NAMES[:2]
DIALECT = cdi.Dialect(driver=preparing.DRIVER, mock=False)
POD = claims.Consumer(kind="pods", name="trainer", uid="1234-5678", pod=True)
CAPS = tuple(mig.CapabilityNode(path=f"/dev/nvidia-caps/nvidia-cap{n}", major=237, minor=n) for n in (66, 67))
PART = part_name(0, 9, 4)


def shared(**how: Any) -> dict[str, plan.Device | plan.NotThere]:
    index = preparing.FixedIndex()
    index.share(**how)
    return index.devices


def share(
    number: int,
    *,
    device: str = GPU,
    memory: str | None = "20Gi",
    compute: str | None = "25",
    request: str = "gpu",
    **more: Any,
) -> ledger.Result:
    consumed = {name: text for name, text in (("memory", memory), ("compute", compute), ("shares", "1")) if text}
    return ledger.Result(
        request=request,
        pool=preparing.POOL,
        device=device,
        share_id=preparing.share_id(number),
        consumed_capacity=consumed,
        **more,
    )


def whole(device: str = GPU, **more: Any) -> ledger.Result:
    return ledger.Result(request="gpu", pool=preparing.POOL, device=device, **more)


def planned(
    *results: ledger.Result,
    claim: int = 1,
    others: Sequence[ledger.Entry] = (),
    devices: Mapping[str, plan.Device | plan.NotThere] | None = None,
    config: claimconfig.ClaimConfig | None = None,
    consumers: Sequence[claims.Consumer] = (POD,),
    unasked: Sequence[str] = (),
    boot_id: str = preparing.BOOT_ID,
) -> plan.PreparePlan | plan.Rejection:
    return plan.plan_prepare(
        claims.Allocation(
            claim=preparing.ref(claim),
            results=results,
            configs=() if config is None else (config,) * len(results),
            consumers=tuple(consumers),
            unasked=frozenset(unasked),
        ),
        devices=shared() if devices is None else devices,
        holders=[
            plan.Holder(entry=entry, device=device)
            for entry in others
            for device in entry.devices
            if device.name in entry.holds
        ],
        dialect=DIALECT,
        boot_id=boot_id,
    )


def accepted(*results: ledger.Result, **more: Any) -> plan.PreparePlan:
    answer = planned(*results, **more)
    assert isinstance(answer, plan.PreparePlan), answer
    return answer


def refused(*results: ledger.Result, **more: Any) -> plan.Rejection:
    answer = planned(*results, **more)
    assert isinstance(answer, plan.Rejection), answer
    return answer


def use(entry: ledger.Entry, number: int = 0) -> ledger.ShareUse:
    found = entry.results[number].share
    assert found is not None
    return found


def test_a_share_has_what_it_was_charged_and_is_held_to_that() -> None:
    entry = accepted(share(1)).entry
    (device,) = entry.devices
    assert device.room == ledger.Room(memory=80 * GIB + GIB // 2, compute=100, sharers=8)
    assert use(entry) == ledger.ShareUse(
        memory=20 * GIB,
        compute=25,
        enforcement=shares.Enforcement(memory=shares.Memory.CGROUP, compute=shares.Compute.NONE),
        memory_limit=20 * GIB,
        compute_limit=25,
    )
    assert (entry.state, entry.pods) == (ledger.ClaimState.COMPLETED, (POD.uid,))
    assert entry.holds == entry.held_in_shares == (GPU,)


def test_shares_of_one_device_in_one_claim_are_told_apart() -> None:
    entry = accepted(share(1), share(2, memory="10Gi"), share(3, device=SECOND)).entry
    assert len({ids[0] for ids in entry.cdi_ids}) == 3
    assert all(preparing.share_id(number) in entry.cdi_ids[number - 1][0] for number in (1, 2, 3))
    assert [device.name for device in entry.devices] == [GPU, SECOND]
    assert [result.share_id for _, result in entry.shared] == [preparing.share_id(number) for number in (1, 2, 3)]
    assert [device.share_id for device in ledger.answer(entry).devices] == [
        preparing.share_id(number) for number in (1, 2, 3)
    ]
    assert shareuse.total(ledger.uses_of(entry, GPU)).memory == 30 * GIB


def test_mps_has_a_started_row_and_what_needs_no_memory_has_none() -> None:
    for memory in shares.Memory:
        for compute in shares.Compute:
            amount = None if compute is shares.Compute.TIMESLICE else "25"
            made = accepted(share(1, compute=amount), devices=shared(memory=memory, compute=compute))
            levels = use(made.entry).enforcement
            mps = levels.by_mps or levels.by_legacy_mps
            assert made.entry.state is (ledger.ClaimState.STARTED if mps else ledger.ClaimState.COMPLETED)
            assert bool(made.entry.pods) is (memory is shares.Memory.CGROUP)
            done = plan.enforced(made)
            assert done.entry.state is ledger.ClaimState.COMPLETED
            assert done.entry.hardware == made.entry.hardware
            assert done.columns == ledger.to_columns(done.entry)


def test_what_a_share_takes_turns_at_is_not_charged() -> None:
    made = accepted(share(1, compute=None), devices=shared(compute=shares.Compute.TIMESLICE))
    assert (use(made.entry).compute, use(made.entry).compute_limit) == (None, None)
    assert made.entry.devices[0].room == ledger.Room(memory=80 * GIB + GIB // 2, compute=None, sharers=8)


@pytest.mark.parametrize(
    ("memory", "compute", "unasked", "default", "limits"),
    [
        ("20Gi", "25", False, None, (20 * GIB, 25)),
        ("80Gi", "100", False, None, (None, None)),
        ("80Gi", "25", False, None, (None, None)),
        ("79Gi", "100", False, None, (79 * GIB, None)),
        ("20Gi", "25", True, None, (20 * GIB, 25)),
        ("20Gi", "25", True, 25, (20 * GIB, None)),
        ("20Gi", "25", False, 25, (20 * GIB, 25)),
    ],
)
def test_limits(
    memory: str, compute: str, default: int | None, limits: tuple[int | None, int | None], *, unasked: bool
) -> None:
    devices = shared(default_compute=default)
    made = accepted(share(1, memory=memory, compute=compute), devices=devices, unasked=["gpu"] if unasked else [])
    assert (use(made.entry).memory_limit, use(made.entry).compute_limit) == limits
    assert bool(made.entry.pods) is (limits[0] is not None)


def test_a_share_of_everything_keeps_its_place_in_the_sum() -> None:
    first = accepted(share(1, memory="80Gi", compute="100"), claim=2).entry
    answer = refused(share(2, memory="1Gi", compute="5"), others=[first])
    assert answer.retryable
    assert str(preparing.ref(2)) in answer.message


@pytest.mark.parametrize(
    ("mine", "says"),
    [
        ({"memory": "41Gi", "compute": "5"}, "41Gi of memory"),
        ({"memory": "1Gi", "compute": "55"}, "55 percent of compute"),
    ],
)
def test_more_than_is_left_is_refused_with_the_numbers_and_the_holders(mine: dict[str, str], says: str) -> None:
    others = [accepted(share(number), claim=number).entry for number in (2, 3)]
    assert isinstance(planned(share(1, memory="40Gi", compute="50"), others=others), plan.PreparePlan)
    answer = refused(share(1, **mine), others=others)
    assert answer.retryable
    for words in (says, GPU, "80.5Gi", "40Gi of memory, 50 percent of compute and 2 shares", str(others[0].claim)):
        assert words in answer.message
    assert str(others[1].claim) in answer.message


def test_sharers_are_counted() -> None:
    devices = shared(sharers=3)
    others = [
        accepted(share(number, memory="1Gi", compute="5"), claim=number, devices=devices).entry for number in (2, 3)
    ]
    assert isinstance(planned(share(1), others=others, devices=devices), plan.PreparePlan)
    answer = refused(share(1), share(4), others=others, devices=devices)
    assert "3 shares" in answer.message
    many = [replace(other, claim=preparing.ref(number)) for number, other in enumerate([others[0]] * 9, start=50)]
    assert "and 6 more hold" in refused(share(1), others=many).message
    assert len(refused(share(1), others=many).message) < 900


def test_a_claim_that_is_more_than_the_device_is_refused_for_good() -> None:
    for results in (
        [share(1, memory="81Gi")],
        [share(1, memory="50Gi"), share(2, memory="50Gi")],
        [share(1, compute="101")],
    ):
        answer = refused(*results)
        assert not answer.retryable
        assert "scheduled again" in answer.message


def test_claims_of_another_boot_hold_nothing() -> None:
    before = accepted(share(1, memory="80Gi", compute="100"), claim=2, boot_id="before").entry
    alone = accepted(whole(), claim=3, boot_id="before").entry
    made = accepted(share(1), others=[before])
    assert (made.displaced, made.others) == ((), ())
    assert accepted(share(1), others=[alone]).displaced == ((GPU, alone.claim.uid),)
    assert accepted(whole(), others=[before]).displaced == ((GPU, before.claim.uid),)


def test_the_claim_itself_is_not_beside_itself() -> None:
    mine = accepted(share(1, memory="80Gi", compute="100")).entry
    other = accepted(share(2, device=SECOND), claim=2).entry
    again = accepted(share(1, memory="80Gi", compute="100"), share(3, device=SECOND), others=[mine, other])
    assert again.others == (other,)


def test_a_device_is_one_claims_alone_or_shared() -> None:
    alone = accepted(whole(), claim=2).entry
    answer = refused(share(1), others=[alone])
    assert answer.retryable
    assert f"held by {alone.claim}" in answer.message
    sharer = accepted(share(2), claim=3).entry
    answer = refused(whole(), others=[sharer])
    assert answer.retryable
    assert f"held by {sharer.claim}" in answer.message
    assert accepted(whole()).entry.devices[0].room is None
    assert "as a whole and in shares" in refused(whole(), share(1)).message


def test_what_is_still_put_back_has_its_place_in_the_sum() -> None:
    left = replace(accepted(share(2, memory="80Gi"), claim=2).entry, state=ledger.ClaimState.RELEASING)
    assert refused(share(1), others=[left]).retryable
    begun = replace(left, state=ledger.ClaimState.STARTED)
    assert refused(share(1), others=[begun]).retryable


def test_a_share_of_what_is_not_shared_now_waits() -> None:
    answer = refused(share(1), devices=preparing.FixedIndex().devices)
    assert answer.retryable
    assert "not given out in shares now" in answer.message


def test_shares_under_other_levels_do_not_mix() -> None:
    other = accepted(share(2), claim=2, devices=shared(memory=shares.Memory.MPS)).entry
    answer = refused(share(1), others=[other])
    assert answer.retryable
    assert str(other.claim) in answer.message


def test_nobody_gets_more_than_any_of_the_sharers_was_told_there_is() -> None:
    small = accepted(share(2, memory="20Gi"), claim=2, devices=shared(sharers=2)).entry
    small = replace(
        small, devices=(replace(small.devices[0], room=ledger.Room(memory=30 * GIB, compute=100, sharers=2)),)
    )
    assert "has 30Gi" in refused(share(1), others=[small]).message
    room = accepted(share(1, memory="10Gi"), others=[small]).entry.devices[0].room
    assert room == ledger.Room(memory=30 * GIB, compute=100, sharers=2)


def test_no_two_claims_have_a_share_of_one_id() -> None:
    other = accepted(share(1), claim=2).entry
    assert "same id" in refused(share(1), others=[other]).message
    assert "twice under one share id" in refused(share(1), share(1)).message
    # Of another device it is nobody's business: daemons are named by the device.
    accepted(share(1, device=SECOND), others=[other])


@pytest.mark.parametrize(
    ("consumed", "says"),
    [
        ({"compute": "25"}, "without an amount of memory"),
        ({"memory": "20Gi"}, "without an amount of compute"),
        ({}, "without an amount of memory"),
        ({"memory": "much", "compute": "25"}, "cannot be read"),
        ({"memory": "0", "compute": "25"}, "no amount"),
        ({"memory": "-1Gi", "compute": "25"}, "no amount"),
        ({"memory": "1Ki", "compute": "25"}, "no amount"),
        ({"memory": "1e300", "compute": "25"}, "no amount"),
        ({"memory": "20Gi", "compute": "0"}, "no amount"),
        ({"memory": "20Gi", "compute": "-5"}, "no amount"),
        ({"memory": "9" * 70, "compute": "5"}, "cannot be read"),
    ],
)
def test_odd_amounts_are_refused(consumed: dict[str, str], says: str) -> None:
    answer = refused(replace(share(1), consumed_capacity=consumed))
    assert says in answer.message
    assert GPU in answer.message
    assert not answer.retryable


def test_parts_of_a_byte_are_charged_as_bytes() -> None:
    made = accepted(share(1, memory="21474836480500m", compute="2500m"))
    assert (use(made.entry).memory, use(made.entry).compute) == (20 * GIB + 1, 3)


def test_admin_access_stands_beside_shares_and_is_charged_nothing() -> None:
    other = accepted(share(2, memory="80Gi", compute="100"), claim=2).entry
    for admin in (whole(admin=True), share(1, admin=True)):
        made = accepted(admin, others=[other], consumers=()).entry
        assert (made.holds, made.shared, made.pods, made.enforced) == ((), (), (), False)
        assert made.devices[0].room is None
        assert made.devices[0].uuid
    mine = accepted(share(1), replace(whole(admin=True), request="watch")).entry
    assert [result.share is None for result in mine.results] == [False, True]
    assert len({ids[0] for ids in mine.cdi_ids}) == 2
    assert ledger.from_columns(ledger.to_columns(mine)) == mine


POD_GROUP = claims.Consumer(kind="podgroups", name="crew", uid="9", pod=False)


@pytest.mark.parametrize(
    ("consumers", "says"),
    [
        ((), "no pod"),
        ((POD, replace(POD, uid="2", name="second")), "2 pods ('trainer', 'second')"),
        ((POD_GROUP,), "podgroups 'crew'"),
        ((POD, POD_GROUP), "podgroups 'crew'"),
        (tuple(replace(POD, uid=str(number)) for number in range(5)), "5 pods"),
    ],
)
def test_the_limit_of_a_cgroup_holds_one_pod(consumers: tuple[claims.Consumer, ...], says: str) -> None:
    answer = refused(share(1), consumers=consumers)
    assert says in answer.message
    assert "ResourceClaimTemplate" in answer.message
    assert not answer.retryable
    # Where nothing of it is held by a cgroup, anybody may use it.
    assert accepted(share(1, memory="80Gi", compute="100"), consumers=consumers).entry.pods == ()
    assert accepted(share(1), consumers=consumers, devices=shared(memory=shares.Memory.MPS)).entry.pods == ()


def test_pods_that_join_are_kept_in_their_order_and_once() -> None:
    entry = accepted(share(1)).entry
    more = plan.joined(entry, ["b", POD.uid, "a", "b"])
    assert more.entry.pods == (POD.uid, "b", "a")
    assert more.columns == ledger.to_columns(more.entry)
    assert replace(more.entry, hardware=entry.hardware) == entry


def test_configuration_only_tightens() -> None:
    config = claimconfig.ClaimConfig(memory_limit=8 * GIB, soft_limit=4 * GIB, compute_limit=10, below_normal=True)
    found = use(accepted(share(1), config=config, devices=shared(compute=shares.Compute.MPS)).entry)
    assert (found.memory, found.compute) == (20 * GIB, 25)
    assert (found.memory_limit, found.soft_limit, found.compute_limit, found.below_normal) == (
        8 * GIB,
        4 * GIB,
        10,
        True,
    )
    for wider in (claimconfig.ClaimConfig(memory_limit=21 * GIB), claimconfig.ClaimConfig(compute_limit=26)):
        answer = refused(share(1), config=wider)
        assert GPU in answer.message
        assert not answer.retryable
    refused(whole(), config=claimconfig.ClaimConfig(memory_limit=GIB))
    refused(share(1), config=claimconfig.ClaimConfig(require_compute=claimconfig.ComputeLevel.MPS))
    accepted(whole(), config=claimconfig.ClaimConfig(require_compute=claimconfig.ComputeLevel.MPS))
    accepted(whole(admin=True), config=claimconfig.ClaimConfig(memory_limit=GIB))


def static(*, sharing: bool = True) -> dict[str, plan.Device | plan.NotThere]:
    """GPUs that somebody has divided, with an instance at one place."""
    index = preparing.FixedIndex()
    index.divide()
    made = mig.MigInstance(
        gpu_instance=1,
        profile_id=9,
        placement=mig.MigPlacement(start=4, size=mighands.SIZES[9]),
        uuid="MIG-1",
        compute_instance=0,
        nodes=CAPS,
    )
    devices: dict[str, plan.Device | plan.NotThere] = {}
    for name, device in index.devices.items():
        if isinstance(device, plan.PartitionDevice):
            device = replace(  # noqa: PLW2901 - as it is on such a node
                device,
                dynamic=False,
                instance=made if name == PART else None,
                sharing=preparing.sharing(memory=shares.Memory.NONE, gib=10, percent=14) if sharing else None,
            )
        devices[name] = device
    return devices


def test_an_instance_is_shared_as_a_gpu_is_and_its_compute_is_percent_of_the_whole() -> None:
    devices = static()
    entry = accepted(
        share(1, device=PART, memory="4Gi", compute="5"),
        share(2, device=PART, memory="4Gi", compute="5"),
        devices=devices,
    ).entry
    (device,) = entry.devices
    assert (device.uuid, device.caps, device.room) == (
        "MIG-1",
        CAPS,
        ledger.Room(memory=10 * GIB + GIB // 2, compute=14, sharers=8),
    )
    assert [use(entry, number).compute_limit for number in (0, 1)] == [35, 35]
    answer = refused(share(3, device=PART, memory="4Gi", compute="5"), claim=2, others=[entry], devices=devices)
    assert "10.5Gi of memory, 14 percent" in answer.message
    accepted(share(3, device=PART, memory="2Gi", compute="4"), claim=2, others=[entry], devices=devices)
    # The whole GPU, and what overlaps the instance, is kept from others.
    assert refused(whole(), claim=2, others=[entry], devices=devices).retryable
    seen = plan.seen_again(entry, {PART: devices[PART]})
    assert isinstance(seen, plan.PreparePlan)
    assert seen.entry == entry


MEMORY = st.integers(min_value=1, max_value=80)
COMPUTE = st.sampled_from(range(5, 105, 5))


@settings(max_examples=60, deadline=None)
@given(
    wanted=st.lists(st.tuples(st.sampled_from((GPU, SECOND)), MEMORY, COMPUTE, st.booleans()), min_size=1, max_size=14)
)
def test_whatever_is_allocated_the_record_never_holds_more_than_there_is(
    wanted: list[tuple[str, int, int, bool]],
) -> None:
    devices = shared(sharers=4)
    entries: list[ledger.Entry] = []
    for number, (device, memory, compute, alone) in enumerate(wanted, start=1):
        result = whole(device) if alone else share(number, device=device, memory=f"{memory}Gi", compute=str(compute))
        answer = planned(result, claim=number, others=entries, devices=devices)
        room = ledger.Room(memory=80 * GIB + GIB // 2, compute=100, sharers=4)
        beside = [entry for entry in entries if device in entry.holds]
        uses = [use for entry in beside for use in ledger.uses_of(entry, device)]
        if isinstance(answer, plan.PreparePlan):
            entries.append(answer.entry)
            assert not (alone and beside)
            assert shareuse.fits(room, [*uses, *ledger.uses_of(answer.entry, device)])
        elif not alone and all(entry.held_in_shares for entry in beside):
            left = shareuse.left(room, uses)
            assert memory * GIB > left.memory or compute > left.compute or not left.sharers
