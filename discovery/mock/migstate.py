# SPDX-License-Identifier: Apache-2.0
"""From a product's MIG table and a slot of a Machine to what the driver knows of it: profiles and instances. Pure.

Compute instances of a GPU instance, as `nvidia-smi mig -lcip` lists them: 1, 2, 3 and 4 slices where they are less than it has
(3 only of 7), and one that takes all, with the id of NVML_COMPUTE_INSTANCE_PROFILE_*. A GPU instance of one slice that has more
multiprocessors than a compute slice (1g with twice the memory, from Hopper on) has both: id 0 is the slice, id 7 (1_SLICE_REV1)
takes all and is what nvidia-smi makes (1g.24gb of a GH200: https://github.com/kf-cuanschutz/NVIDIA_Grace_Hopper_benchmarking_logs_;
1g.67gb of a B300: https://github.com/kubernetes-sigs/dra-driver-nvidia-gpu/issues/1454). Where a smaller one may begin in a GPU
instance is not public: anywhere.
"""

from __future__ import annotations

from collections.abc import Sequence

from discovery.mock import abi, identity, machine, state
from discovery.mock import products as parts
from discovery.mock.pcitree import MachineError, Place

_MIB = 1 << 20
_GRAPHICS = "_GFX"


def build(mig: parts.Mig, slot: machine.Slot | None, times: machine.MigTimes, *, gpu: str, place: Place) -> state.Mig:
    """MIG of a GPU with the UUID `gpu`. `place`: its slot in the document, for MachineError."""
    profiles = tuple(sorted((_profile(profile, mig) for profile in mig.profiles), key=lambda each: each.number))
    enabled = slot is not None and slot.mig_mode
    return state.Mig(
        current=enabled,
        pending=enabled,
        max_devices=mig.devices,
        profiles=profiles,
        instances=_instances(slot.mig_instances if slot else (), profiles, gpu=gpu, place=place),
        times=state.MigTimes(create_s=times.create, destroy_s=times.destroy, mode_s=times.mode),
    )


def memory_slices(profiles: Sequence[state.MigProfile]) -> int:
    """How many memory slices a GPU with these profiles has."""
    return max((place.start + place.size for profile in profiles for place in profile.placements), default=0)


def instance_id(placement: state.MigPlacement, slices: int) -> int:
    """The id of a GPU instance on a GPU with so many memory slices: 0 for the whole, 1 and 2 for halves, 3 to 6 for quarters, 7 to
    14 for eighths (NV2080_CTRL_GPU_PARTITION_ID_* of NVIDIA's open kernel modules, "swizzId"). Which of the eighths gets which is
    up to the chip; here they are in order.
    """
    return slices // placement.size - 1 + placement.start // placement.size


def device_uuid(gpu: str, instance: int, compute_instance: int) -> str:
    """The UUID of a MIG device: as of the driver, it follows from the GPU and the ids, so that one made again has it again."""
    return f"MIG-{identity.uuid_of(gpu, instance, compute_instance)}"


def _profile(profile: parts.MigProfile, mig: parts.Mig) -> state.MigProfile:
    return state.MigProfile(
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
        compute=_compute_profiles(profile, mig),
    )


def _compute_profiles(profile: parts.MigProfile, mig: parts.Mig) -> tuple[state.MigComputeProfile, ...]:
    smaller = [
        _compute_profile(abi.COMPUTE_INSTANCE_PROFILES[slices], f"{slices}c.{profile.name}", slices, sm, profile.slices)
        for slices, sm in sorted(mig.compute.items())
        if sm < profile.sm and _is_offered(slices, profile.slices)
    ]
    asymmetric = profile.slices == 1 and bool(smaller)
    whole = abi.COMPUTE_INSTANCE_1_SLICE_REV1 if asymmetric else abi.COMPUTE_INSTANCE_PROFILES[profile.slices]
    return (*smaller, _compute_profile(whole, profile.name, profile.slices, profile.sm, profile.slices))


def _is_offered(slices: int, of: int) -> bool:
    return slices <= of and (slices, of) not in {(2, 2), (3, 3), (3, 4), (4, 4)}


def _compute_profile(number: int, name: str, slices: int, sm: int, of: int) -> state.MigComputeProfile:
    return state.MigComputeProfile(
        number=number,
        id=number,
        name=name,
        slices=slices,
        multiprocessors=sm,
        instances=of // slices,
        placements=tuple(state.MigPlacement(start=start, size=slices) for start in range(of - slices + 1)),
    )


def _instances(
    said: Sequence[machine.MigInstance], profiles: Sequence[state.MigProfile], *, gpu: str, place: Place
) -> tuple[state.MigInstance, ...]:
    """The instances of a document, which must be able to stand beside each other."""
    taken: dict[int, str] = {}
    count: dict[int, int] = {}
    made = []
    for number, item in enumerate(said):
        here: Place = (*place, "migInstances", number)
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
        made.append(_instance(item, profile, placement, memory_slices(profiles), gpu=gpu, place=here))
    return tuple(made)


def _instance(
    item: machine.MigInstance,
    profile: state.MigProfile,
    placement: state.MigPlacement,
    slices: int,
    *,
    gpu: str,
    place: Place,
) -> state.MigInstance:
    instance = instance_id(placement, slices)
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
                uuid=device_uuid(gpu, instance, number),
            )
        )
        start += found.slices
    return state.MigInstance(id=instance, profile_id=profile.id, placement=placement, compute=tuple(compute))
