# SPDX-License-Identifier: Apache-2.0
"""The stand-in for libnvidia-ml, asked by the real pynvml.

- what pynvml gets is what the state says, through its own structs
- the two sides agree about every struct
- errors are NVML's: uninitialised, missing function, bad argument, wrong version, short buffer, lost GPU
- handles outlive the session, and the GPU
"""

from __future__ import annotations

import ctypes
import dataclasses
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pynvml
import pytest

from discovery.mock import abi, fault, faults, library, live, state
from tests.fakes import mockmachine


@pytest.fixture
def installed() -> Iterator[Any]:
    """Puts libraries in the place of the loaded one, and takes them out again."""

    def install(directory: Path) -> None:
        pynvml.nvmlLib = library.load_library(directory)
        pynvml._nvmlGetFunctionPointer_cache.clear()

    yield install
    pynvml.nvmlLib = None
    pynvml._nvmlGetFunctionPointer_cache.clear()


@pytest.fixture
def nvml(tmp_path: Path, installed: Any) -> Path:
    """A session with the small machine; its directory."""
    mockmachine.rendered_without_files(tmp_path)
    installed(tmp_path)
    pynvml.nvmlInitWithFlags(1)
    return tmp_path


def _gpu(index: int = 0) -> Any:
    return pynvml.nvmlDeviceGetHandleByIndex(index)


def _fails(status: int, function: Any, *arguments: Any) -> None:
    with pytest.raises(pynvml.NVMLError) as raised:
        function(*arguments)
    assert raised.value.value == status


def _change(directory: Path, **fields: Any) -> None:
    """Other values for the first GPU."""

    def changed(now: live.Live) -> live.Live:
        assert now.nvml is not None
        first, *others = now.nvml.gpus
        gpus = (dataclasses.replace(first, **fields), *others)
        return dataclasses.replace(now, nvml=dataclasses.replace(now.nvml, gpus=gpus))

    live.LiveFile(directory).update(changed)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (abi.PciInfo, pynvml.nvmlPciInfo_t),
        (abi.Memory, pynvml.c_nvmlMemory_t),
        (abi.MemoryV2, pynvml.c_nvmlMemory_v2_t),
        (abi.Utilization, pynvml.c_nvmlUtilization_t),
        (abi.C2cModeInfo, pynvml.c_nvmlC2cModeInfo_v1_t),
        (abi.FabricInfo, pynvml.c_nvmlGpuFabricInfo_t),
        (abi.FabricInfoV2, pynvml.c_nvmlGpuFabricInfo_v2_t),
        (abi.FabricInfoV3, pynvml.c_nvmlGpuFabricInfo_v3_t),
        (abi.FieldValue, pynvml.c_nvmlFieldValue_t),
        (abi.EventData, pynvml.c_nvmlEventData_t),
    ],
)
def test_both_sides_agree_about_a_struct(ours: Any, theirs: Any) -> None:
    def layout(struct: Any) -> list[tuple[str, int, int]]:
        return [(name, getattr(struct, name).offset, getattr(struct, name).size) for name, *_ in struct._fields_]

    assert layout(ours) == layout(theirs)
    assert ctypes.sizeof(ours) == ctypes.sizeof(theirs)


