# SPDX-License-Identifier: Apache-2.0
"""What a GPU is and whether it can be handed out: sysfs says that it is there and which driver has it, NVML says the rest.

Where two sources speak of the same thing and differ, the one that owns it wins (NVML for the GPU, sysfs for PCI) and the
difference is a Finding.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType

from discovery import capabilities, cgroups, errors, findings, mig, model, nvml, sysfs, system
from discovery.address import PciAddress

NVIDIA_DRIVER = "nvidia"
_LOST_HINT = "; see the kernel log for its Xid, and reset it (nvidia-smi --gpu-reset) or reboot the node"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The state of a GPU, why, and what made it usable as far as it is known."""

    state: model.GpuState
    reason: str | None = None
    identity: nvml.Identity = field(default_factory=nvml.Identity)


def judge(driver: str | None, identify: Callable[[], nvml.Identity]) -> Verdict:
    """The state of a GPU that is bound to `driver`; `identify` asks NVML, and is only called for NVIDIA's driver."""
    if driver is None:
        return Verdict(
            state=model.GpuState.NO_DRIVER,
            reason="no kernel driver is bound to it; load the NVIDIA driver, or bind it",
        )
    if "vfio" in driver:
        return Verdict(state=model.GpuState.VFIO, reason=f"it is bound to {driver}, for virtual machines")
    if driver != NVIDIA_DRIVER:
        return Verdict(
            state=model.GpuState.FOREIGN_DRIVER,
            reason=f"it is bound to {driver}; bind it to the NVIDIA driver to use it",
        )
    try:
        identity = identify()
    except errors.SourceError as err:
        return _unusable(err)
    missing = [
        name
        for name, value in (("UUID", identity.uuid), ("product", identity.product), ("memory", identity.memory_bytes))
        if value is None
    ]
    if missing:
        return Verdict(
            state=model.GpuState.UNREADABLE, reason=f"NVML does not tell its {' and '.join(missing)}", identity=identity
        )
    return Verdict(state=model.GpuState.READY, identity=identity)


