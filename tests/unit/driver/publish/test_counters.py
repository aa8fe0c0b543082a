# SPDX-License-Identifier: Apache-2.0
"""Counters let the scheduler give away what the hardware has room for, and no more.

Aspects: the names and totals; any set of partitions is let in by the counters exactly when the hardware takes it; a profile
that can be had less often than the counters would let it; nothing at all.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest

from discovery import mig
from driver.publish import counters
from tests.fakes import migtables

Placed = tuple[mig.MigProfile, mig.MigPlacement]


def hardware_takes(placed: Sequence[Placed]) -> bool:
    """What NVML checks when an instance is made: its memory slices are free, its profile has instances left, and media engines
    that only one can have are free. Multiprocessors and copy engines come with the slices.
    """
    slices = [number for _, placement in placed for number in placement.slices]
    if len(set(slices)) != len(slices):
        return False
    times = Counter(profile.id for profile, _ in placed)
    return all(times[profile.id] <= profile.instances for profile, _ in placed)


def counters_let_in(placed: Sequence[Placed], whole: counters.Counters) -> bool:
    remaining = counters.left(whole, (counters.taken(profile, placement, whole) for profile, placement in placed))
    return all(amount >= 0 for amount in remaining.values())


def layouts(profiles: Sequence[mig.MigProfile], count: int) -> Iterator[list[Placed]]:
    """Random sets of partitions: some that overlap, most that do not."""
    chance = random.Random(7)
    places = [(profile, placement) for profile in profiles for placement in profile.placements]
    for _ in range(count):
        placed: list[Placed] = []
        for profile, placement in chance.sample(places, len(places)):
            clash = any(placement.overlaps(other) for _, other in placed)
            if not clash or chance.random() < 0.01:
                placed.append((profile, placement))
        yield placed[: chance.randint(1, len(placed))]


@pytest.mark.parametrize("name", ["h100", "a100", "a30"])
def test_the_counters_let_in_what_the_hardware_takes(name: str) -> None:
    profiles = migtables.TABLES[name]
    whole = counters.totals(profiles)
    answers: Counter[bool] = Counter()
    for placed in layouts(profiles, 4000):
        takes = hardware_takes(placed)
        # Several profiles have the one OFA engine, so each has one instance and they exclude each other.
        takes = takes and sum(profile.ofa_engines for profile, _ in placed) <= 1
        assert counters_let_in(placed, whole) is takes, [(profile.name, place.start) for profile, place in placed]
        answers[takes] += 1
    assert min(answers.values()) > 100


def test_media_engines_are_counted_where_profiles_take_all_or_none_of_them() -> None:
    whole = counters.totals(migtables.RTX)
    for placed in layouts(migtables.RTX, 2000):
        takes = hardware_takes(placed) and all(
            sum(getattr(profile, field) for profile, _ in placed) <= getattr(migtables.RTX[-1], field)
            for field in mig.ENGINES
        )
        assert counters_let_in(placed, whole) is takes


@pytest.mark.parametrize("name", sorted(migtables.TABLES))
def test_every_profile_can_be_had_as_often_as_the_gpu_says(name: str) -> None:
    profiles = migtables.TABLES[name]
    whole = counters.totals(profiles)
    for profile in profiles:
        places: list[mig.MigPlacement] = []
        for placement in profile.placements:
            if len(places) < profile.instances and not any(map(placement.overlaps, places)):
                places.append(placement)
        assert len(places) == profile.instances
        assert counters_let_in([(profile, place) for place in places], whole)


def test_the_counters_of_an_h100() -> None:
    slices = {f"memory-slice-{number}": 1 for number in range(8)}
    engines = {"copy-engines": 8, "decoders": 7, "jpeg-engines": 7, "ofa-engines": 1}
    whole = counters.totals(migtables.H100)
    assert whole == {**slices, "multiprocessors": 132, **engines}
    middle = migtables.H100[4]
    assert counters.taken(middle, middle.placements[1], whole) == {
        "memory-slice-4": 1,
        "memory-slice-5": 1,
        "memory-slice-6": 1,
        "memory-slice-7": 1,
        "multiprocessors": 60,
        "copy-engines": 3,
        "decoders": 3,
        "jpeg-engines": 3,
    }


def test_a_total_is_what_instances_of_one_profile_have_together() -> None:
    smallest = replace(migtables.A30[0], copy_engines=2)
    assert counters.totals((smallest, migtables.A30[-1]))["copy-engines"] == 8


def test_a_profile_with_fewer_instances_than_room_has_a_counter_of_its_own() -> None:
    rare = replace(migtables.A30[0], id=77, name="1g.6gb+rare", instances=2)
    whole = counters.totals((*migtables.A30, rare))
    assert [name for name in whole if name.startswith("profile-")] == ["profile-77"]
    assert whole["profile-77"] == 2
    three = [(rare, place) for place in rare.placements[:3]]
    assert counters_let_in(three[:2], whole)
    assert not counters_let_in(three, whole)
    plain = [(migtables.A30[0], place) for place in rare.placements]
    assert counters_let_in(plain, whole)


def test_nothing_to_count_is_no_counter() -> None:
    assert counters.totals(()) == {}