def test_both_sides_agree_about_numbers() -> None:
    assert abi.version_of(abi.MemoryV2) == pynvml.nvmlMemory_v2
    assert abi.version_of(abi.FabricInfoV2) == pynvml.nvmlGpuFabricInfo_v2
    assert abi.version_of(abi.FabricInfoV3) == pynvml.nvmlGpuFabricInfo_v3
    for name, value in abi.ARCHITECTURES.items():
        assert getattr(pynvml, f"NVML_DEVICE_ARCH_{name.upper()}") == value
    for name, value in abi.NVLINK_VERSIONS.items():
        # As nvml.h has it, or one higher as the kernel driver.
        number = getattr(pynvml, f"NVML_NVLINK_VERSION_{name.replace('.', '_')}")
        assert value in (number, number + 1)
    for name in ("UNINITIALIZED", "INVALID_ARGUMENT", "NOT_SUPPORTED", "NOT_FOUND", "INSUFFICIENT_SIZE", "TIMEOUT",
                 "DRIVER_NOT_LOADED", "FUNCTION_NOT_FOUND", "GPU_IS_LOST", "ARGUMENT_VERSION_MISMATCH", "UNKNOWN",
                 "RESET_REQUIRED", "IN_USE", "INSUFFICIENT_RESOURCES"):  # fmt: skip
        assert getattr(pynvml, f"NVML_ERROR_{name}") == getattr(abi, name)
    assert set(abi.ERROR_STRINGS) == {0, *(v for k, v in vars(pynvml).items() if k.startswith("NVML_ERROR_"))}
    assert pynvml.NVML_FI_DEV_NVLINK_LINK_COUNT == abi.FIELD_NVLINK_LINK_COUNT
    assert pynvml.NVML_NVLINK_MAX_LINKS == abi.NVLINK_MAX_LINKS


@pytest.mark.usefixtures("nvml")
def test_the_driver_says_its_versions() -> None:
    assert pynvml.nvmlSystemGetDriverVersion() == "580.95.05"
    assert pynvml.nvmlSystemGetNVMLVersion() == "13.580.95.05"
    assert pynvml.nvmlSystemGetCudaDriverVersion_v2() == 13000
    assert pynvml.nvmlDeviceGetCount() == 2


@pytest.mark.usefixtures("nvml")
def test_a_gpu_says_what_it_is() -> None:
    gpu = _gpu()
    assert pynvml.nvmlDeviceGetName(gpu) == "NVIDIA H100 80GB HBM3"
    assert pynvml.nvmlDeviceGetArchitecture(gpu) == pynvml.NVML_DEVICE_ARCH_HOPPER
    assert pynvml.nvmlDeviceGetBrand(gpu) == pynvml.NVML_BRAND_NVIDIA
    assert tuple(pynvml.nvmlDeviceGetCudaComputeCapability(gpu)) == (9, 0)
    assert pynvml.nvmlDeviceGetNumGpuCores(gpu) == 16896
    assert pynvml.nvmlDeviceGetMigMode(gpu) == [0, 0]
    assert pynvml.nvmlDeviceGetMaxMigDeviceCount(gpu) == 0
    assert pynvml.nvmlDeviceIsMigDeviceHandle(gpu).value == 0
    assert (pynvml.nvmlDeviceGetIndex(_gpu(1)), pynvml.nvmlDeviceGetMinorNumber(_gpu(1))) == (1, 1)
    info = pynvml.nvmlDeviceGetPciInfo_v3(gpu)
    assert (info.busId, info.busIdLegacy) == ("00000000:18:00.0", "0000:18:00.0")
    assert (info.domain, info.bus, info.device, info.pciDeviceId, info.pciSubSystemId) == (
        0,
        0x18,
        0,
        0x233010DE,
        0x16C110DE,
    )


@pytest.mark.usefixtures("nvml")
def test_a_gpu_is_found_by_everything_that_names_it() -> None:
    uuid = pynvml.nvmlDeviceGetUUID(_gpu(1))
    assert uuid.startswith("GPU-")
    for found in (
        pynvml.nvmlDeviceGetHandleByUUID(uuid),
        pynvml.nvmlDeviceGetHandleByPciBusId("0000:19:00.0"),
        pynvml.nvmlDeviceGetHandleByPciBusId("00000000:19:00.0"),
        pynvml.nvmlDeviceGetHandleBySerial(pynvml.nvmlDeviceGetSerial(_gpu(1))),
    ):
        assert pynvml.nvmlDeviceGetUUID(found) == uuid
    _fails(abi.NOT_FOUND, pynvml.nvmlDeviceGetHandleByUUID, "GPU-0")
    _fails(abi.NOT_FOUND, pynvml.nvmlDeviceGetHandleByPciBusId, "0000:ff:00.0")
    _fails(abi.NOT_FOUND, pynvml.nvmlDeviceGetHandleByPciBusId, "here")
    _fails(abi.INVALID_ARGUMENT, pynvml.nvmlDeviceGetHandleByIndex, 2)


