# SPDX-License-Identifier: Apache-2.0
"""Decides whether a claim can have the devices that it was allocated, and what will be recorded of it. Pure.

The record decides who holds a device, not the scheduler: pods that were deleted by force, lost nodes and races allocate a
device to a second claim while containers of the first still use it. Devices are compared by what they need of a GPU, not by
their names: a GPU as a whole overlaps each of its parts, and two parts overlap where they share a memory slice.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from discovery import mig
from discovery.address import PciAddress
from driver import values
from driver.prepare import cdi, claimconfig, claims, found, ledger, tenancy

GpuDevice = found.GpuDevice
PartitionDevice = found.PartitionDevice
Device = found.Device
NotThere = found.NotThere
Rejection = found.Rejection
addresses = found.addresses


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """A claim that the record gives a device to, alone or in shares, and what it keeps of the device."""

    entry: ledger.Entry
    device: ledger.HeldDevice

    @property
    def claim(self) -> values.ClaimRef:
        """Whose it is."""
        return self.entry.claim


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuWork:
    """What is to be done with one GPU for a claim: instances are made at `wanted`, the partitions by the names of their devices;
    none: it has to be whole.
    """

    gpu: PciAddress
    toggle: bool
    wanted: Mapping[str, mig.Partition]


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparePlan:
    """What is recorded once it is carried out. `columns` is the entry as text, which both the record and the CDI file need.
    `displaced`: (device, claim UID) of holders from before a reboot. Where there is `work`, it comes first; where instances are
    to be made, or MPS has to know of shares, the entry is a *started* one, which `completed` and `enforced` make whole.
    `others`: who else has shares on its GPUs.
    """

    entry: ledger.Entry
    columns: ledger.Columns
    displaced: tuple[tuple[str, str], ...] = ()
    work: tuple[GpuWork, ...] = ()
    others: tuple[ledger.Entry, ...] = ()


def plan_prepare(
    allocation: claims.Allocation,
    *,
    devices: Mapping[str, Device | NotThere],
    holders: Sequence[Holder],
    dialect: cdi.Dialect,
    boot_id: str,
) -> PreparePlan | Rejection:
    """What to record for an allocation, or why not. `devices` has every device that the allocation names, `holders` who holds
    any part of their GPUs.

    Admin access neither takes a device nor is kept from it; it makes no instance, and changes no mode. A holder from another
    boot keeps nobody out: none of its containers lived through the reboot. Claims that have shares of one device stand beside
    each other as long as there is room for all.
    """
    planning = _Planning(allocation, devices, holders, boot_id)
    try:
        held = planning.held()
        displaced = planning.displaced(held)
        results = planning.results(held)
        pods = planning.pods(results)
    except _RejectedError as error:
        rejection = error.rejection
        return replace(rejection, message=f"{allocation.claim}: {rejection.message}")
    work = _work(devices[device.name] for device in held if device.name in planning.taken)
    begins = any(item.wanted for item in work) or any(
        result.share is not None and result.share.by_mps for result in results
    )
    hardware = ledger.hardware_of(part for item in work for part in item.wanted.values())
    entry = ledger.Entry(
        claim=allocation.claim,
        state=ledger.ClaimState.STARTED if begins else ledger.ClaimState.COMPLETED,
        boot_id=boot_id,
        devices=held,
        results=results,
        cdi_ids=tuple(
            (dialect.device_id(allocation.claim.uid, result.device, result.share_id), dialect.node_id)
            for result in allocation.results
        ),
        hardware=ledger.with_pods(hardware, pods),
    )
    return PreparePlan(
        entry=entry,
        columns=ledger.to_columns(entry),
        displaced=displaced,
        work=work,
        others=sharers(holders, allocation.claim, boot_id) if entry.held_in_shares else (),
    )


def sharers(holders: Iterable[Holder], claim: values.ClaimRef, boot_id: str) -> tuple[ledger.Entry, ...]:
    """The claims of this boot, but for one, that have shares among some holders."""
    return tuple(
        {
            holder.claim.uid: holder.entry
            for holder in holders
            if holder.device.room is not None and holder.entry.boot_id == boot_id and holder.claim.uid != claim.uid
        }.values()
    )


class _RejectedError(Exception):
    def __init__(self, rejection: Rejection) -> None:
        super().__init__(rejection.message)
        self.rejection = rejection


class _Planning:
    """The steps of `plan_prepare`, which raise _RejectedError."""

    def __init__(
        self,
        allocation: claims.Allocation,
        devices: Mapping[str, Device | NotThere],
        holders: Sequence[Holder],
        boot_id: str,
    ) -> None:
        self._allocation = allocation
        self._devices = devices
        self._here = [holder for holder in holders if holder.entry.boot_id == boot_id]
        self._before = [holder for holder in holders if holder.entry.boot_id != boot_id]
        self.taken = frozenset(result.device for result in allocation.results if not result.admin)

    def held(self) -> tuple[ledger.HeldDevice, ...]:
        """What is kept of each device."""
        kept = []
        for name in dict.fromkeys(result.device for result in self._allocation.results):
            taken = name in self.taken
            known = None if taken else next((h.device for h in self._here if h.device.name == name), None)
            device = found.held(name, self._devices[name], taken=taken, known=known)
            if isinstance(device, Rejection):
                raise _RejectedError(device)
            kept.append(replace(device, room=self._room(name)))
        mine = [device for device in kept if device.name in self.taken]
        for one, other in itertools.combinations(mine, 2):
            if ledger.overlap(one, other):
                raise _refused(
                    f"its own devices {one.name} and {other.name} overlap; the pod has to be scheduled again"
                )
        return tuple(kept)

    def displaced(self, held: Sequence[ledger.HeldDevice]) -> tuple[tuple[str, str], ...]:
        """Those from before a reboot that stand in the way; nobody of this boot may."""
        mine = [device for device in held if device.name in self.taken]
        displaced = []
        for holder in (*self._here, *self._before):
            wanted = next((device for device in mine if ledger.overlap(device, holder.device)), None)
            if wanted is None or holder.claim.uid == self._allocation.claim.uid or _beside(wanted, holder.device):
                continue
            if holder in self._here:
                raise _refused(held_message(wanted.name, holder), retryable=True)
            displaced.append((holder.device.name, str(holder.claim.uid)))
        return tuple(displaced)

    def results(self, held: Sequence[ledger.HeldDevice]) -> tuple[ledger.Result, ...]:
        """The results, with what each has of a device that is shared."""
        rooms = {device.name: device.room for device in held}
        results = tuple(
            self._result(number, result, None if result.admin else rooms[result.device])
            for number, result in enumerate(self._allocation.results)
        )
        for name, room in rooms.items():
            uses = [result.share for result in results if result.device == name and result.share is not None]
            refusal = None if room is None else tenancy.overdraft(room, uses, self._others(name), name)
            if refusal is not None:
                raise _refused(f"device {name}: {refusal.reason}", retryable=refusal.retryable)
        return results

    def pods(self, results: Sequence[ledger.Result]) -> tuple[str, ...]:
        """The pods whose cgroups get limits."""
        if not any(result.share is not None and result.share.cgroup_limit for result in results):
            return ()
        reason = tenancy.why_not_one_pod(self._allocation)
        if reason is not None:
            raise _refused(reason)
        return tuple(consumer.uid for consumer in self._allocation.consumers)

    def _result(self, number: int, result: ledger.Result, room: ledger.Room | None) -> ledger.Result:
        config = self._allocation.config(number)
        device = self._devices[result.device]
        unmet: claimconfig.Unmet | tenancy.Refusal | None = None
        if room is None:
            if not result.admin:
                unmet = claimconfig.exclusive(config, mig=isinstance(device, PartitionDevice))
        else:
            asked = result.request not in self._allocation.unasked
            use = tenancy.use_of(result, self._sharing(result.device), config=config, asked_compute=asked)
            if isinstance(use, ledger.ShareUse):
                return replace(result, share=use)
            unmet = use
        if unmet is not None:
            raise _refused(f"device {result.device}: {unmet.reason}")
        return result

    def _room(self, name: str) -> ledger.Room | None:
        """What there is of a device for shares; None where the claim has it alone, or has admin access only."""
        ids = [result.share_id for result in self._allocation.results if result.device == name and not result.admin]
        if ids.count(None) == len(ids):
            return None
        if len(set(ids)) < len(ids):
            raise _refused(
                f"device {name} was allocated to it twice under one share id; the pod has to be scheduled again"
            )
        if None in ids:
            raise _refused(
                f"device {name} was allocated to it as a whole and in shares; the pod has to be scheduled again"
            )
        alone = (holder for holder in self._here if holder.device.name == name and holder.device.room is None)
        for holder in alone:
            if holder.claim.uid != self._allocation.claim.uid:
                raise _refused(held_message(name, holder), retryable=True)
        others = self._others(name)
        theirs = {result.share_id for entry in others for result in entry.results if result.device == name}
        if not theirs.isdisjoint(ids):
            raise _refused(
                f"device {name}: another claim has a share of the same id; the pod has to be scheduled again"
            )
        room = tenancy.room_of(self._sharing(name), others, name)
        if isinstance(room, tenancy.Refusal):
            raise _refused(f"device {name}: {room.reason}", retryable=room.retryable)
        return room

    def _sharing(self, name: str) -> tenancy.Sharing:
        device = self._devices[name]
        assert not isinstance(device, NotThere)
        if device.sharing is None:
            raise _refused(
                f"device {name} was allocated to it in shares, and is not given out in shares now; `nearfield devices` says why. The pod "
                "has to be scheduled again if that stays",
                retryable=True,
            )
        return device.sharing

    def _others(self, name: str) -> tuple[ledger.Entry, ...]:
        """Who has shares of a device beside the claim."""
        holders = [
            holder.entry for holder in self._here if holder.device.name == name and holder.device.room is not None
        ]
        return tuple(entry for entry in holders if entry.claim.uid != self._allocation.claim.uid)


def _refused(message: str, *, retryable: bool = False) -> _RejectedError:
    return _RejectedError(Rejection(message=message, retryable=retryable))


def _beside(one: ledger.HeldDevice, other: ledger.HeldDevice) -> bool:
    """Whether two claims may have one device, each a share."""
    return one.name == other.name and one.room is not None and other.room is not None


def completed(planned: PreparePlan, made: Mapping[str, mig.MigInstance], *, at: float) -> PreparePlan | Rejection:
    """The plan with the instances that were made for its devices, by name, until `at` (seconds since the epoch)."""
    devices = []
    for device in planned.entry.devices:
        instance = made.get(device.name)
        if instance is not None and not instance.nodes:
            message = f"{planned.entry.claim}: {found.without_nodes(device.name, instance)}"
            return Rejection(message=message, retryable=True)
        devices.append(device if instance is None else found.with_instance(device, instance))
    hardware = {**planned.entry.hardware, **ledger.hardware_of(planned.entry.partitions, made_at=at)}
    entry = replace(planned.entry, state=ledger.ClaimState.COMPLETED, devices=tuple(devices), hardware=hardware)
    return replace(planned, entry=entry, columns=ledger.to_columns(entry), work=())


def enforced(planned: PreparePlan) -> PreparePlan:
    """The plan once its shares are kept apart."""
    if planned.entry.state is ledger.ClaimState.COMPLETED:
        return planned
    entry = replace(planned.entry, state=ledger.ClaimState.COMPLETED)
    return replace(planned, entry=entry, columns=ledger.to_columns(entry))


def joined(entry: ledger.Entry, pods: Iterable[str]) -> PreparePlan:
    """What is recorded of a prepared claim that more pods use, whose cgroups have limits, too."""
    known = dict.fromkeys((*entry.pods, *pods))
    entry = replace(entry, hardware=ledger.with_pods(entry.hardware, tuple(known)))
    return PreparePlan(entry=entry, columns=ledger.to_columns(entry))


def releasing(entry: ledger.Entry) -> PreparePlan:
    """What is recorded of a claim whose instances cannot be removed now."""
    entry = replace(entry, state=ledger.ClaimState.RELEASING)
    return PreparePlan(entry=entry, columns=ledger.to_columns(entry))


def again(entry: ledger.Entry, names: Collection[str], *, toggle: Mapping[str, bool]) -> PreparePlan:
    """A plan that makes the instances of some devices of a prepared claim again. `toggle`: as in GpuWork, by the names of GPUs."""
    wanted: dict[tuple[PciAddress, bool], dict[str, mig.Partition]] = {}
    for device in entry.devices:
        part = entry.partition_of(device) if device.name in names else None
        if part is not None:
            wanted.setdefault((part.gpu, toggle[values.gpu_of(device.name)]), {})[device.name] = part
    work = tuple(GpuWork(gpu=gpu, toggle=may, wanted=parts) for (gpu, may), parts in sorted(wanted.items()))
    return PreparePlan(entry=entry, columns=ledger.to_columns(entry), work=work)


def seen_again(entry: ledger.Entry, devices: Mapping[str, Device | NotThere]) -> PreparePlan | Rejection:
    """What to record of a prepared claim some of whose MIG instances somebody else has made again."""
    held = []
    for device in entry.devices:
        place = devices.get(device.name)
        if place is not None:
            seen = found.held(device.name, place, taken=True, known=None)
            if isinstance(seen, Rejection):
                return replace(seen, message=f"{entry.claim}: {seen.message}")
            device = replace(seen, room=device.room)  # noqa: PLW2901 - as it is now
        held.append(device)
    entry = replace(entry, devices=tuple(held))
    return PreparePlan(entry=entry, columns=ledger.to_columns(entry))


def held_message(device: str, holder: Holder) -> str:
    """Who has a device, or a part of the same GPU that it needs, and what to do about it."""
    other = holder.device.name
    which = f"device {other} is" if other == device else f"device {device} overlaps device {other}, which is"
    if holder.entry.state is ledger.ClaimState.RELEASING:
        return f"{which} still being put back after {holder.claim}"
    return f"{which} held by {holder.claim} until kubelet unprepares it; if no pod uses that claim any more, delete it"


def _work(devices: Iterable[Device | NotThere]) -> tuple[GpuWork, ...]:
    """What is to be done with each GPU, in order of their addresses."""
    gpus: dict[PciAddress, tuple[GpuDevice, dict[str, mig.Partition]]] = {}
    for device in devices:
        if isinstance(device, PartitionDevice):
            if device.dynamic:
                gpus.setdefault(device.gpu.address, (device.gpu, {}))[1][device.name] = device.partition
        elif isinstance(device, GpuDevice) and device.divisible:
            gpus[device.address] = (device, {})
    return tuple(GpuWork(gpu=place, toggle=gpu.toggle, wanted=wanted) for place, (gpu, wanted) in sorted(gpus.items()))
