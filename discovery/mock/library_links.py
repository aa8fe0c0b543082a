# SPDX-License-Identifier: Apache-2.0
"""NVML functions about what a GPU is connected to: NVLink, fabric, pairs of GPUs, events. Table: C name -> Function."""

from __future__ import annotations

import ctypes

from discovery import address
from discovery.mock import abi, call, library_device, state
from discovery.mock.driver import Driver
from discovery.mock.status import StatusError


def _link(gpu: state.Gpu, number: int) -> state.NvLink:
    if not gpu.nvlinks:
        raise StatusError(abi.NOT_SUPPORTED)
    if number >= len(gpu.nvlinks):
        raise StatusError(abi.INVALID_ARGUMENT)
    return gpu.nvlinks[number]


def _active(gpu: state.Gpu, number: int) -> state.NvLink:
    link = _link(gpu, number)
    if not link.active:
        raise StatusError(abi.NOT_SUPPORTED)
    return link


@call.device(call.UINT, call.POINTER)
def _nvlink_state(_driver: Driver, gpu: state.Gpu, number: int, out: int | None) -> None:
    call.put(out, ctypes.c_uint, _link(gpu, number).active)


@call.device(call.UINT, call.POINTER)
def _nvlink_version(_driver: Driver, gpu: state.Gpu, number: int, out: int | None) -> None:
    call.put(out, ctypes.c_uint, call.wanted(_active(gpu, number).version))


@call.device(call.UINT, call.UINT, call.POINTER)
def _nvlink_capability(_driver: Driver, gpu: state.Gpu, number: int, capability: int, out: int | None) -> None:
    call.put(out, ctypes.c_uint, call.wanted(_link(gpu, number).capabilities) >> capability & 1)


@call.device(call.UINT, call.POINTER)
def _nvlink_remote_type(_driver: Driver, gpu: state.Gpu, number: int, out: int | None) -> None:
    call.put(out, ctypes.c_uint, call.wanted(_active(gpu, number).remote_type))


@call.device(call.UINT, call.POINTER)
def _nvlink_remote_pci(_driver: Driver, gpu: state.Gpu, number: int, out: int | None) -> None:
    bus_id = call.wanted(_active(gpu, number).remote_bus_id)
    info = call.struct(out, abi.PciInfo)
    if bus_id == state.NVLINK_REMOTE_HIDDEN:
        info.domain = info.bus = info.device = 0xFFFFFFFF
        info.busId = bus_id.encode()
    else:
        library_device.fill_pci_info(info, address.parse(bus_id))


@call.device(call.UINT, call.POINTER)
def _field_values(_driver: Driver, gpu: state.Gpu, count: int, out: int | None) -> None:
    for number in range(count):
        value = call.struct(out and out + number * ctypes.sizeof(abi.FieldValue), abi.FieldValue)
        value.nvmlReturn = abi.NOT_SUPPORTED
        if value.fieldId == abi.FIELD_NVLINK_LINK_COUNT and gpu.nvlinks:
            value.nvmlReturn, value.valueType, value.value = abi.SUCCESS, abi.VALUE_TYPE_UNSIGNED_INT, len(gpu.nvlinks)


@call.device(call.POINTER)
def _c2c(_driver: Driver, gpu: state.Gpu, out: int | None) -> None:
    call.struct(out, abi.C2cModeInfo).isC2cEnabled = call.wanted(gpu.c2c)


@call.device(call.POINTER)
def _fabric(_driver: Driver, gpu: state.Gpu, out: int | None) -> None:
    fabric = call.wanted(gpu.fabric)
    _fill_fabric(call.struct(out, abi.FabricInfo), fabric)


@call.device(call.POINTER)
def _fabric_versioned(_driver: Driver, gpu: state.Gpu, out: int | None) -> None:
    fabric = call.wanted(gpu.fabric)
    info = call.versioned(out, abi.FabricInfoV2, abi.FabricInfoV3)
    assert isinstance(info, abi.FabricInfoV2 | abi.FabricInfoV3)
    _fill_fabric(info, fabric)
    info.healthMask = fabric.health_mask
    if isinstance(info, abi.FabricInfoV3):
        info.healthSummary = 0


def _fill_fabric(info: abi.FabricInfo | abi.FabricInfoV2 | abi.FabricInfoV3, fabric: state.Fabric) -> None:
    info.clusterUuid[:] = bytes.fromhex((fabric.cluster_uuid or "0" * 32).replace("-", ""))
    info.status, info.cliqueId, info.state = fabric.status, fabric.clique_id, fabric.state