def test_memory_is_told_in_both_versions(nvml: Path) -> None:
    _change(nvml, memory=state.Memory(total=1000, reserved=100, used=300))
    first = pynvml.nvmlDeviceGetMemoryInfo(_gpu())
    assert (first.total, first.used, first.free) == (1000, 400, 600)
    second = pynvml.nvmlDeviceGetMemoryInfo(_gpu(), version=pynvml.nvmlMemory_v2)
    assert (second.total, second.reserved, second.used, second.free) == (1000, 100, 300, 600)
    _fails(abi.ARGUMENT_VERSION_MISMATCH, pynvml.nvmlDeviceGetMemoryInfo, _gpu(), 0x03000028)


@pytest.mark.usefixtures("nvml")
def test_nvlinks_are_told_one_by_one() -> None:
    gpu = _gpu()
    assert [pynvml.nvmlDeviceGetNvLinkState(gpu, link) for link in range(18)] == [1] * 4 + [0] * 14
    assert pynvml.nvmlDeviceGetNvLinkVersion(gpu, 0) == 7  # as an H100 says, not the 6 of NVML_NVLINK_VERSION_4_0
    assert pynvml.nvmlDeviceGetNvLinkRemoteDeviceType(gpu, 0) == pynvml.NVML_NVLINK_DEVICE_TYPE_GPU
    assert pynvml.nvmlDeviceGetNvLinkRemotePciInfo(gpu, 0).busId == "00000000:19:00.0"
    assert pynvml.nvmlDeviceGetNvLinkCapability(gpu, 0, pynvml.NVML_NVLINK_CAP_P2P_SUPPORTED) == 1
    assert pynvml.nvmlDeviceGetNvLinkCapability(gpu, 0, pynvml.NVML_NVLINK_CAP_SLI_BRIDGE) == 0
    assert pynvml.nvmlDeviceGetFieldValues(gpu, [91, 92])[0].value.uiVal == 18
    assert pynvml.nvmlDeviceGetFieldValues(gpu, [91, 92])[1].nvmlReturn == abi.NOT_SUPPORTED
    _fails(abi.INVALID_ARGUMENT, pynvml.nvmlDeviceGetNvLinkState, gpu, 18)
    _fails(abi.NOT_SUPPORTED, pynvml.nvmlDeviceGetNvLinkVersion, gpu, 17)


def test_a_link_to_a_switch_outside_has_no_address(nvml: Path) -> None:
    hidden = state.NvLink(active=True, version=7, remote_type=2, remote_bus_id=state.NVLINK_REMOTE_HIDDEN)
    _change(nvml, nvlinks=(hidden,))
    info = pynvml.nvmlDeviceGetNvLinkRemotePciInfo(_gpu(), 0)
    assert (info.domain, info.busId) == (0xFFFFFFFF, "FFFFFFFF:FF:FF.0")


def test_the_fabric_is_told_in_all_versions(nvml: Path) -> None:
    uuid = "0123456789abcdef0123456789abcdef"
    _fails(
        abi.NOT_SUPPORTED, pynvml.nvmlDeviceGetGpuFabricInfoV, _gpu(), ctypes.byref(pynvml.c_nvmlGpuFabricInfo_v3_t())
    )
    _change(nvml, fabric=state.Fabric(state=3, cluster_uuid=uuid, clique_id=7, health_mask=5))
    for struct in (pynvml.c_nvmlGpuFabricInfo_v2_t, pynvml.c_nvmlGpuFabricInfo_v3_t):
        info = struct()
        pynvml.nvmlDeviceGetGpuFabricInfoV(_gpu(), ctypes.byref(info))
        assert (bytes(info.clusterUuid).hex(), info.cliqueId, info.state, info.healthMask) == (uuid, 7, 3, 5)
    info = pynvml.c_nvmlGpuFabricInfo_t()
    pynvml.nvmlDeviceGetGpuFabricInfo(_gpu(), ctypes.byref(info))
    assert (info.cliqueId, info.state, info.status) == (7, 3, 0)
    newer = pynvml.c_nvmlGpuFabricInfo_v3_t()
    newer.version = 0x09000028
    _fails(abi.ARGUMENT_VERSION_MISMATCH, pynvml.nvmlDeviceGetGpuFabricInfoV, _gpu(), ctypes.byref(newer))