class GpuReader:
    """Reads GPUs in one session. `refused`: why there is no session, for those that would need one."""

    def __init__(
        self,
        files: sysfs.Sysfs,
        session: nvml.Nvml,
        refused: errors.SourceError | None,
        *,
        dev: Path,
        found: findings.Findings,
        functions: nvml.Functions = MappingProxyType({}),
    ) -> None:
        """`functions`: the GPUs and NVSwitches of this machine, where whole GPUs are read."""
        self._files = files
        self._session = session
        self._refused = refused
        self._dev = dev
        self._found = found
        self._functions = functions
        self._seen: set[str] = set() if refused is None else {refused.kind}

    @property
    def outlived(self) -> bool:
        """Whether NVML said that the driver was replaced under the library of this process."""
        return not self._seen.isdisjoint(nvml.STALE)

    def driver(self, module: str | None) -> model.NvidiaDriver | None:
        """The NVIDIA driver by NVML, else by its kernel module, whose version is `module`."""
        told = None
        if self._session.is_open:
            try:
                told = self._session.driver()
            except errors.SourceError as err:
                self._failed("nvml", err)
        if told is None:
            return None if module is None else model.NvidiaDriver(version=module)
        if module is not None and module != told.version:
            self._found.warning(
                "driver-version-differs", "nvidia", f"NVML is of driver {told.version}, the loaded module of {module}"
            )
        return told

    def reading(self, where: PciAddress, driver: str | None) -> model.GpuReading:
        """The state of a GPU, read with the least effort."""
        verdict = self._judge(where, driver)
        fabric = partitions = None
        if verdict.state is model.GpuState.READY:
            with contextlib.suppress(errors.SourceError):  # a probe says why
                fabric = self._session.fabric_state(where)
            with contextlib.suppress(errors.SourceError):
                partitions = self._partitions(where)
        return model.GpuReading(
            address=where,
            state=verdict.state,
            state_reason=verdict.reason,
            driver=driver,
            uuid=verdict.identity.uuid,
            fabric=fabric,
            mig=partitions,
        )

    def sample(self, where: PciAddress) -> model.GpuSample:
        """How busy a GPU is. Raises SourceError when it does not answer."""
        if self._refused is not None:
            raise self._refused
        return self._session.sample(where)

    def keeps_gpus_awake(self) -> bool:
        """Whether closing the session would put GPUs to sleep; not if one of them needs a new session to come back."""
        if not self._session.is_open or self._seen:
            return False
        try:
            return self._session.keeps_gpus_awake()
        except errors.SourceError:
            return False

    def look_for_strangers(self, known: AbstractSet[PciAddress]) -> None:
        """Notes the GPUs that NVML lists and sysfs does not."""
        if not self._session.is_open:
            return
        try:
            strangers = [where for where in self._session.addresses(self._found) if where not in known]
        except errors.SourceError as err:
            self._failed("nvml", err)
            return
        for where in strangers:
            self._found.warning(
                "gpu-without-function", where, "NVML lists this GPU, sysfs has no such function: left out"
            )

    def read(self, pci: model.PciFunction) -> model.Gpu:
        """A GPU with everything that it and the driver tell, without links between GPUs resolved and without groups."""
        where = pci.address
        verdict = self._judge(where, pci.driver)
        told = system.DriverGpu()
        if pci.driver == NVIDIA_DRIVER:
            told = system.driver_gpu(self._files, where, self._found)
        if told.excluded and verdict.state is not model.GpuState.READY:
            verdict = Verdict(
                state=model.GpuState.UNREADABLE,
                reason="the NVIDIA driver is told to leave it alone (NVreg_ExcludedGpus)",
            )
        facts = nvml.Facts()
        if verdict.state is model.GpuState.READY:
            try:
                facts = self._session.facts(
                    where,
                    self._found,
                    identity=verdict.identity,
                    functions=self._functions,
                    cgroup=str(self._files.sys / cgroups.ROOT),
                )
            except errors.SourceError as err:
                self._seen.add(err.kind)
                verdict = _unusable(err, verdict.identity)
        if verdict.state is not model.GpuState.READY:
            self._found.warning("gpu-not-ready", where, f"{verdict.state}: {verdict.reason}")
        self._compare(pci, verdict.identity, facts, told)
        minor = told.minor if facts.minor is None else facts.minor
        return model.Gpu(
            pci=pci,
            state=verdict.state,
            state_reason=verdict.reason,
            uuid=verdict.identity.uuid or told.uuid,
            minor=minor,
            product=verdict.identity.product,
            architecture=facts.architecture,
            compute_capability=facts.compute_capability,
            memory_bytes=verdict.identity.memory_bytes,
            multiprocessors=facts.multiprocessors,
            mig_mode=facts.mig_mode,
            mig_profiles=facts.mig_profiles,
            mig_instances=self._with_nodes(where, minor, facts.mig_instances),
            nvlinks=facts.nvlinks,
            fabric=facts.fabric,
            c2c=facts.c2c,
            memory_limits=facts.memory_limits,
            compute_mode=facts.compute_mode,
            memory_numa_node=told.memory_node,
        )

    def _partitions(self, where: PciAddress) -> str | None:
        """A text that changes with the MIG mode of a GPU and with its instances. A compute instance is told by its number alone;
        a GPU instance may be another one of the same number, so what it is stands beside it where this user may ask.
        """
        mode = self._session.mig_of(where).mode()
        if mode is None:
            return None
        text = f"{mode.current:d}{mode.pending:d}"
        minor = self._session.minor(where) if mode.current else None
        for number, computes in (
            {} if minor is None else capabilities.instances(self._files, minor, self._found)
        ).items():
            place = ""
            with contextlib.suppress(errors.SourceError):
                place = self._session.mig_of(where).place_of(number)
            text += f" {number}:{place}:{','.join(map(str, computes))}"
        return text

    def _with_nodes(
        self, where: PciAddress, minor: int | None, instances: tuple[mig.MigInstance, ...] | None
    ) -> tuple[mig.MigInstance, ...] | None:
        """Instances with their capability nodes; those that nobody can use as they are, are a Finding."""
        if instances is None:
            return None
        for each in instances:
            if not each.whole:
                self._found.warning(
                    "mig-instance-incomplete",
                    where,
                    f"its GPU instance {each.gpu_instance} (profile {each.profile_id}, from memory slice "
                    f"{each.placement.start}) has not exactly one compute instance that takes all of it, and is not offered",
                )
        return tuple(
            replace(each, nodes=capabilities.nodes(self._files, minor, each, self._found, subject=where))
            if each.whole and minor is not None
            else each
            for each in instances
        )

    def _judge(self, where: PciAddress, driver: str | None) -> Verdict:
        def identify() -> nvml.Identity:
            try:
                if self._refused is not None:
                    raise self._refused
                return self._session.identity(where)
            except errors.SourceError as err:
                self._seen.add(err.kind)
                raise

        return judge(driver, identify)

    def _failed(self, subject: object, err: errors.SourceError) -> None:
        self._seen.add(err.kind)
        self._found.failed(subject, err)

    def _compare(
        self, pci: model.PciFunction, identity: nvml.Identity, facts: nvml.Facts, told: system.DriverGpu
    ) -> None:
        where = pci.address
        width = None if pci.link is None else pci.link.current_width
        for name, by_nvml, elsewhere, source in (
            ("uuid", identity.uuid, told.uuid, "procfs"),
            ("minor", facts.minor, told.minor, "procfs"),
            ("link-width", facts.link_width, width, "sysfs"),
        ):
            if by_nvml is not None and elsewhere is not None and by_nvml != elsewhere:
                self._found.warning(
                    f"{name}-differs", where, f"its {name} is {by_nvml} by NVML and {elsewhere} by {source}"
                )
        if facts.minor is not None and not (self._dev / f"nvidia{facts.minor}").exists():
            self._found.warning(
                "device-node-missing",
                where,
                f"/dev/nvidia{facts.minor} is not there, so no container can open it; nvidia-modprobe or "
                "nvidia-persistenced makes it",
            )
        if facts.mig_mode is not None and facts.mig_mode.current != facts.mig_mode.pending:
            self._found.info("mig-mode-pending", where, "its MIG mode changes at the next reset of the GPU")


def _unusable(err: errors.SourceError, identity: nvml.Identity | None = None) -> Verdict:
    """The verdict on a GPU that gives an error for an answer."""
    lost = err.kind in nvml.LOST
    return Verdict(
        state=model.GpuState.LOST if lost else model.GpuState.UNREADABLE,
        reason=f"{err}{_LOST_HINT}" if lost else str(err),
        identity=identity if identity is not None else nvml.Identity(),
    )
