# SPDX-License-Identifier: Apache-2.0
"""NVLink: counts of direct links and over switches, islands, cliques of a hybrid mesh, and what a dead GPU leaves known."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from discovery import findings, model, nvlink
from discovery.address import PciAddress
from tests.fakes import wiring
from tests.fakes.wiring import DGX1, at, gpu, mesh, to_switch

UUID = "2eccfb21-670e-5e64-8dc6-1520f1991801"


def look(*gpus: model.Gpu) -> tuple[nvlink.Wiring, list[str]]:
    found = findings.Findings()
    return nvlink.wiring(gpus, found), [finding.code for finding in found.result()]


def test_direct_links_are_counted_by_pair() -> None:
    wired, codes = look(*mesh(DGX1))
    assert {(a.bus - 1, b.bus - 1): count for (a, b), count in wired.active.items()} == DGX1
    assert wired.joined == frozenset(wired.active)
    assert codes == []


def test_over_switches_the_poorer_end_limits() -> None:
    wired, _ = look(gpu(at(1), *to_switch(18)), gpu(at(2), *to_switch(18, down=2)), gpu(at(3)))
    assert wired.active == {(at(1), at(2)): 16}
    assert wired.wired == {(at(1), at(2)): 18}
    assert nvlink.islands(wired.joined) == ((at(1), at(2)),)


def test_a_link_that_one_end_sees_down_does_not_count() -> None:
    one, other = mesh({(0, 1): 2})
    down = model.NvLink(link=0, active=False, remote_kind=model.RemoteKind.GPU, remote=at(1))
    wired, _ = look(one, gpu(at(2), down, *other.nvlinks[1:]))
    assert wired.active == {(at(1), at(2)): 1}


def test_links_to_other_machines_and_to_itself_join_nothing() -> None:
    stray = model.NvLink(link=0, active=True, remote_kind=model.RemoteKind.GPU, remote=at(99))
    loop = model.NvLink(link=1, active=True, remote_kind=model.RemoteKind.GPU, remote=at(1))
    assert look(gpu(at(1), stray, loop), gpu(at(2), stray))[0].active == {}


def fabric(clique: int | None) -> model.Fabric:
    if clique is None:
        return model.Fabric(state="in_progress")
    return model.Fabric(state="completed", cluster_uuid=UUID, clique_id=clique)


def test_gpus_of_different_fabric_cliques_are_not_joined() -> None:
    gpus = [gpu(at(bus), *to_switch(18), fabric=fabric(bus // 2)) for bus in range(4)]
    assert nvlink.islands(look(*gpus)[0].joined) == ((at(0), at(1)), (at(2), at(3)))


def test_a_fabric_still_coming_up_stays_one_island() -> None:
    gpus = [gpu(at(bus), *to_switch(18), fabric=fabric(None if bus else 7)) for bus in range(4)]
    assert nvlink.islands(look(*gpus)[0].joined) == (tuple(at(bus) for bus in range(4)),)


DEAD = (model.GpuState.LOST, model.GpuState.VFIO, model.GpuState.NO_DRIVER, model.GpuState.UNREADABLE)


@pytest.mark.parametrize("state", DEAD)
def test_a_gpu_that_cannot_be_asked_stays_in_the_island_of_its_like(state: model.GpuState) -> None:
    wired, codes = look(gpu(at(1), state=state), *(gpu(at(bus), *to_switch(18)) for bus in (2, 3)))
    assert nvlink.islands(wired.joined) == ((at(1), at(2), at(3)),)
    assert wired.active == {(at(2), at(3)): 18}
    assert wired.wired[at(1), at(2)] == 18
    assert codes == ["nvlink-inferred"]


def test_a_dead_gpu_of_another_model_is_not_guessed_at() -> None:
    other = gpu(at(1), state=model.GpuState.LOST, pci=wiring.function(at(1), device_id=0x26B9))
    wired, codes = look(other, *(gpu(at(bus), *to_switch(18)) for bus in (2, 3)))
    assert nvlink.islands(wired.joined) == ((at(2), at(3)),)
    assert codes == []


def test_a_gpu_whose_links_are_all_down_is_dark_and_its_like_tell_where_it_sits() -> None:
    wired, codes = look(gpu(at(1), *to_switch(18, down=18)), *(gpu(at(bus), *to_switch(18)) for bus in (2, 3)))
    assert wired.dark == {at(1)}
    assert nvlink.islands(wired.joined) == ((at(1), at(2), at(3)),)
    assert codes == ["nvlink-inferred"]


def test_in_a_mesh_the_peers_name_a_dead_gpu() -> None:
    wired, codes = look(*mesh(DGX1, dead=frozenset({0})))
    assert {b.bus - 1 for a, b in wired.joined if a == at(1)} == {1, 2, 3, 4}
    assert codes == ["nvlink-unknown"]


def test_cards_without_a_bridge_are_no_island_and_no_finding() -> None:
    down = tuple(model.NvLink(link=link, active=False) for link in range(12))
    wired, codes = look(gpu(at(1), *down), gpu(at(2), *down))
    assert (wired.joined, codes) == (frozenset(), [])


def cliques(edges: dict[tuple[int, int], int], *, dead: frozenset[int] = frozenset()) -> list[list[int]]:
    wired, _ = look(*mesh(edges, dead=dead))
    (island,) = nvlink.islands(wired.joined)
    return [[member.bus - 1 for member in clique] for clique in nvlink.cliques(island, wired.joined)]


def test_the_cliques_of_a_hybrid_cube_mesh_are_its_two_halves() -> None:
    assert cliques(DGX1) == [[0, 1, 2, 3], [4, 5, 6, 7]]


@pytest.mark.parametrize("dead", range(8))
def test_a_dead_gpu_of_a_hybrid_cube_mesh_changes_no_clique(dead: int) -> None:
    assert cliques(DGX1, dead=frozenset({dead})) == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_what_is_left_over_is_a_clique_of_its_own() -> None:
    assert cliques({(0, 1): 1, (1, 2): 1}) == [[0, 1], [2]]


EDGES = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)).filter(lambda pair: pair[0] < pair[1]), max_size=40)


@given(EDGES)
def test_cliques_partition_an_island_into_all_to_all_sets(edges: list[tuple[int, int]]) -> None:
    joined = {(at(a), at(b)) for a, b in edges}
    for island in nvlink.islands(joined):
        parts = nvlink.cliques(island, joined)
        assert sorted(member for part in parts for member in part) == list(island)
        assert all(pair in joined for part in parts for pair in itertools.combinations(part, 2))
        largest = max(
            size
            for size in range(1, len(island) + 1)
            if any(
                all(pair in joined for pair in itertools.combinations(candidate, 2))
                for candidate in itertools.combinations(island, size)
            )
        )
        assert max(map(len, parts)) == largest


def test_an_absurd_island_is_parted_in_reasonable_time() -> None:
    members = [PciAddress(0, bus, device, 0) for bus in range(20) for device in range(10)]
    joined = {pair for index, pair in enumerate(itertools.combinations(members, 2)) if index % 7}
    parts = nvlink.cliques(members, joined)
    assert sorted(member for part in parts for member in part) == members
    assert all(pair in joined for part in parts for pair in itertools.combinations(part, 2))
