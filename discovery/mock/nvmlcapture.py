# SPDX-License-Identifier: Apache-2.0
"""Reading the state behind NVML from a library: the C functions, asked as a C program would.

What a function does not support is left out, what it fails with is kept as an error of that function, and functions that
the library has not are listed, so that a replay answers as the library did.
"""

from __future__ import annotations

import ctypes
import dataclasses
import os
from collections.abc import Iterable
from typing import Any

from discovery import address
from discovery.address import PciAddress
from discovery.mock import abi, dmem, library, nvmlcapturemig, nvmlclient, state
from discovery.mock.nvmlclient import Client

_NO_GPUS = 1
_BY_INDEX = "nvmlDeviceGetHandleByIndex_v2"
_BY_PCI = "nvmlDeviceGetHandleByPciBusId_v2"

_TEXTS = {
    "uuid": "nvmlDeviceGetUUID",
    "name": "nvmlDeviceGetName",
    "serial": "nvmlDeviceGetSerial",
    "vbios": "nvmlDeviceGetVbiosVersion",
}
_NUMBERS: dict[str, tuple[str, type[Any]]] = {
    "minor": ("nvmlDeviceGetMinorNumber", ctypes.c_uint),
    "brand": ("nvmlDeviceGetBrand", ctypes.c_uint),
    "architecture": ("nvmlDeviceGetArchitecture", ctypes.c_uint),
    "cores": ("nvmlDeviceGetNumGpuCores", ctypes.c_uint),
    "power_mw": ("nvmlDeviceGetPowerUsage", ctypes.c_uint),
    "power_limit_mw": ("nvmlDeviceGetEnforcedPowerLimit", ctypes.c_uint),
    "clocks_event_reasons": ("nvmlDeviceGetCurrentClocksEventReasons", ctypes.c_ulonglong),
    "numa_node": ("nvmlDeviceGetNumaNodeId", ctypes.c_int),
    "compute_mode": ("nvmlDeviceGetComputeMode", ctypes.c_uint),
    "module_id": ("nvmlDeviceGetModuleId", ctypes.c_uint),
    "supported_events": ("nvmlDeviceGetSupportedEventTypes", ctypes.c_ulonglong),
}


def read(
    given: object, gpus: Iterable[PciAddress], *, cgroup: str = "/sys/fs/cgroup", by_kernel: bool = False
) -> state.Nvml | None:
    """The state behind a library; None where no driver is loaded. `gpus`: GPUs on the bus, of which NVML may have lost some.
    `cgroup`: one to ask about; `by_kernel`: whether the kernel counts the GPU memory of cgroups.
    """
    client = Client(given)
    status = client.call("nvmlInitWithFlags", ctypes.c_uint(_NO_GPUS))
    if status == abi.DRIVER_NOT_LOADED:
        return None
    if status != abi.SUCCESS:
        return state.Nvml(system=state.System(errors={"nvmlInitWithFlags": status}))
    try:
        nvml = _read(client, gpus)
        accounting = dmem.CONTROLLER if by_kernel else "misc"
        limits = any(_limits_memory(client, gpu.pci, cgroup) for gpu in nvml.gpus)
        return nvml if not limits else _counted_by(nvml, accounting)
    finally:
        client.call("nvmlShutdown")


def _read(client: Client, on_the_bus: Iterable[PciAddress]) -> state.Nvml:
    driver_version = client.text("nvmlSystemGetDriverVersion")
    nvml_version = client.text("nvmlSystemGetNVMLVersion")
    cuda = client.number("nvmlSystemGetCudaDriverVersion_v2", ctypes.c_int)
    count = client.number("nvmlDeviceGetCount_v2", ctypes.c_uint) or 0
    system_errors = client.taken_errors()
    handles: dict[PciAddress, ctypes.c_void_p] = {}
    refused: list[int] = []
    for index in range(count):
        pci, handle = _by_index(client, index)
        refused += client.taken_errors().values()
        if pci is not None:
            handles[pci] = handle
    gpus = {pci: _gpu(client, pci, handle, handles) for pci, handle in handles.items()}
    for pci in sorted(set(on_the_bus) - handles.keys()):
        gpu = _unlisted(client, pci, handles)
        if gpu is not None:  # NVML has it, but did not give it by index: in order of address, as NVML counts
            by_index = {_BY_INDEX: refused.pop(0)} if refused else {}
            gpus[pci] = dataclasses.replace(gpu, errors={**gpu.errors, **by_index})
    return state.Nvml(
        system=state.System(
            driver_version=driver_version,
            nvml_version=nvml_version,
            cuda_version=cuda,
            missing_functions=tuple(sorted(client.missing_of(library.FUNCTIONS))),
            errors=system_errors,
        ),
        gpus=tuple(gpu for _pci, gpu in sorted(gpus.items())),
    )


