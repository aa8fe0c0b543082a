# SPDX-License-Identifier: Apache-2.0
"""Dividing a GPU: makes and removes GPU instances, in this process, by the contract of work.Work. One GPU at a time, each call
in a session of its own: a session that stays open would be a user of the GPU, and would not see one that was reset.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from discovery import capabilities, errors, findings, mig, model, nvml, nvmlmig, nvmlprofiles, sysfs, work
from discovery.address import PciAddress

logger = logging.getLogger(__name__)

KINDS = {
    "gpu-is-lost": work.Kind.LOST, "gpu-not-found": work.Kind.LOST, "not-found": work.Kind.LOST,
    "in-use": work.Kind.IN_USE,
    "insufficient-resources": work.Kind.INSUFFICIENT_RESOURCES,
    "not-supported": work.Kind.NOT_SUPPORTED, "function-not-found": work.Kind.NOT_SUPPORTED,
    "no-permission": work.Kind.NOT_SUPPORTED, "reset-required": work.Kind.NOT_SUPPORTED,
    "library-not-found": work.Kind.NOT_SUPPORTED, "driver-not-loaded": work.Kind.NOT_SUPPORTED,
}  # fmt: skip
"""What NVML's errors mean for the work; every other one is FAILED. A mode that takes a reset (`reset-required`, as in virtual
machines) is nothing that NVML can do."""

_REFUSALS = frozenset({"insufficient-resources", "in-use", "not-supported", "no-permission"})
"""After which NVML has made nothing for certain."""

_PASSES = frozenset({work.Kind.IN_USE, work.Kind.INSUFFICIENT_RESOURCES, work.Kind.TIMEOUT, work.Kind.FAILED})
"""What may pass by itself."""

_MODULE = "sys/module/nvidia"
_NAMED_PIDS = 8
_NEXT_STEP = "remove it (nvidia-smi mig -dci and -dgi), or wait for whoever uses it"


class OutlivedError(errors.DiscoveryError):
    """The driver was replaced under the library that this process has loaded. Nothing was begun, and another process can."""


def refused(kind: work.Kind, message: str) -> errors.WorkError:
    """The error of a kind."""
    return errors.WorkError(message, kind=kind, retryable=kind in _PASSES)


def open_session(session: nvml.Nvml) -> None:
    """Begin a session for one call. Raises SourceError, or OutlivedError."""
    try:
        session.open()
    except errors.SourceError as err:
        if err.kind in nvml.STALE:
            raise OutlivedError(str(err)) from err
        raise


@dataclass(frozen=True, slots=True, kw_only=True)
class _Gpu:
    """The GPU that is worked on, as it is in one MIG mode."""

    address: PciAddress
    mig: nvmlmig.MigGpu
    profiles: nvmlprofiles.Profiles

    def told(self, held: nvmlmig.Held) -> str:
        """An instance, for a person: as much as there is to find it by."""
        profile = self.profiles.of(held.profile_id)
        name = f"profile {held.profile_id}" if profile is None else f"{profile.name}, profile {profile.id}"
        uuid = "" if held.uuid is None else f", {held.uuid}"
        return f"GPU instance {held.gpu_instance} ({name}, {_slices(held.placement)}{uuid})"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Wanted:
    partition: mig.Partition
    profile: mig.MigProfile
    place: mig.MigPlacement


class Divider:
    """Does the work over a session with NVML. For one thread at a time."""

    def __init__(self, *, files: sysfs.Sysfs, session: nvml.Nvml) -> None:
        self._files = files
        self._nvml = session
        self._reader = nvmlmig.Reader()
        self._clean = False
        """Whether there is surely nothing of what the call under way was to make."""

    def create(
        self,
        address: PciAddress,
        partitions: Sequence[mig.Partition],
        *,
        begun: bool,
        toggle: bool,
        commit: Callable[[], None],
    ) -> tuple[mig.MigInstance, ...]:
        """See work.Work."""
        self._clean = not begun
        with self._session(address, "make instances"):
            divisible = self._nvml.mig_of(address)
            mode = divisible.mode()
            if mode is None:
                raise refused(work.Kind.NOT_SUPPORTED, f"{address} has no MIG")
            if not mode.current and not toggle:
                raise refused(
                    work.Kind.NOT_SUPPORTED,
                    f"{address}: MIG is not enabled, and is not to be; nvidia-smi -mig 1 does it",
                )
            gpu = self._described(address, divisible, mode)
            wanted = _wanted(gpu, partitions)
            adopted = _adopted(gpu, wanted, begun=begun) if mode.current else {}
            if not mode.current and (users := divisible.processes()):
                raise refused(
                    work.Kind.IN_USE, f"{address}: MIG cannot be enabled while programs use the GPU{_pids(users)}"
                )
            commit()
            if not mode.current:
                gpu = self._switched(gpu, on=True)
                wanted = _wanted(gpu, partitions)
            return self._made(gpu, wanted, adopted)

    def destroy(self, address: PciAddress, partitions: Sequence[mig.Partition]) -> None:
        """See work.Work. Every one is tried before the first error leaves. Where the driver is not loaded there are none."""
        self._clean = False
        if not self._files.names(_MODULE):
            return
        with self._session(address, "remove instances"):
            divisible = self._nvml.mig_of(address)
            mode = divisible.mode()
            if mode is None or not mode.current:
                return
            gpu = self._described(address, divisible, mode)
            failed: list[errors.SourceError] = []
            for held in _at(gpu, partitions):
                try:
                    divisible.destroy(held)
                except errors.SourceError as err:
                    users = _pids(divisible.processes(held.gpu_instance)) if err.kind == "in-use" else ""
                    failed.append(errors.SourceError(err.source, err.kind, f"{gpu.told(held)}: {err}{users}"))
            if failed:
                raise failed[0]
            for held in _at(gpu, partitions):
                raise refused(work.Kind.FAILED, f"{address}: {gpu.told(held)} is still there after it was removed")

    def whole(self, address: PciAddress, *, toggle: bool) -> None:
        """See work.Work."""
        self._clean = False
        with self._session(address, "use it whole"):
            divisible = self._nvml.mig_of(address)
            mode = divisible.mode()
            if mode is None or not mode.current:
                return
            gpu = self._described(address, divisible, mode)
            if held := divisible.instances(gpu.profiles):
                said = "; ".join(map(gpu.told, held))
                raise refused(
                    work.Kind.OCCUPIED, f"{address} is divided, and cannot be used whole: {said}; {_NEXT_STEP}"
                )
            if not toggle:
                raise refused(
                    work.Kind.NOT_SUPPORTED,
                    f"{address}: MIG is enabled, and is not to be disabled; nvidia-smi -mig 0 does it",
                )
            self._switched(gpu, on=False)

    def _described(self, address: PciAddress, divisible: nvmlmig.MigGpu, mode: model.MigMode) -> _Gpu:
        """With all profiles that can be read: a mode may have others."""
        unread: list[errors.SourceError] = []

        def noted(read: Callable[[], Any]) -> Any:
            try:
                return read()
            except errors.SourceError as err:
                unread.append(err)
                return None

        identity = self._nvml.identity(address)
        profiles = self._reader.profiles(divisible, mode, identity.uuid, identity.memory_bytes, noted)
        if not profiles.complete:
            if unread:
                raise unread[0]
            raise refused(work.Kind.NOT_SUPPORTED, f"{address}: the library of this driver knows no MIG profiles")
        return _Gpu(address=address, mig=divisible, profiles=profiles)

    def _switched(self, gpu: _Gpu, *, on: bool) -> _Gpu:
        """The GPU with its MIG mode changed, which is verified."""
        able = "enabled" if on else "disabled"
        try:
            gpu.mig.set_mode(on)
        except errors.SourceError as err:
            users = _pids(gpu.mig.processes()) if err.kind == "in-use" else ""
            raise errors.SourceError(err.source, err.kind, f"MIG cannot be {able}: {err}{users}") from err
        self._nvml.forget(gpu.address)
        divisible = self._nvml.mig_of(gpu.address)
        mode = divisible.mode()
        if mode is None or mode.current is not on:
            raise refused(work.Kind.FAILED, f"{gpu.address}: MIG was {able}, and it is not; see the kernel log")
        return self._described(gpu.address, divisible, mode)

    def _made(
        self, gpu: _Gpu, wanted: Sequence[_Wanted], adopted: Mapping[mig.Partition, nvmlmig.Held]
    ) -> tuple[mig.MigInstance, ...]:
        """All of the instances; on a failure, none of those that are made here."""
        made: list[tuple[Any, mig.MigProfile]] = []
        answers = []
        try:
            minor = self._nvml.minor(gpu.address)
            for each in wanted:
                held = adopted.get(each.partition)
                handle = self._new(gpu, each) if held is None else held.handle
                if held is None:
                    made.append((handle, each.profile))
                if held is None or not held.computes:
                    gpu.mig.complete(handle, each.profile)
                    held = gpu.mig.held(handle, each.profile)
                answers.append(self._usable(gpu, held, each, minor))
        except (errors.SourceError, errors.WorkError) as err:
            for handle, profile in reversed(made):
                try:
                    gpu.mig.destroy(gpu.mig.held(handle, profile))
                except errors.SourceError as left:
                    self._clean = False
                    logger.error(
                        "%s: %s was made for nothing and cannot be removed: %s", gpu.address, profile.name, left
                    )
            raise _why(gpu, wanted, adopted, err) from err
        return tuple(answers)

    def _new(self, gpu: _Gpu, wanted: _Wanted) -> Any:
        try:
            return gpu.mig.create(wanted.profile, wanted.place)
        except errors.SourceError as err:
            self._clean = self._clean and err.kind in _REFUSALS
            raise

    def _usable(self, gpu: _Gpu, held: nvmlmig.Held, wanted: _Wanted, minor: int | None) -> mig.MigInstance:
        """The value of an instance that is what was asked for. Raises WorkError when it is not."""
        instance = held.value()
        if (held.profile_id, held.placement) != (wanted.profile.id, wanted.place) or not instance.whole:
            raise refused(
                work.Kind.FAILED,
                f"{gpu.address}: {wanted.profile.name} in {_slices(wanted.place)} was made, and the driver shows {instance}",
            )
        found = findings.Findings()
        nodes = () if minor is None else capabilities.nodes(self._files, minor, instance, found, subject=gpu.address)
        if not nodes:
            said = "; ".join(finding.message for finding in found.result()) or "the GPU has no minor number"
            raise refused(work.Kind.FAILED, f"{gpu.address}: {gpu.told(held)} cannot be used: {said}")
        return replace(instance, nodes=nodes)

    @contextlib.contextmanager
    def _session(self, address: PciAddress, doing: str) -> Iterator[None]:
        """A call: NVML's errors become WorkErrors."""
        try:
            open_session(self._nvml)
            yield
        except errors.SourceError as err:
            failed = refused(KINDS.get(err.kind, work.Kind.FAILED), f"{address}: cannot {doing}: {err}")
            failed.clean = self._clean
            raise failed from err
        except errors.WorkError as err:
            err.clean = self._clean
            raise
        finally:
            self._nvml.close()


