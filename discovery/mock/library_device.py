# SPDX-License-Identifier: Apache-2.0
"""NVML functions about the driver and about one GPU. Table: C name -> Function."""

from __future__ import annotations

import ctypes
import operator
from collections.abc import Callable
from typing import Any

from discovery import address
from discovery.mock import abi, call, handles, library_mig, state
from discovery.mock.driver import Driver
from discovery.mock.status import StatusError

_MIG = "MIG-"


@call.system(call.POINTER, call.UINT)
def _driver_version(driver: Driver, out: int | None, length: int) -> None:
    call.put_text(out, length, call.wanted(driver.system("nvmlSystemGetDriverVersion").driver_version))


@call.system(call.POINTER, call.UINT)
def _nvml_version(driver: Driver, out: int | None, length: int) -> None:
    call.put_text(out, length, call.wanted(driver.system("nvmlSystemGetNVMLVersion").nvml_version))


@call.system(call.POINTER)
def _cuda_version(driver: Driver, out: int | None) -> None:
    call.put(out, ctypes.c_int, call.wanted(driver.system("nvmlSystemGetCudaDriverVersion_v2").cuda_version))


@call.system(call.POINTER)
def _count(driver: Driver, out: int | None) -> None:
    call.put(out, ctypes.c_uint, len(driver.view().gpus))


@call.system(call.UINT, call.POINTER)
def _by_index(driver: Driver, index: int, out: int | None) -> None:
    gpus = driver.view().gpus
    if index >= len(gpus):
        raise StatusError(abi.INVALID_ARGUMENT)
    _hand_out(driver, gpus[index], "nvmlDeviceGetHandleByIndex_v2", out)


@call.system(call.TEXT, call.POINTER)
def _by_uuid(driver: Driver, uuid: bytes | None, out: int | None) -> None:
    text = (uuid or b"").decode(errors="replace")
    for gpu in driver.view().gpus if text.startswith(_MIG) else ():
        for part in handles.mig_devices(gpu):
            if text in (part.compute.uuid, f"{_MIG}{gpu.uuid}/{part.instance.id}/{part.compute.id}"):
                driver.device(driver.view(), gpu.pci, "nvmlDeviceGetHandleByUUID")
                call.put(out, ctypes.c_void_p, library_mig.device_handle(driver, gpu, part))
                return
    _find(driver, uuid, "nvmlDeviceGetHandleByUUID", out, lambda gpu, text: gpu.uuid == text)


@call.system(call.TEXT, call.POINTER)
def _by_pci(driver: Driver, bus_id: bytes | None, out: int | None) -> None:
    def matches(gpu: state.Gpu, text: str) -> bool:
        try:
            return gpu.pci == address.parse(text)
        except ValueError:
            return False

    _find(driver, bus_id, "nvmlDeviceGetHandleByPciBusId_v2", out, matches)


@call.system(call.TEXT, call.POINTER)
def _by_serial(driver: Driver, serial: bytes | None, out: int | None) -> None:
    _find(driver, serial, "nvmlDeviceGetHandleBySerial", out, lambda gpu, text: gpu.serial == text)


def _find(
    driver: Driver, wanted: bytes | None, function: str, out: int | None, matches: Callable[[state.Gpu, str], bool]
) -> None:
    if wanted is None:
        raise StatusError(abi.INVALID_ARGUMENT)
    text = wanted.decode(errors="replace")
    for gpu in driver.view().gpus:
        if matches(gpu, text):
            _hand_out(driver, gpu, function, out)
            return
    raise StatusError(abi.NOT_FOUND)


def _hand_out(driver: Driver, gpu: state.Gpu, function: str, out: int | None) -> None:
    driver.device(driver.view(), gpu.pci, function)
    call.put(out, ctypes.c_void_p, driver.handle(gpu.pci))


@call.any_device(call.POINTER)
def _index(driver: Driver, gpu: state.Gpu, part: handles.MigPart | None, out: int | None) -> None:
    """Of a MIG device its index on the GPU."""
    if part is not None:
        call.put(out, ctypes.c_uint, handles.mig_devices(gpu).index(part))
        return
    call.put(out, ctypes.c_uint, [other.pci for other in driver.view().gpus].index(gpu.pci))


@call.any_device(call.POINTER, call.UINT)
def _uuid(_driver: Driver, gpu: state.Gpu, part: handles.MigPart | None, out: int | None, length: int) -> None:
    call.put_text(out, length, call.wanted(gpu.uuid if part is None else part.compute.uuid))


