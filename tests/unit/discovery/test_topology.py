# SPDX-License-Identifier: Apache-2.0
"""Path classes: every class from the smallest tree that shows it, symmetry, and the order and number of paths."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from discovery import model, peering, topology
from discovery.address import PciAddress, parse
from discovery.model import PathClass, PortType
from tests.fakes import wiring

ROOT, OTHER_ROOT, UP, DOWN1, DOWN2, UP2, DOWN3, BRIDGE = (parse(f"0000:e{i}:00.0") for i in range(8))
PORTS: dict[PciAddress, PortType | None] = {
    ROOT: PortType.ROOT,
    OTHER_ROOT: PortType.ROOT,
    UP: PortType.UPSTREAM,
    DOWN1: PortType.DOWNSTREAM,
    DOWN2: PortType.DOWNSTREAM,
    UP2: PortType.UPSTREAM,
    DOWN3: PortType.DOWNSTREAM,
    BRIDGE: None,
}

BRIDGES = {
    where: model.Bridge(pci=wiring.function(where), port_type=port, redirects=where is DOWN2)
    for where, port in PORTS.items()
}


def between(a: model.PciFunction, b: model.PciFunction) -> PathClass:
    forth = topology.path_class(a, b, PORTS)
    assert forth is topology.path_class(b, a, PORTS)
    return forth


def below(bus: int, *bridges: PciAddress) -> model.PciFunction:
    return wiring.function(wiring.at(bus), bridges=bridges)


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ((ROOT, UP, DOWN1), (ROOT, UP, DOWN2), PathClass.PIX),  # two ports of one switch
        ((ROOT, UP), (ROOT, UP, DOWN2), PathClass.PIX),  # the switch's own endpoint
        ((ROOT,), (ROOT,), PathClass.PIX),  # functions on the bus of one root port
        ((ROOT, UP, DOWN1), (ROOT, UP, DOWN1), PathClass.PIX),  # and on that of one downstream port
        ((ROOT, UP, DOWN1), (ROOT, UP, DOWN2, UP2, DOWN3), PathClass.PXB),  # a switch below a switch
        ((ROOT, UP, DOWN2, UP2, DOWN3), (ROOT, UP, DOWN2, UP2), PathClass.PIX),  # inside the lower switch
        ((ROOT,), (ROOT, UP, DOWN1), PathClass.PIX),
        ((ROOT, BRIDGE), (ROOT, UP, DOWN1), PathClass.PXB),  # a conventional bridge counts as a switch
        ((ROOT, UP, DOWN1), (OTHER_ROOT,), PathClass.PHB),  # two root ports of one host bridge
        ((), (ROOT,), PathClass.PHB),  # an integrated endpoint
    ],
)
def test_inside_one_host_bridge(
    one: tuple[PciAddress, ...], other: tuple[PciAddress, ...], expected: PathClass
) -> None:
    assert between(below(1, *one), below(2, *other)) is expected


def test_between_host_bridges_the_numa_nodes_decide() -> None:
    here = wiring.function(wiring.at(1), root="pci0000:00", numa=0)
    assert between(here, wiring.function(wiring.at(2), root="pci0000:80", numa=0)) is PathClass.NODE
    assert between(here, wiring.function(wiring.at(2), root="pci0000:80", numa=1)) is PathClass.SYS


def test_what_is_not_known_is_unknown() -> None:
    here = wiring.function(wiring.at(1), root="pci0000:00", numa=0)
    assert between(here, wiring.function(wiring.at(2), root="pci0000:80", numa=None)) is PathClass.UNKNOWN
    assert between(here, wiring.function(wiring.at(2), root=None, numa=0)) is PathClass.UNKNOWN
    unknown = wiring.function(wiring.at(1), numa=None)
    assert between(unknown, wiring.function(wiring.at(2), numa=None)) is PathClass.PHB


def test_the_socket_of_cpus_is_known_when_they_share_one() -> None:
    sockets = {0: (0, 1), 1: (2, 3)}
    assert topology.socket_of((2,), sockets) == 1
    assert topology.socket_of((1, 2), sockets) is None
    assert topology.socket_of((), sockets) is None
    assert topology.socket_of(None, sockets) is None


def test_functions_of_one_slot_stay_together_whatever_an_overlay_says_of_one() -> None:
    given = replace(wiring.function(wiring.at(1), numa=1), numa_source=model.Provenance.OVERLAY)
    assert between(given, wiring.function(wiring.at(1, 1), numa=0)) is PathClass.PIX


def test_functions_of_one_slot_never_leave_it() -> None:
    assert between(wiring.function(wiring.at(1)), wiring.function(wiring.at(1, function=1))) is PathClass.PIX


def test_every_pair_has_one_path_in_order_and_virtual_functions_have_none() -> None:
    gpus = tuple(wiring.gpu(wiring.at(bus)) for bus in (1, 2))
    physical = model.Nic(pci=wiring.function(wiring.at(4)))
    virtual = model.Nic(
        pci=model.PciFunction(
            address=wiring.at(3), vendor_id=1, device_id=1, class_code=1, physical_function=wiring.at(4)
        )
    )
    devices = topology.endpoints(gpus, (physical, virtual), (model.Nvme(pci=wiring.function(wiring.at(5))),))
    paths = topology.paths(devices, BRIDGES, {(wiring.at(1), wiring.at(2)): 18})
    assert [(path.a.bus, path.b.bus) for path in paths] == list(itertools.combinations((1, 2, 4, 5), 2))
    assert [path.nvlinks for path in paths] == [18, 0, 0, 0, 0, 0]


def grouped(
    bus: int, *groups: int, root: str = "pci0000:00", numa: int | None = None, bridges: tuple[PciAddress, ...] = ()
) -> model.PciFunction:
    """A function in groups of an overlay, innermost first."""
    switches = tuple(wiring.at(group) for group in groups)
    pci = wiring.function(wiring.at(bus), root=root, numa=numa, switches=switches, bridges=bridges)
    return replace(
        pci,
        switch_source=model.Provenance.OVERLAY if groups else None,
        numa_source=None if numa is None else model.Provenance.OVERLAY,
    )


def real(bus: int, numa: int, port: PciAddress) -> model.PciFunction:
    """A function below a switch of sysfs, whose NUMA node an overlay corrected."""
    pci = wiring.function(wiring.at(bus), numa=numa, bridges=(ROOT, UP, port), switches=(UP,))
    return replace(pci, switch_source=model.Provenance.SYSFS, numa_source=model.Provenance.OVERLAY)


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        (grouped(1, 1), grouped(2, 1), PathClass.PIX),
        (grouped(1, 1), grouped(2, 1, root="pci0001:00"), PathClass.PIX),  # a host bridge for each device
        (grouped(1, 1, 3), grouped(3, 3, root="pci0001:00"), PathClass.PXB),  # a group in a group
        (grouped(1, 1, 3), grouped(2, 2, 3), PathClass.PXB),
        (grouped(1, 1), grouped(2, 2, root="pci0001:00"), PathClass.UNKNOWN),  # nothing holds them together
        (grouped(1, 1, numa=0), grouped(2, 2, root="pci0001:00", numa=0), PathClass.NODE),
        (grouped(1, 1, numa=0), grouped(2, 2, root="pci0001:00", numa=1), PathClass.SYS),
        (grouped(1, 1, numa=0), grouped(2, 2, numa=0), PathClass.PHB),
        (grouped(1, numa=0), grouped(2, numa=1), PathClass.SYS),  # one host bridge near two nodes is made up
        (grouped(1, numa=0), grouped(2), PathClass.PHB),
        (real(1, 0, DOWN1), real(2, 1, DOWN2), PathClass.PIX),  # a switch that sysfs shows is sure
        (real(1, 0, DOWN1), grouped(2, numa=1, bridges=(ROOT,)), PathClass.SYS),
        (grouped(1, 1, bridges=(ROOT,)), grouped(2, 2, bridges=(ROOT,)), PathClass.PHB),  # bridges that are made up
        (grouped(1, bridges=(ROOT,)), grouped(2, 2, bridges=(ROOT,)), PathClass.PIX),  # one of them is not spoken of
        (grouped(1, 1, root=""), grouped(2, 2), PathClass.UNKNOWN),
        (grouped(1, 1, root=""), grouped(2, 1), PathClass.PIX),
    ],
)
def test_an_overlay_decides_where_it_speaks(
    one: model.PciFunction, other: model.PciFunction, expected: PathClass
) -> None:
    one, other = (replace(pci, host_bridge=pci.host_bridge or None) for pci in (one, other))
    assert between(one, other) is expected
    paths = topology.paths([one, other, wiring.function(wiring.at(9))], BRIDGES, {})
    assert paths[0].path_class is expected
    assert paths[0].direct is not True


PLACES = st.tuples(
    st.sampled_from(("pci0000:00", "pci0000:80")),
    st.sampled_from(
        ((), (ROOT,), (ROOT, UP, DOWN1), (ROOT, UP, DOWN2), (ROOT, UP, DOWN2, UP2, DOWN3), (OTHER_ROOT, BRIDGE))
    ),
)
SAID = st.tuples(st.sampled_from((None, 0, 1)), st.sampled_from(model.Provenance))
"""NUMA node of a function, and who told it."""

CARDS = st.tuples(PLACES, st.lists(SAID, min_size=1, max_size=3))
"""A place, and the functions of the card in it, of which an overlay may say different things."""


@given(st.lists(CARDS, max_size=5))
def test_the_paths_of_many_are_those_of_each_two(
    cards: list[tuple[tuple[str, tuple[PciAddress, ...]], list[tuple[int | None, model.Provenance]]]],
) -> None:
    devices = [
        replace(
            wiring.function(wiring.at(bus, function), root=root, bridges=bridges, numa=numa),
            numa_source=None if numa is None else source,
        )
        for bus, ((root, bridges), functions) in enumerate(cards)
        for function, (numa, source) in enumerate(functions)
    ]
    expected = [topology.path_class(a, b, PORTS) for a, b in itertools.combinations(devices, 2)]
    paths = topology.paths(devices, BRIDGES, {})
    assert [path.path_class for path in paths] == expected
    assert [path.direct for path in paths] == [
        peering.direct(a, b, BRIDGES) for a, b in itertools.combinations(devices, 2)
    ]


def test_what_an_overlay_says_of_two_functions_of_one_slot_is_said_of_no_others() -> None:
    card = [
        replace(wiring.function(wiring.at(2, number), numa=number), numa_source=model.Provenance.OVERLAY)
        for number in (0, 1)
    ]
    other = replace(wiring.function(wiring.at(5), numa=1), numa_source=model.Provenance.OVERLAY)
    assert [path.path_class for path in topology.paths([*card, other], BRIDGES, {})] == [
        PathClass.PIX, PathClass.SYS, PathClass.PHB,
    ]  # fmt: skip
