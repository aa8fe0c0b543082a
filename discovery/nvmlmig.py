# SPDX-License-Identifier: Apache-2.0
"""Multi-Instance GPU through NVML, of one GPU in one session (nvml.h, "Multi Instance GPU"). nvml.py makes these and passes
`pynvml` in, as it does for nvmllibrary.py.

What NVML says of instances and profiles is checked before anything is built on it: a name becomes the name of a device, a
placement the memory of somebody's program.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from discovery import errors, mig, model, nvmllibrary, nvmlnumbers

_T = TypeVar("_T")

Noted = Callable[[Callable[[], Any]], Any]
"""Reads something, and makes a Finding of a SourceError that is no reason to give the GPU up: None is then the answer."""

_PROFILES = 0x12
"""NVML_GPU_INSTANCE_PROFILE_COUNT: their numbers are below it."""

_COMPUTES = 0x9
"""NVML_COMPUTE_INSTANCE_PROFILE_COUNT."""

_ABSENT = frozenset({"not-supported", "invalid-argument"})
"""The answers to a number that names no profile of this GPU, or that this driver does not know."""

_OLD = frozenset({"function-not-found", "argument-version-mismatch"})
"""The answers of a driver that has only the first version of a structure."""

_MAX_SLICES = 64
_MAX_INSTANCES = 64
"""More than any GPU has; a larger number is no answer."""

_NAME = re.compile(r"[0-9]{1,2}g\.[0-9]{1,4}gb(?:[+-][A-Za-z0-9.,]{1,16})?")
_UUID = re.compile(r"MIG-[A-Za-z0-9/-]{1,80}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What of a profile must be known to list its instances."""

    id: int
    slices: int
    multiprocessors: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Profiles:
    """The profiles of a GPU, in order of id. Immutable while the MIG mode stays (nvml.h, nvmlDeviceGetGpuInstanceProfileInfo).

    `shapes` has also those that are left out of `named`, because no name or place is known: their instances take memory.
    `complete`: none is missing there.
    """

    named: tuple[mig.MigProfile, ...] = ()
    shapes: tuple[Shape, ...] = ()
    complete: bool = True

    def of(self, profile_id: int) -> mig.MigProfile | None:
        """The profile of an id."""
        return next((profile for profile in self.named if profile.id == profile_id), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """A GPU instance in this session: its handle, and those of its compute instances. `uuid`: of the one compute instance that
    takes all of it, if there is that.
    """

    handle: Any
    gpu_instance: int
    profile_id: int
    placement: mig.MigPlacement
    computes: tuple[tuple[int, Any], ...] = ()
    compute_instance: int | None = None
    uuid: str | None = None

    def value(self, nodes: tuple[mig.CapabilityNode, ...] = ()) -> mig.MigInstance:
        """Without handles."""
        return mig.MigInstance(
            gpu_instance=self.gpu_instance,
            profile_id=self.profile_id,
            placement=self.placement,
            compute_instance=self.compute_instance,
            uuid=self.uuid,
            nodes=nodes,
        )


class Reader:
    """Reads the MIG of GPUs, session after session. Profiles take dozens of calls and never change, so those of which all is known
    are kept.
    """

    def __init__(self) -> None:
        self._kept: dict[tuple[str, bool], Profiles] = {}

    def read(
        self, gpu: MigGpu, mode: model.MigMode | None, uuid: str | None, memory_bytes: int | None, noted: Noted
    ) -> tuple[tuple[mig.MigProfile, ...], tuple[mig.MigInstance, ...] | None]:
        """The profiles of a GPU, and its instances where MIG is on: None where they are not known."""
        if mode is None:
            return (), None
        key = (uuid or "", mode.current)
        profiles = self._kept.get(key) or gpu.profiles(memory_bytes, noted)
        if uuid is not None and profiles.complete and len(profiles.named) == len(profiles.shapes):
            self._kept[key] = profiles
        held = noted(functools.partial(gpu.instances, profiles)) if mode.current else None
        return profiles.named, None if held is None else tuple(each.value() for each in held)


class MigGpu:
    """MIG of the GPU of a handle. Every method raises SourceError, or lets `noted` have it."""

    def __init__(self, pynvml: Any, handle: Any) -> None:
        self._pynvml = pynvml
        self._handle = handle
        self._structure = 2

    def mode(self) -> model.MigMode | None:
        """None where the GPU, or the driver, has no MIG."""
        try:
            current, pending = self._ask("nvmlDeviceGetMigMode", self._handle)
        except errors.SourceError as err:
            if err.kind in ("not-supported", "function-not-found"):
                return None
            raise
        return model.MigMode(current=bool(current), pending=bool(pending))

    def set_mode(self, on: bool) -> None:  # noqa: FBT001 - the mode
        """Change the mode now. Raises SourceError also where it was taken, but not put into effect: it is then set back, or the
        next reset of the GPU would change it. Handles of the GPU, and its minor number, may be others afterwards.
        """
        status = self._ask("nvmlDeviceSetMigMode", self._handle, int(on))
        if status != self._pynvml.NVML_SUCCESS:
            error = nvmllibrary.error(self._pynvml, "nvmlDeviceSetMigMode", status)
            try:
                self._ask("nvmlDeviceSetMigMode", self._handle, int(not on))
            except errors.SourceError as err:
                raise errors.SourceError("nvml", error.kind, f"{error}; setting it back: {err}") from err
            raise error

    def profiles(self, memory_bytes: int | None, noted: Noted) -> Profiles:
        """All that the GPU has, whether MIG is on or not. `memory_bytes`: of the whole GPU, by which a profile is named that has
        no name.
        """
        try:
            self._described(0)
        except errors.SourceError as err:
            if err.kind == "function-not-found":  # a library from before profiles: MIG may be on all the same
                return Profiles(complete=False)
        named: dict[int, mig.MigProfile] = {}
        shapes: dict[int, Shape] = {}
        asked = 0
        for number in range(_PROFILES):
            told = noted(functools.partial(self._described, number))
            asked += told is not None
            for info in told or ():
                shapes[info.id] = Shape(id=info.id, slices=info.sliceCount, multiprocessors=info.multiprocessorCount)
                profile = noted(functools.partial(self._profile, info, number, memory_bytes))
                if profile is not None:
                    named.setdefault(profile.id, profile)
        named |= _revised(named)
        return Profiles(
            named=tuple(named[key] for key in sorted(named)),
            shapes=tuple(shapes[key] for key in sorted(shapes)),
            complete=asked == _PROFILES,
        )

    def instances(self, profiles: Profiles) -> tuple[Held, ...]:
        """The GPU instances that exist, in order of placement. Only where MIG is on."""
        if not profiles.complete:
            raise _malformed("not all profiles can be read, and those that cannot may have instances")
        held = []
        for shape in profiles.shapes:
            for handle in self._handles(
                "nvmlDeviceGetGpuInstances", self._handle, shape.id, self._pynvml.c_nvmlGpuInstance_t
            ):
                known = self._unless_gone(self.held, handle, shape)
                if known is not None:
                    held.append(known)
        return tuple(sorted(held, key=lambda each: (each.placement, each.gpu_instance)))

    def held(self, handle: Any, shape: Shape | mig.MigProfile) -> Held:
        """A GPU instance by its handle, with its compute instances."""
        info = self._ask("nvmlGpuInstanceGetInfo", handle)
        placement = mig.MigPlacement(start=info.placement.start, size=info.placement.size)
        if not placement.size or placement.start + placement.size > _MAX_SLICES:
            raise _malformed(f"GPU instance {info.id} at {placement.start}, {placement.size} slices")
        computes: dict[int, tuple[Any, Any]] = {}
        full = set()
        for _, compute in self._compute_profiles(handle):
            if _takes_all(compute, shape):
                full.add(compute.id)
            for each in self._handles(
                "nvmlGpuInstanceGetComputeInstances", handle, compute.id, self._pynvml.c_nvmlComputeInstance_t
            ):
                told = self._unless_gone(self._ask, "nvmlComputeInstanceGetInfo_v2", each)
                if told is not None:
                    computes[told.id] = (each, told)
        whole = [each for each, (_, told) in computes.items() if told.profileId in full]
        one = whole[0] if len(computes) == 1 and whole else None
        return Held(
            handle=handle,
            gpu_instance=info.id,
            profile_id=info.profileId,
            placement=placement,
            computes=tuple((each, computes[each][0]) for each in sorted(computes)),
            compute_instance=one,
            uuid=None if one is None else self._uuid(info.id, one, computes[one][1].device),
        )

    def place_of(self, gpu_instance: int) -> str:
        """What a GPU instance is, in few calls: its profile and its place."""
        handle = self._ask("nvmlDeviceGetGpuInstanceById", self._handle, gpu_instance)
        info = self._ask("nvmlGpuInstanceGetInfo", handle)
        return f"{info.profileId}@{info.placement.start}+{info.placement.size}"

    def create(self, profile: mig.MigProfile, placement: mig.MigPlacement) -> Any:
        """The handle of a new GPU instance, which has no compute instance yet."""
        place = self._pynvml.c_nvmlGpuInstancePlacement_t(start=placement.start, size=placement.size)
        return self._ask(
            "nvmlDeviceCreateGpuInstanceWithPlacement", self._handle, profile.id, self._pynvml.byref(place)
        )

    def complete(self, handle: Any, profile: mig.MigProfile) -> None:
        """Give a GPU instance that has none the compute instance that takes all of it."""
        fitting = {number: info.id for number, info in self._compute_profiles(handle) if _takes_all(info, profile)}
        if not fitting:
            raise _malformed(f"no compute instance takes all of a GPU instance {profile.name}")
        chosen = fitting.get(profile.compute_number, next(iter(fitting.values())))
        self._ask("nvmlGpuInstanceCreateComputeInstance", handle, chosen)

    def destroy(self, held: Held) -> None:
        """Remove a GPU instance and its compute instances. What has gone meanwhile is gone."""
        for _, compute in held.computes:
            self._unless_gone(self._ask, "nvmlComputeInstanceDestroy", compute)
        self._unless_gone(self._ask, "nvmlGpuInstanceDestroy", held.handle)

    def processes(self, gpu_instance: int | None = None) -> tuple[int, ...]:
        """The programs that compute on the GPU, or on one of its GPU instances; none where NVML does not tell."""
        try:
            running = self._ask("nvmlDeviceGetComputeRunningProcesses", self._handle)
        except errors.SourceError:
            return ()
        mine = (each for each in running if gpu_instance is None or each.gpuInstanceId == gpu_instance)
        return tuple(sorted({each.pid for each in mine}))

    def _described(self, number: int) -> tuple[Any, ...]:
        """What NVML says of the profile of a number; nothing where the GPU has none."""
        info = self._structured("nvmlDeviceGetGpuInstanceProfileInfo", self._handle, number)
        return () if info is None else (info,)

    def _profile(self, info: Any, number: int, memory_bytes: int | None) -> mig.MigProfile:
        compute = nvmlnumbers.COMPUTE_OF_SLICES.get(info.sliceCount)
        if compute is None or not 0 < info.instanceCount <= _MAX_INSTANCES or not info.multiprocessorCount:
            raise _malformed(
                f"profile {info.id}: {info.sliceCount} slices, {info.multiprocessorCount} multiprocessors, "
                f"{info.instanceCount} instances"
            )
        return mig.MigProfile(
            id=info.id,
            number=number,
            compute_number=compute,
            name=_name(info, number, memory_bytes),
            slices=info.sliceCount,
            memory_bytes=info.memorySizeMB << 20,
            multiprocessors=info.multiprocessorCount,
            copy_engines=info.copyEngineCount,
            decoders=info.decoderCount,
            encoders=info.encoderCount,
            jpeg_engines=info.jpegCount,
            ofa_engines=info.ofaCount,
            instances=info.instanceCount,
            placements=self._placements(info.id),
        )

    def _placements(self, profile_id: int) -> tuple[mig.MigPlacement, ...]:
        """All that are possible, whatever exists (nvml.h, nvmlDeviceGetGpuInstancePossiblePlacements)."""
        pynvml, function = self._pynvml, "nvmlDeviceGetGpuInstancePossiblePlacements"
        count = pynvml.c_uint(0)
        self._ask(function, self._handle, profile_id, None, pynvml.byref(count))
        if not 0 < count.value <= _MAX_SLICES:
            raise _malformed(f"profile {profile_id}: {count.value} placements")
        room = (pynvml.c_nvmlGpuInstancePlacement_t * count.value)()
        self._ask(function, self._handle, profile_id, room, pynvml.byref(count))
        places = {mig.MigPlacement(start=each.start, size=each.size) for each in room[: count.value]}
        if not all(each.size and each.start + each.size <= _MAX_SLICES for each in places):
            raise _malformed(f"profile {profile_id}: placements {sorted(places)}")
        return tuple(sorted(places))

    def _compute_profiles(self, handle: Any) -> Iterator[tuple[int, Any]]:
        """Numbers and descriptions of the compute instances that a GPU instance can have."""
        shared = self._pynvml.NVML_COMPUTE_INSTANCE_ENGINE_PROFILE_SHARED
        for number in range(_COMPUTES):
            info = self._structured("nvmlGpuInstanceGetComputeInstanceProfileInfo", handle, number, shared)
            if info is not None:
                yield number, info

    def _structured(self, function: str, *arguments: Any) -> Any:
        """A description in the newest structure that pynvml and the driver both know; None where there is no such thing."""
        while True:
            try:
                return self._ask(function, *arguments, self._structure)
            except errors.SourceError as err:
                if err.kind in _ABSENT:
                    return None
                if err.kind not in _OLD or self._structure == 1:
                    raise
                self._structure = 1

    def _handles(self, function: str, handle: Any, profile_id: int, kind: Any) -> list[Any]:
        """NVML writes as many as there are: the room must be enough for all that can be."""
        pynvml = self._pynvml
        room, count = (kind * _MAX_INSTANCES)(), pynvml.c_uint(_MAX_INSTANCES)
        self._ask(function, handle, profile_id, room, pynvml.byref(count))
        if count.value > _MAX_INSTANCES:
            raise _malformed(f"{function} of profile {profile_id}: {count.value}")
        return [room[index] for index in range(count.value)]

    def _uuid(self, gpu_instance: int, compute_instance: int, device: Any) -> str | None:
        """The UUID of a compute instance, which is that of its MIG device. The handle in its own description is that of the
        GPU (nvmlComputeInstanceInfo_t), with some drivers that of the MIG device.
        """
        wanted = (gpu_instance, compute_instance)
        text = self._unless_gone(self._ask, "nvmlDeviceGetUUID", device)
        if text and _UUID.fullmatch(text):
            return str(text)
        for index in range(min(self._ask("nvmlDeviceGetMaxMigDeviceCount", self._handle), _MAX_INSTANCES)):
            found = self._unless_gone(self._mig_device, index)
            if found is not None and found[:2] == wanted:
                if not _UUID.fullmatch(found[2]):
                    raise _malformed(f"the UUID {found[2][:40]!r} of instance {gpu_instance}/{compute_instance}")
                return str(found[2])
        return None

    def _mig_device(self, index: int) -> tuple[int, int, str]:
        device = self._ask("nvmlDeviceGetMigDeviceHandleByIndex", self._handle, index)
        return (
            self._ask("nvmlDeviceGetGpuInstanceId", device),
            self._ask("nvmlDeviceGetComputeInstanceId", device),
            self._ask("nvmlDeviceGetUUID", device),
        )

    def _unless_gone(self, read: Callable[..., _T], *arguments: Any) -> _T | None:
        """None for what is no longer there: whoever administers the GPU may remove an instance at any time."""
        try:
            return read(*arguments)
        except errors.SourceError as err:
            if err.kind in ("not-found", "invalid-argument"):
                return None
            raise

    def _ask(self, function: str, *arguments: Any) -> Any:
        return nvmllibrary.ask(self._pynvml, function, *arguments)


def _revised(named: Mapping[int, mig.MigProfile]) -> dict[int, mig.MigProfile]:
    """The one-slice profiles of more multiprocessors than the plain one has, as those of twice the memory on Hopper: what takes
    all of them is not the plain compute instance, but its first revision.
    """
    plain = next((each.multiprocessors for each in named.values() if each.number == nvmlnumbers.ONE_SLICE), None)
    return {
        key: replace(each, compute_number=nvmlnumbers.ONE_SLICE_REVISED)
        for key, each in named.items()
        if plain is not None and each.slices == 1 and each.multiprocessors > plain
    }


def _takes_all(compute: Any, profile: Shape | mig.MigProfile) -> bool:
    return bool(compute.sliceCount == profile.slices and compute.multiprocessorCount == profile.multiprocessors)


def _name(info: Any, number: int, memory_bytes: int | None) -> str:
    """The name that the driver gives (`MIG 1g.10gb+me`); drivers that give none leave it to whoever asks."""
    try:
        told = str(getattr(info, "name", "") or "").removeprefix("MIG ").strip()
    except UnicodeDecodeError as err:
        raise _malformed(f"the name of profile {info.id} is no text") from err
    if told:
        if not _NAME.fullmatch(told):
            raise _malformed(f"the name {told[:40]!r} of profile {info.id}")
        return told
    if not memory_bytes:
        raise _malformed(
            f"profile {info.id} has no name, and the memory of the GPU is not known, which would give it one"
        )
    part = info.memorySizeMB << 20
    return nvmlnumbers.profile_name(number, info.sliceCount, part_bytes=part, whole_bytes=memory_bytes)


def _malformed(what: str) -> errors.SourceError:
    return errors.SourceError("nvml", errors.MALFORMED, f"MIG: {what}")
