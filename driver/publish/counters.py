# SPDX-License-Identifier: Apache-2.0
"""What the parts of one GPU share, in numbers that the scheduler counts with (KEP-4815, partitionable devices). Pure.

Every memory slice is a counter of its own, as an instance takes slices in a row at a place; multiprocessors and engines
are counted in sum. A part may be allocated while every counter has left what the part takes of it. That is what the driver
makes of every product whose table is public: memory slices decide alone, but for profiles with the one OFA engine or with
all media engines, which exclude each other.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from discovery import mig

Counters = Mapping[str, int]
"""Name of a counter -> how many."""

_SUMMED = ("multiprocessors", *mig.ENGINES)
"""Fields of a profile that are counted in sum."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Consumption:
    """What a device takes of a counter set while it is allocated. `totals` is the whole set as it is published: the same for all
    devices of the set, and kept with each so that it is known as long as one of them is.
    """

    counter_set: str
    counters: Counters
    totals: Counters


def memory_slice(number: int) -> str:
    """The counter of a memory slice."""
    return f"memory-slice-{number}"


def place(placement: mig.MigPlacement, whole: Counters) -> dict[str, int]:
    """The memory slices of a placement that `whole` has: no part takes another one."""
    return {name: 1 for number in placement.slices if (name := memory_slice(number)) in whole}


def taken(profile: mig.MigProfile, placement: mig.MigPlacement, whole: Counters) -> dict[str, int]:
    """What an instance takes of the counters of `whole`, which come from `totals`."""
    found = place(placement, whole)
    found |= {field.replace("_", "-"): getattr(profile, field) for field in _SUMMED}
    found |= {_guard(profile): 1}
    return {name: amount for name, amount in found.items() if amount > 0 and name in whole}


def totals(profiles: Iterable[mig.MigProfile]) -> dict[str, int]:
    """The counters of a GPU that can be divided in these ways: as much as the most that instances of one profile take at once,
    which the GPU has for certain. Where that would let in more instances of a profile than the GPU does, the profile has a
    counter of its own.
    """
    listed = tuple(profiles)
    found = {memory_slice(number): 1 for number in range(mig.memory_slices(listed))}
    for field in _SUMMED:
        most = max((getattr(profile, field) * max(1, profile.instances) for profile in listed), default=0)
        if most > 0:
            found[field.replace("_", "-")] = most
    for profile in listed:
        if profile.placements and _most_at_once(profile, found) > profile.instances:
            found[_guard(profile)] = profile.instances
    return found


def _guard(profile: mig.MigProfile) -> str:
    return f"profile-{profile.id}"


def _most_at_once(profile: mig.MigProfile, whole: Counters) -> int:
    """How many instances of one profile the memory slices, multiprocessors and engines let in."""
    count, free = 0, 0
    for placement in sorted(profile.placements, key=lambda placement: placement.start + placement.size):
        if placement.start >= free:
            count, free = count + 1, placement.start + placement.size
    for field in _SUMMED:
        if (each := getattr(profile, field)) > 0:
            count = min(count, whole[field.replace("_", "-")] // each)
    return count


def left(whole: Counters, used: Iterable[Counters]) -> dict[str, int]:
    """What remains of the counters; below 0 where more is used than there is."""
    remaining = dict(whole)
    for counters in used:
        for name, amount in counters.items():
            remaining[name] = remaining.get(name, 0) - amount
    return remaining


def fits(counters: Counters, remaining: Counters) -> bool:
    """Whether there is enough of every counter."""
    return all(remaining.get(name, 0) >= amount for name, amount in counters.items())
