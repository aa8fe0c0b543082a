# SPDX-License-Identifier: Apache-2.0
"""plan: who may have what. Aspects: what is recorded, devices that are not there, holders, admin access, reboot."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from discovery import model
from driver.prepare import cdi, claims, ledger, plan
from tests.fakes import preparing

REF, OTHER = preparing.ref(1), preparing.ref(2)
GPU, SECOND = preparing.NAMES[:2]
DIALECT = cdi.Dialect(driver=preparing.DRIVER, mock=False)
DEVICES = preparing.FixedIndex().devices
HELD = ledger.HeldDevice(name=GPU, address="0000:10:00.0", uuid="GPU-0", nodes=("/dev/nvidia0",))


def planned(
    *results: ledger.Result,
    holders: Sequence[plan.Holder] = (),
    devices: dict[str, plan.Device | plan.NotThere] | None = None,
) -> plan.PreparePlan | plan.Rejection:
    return plan.plan_prepare(
        claims.Allocation(claim=REF, results=results),
        devices=devices or DEVICES,
        holders=holders,
        dialect=DIALECT,
        boot_id=preparing.BOOT_ID,
    )


def wanted(device: str, *, request: str = "gpu", admin: bool = False) -> ledger.Result:
    return ledger.Result(request=request, pool=preparing.POOL, device=device, admin=admin)


def held(*, boot_id: str = preparing.BOOT_ID, state: ledger.ClaimState = ledger.ClaimState.COMPLETED) -> plan.Holder:
    return preparing.holder(OTHER, HELD, boot_id=boot_id, state=state)


def test_the_entry_has_everything_that_the_answer_and_the_files_need() -> None:
    results = (wanted(GPU, request="a/b"), wanted(SECOND), wanted(GPU, request="watch", admin=True))
    claim_id = f"gpu.nearfield.dev/claim={REF.uid}-"
    node_id = "gpu.nearfield.dev/node=driver"
    answer = planned(*results)
    assert isinstance(answer, plan.PreparePlan)
    assert (answer.entry, answer.columns, answer.displaced) == (
        ledger.Entry(
            claim=REF,
            state=ledger.ClaimState.COMPLETED,
            boot_id=preparing.BOOT_ID,
            devices=(
                ledger.HeldDevice(name=GPU, address="0000:10:00.0", uuid="GPU-0", nodes=("/dev/nvidia0",)),
                ledger.HeldDevice(name=SECOND, address="0000:11:00.0", uuid="GPU-1", nodes=("/dev/nvidia1",)),
            ),
            results=results,
            cdi_ids=((claim_id + GPU, node_id), (claim_id + SECOND, node_id), (claim_id + GPU, node_id)),
        ),
        ledger.to_columns(answer.entry),
        (),
    )


@pytest.mark.parametrize(
    ("device", "expected", "retryable"),
    [
        (plan.NotThere(reason="never heard of", retryable=False), "never heard of", False),
        (plan.NotThere(reason="not read yet", retryable=True), "not read yet", True),
        (preparing.gpu(0, state=model.GpuState.LOST, reason="it fell off the bus"), "it fell off the bus", False),
        (preparing.gpu(0, state=model.GpuState.NO_DRIVER, reason="no driver is bound"), "no driver is bound", True),
        (preparing.gpu(0, state=model.GpuState.UNREADABLE, reason="NVML starts"), "NVML starts", True),
        (preparing.gpu(0, state=model.GpuState.FOREIGN_DRIVER, reason="bound to nouveau"), "bound to nouveau", False),
        (preparing.gpu(0, state=model.GpuState.VFIO, reason="bound to vfio-pci"), "bound to vfio-pci", False),
        (plan.GpuDevice(name=GPU, address=preparing.ADDRESSES[0], state=model.GpuState.READY, minor=0), "UUID", False),
        (
            plan.GpuDevice(name=GPU, address=preparing.ADDRESSES[0], state=model.GpuState.READY, uuid="G"),
            "minor",
            False,
        ),
    ],
)
def test_a_device_that_cannot_be_used_is_refused_with_the_reason(
    device: plan.GpuDevice | plan.NotThere, expected: str, retryable: bool
) -> None:
    answer = planned(wanted(SECOND), wanted(GPU), devices={**DEVICES, GPU: device})
    assert isinstance(answer, plan.Rejection)
    assert expected in answer.message
    assert str(REF) in answer.message
    assert GPU in answer.message
    assert answer.retryable is retryable
    assert answer.look_again is retryable


def test_a_held_device_is_refused_with_the_name_of_its_holder() -> None:
    answer = planned(wanted(SECOND), wanted(GPU), holders=[held()])
    assert isinstance(answer, plan.Rejection)
    assert (answer.retryable, answer.look_again) == (True, False)
    for part in (str(REF), str(OTHER), GPU):
        assert part in answer.message


def test_a_device_that_is_being_put_back_is_said_to_be_so() -> None:
    answer = planned(wanted(GPU), holders=[held(state=ledger.ClaimState.RELEASING)])
    assert isinstance(answer, plan.Rejection)
    assert f"is still being put back after {OTHER}" in answer.message


def test_admin_access_neither_takes_a_device_nor_is_kept_from_it() -> None:
    answer = planned(wanted(GPU, admin=True), holders=[held()])
    assert isinstance(answer, plan.PreparePlan)
    assert answer.entry.holds == ()


def test_admin_access_beside_a_plain_request_does_not_free_the_device() -> None:
    answer = planned(wanted(GPU, admin=True), wanted(GPU), holders=[held()])
    assert isinstance(answer, plan.Rejection)


def test_what_the_claim_holds_itself_does_not_keep_it_out() -> None:
    own = preparing.holder(REF, HELD, boot_id="before")
    answer = planned(wanted(GPU), holders=[own])
    assert isinstance(answer, plan.PreparePlan)
    assert answer.displaced == ()


def test_a_holder_from_before_a_reboot_gives_way() -> None:
    answer = planned(wanted(GPU), wanted(SECOND), holders=[held(boot_id="before")])
    assert isinstance(answer, plan.PreparePlan)
    assert answer.displaced == ((GPU, OTHER.uid),)
