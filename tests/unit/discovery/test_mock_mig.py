# SPDX-License-Identifier: Apache-2.0
"""MIG of the stand-in for libnvidia-ml, asked by the real pynvml.

- both sides agree about every struct, and pynvml finds every function
- an instance lives: profile, place, id, UUID, name, memory, files; and dies
- errors are those of nvml.h; a handle never means another instance
- modes: at once from Hopper on, after a reset on Ampere
- MIG devices answer what they can, GPUs in MIG mode no longer what they cannot
"""

from __future__ import annotations

import ctypes
import dataclasses
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pynvml
import pytest

from discovery.address import PciAddress
from discovery.errors import DocumentError
from discovery.mock import abi, abi_mig, fault, faults, library, live, mig, migfiles, migrules, state
from discovery.mock.fault import Kind
from tests.fakes import mockmachine
from tests.fakes.mockmachine import GPU0, GPU1

G1, G1_ME, G1_DOUBLE, G2, G3, G4, G7 = 19, 20, 15, 14, 9, 5, 0
"""Ids of the profiles of an H100."""

WHOLE = {G1: 0, G1_ME: 0, G2: 1, G3: 2, G4: 3, G7: 4, G1_DOUBLE: 7}
"""NVML_COMPUTE_INSTANCE_PROFILE_* that takes all."""

AMPERE = ("nvidia-h100-sxm5-80gb}, {gpu: nvidia-h100-sxm5-80gb", "nvidia-a100-sxm4-80gb}, {gpu: nvidia-a100-sxm4-80gb")


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Callable[..., Path]]:
    """Puts the small machine, with changes of its text, behind pynvml. MIG is on where it is said."""

    def opening(*changes: tuple[str, str], on: bool = True) -> Path:
        mockmachine.rendered(tmp_path, *changes)
        pynvml.nvmlLib = library.Library(tmp_path)
        pynvml._nvmlGetFunctionPointer_cache.clear()
        pynvml.nvmlInit()
        if on:
            for pci in (GPU0, GPU1):
                mig.admin_mode(tmp_path, pci, True)
        return tmp_path

    yield opening
    pynvml.nvmlLib = None
    pynvml._nvmlGetFunctionPointer_cache.clear()


@pytest.fixture
def machine(opened: Callable[..., Path]) -> Path:
    """The small machine, both GPUs in MIG mode."""
    return opened()


def gpu(index: int = 0) -> Any:
    """A handle of a GPU."""
    return pynvml.nvmlDeviceGetHandleByIndex(index)


def placed(profile: int, start: int, size: int, *, on: int = 0) -> Any:
    """A GPU instance at a place."""
    place = ctypes.byref(pynvml.c_nvmlGpuInstancePlacement_t(start, size))
    return pynvml.nvmlDeviceCreateGpuInstanceWithPlacement(gpu(on), profile, place)


def fails(status: int, function: Any, *arguments: Any) -> None:
    """The call ends with this status."""
    with pytest.raises(pynvml.NVMLError) as raised:
        function(*arguments)
    assert raised.value.value == status


def list_of(function: Any, owner: Any, profile: int, *, kind: Any = pynvml.c_nvmlGpuInstance_t) -> list[Any]:
    """What a function that fills an array fills it with."""
    array, count = (kind * 16)(), ctypes.c_uint(16)
    function(owner, profile, array, ctypes.byref(count))
    return [array[index] for index in range(count.value)]


def files(directory: Path) -> set[str]:
    """The capability files of instances."""
    roots = (directory / "proc/driver/nvidia/capabilities", directory / "dev/nvidia-caps")
    every = (str(path.relative_to(directory)) for root in roots for path in root.rglob("*") if path.is_file())
    return {path for path in every if not re.search(r"/mig/(config|monitor)$|nvidia-cap[12]$", path)}


def change(directory: Path, pci: PciAddress = GPU0, **fields: Any) -> None:
    """Other values for a GPU."""

    def changed(now: live.Live) -> live.Live:
        assert now.nvml is not None
        gpus = tuple(dataclasses.replace(each, **fields) if each.pci == pci else each for each in now.nvml.gpus)
        return dataclasses.replace(now, nvml=dataclasses.replace(now.nvml, gpus=gpus))

    live.LiveFile(directory).update(changed)


