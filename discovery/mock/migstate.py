# SPDX-License-Identifier: Apache-2.0
"""From a product's MIG table and what a Machine says of a GPU to what the driver knows of it: profiles and instances. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from discovery.mock import abi, machine, migcompute, migrules, state
from discovery.mock import products as parts
from discovery.mock.pcitree import MachineError, Place

_MIB = 1 << 20
_GRAPHICS = "_GFX"


def build(
    mig: parts.Mig, said: Sequence[machine.MigInstance] | None, times: machine.MigTimes, *, gpu: str, place: Place
) -> state.Mig:
    """MIG of a GPU with the UUID `gpu`: what it is divided into, or None where MIG is off. `place`: where the document says so,
    for MachineError.
    """
    profiles = tuple(sorted((_profile(profile, mig) for profile in mig.profiles), key=lambda each: each.number))
    return state.Mig(
        current=said is not None,
        pending=said is not None,
        max_devices=mig.devices,
        profiles=profiles,
        instances=_instances(said or (), profiles, gpu=gpu, place=place),
        times=state.MigTimes(create_s=times.create, destroy_s=times.destroy, mode_s=times.mode),
    )


def _profile(profile: parts.MigProfile, mig: parts.Mig) -> state.MigProfile:
    known = state.MigProfile(
        number=abi.GPU_INSTANCE_PROFILES[profile.kind],
        id=profile.id,
        name=profile.name,
        slices=profile.slices,
        memory_mib=profile.memory // _MIB,
        multiprocessors=profile.sm,
        copy_engines=profile.ce,
        decoders=profile.dec,
        encoders=profile.enc,
        jpeg_engines=profile.jpeg,
        ofa_engines=profile.ofa,
        graphics=profile.kind.endswith(_GRAPHICS),
        instances=profile.most,
        placements=tuple(state.MigPlacement(start=start, size=profile.size) for start in profile.at),
    )
    return dataclasses.replace(known, compute=migcompute.profiles(known, mig.compute))


def _instances(
    said: Sequence[machine.MigInstance], profiles: Sequence[state.MigProfile], *, gpu: str, place: Place
) -> tuple[state.MigInstance, ...]:
    """The instances of a document, which must be able to stand beside each other."""
    taken: dict[int, str] = {}
    count: dict[int, int] = {}
    made = []
    for number, item in enumerate(said):
        here: Place = (*place, number)
        profile = next((each for each in profiles if each.name == item.profile), None)
        if profile is None:
            known = ", ".join(each.name for each in profiles) or "none"
            raise MachineError((*here, "profile"), f"the GPU has no profile {item.profile}; it has {known}")
        placement = next((each for each in profile.placements if each.start == item.start), None)
        if placement is None:
            starts = ", ".join(str(each.start) for each in profile.placements)
            raise MachineError((*here, "start"), f"{profile.name} cannot begin at {item.start}; it can at {starts}")
        for each in range(placement.start, placement.start + placement.size):
            if each in taken:
                raise MachineError(here, f"{profile.name} at {item.start} needs slice {each}, which {taken[each]} has")
            taken[each] = f"{profile.name} at {item.start}"
        count[profile.id] = count.get(profile.id, 0) + 1
        if count[profile.id] > profile.instances:
            raise MachineError(here, f"a GPU has at most {profile.instances} of {profile.name}")
        made.append(_instance(item, profile, placement, migrules.memory_slices(profiles), gpu=gpu, place=here))
    return tuple(sorted(made, key=lambda each: each.id))


def _instance(
    item: machine.MigInstance,
    profile: state.MigProfile,
    placement: state.MigPlacement,
    slices: int,
    *,
    gpu: str,
    place: Place,
) -> state.MigInstance:
    instance = migrules.instance_id(placement, slices)
    compute: list[state.MigComputeInstance] = []
    start = 0
    for number, name in enumerate((profile.name,) if item.compute is None else item.compute):
        found = next((each for each in profile.compute if each.name == name), None)
        if found is None:
            known = ", ".join(each.name for each in profile.compute)
            raise MachineError((*place, "compute", number), f"{profile.name} has no {name}; it has {known}")
        if start + found.slices > profile.slices:
            raise MachineError((*place, "compute", number), f"{name} has no room any more in {profile.name}")
        compute.append(
            state.MigComputeInstance(
                id=number,
                profile_id=found.id,
                placement=state.MigPlacement(start=start, size=found.slices),
                uuid=migrules.device_uuid(gpu, instance, number),
            )
        )
        start += found.slices
    return state.MigInstance(id=instance, profile_id=profile.id, placement=placement, compute=tuple(compute))
