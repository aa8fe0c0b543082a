# SPDX-License-Identifier: Apache-2.0
"""What keeps programs on a GPU apart, through NVML: the memory limits of cgroups (NVIDIA, "MPS v3 Memory Partitioning") and the
compute mode, of one GPU in one session. nvml.py makes these and passes `pynvml` in, as it does for nvmlmig.py.
"""

from __future__ import annotations

import os
from typing import Any

from discovery import errors, limits, nvmllibrary, nvmlnumbers

_SET, _GET = "nvmlDeviceSetMemoryLimits_v1", "nvmlDeviceGetMemoryLimits_v1"
_ABSENT = frozenset({"not-supported", "function-not-found"})
_GONE = "not-found"


class GpuLimits:
    """Limits of the GPU of a handle. Every method raises SourceError. `library`: the one that `pynvml` calls."""

    def __init__(self, pynvml: Any, handle: Any, library: Any) -> None:
        self._pynvml = pynvml
        self._handle = handle
        self._library = library

    def has_memory_limits(self, cgroup: str) -> bool:
        """Whether the driver limits the memory of cgroups on this GPU. `cgroup`: one to ask about; that this one is not limited,
        or cannot be, is no no.
        """
        if not hasattr(self._library, _SET):
            return False
        try:
            self._asked(cgroup)
        except errors.SourceError as err:
            if err.kind in _ABSENT or err.kind == "invalid-argument":  # as of a folder that is no cgroup of version 2
                return False
            if err.kind != _GONE:
                raise
        return True

    def limit_memory(self, cgroup: str, limit: limits.MemoryLimit) -> None:
        """Set the limit of a cgroup, named by its full path. `not-found` where it is not there, or cannot have one."""
        most = self._pynvml.NVML_DEVICE_MEMORY_LIMIT_MAX
        asked = self._pynvml.c_nvmlSetMemoryLimits_v1_t()
        asked.nameSpace = os.fsencode(cgroup)
        asked.softLimit = limit.soft
        asked.hardLimit = most if limit.hard is None else limit.hard
        nvmllibrary.ask(self._pynvml, _SET, self._handle, asked)

    def memory_use(self, cgroup: str) -> limits.MemoryUse | None:
        """The limit of a cgroup and what it uses; None where it is not there, or cannot have a limit. One of all that the GPU has is
        none.
        """
        try:
            told = self._asked(cgroup)
        except errors.SourceError as err:
            if err.kind == _GONE:
                return None
            raise
        most = self._pynvml.NVML_DEVICE_MEMORY_LIMIT_MAX
        hard = None if told.hardLimit == most else int(told.hardLimit)
        if hard is not None and hard >= nvmllibrary.ask(self._pynvml, "nvmlDeviceGetMemoryInfo", self._handle).total:
            hard = None
        used = None if told.currentUsed == most else int(told.currentUsed)
        return limits.MemoryUse(limit=limits.MemoryLimit(soft=int(told.softLimit), hard=hard), used=used)

    def compute_mode(self) -> limits.ComputeMode | None:
        """Which programs may use the GPU; None where the driver does not tell."""
        try:
            number = nvmllibrary.ask(self._pynvml, "nvmlDeviceGetComputeMode", self._handle)
        except errors.SourceError as err:
            if err.kind in _ABSENT:
                return None
            raise
        return nvmlnumbers.COMPUTE_MODES.get(number)

    def set_compute_mode(self, mode: limits.ComputeMode) -> None:
        """Change which programs may use the GPU. It takes root."""
        number = next(number for number, each in nvmlnumbers.COMPUTE_MODES.items() if each is mode)
        nvmllibrary.ask(self._pynvml, "nvmlDeviceSetComputeMode", self._handle, number)

    def _asked(self, cgroup: str) -> Any:
        told = self._pynvml.c_nvmlGetMemoryLimits_v1_t()
        told.nameSpace = os.fsencode(cgroup)
        nvmllibrary.ask(self._pynvml, _GET, self._handle, told)
        return told
