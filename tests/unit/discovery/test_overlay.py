# SPDX-License-Identifier: Apache-2.0
"""What an overlay says, whatever machine it is held against.

- a device in two places, rails given twice, groups that make no tree: each is a problem with its line
- a match covers another exactly if it leaves no machine to it
- a group has one address, which tells it from every other that a device can be in directly, and outlives devices
"""

from __future__ import annotations

import itertools
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from discovery import overlay
from discovery.address import PciAddress
from tests.fakes.wiring import at


def group(name: str, *buses: int, parent: str | None = None, line: int = 1) -> overlay.Group:
    devices = tuple(overlay.Device(address=at(bus), line=line) for bus in buses)
    return overlay.Group(name=name, line=line, parent=parent, devices=devices)


def machine(*groups: overlay.Group) -> overlay.Machine:
    return overlay.Machine(file="o", line=1, groups=groups)


@pytest.mark.parametrize(
    ("groups", "problems"),
    [
        ((group("a", 1, 2), group("b", 3, parent="a")), []),
        (
            (group("a", 1, 2, line=3), group("b", 2, 1, line=5)),
            [
                (5, "0000:01:00.0 is in two groups: group 'b' here, group 'a' on line 3"),
                (5, "0000:02:00.0 is in two groups: group 'b' here, group 'a' on line 3"),
            ],
        ),
        ((group("a", 1, 1, line=3),), [(3, "0000:01:00.0 stands twice in group 'a', already on line 3")]),
        ((group("a", 1), group("a", 2, line=4)), [(4, "there is a group 'a' already, on line 1")]),
        ((group("a", 1, parent="b"),), [(1, "group 'a': there is no group 'b' that could be its parent")]),
        ((group("a", 1, parent="a"),), [(1, "group 'a' is inside itself: 'a' in 'a'")]),
        (
            (group("a", 1, parent="b", line=2), group("b", 2, parent="c", line=3), group("c", parent="b", line=4)),
            [
                (2, "group 'a' is nested deeper than 16 groups, or inside one that is inside itself"),
                (3, "group 'b' is inside itself: 'b' in 'c' in 'b'"),
                (4, "group 'c' is inside itself: 'c' in 'b' in 'c'"),
            ],
        ),
        (
            tuple(group(f"g{i}", i + 1, parent=f"g{i - 1}" if i else None) for i in range(17)),
            [(1, "group 'g16' is nested deeper than 16 groups, or inside one that is inside itself")],
        ),
    ],
)
def test_groups_are_a_tree_of_different_devices(
    groups: tuple[overlay.Group, ...], problems: list[overlay.Problem]
) -> None:
    assert list(overlay.problems(machine(*groups))) == problems


def test_a_device_has_one_numa_node_and_one_rail() -> None:
    told = overlay.Machine(
        file="o",
        line=1,
        numa_nodes=(
            overlay.NumaNode(node=0, line=2, devices=(overlay.Device(address=at(1), line=3),)),
            overlay.NumaNode(node=1, line=4, devices=(overlay.Device(address=at(1), line=5),)),
        ),
        rails=(overlay.Rail(nic=at(9), rail=0, line=7), overlay.Rail(nic=at(9), rail=0, line=8)),
    )
    assert overlay.problems(told) == (
        (5, "0000:01:00.0 is in two NUMA nodes: node 1 here, node 0 on line 3"),
        (8, "0000:09:00.0 has a rail already (0, line 7)"),
    )


def test_chains_are_innermost_first_and_a_group_around_one_group_is_none() -> None:
    told = machine(group("top"), group("up", 5, parent="top"), group("in", 1, 2, parent="up"), group("one", 7))
    assert overlay.chains(told) == {at(1): ("in", "up"), at(2): ("in", "up"), at(5): ("up",), at(7): ("one",)}