def unprivileged(directory: Path) -> None:
    """The caller has no rights over MIG."""

    def changed(now: live.Live) -> live.Live:
        assert now.nvml is not None
        system = dataclasses.replace(now.nvml.system, privileged=False)
        return dataclasses.replace(now, nvml=dataclasses.replace(now.nvml, system=system))

    live.LiveFile(directory).update(changed)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (abi_mig.Placement, pynvml.c_nvmlGpuInstancePlacement_t),
        (abi_mig.Placement, pynvml.c_nvmlComputeInstancePlacement_t),
        (abi_mig.GpuInstanceProfile, pynvml.c_nvmlGpuInstanceProfileInfo_t),
        (abi_mig.GpuInstanceProfileV2, pynvml.c_nvmlGpuInstanceProfileInfo_v2_t),
        (abi_mig.GpuInstance, pynvml.c_nvmlGpuInstanceInfo_t),
        (abi_mig.ComputeInstanceProfile, pynvml.c_nvmlComputeInstanceProfileInfo_t),
        (abi_mig.ComputeInstanceProfileV2, pynvml.c_nvmlComputeInstanceProfileInfo_v2_t),
        (abi_mig.ComputeInstance, pynvml.c_nvmlComputeInstanceInfo_t),
        (abi_mig.Attributes, pynvml.c_nvmlDeviceAttributes),
        (abi_mig.Process, pynvml.c_nvmlProcessInfo_v3_t),
    ],
)
def test_both_sides_agree_about_a_struct(ours: Any, theirs: Any) -> None:
    def layout(struct: Any) -> list[tuple[str, int, int]]:
        return [(name, getattr(struct, name).offset, getattr(struct, name).size) for name, *_ in struct._fields_]

    assert layout(ours) == layout(theirs)
    assert ctypes.sizeof(ours) == ctypes.sizeof(theirs)


def test_both_sides_agree_about_numbers() -> None:
    assert abi.version_of(abi_mig.GpuInstanceProfileV2) == pynvml.nvmlGpuInstanceProfileInfo_v2
    assert abi.version_of(abi_mig.GpuInstanceProfileV3) == 0x03000098
    assert abi.version_of(abi_mig.ComputeInstanceProfileV2) == pynvml.nvmlComputeInstanceProfileInfo_v2
    assert abi.version_of(abi_mig.ComputeInstanceProfileV3) == 0x0300008C
    assert abi_mig.GPU_INSTANCE_PROFILE_COUNT == pynvml.NVML_GPU_INSTANCE_PROFILE_COUNT
    assert abi_mig.COMPUTE_INSTANCE_PROFILE_COUNT == pynvml.NVML_COMPUTE_INSTANCE_PROFILE_COUNT


def test_pynvml_looks_up_every_function_of_the_mock_by_its_name() -> None:
    source = Path(pynvml.__file__).read_text(encoding="utf-8")
    asked = set(re.findall(r'_nvmlGetFunctionPointer\("(\w+)"\)', source))
    assert {name for name in library.FUNCTIONS if "Instance" in name or "Mig" in name} <= asked


@pytest.mark.usefixtures("machine")
def test_profiles_are_told_in_every_version() -> None:
    second = pynvml.nvmlDeviceGetGpuInstanceProfileInfo(gpu(), pynvml.NVML_GPU_INSTANCE_PROFILE_1_SLICE)
    first = pynvml.nvmlDeviceGetGpuInstanceProfileInfo(gpu(), pynvml.NVML_GPU_INSTANCE_PROFILE_1_SLICE, version=1)
    by_id = pynvml.nvmlDeviceGetGpuInstanceProfileInfoById(gpu(), G1)
    third = abi_mig.GpuInstanceProfileV3(version=abi.version_of(abi_mig.GpuInstanceProfileV3))
    function = pynvml._nvmlGetFunctionPointer("nvmlDeviceGetGpuInstanceProfileInfoV")
    assert function(gpu(), ctypes.c_uint(0), ctypes.byref(third)) == abi.SUCCESS
    assert third.capabilities == 0
    for told in (first, second, by_id, third):
        assert (told.id, told.sliceCount, told.instanceCount, told.multiprocessorCount) == (G1, 1, 7, 16)
        assert (told.copyEngineCount, told.decoderCount, told.jpegCount, told.ofaCount) == (1, 1, 1, 0)
        assert told.memorySizeMB == 9984
    assert (second.name, third.name) == ("MIG 1g.10gb", b"MIG 1g.10gb")
    third.version = 0x09000098
    assert function(gpu(), ctypes.c_uint(0), ctypes.byref(third)) == abi.ARGUMENT_VERSION_MISMATCH
    fails(abi.NOT_SUPPORTED, pynvml.nvmlDeviceGetGpuInstanceProfileInfo, gpu(), 5)
    fails(abi.INVALID_ARGUMENT, pynvml.nvmlDeviceGetGpuInstanceProfileInfo, gpu(), 18)
    fails(abi.NOT_SUPPORTED, pynvml.nvmlDeviceGetGpuInstanceProfileInfoById, gpu(), 77)


