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

from discovery import mig, model
from discovery.address import PciAddress
from driver import values
from driver.prepare import cdi, claims, ledger


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuDevice:
    """A published GPU as it was last seen. `divisible`: the agent divides it by MIG at need, and has to see that it is whole
    before it is used as a whole; `divided`: somebody else keeps MIG enabled on it.
    """

    name: str
    address: PciAddress
    state: model.GpuState
    reason: str | None = None
    uuid: str | None = None
    minor: int | None = None
    divisible: bool = False
    divided: bool = False
    toggle: bool = False
    """Whether the agent may change its MIG mode."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionDevice:
    """A place for a MIG instance on a GPU as it was last seen. `instance`: the one that was there then; `dynamic`: the agent makes
    one for a claim and removes it afterwards, otherwise what is there is used.
    """

    name: str
    gpu: GpuDevice
    partition: mig.Partition
    place: mig.MigPlacement
    instance: mig.MigInstance | None = None
    dynamic: bool = False


Device = GpuDevice | PartitionDevice


@dataclass(frozen=True, slots=True, kw_only=True)
class NotThere:
    """Why a device name stands for nothing now. `retryable`: it may soon."""

    reason: str
    retryable: bool


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
    to be made the entry is a *started* one, which `completed` makes whole with what was made.
    """

    entry: ledger.Entry
    columns: ledger.Columns
    displaced: tuple[tuple[str, str], ...] = ()
    work: tuple[GpuWork, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejection:
    """Why a claim cannot be prepared. `retryable`: waiting may help. `look_again`: a new look at the hardware may, too."""

    message: str
    retryable: bool
    look_again: bool = False


_PASSING = frozenset({model.GpuState.NO_DRIVER, model.GpuState.UNREADABLE})
"""States of a GPU whose driver is being loaded, as after a reboot, when kubelet has pods prepared before it is there."""


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
    boot keeps nobody out: none of its containers lived through the reboot.
    """
    taken = frozenset(result.device for result in allocation.results if not result.admin)
    held: list[ledger.HeldDevice] = []
    for name in dict.fromkeys(result.device for result in allocation.results):
        here = (holder.device for holder in holders if holder.device.name == name and holder.entry.boot_id == boot_id)
        known = None if name in taken else next(here, None)
        device = _held(name, devices[name], taken=name in taken, known=known)
        if isinstance(device, Rejection):
            return replace(device, message=f"{allocation.claim}: {device.message}")
        held.append(device)
    mine = [device for device in held if device.name in taken]
    for one, other in itertools.combinations(mine, 2):
        if ledger.overlap(one, other):
            return Rejection(
                message=f"{allocation.claim}: its own devices {one.name} and {other.name} overlap; the pod has to be "
                "scheduled again",
                retryable=False,
            )
    displaced: list[tuple[str, str]] = []
    for holder in holders:
        if holder.claim.uid == allocation.claim.uid:
            continue
        wanted = next((device for device in mine if ledger.overlap(device, holder.device)), None)
        if wanted is None:
            continue
        if holder.entry.boot_id == boot_id:
            return Rejection(message=f"{allocation.claim}: {held_message(wanted.name, holder)}", retryable=True)
        displaced.append((holder.device.name, str(holder.claim.uid)))
    work = _work([found for found in (devices[device.name] for device in mine) if not isinstance(found, NotThere)])
    entry = ledger.Entry(
        claim=allocation.claim,
        state=ledger.ClaimState.STARTED if any(item.wanted for item in work) else ledger.ClaimState.COMPLETED,
        boot_id=boot_id,
        devices=tuple(held),
        results=allocation.results,
        cdi_ids=tuple(
            (dialect.device_id(allocation.claim.uid, result.device, result.share_id), dialect.node_id)
            for result in allocation.results
        ),
        hardware=ledger.hardware_of(part for item in work for part in item.wanted.values()),
    )
    return PreparePlan(entry=entry, columns=ledger.to_columns(entry), displaced=tuple(displaced), work=work)


def completed(planned: PreparePlan, made: Mapping[str, mig.MigInstance], *, at: float) -> PreparePlan | Rejection:
    """The plan with the instances that were made for its devices, by name, until `at` (seconds since the epoch)."""
    devices = []
    for device in planned.entry.devices:
        instance = made.get(device.name)
        if instance is not None and not instance.nodes:
            message = f"{planned.entry.claim}: {_without_nodes(device.name, instance)}"
            return Rejection(message=message, retryable=True)
        devices.append(device if instance is None else _with_instance(device, instance))
    hardware = ledger.hardware_of(planned.entry.partitions, made_at=at)
    entry = replace(planned.entry, state=ledger.ClaimState.COMPLETED, devices=tuple(devices), hardware=hardware)
    return replace(planned, entry=entry, columns=ledger.to_columns(entry), work=())


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
        found = devices.get(device.name)
        if found is not None:
            seen = _held(device.name, found, taken=True, known=None)
            if isinstance(seen, Rejection):
                return replace(seen, message=f"{entry.claim}: {seen.message}")
            device = seen  # noqa: PLW2901 - as it is now
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


def _held(
    name: str, found: Device | NotThere, *, taken: bool, known: ledger.HeldDevice | None
) -> ledger.HeldDevice | Rejection:
    """What is kept of a device. `known`: what the record has of it, for admin access beside the one who has it."""
    if isinstance(found, NotThere):
        return Rejection(
            message=f"device {claims.shown(name)}: {found.reason}",
            retryable=found.retryable,
            look_again=found.retryable,
        )
    gpu = found if isinstance(found, GpuDevice) else found.gpu
    if gpu.state is not model.GpuState.READY or gpu.uuid is None or gpu.minor is None:
        passing = gpu.state in _PASSING
        return Rejection(
            message=f"device {name} is not usable ({gpu.state}): "
            f"{gpu.reason or 'its UUID or its minor number is not known'}",
            retryable=passing,
            look_again=passing,
        )
    nodes = (f"/dev/nvidia{gpu.minor}",)
    if isinstance(found, GpuDevice):
        if found.divided and taken:
            return Rejection(
                message=f"device {name} is not usable as a whole: MIG is enabled on it, and this GPU is not of mode "
                "mig-dynamic; disable MIG (`nvidia-smi -mig 0`), or change its sharing rule",
                retryable=False,
                look_again=True,
            )
        return ledger.HeldDevice(name=name, address=str(gpu.address), uuid=gpu.uuid, nodes=nodes)
    device = ledger.HeldDevice(name=name, address=str(gpu.address), uuid="", nodes=nodes, place=found.place)
    if found.dynamic and taken:
        return device
    if known is not None and known.uuid:
        return replace(device, uuid=known.uuid, caps=known.caps)
    if found.instance is None or not found.instance.whole:
        return Rejection(
            message=f"device {name}: there is no MIG instance at its place now"
            + ("" if taken else ", and admin access makes none"),
            retryable=True,
            look_again=True,
        )
    if not found.instance.nodes:
        return Rejection(message=_without_nodes(name, found.instance), retryable=True, look_again=True)
    return _with_instance(device, found.instance)


def _with_instance(device: ledger.HeldDevice, instance: mig.MigInstance) -> ledger.HeldDevice:
    return replace(device, uuid=instance.uuid or "", caps=instance.nodes)


def _without_nodes(name: str, instance: mig.MigInstance) -> str:
    return (
        f"device {name}: the capability nodes of its MIG instance (GPU instance {instance.gpu_instance}) could not be read "
        "below /proc/driver/nvidia/capabilities: does the agent see the host's /proc?"
    )


def _work(devices: Iterable[Device]) -> tuple[GpuWork, ...]:
    """What is to be done with each GPU, in order of their addresses."""
    found: dict[PciAddress, tuple[GpuDevice, dict[str, mig.Partition]]] = {}
    for device in devices:
        if isinstance(device, PartitionDevice):
            if device.dynamic:
                found.setdefault(device.gpu.address, (device.gpu, {}))[1][device.name] = device.partition
        elif device.divisible:
            found[device.address] = (device, {})
    return tuple(GpuWork(gpu=place, toggle=gpu.toggle, wanted=wanted) for place, (gpu, wanted) in sorted(found.items()))


def addresses(devices: Iterable[Device | NotThere]) -> Sequence[PciAddress]:
    """The GPUs that devices are, or are parts of."""
    return [
        device.address if isinstance(device, GpuDevice) else device.gpu.address
        for device in devices
        if not isinstance(device, NotThere)
    ]