def _wanted(gpu: _Gpu, partitions: Sequence[mig.Partition]) -> tuple[_Wanted, ...]:
    """What partitions are on this GPU. Raises WorkError for what it has not."""
    wanted = tuple(
        _Wanted(partition=each, profile=profile, place=_place(gpu, profile, each.start))
        for each in partitions
        for profile in [_profile(gpu, each.profile_id)]
    )
    for a, b in itertools.combinations(wanted, 2):
        if a.place.overlaps(b.place):
            raise refused(
                work.Kind.NOT_SUPPORTED,
                f"{gpu.address}: {a.profile.name} in {_slices(a.place)} and {b.profile.name} in {_slices(b.place)} are "
                "asked for at once, and overlap",
            )
    return wanted


def _profile(gpu: _Gpu, profile_id: int) -> mig.MigProfile:
    profile = gpu.profiles.of(profile_id)
    if profile is None:
        has = ", ".join(f"{each.id} ({each.name})" for each in gpu.profiles.named)
        raise refused(work.Kind.NOT_SUPPORTED, f"{gpu.address} has no MIG profile {profile_id}; it has {has or 'none'}")
    return profile


def _place(gpu: _Gpu, profile: mig.MigProfile, start: int) -> mig.MigPlacement:
    for place in profile.placements:
        if place.start == start:
            return place
    starts = ", ".join(str(place.start) for place in profile.placements)
    raise refused(
        work.Kind.NOT_SUPPORTED,
        f"{gpu.address}: {profile.name} cannot begin at memory slice {start}; it can at {starts or 'none'}",
    )


