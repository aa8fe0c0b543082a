# SPDX-License-Identifier: Apache-2.0
"""Decides whether a claim can have the devices that it was allocated, and what will be recorded of it. Pure.

The record decides who holds a device, not the scheduler: pods that were deleted by force, lost nodes and races allocate a
device to a second claim while containers of the first still use it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from discovery import model
from discovery.address import PciAddress
from driver import values
from driver.prepare import cdi, claims, ledger


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuDevice:
    """A published GPU as it was last seen."""

    name: str
    address: PciAddress
    state: model.GpuState
    reason: str | None = None
    uuid: str | None = None
    minor: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NotThere:
    """Why a device name stands for nothing now. `retryable`: it may soon."""

    reason: str
    retryable: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """The claim that the record gives a device to."""

    claim: values.ClaimRef
    boot_id: str
    state: ledger.ClaimState


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparePlan:
    """What is recorded once it is carried out. `columns` is the entry as text, which both the record and the CDI file need.
    `displaced`: (device, claim UID) of holders from before a reboot.
    """

    entry: ledger.Entry
    columns: ledger.Columns
    displaced: tuple[tuple[str, str], ...] = ()


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
    devices: Mapping[str, GpuDevice | NotThere],
    holders: Mapping[str, Holder],
    dialect: cdi.Dialect,
    boot_id: str,
) -> PreparePlan | Rejection:
    """What to record for an allocation, or why not. `devices` has every device that the allocation names.

    Admin access neither takes a device nor is kept from it. A holder from another boot keeps nobody out: none of its
    containers lived through the reboot.
    """
    held: list[ledger.HeldDevice] = []
    for name in dict.fromkeys(result.device for result in allocation.results):
        found = devices[name]
        if isinstance(found, NotThere):
            return Rejection(
                message=f"{allocation.claim}: device {claims.shown(name)}: {found.reason}",
                retryable=found.retryable,
                look_again=found.retryable,
            )
        if found.state is not model.GpuState.READY or found.uuid is None or found.minor is None:
            passing = found.state in _PASSING
            return Rejection(
                message=f"{allocation.claim}: device {name} is not usable ({found.state}): "
                f"{found.reason or 'its UUID or its minor number is not known'}",
                retryable=passing,
                look_again=passing,
            )
        held.append(
            ledger.HeldDevice(
                name=name, address=str(found.address), uuid=found.uuid, nodes=(f"/dev/nvidia{found.minor}",)
            )
        )
    entry = ledger.Entry(
        claim=allocation.claim,
        state=ledger.ClaimState.COMPLETED,
        boot_id=boot_id,
        devices=tuple(held),
        results=allocation.results,
        cdi_ids=tuple(
            (dialect.device_id(allocation.claim.uid, result.device, result.share_id), dialect.node_id)
            for result in allocation.results
        ),
    )
    displaced = []
    for name in entry.holds:
        holder = holders.get(name)
        if holder is None or holder.claim.uid == allocation.claim.uid:
            continue
        if holder.boot_id == boot_id:
            return Rejection(message=f"{allocation.claim}: {held_message(name, holder)}", retryable=True)
        displaced.append((name, str(holder.claim.uid)))
    return PreparePlan(entry=entry, columns=ledger.to_columns(entry), displaced=tuple(displaced))


def held_message(device: str, holder: Holder) -> str:
    """Who has a device, and what to do about it."""
    if holder.state is ledger.ClaimState.RELEASING:
        return f"device {device} is still being put back after {holder.claim}"
    return f"device {device} is held by {holder.claim} until kubelet unprepares it; if no pod uses that claim any more, delete it"