@pytest.mark.usefixtures("nvml")
def test_pairs_of_gpus() -> None:
    first, second = _gpu(0), _gpu(1)
    assert pynvml.nvmlDeviceGetTopologyCommonAncestor(first, second) == pynvml.NVML_TOPOLOGY_SINGLE
    assert pynvml.nvmlDeviceGetP2PStatus(first, second, pynvml.NVML_P2P_CAPS_INDEX_NVLINK) == pynvml.NVML_P2P_STATUS_OK
    _fails(abi.NOT_SUPPORTED, pynvml.nvmlDeviceGetP2PStatus, first, second, pynvml.NVML_P2P_CAPS_INDEX_PCI)
    _fails(abi.INVALID_ARGUMENT, pynvml.nvmlDeviceGetP2PStatus, first, second, 9)
    _fails(abi.INVALID_ARGUMENT, pynvml.nvmlDeviceGetTopologyCommonAncestor, first, first)
    near = pynvml.nvmlDeviceGetTopologyNearestGpus(first, pynvml.NVML_TOPOLOGY_SINGLE)
    assert [pynvml.nvmlDeviceGetIndex(gpu) for gpu in near] == [1]


@pytest.mark.usefixtures("nvml")
def test_a_healthy_idle_gpu() -> None:
    gpu = _gpu()
    rates = pynvml.nvmlDeviceGetUtilizationRates(gpu)
    assert (rates.gpu, rates.memory) == (0, 0)
    assert pynvml.nvmlDeviceGetEccMode(gpu) == [1, 1]
    assert pynvml.nvmlDeviceGetTotalEccErrors(gpu, 1, 0) == 0
    assert pynvml.nvmlDeviceGetRemappedRows(gpu) == (0, 0, 0, 0)
    assert pynvml.nvmlDeviceGetEnforcedPowerLimit(gpu) == 700_000
    assert pynvml.nvmlDeviceGetPowerUsage(gpu) < 700_000
    assert pynvml.nvmlDeviceGetTemperature(gpu, pynvml.NVML_TEMPERATURE_GPU) < 60
    assert pynvml.nvmlDeviceGetCurrentClocksEventReasons(gpu) == pynvml.nvmlClocksEventReasonGpuIdle
    assert pynvml.nvmlDeviceGetCurrPcieLinkWidth(gpu) == pynvml.nvmlDeviceGetMaxPcieLinkWidth(gpu) == 16
    assert pynvml.nvmlDeviceGetPersistenceMode(gpu) == 1
    _fails(abi.INVALID_ARGUMENT, pynvml.nvmlDeviceGetTemperature, gpu, 7)
    _fails(abi.INVALID_ARGUMENT, pynvml.nvmlDeviceGetTotalEccErrors, gpu, 5, 0)


@pytest.mark.parametrize(
    ("field", "function", "arguments"),
    [
        ("uuid", pynvml.nvmlDeviceGetUUID, ()),
        ("cores", pynvml.nvmlDeviceGetNumGpuCores, ()),
        ("mig", pynvml.nvmlDeviceGetMigMode, ()),
        ("memory", pynvml.nvmlDeviceGetMemoryInfo, ()),
        ("ecc", pynvml.nvmlDeviceGetEccMode, ()),
        ("pcie", pynvml.nvmlDeviceGetCurrPcieLinkWidth, ()),
        ("utilization", pynvml.nvmlDeviceGetUtilizationRates, ()),
        ("temperature_c", pynvml.nvmlDeviceGetTemperature, (0,)),
        ("numa_node", pynvml.nvmlDeviceGetNumaNodeId, ()),
    ],
)
def test_a_field_that_is_not_known_is_not_supported(nvml: Path, field: str, function: Any, arguments: Any) -> None:
    _change(nvml, **{field: None})
    _fails(abi.NOT_SUPPORTED, function, _gpu(), *arguments)


