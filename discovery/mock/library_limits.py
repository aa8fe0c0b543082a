# SPDX-License-Identifier: Apache-2.0
"""NVML functions that keep programs on a GPU apart: compute mode, memory limits of cgroups. Table: C name -> Function."""

from __future__ import annotations

import ctypes
import dataclasses

from discovery.mock import abi, call, memorylimits, state
from discovery.mock.driver import Driver
from discovery.mock.status import StatusError


@call.device(call.POINTER)
def _compute_mode(_driver: Driver, gpu: state.Gpu, out: int | None) -> None:
    call.put(out, ctypes.c_uint, call.wanted(gpu.compute_mode))


@call.device(call.UINT, root=True)
def _set_compute_mode(driver: Driver, gpu: state.Gpu, mode: int) -> None:
    """Programs that run already stay; a GPU that is divided has none but the default."""
    call.wanted(gpu.compute_mode)
    if mode >= abi.COMPUTE_MODES:
        raise StatusError(abi.INVALID_ARGUMENT)

    def rule(now: state.Gpu) -> tuple[state.Gpu, None]:
        if mode and now.mig is not None and now.mig.current:
            raise StatusError(abi.NOT_SUPPORTED)
        return (now if now.compute_mode == mode else dataclasses.replace(now, compute_mode=mode)), None

    driver.hand.change(gpu.pci, rule)


@call.device(call.POINTER)
def _memory_limits(driver: Driver, gpu: state.Gpu, out: int | None) -> None:
    asked = call.struct(out, abi.GetMemoryLimits)
    path = _path(asked.nameSpace)
    told = memorylimits.told(driver.hand, _accounting(driver, gpu), gpu, path)
    asked.softLimit = told.soft
    asked.hardLimit = abi.MEMORY_LIMIT_MAX if told.hard is None else told.hard
    asked.currentUsed = told.used


@call.device(call.POINTER, root=True)
def _set_memory_limits(driver: Driver, gpu: state.Gpu, out: int | None) -> None:
    asked = call.struct(out, abi.SetMemoryLimits)
    path, soft = _path(asked.nameSpace), asked.softLimit
    hard = None if asked.hardLimit == abi.MEMORY_LIMIT_MAX else asked.hardLimit
    if soft == abi.MEMORY_LIMIT_MAX:
        soft = call.wanted(gpu.memory).total if hard is None else hard
    if hard is not None and soft > hard:
        raise StatusError(abi.INVALID_ARGUMENT)
    memorylimits.limit(driver.hand, _accounting(driver, gpu), gpu.pci, path, soft=soft, hard=hard)


def _accounting(driver: Driver, gpu: state.Gpu) -> str:
    """Who counts. Not on a GPU that is divided, and nobody does without cgroup v2."""
    system = driver.view().system
    if system is None or system.memory_accounting is None or (gpu.mig is not None and gpu.mig.current):
        raise StatusError(abi.NOT_SUPPORTED)
    return system.memory_accounting


def _path(pointer: int | None) -> str:
    text = ctypes.string_at(pointer) if pointer else b""
    try:
        path = text.decode()
    except UnicodeDecodeError as err:
        raise StatusError(abi.INVALID_ARGUMENT) from err
    if not path.startswith("/"):
        raise StatusError(abi.INVALID_ARGUMENT)
    return path


FUNCTIONS = {
    "nvmlDeviceGetComputeMode": _compute_mode,
    "nvmlDeviceSetComputeMode": _set_compute_mode,
    "nvmlDeviceGetMemoryLimits_v1": _memory_limits,
    "nvmlDeviceSetMemoryLimits_v1": _set_memory_limits,
}
