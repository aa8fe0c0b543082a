# SPDX-License-Identifier: Apache-2.0
"""The order in which GPUs are offered to a scheduler that takes the first ones that fit.

- groups stand together, what breaks the least comes first: smaller islands, GPUs in no quad, GPUs in no pair
- for any node: whatever number of GPUs was taken from the front, at most one island, one quad and one pair is partly taken
- the order depends on the set of GPUs alone, and one that fails moves no other
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from discovery import model
from discovery.address import PciAddress
from driver.publish import devices, ordering
from tests.fakes import publishing

OPTIONS = publishing.OPTIONS
LEVELS: tuple[Callable[[model.Gpu], PciAddress | None], ...] = (
    lambda gpu: gpu.groups.nvlink_domain,
    lambda gpu: gpu.groups.aligned_quad,
    lambda gpu: gpu.groups.aligned_pair,
)


def grouped(
    bus: int, *, domain: int | None = None, quad: int | None = None, pair: int | None = None, node: int | None = 0
) -> model.Gpu:
    def group(value: int | None) -> PciAddress | None:
        return publishing.at(value) if value is not None else None

    groups = model.GpuGroups(
        nvlink_domain=group(domain), nvlink_clique=group(domain), aligned_pair=group(pair), aligned_quad=group(quad)
    )
    return publishing.gpu(bus, groups=groups, pci={"numa_node": node})


def buses(gpus: Iterable[model.Gpu]) -> list[int]:
    return [gpu.address.bus for gpu in gpus]


DGX = tuple(grouped(bus, domain=1, quad=1 + 4 * (bus > 4), pair=bus - (bus + 1) % 2) for bus in range(1, 9))
SIX = (
    grouped(1, quad=1, pair=1),
    grouped(2, quad=1, pair=1),
    grouped(3, quad=1, pair=3),
    grouped(4, quad=1, pair=3),
    grouped(5, pair=5),
    grouped(6, pair=5),
)
SPLIT = (
    grouped(1, domain=1),
    grouped(2, domain=1),
    grouped(3, domain=1),
    grouped(4, domain=4),
    grouped(5, domain=4),
    grouped(6),
)
CROSSED = tuple(
    grouped(bus, domain=1, quad=quad, pair=pair)
    for bus, quad, pair in ((1, 1, 1), (2, 1, 2), (3, 1, 2), (4, 1, 1), (5, 5, 5), (6, 5, 6), (7, 5, 6), (8, 5, 5))
)
"""Double NVLinks as in a hybrid cube mesh: the best pairs are not neighbours on the bus."""


@st.composite
def nodes(draw: st.DrawFn) -> tuple[model.Gpu, ...]:
    """GPUs in islands and outside, in pairs and quads that are nested, at addresses in any order, some in no NUMA node."""
    pools = draw(st.lists(st.tuples(st.integers(1, 9), st.booleans()), min_size=1, max_size=4))
    addresses = iter(draw(st.permutations(range(1, 1 + sum(size for size, _ in pools)))))
    made = []
    for size, island in pools:
        node = draw(st.sampled_from((None, 0, 1)))
        members = [next(addresses) for _ in range(size)]
        for start in range(0, size, 2):
            pair = members[start : start + 2]
            quad = members[start - start % 4 : start - start % 4 + 4]
            made += [
                grouped(
                    bus,
                    domain=min(members) if island and size > 1 else None,
                    quad=min(quad) if len(quad) == 4 else None,
                    pair=min(pair) if len(pair) == 2 else None,
                    node=node,
                )
                for bus in pair
            ]
    return tuple(made)


def partly_taken(gpus: tuple[model.Gpu, ...], taken: int, level: Callable[[model.Gpu], PciAddress | None]) -> int:
    def sizes(members: Iterable[model.Gpu]) -> dict[PciAddress, int]:
        found: dict[PciAddress, int] = {}
        for gpu in members:
            if (group := level(gpu)) is not None:
                found[group] = found.get(group, 0) + 1
        return found

    whole = sizes(gpus)
    return sum(count < whole[group] for group, count in sizes(gpus[:taken]).items())


def test_groups_stand_together() -> None:
    assert buses(ordering.order(DGX)) == list(range(1, 9))
    assert buses(ordering.order(CROSSED)) == [1, 4, 2, 3, 5, 8, 6, 7]


def test_what_breaks_the_least_comes_first() -> None:
    assert buses(ordering.order(SIX)) == [5, 6, 1, 2, 3, 4]
    assert buses(ordering.order(SPLIT)) == [6, 4, 5, 1, 2, 3]


def test_numa_nodes_come_together_where_there_are_no_groups() -> None:
    gpus = (grouped(2, node=None), grouped(1, node=1), grouped(3), grouped(4))
    assert buses(ordering.order(gpus)) == [3, 4, 1, 2]


@given(nodes())
@settings(max_examples=50)
def test_filling_from_the_front_breaks_one_group_at_a_time(gpus: tuple[model.Gpu, ...]) -> None:
    order = ordering.order(gpus)
    assert sorted(buses(order)) == sorted(buses(gpus))
    for level, taken in itertools.product(LEVELS, range(len(order) + 1)):
        assert partly_taken(order, taken, level) <= 1


@given(nodes())
@settings(max_examples=50)
def test_in_each_island_leftovers_come_before_quads_and_single_ones_before_pairs(gpus: tuple[model.Gpu, ...]) -> None:
    order = ordering.order(gpus)
    for domain in {gpu.groups.nvlink_domain for gpu in gpus}:
        island = [gpu for gpu in order if gpu.groups.nvlink_domain == domain]
        ranks = [(gpu.groups.aligned_quad is not None, gpu.groups.aligned_pair is not None) for gpu in island]
        assert ranks == sorted(ranks)


@given(st.data())
@settings(max_examples=50)
def test_the_order_depends_on_the_set_alone(data: st.DataObject) -> None:
    gpus = data.draw(nodes())
    assert ordering.order(data.draw(st.permutations(gpus))) == ordering.order(gpus)


@given(nodes(), st.data())
@settings(max_examples=50)
def test_gpus_that_fail_move_no_other(gpus: tuple[model.Gpu, ...], data: st.DataObject) -> None:
    lost = data.draw(st.sets(st.sampled_from(buses(gpus))))
    failed = tuple(replace(gpu, state=model.GpuState.LOST) if gpu.address.bus in lost else gpu for gpu in gpus)
    assert buses(ordering.order(failed)) == buses(ordering.order(gpus))


@pytest.mark.parametrize(("machine", "lost"), list(itertools.product([DGX, SIX, SPLIT, CROSSED], range(6))))
def test_what_is_offered_is_in_that_order(machine: tuple[model.Gpu, ...], lost: int) -> None:
    failed = tuple(
        replace(gpu, state=model.GpuState.LOST) if index == lost else gpu for index, gpu in enumerate(machine)
    )
    before = publishing.names(devices.build_devices(publishing.snapshot(*machine), options=OPTIONS))
    after = publishing.names(devices.build_devices(publishing.snapshot(*failed), options=OPTIONS))
    assert after == [name for name in before if name in after]
    assert len(after) == len(machine) - 1