@pytest.mark.parametrize("on", [True, False])
def test_placements_are_told_with_mig_on_or_off(opened: Callable[..., Path], on: bool) -> None:
    opened(on=on)
    count = ctypes.c_uint()
    ask = pynvml.nvmlDeviceGetGpuInstancePossiblePlacements
    ask(gpu(), G3, None, ctypes.byref(count))
    assert count.value == 2
    array = (pynvml.c_nvmlGpuInstancePlacement_t * 2)()
    ask(gpu(), G3, array, ctypes.byref(count))
    assert [(place.start, place.size) for place in array] == [(0, 4), (4, 4)]
    fails(abi.NOT_SUPPORTED, ask, gpu(), 77, None, ctypes.byref(count))
    fails(abi.INVALID_ARGUMENT, ask, gpu(), G3, None, None)


def test_the_life_of_an_instance(machine: Path) -> None:
    assert files(machine) == set()
    instance = placed(G1, 2, 1)
    info = pynvml.nvmlGpuInstanceGetInfo(instance)
    assert (info.id, info.profileId, info.placement.start, info.placement.size) == (9, G1, 2, 1)
    assert pynvml.nvmlDeviceGetIndex(info.device) == 0
    assert files(machine) == {"proc/driver/nvidia/capabilities/gpu0/mig/gi9/access", "dev/nvidia-caps/nvidia-cap84"}
    assert not list_of(pynvml.nvmlGpuInstanceGetComputeInstances, instance, 0, kind=pynvml.c_nvmlComputeInstance_t)
    compute = pynvml.nvmlGpuInstanceCreateComputeInstance(instance, WHOLE[G1])
    told = pynvml.nvmlComputeInstanceGetInfo(compute)
    assert (told.id, told.profileId, told.placement.start, told.placement.size) == (0, 0, 0, 1)
    assert ctypes.addressof(told.gpuInstance.contents) == ctypes.addressof(instance.contents)
    device = told.device
    assert pynvml.nvmlDeviceIsMigDeviceHandle(device).value == 1
    assert pynvml.nvmlDeviceGetUUID(device).startswith("MIG-")
    assert pynvml.nvmlDeviceGetName(device) == "NVIDIA H100 80GB HBM3 MIG 1g.10gb"
    assert (pynvml.nvmlDeviceGetGpuInstanceId(device), pynvml.nvmlDeviceGetComputeInstanceId(device)) == (9, 0)
    assert pynvml.nvmlDeviceGetMemoryInfo(device).total == 9984 << 20
    assert pynvml.nvmlDeviceGetMemoryInfo(device, version=pynvml.nvmlMemory_v2).free == 9984 << 20
    parent = pynvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(device)
    assert pynvml.nvmlDeviceGetPciInfo_v3(parent).bus == 0x18
    attributes = pynvml.nvmlDeviceGetAttributes(device)
    assert (attributes.multiprocessorCount, attributes.gpuInstanceSliceCount, attributes.memorySizeMB) == (16, 1, 9984)
    here = "proc/driver/nvidia/capabilities/gpu0/mig/gi9"
    assert files(machine) == {
        f"{here}/access",
        f"{here}/ci0/access",
        "dev/nvidia-caps/nvidia-cap84",
        "dev/nvidia-caps/nvidia-cap85",
    }
    text = "DeviceFileMinor: 85\nDeviceFileMode: 292\nDeviceFileModify: 1\n"
    assert (machine / here / "ci0/access").read_text() == text
    pynvml.nvmlComputeInstanceDestroy(compute)
    pynvml.nvmlGpuInstanceDestroy(instance)
    assert files(machine) == set()
    assert list_of(pynvml.nvmlDeviceGetGpuInstances, gpu(), G1) == []


