# SPDX-License-Identifier: Apache-2.0
"""What can still be made of a GPU beside the MIG instances that it has. Pure.

An instance takes memory slices in a row, multiprocessors and engines. NVML tells no totals of these; a GPU has at least as many
as all instances of one profile take that it can have at once (nvmlGpuInstanceProfileInfo_t, instanceCount).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from discovery import mig

_COUNTED = ("multiprocessors", *mig.ENGINES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """A place that an instance has or that a claim holds. A profile that the GPU does not tell of takes its memory slices only."""

    profile_id: int
    placement: mig.MigPlacement


@dataclass(frozen=True, slots=True, kw_only=True)
class Left:
    """What is left of a GPU.

    `placeable`: id of each offered profile -> how many instances of it there is room for, if no other is made. `stranded`:
    memory slices that are free and that no instance of an offered profile can have any more.
    """

    placeable: Mapping[int, int] = field(default_factory=dict)
    stranded: frozenset[int] = frozenset()


def left(profiles: Sequence[mig.MigProfile], *, taken: Iterable[Taken], offered: Collection[int]) -> Left:
    """What is left beside what is taken. `offered`: ids of the profiles that can be had. A GPU of which nothing is taken has
    nothing stranded, as all of it can be had.
    """
    places = tuple(taken)
    known = {profile.id: profile for profile in profiles}
    free = frozenset(range(mig.memory_slices(tuple(profiles))))
    for place in places:
        free -= frozenset(place.placement.slices)
    counted = {
        name: max((getattr(profile, name) * profile.instances for profile in profiles), default=0)
        - sum(getattr(known[place.profile_id], name) for place in places if place.profile_id in known)
        for name in _COUNTED
    }
    placeable: dict[int, int] = {}
    reachable: set[int] = set()
    for profile in profiles:
        if profile.id not in offered:
            continue
        fitting = [place for place in profile.placements if free.issuperset(place.slices)]
        made = sum(place.profile_id == profile.id for place in places)
        placeable[profile.id] = max(0, min(_apart(fitting), profile.instances - made, *_times(profile, counted)))
        if placeable[profile.id]:
            reachable |= {number for place in fitting for number in place.slices}
    return Left(placeable=placeable, stranded=frozenset(free - reachable) if places else frozenset())


def _times(profile: mig.MigProfile, counted: Mapping[str, int]) -> list[int]:
    """How often each of the GPU's counted parts suffices for the profile."""
    return [rest // need for name, rest in counted.items() if (need := getattr(profile, name)) > 0]


def _apart(places: Iterable[mig.MigPlacement]) -> int:
    """The most places of which no two overlap: taking the one that ends first, again and again, finds them."""
    found, end = 0, 0
    for place in sorted(places, key=lambda place: place.start + place.size):
        if place.start >= end:
            found, end = found + 1, place.start + place.size
    return found
