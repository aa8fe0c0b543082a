# SPDX-License-Identifier: Apache-2.0
"""The order in which the partitions of one GPU are offered, so that first fit leaves room for the largest. Pure.

Profiles: the smallest first, so that a claim for anything that is large enough takes no more than it needs, and of one size
the plain one before its variants (`+me`, `+gfx`, `-me`), whose engines are scarce.

Placements of one profile: one after the other, each time the one that takes the last room from the fewest placements
of the largest profile, of those from the fewest of the next smaller one, and so on; the highest start where several are alike. What
an earlier placement has blocked already costs nothing more. On a GPU of seven compute slices that is 6, 5, 4, 3, 2, 1, 0 for
`1g`, as `4g` and a `3g` need 0 to 3 and 2g pairs them from 0, and 4 before 0 for `3g`, as `4g` starts at 0 only.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence

from discovery import mig

_PLAIN = re.compile(r"[0-9]+g\.[0-9]+gb", re.ASCII)

_Rivals = dict[tuple[int, int], set[mig.MigPlacement]]
"""Places by what goes there: memory slices and compute slices."""


@functools.lru_cache(maxsize=16)
def order(profiles: tuple[mig.MigProfile, ...]) -> tuple[tuple[mig.MigProfile, mig.MigPlacement], ...]:
    """Every profile at every placement, in the order in which they are offered. Kept, as the GPUs of a node are mostly alike."""
    listed = sorted(profiles, key=_size)
    rivals: _Rivals = {}
    for profile in listed:
        for placement in profile.placements:
            rivals.setdefault((placement.size, profile.slices), set()).add(placement)
    return tuple((profile, placement) for profile in listed for placement in placements(profile.placements, rivals))


def placements(own: Sequence[mig.MigPlacement], rivals: _Rivals) -> tuple[mig.MigPlacement, ...]:
    """The placements of one profile in the order of the rule above. `rivals`: all that could stand on the GPU."""
    left = list(dict.fromkeys(own))
    free = {kind: set(places) for kind, places in rivals.items()}
    ordered: list[mig.MigPlacement] = []

    def cost(placement: mig.MigPlacement) -> tuple[list[int], int]:
        blocked = [sum(map(placement.overlaps, free[kind])) for kind in sorted(free, reverse=True)]
        return blocked, -placement.start

    while left:
        best = min(left, key=cost)
        left.remove(best)
        ordered.append(best)
        free = {kind: {place for place in places if not place.overlaps(best)} for kind, places in free.items()}
    return tuple(ordered)


def _size(profile: mig.MigProfile) -> tuple[int, int, bool, str, int]:
    return profile.slices, profile.memory_bytes, _PLAIN.fullmatch(profile.name) is None, profile.name, profile.id