@call.any_device(call.POINTER, call.UINT)
def _name(_driver: Driver, gpu: state.Gpu, part: handles.MigPart | None, out: int | None, length: int) -> None:
    call.put_text(out, length, call.wanted(gpu.name if part is None else library_mig.device_name(gpu, part)))


@call.device(call.POINTER)
def _pci_info(_driver: Driver, gpu: state.Gpu, out: int | None) -> None:
    info = call.struct(out, abi.PciInfo)
    fill_pci_info(info, gpu.pci)
    info.pciDeviceId = gpu.pci_device_id
    info.pciSubSystemId = gpu.pci_subsystem_id


def fill_pci_info(info: abi.PciInfo, pci: address.PciAddress) -> None:
    """The address in NVML's two spellings: the old one has room for four digits of domain only."""
    info.domain, info.bus, info.device = pci.domain, pci.bus, pci.device
    info.busId = f"{pci.domain:08X}:{pci.bus:02X}:{pci.device:02X}.0".encode()
    info.busIdLegacy = f"{pci.domain & 0xFFFF:04X}:{pci.bus:02X}:{pci.device:02X}.0".encode()


@call.device(call.POINTER, call.POINTER)
def _compute_capability(_driver: Driver, gpu: state.Gpu, major: int | None, minor: int | None) -> None:
    value = call.wanted(gpu.compute_capability)
    call.put(major, ctypes.c_int, value[0])
    call.put(minor, ctypes.c_int, value[1])


@call.any_device(call.POINTER)
def _memory(_driver: Driver, gpu: state.Gpu, part: handles.MigPart | None, out: int | None) -> None:
    memory = call.wanted(gpu.memory if part is None else library_mig.device_memory(gpu, part))
    info = call.struct(out, abi.Memory)
    info.total, info.used = memory.total, memory.used + memory.reserved
    info.free = memory.total - info.used


@call.any_device(call.POINTER)
def _memory_v2(_driver: Driver, gpu: state.Gpu, part: handles.MigPart | None, out: int | None) -> None:
    memory = call.wanted(gpu.memory if part is None else library_mig.device_memory(gpu, part))
    info = call.versioned(out, abi.MemoryV2)
    assert isinstance(info, abi.MemoryV2)
    info.total, info.reserved, info.used = memory.total, memory.reserved, memory.used
    info.free = memory.total - memory.reserved - memory.used


@call.device(call.POINTER)
def _utilization(_driver: Driver, gpu: state.Gpu, out: int | None) -> None:
    """Not of a GPU in MIG mode (nvml.h)."""
    if gpu.mig is not None and gpu.mig.current:
        raise StatusError(abi.NOT_SUPPORTED)
    value = call.wanted(gpu.utilization)
    rates = call.struct(out, abi.Utilization)
    rates.gpu, rates.memory = value


@call.device(call.UINT, call.POINTER)
def _temperature(_driver: Driver, gpu: state.Gpu, sensor: int, out: int | None) -> None:
    if sensor != 0:
        raise StatusError(abi.INVALID_ARGUMENT)
    call.put(out, ctypes.c_uint, call.wanted(gpu.temperature_c))


@call.device(call.POINTER, call.POINTER)
def _ecc_mode(_driver: Driver, gpu: state.Gpu, current: int | None, pending: int | None) -> None:
    ecc = call.wanted(gpu.ecc)
    call.put(current, ctypes.c_uint, ecc.current)
    call.put(pending, ctypes.c_uint, ecc.pending)


@call.device(call.UINT, call.UINT, call.POINTER)
def _ecc_errors(_driver: Driver, gpu: state.Gpu, error: int, counter: int, out: int | None) -> None:
    ecc = call.wanted(gpu.ecc)
    counters = {
        (0, 0): ecc.volatile_corrected,
        (1, 0): ecc.volatile_uncorrected,
        (0, 1): ecc.aggregate_corrected,
        (1, 1): ecc.aggregate_uncorrected,
    }
    if (error, counter) not in counters:
        raise StatusError(abi.INVALID_ARGUMENT)
    call.put(out, ctypes.c_ulonglong, counters[error, counter])


