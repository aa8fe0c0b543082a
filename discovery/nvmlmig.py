# SPDX-License-Identifier: Apache-2.0
"""Multi-Instance GPU through NVML, of one GPU in one session (nvml.h, "Multi Instance GPU"). nvml.py makes these and passes
`pynvml` in, as it does for nvmllibrary.py.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from discovery import errors, mig, model, nvmllibrary, nvmlprofiles
from discovery.nvmlprofiles import Noted, Profiles, Shape

_T = TypeVar("_T")

_COMPUTES = 0x9
"""NVML_COMPUTE_INSTANCE_PROFILE_COUNT."""

_UUID = re.compile(r"MIG-[A-Za-z0-9/-]{1,80}")


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
        profiles = self.profiles(gpu, mode, uuid, memory_bytes, noted)
        held = noted(functools.partial(gpu.instances, profiles)) if mode.current else None
        return profiles.named, None if held is None else tuple(each.value() for each in held)

    def profiles(
        self, gpu: MigGpu, mode: model.MigMode, uuid: str | None, memory_bytes: int | None, noted: Noted
    ) -> Profiles:
        """The profiles of a GPU."""
        key = (uuid or "", mode.current)
        profiles = self._kept.get(key) or gpu.description.profiles(memory_bytes, noted)
        if uuid is not None and profiles.complete and len(profiles.named) == len(profiles.shapes):
            self._kept[key] = profiles
        return profiles


class MigGpu:
    """MIG of the GPU of a handle. Every method raises SourceError, or lets `noted` have it."""

    def __init__(self, pynvml: Any, handle: Any) -> None:
        self._pynvml = pynvml
        self._handle = handle
        self.description = nvmlprofiles.Description(pynvml, handle)
        self._computes: dict[int, tuple[tuple[int, Any], ...]] = {}

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

    def instances(
        self, profiles: Profiles, matter: Callable[[int, mig.MigPlacement], bool] = lambda _profile, _place: True
    ) -> tuple[Held, ...]:
        """The GPU instances that exist, in order of placement. Only where MIG is on. `matter`: which of them, by id of profile and
        placement; the others cost less.
        """
        if not profiles.complete:
            raise nvmlprofiles.malformed("not all profiles can be read, and those that cannot may have instances")
        held = []
        for shape in profiles.shapes:
            for handle in self._handles(
                "nvmlDeviceGetGpuInstances", self._handle, shape.id, self._pynvml.c_nvmlGpuInstance_t
            ):
                known = self._unless_gone(self._that_matters, handle, shape, matter)
                if known is not None:
                    held.append(known)
        return tuple(sorted(held, key=lambda each: (each.placement, each.gpu_instance)))

    def held(self, handle: Any, shape: Shape | mig.MigProfile) -> Held:
        """A GPU instance by its handle, with its compute instances."""
        held = self._that_matters(handle, shape, lambda _profile, _place: True)
        assert held is not None
        return held

    def _that_matters(
        self, handle: Any, shape: Shape | mig.MigProfile, matter: Callable[[int, mig.MigPlacement], bool]
    ) -> Held | None:
        info = self._ask("nvmlGpuInstanceGetInfo", handle)
        placement = mig.MigPlacement(start=info.placement.start, size=info.placement.size)
        if not placement.size or placement.start + placement.size > nvmlprofiles.MAX_SLICES:
            raise nvmlprofiles.malformed(f"GPU instance {info.id} at {placement.start}, {placement.size} slices")
        if not matter(info.profileId, placement):
            return None
        computes: dict[int, tuple[Any, Any]] = {}
        full = set()
        for _, compute in self._compute_profiles(handle, shape.id):
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
        fitting = {
            number: info.id for number, info in self._compute_profiles(handle, profile.id) if _takes_all(info, profile)
        }
        if not fitting:
            raise nvmlprofiles.malformed(f"no compute instance takes all of a GPU instance {profile.name}")
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

    def _compute_profiles(self, handle: Any, profile_id: int) -> tuple[tuple[int, Any], ...]:
        """Numbers and descriptions of the compute instances that a GPU instance can have: the same for all of a profile."""
        if profile_id not in self._computes:
            shared = self._pynvml.NVML_COMPUTE_INSTANCE_ENGINE_PROFILE_SHARED
            asked = (
                (
                    number,
                    self.description.structured("nvmlGpuInstanceGetComputeInstanceProfileInfo", handle, number, shared),
                )
                for number in range(_COMPUTES)
            )
            self._computes[profile_id] = tuple((number, info) for number, info in asked if info is not None)
        return self._computes[profile_id]

    def _handles(self, function: str, handle: Any, profile_id: int, kind: Any) -> list[Any]:
        """NVML writes as many as there are: the room must be enough for all that can be."""
        pynvml = self._pynvml
        room, count = (kind * nvmlprofiles.MAX_INSTANCES)(), pynvml.c_uint(nvmlprofiles.MAX_INSTANCES)
        self._ask(function, handle, profile_id, room, pynvml.byref(count))
        if count.value > nvmlprofiles.MAX_INSTANCES:
            raise nvmlprofiles.malformed(f"{function} of profile {profile_id}: {count.value}")
        return [room[index] for index in range(count.value)]

    def _uuid(self, gpu_instance: int, compute_instance: int, device: Any) -> str | None:
        """The UUID of a compute instance, which is that of its MIG device. The handle in its own description is that of the
        GPU (nvmlComputeInstanceInfo_t), with some drivers that of the MIG device.
        """
        wanted = (gpu_instance, compute_instance)
        text = self._unless_gone(self._ask, "nvmlDeviceGetUUID", device)
        if text and _UUID.fullmatch(text):
            return str(text)
        for index in range(min(self._ask("nvmlDeviceGetMaxMigDeviceCount", self._handle), nvmlprofiles.MAX_INSTANCES)):
            found = self._unless_gone(self._mig_device, index)
            if found is not None and found[:2] == wanted:
                if not _UUID.fullmatch(found[2]):
                    raise nvmlprofiles.malformed(
                        f"the UUID {found[2][:40]!r} of instance {gpu_instance}/{compute_instance}"
                    )
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


def _takes_all(compute: Any, profile: Shape | mig.MigProfile) -> bool:
    return bool(compute.sliceCount == profile.slices and compute.multiprocessorCount == profile.multiprocessors)
