# SPDX-License-Identifier: Apache-2.0
"""The binary interface of libnvidia-ml as far as the mock serves it: status codes and structs of nvml.h.

The mock stands on the C side and therefore has declarations of its own; a test holds them to the layout that pynvml
uses. A versioned struct carries `sizeof | version << 24` in its first field (NVML_STRUCT_VERSION).
"""

from __future__ import annotations

import ctypes

SUCCESS = 0
UNINITIALIZED = 1
INVALID_ARGUMENT = 2
NOT_SUPPORTED = 3
NO_PERMISSION = 4
NOT_FOUND = 6
INSUFFICIENT_SIZE = 7
DRIVER_NOT_LOADED = 9
TIMEOUT = 10
FUNCTION_NOT_FOUND = 13
GPU_IS_LOST = 15
RESET_REQUIRED = 16
IN_USE = 19
INSUFFICIENT_RESOURCES = 23
ARGUMENT_VERSION_MISMATCH = 25
GPU_NOT_FOUND = 28
UNKNOWN = 999

ERROR_STRINGS = {
    SUCCESS: b"Success",
    UNINITIALIZED: b"Uninitialized",
    INVALID_ARGUMENT: b"Invalid Argument",
    NOT_SUPPORTED: b"Not Supported",
    NO_PERMISSION: b"Insufficient Permissions",
    5: b"Already Initialized",
    NOT_FOUND: b"Not Found",
    INSUFFICIENT_SIZE: b"Insufficient Size",
    8: b"Insufficient External Power",
    DRIVER_NOT_LOADED: b"Driver Not Loaded",
    TIMEOUT: b"Timeout",
    11: b"Interrupt Request Issue",
    12: b"NVML Shared Library Not Found",
    FUNCTION_NOT_FOUND: b"Function Not Found",
    14: b"Corrupted infoROM",
    GPU_IS_LOST: b"GPU is lost",
    RESET_REQUIRED: b"GPU requires reset",
    17: b"The operating system has blocked the request.",
    18: b"RM has detected an NVML/RM version mismatch.",
    IN_USE: b"In use by another client",
    20: b"Insufficient Memory",
    21: b"No data",
    22: b"VGPU ECC not supported",
    INSUFFICIENT_RESOURCES: b"Insufficient Resources",
    24: b"Frequency not supported",
    ARGUMENT_VERSION_MISMATCH: b"Argument version mismatch",
    26: b"Deprecated",
    27: b"Not ready",
    GPU_NOT_FOUND: b"GPU not found",
    29: b"Invalid state",
    30: b"Reset type not supported",
    UNKNOWN: b"Unknown Error",
}

NVLINK_MAX_LINKS = 36
NVLINK_TYPE_GPU = 0
NVLINK_TYPE_SWITCH = 2
NVLINK_TYPE_UNKNOWN = 0xFF

TOPOLOGY_SINGLE = 10
TOPOLOGY_MULTIPLE = 20
TOPOLOGY_HOSTBRIDGE = 30
TOPOLOGY_NODE = 40
TOPOLOGY_SYSTEM = 50

P2P_OK = 0
P2P_CAPS = 5
"""Read, write, NVLink, atomics, PCI."""

FABRIC_COMPLETED = 3
FABRIC_STATES = {"not_supported": 0, "not_started": 1, "in_progress": 2, "completed": FABRIC_COMPLETED}

ARCHITECTURES = {
    "kepler": 2,
    "maxwell": 3,
    "pascal": 4,
    "volta": 5,
    "turing": 6,
    "ampere": 7,
    "ada": 8,
    "hopper": 9,
    "blackwell": 10,
    "rubin": 13,
}
"""nvmlDeviceArchitecture_t."""

BRANDS = {"quadro": 1, "tesla": 2, "geforce": 5, "titan": 6, "quadro-rtx": 12, "nvidia-rtx": 13, "nvidia": 14}
"""nvmlBrandType_t."""

NVLINK_VERSIONS = {"1.0": 1, "2.0": 2, "2.2": 3, "3.0": 5, "3.1": 5, "4.0": 7, "5.0": 7, "6.0": 8}
"""What nvmlDeviceGetNvLinkVersion answers. nvml.h numbers them 1 to 8 in this order (nvmlNvlinkVersion_t), but drivers have been
seen to pass on the kernel driver's own numbers (NV2080_CTRL_NVLINK_STATUS_NVLINK_VERSION_*), which are one higher from 2.2 on:
A100 and RTX 3090 say 5 (https://github.com/open-mpi/hwloc/issues/658, https://github.com/Syllo/nvtop/pull/469), H100 says 7
(examples of NVIDIA/TensorRT-LLM that measure bandwidth). What others say is not public: they are given nvml.h's number."""

GPU_INSTANCE_PROFILES = {
    "1_SLICE": 0,
    "2_SLICE": 1,
    "3_SLICE": 2,
    "4_SLICE": 3,
    "7_SLICE": 4,
    "8_SLICE": 5,
    "6_SLICE": 6,
    "1_SLICE_REV1": 7,
    "2_SLICE_REV1": 8,
    "1_SLICE_REV2": 9,
    "1_SLICE_GFX": 10,
    "2_SLICE_GFX": 11,
    "4_SLICE_GFX": 12,
    "1_SLICE_NO_ME": 13,
    "2_SLICE_NO_ME": 14,
    "1_SLICE_ALL_ME": 15,
    "2_SLICE_ALL_ME": 16,
    "3_SLICE_GFX": 17,
}
"""NVML_GPU_INSTANCE_PROFILE_*: REV1 is `+me`, 1_SLICE_REV2 has twice the memory of 1_SLICE."""

