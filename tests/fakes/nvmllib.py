# SPDX-License-Identifier: Apache-2.0
"""An object with some C functions of libnvidia-ml, written as Python functions, for answers that no driver should give.

pynvml calls them with the ctypes arguments it would give to C: `byref(x)._obj` is x. What is not defined is missing.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

SUCCESS = 0
INVALID_ARGUMENT = 2
NOT_SUPPORTED = 3
NOT_FOUND = 6
DRIVER_NOT_LOADED = 9
GPU_IS_LOST = 15
LIB_RM_VERSION_MISMATCH = 18
ARGUMENT_VERSION_MISMATCH = 25
UNKNOWN = 999


@dataclass(kw_only=True)
class FakeLink:
    """An NVLink: state, far end as NVML spells it, kind of far end (nvmlIntNvLinkDeviceType_t), version enum."""

    active: int = 1
    remote: bytes = b"FFFFFFFF:FFFF:FF"
    remote_domain: int = 0xFFFFFFFF
    kind: int = 2
    version: int = 6


@dataclass(kw_only=True)
class FakeGpu:
    """What one GPU answers. `errors`: status by function name, given instead of an answer."""

    bus_id: str
    uuid: bytes = b"GPU-00000000-0000-0000-0000-000000000001"
    name: bytes = b"NVIDIA H100 80GB HBM3"
    minor: int = 0
    memory: int = 80 << 30
    cores: int = 16896
    capability: tuple[int, int] = (9, 0)
    architecture: int = 9
    persistence: int = 1
    mig: tuple[int, int] = (0, 0)
    links: tuple[FakeLink, ...] = ()
    fabric: Mapping[str, Any] | None = None
    fabric_version: int = 3
    c2c: int | None = None
    errors: Mapping[str, int] = field(default_factory=dict)


class FakeLibrary:
    """libnvidia-ml with the given GPUs. `missing`: functions that this driver has not. Counts its sessions."""

    def __init__(self, *gpus: FakeGpu, missing: tuple[str, ...] = (), init: int = SUCCESS) -> None:
        self.gpus = gpus
        self.missing = missing
        self.init = init
        self.sessions = 0
        self.opened = 0

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("nvml") or name in self.missing:
            raise AttributeError(name)
        system = getattr(type(self), f"_{name}", None)
        if system is not None:
            return functools.partial(system, self)
        answer = _OF_A_GPU.get(name)
        if answer is None:
            raise AttributeError(name)

        def call(handle: Any, *arguments: Any) -> int:
            gpu = self.gpus[ctypes.cast(handle, ctypes.c_void_p).value - 1]  # type: ignore[operator]
            status: int = gpu.errors.get(name) or answer(gpu, *arguments)
            return status

        return call

    def _nvmlInitWithFlags(self, _flags: int) -> int:  # noqa: N802 - the names of libnvidia-ml
        if self.init == SUCCESS:
            self.sessions += 1
            self.opened += 1
        return self.init

    def _nvmlShutdown(self) -> int:  # noqa: N802
        self.sessions -= 1
        return SUCCESS

    def _nvmlErrorString(self, status: int) -> bytes:  # noqa: N802
        return f"error {status}".encode()

    def _nvmlSystemGetDriverVersion(self, text: Any, _length: Any) -> int:  # noqa: N802
        text.value = b"580.65.06"
        return SUCCESS

    def _nvmlSystemGetNVMLVersion(self, text: Any, _length: Any) -> int:  # noqa: N802
        text.value = b"13.580.65.06"
        return SUCCESS

    def _nvmlSystemGetCudaDriverVersion_v2(self, version: Any) -> int:  # noqa: N802
        version._obj.value = 13010
        return SUCCESS

    def _nvmlDeviceGetCount_v2(self, count: Any) -> int:  # noqa: N802
        count._obj.value = len(self.gpus)
        return SUCCESS

    def _nvmlDeviceGetHandleByIndex_v2(self, index: Any, handle: Any) -> int:  # noqa: N802
        status = self.gpus[int(index.value)].errors.get("nvmlDeviceGetHandleByIndex_v2", SUCCESS)
        _set_handle(handle, index.value)
        return status

    def _nvmlDeviceGetHandleByPciBusId_v2(self, bus_id: Any, handle: Any) -> int:  # noqa: N802
        for index, gpu in enumerate(self.gpus):
            if gpu.bus_id.encode() == bus_id.value:
                _set_handle(handle, index)
                return gpu.errors.get("nvmlDeviceGetHandleByPciBusId_v2", SUCCESS)
        return NOT_FOUND


def _set_handle(handle: Any, index: int) -> None:
    ctypes.memmove(handle, ctypes.byref(ctypes.c_void_p(index + 1)), ctypes.sizeof(ctypes.c_void_p))


def _pci_info(info: Any, bus_id: bytes, domain: int) -> int:
    ctypes.memset(ctypes.addressof(info._obj), 0, ctypes.sizeof(info._obj))
    info._obj.domain = domain
    ctypes.memmove(ctypes.addressof(info._obj) + type(info._obj).busId.offset, bus_id, len(bus_id))
    return SUCCESS


def _text(get: Callable[[FakeGpu], bytes]) -> Callable[..., int]:
    def answer(gpu: FakeGpu, text: Any, _length: Any) -> int:
        text.value = get(gpu)
        return SUCCESS

    return answer


def _number(get: Callable[[FakeGpu], int]) -> Callable[..., int]:
    def answer(gpu: FakeGpu, value: Any) -> int:
        value._obj.value = get(gpu)
        return SUCCESS

    return answer


def _two(get: Callable[[FakeGpu], tuple[int, int]]) -> Callable[..., int]:
    def answer(gpu: FakeGpu, one: Any, other: Any) -> int:
        one._obj.value, other._obj.value = get(gpu)
        return SUCCESS

    return answer


def _memory(gpu: FakeGpu, info: Any) -> int:
    info._obj.total, info._obj.used, info._obj.free = gpu.memory, gpu.memory // 4, gpu.memory - gpu.memory // 4
    return SUCCESS


def _utilization(_gpu: FakeGpu, rates: Any) -> int:
    rates._obj.gpu, rates._obj.memory = 40, 10
    return SUCCESS


def _of_link(get: Callable[[FakeLink], int]) -> Callable[..., int]:
    def answer(gpu: FakeGpu, link: int, value: Any) -> int:
        if link >= len(gpu.links):
            return INVALID_ARGUMENT
        value._obj.value = get(gpu.links[link])
        return SUCCESS

    return answer


def _remote(gpu: FakeGpu, link: int, info: Any) -> int:
    if not gpu.links[link].active:
        return UNKNOWN
    return _pci_info(info, gpu.links[link].remote, gpu.links[link].remote_domain)


def _c2c(gpu: FakeGpu, info: Any) -> int:
    if gpu.c2c is None:
        return NOT_SUPPORTED
    info._obj.isC2cEnabled = gpu.c2c
    return SUCCESS


def _fabric(gpu: FakeGpu, info: Any) -> int:
    if gpu.fabric is None:
        return NOT_SUPPORTED
    if info._obj.version >> 24 > gpu.fabric_version:
        return ARGUMENT_VERSION_MISMATCH
    for name, value in gpu.fabric.items():
        if name == "clusterUuid":
            ctypes.memmove(info._obj.clusterUuid, value, 16)
        else:
            setattr(info._obj, name, value)
    return SUCCESS


_OF_A_GPU: Mapping[str, Callable[..., int]] = {
    "nvmlDeviceGetPciInfo_v3": lambda gpu, info: _pci_info(info, gpu.bus_id.encode(), int(gpu.bus_id[:8], 16)),
    "nvmlDeviceGetUUID": _text(lambda gpu: gpu.uuid),
    "nvmlDeviceGetName": _text(lambda gpu: gpu.name),
    "nvmlDeviceGetMinorNumber": _number(lambda gpu: gpu.minor),
    "nvmlDeviceGetArchitecture": _number(lambda gpu: gpu.architecture),
    "nvmlDeviceGetNumGpuCores": _number(lambda gpu: gpu.cores),
    "nvmlDeviceGetPersistenceMode": _number(lambda gpu: gpu.persistence),
    "nvmlDeviceGetCurrPcieLinkWidth": _number(lambda _gpu: 16),
    "nvmlDeviceGetCudaComputeCapability": _two(lambda gpu: gpu.capability),
    "nvmlDeviceGetMigMode": _two(lambda gpu: gpu.mig),
    "nvmlDeviceGetMemoryInfo": _memory,
    "nvmlDeviceGetMemoryInfo_v2": _memory,
    "nvmlDeviceGetUtilizationRates": _utilization,
    "nvmlDeviceGetNvLinkState": _of_link(lambda link: link.active),
    "nvmlDeviceGetNvLinkVersion": _of_link(lambda link: link.version),
    "nvmlDeviceGetNvLinkRemoteDeviceType": _of_link(lambda link: link.kind),
    "nvmlDeviceGetNvLinkRemotePciInfo_v2": _remote,
    "nvmlDeviceGetGpuFabricInfoV": _fabric,
    "nvmlDeviceGetC2cModeInfoV": _c2c,
}
