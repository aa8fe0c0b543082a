# SPDX-License-Identifier: Apache-2.0
"""index: names of parts of GPUs. Aspects: what a name stands for under each policy, why one stands for nothing, what follows a new
Snapshot or a new policy, instances that are gone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from discovery import address, mig, model
from discovery.address import PciAddress
from driver import inventory, values
from driver.prepare import index, ledger, plan
from driver.sharing import rules, shares

GPU = address.PciAddress(0, 0x10, 0, 0)
NAME = values.gpu_device_name(GPU)
PROFILES = (
    mig.MigProfile(
        id=9, number=2, compute_number=2, name="3g.40gb", slices=3, memory_bytes=1, multiprocessors=1, instances=2,
        placements=(mig.MigPlacement(start=0, size=4), mig.MigPlacement(start=4, size=4)),
    ),
    mig.MigProfile(
        id=19, number=0, compute_number=0, name="1g.10gb", slices=1, memory_bytes=1, multiprocessors=1, instances=7,
        placements=tuple(mig.MigPlacement(start=start, size=1) for start in range(7)),
    ),
    mig.MigProfile(
        id=20, number=7, compute_number=0, name="1g.10gb+me", slices=1, memory_bytes=1, multiprocessors=1, instances=1,
        placements=tuple(mig.MigPlacement(start=start, size=1) for start in range(7)),
    ),
)  # fmt: skip


def instance(profile: int = 19, start: int = 2, *, uuid: str = "MIG-1") -> mig.MigInstance:
    size = 4 if profile == 9 else 1
    return mig.MigInstance(
        gpu_instance=7,
        profile_id=profile,
        placement=mig.MigPlacement(start=start, size=size),
        compute_instance=0,
        uuid=uuid,
    )


def part(profile: int, start: int) -> str:
    name = {known.id: known.name for known in PROFILES}[profile]
    return values.partition_device_name(GPU, profile=name, profile_id=profile, start=start)


def gpu(
    *, on: bool = True, instances: tuple[mig.MigInstance, ...] | None = (), architecture: str = "Hopper"
) -> model.Gpu:
    pci = model.PciFunction(address=GPU, vendor_id=0x10DE, device_id=0x2330, class_code=0x030200)
    return model.Gpu(
        pci=pci,
        state=model.GpuState.READY,
        uuid="GPU-1",
        minor=3,
        architecture=architecture,
        mig_mode=model.MigMode(current=on, pending=on),
        mig_profiles=PROFILES,
        mig_instances=instances if on else None,
    )


class Node:
    """One GPU and its policy, as a test sets them."""

    def __init__(self, found: model.Gpu, mode: rules.Mode, *, taken_at: float = 0.0) -> None:
        self.policies: Mapping[PciAddress, rules.Policy] = {GPU: rules.Policy(mode=mode)}
        self.state = inventory.InventoryState()
        self.see(found, taken_at=taken_at)
        self.index = index.InventoryIndex(lambda: self.state, look_again=lambda: None, policies=lambda _: self.policies)

    def see(self, found: model.Gpu, *, taken_at: float = 0.0) -> None:
        snapshot = model.Snapshot(origin=model.Origin.RECORDING, taken_at=taken_at, host=model.Host(), gpus=(found,))
        self.state = inventory.InventoryState(snapshot=snapshot)

    def reason(self, name: str) -> tuple[str, bool]:
        found = self.index.find(name)
        assert isinstance(found, plan.NotThere), found
        return found.reason, found.retryable


@pytest.mark.parametrize("on", [False, True])
def test_every_place_of_a_gpu_that_is_divided_at_need_is_found(on: bool) -> None:
    node = Node(gpu(on=on, instances=(instance(),)), rules.Mode.MIG_DYNAMIC)
    whole = node.index.find(NAME)
    assert isinstance(whole, plan.GpuDevice)
    assert (whole.divisible, whole.divided, whole.toggle) == (True, False, True)
    found = [node.index.find(part(profile.id, place.start)) for profile in PROFILES for place in profile.placements]
    assert all(isinstance(device, plan.PartitionDevice) and device.dynamic and device.gpu == whole for device in found)
    second = node.index.find(part(9, 4))
    assert isinstance(second, plan.PartitionDevice)
    assert second.partition == mig.Partition(gpu=GPU, profile_id=9, start=4)
    assert second.place == mig.MigPlacement(start=4, size=4)
    assert node.index.find(part(20, 3)) != node.index.find(part(19, 3))
    third = node.index.find(part(19, 2))
    assert isinstance(third, plan.PartitionDevice)
    assert third.instance == (instance() if on else None)


def test_an_ampere_is_not_to_be_switched() -> None:
    found = Node(gpu(architecture="Ampere"), rules.Mode.MIG_DYNAMIC).index.find(part(19, 0))
    assert isinstance(found, plan.PartitionDevice)
    assert not found.gpu.toggle


def test_of_a_gpu_that_an_admin_divides_only_what_is_there_is_found() -> None:
    node = Node(gpu(instances=(instance(), instance(9, 4))), rules.Mode.MIG_STATIC)
    found = node.index.find(part(19, 2))
    assert isinstance(found, plan.PartitionDevice)
    assert (found.dynamic, found.instance) == (False, instance())
    assert isinstance(node.index.find(part(9, 4)), plan.PartitionDevice)
    reason, retryable = node.reason(part(19, 3))
    assert "mig-static" in reason
    assert retryable
    whole = node.index.find(NAME)
    assert isinstance(whole, plan.GpuDevice)
    assert (whole.divisible, whole.divided) == (False, True)


@pytest.mark.parametrize(
    ("mode", "found", "name", "expected"),
    [
        (rules.Mode.EXCLUSIVE, gpu(), part(19, 0), "mode exclusive"),
        (rules.Mode.MIG_DYNAMIC, gpu(), f"{NAME}-mig-9g-99gb-77-0", "no MIG profile with such a place"),
        (rules.Mode.MIG_DYNAMIC, gpu(), part(19, 7), "no MIG profile with such a place"),
        (rules.Mode.MIG_DYNAMIC, gpu(), f"{NAME}-mig-", "no MIG profile with such a place"),
        (rules.Mode.MIG_DYNAMIC, replace(gpu(), mig_profiles=()), part(19, 0), "has no MIG profiles"),
        (rules.Mode.MIG_DYNAMIC, gpu(), "gpu-0000-11-00-0-mig-1g-10gb-19-0", "no GPU of this name"),
    ],
)
def test_a_name_that_stands_for_nothing_has_a_reason(
    mode: rules.Mode, found: model.Gpu, name: str, expected: str
) -> None:
    reason, retryable = Node(found, mode).reason(name)
    assert expected in reason
    assert not retryable


def test_parts_are_in_the_state_of_their_gpu() -> None:
    node = Node(gpu(), rules.Mode.MIG_DYNAMIC)
    lost = model.GpuReading(address=GPU, state=model.GpuState.LOST, state_reason="fell off the bus")
    node.state = replace(node.state, readings={GPU: lost})
    found = node.index.find(part(19, 0))
    assert isinstance(found, plan.PartitionDevice)
    assert (found.gpu.state, found.gpu.reason) == (model.GpuState.LOST, "fell off the bus")
    node.see(replace(gpu(), state=model.GpuState.UNREADABLE, state_reason="NVML starts", mig_profiles=()))
    assert node.reason(part(19, 0)) == ("NVML starts", True)


def test_a_new_policy_and_a_new_snapshot_count_at_once() -> None:
    node = Node(gpu(), rules.Mode.EXCLUSIVE)
    assert isinstance(node.index.find(part(19, 0)), plan.NotThere)
    node.policies = {GPU: rules.Policy(mode=rules.Mode.MIG_DYNAMIC)}
    assert isinstance(node.index.find(part(19, 0)), plan.PartitionDevice)
    node.policies = {GPU: rules.Policy(mode=rules.Mode.MIG_STATIC)}
    assert isinstance(node.index.find(part(19, 0)), plan.NotThere)
    node.see(gpu(instances=(instance(19, 0),)))
    assert isinstance(node.index.find(part(19, 0)), plan.PartitionDevice)


@pytest.mark.parametrize(
    ("found", "lacking"),
    [
        (gpu(instances=(instance(),)), False),
        (gpu(instances=()), True),
        (gpu(instances=(instance(uuid="MIG-2"),)), True),
        (gpu(instances=(instance(20, 2),)), True),
        (gpu(instances=(instance(19, 3),)), True),
        (gpu(on=False), True),
        (gpu(instances=None), False),
        (replace(gpu(instances=()), state=model.GpuState.UNREADABLE), False),
        (replace(gpu(instances=()), mig_mode=None), False),
    ],
)
def test_an_instance_is_gone_only_where_a_later_look_says_so(found: model.Gpu, lacking: bool) -> None:
    node = Node(found, rules.Mode.MIG_DYNAMIC, taken_at=100.0)
    assert node.index.lacks(part(19, 2), "MIG-1", since=99.0) is lacking
    assert node.index.lacks(part(19, 2), "MIG-1", since=100.0) is False
    node.state = replace(node.state, read_at=120.0)
    assert node.index.lacks(part(19, 2), "MIG-1", since=110.0) is False, "that look may have begun before"
    node.state = replace(node.state, read_at=200.0)
    assert node.index.lacks(part(19, 2), "MIG-1", since=110.0) is lacking, "it was looked at again, and is the same"
    assert node.index.lacks("gpu-0000-11-00-0-mig-1g-10gb-19-2", "MIG-1", since=99.0) is False
    node.state = inventory.InventoryState()
    assert node.index.lacks(part(19, 2), "MIG-1", since=99.0) is False


GIB = 1 << 30
SHARED = rules.Policy(
    mode=rules.Mode.SHARES,
    shares=shares.Shares(
        memory_step=GIB, compute_step=5, max_sharers=4, memory=shares.Memory.NONE, compute=shares.Compute.NONE
    ),
    enforcement=shares.Enforcement(memory=shares.Memory.CGROUP, compute=shares.Compute.NONE),
)


def sized(found: model.Gpu) -> model.Gpu:
    """With amounts that can be shared."""
    profiles = tuple(replace(profile, memory_bytes=10 * GIB, multiprocessors=16) for profile in PROFILES)
    return replace(found, memory_bytes=80 * GIB, multiprocessors=132, mig_profiles=profiles)


def test_a_gpu_of_mode_shares_is_shared_and_has_no_parts() -> None:
    node = Node(sized(gpu(on=False)), rules.Mode.SHARES)
    node.policies = {GPU: SHARED}
    device = node.index.find(NAME)
    assert isinstance(device, plan.GpuDevice)
    assert device.sharing is not None
    assert (device.sharing.enforcement, device.sharing.policy) == (SHARED.enforcement, SHARED.shares)
    assert device.sharing.room == ledger.Room(memory=80 * GIB, compute=100, sharers=4)
    answer = node.index.find(part(19, 2))
    assert isinstance(answer, plan.NotThere)
    assert "mode shares" in answer.reason
    node.policies = {GPU: rules.Policy(mode=rules.Mode.SHARES)}
    alone = node.index.find(NAME)
    assert isinstance(alone, plan.GpuDevice)
    assert alone.sharing is None


def test_instances_that_somebody_made_are_shared_where_the_policy_says_so() -> None:
    node = Node(sized(gpu(instances=(instance(),))), rules.Mode.MIG_STATIC)
    node.policies = {GPU: replace(SHARED, mode=rules.Mode.MIG_STATIC)}
    device = node.index.find(part(19, 2))
    assert isinstance(device, plan.PartitionDevice)
    assert device.sharing is not None
    assert device.sharing.room == ledger.Room(memory=10 * GIB, compute=12, sharers=4)
    assert device.gpu.sharing is None
    node.policies = {GPU: rules.Policy(mode=rules.Mode.MIG_STATIC)}
    again = node.index.find(part(19, 2))
    assert isinstance(again, plan.PartitionDevice)
    assert again.sharing is None
