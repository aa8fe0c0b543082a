# SPDX-License-Identifier: Apache-2.0
"""The MIG tables of the catalogue: what is public of placements and ids, and what must hold of any table.

Sets of instances are searched through completely: every one that needs no memory slice twice and no profile too often also finds
enough multiprocessors and engines, but for those in `SHORT_OF_ENGINES`.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cache

import pytest

from discovery.mock import machine, migrules, migstate, products, state, zoo

COUNTED = ("multiprocessors", "copy_engines", "decoders", "encoders", "jpeg_engines", "ofa_engines")

SEVEN = {
    19: ("0123456", 1),
    20: ("0123456", 1),
    15: ("0246", 2),
    14: ("024", 2),
    9: ("04", 4),
    5: ("0", 4),
    0: ("0", 8),
}
"""Profile id -> places and size: nvidia-smi mig -lgipp of A100, H100, H100 NVL and, with these, all with seven compute slices."""
A30 = {14: ("0123", 1), 21: ("0123", 1), 5: ("02", 2), 6: ("02", 2), 0: ("0", 4)}
RTX = {
    **dict.fromkeys((14, 21, 47, 65, 67), ("0369", 3)),
    **dict.fromkeys((5, 35, 64, 66), ("06", 6)),
    **dict.fromkeys((0, 32), ("0", 12)),
}

WITHOUT_A_TABLE = {"nvidia-gb300"}

PLAIN = ("1g.24gb", "1g.24gb+gfx", "1g.24gb+me", "2g.48gb", "2g.48gb+gfx")
ALL = ("1g.24gb+me.all", "2g.48gb+me.all")
SHORT_OF_ENGINES: dict[str, set[tuple[str, ...]]] = {
    "nvidia-a30": {("1g.6gb+me", "2g.12gb+me")},  # one JPEG and one OFA engine for all
    "nvidia-rtx-pro-6000-server": {*(tuple(sorted(pair)) for pair in itertools.product(PLAIN, ALL)), ALL},
}
"""The smallest sets that have room in memory and are refused all the same, names in order."""


@cache
def _catalogue() -> Mapping[str, products.Gpu]:
    return {name: gpu for name, gpu in zoo.catalogue().gpus.items() if gpu.mig is not None}


def _table(name: str) -> tuple[state.MigProfile, ...]:
    mig = _catalogue()[name].mig
    assert mig is not None
    return migstate.build(mig, None, machine.MigTimes(), gpu="GPU-0", place=()).profiles


TABLES = pytest.mark.parametrize("name", sorted(_catalogue().keys() - WITHOUT_A_TABLE))


def _sets(profiles: tuple[state.MigProfile, ...]) -> Iterator[tuple[state.MigProfile, ...]]:
    """Every set of instances that do not overlap, at every place, each with no profile too often."""
    slices = migrules.memory_slices(profiles)
    chosen: list[state.MigProfile] = []

    def fill(start: int) -> Iterator[tuple[state.MigProfile, ...]]:
        if start == slices:
            yield tuple(chosen)
            return
        yield from fill(start + 1)
        for profile in profiles:
            for place in profile.placements:
                if place.start == start and chosen.count(profile) < profile.instances:
                    chosen.append(profile)
                    yield from fill(start + place.size)
                    chosen.pop()

    return fill(0)


def test_which_gpus_have_a_table() -> None:
    assert {name for name, gpu in _catalogue().items() if gpu.mig and not gpu.mig.profiles} == WITHOUT_A_TABLE
    assert len(_catalogue()) == 13


@TABLES
def test_ids_and_places_are_those_that_are_public(name: str) -> None:
    expected = {"nvidia-a30": A30, "nvidia-rtx-pro-6000-server": RTX}.get(name, SEVEN)
    starts = {
        profile.id: ({place.start for place in profile.placements}, {place.size for place in profile.placements})
        for profile in _table(name)
    }
    assert starts == {number: ({int(digit) for digit in places}, {size}) for number, (places, size) in expected.items()}


@TABLES
def test_the_whole_gpu_is_a_profile_and_no_other_has_more(name: str) -> None:
    gpu, profiles = _catalogue()[name], _table(name)
    (whole, *_more) = (
        profile for profile in profiles if profile.placements[0].size == migrules.memory_slices(profiles)
    )
    assert whole.id == 0
    assert whole.memory_mib << 20 < gpu.memory
    assert whole.multiprocessors <= gpu.multiprocessors
    for profile in profiles:
        for each in (*COUNTED, "memory_mib"):
            one, all_of_it = getattr(profile, each), getattr(whole, each)
            assert one <= all_of_it, (profile.name, each)
            assert one * profile.instances <= all_of_it, (profile.name, each)
    assert gpu.mig is not None
    assert gpu.mig.devices == max(profile.instances for profile in profiles)


@TABLES
def test_a_name_says_slices_and_its_share_of_the_memory(name: str) -> None:
    """By the rule of NVIDIA's go-nvlib, which makes the same names of what NVML tells: eighths, rounded up, of the GPU's GiB."""
    total = _catalogue()[name].memory
    gib = -(-total // (1 << 30))
    for profile in _table(name):
        eighths = -(-(profile.memory_mib << 20) * 8 // total)
        assert profile.name.partition("+")[0].removesuffix("-me") == f"{profile.slices}g.{(eighths * gib + 4) // 8}gb"


@TABLES
def test_suffixes_say_which_engines_a_profile_has(name: str) -> None:
    profiles = {profile.name: profile for profile in _table(name)}
    whole = profiles[next(key for key, profile in profiles.items() if profile.id == 0)]
    for key, profile in profiles.items():
        media = (profile.decoders, profile.encoders, profile.jpeg_engines, profile.ofa_engines)
        assert profile.graphics == key.endswith("+gfx")
        if key.endswith("-me"):
            assert media == (0, 0, 0, 0)
        if key.endswith(("+me", "+me.all")):
            plain = profiles[key.partition("+")[0]]
            assert (profile.memory_mib, profile.multiprocessors) == (plain.memory_mib, plain.multiprocessors)
            assert (profile.ofa_engines, plain.ofa_engines, profile.instances) == (1, 0, 1)
        if key.endswith("+me.all"):
            assert media == (whole.decoders, whole.encoders, whole.jpeg_engines, whole.ofa_engines)


@TABLES
def test_instances_beside_each_other_find_what_they_need(name: str) -> None:
    profiles = _table(name)
    slices = max(profile.slices for profile in profiles)
    totals = {each: max(getattr(profile, each) for profile in profiles) for each in COUNTED}
    short: set[tuple[str, ...]] = set()
    seen: set[tuple[str, ...]] = set()
    for chosen in _sets(profiles):
        names = tuple(sorted(profile.name for profile in chosen))
        if names not in seen:
            seen.add(names)
            assert sum(profile.slices for profile in chosen) <= slices
            if any(sum(getattr(profile, each) for profile in chosen) > totals[each] for each in COUNTED):
                short.add(names)
    smallest = {
        names for names in short if not any(other != names and not Counter(other) - Counter(names) for other in short)
    }
    assert smallest == SHORT_OF_ENGINES.get(name, set())


@TABLES
def test_one_compute_instance_takes_all_of_a_gpu_instance(name: str) -> None:
    for profile in _table(name):
        (whole,) = (
            each
            for each in profile.compute
            if (each.slices, each.multiprocessors) == (profile.slices, profile.multiprocessors)
        )
        assert (whole.name, whole.instances) == (profile.name, 1)
        assert whole.placements == (state.MigPlacement(start=0, size=profile.slices),)
        for each in profile.compute:
            assert each.instances * each.slices <= profile.slices
            assert each.instances * each.multiprocessors <= profile.multiprocessors
            assert each is whole or each.name == f"{each.slices}c.{profile.name}"


def _lcip(name: str, profile: str) -> list[tuple[str, int, int, int]]:
    """The columns of nvidia-smi mig -lcip: name, profile id, total and multiprocessors."""
    (found,) = (each for each in _table(name) if each.name == profile)
    return [(each.name, each.id, each.instances, each.multiprocessors) for each in found.compute]


def test_compute_instances_are_those_that_are_public() -> None:
    assert _lcip("nvidia-a100-sxm4-40gb", "1g.5gb") == [("1g.5gb", 0, 1, 14)]
    assert _lcip("nvidia-a100-sxm4-40gb", "3g.20gb") == [
        ("1c.3g.20gb", 0, 3, 14),
        ("2c.3g.20gb", 1, 1, 28),
        ("3g.20gb", 2, 1, 42),
    ]
    assert _lcip("nvidia-a100-sxm4-80gb", "4g.40gb") == [
        ("1c.4g.40gb", 0, 4, 14),
        ("2c.4g.40gb", 1, 2, 28),
        ("4g.40gb", 3, 1, 56),
    ]
    assert _lcip("nvidia-a100-sxm4-40gb", "7g.40gb") == [
        ("1c.7g.40gb", 0, 7, 14),
        ("2c.7g.40gb", 1, 3, 28),
        ("3c.7g.40gb", 2, 2, 42),
        ("4c.7g.40gb", 3, 1, 56),
        ("7g.40gb", 4, 1, 98),
    ]
    assert _lcip("nvidia-a30", "2g.12gb") == [("1c.2g.12gb", 0, 2, 14), ("2g.12gb", 1, 1, 28)]
    assert _lcip("nvidia-rtx-pro-6000-server", "2g.48gb") == [("1c.2g.48gb", 0, 2, 46), ("2g.48gb", 1, 1, 94)]


def test_one_slice_with_more_multiprocessors_is_taken_whole_by_another_profile() -> None:
    assert _lcip("nvidia-gh200-480gb", "1g.24gb") == [("1c.1g.24gb", 0, 1, 16), ("1g.24gb", 7, 1, 26)]
    assert _lcip("nvidia-h100-pcie-80gb", "1g.20gb") == [("1g.20gb", 0, 1, 14)]
    assert _lcip("nvidia-a100-sxm4-40gb", "1g.10gb") == [("1g.10gb", 0, 1, 14)]


@pytest.mark.parametrize(
    ("slices", "start", "size", "instance"),
    [
        *((8, start, 1, 7 + start) for start in range(7)),  # nvidia-smi mig -lgi: 1g at 2:1 is 9, at 3:1 is 10
        (8, 0, 2, 3),
        (8, 6, 2, 6),
        (8, 0, 4, 1),
        (8, 4, 4, 2),
        (8, 0, 8, 0),
        (4, 0, 1, 3),  # A30
        (4, 1, 1, 4),
        (4, 2, 2, 2),
        (12, 0, 3, 3),  # RTX PRO 6000
        (12, 9, 3, 6),
        (12, 0, 6, 1),
    ],
)
def test_ids_of_gpu_instances(slices: int, start: int, size: int, instance: int) -> None:
    assert migrules.instance_id(state.MigPlacement(start=start, size=size), slices) == instance


@TABLES
def test_instances_that_stand_beside_each_other_have_different_ids(name: str) -> None:
    profiles = _table(name)
    slices = migrules.memory_slices(profiles)
    ids: dict[int, set[tuple[int, int]]] = {}
    for profile in profiles:
        for place in profile.placements:
            ids.setdefault(migrules.instance_id(place, slices), set()).add((place.start, place.size))
    assert all(len(places) == 1 for places in ids.values())
