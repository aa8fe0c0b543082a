# SPDX-License-Identifier: Apache-2.0
"""From the name of a device, as an allocation has it, to what it stands for now: a GPU, or a part of one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from discovery import mig, model
from discovery.address import PciAddress
from driver import inventory, values
from driver.prepare import plan, tenancy
from driver.sharing import measures, rules, shares

Policies = Callable[[model.Snapshot], Mapping[PciAddress, rules.Policy]]
"""How each GPU of a Snapshot is shared now."""

_UNDIVIDED = frozenset({rules.Mode.EXCLUSIVE, rules.Mode.SHARES})
_LONGEST_LOOK_S = inventory.PROBE_TIMEOUT_S + inventory.RESCAN_TIMEOUT_S


def exclusive(_: model.Snapshot) -> Mapping[PciAddress, rules.Policy]:
    """The policies where nothing is shared."""
    return {}


class InventoryIndex:
    """Looks devices up in the inventory, which it asks anew each time."""

    def __init__(
        self,
        state: Callable[[], inventory.InventoryState],
        *,
        look_again: Callable[[], None],
        policies: Policies = exclusive,
    ) -> None:
        """`look_again`: asks for a full probe soon. `policies` is asked at every call, and has to be quick."""
        self._state = state
        self.look_again = look_again
        self._policies = policies
        self._built: _Built | None = None

    def find(self, name: str) -> plan.Device | plan.NotThere:
        """What this name stands for as it was last seen, or why it stands for nothing."""
        state = self._state()
        if state.snapshot is None:
            return plan.NotThere(
                reason=state.error or "the GPUs of this node have not been read yet, as the agent has just started",
                retryable=True,
            )
        built = self._up_to_date(state.snapshot)
        device = built.gpus.get(name)
        if device is None:
            return self._part(built, name, state)
        return _as_read(device, state)

    def lacks(self, name: str, uuid: str, *, since: float) -> bool:
        """Whether a look at the hardware that began after `since` (seconds since the epoch) has shown that the MIG instance with
        this UUID is not, or not any more, at the place of this name. The UUID alone says little: it is made of the GPU's and of
        the numbers of the instances, and comes back with them.
        """
        state = self._state()
        snapshot = state.snapshot
        # A later look that saw the same left the Snapshot as it was.
        if snapshot is None or max(snapshot.taken_at, (state.read_at or 0.0) - _LONGEST_LOOK_S) <= since:
            return False
        whole = values.gpu_of(name)
        gpu = next((gpu for gpu in snapshot.gpus if values.gpu_device_name(gpu.address) == whole), None)
        if gpu is None or gpu.state is not model.GpuState.READY or gpu.mig_mode is None:
            return False
        if not gpu.mig_mode.current:
            return True
        profiles = {profile.id: profile.name for profile in gpu.mig_profiles}
        return gpu.mig_instances is not None and not any(
            instance.uuid == uuid
            and instance.profile_id in profiles
            and name
            == values.partition_device_name(
                gpu.address,
                profile=profiles[instance.profile_id],
                profile_id=instance.profile_id,
                start=instance.placement.start,
            )
            for instance in gpu.mig_instances
        )

    def _part(self, built: _Built, name: str, state: inventory.InventoryState) -> plan.PartitionDevice | plan.NotThere:
        whole = values.gpu_of(name)
        gpu = built.gpus.get(whole)
        if gpu is None or whole == name:
            return plan.NotThere(
                reason="no GPU of this name is on this node (any more); `nearfield devices` lists those that are",
                retryable=False,
            )
        parts = built.parts(gpu)
        if isinstance(parts, plan.NotThere):
            return parts
        part = parts.get(name)
        if part is None:
            return _no_part(built.policy(gpu))
        seen = _as_read(gpu, state)
        return part if seen is gpu else replace(part, gpu=seen)

    def _up_to_date(self, snapshot: model.Snapshot) -> _Built:
        policies = self._policies(snapshot)
        built = self._built
        if built is None or built.snapshot is not snapshot or built.policies is not policies:
            if built is None or built.snapshot is not snapshot or built.policies != policies:
                built = _Built(snapshot, policies)
            else:
                built.policies = policies
            self._built = built
        return built


class _Built:
    """The names of one Snapshot under some policies; those of parts are spelled when the first part of a GPU is asked for."""

    def __init__(self, snapshot: model.Snapshot, policies: Mapping[PciAddress, rules.Policy]) -> None:
        self.snapshot = snapshot
        self.policies = policies
        self.gpus: dict[str, plan.GpuDevice] = {}
        for gpu in snapshot.gpus:
            device = _gpu(gpu, policies.get(gpu.address, rules.EXCLUSIVE))
            self.gpus[device.name] = device
        self._parts: dict[str, Mapping[str, plan.PartitionDevice] | plan.NotThere] = {}

    def policy(self, device: plan.GpuDevice) -> rules.Policy:
        """How a GPU is shared."""
        return self.policies.get(device.address, rules.EXCLUSIVE)

    def parts(self, device: plan.GpuDevice) -> Mapping[str, plan.PartitionDevice] | plan.NotThere:
        """The parts of a GPU by name, or why it has none."""
        found = self._parts.get(device.name)
        if found is None:
            gpu = self.snapshot.gpu(device.address)
            assert gpu is not None
            found = self._parts[device.name] = _parts(gpu, device, self.policy(device))
        return found


def _gpu(gpu: model.Gpu, policy: rules.Policy) -> plan.GpuDevice:
    divisible = policy.mode is rules.Mode.MIG_DYNAMIC
    return plan.GpuDevice(
        name=values.gpu_device_name(gpu.address),
        address=gpu.address,
        state=gpu.state,
        reason=gpu.state_reason,
        uuid=gpu.uuid,
        minor=gpu.minor,
        divisible=divisible,
        divided=not divisible and gpu.mig_mode is not None and gpu.mig_mode.current,
        toggle=mig.toggle_of(gpu.architecture) is mig.Toggle.AT_NEED,
        sharing=_sharing(policy, measures.whole(gpu, policy)),
    )


def _sharing(policy: rules.Policy, terms: shares.Terms | None) -> tenancy.Sharing | None:
    if terms is None or policy.shares is None or policy.enforcement is None:
        return None
    return tenancy.Sharing(terms=terms, policy=policy.shares, enforcement=policy.enforcement)


def _as_read(device: plan.GpuDevice, state: inventory.InventoryState) -> plan.GpuDevice:
    """The device in the state that the last, cheaper look saw it in."""
    reading = state.readings.get(device.address)
    if reading is None or reading.state is device.state:
        return device
    return replace(device, state=reading.state, reason=reading.state_reason)


def _parts(
    gpu: model.Gpu, device: plan.GpuDevice, policy: rules.Policy
) -> Mapping[str, plan.PartitionDevice] | plan.NotThere:
    if policy.mode in _UNDIVIDED:
        return plan.NotThere(
            reason=f"its GPU is not divided (mode {policy.mode}); the pod has to be scheduled again",
            retryable=False,
        )
    if gpu.state is not model.GpuState.READY:
        return plan.NotThere(reason=gpu.state_reason or f"its GPU is {gpu.state}", retryable=True)
    profiles = {profile.id: profile for profile in gpu.mig_profiles}
    if not profiles:
        return plan.NotThere(reason="its GPU has no MIG profiles: it cannot be divided", retryable=False)
    instances = {(found.profile_id, found.placement.start): found for found in gpu.mig_instances or ()}
    dynamic = policy.mode is rules.Mode.MIG_DYNAMIC
    places = [
        (profile, place)
        for profile in gpu.mig_profiles
        for place in profile.placements
        if dynamic or (profile.id, place.start) in instances
    ]
    return {
        name: plan.PartitionDevice(
            name=name,
            gpu=device,
            partition=mig.Partition(gpu=gpu.address, profile_id=profile.id, start=place.start),
            place=place,
            instance=instances.get((profile.id, place.start)),
            dynamic=dynamic,
            sharing=_sharing(policy, measures.part(gpu, profile, policy)),
        )
        for profile, place in places
        for name in (
            values.partition_device_name(gpu.address, profile=profile.name, profile_id=profile.id, start=place.start),
        )
    }


def _no_part(policy: rules.Policy) -> plan.NotThere:
    if policy.mode is rules.Mode.MIG_STATIC:
        return plan.NotThere(
            reason="there is no MIG instance at its place (any more); this GPU is of mode mig-static, so that only somebody who "
            "made it can make it again",
            retryable=True,
        )
    return plan.NotThere(
        reason="its GPU has no MIG profile with such a place; `nearfield devices` lists the devices of this node",
        retryable=False,
    )