@pytest.mark.usefixtures("machine")
def test_a_mig_device_is_found_by_everything_that_names_it() -> None:
    for start in (4, 0):
        instance = placed(G3, start, 4)
        for _ in range(2):
            pynvml.nvmlGpuInstanceCreateComputeInstance(instance, 0)
    devices = [pynvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu(), index) for index in range(4)]
    ids = [(pynvml.nvmlDeviceGetGpuInstanceId(each), pynvml.nvmlDeviceGetComputeInstanceId(each)) for each in devices]
    assert ids == [(1, 0), (1, 1), (2, 0), (2, 1)]
    assert [pynvml.nvmlDeviceGetIndex(each) for each in devices] == [0, 1, 2, 3]
    uuids = [pynvml.nvmlDeviceGetUUID(each) for each in devices]
    assert len({*uuids}) == 4
    for uuid, (instance_id, compute_id) in zip(uuids, ids, strict=True):
        assert re.fullmatch(r"MIG-[0-9a-f]{8}-[0-9a-f]{4}-5[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}", uuid)
        older = f"MIG-{pynvml.nvmlDeviceGetUUID(gpu())}/{instance_id}/{compute_id}"
        for name in (uuid, older):
            assert pynvml.nvmlDeviceGetUUID(pynvml.nvmlDeviceGetHandleByUUID(name)) == uuid
    assert pynvml.nvmlDeviceGetName(devices[0]).endswith(" MIG 1c.3g.40gb")
    fails(abi.NOT_FOUND, pynvml.nvmlDeviceGetHandleByUUID, "MIG-0")
    fails(abi.NOT_FOUND, pynvml.nvmlDeviceGetMigDeviceHandleByIndex, gpu(), 4)
    fails(abi.INVALID_ARGUMENT, pynvml.nvmlDeviceGetMigDeviceHandleByIndex, gpu(), 7)
    assert pynvml.nvmlDeviceGetMaxMigDeviceCount(gpu()) == 7


@pytest.mark.usefixtures("machine")
def test_an_instance_made_again_has_its_ids_again_and_old_handles_do_not_mean_it() -> None:
    def make() -> tuple[Any, Any, Any]:
        instance = placed(G2, 2, 2)
        compute = pynvml.nvmlGpuInstanceCreateComputeInstance(instance, WHOLE[G2])
        return instance, compute, pynvml.nvmlComputeInstanceGetInfo(compute).device

    def gone(instance: Any, compute: Any, device: Any) -> None:
        fails(abi.INVALID_ARGUMENT, pynvml.nvmlGpuInstanceGetInfo, instance)
        fails(abi.INVALID_ARGUMENT, pynvml.nvmlGpuInstanceDestroy, instance)
        fails(abi.INVALID_ARGUMENT, pynvml.nvmlGpuInstanceCreateComputeInstance, instance, WHOLE[G2])
        fails(abi.INVALID_ARGUMENT, pynvml.nvmlComputeInstanceGetInfo, compute)
        fails(abi.INVALID_ARGUMENT, pynvml.nvmlComputeInstanceDestroy, compute)
        for function in (pynvml.nvmlDeviceGetUUID, pynvml.nvmlDeviceGetMemoryInfo, pynvml.nvmlDeviceGetPciInfo_v3):
            fails(abi.INVALID_ARGUMENT, function, device)

    before = make()
    uuid, number = pynvml.nvmlDeviceGetUUID(before[2]), pynvml.nvmlGpuInstanceGetInfo(before[0]).id
    pynvml.nvmlComputeInstanceDestroy(before[1])
    pynvml.nvmlGpuInstanceDestroy(before[0])
    gone(*before)
    after = make()
    assert (pynvml.nvmlDeviceGetUUID(after[2]), pynvml.nvmlGpuInstanceGetInfo(after[0]).id) == (uuid, number)
    gone(*before)