@call.device(call.POINTER, call.POINTER, call.POINTER, call.POINTER)
def _remapped_rows(
    _driver: Driver,
    gpu: state.Gpu,
    corrected: int | None,
    uncorrected: int | None,
    pending: int | None,
    failed: int | None,
) -> None:
    """Not of a GPU with MIG instances (nvml.h)."""
    if gpu.mig is not None and gpu.mig.instances:
        raise StatusError(abi.NOT_SUPPORTED)
    rows = call.wanted(gpu.remapped_rows)
    call.put(corrected, ctypes.c_uint, rows.corrected)
    call.put(uncorrected, ctypes.c_uint, rows.uncorrected)
    call.put(pending, ctypes.c_uint, rows.pending)
    call.put(failed, ctypes.c_uint, rows.failed)


def _text(field: Callable[[state.Gpu], str | None]) -> call.Function:
    @call.device(call.POINTER, call.UINT)
    def read(_driver: Driver, gpu: state.Gpu, out: int | None, length: int) -> None:
        call.put_text(out, length, call.wanted(field(gpu)))

    return read


def _number(field: Callable[[state.Gpu], int | None], kind: type[Any] = ctypes.c_uint) -> call.Function:
    @call.device(call.POINTER)
    def read(_driver: Driver, gpu: state.Gpu, out: int | None) -> None:
        call.put(out, kind, call.wanted(field(gpu)))

    return read


def _pcie(field: str) -> call.Function:
    return _number(lambda gpu: None if gpu.pcie is None else int(getattr(gpu.pcie, field)))


FUNCTIONS = {
    "nvmlSystemGetDriverVersion": _driver_version,
    "nvmlSystemGetNVMLVersion": _nvml_version,
    "nvmlSystemGetCudaDriverVersion": _cuda_version,
    "nvmlSystemGetCudaDriverVersion_v2": _cuda_version,
    "nvmlDeviceGetCount_v2": _count,
    "nvmlDeviceGetHandleByIndex_v2": _by_index,
    "nvmlDeviceGetHandleByUUID": _by_uuid,
    "nvmlDeviceGetHandleByPciBusId_v2": _by_pci,
    "nvmlDeviceGetHandleBySerial": _by_serial,
    "nvmlDeviceGetIndex": _index,
    "nvmlDeviceGetPciInfo_v3": _pci_info,
    "nvmlDeviceGetCudaComputeCapability": _compute_capability,
    "nvmlDeviceGetMemoryInfo": _memory,
    "nvmlDeviceGetMemoryInfo_v2": _memory_v2,
    "nvmlDeviceGetUtilizationRates": _utilization,
    "nvmlDeviceGetTemperature": _temperature,
    "nvmlDeviceGetEccMode": _ecc_mode,
    "nvmlDeviceGetTotalEccErrors": _ecc_errors,
    "nvmlDeviceGetRemappedRows": _remapped_rows,
    "nvmlDeviceGetUUID": _uuid,
    "nvmlDeviceGetName": _name,
    "nvmlDeviceGetSerial": _text(operator.attrgetter("serial")),
    "nvmlDeviceGetVbiosVersion": _text(operator.attrgetter("vbios")),
    "nvmlDeviceGetMinorNumber": _number(operator.attrgetter("minor")),
    "nvmlDeviceGetBrand": _number(operator.attrgetter("brand")),
    "nvmlDeviceGetArchitecture": _number(operator.attrgetter("architecture")),
    "nvmlDeviceGetNumGpuCores": _number(operator.attrgetter("cores")),
    "nvmlDeviceGetPowerUsage": _number(operator.attrgetter("power_mw")),
    "nvmlDeviceGetEnforcedPowerLimit": _number(operator.attrgetter("power_limit_mw")),
    "nvmlDeviceGetPowerManagementLimit": _number(operator.attrgetter("power_limit_mw")),
    "nvmlDeviceGetCurrentClocksEventReasons": _number(operator.attrgetter("clocks_event_reasons"), ctypes.c_ulonglong),
    "nvmlDeviceGetCurrentClocksThrottleReasons": _number(
        operator.attrgetter("clocks_event_reasons"), ctypes.c_ulonglong
    ),
    "nvmlDeviceGetPersistenceMode": _number(operator.attrgetter("persistence_mode")),
    "nvmlDeviceGetModuleId": _number(operator.attrgetter("module_id")),
    "nvmlDeviceGetNumaNodeId": _number(operator.attrgetter("numa_node"), ctypes.c_int),
    "nvmlDeviceGetCurrPcieLinkGeneration": _pcie("generation"),
    "nvmlDeviceGetCurrPcieLinkWidth": _pcie("width"),
    "nvmlDeviceGetMaxPcieLinkGeneration": _pcie("max_generation"),
    "nvmlDeviceGetMaxPcieLinkWidth": _pcie("max_width"),
}
