# SPDX-License-Identifier: Apache-2.0
"""The MIG instances of GPUs for those who look at them: whose each one is, and what there is still room for. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from discovery import mig, model
from discovery.address import PciAddress
from driver import values
from driver.sharing import placing, rules
from driver.sharing import policy as resolving

UNKNOWN_PROFILE = "other"
"""Stands for the name of a profile that the GPU does not tell of."""


class Origin(StrEnum):
    """Whose an instance is."""

    OURS = "ours"
    """The agent made it for a claim."""
    STATIC = "static"
    """Somebody made it, and it is handed out as it is (mode mig-static)."""
    FOREIGN = "foreign"
    """Somebody made it, and it is in the way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharing:
    """How the GPUs are shared now. `policies`: a GPU that is not in it is exclusive. `released`: names of partitions that the agent
    has removed since the GPUs were read.
    """

    policies: Mapping[PciAddress, rules.Policy] = field(default_factory=dict)
    released: frozenset[str] = frozenset()

    def policy(self, gpu: model.Gpu) -> rules.Policy:
        """That of a GPU."""
        return self.policies.get(gpu.address, rules.EXCLUSIVE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """An instance that exists, or that a claim holds and the last look at the GPU has not seen. `device`: its name as a device."""

    device: str
    profile: str
    profile_id: int
    placement: mig.MigPlacement
    origin: Origin


@dataclass(frozen=True, slots=True, kw_only=True)
class Counted:
    """All GPUs of a node together. `placeable` has every profile that is offered, also where there is room for none."""

    instances: Mapping[tuple[str, Origin], int]
    """By profile and origin."""
    placeable: Mapping[str, int]
    stranded: int


def instances(gpu: model.Gpu, *, sharing: Sharing, held: Collection[str]) -> tuple[Instance, ...]:
    """Those of a GPU, in order of their memory slices. `held`: names of the devices that claims hold."""
    static = sharing.policy(gpu).mode is rules.Mode.MIG_STATIC
    names = {profile.id: profile.name for profile in gpu.mig_profiles}
    found: dict[str, Instance] = {}
    for there in gpu.mig_instances or ():
        name = names.get(there.profile_id, UNKNOWN_PROFILE)
        device = _device(gpu, name, there.profile_id, there.placement)
        if device in held or device not in sharing.released:
            origin = Origin.STATIC if static else Origin.OURS if device in held else Origin.FOREIGN
            found[device] = _instance(device, name, there.profile_id, there.placement, origin)
    if unseen := _parts_of(gpu, held) - found.keys():
        for profile in gpu.mig_profiles:
            for place in profile.placements:
                device = _device(gpu, profile.name, profile.id, place)
                if device in unseen:
                    origin = Origin.STATIC if static else Origin.OURS
                    found[device] = _instance(device, profile.name, profile.id, place, origin)
    return tuple(sorted(found.values(), key=lambda instance: (instance.placement, instance.device)))


def left(gpu: model.Gpu, *, sharing: Sharing, held: Collection[str]) -> placing.Left | None:
    """What the agent could still make of a GPU; None where it makes nothing of it."""
    offered = _offered(gpu, sharing.policy(gpu))
    if offered is None:
        return None
    if values.gpu_device_name(gpu.address) in held:
        return placing.Left(placeable=dict.fromkeys(offered, 0))
    taken = [
        placing.Taken(profile_id=there.profile_id, placement=there.placement)
        for there in instances(gpu, sharing=sharing, held=held)
    ]
    return placing.left(gpu.mig_profiles, taken=taken, offered=offered)


def free_whole(gpu: model.Gpu, *, sharing: Sharing, held: Collection[str]) -> bool:
    """Whether a claim for the whole GPU could have it now."""
    mode = sharing.policy(gpu).mode
    if gpu.state is not model.GpuState.READY or mode is rules.Mode.MIG_STATIC:
        return False
    divided = gpu.mig_mode is not None and gpu.mig_mode.current
    if divided and (mode is not rules.Mode.MIG_DYNAMIC or mig.toggle_of(gpu.architecture) is mig.Toggle.NEVER):
        return False
    name = values.gpu_device_name(gpu.address)
    return name not in held and not instances(gpu, sharing=sharing, held=held)


def count(snapshot: model.Snapshot, *, sharing: Sharing, held: Collection[str]) -> Counted:
    """What a node has, and what it has room for."""
    there: Counter[tuple[str, Origin]] = Counter()
    placeable: Counter[str] = Counter()
    stranded = 0
    for gpu in snapshot.gpus:
        there.update((entry.profile, entry.origin) for entry in instances(gpu, sharing=sharing, held=held))
        rest = left(gpu, sharing=sharing, held=held)
        if rest is not None:
            for profile in gpu.mig_profiles:
                if profile.id in rest.placeable:
                    placeable[profile.name] += rest.placeable[profile.id]
            stranded += len(rest.stranded)
    return Counted(instances=there, placeable=placeable, stranded=stranded)


def slots(gpu: model.Gpu, there: Collection[Instance]) -> Iterator[Instance | None]:
    """The memory slices of a GPU in their order: the instance that has each, None where it is free."""
    for number in range(mig.memory_slices(gpu.mig_profiles)):
        yield next((entry for entry in there if number in entry.placement.slices), None)


def _offered(gpu: model.Gpu, policy: rules.Policy) -> frozenset[int] | None:
    """Ids of the profiles that the agent makes on a GPU; None where it makes none."""
    if policy.mode is not rules.Mode.MIG_DYNAMIC or gpu.state is not model.GpuState.READY or gpu.mig_mode is None:
        return None
    if not gpu.mig_mode.current and mig.toggle_of(gpu.architecture) is mig.Toggle.NEVER:
        return None
    offered = frozenset(profile.id for profile in gpu.mig_profiles if resolving.offers_profile(policy, profile.name))
    return offered or None


def _parts_of(gpu: model.Gpu, held: Collection[str]) -> set[str]:
    """The devices that are parts of a GPU."""
    whole = values.gpu_device_name(gpu.address)
    return {device for device in held if device.startswith(whole) and values.gpu_of(device) == whole != device}


def _device(gpu: model.Gpu, profile: str, profile_id: int, place: mig.MigPlacement) -> str:
    return values.partition_device_name(gpu.address, profile=profile, profile_id=profile_id, start=place.start)


def _instance(device: str, profile: str, profile_id: int, place: mig.MigPlacement, origin: Origin) -> Instance:
    return Instance(device=device, profile=profile, profile_id=profile_id, placement=place, origin=origin)