@pytest.mark.usefixtures("machine")
def test_what_has_no_room_is_refused() -> None:
    remaining = pynvml.nvmlDeviceGetGpuInstanceRemainingCapacity
    free = {profile: remaining(gpu(), profile) for profile in WHOLE}
    assert free == {G1: 7, G1_ME: 1, G1_DOUBLE: 4, G2: 3, G3: 2, G4: 1, G7: 1}
    placed(G3, 4, 4)
    free = {profile: remaining(gpu(), profile) for profile in WHOLE}
    assert free == {G1: 4, G1_ME: 1, G1_DOUBLE: 2, G2: 2, G3: 1, G4: 1, G7: 0}
    fails(abi.INSUFFICIENT_RESOURCES, placed, G3, 4, 4)
    fails(abi.INSUFFICIENT_RESOURCES, placed, G1, 5, 1)
    fails(abi.INSUFFICIENT_RESOURCES, placed, G7, 0, 8)
    fails(abi.INVALID_ARGUMENT, placed, G3, 1, 4)
    fails(abi.INVALID_ARGUMENT, placed, G3, 0, 3)
    fails(abi.INVALID_ARGUMENT, placed, 77, 0, 1)
    placed(G1_ME, 0, 1)
    fails(abi.INSUFFICIENT_RESOURCES, placed, G1_ME, 1, 1)
    assert pynvml.nvmlGpuInstanceGetInfo(pynvml.nvmlDeviceCreateGpuInstance(gpu(), G2)).placement.start == 2
    fails(abi.INSUFFICIENT_RESOURCES, pynvml.nvmlDeviceCreateGpuInstance, gpu(), G2)
    assert remaining(gpu(1), G7) == 1


@pytest.mark.usefixtures("machine")
def test_compute_instances_share_a_gpu_instance() -> None:
    instance = placed(G4, 0, 4)
    remaining = pynvml.nvmlGpuInstanceGetComputeInstanceRemainingCapacity
    assert [remaining(instance, profile) for profile in (0, 3)] == [4, 1]
    info = pynvml.nvmlGpuInstanceGetComputeInstanceProfileInfo(instance, 0, 0)
    older = pynvml.nvmlGpuInstanceGetComputeInstanceProfileInfo(instance, 0, 0, version=1)
    assert (info.name, info.sliceCount, info.sharedDecoderCount, older.sliceCount) == ("MIG 1c.4g.40gb", 1, 4, 1)
    third = abi_mig.ComputeInstanceProfileV3(version=abi.version_of(abi_mig.ComputeInstanceProfileV3))
    function = pynvml._nvmlGetFunctionPointer("nvmlGpuInstanceGetComputeInstanceProfileInfoV")
    assert function(instance, ctypes.c_uint(3), ctypes.c_uint(0), ctypes.byref(third)) == abi.SUCCESS
    assert (third.id, third.capabilities) == (3, 0)
    count = ctypes.c_uint()
    pynvml.nvmlGpuInstanceGetComputeInstancePossiblePlacements(instance, 0, None, ctypes.byref(count))
    assert count.value == 4
    made = pynvml.nvmlGpuInstanceCreateComputeInstance(instance, 0)
    place = ctypes.byref(pynvml.c_nvmlComputeInstancePlacement_t(3, 1))
    pynvml.nvmlGpuInstanceCreateComputeInstanceWithPlacement(instance, 0, place)
    assert [remaining(instance, profile) for profile in (0, 3)] == [2, 0]
    fails(abi.INSUFFICIENT_RESOURCES, pynvml.nvmlGpuInstanceCreateComputeInstance, instance, 3)
    fails(abi.INSUFFICIENT_RESOURCES, pynvml.nvmlGpuInstanceCreateComputeInstanceWithPlacement, instance, 0, place)
    wrong = ctypes.byref(pynvml.c_nvmlComputeInstancePlacement_t(9, 1))
    fails(abi.INVALID_ARGUMENT, pynvml.nvmlGpuInstanceCreateComputeInstanceWithPlacement, instance, 0, wrong)
    fails(abi.INVALID_ARGUMENT, pynvml.nvmlGpuInstanceCreateComputeInstance, instance, 77)
    fails(abi.NOT_SUPPORTED, pynvml.nvmlGpuInstanceGetComputeInstanceProfileInfo, instance, 4, 0)
    fails(abi.INVALID_ARGUMENT, pynvml.nvmlGpuInstanceGetComputeInstanceProfileInfo, instance, 9, 0)
    fails(abi.INVALID_ARGUMENT, pynvml.nvmlGpuInstanceGetComputeInstanceProfileInfo, instance, 0, 1)
    fails(abi.IN_USE, pynvml.nvmlGpuInstanceDestroy, instance)
    pynvml.nvmlComputeInstanceDestroy(made)
    again = pynvml.nvmlGpuInstanceCreateComputeInstance(instance, 0)
    assert pynvml.nvmlComputeInstanceGetInfo(again).id == 0
    assert (
        len(list_of(pynvml.nvmlGpuInstanceGetComputeInstances, instance, 0, kind=pynvml.c_nvmlComputeInstance_t)) == 2
    )
    assert pynvml.nvmlGpuInstanceGetComputeInstanceById(instance, 1)
    fails(abi.NOT_FOUND, pynvml.nvmlGpuInstanceGetComputeInstanceById, instance, 7)


