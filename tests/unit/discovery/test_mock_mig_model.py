# SPDX-License-Identifier: Apache-2.0
"""MIG of the mock against a simple model: any sequence of making and removing instances, through the real pynvml.

The model knows what anybody can read on `nvidia-smi mig -lgip` and `-lgipp`: places, and how much each profile takes. The tables of
the products are not its business: it reads them from NVML.
"""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pynvml
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from discovery.mock import abi, library, mig, recording, render
from tests.fakes import mockmachine
from tests.fakes.mockmachine import GPU0

H100 = "nvidia-h100-sxm5-80gb"
PRODUCTS = (H100, "nvidia-a100-sxm4-40gb", "nvidia-a30", "nvidia-rtx-pro-6000-server", "nvidia-b200")

_COUNTS = ("multiprocessorCount", "copyEngineCount", "decoderCount", "encoderCount", "jpegCount", "ofaCount")

STEPS = st.lists(
    st.tuples(st.sampled_from(("place", "place", "any", "destroy", "compute", "uncompute")), *[st.integers(0, 99)] * 2),
    max_size=25,
)


@dataclasses.dataclass(eq=False, slots=True, kw_only=True)
class _Instance:
    handle: Any
    profile: Any
    start: int
    size: int
    compute: list[tuple[Any, Any, int]] = dataclasses.field(default_factory=list)
    """Handle, profile, and first compute slice."""


class _Model:
    """A GPU, beside what it should be."""

    def __init__(self) -> None:
        self.gpu = pynvml.nvmlDeviceGetHandleByIndex(0)
        self.profiles = [
            info for number in range(pynvml.NVML_GPU_INSTANCE_PROFILE_COUNT) if (info := self._info(number))
        ]
        self.places = {info.id: self._placements(info.id) for info in self.profiles}
        self.there: list[_Instance] = []

    def _info(self, number: int) -> Any:
        try:
            return pynvml.nvmlDeviceGetGpuInstanceProfileInfo(self.gpu, number)
        except pynvml.NVMLError_NotSupported:
            return None

    def _placements(self, profile: int) -> list[tuple[int, int]]:
        array, count = (pynvml.c_nvmlGpuInstancePlacement_t * 32)(), ctypes.c_uint()
        pynvml.nvmlDeviceGetGpuInstancePossiblePlacements(self.gpu, profile, array, ctypes.byref(count))
        return [(each.start, each.size) for each in array[: count.value]]

    def fits(self, profile: Any, start: int, size: int) -> bool:
        """Whether a GPU instance has room at a place."""
        taken = {number for each in self.there for number in range(each.start, each.start + each.size)}
        many = sum(each.profile.id == profile.id for each in self.there)
        enough = all(
            sum(getattr(each.profile, name) for each in self.there) + getattr(profile, name)
            <= max(getattr(other, name) for other in self.profiles)
            for name in _COUNTS
        )
        return enough and many < profile.instanceCount and taken.isdisjoint(range(start, start + size))

    def step(self, kind: str, first: int, second: int) -> None:
        """Does one thing, which must end as the model says."""
        profile = self.profiles[first % len(self.profiles)]
        places = self.places[profile.id]
        match kind:
            case "place":
                start, size = places[second % len(places)]
                place = ctypes.byref(pynvml.c_nvmlGpuInstancePlacement_t(start, size))
                made = _tried(
                    self.fits(profile, start, size),
                    pynvml.nvmlDeviceCreateGpuInstanceWithPlacement, self.gpu, profile.id, place,
                )  # fmt: skip
                if made is not None:
                    self.there.append(_Instance(handle=made, profile=profile, start=start, size=size))
            case "any":
                free = any(self.fits(profile, *place) for place in places)
                made = _tried(free, pynvml.nvmlDeviceCreateGpuInstance, self.gpu, profile.id)
                if made is not None:
                    info = pynvml.nvmlGpuInstanceGetInfo(made).placement
                    assert self.fits(profile, info.start, info.size)
                    self.there.append(_Instance(handle=made, profile=profile, start=info.start, size=info.size))
            case _ if not self.there:
                return
            case "destroy":
                gone = self.there[first % len(self.there)]
                if _tried(not gone.compute, pynvml.nvmlGpuInstanceDestroy, gone.handle, refused=abi.IN_USE) is not None:
                    self.there.remove(gone)
                    assert _status(pynvml.nvmlGpuInstanceGetInfo, gone.handle) == abi.INVALID_ARGUMENT
            case "compute":
                self._compute(self.there[first % len(self.there)], second)
            case "uncompute":
                inside = self.there[first % len(self.there)]
                if inside.compute:
                    handle, _, _ = inside.compute.pop(second % len(inside.compute))
                    pynvml.nvmlComputeInstanceDestroy(handle)
                    assert _status(pynvml.nvmlComputeInstanceGetInfo, handle) == abi.INVALID_ARGUMENT

    def _compute(self, inside: _Instance, choice: int) -> None:
        offered = []
        for number in range(pynvml.NVML_COMPUTE_INSTANCE_PROFILE_COUNT):
            try:
                offered.append(pynvml.nvmlGpuInstanceGetComputeInstanceProfileInfo(inside.handle, number, 0))
            except pynvml.NVMLError_NotSupported:
                continue
        profile = offered[choice % len(offered)]
        taken = {number for _, each, start in inside.compute for number in range(start, start + each.sliceCount)}
        many = sum(each.id == profile.id for _, each, _ in inside.compute)
        starts = range(inside.profile.sliceCount - profile.sliceCount + 1)
        free = many < profile.instanceCount and any(
            taken.isdisjoint(range(start, start + profile.sliceCount)) for start in starts
        )
        made = _tried(free, pynvml.nvmlGpuInstanceCreateComputeInstance, inside.handle, profile.id)
        if made is not None:
            start = pynvml.nvmlComputeInstanceGetInfo(made).placement.start
            assert taken.isdisjoint(range(start, start + profile.sliceCount))
            inside.compute.append((made, profile, start))

    def agrees(self) -> None:
        """What NVML shows is what the model has."""
        shown = set()
        for profile in self.profiles:
            array, count = (pynvml.c_nvmlGpuInstance_t * 16)(), ctypes.c_uint(16)
            pynvml.nvmlDeviceGetGpuInstances(self.gpu, profile.id, array, ctypes.byref(count))
            for each in array[: count.value]:
                info = pynvml.nvmlGpuInstanceGetInfo(each)
                shown.add((info.profileId, info.placement.start, info.placement.size))
            room = pynvml.nvmlDeviceGetGpuInstanceRemainingCapacity(self.gpu, profile.id)
            assert bool(room) == any(self.fits(profile, *place) for place in self.places[profile.id])
        assert shown == {(each.profile.id, each.start, each.size) for each in self.there}
        ids = [pynvml.nvmlGpuInstanceGetInfo(each.handle).id for each in self.there]
        assert len(ids) == len(set(ids))
        parts = [
            (pynvml.nvmlDeviceGetGpuInstanceId(device), pynvml.nvmlDeviceGetComputeInstanceId(device))
            for device in _devices(self.gpu)
        ]
        assert parts == sorted(parts)
        assert len(parts) == sum(len(each.compute) for each in self.there)

    def clear(self) -> None:
        """Removes everything."""
        for each in self.there:
            for handle, _, _ in each.compute:
                pynvml.nvmlComputeInstanceDestroy(handle)
            pynvml.nvmlGpuInstanceDestroy(each.handle)