def test_a_group_is_named_by_the_lowest_device_that_names_no_group_inside_it() -> None:
    told = machine(group("top", 9), group("b", 1, 4, parent="top"), group("c", 2, 3, parent="top"))
    assert overlay.names(overlay.chains(told)) == {"b": at(1), "c": at(2), "top": at(3)}
    singles = machine(group("top"), group("b", 1, parent="top"), group("c", 2, parent="top"))
    assert overlay.names(overlay.chains(singles)) == {"b": at(1), "c": at(2), "top": at(1)}
    assert overlay.switches(overlay.chains(singles)) == {at(1): (at(1),), at(2): (at(2), at(1))}


FIELDS = st.builds(
    overlay.Match,
    vendor=st.sampled_from((None, "a", "b")),
    product=st.sampled_from((None, "p", "q")),
    gpu=st.sampled_from((None, (1, 2), (1, 3))),
)


@given(st.none() | FIELDS, st.none() | FIELDS)
def test_a_match_covers_another_that_it_leaves_no_machine(
    wide: overlay.Match | None, narrow: overlay.Match | None
) -> None:
    """Held against every machine that there could be, with one GPU or two."""

    def meant(match: overlay.Match | None) -> set[tuple[str, str, frozenset[tuple[int, int]]]]:
        told = match or overlay.Match()
        return {
            (vendor, product, frozenset(gpus))
            for vendor in "abc"
            for product in "pqr"
            for gpus in (((1, 2),), ((1, 3),), ((1, 4),), ((1, 2), (1, 3)))
            if told.vendor in (None, vendor)
            and told.product in (None, product)
            and (told.gpu is None or told.gpu in gpus)
        }

    assert overlay.covers(wide, narrow) == (meant(narrow) <= meant(wide))


TREES = st.lists(st.tuples(st.integers(-1, 7), st.integers(0, 3)), min_size=1, max_size=8)
"""For each group the group around it, an earlier one, and how many devices are in it."""


@settings(max_examples=150)
@given(TREES, st.randoms(use_true_random=False))
def test_groups_are_told_apart_by_their_addresses(tree: list[tuple[int, int]], random: Random) -> None:
    buses = list(range(1, 40))
    random.shuffle(buses)
    groups = tuple(
        group(f"g{i}", *(buses.pop() for _ in range(count)), parent=f"g{around % i}" if around >= 0 and i else None)
        for i, (around, count) in enumerate(tree)
    )
    assert overlay.problems(machine(*groups)) == ()
    chains = overlay.chains(machine(*groups))
    names = overlay.names(chains)
    published = overlay.switches(chains)
    for a, b in itertools.combinations(sorted(chains), 2):
        together = set(chains[a]) & set(chains[b])
        assert (published[a][0] == published[b][0]) == (chains[a][0] == chains[b][0])
        assert bool(set(published[a]) & set(published[b])) == bool(together)
    for address, chain in chains.items():
        assert len(set(published[address])) == len(published[address])
        for name in chain:
            inside = sorted(other for other in chains if name in chains[other])
            assert names[name] in inside
            assert address in inside


def test_names_do_not_depend_on_the_order_of_the_document() -> None:
    groups = (group("top", 9), group("b", 4, 1, parent="top"), group("c", 3, 2, parent="top"))
    expected = overlay.names(overlay.chains(machine(*groups)))
    for order in itertools.permutations(groups):
        assert overlay.names(overlay.chains(machine(*order))) == expected


def test_every_device_that_is_named_is_found() -> None:
    told = overlay.Machine(
        file="o",
        line=1,
        groups=(group("a", 1),),
        rails=(overlay.Rail(nic=at(2), rail=0, line=3),),
        numa_nodes=(overlay.NumaNode(node=0, line=2, devices=(overlay.Device(address=at(3), line=2),)),),
    )
    assert [device.address for device in overlay.devices(told)] == [PciAddress(0, bus, 0, 0) for bus in (3, 1, 2)]