def test_without_mig_mode_there_are_no_instances(opened: Callable[..., Path]) -> None:
    opened(on=False)
    assert pynvml.nvmlDeviceGetMigMode(gpu()) == [0, 0]
    fails(abi.NOT_SUPPORTED, placed, G1, 0, 1)
    fails(abi.NOT_SUPPORTED, pynvml.nvmlDeviceCreateGpuInstance, gpu(), G1)
    fails(abi.NOT_SUPPORTED, list_of, pynvml.nvmlDeviceGetGpuInstances, gpu(), G1)
    fails(abi.NOT_SUPPORTED, pynvml.nvmlDeviceGetGpuInstanceById, gpu(), 0)
    fails(abi.NOT_SUPPORTED, pynvml.nvmlDeviceGetGpuInstanceRemainingCapacity, gpu(), G1)
    fails(abi.NOT_SUPPORTED, pynvml.nvmlDeviceGetMigDeviceHandleByIndex, gpu(), 0)


def test_a_gpu_without_mig_supports_nothing_of_it(opened: Callable[..., Path]) -> None:
    directory = opened(on=False)
    change(directory, mig=None)
    fails(abi.NOT_SUPPORTED, pynvml.nvmlDeviceGetMigMode, gpu())
    fails(abi.NOT_SUPPORTED, pynvml.nvmlDeviceSetMigMode, gpu(), 1)
    fails(abi.NOT_SUPPORTED, pynvml.nvmlDeviceGetGpuInstanceProfileInfo, gpu(), 0)
    fails(abi.NOT_SUPPORTED, placed, G1, 0, 1)
    assert pynvml.nvmlDeviceGetMaxMigDeviceCount(gpu()) == 0
    with pytest.raises(DocumentError, match="Not Supported"):
        mig.admin_mode(directory, GPU0, True)


def test_the_mode_changes_at_once_unless_the_gpu_is_in_use(opened: Callable[..., Path]) -> None:
    directory = opened(on=False)
    assert pynvml.nvmlDeviceSetMigMode(gpu(), 1) == abi.SUCCESS
    assert pynvml.nvmlDeviceGetMigMode(gpu()) == [1, 1]
    assert pynvml.nvmlDeviceSetMigMode(gpu(), 1) == abi.SUCCESS
    instance = placed(G1, 0, 1)
    fails(abi.IN_USE, pynvml.nvmlDeviceSetMigMode, gpu(), 0)
    pynvml.nvmlGpuInstanceDestroy(instance)
    assert pynvml.nvmlDeviceSetMigMode(gpu(), 0) == abi.SUCCESS
    assert pynvml.nvmlDeviceGetMigMode(gpu()) == [0, 0]
    mig.admin_use(directory, GPU0, [state.Process(pid=7, memory=1 << 20)])
    fails(abi.IN_USE, pynvml.nvmlDeviceSetMigMode, gpu(), 1)
    assert pynvml.nvmlDeviceGetMigMode(gpu()) == [0, 0]
    (process,) = pynvml.nvmlDeviceGetComputeRunningProcesses_v3(gpu())
    assert (process.pid, process.usedGpuMemory, process.gpuInstanceId) == (7, 1 << 20, 0xFFFFFFFF)
    fails(abi.INVALID_ARGUMENT, pynvml.nvmlDeviceSetMigMode, gpu(), 2)


