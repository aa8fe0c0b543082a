# SPDX-License-Identifier: Apache-2.0
"""What a claim gets of a device that is given out in shares, and whether there is room for it. Pure.

The scheduler writes down what it charges each share, and keeps the sum below the device. It is added up again here, over what the
record holds: claims that were deleted by force, lost nodes and races let a scheduler give away what containers still use.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from driver import quantity
from driver.prepare import claimconfig, claims, ledger, shareuse
from driver.sharing import shares

LEAST_BYTES = 1 << 20
"""Limits of MPS are whole MiB, and 0 would be none."""

_MOST = 1 << 63
_CLAIMS_SHOWN = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharing:
    """How a device is given out in shares now."""

    terms: shares.Terms
    policy: shares.Shares
    enforcement: shares.Enforcement

    @property
    def room(self) -> ledger.Room:
        """What there is for all shares together."""
        compute = self.terms.compute
        return ledger.Room(
            memory=self.terms.memory.value,
            compute=None if compute is None else compute.value,
            sharers=self.terms.sharers,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """Why there is no share. `retryable`: waiting may help."""

    reason: str
    retryable: bool = False


def use_of(
    result: ledger.Result, sharing: Sharing, *, config: claimconfig.ClaimConfig, asked_compute: bool
) -> ledger.ShareUse | Refusal:
    """What one result has of its device. `asked_compute`: whether its request named an amount of compute; where it did not, and the
    admin charges such shares less than all of it, nothing limits its compute. A share with all the memory has the device to
    itself, and no limits.
    """
    terms = sharing.terms
    memory = _charged(result, claims.MEMORY, least=LEAST_BYTES)
    if isinstance(memory, Refusal):
        return memory
    compute: int | None = None
    if terms.compute is not None:
        charged = _charged(result, claims.COMPUTE, least=1)
        if isinstance(charged, Refusal):
            return charged
        compute = charged
    alone = memory >= terms.memory.most
    free = alone or compute is None or terms.compute is None or compute >= terms.compute.most
    if not asked_compute and sharing.policy.default_compute is not None:
        free = True
    limits = claimconfig.held(
        config,
        memory=memory,
        compute=compute,
        memory_limit=None if alone else memory,
        compute_limit=None if free else compute,
        enforcement=sharing.enforcement,
    )
    if isinstance(limits, claimconfig.Unmet):
        return Refusal(reason=limits.reason)
    return ledger.ShareUse(
        memory=memory,
        compute=compute,
        enforcement=sharing.enforcement,
        memory_limit=limits.memory,
        soft_limit=None if limits.soft == limits.memory else limits.soft,
        compute_limit=_of_device(limits.compute, terms.compute),
        below_normal=limits.below_normal,
        time_slice=sharing.policy.time_slice,
    )


def _of_device(percent: int | None, compute: shares.Capacity | None) -> int | None:
    """Percent of the whole GPU as percent of the device, which may be a MIG instance; rounded down, but never to nothing."""
    if percent is None or compute is None:
        return None
    return min(shares.COMPUTE_WHOLE, max(1, shares.COMPUTE_WHOLE * percent // compute.value))


def _charged(result: ledger.Result, capacity: str, *, least: int) -> int | Refusal:
    text = result.consumed_capacity.get(capacity)
    if text is None:
        return Refusal(
            reason=f"its share was allocated without an amount of {capacity}: by other rules than it is shared by now; the pod has to "
            "be scheduled again"
        )
    try:
        amount = math.ceil(quantity.parse(text))
    except ValueError as error:
        return Refusal(reason=f"the {capacity} of its share cannot be read: {error}")
    if not least <= amount < _MOST:
        return Refusal(
            reason=f"the {capacity} of its share is {claims.shown(text)}, which is no amount that is given out"
        )
    return amount


def room_of(sharing: Sharing, others: Sequence[ledger.Entry], device: str) -> ledger.Room | Refusal:
    """What there is of a device for its shares, and for those that `others` have of it: never more than any of them was told."""
    rooms = [sharing.room]
    for entry in others:
        held = next(held for held in entry.devices if held.name == device)
        uses = ledger.uses_of(entry, device)
        if held.room is not None:
            rooms.append(held.room)
        if any(use.enforcement != sharing.enforcement for use in uses):
            return Refusal(
                reason=f"it is shared by rules that have changed, and by the former ones as long as it is in use by {_named(others)}",
                retryable=True,
            )
    computes = [room.compute for room in rooms if room.compute is not None]
    return ledger.Room(
        memory=min(room.memory for room in rooms),
        compute=min(computes) if sharing.room.compute is not None else None,
        sharers=min(room.sharers for room in rooms),
    )


def overdraft(
    room: ledger.Room, wanted: Sequence[ledger.ShareUse], others: Sequence[ledger.Entry], device: str
) -> Refusal | None:
    """Why the wanted shares are more than there is beside those of others, None where they are not."""
    held = [use for entry in others for use in ledger.uses_of(entry, device)]
    if shareuse.fits(room, [*held, *wanted]):
        return None
    has = _amounts(room.memory, room.compute, room.sharers)
    mine = _total(wanted, room)
    if not shareuse.fits(room, wanted):
        return Refusal(reason=f"it has {has}, and the claim wants {mine} of it; the pod has to be scheduled again")
    return Refusal(
        reason=f"it has {has}, of which {_named(others)} {_verb(others, 'hold')} {_total(held, room)}, and the claim wants {mine}. There is room when "
        "kubelet unprepares such a claim; if no pod uses one any more, delete it",
        retryable=True,
    )


def why_not_one_pod(allocation: claims.Allocation) -> str | None:
    """Why the limit of a cgroup cannot hold a claim: it holds the programs of one pod. None where it can."""
    consumers = allocation.consumers
    if len(consumers) == 1 and consumers[0].pod:
        return None
    way = (
        "and its memory is held by a limit on the cgroup of one pod. Give each pod a claim of its own (a ResourceClaimTemplate), or "
        "select devices whose memoryEnforcement is mps"
    )
    if not consumers:
        return f"it is reserved for no pod, {way}"
    other = next((consumer for consumer in consumers if not consumer.pod), None)
    if other is not None:
        return f"it is reserved for {other.kind} {claims.shown(other.name)}, {way}"
    names = ", ".join(claims.shown(consumer.name) for consumer in consumers[:_CLAIMS_SHOWN])
    more = f" and {len(consumers) - _CLAIMS_SHOWN} more" if len(consumers) > _CLAIMS_SHOWN else ""
    return f"it is reserved for {len(consumers)} pods ({names}{more}), {way}"


def _named(entries: Sequence[ledger.Entry]) -> str:
    names = [str(entry.claim) for entry in entries[:_CLAIMS_SHOWN]]
    if len(entries) > _CLAIMS_SHOWN:
        return f"{', '.join(names)} and {len(entries) - _CLAIMS_SHOWN} more"
    return " and ".join(names)


def _verb(entries: Sequence[ledger.Entry], verb: str) -> str:
    return f"{verb}s" if len(entries) == 1 else verb


def _total(uses: Sequence[ledger.ShareUse], room: ledger.Room) -> str:
    found = shareuse.total(uses)
    return _amounts(found.memory, None if room.compute is None else found.compute, found.sharers)


def _amounts(memory: int, compute: int | None, sharers: int) -> str:
    percent = "" if compute is None else f", {compute} percent of compute"
    return f"{memory / (1 << 30):.4g}Gi of memory{percent} and {sharers} share{'' if sharers == 1 else 's'}"
