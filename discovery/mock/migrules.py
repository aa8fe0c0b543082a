# SPDX-License-Identifier: Apache-2.0
"""What the driver does to MIG when it is told to: from the state of one GPU to its next, or an nvmlReturn_t. Pure.

The errors are those that nvml.h documents. A GPU instance needs memory slices that are free, and of multiprocessors, engines
and instances of its profile what others have left; a compute instance needs compute slices of its GPU instance.

Modes. From Hopper on a mode changes at once, and a GPU that is in use refuses with NVML_ERROR_IN_USE, which nvidia-smi prints
as `Unable to disable MIG Mode`. On Ampere the mode waits for a reset: the call succeeds, `pending` differs from `current`, and
the activation status says RESET_REQUIRED, or IN_USE as in
https://github.com/NVIDIA/gpu-operator/issues/1845 (`MIG mode is in pending enable state`).
"""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Iterable, Sequence
from typing import TypeVar

from discovery.mock import abi, state
from discovery.mock.status import StatusError

_RESOURCES = ("multiprocessors", "copy_engines", "decoders", "encoders", "jpeg_engines", "ofa_engines")

_FNV_OFFSET = 0x6C62_272E_07BB_0142_62B8_2175_6295_C58D
_FNV_PRIME = 0x0100_0000_0000_0000_0000_013B
_UUID_VERSION = 5

T = TypeVar("T", state.MigInstance, state.MigComputeInstance)


def memory_slices(profiles: Sequence[state.MigProfile]) -> int:
    """How many memory slices a GPU with these profiles has."""
    return max((place.start + place.size for profile in profiles for place in profile.placements), default=0)


def instance_id(placement: state.MigPlacement, slices: int) -> int:
    """The id of a GPU instance on a GPU with so many memory slices: 0 for the whole, 1 and 2 for halves, 3 to 6 for quarters, 7 to
    14 for eighths (NV2080_CTRL_GPU_PARTITION_ID_* of NVIDIA's open kernel modules, "swizzId"). Which of the eighths gets which is
    up to the chip; here they are in order, as in https://github.com/kubernetes-sigs/dra-driver-nvidia-gpu/issues/933.
    """
    return slices // placement.size - 1 + placement.start // placement.size


def device_uuid(gpu: str, instance: int, compute_instance: int) -> str:
    """The UUID of a MIG device. As the driver's it follows from the GPU and the ids (nvGenerateSmcUuid in gpu_uuid.c of NVIDIA's
    open kernel modules), so that one made again has it again. The driver takes SHA-1; here it is FNV-1a of 128 bits, because a
    small process should not load OpenSSL.
    """
    number = _FNV_OFFSET
    for byte in f"{gpu}/{instance}/{compute_instance}".encode():
        number = (number ^ byte) * _FNV_PRIME % (1 << 128)
    return f"MIG-{uuid.UUID(int=number, version=_UUID_VERSION)}"


def with_mig(gpu: state.Gpu, mig: state.Mig) -> state.Gpu:
    """The GPU with another MIG state."""
    return dataclasses.replace(gpu, mig=mig)


def enabled(gpu: state.Gpu) -> state.Mig:
    """MIG of a GPU in MIG mode; NVML_ERROR_NOT_SUPPORTED for any other."""
    if gpu.mig is None or not gpu.mig.current:
        raise StatusError(abi.NOT_SUPPORTED)
    return gpu.mig


def profile_of(mig: state.Mig, profile_id: int, *, otherwise: int = abi.INVALID_ARGUMENT) -> state.MigProfile:
    """The profile with an id."""
    for profile in mig.profiles:
        if profile.id == profile_id:
            return profile
    raise StatusError(otherwise)


def compute_profile_of(
    profile: state.MigProfile, profile_id: int, *, otherwise: int = abi.INVALID_ARGUMENT
) -> state.MigComputeProfile:
    """The compute instance profile with an id, of GPU instances of a profile."""
    for compute in profile.compute:
        if compute.id == profile_id:
            return compute
    raise StatusError(otherwise)