def _limits_memory(client: Client, pci: PciAddress, cgroup: str) -> bool:
    """Whether the memory of cgroups is limited on a GPU; which of them have limits is nobody's business."""
    handle = ctypes.c_void_p()
    name = ctypes.create_string_buffer(os.fsencode(cgroup))
    asked = abi.GetMemoryLimits(nameSpace=ctypes.addressof(name))
    if client.call(_BY_PCI, ctypes.c_char_p(str(pci).encode()), ctypes.byref(handle)) != abi.SUCCESS:
        return False
    return client.call("nvmlDeviceGetMemoryLimits_v1", handle, ctypes.byref(asked)) in (abi.SUCCESS, abi.NOT_FOUND)


def _counted_by(nvml: state.Nvml, accounting: str) -> state.Nvml:
    return dataclasses.replace(nvml, system=dataclasses.replace(nvml.system, memory_accounting=accounting))


def _by_index(client: Client, index: int) -> tuple[PciAddress | None, ctypes.c_void_p]:
    handle = ctypes.c_void_p()
    info = abi.PciInfo()
    if client.ask(_BY_INDEX, ctypes.c_uint(index), ctypes.byref(handle)) and client.ask(
        "nvmlDeviceGetPciInfo_v3", handle, ctypes.byref(info)
    ):
        return PciAddress(info.domain, info.bus, info.device, 0), handle
    return None, handle


def _unlisted(client: Client, pci: PciAddress, handles: dict[PciAddress, ctypes.c_void_p]) -> state.Gpu | None:
    """A GPU that NVML did not give by its index; None where NVML does not have it at all."""
    handle = ctypes.c_void_p()
    client.ask(_BY_PCI, ctypes.c_char_p(str(pci).encode()), ctypes.byref(handle))
    errors = client.taken_errors()
    if not errors:
        return _gpu(client, pci, handle, handles)
    return None if errors[_BY_PCI] == abi.NOT_FOUND else state.Gpu(pci=pci, pci_device_id=0, errors=errors)


def _gpu(
    client: Client, pci: PciAddress, handle: ctypes.c_void_p, handles: dict[PciAddress, ctypes.c_void_p]
) -> state.Gpu:
    info = abi.PciInfo()
    client.ask("nvmlDeviceGetPciInfo_v3", handle, ctypes.byref(info))
    texts: dict[str, Any] = {field: client.text(name, handle) for field, name in _TEXTS.items()}
    numbers: dict[str, Any] = {field: client.number(name, kind, handle) for field, (name, kind) in _NUMBERS.items()}
    persistence = client.number("nvmlDeviceGetPersistenceMode", ctypes.c_uint, handle)
    facts: dict[str, Any] = {
        **texts,
        **numbers,
        "c2c": _c2c(client, handle),
        "persistence_mode": None if persistence is None else bool(persistence),
        "compute_capability": _pair(client, "nvmlDeviceGetCudaComputeCapability", handle),
        "memory": _memory(client, handle),
        "mig": nvmlcapturemig.read(client, handle),
        "nvlinks": _nvlinks(client, handle),
        "fabric": _fabric(client, handle),
        "utilization": _utilization(client, handle),
        "temperature_c": client.number("nvmlDeviceGetTemperature", ctypes.c_uint, handle, ctypes.c_uint(0)),
        "ecc": _ecc(client, handle),
        "remapped_rows": _remapped_rows(client, handle),
        "pcie": _pcie(client, handle),
    }
    errors = client.taken_errors()
    peers = {other: _peer(client, handle, far) for other, far in handles.items() if other != pci}
    client.taken_errors()
    return state.Gpu(
        pci=pci,
        pci_device_id=info.pciDeviceId,
        pci_subsystem_id=info.pciSubSystemId,
        peers={other: peer for other, peer in peers.items() if peer != state.Peer()},
        errors=errors,
        **facts,
    )


def _pair(client: Client, name: str, handle: ctypes.c_void_p) -> tuple[int, int] | None:
    first, second = ctypes.c_int(), ctypes.c_int()
    return (first.value, second.value) if client.ask(name, handle, ctypes.byref(first), ctypes.byref(second)) else None


def _memory(client: Client, handle: ctypes.c_void_p) -> state.Memory | None:
    second = abi.MemoryV2(version=abi.version_of(abi.MemoryV2))
    if client.ask("nvmlDeviceGetMemoryInfo_v2", handle, ctypes.byref(second)):
        return state.Memory(total=second.total, reserved=second.reserved, used=second.used)
    first = abi.Memory()
    if client.ask("nvmlDeviceGetMemoryInfo", handle, ctypes.byref(first)):
        return state.Memory(total=first.total, used=first.used)
    return None


def _nvlinks(client: Client, handle: ctypes.c_void_p) -> tuple[state.NvLink, ...]:
    """The links up to the last that NVML knows; what it says of an inactive one depends on the driver."""
    links: list[state.NvLink] = []
    for number in range(abi.NVLINK_MAX_LINKS):
        link = ctypes.c_uint(number)
        active = ctypes.c_uint()
        status = client.call("nvmlDeviceGetNvLinkState", handle, link, ctypes.byref(active))
        if status != abi.SUCCESS:
            if status not in (*nvmlclient.ABSENT, abi.INVALID_ARGUMENT):
                client.errors["nvmlDeviceGetNvLinkState"] = status
            break
        links.append(_nvlink(client, handle, link, active=bool(active.value)))
    return tuple(links)