COMPUTE_INSTANCE_PROFILES = {1: 0, 2: 1, 3: 2, 4: 3, 7: 4, 8: 5, 6: 6}
"""Slices -> NVML_COMPUTE_INSTANCE_PROFILE_<slices>_SLICE."""
COMPUTE_INSTANCE_1_SLICE_REV1 = 7

FIELD_NVLINK_LINK_COUNT = 91
VALUE_TYPE_UNSIGNED_INT = 1

EVENT_SINGLE_BIT_ECC = 0x1
EVENT_DOUBLE_BIT_ECC = 0x2
EVENT_XID = 0x8
EVENTS = EVENT_SINGLE_BIT_ECC | EVENT_DOUBLE_BIT_ECC | EVENT_XID
NO_INSTANCE = 0xFFFFFFFF
"""GPU and compute instance of an event that concerns the whole GPU."""

CLOCKS_GPU_IDLE = 0x1
CLOCKS_SW_THERMAL_SLOWDOWN = 0x20
CLOCKS_HW_THERMAL_SLOWDOWN = 0x40


class PciInfo(ctypes.Structure):
    """nvmlPciInfo_t."""

    _fields_ = (
        ("busIdLegacy", ctypes.c_char * 16),
        ("domain", ctypes.c_uint),
        ("bus", ctypes.c_uint),
        ("device", ctypes.c_uint),
        ("pciDeviceId", ctypes.c_uint),
        ("pciSubSystemId", ctypes.c_uint),
        ("busId", ctypes.c_char * 32),
    )


class Memory(ctypes.Structure):
    """nvmlMemory_t."""

    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


class MemoryV2(ctypes.Structure):
    """nvmlMemory_v2_t."""

    _fields_ = (
        ("version", ctypes.c_uint),
        ("total", ctypes.c_ulonglong),
        ("reserved", ctypes.c_ulonglong),
        ("free", ctypes.c_ulonglong),
        ("used", ctypes.c_ulonglong),
    )


class Utilization(ctypes.Structure):
    """nvmlUtilization_t."""

    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


class C2cModeInfo(ctypes.Structure):
    """nvmlC2cModeInfo_v1_t, which carries no version."""

    _fields_ = (("isC2cEnabled", ctypes.c_uint),)


class FabricInfo(ctypes.Structure):
    """nvmlGpuFabricInfo_t."""

    _fields_ = (
        ("clusterUuid", ctypes.c_uint8 * 16),
        ("status", ctypes.c_uint),
        ("cliqueId", ctypes.c_uint32),
        ("state", ctypes.c_uint),
    )


class FabricInfoV2(ctypes.Structure):
    """nvmlGpuFabricInfo_v2_t."""

    _fields_ = (
        ("version", ctypes.c_uint),
        ("clusterUuid", ctypes.c_uint8 * 16),
        ("status", ctypes.c_uint),
        ("cliqueId", ctypes.c_uint32),
        ("state", ctypes.c_uint),
        ("healthMask", ctypes.c_uint32),
    )


class FabricInfoV3(ctypes.Structure):
    """nvmlGpuFabricInfo_v3_t."""

    _fields_ = (*FabricInfoV2._fields_, ("healthSummary", ctypes.c_uint8))


MEMORY_LIMIT_MAX = 0xFFFF_FFFF_FFFF_FFFF
"""NVML_DEVICE_MEMORY_LIMIT_MAX."""

COMPUTE_MODES = 4
"""NVML_COMPUTEMODE_COUNT."""


class SetMemoryLimits(ctypes.Structure):
    """nvmlSetMemoryLimits_v1_t; `nameSpace` points to a C string."""

    _fields_ = (
        ("nameSpace", ctypes.c_void_p),
        ("softLimit", ctypes.c_ulonglong),
        ("hardLimit", ctypes.c_ulonglong),
    )


class GetMemoryLimits(ctypes.Structure):
    """nvmlGetMemoryLimits_v1_t."""

    _fields_ = (*SetMemoryLimits._fields_, ("currentUsed", ctypes.c_ulonglong))


class FieldValue(ctypes.Structure):
    """nvmlFieldValue_t; `value` is the union nvmlValue_t."""

    _fields_ = (
        ("fieldId", ctypes.c_uint32),
        ("scopeId", ctypes.c_uint32),
        ("timestamp", ctypes.c_int64),
        ("latencyUsec", ctypes.c_int64),
        ("valueType", ctypes.c_uint),
        ("nvmlReturn", ctypes.c_uint),
        ("value", ctypes.c_ulonglong),
    )


class EventData(ctypes.Structure):
    """nvmlEventData_t."""

    _fields_ = (
        ("device", ctypes.c_void_p),
        ("eventType", ctypes.c_ulonglong),
        ("eventData", ctypes.c_ulonglong),
        ("gpuInstanceId", ctypes.c_uint),
        ("computeInstanceId", ctypes.c_uint),
    )


VERSIONS: dict[type[ctypes.Structure], int] = {MemoryV2: 2, FabricInfoV2: 2, FabricInfoV3: 3}


def version_of(struct: type[ctypes.Structure]) -> int:
    """NVML_STRUCT_VERSION of a versioned struct."""
    return ctypes.sizeof(struct) | VERSIONS[struct] << 24