def _at(gpu: _Gpu, partitions: Sequence[mig.Partition]) -> tuple[nvmlmig.Held, ...]:
    """The instances of these profiles that begin there."""
    wanted = {(each.profile_id, each.start) for each in partitions}
    return gpu.mig.instances(gpu.profiles, lambda profile_id, place: (profile_id, place.start) in wanted)


def _near(gpu: _Gpu, wanted: Sequence[_Wanted]) -> tuple[nvmlmig.Held, ...]:
    """The instances that overlap a wanted place."""
    return gpu.mig.instances(gpu.profiles, lambda _, place: any(place.overlaps(each.place) for each in wanted))


def _adopted(gpu: _Gpu, wanted: Sequence[_Wanted], *, begun: bool) -> dict[mig.Partition, nvmlmig.Held]:
    """The instances that are there already. Raises WorkError for those that are in the way."""
    adopted = {}
    for each in _near(gpu, wanted):
        for one in wanted:
            same = (each.profile_id, each.placement) == (one.profile.id, one.place)
            if begun and same and (each.uuid is not None or not each.computes):
                adopted[one.partition] = each
            elif each.placement.overlaps(one.place):
                raise _occupied(gpu, each, one)
    return adopted


def _occupied(gpu: _Gpu, held: nvmlmig.Held, wanted: _Wanted) -> errors.WorkError:
    return refused(
        work.Kind.OCCUPIED,
        f"{gpu.address}: the place of {wanted.profile.name} ({_slices(wanted.place)}) is occupied by {gpu.told(held)}, which "
        f"is not of this claim; {_NEXT_STEP}",
    )


def _why(gpu: _Gpu, wanted: Sequence[_Wanted], ours: Mapping[mig.Partition, nvmlmig.Held], err: Exception) -> Exception:
    """A failure to create, or the instance that somebody made since the look, and that explains it."""
    if isinstance(err, errors.SourceError) and err.kind == "insufficient-resources":
        with contextlib.suppress(errors.SourceError):
            mine = {each.gpu_instance for each in ours.values()}
            for held in _near(gpu, wanted):
                for one in wanted:
                    if held.gpu_instance not in mine and held.placement.overlaps(one.place):
                        return _occupied(gpu, held, one)
    return err


def _slices(place: mig.MigPlacement) -> str:
    if place.size == 1:
        return f"memory slice {place.start}"
    return f"memory slices {place.start} to {place.start + place.size - 1}"


def _pids(pids: Sequence[int]) -> str:
    if not pids:
        return ""
    more = f" and {len(pids) - _NAMED_PIDS} more" if len(pids) > _NAMED_PIDS else ""
    return f" (processes {', '.join(map(str, pids[:_NAMED_PIDS]))}{more})"
