# SPDX-License-Identifier: Apache-2.0
"""What is left of a GPU beside its instances, compared with trying everything out.

- an H100: empty, beside each instance, beside pairs; the seven small ones; what only an engine keeps out
- profiles that are not offered count for nothing, but what is taken counts whatever it is
- instances of a profile that nobody knows
- any table, anything taken: as many as an exhaustive search finds, and stranded is what no search reaches
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from discovery import mig
from driver.sharing import placing
from tests.fakes.divided import H100, profile

ALL = frozenset(entry.id for entry in H100)
NAMES = {entry.id: entry.name for entry in H100}


def at(number: int, start: int) -> placing.Taken:
    (size,) = {place.size for entry in H100 if entry.id == number for place in entry.placements}
    return placing.Taken(profile_id=number, placement=mig.MigPlacement(start=start, size=size))


def placeable(*taken: placing.Taken, offered: Collection[int] = ALL) -> dict[str, int]:
    """By name, zeros left out."""
    found = placing.left(H100, taken=taken, offered=offered).placeable
    return {NAMES[number]: count for number, count in found.items() if count}


def stranded(*taken: placing.Taken, offered: Collection[int] = ALL) -> list[int]:
    return sorted(placing.left(H100, taken=taken, offered=offered).stranded)


def test_an_empty_gpu() -> None:
    assert placeable() == {
        "1g.10gb": 7,
        "1g.10gb+me": 1,
        "1g.20gb": 4,
        "2g.20gb": 3,
        "3g.40gb": 2,
        "4g.40gb": 1,
        "7g.80gb": 1,
    }
    assert stranded() == []
    assert stranded(offered={19}) == []


def test_beside_small_ones() -> None:
    # The last memory slice is reached by the larger ones only.
    assert placeable(at(19, 0)) == {"1g.10gb": 6, "1g.10gb+me": 1, "1g.20gb": 3, "2g.20gb": 2, "3g.40gb": 1}
    assert placeable(*(at(19, start) for start in range(7))) == {}
    assert stranded(*(at(19, start) for start in range(7))) == [7]
    assert stranded(at(19, 4), at(19, 6)) == [7]
    assert placeable(at(19, 3), at(19, 4)) == {"1g.10gb": 5, "1g.10gb+me": 1, "1g.20gb": 2, "2g.20gb": 1}


def test_beside_large_ones() -> None:
    assert placeable(at(9, 4)) == {
        "1g.10gb": 4,
        "1g.10gb+me": 1,
        "1g.20gb": 2,
        "2g.20gb": 2,
        "3g.40gb": 1,
        "4g.40gb": 1,
    }
    assert placeable(at(9, 4), at(5, 0)) == {}
    assert stranded(at(9, 4), at(5, 0)) == []
    assert placeable(at(0, 0)) == {}


def test_an_engine_that_is_taken() -> None:
    assert "1g.10gb+me" not in placeable(at(20, 0))
    assert placeable(at(20, 0))["1g.10gb"] == 6


def test_what_is_not_offered() -> None:
    assert placing.left(H100, taken=(), offered={9}).placeable == {9: 2}
    assert placeable(at(19, 0), offered={9}) == {"3g.40gb": 1}
    assert stranded(at(19, 0), offered={9}) == [1, 2, 3]
    assert stranded(at(19, 0), at(19, 6), offered={9, 0}) == [1, 2, 3, 4, 5, 7]


def test_a_profile_that_nobody_knows() -> None:
    foreign = placing.Taken(profile_id=77, placement=mig.MigPlacement(start=0, size=3))
    assert placeable(foreign)["1g.10gb"] == 4
    beyond = placing.Taken(profile_id=77, placement=mig.MigPlacement(start=6, size=40))
    assert placeable(beyond) == {"1g.10gb": 6, "1g.10gb+me": 1, "1g.20gb": 3, "2g.20gb": 3, "3g.40gb": 1, "4g.40gb": 1}


def test_a_gpu_without_profiles() -> None:
    assert placing.left((), taken=(), offered=()) == placing.Left()
    assert placing.left((), taken=[at(19, 0)], offered=ALL) == placing.Left()


def rest(profiles: Sequence[mig.MigProfile], taken: Sequence[placing.Taken], name: str) -> int:
    known = {entry.id: entry for entry in profiles}
    most = max(getattr(entry, name) * entry.instances for entry in profiles)
    return int(most - sum(getattr(known[place.profile_id], name) for place in taken))


def fits(profiles: Sequence[mig.MigProfile], taken: Sequence[placing.Taken]) -> bool:
    """Whether a GPU can have these instances at once."""
    apart = not any(a.placement.overlaps(b.placement) for a, b in itertools.combinations(taken, 2))
    few = all(sum(place.profile_id == entry.id for place in taken) <= entry.instances for entry in profiles)
    return apart and few and all(rest(profiles, taken, name) >= 0 for name in ("multiprocessors", "ofa_engines"))


@st.composite
def tables(draw: st.DrawFn) -> tuple[mig.MigProfile, ...]:
    """GPUs with up to six memory slices and three profiles, as odd as they can be."""
    found = []
    for number in range(draw(st.integers(1, 3))):
        size = draw(st.integers(1, 3))
        starts = draw(st.lists(st.integers(0, 6 - size), min_size=1, max_size=5, unique=True))
        found.append(
            profile(
                number,
                f"{size}g.x",
                size,
                sorted(starts),
                draw(st.integers(0, 4)),
                instances=draw(st.integers(0, 4)),
                ofa=draw(st.integers(0, 2)),
            )
        )
    return tuple(found)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_as_many_as_trying_everything_finds(data: st.DataObject) -> None:
    profiles = data.draw(tables())
    every = [placing.Taken(profile_id=entry.id, placement=place) for entry in profiles for place in entry.placements]
    taken: list[placing.Taken] = []
    for place in data.draw(st.lists(st.sampled_from(every), max_size=4)):
        if fits(profiles, [*taken, place]):
            taken.append(place)
    offered = data.draw(st.sets(st.sampled_from([entry.id for entry in profiles])))
    found = placing.left(profiles, taken=taken, offered=offered)
    assert found.placeable.keys() == offered
    reached: set[int] = set()
    for number in offered:
        own = [place for place in every if place.profile_id == number]
        most = max(
            count
            for count in range(len(own) + 1)
            for more in itertools.combinations(own, count)
            if fits(profiles, [*taken, *more])
        )
        assert found.placeable[number] == most
        reached |= {part for place in own if fits(profiles, [*taken, place]) for part in place.placement.slices}
    used = {part for place in taken for part in place.placement.slices}
    free = set(range(mig.memory_slices(profiles))) - used
    assert found.stranded == (free - reached if taken else set())
