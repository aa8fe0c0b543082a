# SPDX-License-Identifier: Apache-2.0
"""Reading from a library what a GPU can be divided into and what it is divided into.

NVML tells compute instance profiles of a GPU instance that exists only, and looking at a node makes none. Of profiles without an
instance that may be asked, those are taken that every GPU has as far as is known (`migcompute`). Where MIG is off NVML says that
there can be no MIG device: as many are taken as there can be instances of one profile, which is so on all GPUs with a table. How
long a change takes is not asked.
"""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

from discovery.mock import abi, abi_mig, migcompute, nvmlclient, state
from discovery.mock.nvmlclient import Client

_NO_SUCH = (*nvmlclient.ABSENT, abi.INVALID_ARGUMENT)
"""The answers to the number of a profile that a GPU has not."""

_GRAPHICS = {number for name, number in abi.GPU_INSTANCE_PROFILES.items() if name.endswith("_GFX")}
_PREFIX = "MIG "
_MOST = 64
"""More instances or placements than any GPU has: a larger number is no answer."""


def read(client: Client, handle: ctypes.c_void_p) -> state.Mig | None:
    """MIG of a GPU; None where it has none."""
    current, pending = ctypes.c_uint(), ctypes.c_uint()
    if not client.ask("nvmlDeviceGetMigMode", handle, ctypes.byref(current), ctypes.byref(pending)):
        return None
    most = client.number("nvmlDeviceGetMaxMigDeviceCount", ctypes.c_uint, handle) or 0
    profiles = {profile.id: profile for profile in _profiles(client, handle)}
    instances: list[state.MigInstance] = []
    if current.value:
        uuids = _uuids(client, handle, most)
        for profile in tuple(profiles.values()):
            for instance in _gpu_instances(client, handle, profile):
                if not profiles[profile.id].compute:
                    compute = tuple(_compute_profiles(client, instance))
                    profiles[profile.id] = dataclasses.replace(profile, compute=compute)
                instances += _instance(client, instance, profiles[profile.id], uuids)
    of_one_slice = _of_one_slice(profiles.values())
    return state.Mig(
        current=bool(current.value),
        pending=bool(pending.value),
        max_devices=most or max((profile.instances for profile in profiles.values()), default=0),
        profiles=tuple(
            profile
            if profile.compute or profile.slices not in abi.COMPUTE_INSTANCE_PROFILES
            else dataclasses.replace(profile, compute=migcompute.profiles(profile, of_one_slice))
            for profile in sorted(profiles.values(), key=lambda each: each.number)
        ),
        instances=tuple(sorted(instances, key=lambda each: each.id)),
    )


def _profiles(client: Client, handle: ctypes.c_void_p) -> Iterator[state.MigProfile]:
    for number in sorted(abi.GPU_INSTANCE_PROFILES.values()):
        info = _info(client, abi_mig.GpuInstanceProfileV3, "nvmlDeviceGetGpuInstanceProfileInfoV", handle, number)
        older = info is None
        if older:
            info = _info(client, abi_mig.GpuInstanceProfileV2, "nvmlDeviceGetGpuInstanceProfileInfoV", handle, number)
        if info is not None:
            yield state.MigProfile(
                number=number,
                id=info.id,
                name=_name(info.name),
                slices=info.sliceCount,
                memory_mib=info.memorySizeMB,
                multiprocessors=info.multiprocessorCount,
                copy_engines=info.copyEngineCount,
                decoders=info.decoderCount,
                encoders=info.encoderCount,
                jpeg_engines=info.jpegCount,
                ofa_engines=info.ofaCount,
                p2p=bool(info.isP2pSupported if older else info.capabilities & abi_mig.CAPABILITY_P2P),
                graphics=number in _GRAPHICS,
                instances=info.instanceCount,
                placements=_placements(client, "nvmlDeviceGetGpuInstancePossiblePlacements_v2", handle, info.id),
            )


def _compute_profiles(client: Client, instance: ctypes.c_void_p) -> Iterator[state.MigComputeProfile]:
    """Those of a GPU instance that exists."""
    name = "nvmlGpuInstanceGetComputeInstanceProfileInfoV"
    for number in range(abi_mig.COMPUTE_INSTANCE_PROFILE_COUNT):
        asked = (instance, number, abi_mig.ENGINE_PROFILE_SHARED)
        info = _info(client, abi_mig.ComputeInstanceProfileV3, name, *asked)
        info = info or _info(client, abi_mig.ComputeInstanceProfileV2, name, *asked)
        if info is not None:
            yield state.MigComputeProfile(
                number=number,
                id=info.id,
                name=_name(info.name),
                slices=info.sliceCount,
                multiprocessors=info.multiprocessorCount,
                instances=info.instanceCount,
                placements=_placements(
                    client, "nvmlGpuInstanceGetComputeInstancePossiblePlacements", instance, info.id
                ),
            )