def room(mig: state.Mig, profile: state.MigProfile) -> int:
    """How many more GPU instances of a profile there is room for (nvmlDeviceGetGpuInstanceRemainingCapacity)."""
    count = 0
    while (placement := _free_place(mig, profile)) is not None:
        instance = state.MigInstance(id=-1, profile_id=profile.id, placement=placement)
        mig = dataclasses.replace(mig, instances=(*mig.instances, instance))
        count += 1
    return count


def compute_room(instance: state.MigInstance, profile: state.MigComputeProfile) -> int:
    """How many more compute instances of a profile there is room for."""
    count = 0
    while (placement := _free_compute_place(instance, profile)) is not None:
        made = state.MigComputeInstance(id=-1, profile_id=profile.id, placement=placement, uuid="")
        instance = dataclasses.replace(instance, compute=(*instance.compute, made))
        count += 1
    return count


def create(
    gpu: state.Gpu, profile_id: int, placement: state.MigPlacement | None
) -> tuple[state.Gpu, state.MigInstance]:
    """Makes a GPU instance. Without a placement it takes the first that is free; which one the driver takes is not public."""
    mig = enabled(gpu)
    profile = profile_of(mig, profile_id)
    if placement is not None and placement not in profile.placements:
        raise StatusError(abi.INVALID_ARGUMENT)
    place = _free_place(mig, profile, (placement,) if placement is not None else profile.placements)
    if place is None:
        raise StatusError(abi.INSUFFICIENT_RESOURCES)
    number = instance_id(place, memory_slices(mig.profiles))
    instance = state.MigInstance(id=number, profile_id=profile_id, placement=place, serial=mig.made + 1)
    instances = tuple(sorted((*mig.instances, instance), key=lambda each: each.id))
    return with_mig(gpu, dataclasses.replace(mig, instances=instances, made=mig.made + 1)), instance


def destroy(gpu: state.Gpu, instance: state.MigInstance) -> state.Gpu:
    """Removes a GPU instance, which must be empty and unused."""
    mig = enabled(gpu)
    found = _same(mig.instances, instance)
    if found.compute or any(process.gpu_instance == found.id for process in gpu.processes):
        raise StatusError(abi.IN_USE)
    rest = tuple(each for each in mig.instances if each is not found)
    return with_mig(gpu, dataclasses.replace(mig, instances=rest))


def create_compute(
    gpu: state.Gpu, instance: state.MigInstance, profile_id: int, placement: state.MigPlacement | None
) -> tuple[state.Gpu, state.MigComputeInstance]:
    """Makes a compute instance in a GPU instance, at the first free place where none is said. It gets the lowest free id."""
    mig = enabled(gpu)
    found = _same(mig.instances, instance)
    profile = compute_profile_of(profile_of(mig, found.profile_id), profile_id)
    if placement is not None and placement not in profile.placements:
        raise StatusError(abi.INVALID_ARGUMENT)
    place = _free_compute_place(found, profile, (placement,) if placement is not None else profile.placements)
    if place is None:
        raise StatusError(abi.INSUFFICIENT_RESOURCES)
    taken = {each.id for each in found.compute}
    number = next(each for each in range(len(taken) + 1) if each not in taken)
    made = state.MigComputeInstance(
        id=number,
        profile_id=profile_id,
        placement=place,
        uuid=device_uuid(gpu.uuid or str(gpu.pci), found.id, number),
        serial=mig.made + 1,
    )
    compute = tuple(sorted((*found.compute, made), key=lambda each: each.id))
    changed = _exchanged(mig, found, dataclasses.replace(found, compute=compute))
    return with_mig(gpu, dataclasses.replace(changed, made=mig.made + 1)), made