def _peer(driver: Driver, gpu: state.Gpu, other: int | None) -> state.Peer:
    pci = driver.address_of(other)
    if pci == gpu.pci:
        raise StatusError(abi.INVALID_ARGUMENT)
    return call.wanted(gpu.peers.get(pci))  # type: ignore[no-any-return]


@call.device(call.POINTER, call.POINTER)
def _common_ancestor(driver: Driver, gpu: state.Gpu, other: int | None, out: int | None) -> None:
    call.put(out, ctypes.c_uint, call.wanted(_peer(driver, gpu, other).ancestor))


@call.device(call.POINTER, call.UINT, call.POINTER)
def _p2p_status(driver: Driver, gpu: state.Gpu, other: int | None, index: int, out: int | None) -> None:
    statuses = _peer(driver, gpu, other).p2p
    if index >= abi.P2P_CAPS:
        raise StatusError(abi.INVALID_ARGUMENT)
    call.put(out, ctypes.c_uint, call.wanted(statuses[index] if index < len(statuses) else None))


@call.device(call.UINT, call.POINTER, call.POINTER)
def _nearest(driver: Driver, gpu: state.Gpu, level: int, count: int | None, out: int | None) -> None:
    near = [pci for pci, peer in gpu.peers.items() if peer.ancestor is not None and peer.ancestor <= level]
    room = ctypes.c_uint.from_address(count).value if count else 0
    call.put(count, ctypes.c_uint, len(near))
    if out is None:
        return
    if room < len(near):
        raise StatusError(abi.INSUFFICIENT_SIZE)
    for number, pci in enumerate(near):
        call.put(out + number * ctypes.sizeof(ctypes.c_void_p), ctypes.c_void_p, driver.handle(pci))


@call.device(call.POINTER)
def _supported_events(_driver: Driver, gpu: state.Gpu, out: int | None) -> None:
    call.put(out, ctypes.c_ulonglong, call.wanted(gpu.supported_events))


@call.device(call.ULONGLONG, call.POINTER)
def _register_events(driver: Driver, gpu: state.Gpu, events: int, event_set: int | None) -> None:
    registered = driver.event_set(event_set).registered
    if events & ~call.wanted(gpu.supported_events):
        raise StatusError(abi.NOT_SUPPORTED)
    registered[gpu.pci] = (registered.get(gpu.pci, (0, 0.0))[0] | events, driver.now())


@call.system(call.POINTER)
def _create_event_set(driver: Driver, out: int | None) -> None:
    call.put(out, ctypes.c_void_p, driver.create_event_set())


@call.system(call.POINTER)
def _free_event_set(driver: Driver, event_set: int | None) -> None:
    driver.free_event_set(event_set)


@call.system(call.POINTER, call.POINTER, call.UINT)
def _wait_event(driver: Driver, event_set: int | None, out: int | None, timeout_ms: int) -> None:
    events = driver.event_set(event_set)
    data = call.struct(out, abi.EventData)
    pci, kind, value = driver.wait_event(events, timeout_s=timeout_ms / 1000)
    data.device, data.eventType, data.eventData = driver.handle(pci), kind, value
    data.gpuInstanceId = data.computeInstanceId = abi.NO_INSTANCE


FUNCTIONS = {
    "nvmlDeviceGetNvLinkState": _nvlink_state,
    "nvmlDeviceGetNvLinkVersion": _nvlink_version,
    "nvmlDeviceGetNvLinkCapability": _nvlink_capability,
    "nvmlDeviceGetNvLinkRemoteDeviceType": _nvlink_remote_type,
    "nvmlDeviceGetNvLinkRemotePciInfo_v2": _nvlink_remote_pci,
    "nvmlDeviceGetFieldValues": _field_values,
    "nvmlDeviceGetC2cModeInfoV": _c2c,
    "nvmlDeviceGetGpuFabricInfo": _fabric,
    "nvmlDeviceGetGpuFabricInfoV": _fabric_versioned,
    "nvmlDeviceGetTopologyCommonAncestor": _common_ancestor,
    "nvmlDeviceGetTopologyNearestGpus": _nearest,
    "nvmlDeviceGetP2PStatus": _p2p_status,
    "nvmlDeviceGetSupportedEventTypes": _supported_events,
    "nvmlDeviceRegisterEvents": _register_events,
    "nvmlEventSetCreate": _create_event_set,
    "nvmlEventSetFree": _free_event_set,
    "nvmlEventSetWait_v2": _wait_event,
}
