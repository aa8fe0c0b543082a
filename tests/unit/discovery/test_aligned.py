# SPDX-License-Identifier: Apache-2.0
"""Pairs and quads: the best partition against exhaustive search, its tie rule, pools with and without NVLink, and that a GPU
that dies changes no group of another.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from discovery import address, aligned, findings, model, nvlink
from discovery.address import PciAddress
from tests.fakes import wiring
from tests.fakes.wiring import DGX1, at, gpu, mesh, to_switch

Sets = tuple[tuple[int, ...], ...]


def groups(gpus: Sequence[model.Gpu]) -> Mapping[PciAddress, model.GpuGroups]:
    found = findings.Findings()
    return aligned.groups(gpus, nvlink.wiring(gpus, found), found)


def by_name(gpus: Sequence[model.Gpu], name: str) -> list[int | None]:
    """For each GPU the bus of the lowest GPU in its group."""
    keys = [getattr(own, name) for _, own in sorted(groups(gpus).items())]
    return [None if key is None else key.bus for key in keys]


def partitions(members: tuple[int, ...], size: int) -> Iterator[Sets]:
    """Every partition into as many sets as there can be, lowest first."""
    if len(members) < size:
        yield ()
        return
    first, rest = members[0], members[1:]
    for others in itertools.combinations(rest, size - 1):
        for sets in partitions(tuple(member for member in rest if member not in others), size):
            yield ((first, *others), *sets)
    if len(members) % size:
        yield from partitions(rest, size)


def score(weights: Sequence[Sequence[int]], sets: Sets) -> int:
    return sum(weights[a][b] for part in sets for a, b in itertools.combinations(part, 2))


WEIGHTS = st.integers(0, 9).flatmap(
    lambda count: st.lists(st.integers(0, 3), min_size=count * count, max_size=count * count).map(
        lambda flat: [
            [0 if i == j else flat[min(i, j) * count + max(i, j)] for j in range(count)] for i in range(count)
        ]
    )
)


@given(WEIGHTS, st.sampled_from((2, 4)))
@settings(max_examples=60, deadline=None)
def test_no_partition_is_better_and_none_as_good_is_lower(weights: list[list[int]], size: int) -> None:
    everything = list(partitions(tuple(range(len(weights))), size))
    best = max(score(weights, sets) for sets in everything)
    assert aligned.best_partition(weights, size) == next(sets for sets in everything if score(weights, sets) == best)


@pytest.mark.parametrize("count", [16, 15, 64, 63])
@pytest.mark.parametrize("size", [2, 4])
def test_large_regular_pools_are_cut_along_their_structure(count: int, size: int) -> None:
    weights = [
        [0 if i == j else 1 + 10 * (i // 8 == j // 8) + 100 * (i // 2 == j // 2) for j in range(count)]
        for i in range(count)
    ]
    sets = aligned.best_partition(weights, size)
    assert sets == tuple(tuple(range(first, first + size)) for first in range(0, count - size + 1, size))


def test_a_pool_without_any_structure_is_still_parted_the_same_way_every_time() -> None:
    weights = [[(i * 31 + j * 31 + i * j * 7) % 101 if i != j else 0 for j in range(20)] for i in range(20)]
    sets = aligned.best_partition(weights, 4)
    assert sets == aligned.best_partition(weights, 4)
    assert sorted(member for part in sets for member in part) == list(range(20))


def test_a_hybrid_cube_mesh_is_paired_along_double_links_inside_its_halves() -> None:
    gpus = mesh(DGX1)
    assert by_name(gpus, "aligned_pair") == [1, 2, 2, 1, 5, 6, 6, 5]
    assert by_name(gpus, "aligned_quad") == [1, 1, 1, 1, 5, 5, 5, 5]
    assert by_name(gpus, "nvlink_domain") == [1] * 8
    assert by_name(gpus, "nvlink_clique") == [1, 1, 1, 1, 5, 5, 5, 5]


def pcie(bus: int, *, switch: int | None = None, root: str = "pci0000:00", numa: int | None = 0) -> model.Gpu:
    switches = () if switch is None else (at(switch),)
    return gpu(at(bus), pci=wiring.function(at(bus), root=root, numa=numa, switches=switches))


def test_without_nvlink_pairs_are_of_one_switch_and_quads_of_one_numa_node() -> None:
    gpus = [pcie(bus, switch=0xE0 + bus // 2, root=f"pci0000:{bus // 2:02x}", numa=bus // 4) for bus in range(8)]
    assert by_name(gpus, "aligned_pair") == [0, 0, 2, 2, 4, 4, 6, 6]
    assert by_name(gpus, "aligned_quad") == [0, 0, 0, 0, 4, 4, 4, 4]
    assert by_name(gpus, "nvlink_domain") == [None] * 8


def test_gpus_left_over_are_in_no_group() -> None:
    gpus = [pcie(bus, switch=0xE0 + bus // 3) for bus in range(5)]
    assert by_name(gpus, "aligned_quad") == [0, 0, 0, 0, None]
    assert by_name(gpus, "aligned_pair") == [0, 0, 2, 2, None]
    assert by_name([pcie(bus) for bus in range(3)], "aligned_pair") == [0, 0, None]
    assert by_name([pcie(bus) for bus in range(3)], "aligned_quad") == [None] * 3


def test_where_quads_leave_two_over_they_are_a_pair() -> None:
    gpus = [pcie(bus, switch=0xE0 + bus // 5) for bus in range(10)]
    assert by_name(gpus, "aligned_quad") == [0, 0, 0, 0, None, 5, 5, 5, 5, None]
    assert by_name(gpus, "aligned_pair") == [0, 0, 2, 2, 4, 5, 5, 7, 7, 4]


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), max_size=11))
@settings(max_examples=40, deadline=None)
def test_no_pair_reaches_over_two_quads(places: list[tuple[int, int]]) -> None:
    own = groups([pcie(bus, switch=0xE0 + switch, numa=numa) for bus, (switch, numa) in enumerate(places)])
    for a, b in itertools.combinations(own.values(), 2):
        if a.aligned_pair is not None and a.aligned_pair == b.aligned_pair:
            assert a.aligned_quad == b.aligned_quad


def test_where_only_a_person_knows_the_switches_they_are_the_pools() -> None:
    """A VM with a PCI domain for every GPU, and no NUMA node."""
    gpus = [
        replace(
            own,
            pci=replace(
                own.pci,
                host_bridge=address.HostBridge(f"pci{bus:04x}:00"),
                switch_source=model.Provenance.OVERLAY,
            ),
        )
        for bus in range(6)
        for own in [pcie(bus, switch=0xE0 + bus // 3, numa=None)]
    ]
    assert by_name(gpus, "aligned_pair") == [0, 0, None, 3, 3, None]
    assert by_name(gpus, "aligned_quad") == [None] * 6


def test_pairs_never_reach_over_numa_nodes_or_unknown_ones() -> None:
    assert by_name([pcie(1, numa=0), pcie(2, numa=1)], "aligned_pair") == [None, None]
    far = [pcie(1, numa=None), pcie(2, root="pci0000:80", numa=None)]
    assert by_name(far, "aligned_pair") == [None, None]
    assert by_name([pcie(1, numa=None), pcie(2, numa=None)], "aligned_pair") == [1, 1]


def on_switches(*, lost: int | None = None, dark: int | None = None) -> list[model.Gpu]:
    return [
        gpu(
            at(bus),
            *to_switch(18, down=18 if bus == dark else 0),
            state=model.GpuState.LOST if bus == lost else model.GpuState.READY,
            pci=wiring.function(at(bus), root=f"pci0000:{bus:02x}", numa=bus // 4, switches=(at(0xE0 + bus // 2),)),
        )
        for bus in range(8)
    ]


@pytest.mark.parametrize("lost", range(8))
def test_a_gpu_that_dies_changes_no_group_of_another(lost: int) -> None:
    whole, broken = groups(on_switches()), groups(on_switches(lost=lost))
    assert {where: own for where, own in broken.items() if where.bus != lost} == {
        where: own for where, own in whole.items() if where.bus != lost
    }
    assert whole[at(lost)] == broken[at(lost)]


@pytest.mark.parametrize("lost", range(8))
def test_in_a_mesh_too(lost: int) -> None:
    whole, broken = groups(mesh(DGX1)), groups(mesh(DGX1, dead=frozenset({lost})))
    assert {where: own for where, own in broken.items() if where.bus != lost + 1} == {
        where: own for where, own in whole.items() if where.bus != lost + 1
    }


MESHES = st.integers(2, 7).flatmap(
    lambda count: st.dictionaries(
        st.sampled_from(list(itertools.combinations(range(count), 2))),
        st.integers(1, 4),
        min_size=1,
    )
)


@settings(max_examples=60, deadline=None)
@given(MESHES, st.integers(0, 6))
@example({(0, 1): 4, (2, 3): 4}, 0).via("pairs with a bridge: the other half has no active link any more")
def test_in_any_mesh(edges: dict[tuple[int, int], int], which: int) -> None:
    lost = which % (max(max(two) for two in edges) + 1)
    whole, broken = groups(mesh(edges)), groups(mesh(edges, dead=frozenset({lost})))
    assert {where: own for where, own in broken.items() if where.bus != lost + 1} == {
        where: own for where, own in whole.items() if where.bus != lost + 1
    }


def test_two_gpus_that_both_answer_and_whose_bridge_is_down_are_in_no_island() -> None:
    down = [
        replace(each, nvlinks=tuple(replace(link, active=False) for link in each.nvlinks)) for each in mesh({(0, 1): 4})
    ]
    assert by_name(down, "nvlink_domain") == [None, None]
    assert by_name(down, "aligned_pair") == [1, 1]


def test_a_gpu_whose_nvlinks_are_all_down_is_in_no_group_and_its_place_stays_empty() -> None:
    whole, broken = groups(on_switches()), groups(on_switches(dark=0))
    assert broken[at(0)] == model.GpuGroups()
    assert all(broken[at(bus)] == whole[at(bus)] for bus in range(1, 8))


def test_a_pool_larger_than_any_machine_gets_no_pairs_and_a_finding() -> None:
    found = findings.Findings()
    many = [gpu(PciAddress(0, bus, 0, 0)) for bus in range(65)]
    own = aligned.groups(many, nvlink.wiring(many, found), found)
    assert all(group == model.GpuGroups() for group in own.values())
    assert [finding.code for finding in found.result()] == ["pool-too-large"]
