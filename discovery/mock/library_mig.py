# SPDX-License-Identifier: Apache-2.0
"""NVML functions about MIG mode, GPU instances and MIG devices. Table: C name -> Function.

nvml.h says of profiles and placements NVML_ERROR_NOT_SUPPORTED without MIG mode; drivers answer all the same, on which NVIDIA's DRA
driver builds (inspectMigProfilesAndPlacements in cmd/gpu-kubelet-plugin/nvlib.go of kubernetes-sigs/dra-driver-nvidia-gpu).
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from typing import Any

from discovery.mock import abi, abi_mig, call, handles, migrules, state
from discovery.mock.driver import Driver
from discovery.mock.status import StatusError

_MIB = 1 << 20
_NOT_AVAILABLE = 0xFFFFFFFF
"""GPU and compute instance of a process that uses the whole GPU."""


@call.device(call.POINTER, call.POINTER)
def _mode(_driver: Driver, gpu: state.Gpu, current: int | None, pending: int | None) -> None:
    mig = call.wanted(gpu.mig)
    call.put(current, ctypes.c_uint, mig.current)
    call.put(pending, ctypes.c_uint, mig.pending)


@call.device(call.UINT, call.POINTER, root=True)
def _set_mode(driver: Driver, gpu: state.Gpu, mode: int, out: int | None) -> None:
    if mode not in (0, 1) or not out:
        raise StatusError(abi.INVALID_ARGUMENT)
    call.put(out, ctypes.c_uint, abi.SUCCESS)
    try:
        status = driver.hand.change(
            gpu.pci, lambda now: migrules.set_mode(now, on=bool(mode)), seconds=lambda times: times.mode_s
        )
    except StatusError as err:
        call.put(out, ctypes.c_uint, err.status)
        raise
    call.put(out, ctypes.c_uint, status)


@call.device(call.POINTER)
def _max_devices(_driver: Driver, gpu: state.Gpu, out: int | None) -> None:
    call.put(out, ctypes.c_uint, gpu.mig.max_devices if gpu.mig is not None and gpu.mig.current else 0)


@call.device(call.UINT, call.POINTER)
def _device_by_index(driver: Driver, gpu: state.Gpu, index: int, out: int | None) -> None:
    mig = migrules.enabled(gpu)
    if index >= mig.max_devices:
        raise StatusError(abi.INVALID_ARGUMENT)
    devices = handles.mig_devices(gpu)
    if index >= len(devices):
        raise StatusError(abi.NOT_FOUND)
    call.put(out, ctypes.c_void_p, device_handle(driver, gpu, devices[index]))


@call.any_device(call.POINTER)
def _is_mig_device(_driver: Driver, _gpu: state.Gpu, part: handles.MigPart | None, out: int | None) -> None:
    call.put(out, ctypes.c_uint, part is not None)


@call.any_device(call.POINTER)
def _instance_id(_driver: Driver, gpu: state.Gpu, part: handles.MigPart | None, out: int | None) -> None:
    call.put(out, ctypes.c_uint, _part(gpu, part).instance.id)


@call.any_device(call.POINTER)
def _compute_instance_id(_driver: Driver, gpu: state.Gpu, part: handles.MigPart | None, out: int | None) -> None:
    call.put(out, ctypes.c_uint, _part(gpu, part).compute.id)


@call.any_device(call.POINTER)
def _parent(driver: Driver, gpu: state.Gpu, part: handles.MigPart | None, out: int | None) -> None:
    _part(gpu, part)
    call.put(out, ctypes.c_void_p, driver.handle(gpu.pci))


@call.any_device(call.POINTER)
def _attributes(_driver: Driver, gpu: state.Gpu, part: handles.MigPart | None, out: int | None) -> None:
    """For MIG devices only (nvml.h)."""
    found = call.wanted(part)
    profile, compute = profiles_of(gpu, found)
    attributes = call.struct(out, abi_mig.Attributes)
    attributes.multiprocessorCount = compute.multiprocessors
    fill_shared_engines(attributes, profile)
    attributes.gpuInstanceSliceCount, attributes.computeInstanceSliceCount = profile.slices, compute.slices
    attributes.memorySizeMB = profile.memory_mib


@call.any_device(call.POINTER, call.POINTER)
def _processes(
    _driver: Driver, gpu: state.Gpu, part: handles.MigPart | None, count: int | None, out: int | None
) -> None:
    there = [
        process
        for process in gpu.processes
        if part is None or (process.gpu_instance, process.compute_instance) == (part.instance.id, part.compute.id)
    ]
    place = ctypes.c_uint.from_address(count).value if count else 0
    call.put(count, ctypes.c_uint, len(there))
    if place < len(there):
        raise StatusError(abi.INSUFFICIENT_SIZE)
    for number, process in enumerate(there):
        info = call.struct(out and out + number * ctypes.sizeof(abi_mig.Process), abi_mig.Process)
        info.pid, info.usedGpuMemory = process.pid, process.memory
        info.gpuInstanceId = _NOT_AVAILABLE if process.gpu_instance is None else process.gpu_instance
        info.computeInstanceId = _NOT_AVAILABLE if process.compute_instance is None else process.compute_instance


@call.device(call.UINT, call.POINTER)
def _profile(_driver: Driver, gpu: state.Gpu, number: int, out: int | None) -> None:
    profile = _by_number(gpu, number)
    info = call.struct(out, abi_mig.GpuInstanceProfile)
    _fill_profile(info, profile)
    info.isP2pSupported = profile.p2p


@call.device(call.UINT, call.POINTER)
def _profile_versioned(_driver: Driver, gpu: state.Gpu, number: int, out: int | None) -> None:
    _put_profile(out, _by_number(gpu, number))


@call.device(call.UINT, call.POINTER)
def _profile_by_id(_driver: Driver, gpu: state.Gpu, profile_id: int, out: int | None) -> None:
    _put_profile(out, migrules.profile_of(call.wanted(gpu.mig), profile_id, otherwise=abi.NOT_SUPPORTED))


@call.device(call.UINT, call.POINTER, call.POINTER, root=True)
def _placements(_driver: Driver, gpu: state.Gpu, profile_id: int, out: int | None, count: int | None) -> None:
    profile = migrules.profile_of(call.wanted(gpu.mig), profile_id, otherwise=abi.NOT_SUPPORTED)
    put_placements(profile.placements, out, count)


@call.device(call.UINT, call.POINTER, root=True)
def _remaining(_driver: Driver, gpu: state.Gpu, profile_id: int, out: int | None) -> None:
    mig = migrules.enabled(gpu)
    profile = migrules.profile_of(mig, profile_id, otherwise=abi.NOT_SUPPORTED)
    call.put(out, ctypes.c_uint, migrules.room(mig, profile))


@call.device(call.UINT, call.POINTER, root=True)
def _create(driver: Driver, gpu: state.Gpu, profile_id: int, out: int | None) -> None:
    _make(driver, gpu, profile_id, None, out)


@call.device(call.UINT, call.POINTER, call.POINTER, root=True)
def _create_placed(driver: Driver, gpu: state.Gpu, profile_id: int, placement: int | None, out: int | None) -> None:
    _make(driver, gpu, profile_id, read_placement(placement), out)


def _make(
    driver: Driver, gpu: state.Gpu, profile_id: int, placement: state.MigPlacement | None, out: int | None
) -> None:
    if not out:
        raise StatusError(abi.INVALID_ARGUMENT)
    instance = driver.hand.change(
        gpu.pci,
        lambda now: migrules.create(now, profile_id, placement),
        seconds=lambda times: times.create_s,
    )
    call.put(out, ctypes.c_void_p, driver.handle(handles.of_instance(gpu, instance)))


@call.gpu_instance(root=True)
def _destroy(driver: Driver, gpu: state.Gpu, instance: state.MigInstance) -> None:
    driver.hand.change(
        gpu.pci,
        lambda now: (migrules.destroy(now, instance), None),
        seconds=lambda times: times.destroy_s,
    )


@call.device(call.UINT, call.POINTER, call.POINTER, root=True)
def _instances(driver: Driver, gpu: state.Gpu, profile_id: int, out: int | None, count: int | None) -> None:
    mig = migrules.enabled(gpu)
    migrules.profile_of(mig, profile_id)
    there = [each for each in mig.instances if each.profile_id == profile_id]
    put_handles((driver.handle(handles.of_instance(gpu, each)) for each in there), out, count)


@call.device(call.UINT, call.POINTER, root=True)
def _instance_by_id(driver: Driver, gpu: state.Gpu, number: int, out: int | None) -> None:
    for instance in migrules.enabled(gpu).instances:
        if instance.id == number:
            call.put(out, ctypes.c_void_p, driver.handle(handles.of_instance(gpu, instance)))
            return
    raise StatusError(abi.NOT_FOUND)


@call.gpu_instance(call.POINTER)
def _instance_info(driver: Driver, gpu: state.Gpu, instance: state.MigInstance, out: int | None) -> None:
    info = call.struct(out, abi_mig.GpuInstance)
    info.device, info.id, info.profileId = driver.handle(gpu.pci), instance.id, instance.profile_id
    info.placement.start, info.placement.size = instance.placement.start, instance.placement.size


def device_handle(driver: Driver, gpu: state.Gpu, part: handles.MigPart) -> int:
    """The handle of a MIG device."""
    return driver.handle(handles.MigDevice(handles.of_compute(gpu, part.instance, part.compute)))


def profiles_of(gpu: state.Gpu, part: handles.MigPart) -> tuple[state.MigProfile, state.MigComputeProfile]:
    """The profiles of a MIG device. Of a recorded one they may be unknown: NVML_ERROR_NOT_SUPPORTED."""
    mig = call.wanted(gpu.mig)
    profile = migrules.profile_of(mig, part.instance.profile_id, otherwise=abi.NOT_SUPPORTED)
    return profile, migrules.compute_profile_of(profile, part.compute.profile_id, otherwise=abi.NOT_SUPPORTED)


def device_name(gpu: state.Gpu, part: handles.MigPart) -> str:
    """The name of a MIG device: `NVIDIA H100 80GB HBM3 MIG 1g.10gb`."""
    return f"{call.wanted(gpu.name)} MIG {profiles_of(gpu, part)[1].name}"


def device_memory(gpu: state.Gpu, part: handles.MigPart) -> state.Memory:
    """The memory of a MIG device, which all compute instances of its GPU instance share."""
    used = sum(process.memory for process in gpu.processes if process.gpu_instance == part.instance.id)
    return state.Memory(total=profiles_of(gpu, part)[0].memory_mib * _MIB, used=used)


def put_placements(placements: Iterable[state.MigPlacement], out: int | None, count: int | None) -> None:
    """Writes placements and how many they are; without room for them (NULL) their number only."""
    there = tuple(placements)
    call.put(count, ctypes.c_uint, len(there))
    for number, each in enumerate(there if out else ()):
        place = call.struct((out or 0) + number * ctypes.sizeof(abi_mig.Placement), abi_mig.Placement)
        place.start, place.size = each.start, each.size


def put_handles(there: Iterable[int], out: int | None, count: int | None) -> None:
    """Writes handles and how many they are; the caller gives room for as many as the profile can have."""
    if not out or not count:
        raise StatusError(abi.INVALID_ARGUMENT)
    number = 0
    for handle in there:
        call.put(out + number * ctypes.sizeof(ctypes.c_void_p), ctypes.c_void_p, handle)
        number += 1
    call.put(count, ctypes.c_uint, number)


def read_placement(pointer: int | None) -> state.MigPlacement:
    """The placement that a caller asks for."""
    place = call.struct(pointer, abi_mig.Placement)
    return state.MigPlacement(start=place.start, size=place.size)


def fill_shared_engines(info: Any, profile: state.MigProfile) -> None:
    """The engines that all compute instances of a GPU instance share."""
    info.sharedCopyEngineCount, info.sharedDecoderCount = profile.copy_engines, profile.decoders
    info.sharedEncoderCount, info.sharedJpegCount = profile.encoders, profile.jpeg_engines
    info.sharedOfaCount = profile.ofa_engines


def _part(gpu: state.Gpu, part: handles.MigPart | None) -> handles.MigPart:
    """A MIG device where nothing else will do."""
    if part is None:
        raise StatusError(abi.NOT_SUPPORTED if gpu.mig is None else abi.INVALID_ARGUMENT)
    return part


def _by_number(gpu: state.Gpu, number: int) -> state.MigProfile:
    if number >= abi_mig.GPU_INSTANCE_PROFILE_COUNT:
        raise StatusError(abi.INVALID_ARGUMENT)
    for profile in call.wanted(gpu.mig).profiles:
        if profile.number == number:
            return profile  # type: ignore[no-any-return]
    raise StatusError(abi.NOT_SUPPORTED)


def _put_profile(out: int | None, profile: state.MigProfile) -> None:
    info = call.versioned(out, abi_mig.GpuInstanceProfileV2, abi_mig.GpuInstanceProfileV3)
    _fill_profile(info, profile)
    assert isinstance(info, abi_mig.GpuInstanceProfileV2 | abi_mig.GpuInstanceProfileV3)
    info.name = f"MIG {profile.name}".encode()
    if isinstance(info, abi_mig.GpuInstanceProfileV3):
        info.capabilities = abi_mig.CAPABILITY_P2P if profile.p2p else 0
    else:
        info.isP2pSupported = profile.p2p


def _fill_profile(info: Any, profile: state.MigProfile) -> None:
    info.id, info.sliceCount, info.instanceCount = profile.id, profile.slices, profile.instances
    info.multiprocessorCount, info.copyEngineCount = profile.multiprocessors, profile.copy_engines
    info.decoderCount, info.encoderCount = profile.decoders, profile.encoders
    info.jpegCount, info.ofaCount, info.memorySizeMB = profile.jpeg_engines, profile.ofa_engines, profile.memory_mib


FUNCTIONS = {
    "nvmlDeviceGetMigMode": _mode,
    "nvmlDeviceSetMigMode": _set_mode,
    "nvmlDeviceGetMaxMigDeviceCount": _max_devices,
    "nvmlDeviceGetMigDeviceHandleByIndex": _device_by_index,
    "nvmlDeviceIsMigDeviceHandle": _is_mig_device,
    "nvmlDeviceGetGpuInstanceId": _instance_id,
    "nvmlDeviceGetComputeInstanceId": _compute_instance_id,
    "nvmlDeviceGetDeviceHandleFromMigDeviceHandle": _parent,
    "nvmlDeviceGetAttributes_v2": _attributes,
    "nvmlDeviceGetComputeRunningProcesses_v3": _processes,
    "nvmlDeviceGetGpuInstanceProfileInfo": _profile,
    "nvmlDeviceGetGpuInstanceProfileInfoV": _profile_versioned,
    "nvmlDeviceGetGpuInstanceProfileInfoByIdV": _profile_by_id,
    "nvmlDeviceGetGpuInstancePossiblePlacements_v2": _placements,
    "nvmlDeviceGetGpuInstanceRemainingCapacity": _remaining,
    "nvmlDeviceCreateGpuInstance": _create,
    "nvmlDeviceCreateGpuInstanceWithPlacement": _create_placed,
    "nvmlGpuInstanceDestroy": _destroy,
    "nvmlDeviceGetGpuInstances": _instances,
    "nvmlDeviceGetGpuInstanceById": _instance_by_id,
    "nvmlGpuInstanceGetInfo": _instance_info,
}
