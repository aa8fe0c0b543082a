# SPDX-License-Identifier: Apache-2.0
"""What a claim has of a device that is given out in shares, as values and as the JSON that is kept of them. Pure.

What is charged and what is held are apart: a claim is charged what the scheduler wrote down for it, and may be held to less, or
to nothing where nobody else can have a part of the device.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from driver.prepare import typed
from driver.sharing import shares

_MOST_BYTES = (1 << 63) - 1
"""The most that a Quantity of the API holds as a number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """What there is of a device for its shares together: bytes, percent of the multiprocessors of the whole GPU (None where shares
    take turns), and shares.
    """

    memory: int
    compute: int | None
    sharers: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareUse:
    """One share. `memory` in bytes and `compute` in percent of the whole GPU are what it is charged; `compute` is None where shares
    take turns. The limits are what it may use, None: as much as there is; they are there at every level of enforcement,
    and `enforcement` says what holds them.
    """

    memory: int
    compute: int | None
    enforcement: shares.Enforcement
    memory_limit: int | None = None
    """Bytes."""
    soft_limit: int | None = None
    """Bytes above which others may take memory from it (`cgroup`); None: that is the limit."""
    compute_limit: int | None = None
    """Percent of the device, as MPS takes it: of the instance, where the device is a MIG instance."""
    below_normal: bool = False
    """Its work waits for that of others (MPS)."""
    time_slice: shares.TimeSlice = shares.TimeSlice.DEFAULT
    """How long a turn on its device is (`timeslice`)."""

    @property
    def cgroup_limit(self) -> bool:
        """Whether the pod's cgroup has a limit for it."""
        return self.enforcement.memory is shares.Memory.CGROUP and self.memory_limit is not None

    @property
    def enforced(self) -> bool:
        """Whether something is set for it that has to be put back."""
        levels = self.enforcement
        return self.cgroup_limit or levels.by_mps or levels.by_legacy_mps or levels.compute is shares.Compute.TIMESLICE

    @property
    def by_mps(self) -> bool:
        """Whether its programs are clients of MPS, of either protocol."""
        return self.enforcement.by_mps or self.enforcement.by_legacy_mps


@dataclass(frozen=True, slots=True, kw_only=True)
class Total:
    """What some shares have together, or what is left beside them."""

    memory: int
    compute: int
    sharers: int


def total(uses: Iterable[ShareUse]) -> Total:
    """What shares are charged together."""
    found = tuple(uses)
    return Total(
        memory=sum(use.memory for use in found), compute=sum(use.compute or 0 for use in found), sharers=len(found)
    )


def left(room: Room, uses: Iterable[ShareUse]) -> Total:
    """What is left of a device beside some shares; negative where they are more than there is. Compute is 0 where shares take
    turns.
    """
    used = total(uses)
    return Total(
        memory=room.memory - used.memory,
        compute=0 if room.compute is None else room.compute - used.compute,
        sharers=room.sharers - used.sharers,
    )


def fits(room: Room, uses: Iterable[ShareUse]) -> bool:
    """Whether some shares are together no more than there is."""
    found = left(room, uses)
    return min(found.memory, found.compute, found.sharers) >= 0


def to_object(use: ShareUse) -> dict[str, Any]:
    """A share as JSON; what is as always is left out."""
    numbers = {
        "memory": use.memory,
        "compute": use.compute,
        "memoryLimit": use.memory_limit,
        "softLimit": use.soft_limit,
        "computeLimit": use.compute_limit,
    }
    document: dict[str, Any] = {key: number for key, number in numbers.items() if number is not None}
    document["memoryEnforcement"] = use.enforcement.memory.value
    document["computeEnforcement"] = use.enforcement.compute.value
    if use.below_normal:
        document["belowNormal"] = True
    if use.time_slice is not shares.TimeSlice.DEFAULT:
        document["timeSlice"] = use.time_slice.value
    return document


def from_object(value: Any) -> ShareUse:
    """The share in JSON. Raises DamagedError."""
    document = typed.mapping(value)
    try:
        enforcement = shares.Enforcement(
            memory=shares.Memory(typed.string(document, "memoryEnforcement")),
            compute=shares.Compute(typed.string(document, "computeEnforcement")),
        )
        time_slice = shares.TimeSlice(typed.text(document.get("timeSlice", shares.TimeSlice.DEFAULT.value)))
    except ValueError as error:
        raise typed.DamagedError(str(error)) from error
    return ShareUse(
        memory=_amount(document.get("memory")),
        compute=_optional(document, "compute"),
        enforcement=enforcement,
        memory_limit=_optional(document, "memoryLimit"),
        soft_limit=_optional(document, "softLimit"),
        compute_limit=_optional(document, "computeLimit"),
        below_normal=document.get("belowNormal") is True,
        time_slice=time_slice,
    )


def room_to_object(room: Room) -> dict[str, Any]:
    """What there is of a device, as JSON."""
    document = {"memory": room.memory, "sharers": room.sharers}
    return document if room.compute is None else document | {"compute": room.compute}


def room_from_object(value: Any) -> Room:
    """What there is of a device, from JSON. Raises DamagedError."""
    document = typed.mapping(value)
    return Room(
        memory=_amount(document.get("memory")),
        compute=_optional(document, "compute"),
        sharers=_amount(document.get("sharers")),
    )


def _optional(document: Mapping[str, Any], key: str) -> int | None:
    return _amount(document[key]) if key in document else None


def _amount(value: Any) -> int:
    """A number that is none below zero: one would make room for others."""
    number = typed.number(value)
    if not 0 <= number <= _MOST_BYTES:
        raise typed.DamagedError(f"{typed.shown(value)} is no amount")
    return number
