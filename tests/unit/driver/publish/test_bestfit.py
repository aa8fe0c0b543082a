# SPDX-License-Identifier: Apache-2.0
"""The order of partitions.

Aspects: the order of profiles and of each profile's placements; after random sequences first fit leaves room for more large
instances than ascending order does; input in any order gives the same.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from discovery import mig
from driver.publish import bestfit
from tests.fakes import migtables

Placed = tuple[mig.MigProfile, mig.MigPlacement]


def starts(profiles: Sequence[mig.MigProfile]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for profile, placement in bestfit.order(tuple(profiles)):
        found.setdefault(profile.name, []).append(placement.start)
    return found


def test_an_h100() -> None:
    assert list(starts(migtables.H100).items()) == [
        ("1g.10gb", [6, 5, 4, 3, 2, 1, 0]),
        ("1g.10gb+me", [6, 5, 4, 3, 2, 1, 0]),
        ("1g.20gb", [6, 4, 2, 0]),
        ("2g.20gb", [4, 2, 0]),
        ("3g.40gb", [4, 0]),
        ("4g.40gb", [0]),
        ("7g.80gb", [0]),
    ]


def test_an_a30() -> None:
    found = starts(migtables.A30)
    assert found["1g.6gb"] == [3, 2, 1, 0]
    assert found["2g.12gb"] == [2, 0]


def test_plain_profiles_stand_before_their_variants() -> None:
    assert list(starts(migtables.RTX)) == [
        "1g.24gb",
        "1g.24gb+me",
        "1g.24gb+me.all",
        "1g.24gb-me",
        "2g.48gb",
        "2g.48gb+me.all",
        "4g.96gb",
    ]


def test_only_what_is_offered_counts() -> None:
    """Where only the smallest and the 3g are offered, a 4g that nobody can have keeps no room."""
    chosen = [profile for profile in migtables.H100 if profile.name in {"1g.10gb", "3g.40gb"}]
    assert starts(chosen) == {"1g.10gb": [6, 5, 4, 3, 2, 1, 0], "3g.40gb": [4, 0]}


@pytest.mark.parametrize("name", sorted(migtables.TABLES))
def test_the_order_depends_on_the_profiles_alone(name: str) -> None:
    profiles = list(migtables.TABLES[name])
    expected = bestfit.order(tuple(profiles))
    random.Random(3).shuffle(profiles)
    assert bestfit.order(tuple(profiles)) == expected
    assert len(expected) == sum(len(profile.placements) for profile in profiles)


def large_ones_left(order: Sequence[Placed], *, larger: int, chance: random.Random) -> int:
    """Places for the largest profiles that are left after small ones came and went by first fit."""
    small = [profile for profile, _ in order if profile.slices < larger]
    held: list[Placed] = []
    total = 0
    for _ in range(60):
        if held and chance.random() < 0.45:
            held.pop(chance.randrange(len(held)))
        else:
            wanted = chance.choice(small)
            fitting = (
                (profile, place)
                for profile, place in order
                if profile is wanted and not any(place.overlaps(other) for _, other in held)
            )
            if (found := next(fitting, None)) is not None and len(held) < 3:
                held.append(found)
        total += sum(
            not any(place.overlaps(other) for _, other in held) for profile, place in order if profile.slices >= larger
        )
    return total


@pytest.mark.parametrize(("name", "larger", "gain"), [("h100", 3, 1.25), ("a100", 3, 1.25), ("a30", 2, 1.0)])
def test_first_fit_leaves_room_for_more_large_instances_than_ascending_order(
    name: str, larger: int, gain: float
) -> None:
    profiles = [profile for profile in migtables.TABLES[name] if profile.instances > 1 or profile.slices >= larger]
    best = bestfit.order(tuple(profiles))
    ascending = sorted(best, key=lambda pair: pair[1].start)
    ours = sum(large_ones_left(best, larger=larger, chance=random.Random(seed)) for seed in range(200))
    theirs = sum(large_ones_left(ascending, larger=larger, chance=random.Random(seed)) for seed in range(200))
    assert ours >= gain * theirs