def _info(client: Client, kind: type[Any], name: str, handle: ctypes.c_void_p, *numbers: int) -> Any:
    """What a function tells of the profile with some number; None where there is none."""
    info = kind(version=abi.version_of(kind))
    status = client.call(name, handle, *map(ctypes.c_uint, numbers), ctypes.byref(info))
    if status not in (abi.SUCCESS, abi.ARGUMENT_VERSION_MISMATCH, *_NO_SUCH):
        client.errors[name] = status
    return info if status == abi.SUCCESS else None


def _name(told: bytes) -> str:
    return told.decode(errors="replace").removeprefix(_PREFIX)


def _placements(client: Client, name: str, handle: ctypes.c_void_p, profile_id: int) -> tuple[state.MigPlacement, ...]:
    number = ctypes.c_uint(profile_id)
    count = ctypes.c_uint()
    if not client.ask(name, handle, number, None, ctypes.byref(count)):
        return ()
    out = (abi_mig.Placement * min(count.value, _MOST))()
    count.value = len(out)
    if not client.ask(name, handle, number, out, ctypes.byref(count)):
        return ()
    return tuple(state.MigPlacement(start=each.start, size=each.size) for each in out[: count.value])


def _gpu_instances(client: Client, handle: ctypes.c_void_p, profile: state.MigProfile) -> list[ctypes.c_void_p]:
    return _handles(client, "nvmlDeviceGetGpuInstances", handle, profile.id, profile.instances)


def _handles(client: Client, name: str, of: ctypes.c_void_p, profile_id: int, at_most: int) -> list[ctypes.c_void_p]:
    out = (ctypes.c_void_p * min(max(at_most, 1), _MOST))()
    count = ctypes.c_uint(len(out))
    if not client.ask(name, of, ctypes.c_uint(profile_id), out, ctypes.byref(count)):
        return []
    return [ctypes.c_void_p(each) for each in out[: count.value]]


def _instance(
    client: Client, handle: ctypes.c_void_p, profile: state.MigProfile, uuids: dict[tuple[int, int], str]
) -> Iterator[state.MigInstance]:
    """The instance behind a handle, if it is still there."""
    info = abi_mig.GpuInstance()
    if not client.ask("nvmlGpuInstanceGetInfo", handle, ctypes.byref(info)):
        return
    compute = []
    for each in profile.compute:
        for found in _handles(client, "nvmlGpuInstanceGetComputeInstances", handle, each.id, each.instances):
            told = abi_mig.ComputeInstance()
            if client.ask("nvmlComputeInstanceGetInfo_v2", found, ctypes.byref(told)):
                compute.append(
                    state.MigComputeInstance(
                        id=told.id,
                        profile_id=told.profileId,
                        placement=_placement(told.placement),
                        uuid=uuids.get((info.id, told.id), ""),
                    )
                )
    yield state.MigInstance(
        id=info.id,
        profile_id=info.profileId,
        placement=_placement(info.placement),
        compute=tuple(sorted(compute, key=lambda each: each.id)),
    )


def _placement(told: Any) -> state.MigPlacement:
    return state.MigPlacement(start=told.start, size=told.size)


def _uuids(client: Client, handle: ctypes.c_void_p, most: int) -> dict[tuple[int, int], str]:
    """The UUIDs of MIG devices, by the ids of their instances."""
    uuids: dict[tuple[int, int], str] = {}
    for index in range(min(most, _MOST)):
        device = ctypes.c_void_p()
        status = client.call("nvmlDeviceGetMigDeviceHandleByIndex", handle, ctypes.c_uint(index), ctypes.byref(device))
        if status == abi.SUCCESS:  # there are gaps: NOT_FOUND
            gpu_instance = client.number("nvmlDeviceGetGpuInstanceId", ctypes.c_uint, device)
            compute_instance = client.number("nvmlDeviceGetComputeInstanceId", ctypes.c_uint, device)
            uuid = client.text("nvmlDeviceGetUUID", device)
            if gpu_instance is not None and compute_instance is not None and uuid is not None:
                uuids[gpu_instance, compute_instance] = uuid
    return uuids


def _of_one_slice(profiles: Iterable[state.MigProfile]) -> dict[int, int]:
    """The multiprocessors of one compute slice: those of the plain profile of one slice."""
    plain = abi.GPU_INSTANCE_PROFILES["1_SLICE"]
    found = next((each for each in profiles if each.number == plain), None)
    return {} if found is None else {found.slices: found.multiprocessors}
