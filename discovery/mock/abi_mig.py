# SPDX-License-Identifier: Apache-2.0
"""The binary interface of libnvidia-ml for Multi-Instance GPU, and for processes on a GPU: structs of nvml.h.

Of the profile structs pynvml has the first and the second version only; the third is laid out as NVIDIA documents it
(docs.nvidia.com/deploy/nvml-api: nvmlGpuInstanceProfileInfo_v3_t, nvmlComputeInstanceProfileInfo_v3_t).
"""

from __future__ import annotations

import ctypes

from discovery.mock import abi

GPU_INSTANCE_PROFILE_COUNT = 0x12
"""NVML_GPU_INSTANCE_PROFILE_COUNT."""

COMPUTE_INSTANCE_PROFILE_COUNT = 0x9
"""NVML_COMPUTE_INSTANCE_PROFILE_COUNT."""

ENGINE_PROFILE_SHARED = 0
"""NVML_COMPUTE_INSTANCE_ENGINE_PROFILE_SHARED, the only one: a compute instance shares the engines of its GPU instance."""

CAPABILITY_P2P = 0x1
"""NVML_GPU_INSTANCE_PROFILE_CAPS_P2P."""

CAPABILITY_GRAPHICS = 0x1
"""NVML_COMPUTE_INSTANCE_PROFILE_CAPS_GFX."""

_NAME = 96
"""NVML_DEVICE_NAME_V2_BUFFER_SIZE."""

_UINT = ctypes.c_uint
_ENGINES = tuple((f"{engine}Count", _UINT) for engine in ("copyEngine", "decoder", "encoder", "jpeg", "ofa"))
_SHARED = tuple(
    (f"shared{engine}Count", _UINT) for engine in ("CopyEngine", "Decoder", "Encoder", "Jpeg", "Ofa")
)  # fmt: skip
_NUMBERS = (("sliceCount", _UINT), ("instanceCount", _UINT), ("multiprocessorCount", _UINT))
_MEMORY = ("memorySizeMB", ctypes.c_ulonglong)


class Placement(ctypes.Structure):
    """nvmlGpuInstancePlacement_t, and nvmlComputeInstancePlacement_t."""

    _fields_ = (("start", _UINT), ("size", _UINT))


class GpuInstanceProfile(ctypes.Structure):
    """nvmlGpuInstanceProfileInfo_t."""

    _fields_ = (("id", _UINT), ("isP2pSupported", _UINT), *_NUMBERS, *_ENGINES, _MEMORY)


class GpuInstanceProfileV2(ctypes.Structure):
    """nvmlGpuInstanceProfileInfo_v2_t."""

    _fields_ = (("version", _UINT), *GpuInstanceProfile._fields_, ("name", ctypes.c_char * _NAME))


class GpuInstanceProfileV3(ctypes.Structure):
    """nvmlGpuInstanceProfileInfo_v3_t."""

    _fields_ = (
        ("version", _UINT),
        ("id", _UINT),
        *_NUMBERS,
        *_ENGINES,
        _MEMORY,
        ("name", ctypes.c_char * _NAME),
        ("capabilities", _UINT),
    )


class GpuInstance(ctypes.Structure):
    """nvmlGpuInstanceInfo_t."""

    _fields_ = (("device", ctypes.c_void_p), ("id", _UINT), ("profileId", _UINT), ("placement", Placement))


class ComputeInstanceProfile(ctypes.Structure):
    """nvmlComputeInstanceProfileInfo_t."""

    _fields_ = (("id", _UINT), *_NUMBERS, *_SHARED)


class ComputeInstanceProfileV2(ctypes.Structure):
    """nvmlComputeInstanceProfileInfo_v2_t."""

    _fields_ = (("version", _UINT), *ComputeInstanceProfile._fields_, ("name", ctypes.c_char * _NAME))


class ComputeInstanceProfileV3(ctypes.Structure):
    """nvmlComputeInstanceProfileInfo_v3_t."""

    _fields_ = (*ComputeInstanceProfileV2._fields_, ("capabilities", _UINT))


class ComputeInstance(ctypes.Structure):
    """nvmlComputeInstanceInfo_t."""

    _fields_ = (
        ("device", ctypes.c_void_p),
        ("gpuInstance", ctypes.c_void_p),
        ("id", _UINT),
        ("profileId", _UINT),
        ("placement", Placement),
    )


class Attributes(ctypes.Structure):
    """nvmlDeviceAttributes_t."""

    _fields_ = (
        ("multiprocessorCount", _UINT),
        *_SHARED,
        ("gpuInstanceSliceCount", _UINT),
        ("computeInstanceSliceCount", _UINT),
        _MEMORY,
    )


class Process(ctypes.Structure):
    """nvmlProcessInfo_t, as of nvmlDeviceGetComputeRunningProcesses_v3."""

    _fields_ = (
        ("pid", _UINT),
        ("usedGpuMemory", ctypes.c_ulonglong),
        ("gpuInstanceId", _UINT),
        ("computeInstanceId", _UINT),
    )


abi.VERSIONS.update(
    {
        GpuInstanceProfileV2: 2,
        GpuInstanceProfileV3: 3,
        ComputeInstanceProfileV2: 2,
        ComputeInstanceProfileV3: 3,
    }
)