def destroy_compute(
    gpu: state.Gpu, instance: state.MigInstance, compute_instance: state.MigComputeInstance
) -> state.Gpu:
    """Removes a compute instance that no process uses."""
    mig = enabled(gpu)
    found = _same(mig.instances, instance)
    gone = _same(found.compute, compute_instance)
    used = ((process.gpu_instance, process.compute_instance) for process in gpu.processes)
    if (found.id, gone.id) in used:
        raise StatusError(abi.IN_USE)
    compute = tuple(each for each in found.compute if each is not gone)
    return with_mig(gpu, _exchanged(mig, found, dataclasses.replace(found, compute=compute)))


def set_mode(gpu: state.Gpu, *, on: bool) -> tuple[state.Gpu, int]:
    """Changes the MIG mode: the GPU after it, and the activation status."""
    mig = gpu.mig
    if mig is None:
        raise StatusError(abi.NOT_SUPPORTED)
    if (mig.current, mig.pending) == (on, on):
        return gpu, abi.SUCCESS
    used = bool(gpu.processes or (mig.instances and not on))
    if not waits_for_reset(gpu):
        if used:
            raise StatusError(abi.IN_USE)
        return with_mig(gpu, dataclasses.replace(mig, current=on, pending=on)), abi.SUCCESS
    status = abi.SUCCESS if mig.current == on else abi.IN_USE if used else abi.RESET_REQUIRED
    return with_mig(gpu, dataclasses.replace(mig, pending=on)), status


def waits_for_reset(gpu: state.Gpu) -> bool:
    """Whether a change of the MIG mode waits for a reset: on Ampere (MIG User Guide, "Enable MIG Mode")."""
    return gpu.architecture == abi.ARCHITECTURES["ampere"]


def reset(gpu: state.Gpu) -> state.Gpu:
    """After a reset: the pending mode holds, and no instance is left."""
    if gpu.mig is None:
        return gpu
    return with_mig(gpu, dataclasses.replace(gpu.mig, current=gpu.mig.pending, instances=()))


def unbound(gpu: state.Gpu) -> state.Gpu:
    """After its driver has left it: no instance and no process."""
    gpu = dataclasses.replace(gpu, processes=()) if gpu.processes else gpu
    if gpu.mig is None or not gpu.mig.instances:
        return gpu
    return with_mig(gpu, dataclasses.replace(gpu.mig, instances=()))


def _free_place(
    mig: state.Mig, profile: state.MigProfile, among: Iterable[state.MigPlacement] | None = None
) -> state.MigPlacement | None:
    by_id = {each.id: each for each in mig.profiles}
    there = [by_id[each.profile_id] for each in mig.instances if each.profile_id in by_id]
    if sum(each.id == profile.id for each in there) >= profile.instances:
        return None
    for name in _RESOURCES:
        whole = max(getattr(each, name) for each in mig.profiles)
        if sum(getattr(each, name) for each in (*there, profile)) > whole:
            return None
    places = profile.placements if among is None else among
    taken = [each.placement for each in mig.instances]
    return next((place for place in places if not any(overlap(place, other) for other in taken)), None)


def _free_compute_place(
    instance: state.MigInstance,
    profile: state.MigComputeProfile,
    among: Iterable[state.MigPlacement] | None = None,
) -> state.MigPlacement | None:
    if sum(each.profile_id == profile.id for each in instance.compute) >= profile.instances:
        return None
    places = profile.placements if among is None else among
    taken = [each.placement for each in instance.compute]
    return next((place for place in places if not any(overlap(place, other) for other in taken)), None)


def overlap(one: state.MigPlacement, other: state.MigPlacement) -> bool:
    """Whether both need one slice."""
    return one.start < other.start + other.size and other.start < one.start + one.size


def _same(there: Iterable[T], wanted: T) -> T:
    """The instance as it is now; an error once it is gone, whatever has its id since."""
    for each in there:
        if (each.id, each.serial) == (wanted.id, wanted.serial):
            return each
    raise StatusError(abi.INVALID_ARGUMENT)


def _exchanged(mig: state.Mig, old: state.MigInstance, new: state.MigInstance) -> state.Mig:
    return dataclasses.replace(mig, instances=tuple(new if each is old else each for each in mig.instances))