def test_on_ampere_the_mode_waits_for_a_reset(opened: Callable[..., Path]) -> None:
    directory = opened(AMPERE, on=False)
    mig.admin_use(directory, GPU1, [state.Process(pid=7)])
    assert pynvml.nvmlDeviceSetMigMode(gpu(0), 1) == abi.RESET_REQUIRED
    assert pynvml.nvmlDeviceSetMigMode(gpu(1), 1) == abi.IN_USE
    for index in (0, 1):
        assert pynvml.nvmlDeviceGetMigMode(gpu(index)) == [0, 1]
        fails(abi.NOT_SUPPORTED, pynvml.nvmlDeviceCreateGpuInstance, gpu(index), G1)
    assert pynvml.nvmlDeviceSetMigMode(gpu(1), 0) == abi.SUCCESS
    assert pynvml.nvmlDeviceGetMigMode(gpu(1)) == [0, 0]
    mig.admin_mode(directory, GPU0, True)
    assert pynvml.nvmlDeviceGetMigMode(gpu(0)) == [1, 1]
    with pytest.raises(DocumentError, match="In use"):
        mig.admin_mode(directory, GPU1, True)


def test_used_instances_stay(machine: Path) -> None:
    one = mig.admin_create(machine, GPU0, "3g.40gb", 0)
    other = mig.admin_create(machine, GPU0, "1g.10gb", 4)
    mig.admin_use(machine, GPU0, [state.Process(pid=5, memory=1 << 30, gpu_instance=one.id, compute_instance=0)])
    first, second = (pynvml.nvmlDeviceGetGpuInstanceById(gpu(), each.id) for each in (one, other))
    compute = pynvml.nvmlGpuInstanceGetComputeInstanceById(first, 0)
    fails(abi.IN_USE, pynvml.nvmlComputeInstanceDestroy, compute)
    with pytest.raises(DocumentError, match="In use"):
        mig.admin_destroy(machine, GPU0, "3g.40gb", 0)
    device = pynvml.nvmlComputeInstanceGetInfo(compute).device
    assert [each.pid for each in pynvml.nvmlDeviceGetComputeRunningProcesses_v3(device)] == [5]
    assert pynvml.nvmlDeviceGetMemoryInfo(device).used == 1 << 30
    pynvml.nvmlComputeInstanceDestroy(pynvml.nvmlGpuInstanceGetComputeInstanceById(second, 0))
    pynvml.nvmlGpuInstanceDestroy(second)


def test_a_gpu_in_mig_mode_answers_less(machine: Path) -> None:
    fails(abi.NOT_SUPPORTED, pynvml.nvmlDeviceGetUtilizationRates, gpu())
    assert pynvml.nvmlDeviceGetRemappedRows(gpu()) == (0, 0, 0, 0)
    mig.admin_create(machine, GPU0, "1g.10gb")
    fails(abi.NOT_SUPPORTED, pynvml.nvmlDeviceGetRemappedRows, gpu())
    device = pynvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu(), 0)
    for function, *arguments in (
        (pynvml.nvmlDeviceGetPowerUsage,),
        (pynvml.nvmlDeviceGetMigMode,),
        (pynvml.nvmlDeviceGetMigDeviceHandleByIndex, 0),
        (pynvml.nvmlDeviceCreateGpuInstance, G1),
    ):
        fails(abi.NOT_SUPPORTED, function, device, *arguments)
    fails(abi.NOT_SUPPORTED, pynvml.nvmlDeviceGetAttributes, gpu())
    for function in (
        pynvml.nvmlDeviceGetGpuInstanceId,
        pynvml.nvmlDeviceGetComputeInstanceId,
        pynvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle,
    ):
        fails(abi.INVALID_ARGUMENT, function, gpu())