def test_a_recorded_error_of_a_function_is_answered(nvml: Path) -> None:
    _change(nvml, errors={"nvmlDeviceGetName": 4})
    _fails(abi.NO_PERMISSION, pynvml.nvmlDeviceGetName, _gpu())
    assert pynvml.nvmlDeviceGetUUID(_gpu())


def test_a_change_of_the_state_is_seen_at_once(nvml: Path) -> None:
    gpu = _gpu()
    _change(nvml, mig=state.Mig(current=False, pending=True, max_devices=7))
    assert pynvml.nvmlDeviceGetMigMode(gpu) == [0, 1]


@pytest.mark.usefixtures("nvml")
def test_a_function_that_the_mock_has_not_is_missing_as_from_an_old_driver() -> None:
    _fails(abi.FUNCTION_NOT_FOUND, pynvml.nvmlSystemGetTopologyGpuSet, 0)


def test_a_driver_can_lack_functions(tmp_path: Path, installed: Any) -> None:
    mockmachine.rendered_without_files(tmp_path)

    def older(now: live.Live) -> live.Live:
        assert now.nvml is not None
        system = dataclasses.replace(now.nvml.system, missing_functions=("nvmlDeviceGetNumGpuCores",))
        return dataclasses.replace(now, nvml=dataclasses.replace(now.nvml, system=system))

    live.LiveFile(tmp_path).update(older)
    installed(tmp_path)
    pynvml.nvmlInit()
    _fails(abi.FUNCTION_NOT_FOUND, pynvml.nvmlDeviceGetNumGpuCores, _gpu())


def test_nothing_is_answered_outside_of_a_session(tmp_path: Path, installed: Any) -> None:
    mockmachine.rendered_without_files(tmp_path)
    installed(tmp_path)
    _fails(abi.UNINITIALIZED, pynvml.nvmlDeviceGetCount)
    _fails(abi.UNINITIALIZED, pynvml.nvmlShutdown)
    pynvml.nvmlInit()
    pynvml.nvmlInit()
    gpu = _gpu()
    pynvml.nvmlShutdown()
    assert pynvml.nvmlDeviceGetName(gpu)
    pynvml.nvmlShutdown()
    _fails(abi.UNINITIALIZED, pynvml.nvmlDeviceGetName, gpu)
    pynvml.nvmlInit()
    assert pynvml.nvmlDeviceGetName(gpu)
    assert str(pynvml.NVMLError(abi.GPU_IS_LOST)) == "GPU is lost"


@pytest.mark.usefixtures("nvml")
def test_errors_have_their_texts() -> None:
    assert pynvml.nvmlErrorString(abi.GPU_IS_LOST) == "GPU is lost"
    assert pynvml.nvmlErrorString(12345) == "Unknown Error"


@pytest.mark.usefixtures("nvml")
def test_a_handle_that_nobody_gave_is_refused() -> None:
    bogus = ctypes.cast(ctypes.c_void_p(0x1234), pynvml.c_nvmlDevice_t)
    _fails(abi.INVALID_ARGUMENT, pynvml.nvmlDeviceGetName, bogus)
    _fails(abi.INVALID_ARGUMENT, pynvml.nvmlDeviceGetName, pynvml.c_nvmlDevice_t())