def _devices(gpu: Any) -> Iterator[Any]:
    for index in range(pynvml.nvmlDeviceGetMaxMigDeviceCount(gpu)):
        try:
            yield pynvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu, index)
        except pynvml.NVMLError_NotFound:
            return


def _status(function: Any, *arguments: Any) -> int:
    try:
        function(*arguments)
    except pynvml.NVMLError as err:
        return int(err.value)
    return abi.SUCCESS


def _tried(may: bool, function: Any, *arguments: Any, refused: int = abi.INSUFFICIENT_RESOURCES) -> Any:
    """What a call gives, or None where it is refused as it must be."""
    status, made = abi.SUCCESS, None
    try:
        made = function(*arguments)
    except pynvml.NVMLError as err:
        status = err.value
    assert status == (abi.SUCCESS if may else refused)
    return made


@pytest.fixture(params=PRODUCTS)
def machine(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """The small machine with GPUs of a product, one of them in MIG mode."""
    changes = (("ports: [{gpu: nvidia-h100-sxm5-80gb}, {gpu: nvidia-h100-sxm5-80gb}, {nic", f"ports: [{{gpu: {request.param}}}, {{nic"),
               ("nvlink: {pairs: [{between: [gpu0, gpu1], links: 4}]}\n", ""))  # fmt: skip
    parsed: recording.Recording = mockmachine.parsed(*changes)
    render.render(dataclasses.replace(parsed, files={}), tmp_path)
    mig.admin_mode(tmp_path, GPU0, True)
    pynvml.nvmlLib = library.Library(tmp_path)
    pynvml._nvmlGetFunctionPointer_cache.clear()
    pynvml.nvmlInit()
    yield tmp_path
    pynvml.nvmlLib = None
    pynvml._nvmlGetFunctionPointer_cache.clear()


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=STEPS)
def test_what_is_made_and_removed_is_what_the_model_says(machine: Path, steps: list[tuple[str, int, int]]) -> None:
    model = _Model()
    assert machine.is_dir()
    assert model.profiles
    try:
        for step in steps:
            model.step(*step)
        model.agrees()
    finally:
        model.clear()
    assert not list((machine / "proc/driver/nvidia/capabilities").rglob("gi*"))


@pytest.mark.usefixtures("machine")
def test_every_profile_fits_at_every_place_of_an_empty_gpu() -> None:
    model = _Model()
    ids: dict[int, set[tuple[int, int]]] = {}
    for profile in model.profiles:
        for start, size in model.places[profile.id]:
            place = ctypes.byref(pynvml.c_nvmlGpuInstancePlacement_t(start, size))
            instance = pynvml.nvmlDeviceCreateGpuInstanceWithPlacement(model.gpu, profile.id, place)
            ids.setdefault(pynvml.nvmlGpuInstanceGetInfo(instance).id, set()).add((start, size))
            pynvml.nvmlGpuInstanceDestroy(instance)
    assert all(len(places) == 1 for places in ids.values())
    assert max(ids) < 15