@pytest.mark.usefixtures("machine")
def test_handles_of_one_kind_are_none_of_another() -> None:
    instance = placed(G1, 0, 1)
    as_device = ctypes.cast(instance, pynvml.c_nvmlDevice_t)
    fails(abi.INVALID_ARGUMENT, pynvml.nvmlDeviceGetUUID, as_device)
    fails(abi.INVALID_ARGUMENT, pynvml.nvmlGpuInstanceGetInfo, gpu())
    fails(abi.INVALID_ARGUMENT, pynvml.nvmlComputeInstanceGetInfo, instance)
    fails(abi.INVALID_ARGUMENT, pynvml.nvmlGpuInstanceDestroy, pynvml.c_nvmlGpuInstance_t())


def test_changing_needs_rights_and_looking_does_not(machine: Path) -> None:
    made = mig.admin_create(machine, GPU0, "1g.10gb", 0)
    instance = pynvml.nvmlDeviceGetGpuInstanceById(gpu(), made.id)
    compute = pynvml.nvmlGpuInstanceGetComputeInstanceById(instance, 0)
    unprivileged(machine)
    assert pynvml.nvmlDeviceGetMigMode(gpu()) == [1, 1]
    assert pynvml.nvmlDeviceGetUUID(pynvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu(), 0))
    assert pynvml.nvmlDeviceGetGpuInstanceProfileInfo(gpu(), 0).id == G1
    assert pynvml.nvmlGpuInstanceGetInfo(instance).id == made.id
    for function, *arguments in (
        (pynvml.nvmlDeviceSetMigMode, gpu(), 0),
        (placed, G1, 3, 1),
        (pynvml.nvmlDeviceCreateGpuInstance, gpu(), G1),
        (list_of, pynvml.nvmlDeviceGetGpuInstances, gpu(), G1),
        (pynvml.nvmlDeviceGetGpuInstanceById, gpu(), made.id),
        (pynvml.nvmlDeviceGetGpuInstanceRemainingCapacity, gpu(), G1),
        (pynvml.nvmlGpuInstanceDestroy, instance),
        (pynvml.nvmlGpuInstanceCreateComputeInstance, instance, 0),
        (pynvml.nvmlComputeInstanceDestroy, compute),
    ):
        fails(abi.NO_PERMISSION, function, *arguments)


def test_null_is_no_place_for_an_answer(machine: Path) -> None:
    for name, arguments in (
        ("nvmlDeviceCreateGpuInstance", (gpu(), ctypes.c_uint(G1), None)),
        ("nvmlDeviceCreateGpuInstanceWithPlacement", (gpu(), ctypes.c_uint(G1), None, None)),
        ("nvmlDeviceSetMigMode", (gpu(), ctypes.c_uint(0), None)),
        ("nvmlDeviceGetGpuInstances", (gpu(), ctypes.c_uint(G1), None, None)),
    ):
        assert pynvml._nvmlGetFunctionPointer(name)(*arguments) == abi.INVALID_ARGUMENT
    assert mig.instances(machine) == {GPU0: (), GPU1: ()}


def test_a_lost_gpu_makes_no_instances(machine: Path) -> None:
    handle = gpu()
    instance = placed(G1, 0, 1)
    faults.apply(machine, [fault.Fault(kind=Kind.GPU_LOST, target=GPU0)])
    fails(abi.GPU_IS_LOST, pynvml.nvmlDeviceCreateGpuInstance, handle, G1)
    fails(abi.GPU_IS_LOST, pynvml.nvmlGpuInstanceGetInfo, instance)
    with pytest.raises(DocumentError, match="GPU is lost"):
        mig.admin_create(machine, GPU0, "1g.10gb")


def test_the_numbers_of_capabilities_are_the_kernels() -> None:
    lines = migfiles.minors().splitlines()
    assert lines[:5] == ["config 1", "monitor 2", "gpu0/gi0/access 3", "gpu0/gi0/ci0/access 4", "gpu0/gi0/ci1/access 5"]
    assert lines[-1] == "gpu31/gi14/ci7/access 4322"
    assert "gpu6/gi11/ci5/access 918" in lines
    assert [int(line.split()[1]) for line in lines] == list(range(1, 4323))


def test_uuids_are_as_many_as_instances() -> None:
    uuids = {
        migrules.device_uuid(f"GPU-{number:08x}-aaaa-bbbb-cccc-dddddddddddd", instance, compute)
        for number in range(64)
        for instance in range(15)
        for compute in range(8)
    }
    assert len(uuids) == 64 * 15 * 8