@pytest.mark.usefixtures("nvml")
def test_a_short_buffer_is_refused_and_not_overrun() -> None:
    function = pynvml._nvmlGetFunctionPointer("nvmlDeviceGetName")
    buffer = ctypes.create_string_buffer(b"x" * 8, 16)
    assert function(_gpu(), buffer, ctypes.c_uint(8)) == abi.INSUFFICIENT_SIZE
    assert buffer.raw[:8] == b"x" * 8
    assert function(_gpu(), None, ctypes.c_uint(8)) == abi.INVALID_ARGUMENT


def test_a_damaged_state_is_an_error_and_no_success(nvml: Path) -> None:
    gpu = _gpu()
    (nvml / live.FILE).write_text("{")
    _fails(abi.UNKNOWN, pynvml.nvmlDeviceGetName, gpu)
    (nvml / live.FILE).unlink()
    _fails(abi.UNKNOWN, pynvml.nvmlDeviceGetName, gpu)


def test_xids_reach_those_who_wait_for_them(nvml: Path) -> None:
    events = pynvml.nvmlEventSetCreate()
    wanted = pynvml.nvmlEventTypeXidCriticalError
    assert pynvml.nvmlDeviceGetSupportedEventTypes(_gpu()) & wanted
    pynvml.nvmlDeviceRegisterEvents(_gpu(0), wanted, events)
    _fails(abi.TIMEOUT, pynvml.nvmlEventSetWait_v2, events, 0)
    hits = [fault.Fault(kind=fault.Kind.XID, target=pci, xid=79) for pci in (mockmachine.GPU1, mockmachine.GPU0)]
    threading.Timer(0.05, faults.apply, (nvml, hits)).start()
    data = pynvml.nvmlEventSetWait_v2(events, 20_000)
    assert (data.eventType, data.eventData) == (wanted, 79)
    assert pynvml.nvmlDeviceGetPciInfo_v3(data.device).bus == 0x18
    assert (data.gpuInstanceId, data.computeInstanceId) == (0xFFFFFFFF, 0xFFFFFFFF)
    _fails(abi.TIMEOUT, pynvml.nvmlEventSetWait_v2, events, 0)
    pynvml.nvmlEventSetFree(events)
    _fails(abi.INVALID_ARGUMENT, pynvml.nvmlEventSetWait_v2, events, 0)
    _fails(abi.NOT_SUPPORTED, pynvml.nvmlDeviceRegisterEvents, _gpu(), 0x4000, pynvml.nvmlEventSetCreate())


def test_waiting_for_events_of_a_lost_gpu_ends(nvml: Path) -> None:
    events = pynvml.nvmlEventSetCreate()
    pynvml.nvmlDeviceRegisterEvents(_gpu(), pynvml.nvmlEventTypeXidCriticalError, events)
    faults.apply(nvml, [fault.Fault(kind=fault.Kind.GPU_LOST, target=mockmachine.GPU0)])
    _fails(abi.GPU_IS_LOST, pynvml.nvmlEventSetWait_v2, events, 20_000)


def test_replaying_needs_nothing_large() -> None:
    """The process that holds the library is to stay small: no reader of people's documents, no OpenSSL."""
    program = (
        "import sys; before = set(sys.modules); import discovery.mock.library;"
        "print(*{'pydantic', 'yaml', 'pynvml', 'hashlib'} & (sys.modules.keys() - before))"
    )
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == ""


def test_an_xid_before_the_registration_is_not_delivered(nvml: Path) -> None:
    faults.apply(nvml, [fault.Fault(kind=fault.Kind.XID, target=mockmachine.GPU0, xid=31)])
    events = pynvml.nvmlEventSetCreate()
    pynvml.nvmlDeviceRegisterEvents(_gpu(), pynvml.nvmlEventTypeXidCriticalError, events)
    _fails(abi.TIMEOUT, pynvml.nvmlEventSetWait_v2, events, 0)


def test_several_threads_may_ask(nvml: Path) -> None:
    names: list[str] = []

    def ask() -> None:
        names.extend(pynvml.nvmlDeviceGetName(_gpu(1)) for _ in range(50))

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert names == ["NVIDIA H100 80GB HBM3"] * 200
    assert nvml.is_dir()
