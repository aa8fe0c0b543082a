# SPDX-License-Identifier: Apache-2.0
"""NVML through `pynvml` (PyPI nvidia-ml-py): what a GPU says about itself. The only importer of pynvml, which is loaded
when a session is first opened.

Errors are `SourceError("nvml", kind)`, see nvmllibrary.py. What a GPU or a driver has not (NOT_SUPPORTED,
FUNCTION_NOT_FOUND) is None.

A session sees the GPUs that were there when it was opened, so it is short: open, ask, close. Only where the driver has no
persistence mode on, closing would shut the GPUs down and opening wake them for seconds: see `keeps_gpus_awake`.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, Self, TypeVar

from discovery import errors, findings, limits, mig, model, nvmllibrary, nvmllimits, nvmlmig, nvmlnumbers
from discovery.address import PciAddress

_T = TypeVar("_T")

Functions = Mapping[PciAddress, model.RemoteKind]
"""What NVLinks of this machine can end in, as far as sysfs shows it."""

UNSUPPORTED = frozenset({"not-supported", "function-not-found"})
"""The GPU or the driver has no such thing: no fault of anything."""

LOST = frozenset({"gpu-is-lost", "gpu-not-found"})
"""The GPU no longer answers on the bus."""

STALE = frozenset({"lib-rm-version-mismatch"})
"""The driver was replaced under the library that this process has loaded: only a new process loads the new one."""

_ENDS_A_GPU = LOST | STALE | {"uninitialized", "driver-not-loaded", "reset-required", "library-not-found"}
"""After these nothing more is asked of the GPU."""

_NO_GPUS_IS_FINE = 1
"""NVML_INIT_FLAG_NO_GPUS."""

_MAX_LINKS = 64
_SESSION_WAIT_S = 30.0
_session = threading.Lock()
"""pynvml keeps the loaded library and its functions in module variables: one session at a time in a process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """What makes a GPU usable: all three known, it is READY."""

    uuid: str | None = None
    product: str | None = None
    memory_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What NVML says of a GPU."""

    minor: int | None = None
    architecture: str | None = None
    compute_capability: tuple[int, int] | None = None
    multiprocessors: int | None = None
    mig_mode: model.MigMode | None = None
    mig_profiles: tuple[mig.MigProfile, ...] = ()
    mig_instances: tuple[mig.MigInstance, ...] | None = None
    nvlinks: tuple[model.NvLink, ...] = ()
    fabric: model.Fabric | None = None
    c2c: bool | None = None
    memory_limits: bool | None = None
    compute_mode: limits.ComputeMode | None = None
    link_width: int | None = None


class Nvml:
    """A session with NVML, as a context manager or by `open` and `close`, both idempotent.

    `library`: an object with the C functions of libnvidia-ml, taken instead of loading `libnvidia-ml.so.1`.
    `driver_root`: where that is looked for when the driver is not installed in this file system.
    """

    def __init__(self, library: object | None = None, *, driver_root: Path = Path("/")) -> None:
        self._library = library
        self._driver_root = driver_root
        self._pynvml: Any = None
        self._handles: dict[PciAddress, Any] = {}
        self._mig = nvmlmig.Reader()

    def __enter__(self) -> Self:
        self.open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def is_open(self) -> bool:
        """Whether questions can be asked."""
        return self._pynvml is not None

    def open(self) -> None:
        """Load the library if need be and begin. Raises SourceError; `library-not-found` where there is no NVML."""
        if self.is_open:
            return
        import pynvml  # noqa: PLC0415 - 4 MB that a machine without NVIDIA GPUs never needs

        if not _session.acquire(timeout=_SESSION_WAIT_S):
            raise errors.SourceError("nvml", "busy", "another session of this process does not end")
        try:
            if self._library is None:
                self._library = nvmllibrary.load(self._driver_root)
            nvmllibrary.install(pynvml, self._library)
            nvmllibrary.ask(pynvml, "nvmlInitWithFlags", _NO_GPUS_IS_FINE)
        except BaseException:
            _session.release()
            raise
        self._pynvml = pynvml

    def close(self) -> None:
        """End the session; what NVML answers to that changes nothing."""
        pynvml, self._pynvml = self._pynvml, None
        self._handles.clear()
        if pynvml is None:
            return
        try:
            nvmllibrary.ask(pynvml, "nvmlShutdown")
        except errors.SourceError:
            return
        finally:
            _session.release()

    def driver(self) -> model.NvidiaDriver:
        """The versions of driver, CUDA and NVML. Raises SourceError when there is no driver version."""
        version = self._ask("nvmlSystemGetDriverVersion")
        cuda = self._optional("nvmlSystemGetCudaDriverVersion_v2")
        return model.NvidiaDriver(
            version=version,
            cuda_version=None if not cuda else (cuda // 1000, cuda % 1000 // 10),
            nvml_version=self._optional("nvmlSystemGetNVMLVersion"),
        )

    def addresses(self, found: findings.Findings) -> tuple[PciAddress, ...]:
        """The addresses of the GPUs that NVML lists. One that cannot be told is a Finding."""
        listed = []
        for index in range(self._ask("nvmlDeviceGetCount")):
            try:
                handle = self._ask("nvmlDeviceGetHandleByIndex", index)
                listed.append(nvmlnumbers.address_of(self._ask("nvmlDeviceGetPciInfo_v3", handle)))
            except errors.SourceError as err:
                found.failed(f"nvml index {index}", err)
        return tuple(sorted(where for where in listed if where is not None))

    def identity(self, where: PciAddress) -> Identity:
        """The least that has to be known of a GPU, asked so that a lost one is noticed. Raises SourceError."""
        return Identity(
            uuid=self._of(where, "nvmlDeviceGetUUID") or None,
            product=self._of(where, "nvmlDeviceGetName") or None,
            memory_bytes=self._memory(where, "total") or None,
        )

    def facts(
        self,
        where: PciAddress,
        found: findings.Findings,
        *,
        identity: Identity,
        functions: Functions = MappingProxyType({}),
        cgroup: str | None = None,
    ) -> Facts:
        """Everything else about a GPU. What cannot be read is a Finding; raises SourceError when the GPU is gone.

        `functions`: the GPUs and NVSwitches of this machine. What an NVLink is that ends in one of them is not asked. Of
        `mig_instances` the capability nodes are left to whoever reads files. `cgroup`: any, by which to ask for memory limits.
        """

        def ask(function: str, *arguments: object) -> Any:
            return self._noted(where, found, lambda: self._of(where, function, *arguments))

        capability = ask("nvmlDeviceGetCudaComputeCapability")
        cores = ask("nvmlDeviceGetNumGpuCores")
        each = nvmlnumbers.CORES_PER_MULTIPROCESSOR.get(capability)
        architecture = ask("nvmlDeviceGetArchitecture")
        mode = self._noted(where, found, lambda: self.mig_of(where).mode())
        profiles, instances = self._mig.read(
            self.mig_of(where), mode, identity.uuid, identity.memory_bytes, functools.partial(self._noted, where, found)
        )
        c2c = ask("nvmlDeviceGetC2cModeInfoV")
        return Facts(
            minor=ask("nvmlDeviceGetMinorNumber"),
            architecture=nvmlnumbers.ARCHITECTURES.get(architecture),
            compute_capability=capability,
            multiprocessors=cores // each if cores and each and cores % each == 0 else None,
            mig_mode=mode,
            mig_profiles=profiles,
            mig_instances=instances,
            nvlinks=self._noted(where, found, lambda: self._nvlinks(where, architecture, functions, found)) or (),
            fabric=self._noted(where, found, lambda: self._fabric(where, found)),
            c2c=None if c2c is None else bool(c2c.isC2cEnabled),
            memory_limits=self._noted(
                where, found, lambda: self.limits_of(where).has_memory_limits(cgroup) if cgroup else None
            ),
            compute_mode=self._noted(where, found, lambda: self.limits_of(where).compute_mode()),
            link_width=ask("nvmlDeviceGetCurrPcieLinkWidth"),
        )

    def fabric_state(self, where: PciAddress) -> str | None:
        """How far its registration with the GPU fabric is. Raises SourceError."""
        info = self._fabric_info(where)
        return None if info is None else nvmlnumbers.FABRIC_STATES.get(info.state)

    def mig_of(self, where: PciAddress) -> nvmlmig.MigGpu:
        """The MIG of a GPU, good until its mode is changed. Raises SourceError when there is no such GPU."""
        return nvmlmig.MigGpu(self._pynvml, self._handle(where))

    def limits_of(self, where: PciAddress) -> nvmllimits.GpuLimits:
        """What keeps programs on a GPU apart. Raises SourceError when there is no such GPU."""
        return nvmllimits.GpuLimits(self._pynvml, self._handle(where), self._library or self._pynvml.nvmlLib)

    def minor(self, where: PciAddress) -> int | None:
        """The number in /dev/nvidia<minor>. Raises SourceError."""
        return self._of(where, "nvmlDeviceGetMinorNumber")  # type: ignore[no-any-return]

    def forget(self, where: PciAddress) -> None:
        """Ask for the handle of a GPU anew: a change of the MIG mode may have made it invalid (nvmlDeviceSetMigMode)."""
        self._handles.pop(where, None)

    def sample(self, where: PciAddress) -> model.GpuSample:
        """How busy a GPU is. Raises SourceError when it is gone."""
        rates = self._of(where, "nvmlDeviceGetUtilizationRates")
        return model.GpuSample(
            address=where,
            utilization_ratio=None if rates is None else min(rates.gpu, 100) / 100,
            memory_used_bytes=self._memory(where, "used"),
        )

    def keeps_gpus_awake(self) -> bool:
        """Whether this session is what keeps a GPU initialised, so that closing and opening again costs seconds: the
        GPU's persistence mode is off. Only GPUs asked in this session are looked at.
        """
        return any(self._of(where, "nvmlDeviceGetPersistenceMode") == 0 for where in self._handles)

    def _nvlinks(
        self,
        where: PciAddress,
        architecture: int | None,
        functions: Functions,
        found: findings.Findings,
    ) -> tuple[model.NvLink, ...]:
        links: list[model.NvLink] = []
        handle = self._handle(where)
        generation = None  # of a GPU, not of a link: asked until one link tells it
        for link in range(self._link_count(where)):
            try:
                state = self._optional("nvmlDeviceGetNvLinkState", handle, link)
                if state is not None:
                    if generation is None:
                        number = self._told(where, link, "nvmlDeviceGetNvLinkVersion", active=bool(state), found=found)
                        generation = nvmlnumbers.nvlink_generation(number, architecture)
                    links.append(self._nvlink(where, link, functions, generation, active=bool(state), found=found))
            except errors.SourceError as err:
                if err.kind == "invalid-argument":
                    break
                if err.kind in _ENDS_A_GPU:
                    raise
                found.failed(where, err)
        return tuple(link if link.version == generation else replace(link, version=generation) for link in links)

    def _nvlink(
        self,
        where: PciAddress,
        link: int,
        functions: Functions,
        generation: int | None,
        *,
        active: bool,
        found: findings.Findings,
    ) -> model.NvLink:
        far = self._told(where, link, "nvmlDeviceGetNvLinkRemotePciInfo", active=active, found=found)
        remote = None if far is None else self._noted(where, found, lambda: nvmlnumbers.address_of(far))
        known = None if remote is None else functions.get(remote)
        if known is not None:
            return model.NvLink(link=link, active=active, version=generation, remote_kind=known, remote=remote)
        kind = nvmlnumbers.REMOTE_KINDS.get(
            self._told(where, link, "nvmlDeviceGetNvLinkRemoteDeviceType", active=active, found=found)
        )
        if kind is None and active and far is not None and far.domain == nvmlnumbers.NO_DOMAIN:
            kind = model.RemoteKind.SWITCH
        return model.NvLink(link=link, active=active, version=generation, remote_kind=kind, remote=remote)

    def _told(self, where: PciAddress, link: int, function: str, *, active: bool, found: findings.Findings) -> Any:
        """What a function says of a link; of one that is down it is often refused, with whatever error."""
        try:
            return self._optional(function, self._handle(where), link)
        except errors.SourceError as err:
            if err.kind in _ENDS_A_GPU:
                raise
            if active:
                found.failed(where, err)
            return None

    def _link_count(self, where: PciAddress) -> int:
        values = self._of(where, "nvmlDeviceGetFieldValues", [self._pynvml.NVML_FI_DEV_NVLINK_LINK_COUNT])
        if values is not None and values[0].nvmlReturn == self._pynvml.NVML_SUCCESS:
            return min(int(values[0].value.uiVal), _MAX_LINKS)
        return int(self._pynvml.NVML_NVLINK_MAX_LINKS)

    def _fabric(self, where: PciAddress, found: findings.Findings) -> model.Fabric | None:
        info = self._fabric_info(where)
        if info is None:
            return None
        state = nvmlnumbers.FABRIC_STATES.get(info.state)
        if state is None:
            raise errors.SourceError(
                "nvml", errors.MALFORMED, f"nvmlDeviceGetGpuFabricInfoV: unknown state {info.state}"
            )
        if state == "completed" and info.status != self._pynvml.NVML_SUCCESS:
            found.warning(
                "fabric-failed",
                where,
                f"its registration with the GPU fabric ended with NVML status {info.status}; see the fabric manager's log",
            )
            return model.Fabric(state=state)
        uuid = bytes(info.clusterUuid)
        if state != "completed" or not any(uuid):
            return model.Fabric(state=state)
        text = uuid.hex()
        return model.Fabric(
            state=state,
            cluster_uuid="-".join((text[:8], text[8:12], text[12:16], text[16:20], text[20:])),
            clique_id=info.cliqueId,
        )

    def _fabric_info(self, where: PciAddress) -> Any:
        """The newest structure that this driver fills: drivers refuse versions they do not know."""
        pynvml = self._pynvml
        for structure in (pynvml.c_nvmlGpuFabricInfo_v3_t, pynvml.c_nvmlGpuFabricInfo_v2_t):
            info = structure()
            try:
                answer = self._of(where, "nvmlDeviceGetGpuFabricInfoV", pynvml.byref(info))
            except errors.SourceError as err:
                if err.kind in ("argument-version-mismatch", "invalid-argument"):
                    continue
                raise
            return None if answer is None else info
        info = pynvml.c_nvmlGpuFabricInfo_t()
        return None if self._of(where, "nvmlDeviceGetGpuFabricInfo", pynvml.byref(info)) is None else info

    def _memory(self, where: PciAddress, field: str) -> int | None:
        """Version 2 tells used memory without what the driver keeps for itself; older drivers have version 1 only."""
        info = self._of(where, "nvmlDeviceGetMemoryInfo", self._pynvml.nvmlMemory_v2)
        if info is None:
            info = self._of(where, "nvmlDeviceGetMemoryInfo")
        return None if info is None else int(getattr(info, field))

    def _handle(self, where: PciAddress) -> Any:
        handle = self._handles.get(where)
        if handle is None:
            handle = self._handles[where] = self._ask("nvmlDeviceGetHandleByPciBusId", nvmlnumbers.bus_id(where))
        return handle

    def _of(self, where: PciAddress, function: str, *arguments: object) -> Any:
        """The answer of a function about one GPU, None where there is no such thing."""
        return self._optional(function, self._handle(where), *arguments)

    def _noted(self, where: PciAddress, found: findings.Findings, read: Callable[[], _T]) -> _T | None:
        try:
            return read()
        except errors.SourceError as err:
            if err.kind in _ENDS_A_GPU:
                raise
            found.failed(where, err)
            return None

    def _optional(self, function: str, *arguments: object) -> Any:
        try:
            return self._ask(function, *arguments)
        except errors.SourceError as err:
            if err.kind in UNSUPPORTED:
                return None
            raise

    def _ask(self, function: str, *arguments: object) -> Any:
        if self._pynvml is None:
            raise errors.SourceError("nvml", "uninitialized", f"{function}: no session is open")
        return nvmllibrary.ask(self._pynvml, function, *arguments)