def _nvlink(client: Client, handle: ctypes.c_void_p, link: ctypes.c_uint, *, active: bool) -> state.NvLink:
    capabilities = [ctypes.c_uint() for _ in range(6)]
    known = [
        client.call("nvmlDeviceGetNvLinkCapability", handle, link, ctypes.c_uint(number), ctypes.byref(out))
        == abi.SUCCESS
        for number, out in enumerate(capabilities)
    ]
    bits = sum(bool(out.value) << number for number, out in enumerate(capabilities)) if any(known) else None
    if not active:
        return state.NvLink(active=False, capabilities=bits)
    remote = abi.PciInfo()
    told = client.ask("nvmlDeviceGetNvLinkRemotePciInfo_v2", handle, link, ctypes.byref(remote))
    return state.NvLink(
        active=True,
        version=client.number("nvmlDeviceGetNvLinkVersion", ctypes.c_uint, handle, link),
        remote_type=client.number("nvmlDeviceGetNvLinkRemoteDeviceType", ctypes.c_uint, handle, link),
        remote_bus_id=_bus_id(remote) if told else None,
        capabilities=bits,
    )


def _bus_id(info: abi.PciInfo) -> str:
    try:
        address.parse(info.busId.decode(errors="replace"))
    except ValueError:
        return state.NVLINK_REMOTE_HIDDEN
    return str(info.busId.decode())


def _fabric(client: Client, handle: ctypes.c_void_p) -> state.Fabric | None:
    info = abi.FabricInfoV2(version=abi.version_of(abi.FabricInfoV2))
    if not client.ask("nvmlDeviceGetGpuFabricInfoV", handle, ctypes.byref(info)):
        return None
    digits = bytes(info.clusterUuid).hex()
    uuid = "-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]))
    return state.Fabric(
        state=info.state, status=info.status, cluster_uuid=uuid, clique_id=info.cliqueId, health_mask=info.healthMask
    )


def _c2c(client: Client, handle: ctypes.c_void_p) -> bool | None:
    info = abi.C2cModeInfo()
    done = client.ask("nvmlDeviceGetC2cModeInfoV", handle, ctypes.byref(info))
    return bool(info.isC2cEnabled) if done else None


def _utilization(client: Client, handle: ctypes.c_void_p) -> tuple[int, int] | None:
    rates = abi.Utilization()
    done = client.ask("nvmlDeviceGetUtilizationRates", handle, ctypes.byref(rates))
    return (rates.gpu, rates.memory) if done else None


def _ecc(client: Client, handle: ctypes.c_void_p) -> state.Ecc | None:
    mode = _pair(client, "nvmlDeviceGetEccMode", handle)
    if mode is None:
        return None

    def count(error: int, counter: int) -> int:
        kind = ctypes.c_ulonglong
        arguments = (handle, ctypes.c_uint(error), ctypes.c_uint(counter))
        return client.number("nvmlDeviceGetTotalEccErrors", kind, *arguments) or 0

    return state.Ecc(
        current=bool(mode[0]),
        pending=bool(mode[1]),
        volatile_corrected=count(0, 0),
        volatile_uncorrected=count(1, 0),
        aggregate_corrected=count(0, 1),
        aggregate_uncorrected=count(1, 1),
    )


def _remapped_rows(client: Client, handle: ctypes.c_void_p) -> state.RemappedRows | None:
    out = [ctypes.c_uint() for _ in range(4)]
    if not client.ask("nvmlDeviceGetRemappedRows", handle, *map(ctypes.byref, out)):
        return None
    corrected, uncorrected, pending, failed = (each.value for each in out)
    return state.RemappedRows(corrected=corrected, uncorrected=uncorrected, pending=bool(pending), failed=bool(failed))


def _pcie(client: Client, handle: ctypes.c_void_p) -> state.Pcie | None:
    names = ("CurrPcieLinkGeneration", "CurrPcieLinkWidth", "MaxPcieLinkGeneration", "MaxPcieLinkWidth")
    values = [client.number(f"nvmlDeviceGet{name}", ctypes.c_uint, handle) for name in names]
    generation, width, max_generation, max_width = values
    if generation is None or width is None or max_generation is None or max_width is None:
        return None
    return state.Pcie(generation=generation, width=width, max_generation=max_generation, max_width=max_width)


def _peer(client: Client, handle: ctypes.c_void_p, far: ctypes.c_void_p) -> state.Peer:
    statuses: list[int] = []
    for index in range(abi.P2P_CAPS):
        status = client.number("nvmlDeviceGetP2PStatus", ctypes.c_uint, handle, far, ctypes.c_uint(index))
        if status is None:
            break
        statuses.append(status)
    return state.Peer(
        ancestor=client.number("nvmlDeviceGetTopologyCommonAncestor", ctypes.c_uint, handle, far), p2p=tuple(statuses)
    )
