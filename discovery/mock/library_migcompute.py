# SPDX-License-Identifier: Apache-2.0
"""NVML functions about the compute instances of a GPU instance. Table: C name -> Function."""

from __future__ import annotations

import ctypes
from typing import Any

from discovery.mock import abi, abi_mig, call, handles, library_mig, migrules, state
from discovery.mock.driver import Driver
from discovery.mock.status import StatusError


@call.gpu_instance(call.UINT, call.UINT, call.POINTER)
def _profile(
    _driver: Driver, gpu: state.Gpu, instance: state.MigInstance, number: int, engines: int, out: int | None
) -> None:
    parent, profile = _by_number(gpu, instance, number, engines)
    _fill(call.struct(out, abi_mig.ComputeInstanceProfile), parent, profile)


@call.gpu_instance(call.UINT, call.UINT, call.POINTER)
def _profile_versioned(
    _driver: Driver, gpu: state.Gpu, instance: state.MigInstance, number: int, engines: int, out: int | None
) -> None:
    parent, profile = _by_number(gpu, instance, number, engines)
    info = call.versioned(out, abi_mig.ComputeInstanceProfileV2, abi_mig.ComputeInstanceProfileV3)
    assert isinstance(info, abi_mig.ComputeInstanceProfileV2 | abi_mig.ComputeInstanceProfileV3)
    _fill(info, parent, profile)
    info.name = f"MIG {profile.name}".encode()
    if isinstance(info, abi_mig.ComputeInstanceProfileV3):
        info.capabilities = abi_mig.CAPABILITY_GRAPHICS if parent.graphics else 0


@call.gpu_instance(call.UINT, call.POINTER, root=True)
def _remaining(_driver: Driver, gpu: state.Gpu, instance: state.MigInstance, profile_id: int, out: int | None) -> None:
    _, profile = _by_id(gpu, instance, profile_id)
    call.put(out, ctypes.c_uint, migrules.compute_room(instance, profile))


@call.gpu_instance(call.UINT, call.POINTER, call.POINTER, root=True)
def _placements(
    _driver: Driver,
    gpu: state.Gpu,
    instance: state.MigInstance,
    profile_id: int,
    out: int | None,
    count: int | None,
) -> None:
    _, profile = _by_id(gpu, instance, profile_id)
    library_mig.put_placements(profile.placements, out, count)


@call.gpu_instance(call.UINT, call.POINTER, root=True)
def _create(driver: Driver, gpu: state.Gpu, instance: state.MigInstance, profile_id: int, out: int | None) -> None:
    _make(driver, gpu, instance, profile_id=profile_id, placement=None, out=out)


@call.gpu_instance(call.UINT, call.POINTER, call.POINTER, root=True)
def _create_placed(  # noqa: PLR0917 - as in C
    driver: Driver,
    gpu: state.Gpu,
    instance: state.MigInstance,
    profile_id: int,
    placement: int | None,
    out: int | None,
) -> None:
    _make(driver, gpu, instance, profile_id=profile_id, placement=library_mig.read_placement(placement), out=out)


def _make(
    driver: Driver,
    gpu: state.Gpu,
    instance: state.MigInstance,
    *,
    profile_id: int,
    placement: state.MigPlacement | None,
    out: int | None,
) -> None:
    if not out:
        raise StatusError(abi.INVALID_ARGUMENT)
    made = driver.hand.change(gpu.pci, lambda now: migrules.create_compute(now, instance, profile_id, placement))
    call.put(out, ctypes.c_void_p, driver.handle(handles.of_compute(gpu, instance, made)))


@call.compute_instance(root=True)
def _destroy(driver: Driver, gpu: state.Gpu, instance: state.MigInstance, compute: state.MigComputeInstance) -> None:
    driver.hand.change(gpu.pci, lambda now: (migrules.destroy_compute(now, instance, compute), None))


