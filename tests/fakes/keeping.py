# SPDX-License-Identifier: Apache-2.0
"""What keeps shares, as fakes that refuse what the real ones refuse: limits of cgroups and modes of GPUs, the MPS supervisor, turns."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from discovery import address, limits, work
from discovery.address import PciAddress
from discovery.errors import WorkError
from driver import values
from driver.errors import MpsError
from driver.mps import shares as mps
from driver.mps import values as mps_values
from driver.prepare import ledger
from driver.sharing.shares import Compute, Enforcement, Memory, TimeSlice

GPU = address.parse("0000:1b:00.0")
OTHER = address.parse("0000:3d:00.0")
BOOT_ID = "11111111-2222-3333-4444-555555555555"
GIB = 1 << 30


def pod_uid(number: int) -> str:
    """The UID of a pod."""
    return f"0000{number:04d}-9999-4bbb-8ccc-0123456789ab"


class Place(NamedTuple):
    """One cgroup on one GPU."""

    gpu: PciAddress
    cgroup: str


class Limiting:
    """The driver: limits of folders that are there, and compute modes. `fail`: raised by calls for a GPU."""

    def __init__(self) -> None:
        self.limits: dict[Place, limits.MemoryLimit] = {}
        self.used: dict[Place, int] = {}
        self.modes: dict[PciAddress, limits.ComputeMode] = {}
        self.fail: dict[PciAddress, WorkError] = {}
        self.calls: list[tuple[str, PciAddress]] = []

    def limit_memory(self, gpu: PciAddress, wanted: Mapping[str, limits.MemoryLimit], *, timeout_s: float) -> None:
        """As limits.Limiting."""
        self._called("limit-memory", gpu, timeout_s)
        assert wanted
        for cgroup, limit in wanted.items():
            assert cgroup.startswith("/")
            assert limit.hard is None or 0 <= limit.soft <= limit.hard
            if not Path(cgroup).is_dir():
                if limit != limits.NO_LIMIT:
                    raise WorkError(f"{cgroup} is not there", kind=work.Kind.FAILED, retryable=False)
                continue
            if limit == limits.NO_LIMIT:
                self.limits.pop(Place(gpu, cgroup), None)
            else:
                self.limits[Place(gpu, cgroup)] = limit

    def memory_use(
        self, gpu: PciAddress, cgroups: Sequence[str], *, timeout_s: float
    ) -> Mapping[str, limits.MemoryUse]:
        """As limits.Limiting."""
        self._called("memory-use", gpu, timeout_s)
        return {
            cgroup: limits.MemoryUse(
                limit=self.limits.get(Place(gpu, cgroup), limits.NO_LIMIT), used=self.used.get(Place(gpu, cgroup))
            )
            for cgroup in cgroups
            if Path(cgroup).is_dir()
        }

    def set_compute_mode(self, gpu: PciAddress, mode: limits.ComputeMode, *, timeout_s: float) -> limits.ComputeMode:
        """As limits.Limiting."""
        self._called("compute-mode", gpu, timeout_s)
        before = self.modes.get(gpu, limits.ComputeMode.DEFAULT)
        self.modes[gpu] = mode
        return before

    def of(self, gpu: PciAddress) -> dict[str, tuple[int, int | None]]:
        """Soft and hard limits on a GPU, by the names of the folders."""
        return {
            Path(place.cgroup).name: (limit.soft, limit.hard)
            for place, limit in self.limits.items()
            if place.gpu == gpu
        }

    def _called(self, what: str, gpu: PciAddress, timeout_s: float) -> None:
        assert timeout_s >= 0
        self.calls.append((what, gpu))
        if gpu in self.fail:
            raise self.fail[gpu]


class Supervisor:
    """The MPS supervisor. `down`: none listens; `refuse`: what it answers instead; `unplaceable`: that to `place`."""

    def __init__(self) -> None:
        self.shares: dict[tuple[str, str], mps.Share] = {}
        self.down = False
        self.refuse: MpsError | None = None
        self.unplaceable: MpsError | None = None
        self.instance = "one"
        self.change = 0
        self.daemons: dict[str, mps_values.Daemon] = {}
        self._changed = threading.Condition()

    def place(self, share: mps.Share, *, timeout_s: float) -> None:
        """As client.Client."""
        self._reach(timeout_s)
        if self.unplaceable is not None:
            raise self.unplaceable
        with self._changed:
            self.shares[share.device, share.share_id] = share
            self._move()

    def place_all(self, wanted: Sequence[mps.Share], *, timeout_s: float) -> Mapping[tuple[str, str], MpsError]:
        """As client.Client."""
        failed: dict[tuple[str, str], MpsError] = {}
        for share in wanted:
            try:
                self.place(share, timeout_s=timeout_s)
            except MpsError as error:
                failed[share.device, share.share_id] = error
        return failed

    def remove(self, device: str, share_id: str, *, timeout_s: float) -> None:
        """As client.Client."""
        self._reach(timeout_s)
        with self._changed:
            if self.shares.pop((device, share_id), None) is not None:
                self._move()

    def status(self, *, timeout_s: float) -> mps_values.Status:
        """As client.Client."""
        self._reach(timeout_s)
        return self._status()

    def wait(self, seen: mps_values.Status | None, *, timeout_s: float) -> mps_values.Status:
        """As client.Client."""
        self._reach(timeout_s)
        with self._changed:
            self._changed.wait_for(
                lambda: seen is None or (seen.instance, seen.change) != (self.instance, self.change), timeout_s
            )
        self._reach(timeout_s)
        return self._status()

    def restart(self) -> None:
        """It ended, and another one is there: with nothing."""
        with self._changed:
            self.instance += "'"
            self.shares.clear()
            self.daemons.clear()
            self.change = 0
            self._changed.notify_all()

    def tell(self, daemon: mps_values.Daemon) -> None:
        """A daemon is in another state."""
        with self._changed:
            self.daemons[daemon.device] = daemon
            self._move()

    def _move(self) -> None:
        self.change += 1
        self._changed.notify_all()

    def _status(self) -> mps_values.Status:
        daemons = dict(self.daemons)
        for device, _ in self.shares:
            ids = tuple(share_id for of, share_id in self.shares if of == device)
            share = self.shares[device, ids[0]]
            daemons.setdefault(
                device,
                mps_values.Daemon(
                    device=device,
                    uuid=share.uuid,
                    protocol=share.protocol,
                    state=mps_values.DaemonState.RUNNING,
                    shares=ids,
                ),
            )
        return mps_values.Status(instance=self.instance, change=self.change, daemons=daemons)

    def _reach(self, timeout_s: float) -> None:
        assert timeout_s >= 0
        if self.down:
            raise MpsError("No MPS supervisor answers", retryable=True) from FileNotFoundError("supervisor.sock")
        if self.refuse is not None:
            raise self.refuse


@dataclass
class Slices:
    """Turns of GPUs, by UUID."""

    turns: dict[str, TimeSlice] = field(default_factory=dict)
    calls: int = 0
    fail: WorkError | None = None

    def problem(self) -> str | None:
        """As timeslices.TimeSlices."""
        return None

    def get(self, uuid: str, *, timeout_s: float) -> TimeSlice | None:
        """As timeslices.TimeSlices."""
        self._called(timeout_s)
        return self.turns.get(uuid, TimeSlice.DEFAULT)

    def set(self, uuid: str, turn: TimeSlice, *, timeout_s: float) -> None:
        """As timeslices.TimeSlices."""
        self._called(timeout_s)
        self.turns[uuid] = turn

    def _called(self, timeout_s: float) -> None:
        assert timeout_s >= 0
        self.calls += 1
        if self.fail is not None:
            raise self.fail


@dataclass
class Events:
    """Events that were written: (object, reason, message)."""

    told: list[tuple[values.ClaimRef | str, str, str]] = field(default_factory=list)

    def claim(self, claim: values.ClaimRef, *, reason: str, message: str, warning: bool = True) -> None:
        """As events.EventRecorder."""
        assert warning
        self.told.append((claim, reason, message))

    def pod(self, namespace: str, name: str, uid: str, *, reason: str, message: str, warning: bool = True) -> None:
        """As events.EventRecorder."""
        assert warning
        assert namespace
        assert uid
        self.told.append((name, reason, message))


def uuid_of(gpu: PciAddress) -> str:
    """The UUID of a GPU."""
    return f"GPU-{gpu.label}"


def share(
    number: int,
    *,
    gpu: PciAddress = GPU,
    memory: int = 4 * GIB,
    pods: Sequence[int] = (),
    by: Enforcement | None = None,
    soft: int | None = None,
    turn: TimeSlice = TimeSlice.DEFAULT,
    whole: bool = False,
    state: ledger.ClaimState = ledger.ClaimState.COMPLETED,
) -> ledger.Entry:
    """A claim with one share of a GPU."""
    levels = by or Enforcement(memory=Memory.CGROUP, compute=Compute.NONE)
    name = values.gpu_device_name(gpu)
    use = ledger.ShareUse(
        memory=memory,
        compute=None if levels.compute is Compute.TIMESLICE else 25,
        enforcement=levels,
        memory_limit=None if whole else memory,
        soft_limit=soft,
        compute_limit=None if whole or levels.compute is Compute.TIMESLICE else 25,
        time_slice=turn,
    )
    uid = f"0000{number:04d}-aaaa-4bbb-8ccc-0123456789ab"
    return ledger.Entry(
        claim=values.ClaimRef(uid=values.ClaimUid(uid), namespace="team-a", name=f"claim-{number}"),
        state=state,
        boot_id=BOOT_ID,
        devices=(
            ledger.HeldDevice(
                name=name,
                address=str(gpu),
                uuid=uuid_of(gpu),
                nodes=("/dev/nvidia0",),
                room=ledger.Room(memory=80 * GIB, compute=use.compute and 100, sharers=8),
            ),
        ),
        results=(ledger.Result(request="gpu", pool="node-1", device=name, share_id=f"share-{number}", share=use),),
        cdi_ids=(("gpu.nearfield.dev/claim=x",),),
        hardware={"pods": [pod_uid(pod) for pod in pods]} if pods else {},
    )


class PodTree:
    """A cgroup tree with the cgroups of pods."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "kubepods" / "burstable").mkdir(parents=True)

    def add(self, *pods: int) -> None:
        """Pods come."""
        for pod in pods:
            self.path(pod).mkdir()

    def remove(self, pod: int) -> None:
        """A pod goes."""
        self.path(pod).rmdir()

    def path(self, pod: int) -> Path:
        """The cgroup of a pod."""
        return self.root / "kubepods" / "burstable" / f"pod{pod_uid(pod)}"


@contextlib.contextmanager
def failing(limiting: Limiting, gpu: PciAddress, kind: work.Kind = work.Kind.LOST) -> Iterator[None]:
    """A GPU on which nothing can be set for a while."""
    limiting.fail[gpu] = WorkError(f"{gpu}: {kind}", kind=kind, retryable=kind is work.Kind.TIMEOUT)
    try:
        yield
    finally:
        del limiting.fail[gpu]
