# SPDX-License-Identifier: Apache-2.0
"""A stand-in for the module pynvml with the functions of Multi-Instance GPU of one GPU, for answers that no driver should give.
What drivers do give is the business of discovery/mock, under the real pynvml.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

NOT_SUPPORTED = 3
NO_PERMISSION = 4
NOT_FOUND = 6
FUNCTION_NOT_FOUND = 13
IN_USE = 19
GPU_IS_LOST = 15
ARGUMENT_VERSION_MISMATCH = 25
UNKNOWN = 999

_ERRORS = (
    "NOT_SUPPORTED", "NO_PERMISSION", "NOT_FOUND", "FUNCTION_NOT_FOUND", "IN_USE", "GPU_IS_LOST",
    "ARGUMENT_VERSION_MISMATCH", "UNKNOWN",
)  # fmt: skip

GPU = "the GPU"


class _Place(ctypes.Structure):
    _fields_ = (("start", ctypes.c_uint), ("size", ctypes.c_uint))


class _NVMLError(Exception):
    def __init__(self, value: int) -> None:
        super().__init__(f"error {value}")
        self.value = value


@dataclass(kw_only=True)
class Instance:
    """A GPU instance with the profile ids of its compute instances."""

    id: int
    profile: int
    start: int
    size: int
    computes: tuple[int, ...] = (0,)
    uuid: str = "MIG-00000000-0000-0000-0000-000000000001"


def info(profile: int, slices: int, multiprocessors: int, **changes: Any) -> SimpleNamespace:
    """nvmlGpuInstanceProfileInfo_v2_t."""
    return SimpleNamespace(
        **{
            "id": profile,
            "sliceCount": slices,
            "instanceCount": 7 // slices,
            "multiprocessorCount": multiprocessors,
            "copyEngineCount": slices,
            "decoderCount": slices,
            "encoderCount": 0,
            "jpegCount": slices,
            "ofaCount": 0,
            "memorySizeMB": slices * 9984,
            "name": f"MIG {slices}g.{slices * 10}gb",
            **changes,
        }
    )


@dataclass(kw_only=True, eq=False)
class FakePynvml:
    """pynvml over one GPU. `errors`: statuses by function; `old`: only the first versions of structures are known."""

    profiles: Mapping[int, Any] = field(default_factory=lambda: {0: info(19, 1, 16), 2: info(9, 3, 48)})
    places: Mapping[int, tuple[tuple[int, int], ...]] = field(
        default_factory=lambda: {19: tuple((start, 1) for start in range(7)), 9: ((0, 4), (4, 4))}
    )
    computes: Mapping[int, tuple[int, int, int]] = field(default_factory=lambda: {0: (0, 1, 16), 2: (2, 3, 48)})
    """Compute instance profiles by number: id, slices, multiprocessors."""
    instances: list[Instance] = field(default_factory=list)
    errors: dict[str, int | Callable[..., int]] = field(default_factory=dict)
    old: bool = False
    counts: dict[str, int] = field(default_factory=dict)
    calls: list[str] = field(default_factory=list)

    NVML_SUCCESS = 0
    NVML_COMPUTE_INSTANCE_ENGINE_PROFILE_SHARED = 0
    NVMLError = _NVMLError
    c_uint = ctypes.c_uint
    c_nvmlGpuInstancePlacement_t = _Place  # noqa: N815 - the names of pynvml
    c_nvmlGpuInstance_t = ctypes.c_void_p  # noqa: N815
    c_nvmlComputeInstance_t = ctypes.c_void_p  # noqa: N815

    def __post_init__(self) -> None:
        """Its errors are found as those of a module are: by name."""
        vars(self).update({f"NVML_ERROR_{name}": value for name, value in globals().items() if name in _ERRORS})

    @staticmethod
    def byref(value: Any) -> Any:
        """The value itself: it is passed to Python."""
        return value

    def __getattr__(self, name: str) -> Any:
        body = _FUNCTIONS.get(name)
        if body is None:
            raise AttributeError(name)

        def call(*arguments: Any) -> Any:
            self.calls.append(name)
            status = self.errors.get(name, 0)
            status = status(*arguments) if callable(status) else status
            if status:
                raise _NVMLError(status)
            return body(self, *arguments)

        return call


def _profile(fake: FakePynvml, _gpu: str, number: int, version: int) -> Any:
    if fake.old and version > 1:
        raise _NVMLError(FUNCTION_NOT_FOUND)
    if number not in fake.profiles:
        raise _NVMLError(NOT_SUPPORTED)
    return fake.profiles[number]


def _compute_profile(fake: FakePynvml, _instance: int, number: int, _engine: int, version: int) -> Any:
    if fake.old and version > 1:
        raise _NVMLError(ARGUMENT_VERSION_MISMATCH)
    if number not in fake.computes:
        raise _NVMLError(NOT_SUPPORTED)
    told = fake.computes[number]
    return SimpleNamespace(id=told[0], sliceCount=told[1], multiprocessorCount=told[2])


def _placements(fake: FakePynvml, _gpu: str, profile: int, room: Any, count: Any) -> None:
    places = fake.places[profile]
    count.value = fake.counts.get("placements", len(places))
    for index, (start, size) in enumerate(places if room is not None else ()):
        room[index] = _Place(start, size)


def _fill(fake: FakePynvml, what: str, handles: list[int], room: Any, count: Any) -> None:
    count.value = fake.counts.get(what, len(handles))
    for index, handle in enumerate(handles):
        room[index] = handle


def _instances(fake: FakePynvml, _gpu: str, profile: int, room: Any, count: Any) -> None:
    handles = [index + 1 for index, each in enumerate(fake.instances) if each.profile == profile]
    _fill(fake, "instances", handles, room, count)


def _compute_instances(fake: FakePynvml, instance: int, profile: int, room: Any, count: Any) -> None:
    computes = fake.instances[instance - 1].computes
    handles = [instance * 100 + index + 1 for index, each in enumerate(computes) if each == profile]
    _fill(fake, "computes", handles, room, count)


def _instance_info(fake: FakePynvml, instance: int) -> Any:
    told = fake.instances[instance - 1]
    return SimpleNamespace(id=told.id, profileId=told.profile, placement=_Place(told.start, told.size))


def _compute_info(fake: FakePynvml, compute: int) -> Any:
    instance, index = divmod(compute, 100)
    return SimpleNamespace(id=index - 1, profileId=fake.instances[instance - 1].computes[index - 1], device=GPU)


def _mig_device(fake: FakePynvml, _gpu: str, index: int) -> Any:
    if index >= len(fake.instances):
        raise _NVMLError(NOT_FOUND)
    return fake.instances[index]


_FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "nvmlDeviceGetGpuInstanceProfileInfo": _profile,
    "nvmlDeviceGetGpuInstancePossiblePlacements": _placements,
    "nvmlDeviceGetGpuInstances": _instances,
    "nvmlGpuInstanceGetInfo": _instance_info,
    "nvmlGpuInstanceGetComputeInstanceProfileInfo": _compute_profile,
    "nvmlGpuInstanceGetComputeInstances": _compute_instances,
    "nvmlComputeInstanceGetInfo_v2": _compute_info,
    "nvmlDeviceGetMaxMigDeviceCount": lambda _fake, _gpu: 7,
    "nvmlDeviceGetMigDeviceHandleByIndex": _mig_device,
    "nvmlDeviceGetGpuInstanceId": lambda _fake, device: device.id,
    "nvmlDeviceGetComputeInstanceId": lambda _fake, _device: 0,
    "nvmlDeviceGetUUID": lambda _fake, device: "GPU-1" if device == GPU else device.uuid,
    "nvmlDeviceGetMigMode": lambda _fake, _gpu: [1, 1],
    "nvmlDeviceSetMigMode": lambda fake, _gpu, _mode: fake.counts.get("activation", 0),
    "nvmlDeviceGetComputeRunningProcesses": lambda _fake, _gpu: [
        SimpleNamespace(pid=7, gpuInstanceId=1), SimpleNamespace(pid=5, gpuInstanceId=2),
        SimpleNamespace(pid=7, gpuInstanceId=2),
    ],
}  # fmt: skip