@call.gpu_instance(call.UINT, call.POINTER, call.POINTER, root=True)
def _instances(  # noqa: PLR0917 - as in C
    driver: Driver,
    gpu: state.Gpu,
    instance: state.MigInstance,
    profile_id: int,
    out: int | None,
    count: int | None,
) -> None:
    _by_id(gpu, instance, profile_id)
    there = [each for each in instance.compute if each.profile_id == profile_id]
    library_mig.put_handles((driver.handle(handles.of_compute(gpu, instance, each)) for each in there), out, count)


@call.gpu_instance(call.UINT, call.POINTER, root=True)
def _by_instance_id(driver: Driver, gpu: state.Gpu, instance: state.MigInstance, number: int, out: int | None) -> None:
    for compute in instance.compute:
        if compute.id == number:
            call.put(out, ctypes.c_void_p, driver.handle(handles.of_compute(gpu, instance, compute)))
            return
    raise StatusError(abi.NOT_FOUND)


@call.compute_instance(call.POINTER)
def _info(
    driver: Driver,
    gpu: state.Gpu,
    instance: state.MigInstance,
    compute: state.MigComputeInstance,
    out: int | None,
) -> None:
    """`device` is the MIG device, although nvml.h calls it the parent: NVIDIA's DRA driver asks it for the MIG device's UUID
    (createMigDevice in cmd/gpu-kubelet-plugin/nvlib.go of kubernetes-sigs/dra-driver-nvidia-gpu).
    """
    info = call.struct(out, abi_mig.ComputeInstance)
    info.device = library_mig.device_handle(driver, gpu, handles.MigPart(instance=instance, compute=compute))
    info.gpuInstance = driver.handle(handles.of_instance(gpu, instance))
    info.id, info.profileId = compute.id, compute.profile_id
    info.placement.start, info.placement.size = compute.placement.start, compute.placement.size


def _parent_profile(gpu: state.Gpu, instance: state.MigInstance) -> state.MigProfile:
    return migrules.profile_of(migrules.enabled(gpu), instance.profile_id, otherwise=abi.NOT_SUPPORTED)


def _by_number(
    gpu: state.Gpu, instance: state.MigInstance, number: int, engines: int
) -> tuple[state.MigProfile, state.MigComputeProfile]:
    if number >= abi_mig.COMPUTE_INSTANCE_PROFILE_COUNT or engines != abi_mig.ENGINE_PROFILE_SHARED:
        raise StatusError(abi.INVALID_ARGUMENT)
    parent = _parent_profile(gpu, instance)
    for profile in parent.compute:
        if profile.number == number:
            return parent, profile
    raise StatusError(abi.NOT_SUPPORTED)


def _by_id(
    gpu: state.Gpu, instance: state.MigInstance, profile_id: int
) -> tuple[state.MigProfile, state.MigComputeProfile]:
    parent = _parent_profile(gpu, instance)
    return parent, migrules.compute_profile_of(parent, profile_id, otherwise=abi.NOT_SUPPORTED)


def _fill(info: Any, parent: state.MigProfile, profile: state.MigComputeProfile) -> None:
    info.id, info.sliceCount, info.instanceCount = profile.id, profile.slices, profile.instances
    info.multiprocessorCount = profile.multiprocessors
    library_mig.fill_shared_engines(info, parent)


FUNCTIONS = {
    "nvmlGpuInstanceGetComputeInstanceProfileInfo": _profile,
    "nvmlGpuInstanceGetComputeInstanceProfileInfoV": _profile_versioned,
    "nvmlGpuInstanceGetComputeInstanceRemainingCapacity": _remaining,
    "nvmlGpuInstanceGetComputeInstancePossiblePlacements": _placements,
    "nvmlGpuInstanceCreateComputeInstance": _create,
    "nvmlGpuInstanceCreateComputeInstanceWithPlacement": _create_placed,
    "nvmlComputeInstanceDestroy": _destroy,
    "nvmlGpuInstanceGetComputeInstances": _instances,
    "nvmlGpuInstanceGetComputeInstanceById": _by_instance_id,
    "nvmlComputeInstanceGetInfo_v2": _info,
}
