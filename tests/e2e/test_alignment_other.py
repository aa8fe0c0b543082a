# SPDX-License-Identifier: Apache-2.0
"""Claims that ask for alignment get it where machines are wired in other ways.

A tray of a GB200 rack: four GPUs, each with a host bridge of its own, on an NVLink fabric that leaves the tray.
- all of one fabric clique, by the name that the fabric manager gave it; two of one socket

A machine with two NVLink islands over two sockets, of which one is a ring:
- four of one island, though a nearer GPU of the other one is free; a clique is smaller than a ring; both with a NUMA node

A workstation whose firmware tells no NUMA node:
- its GPU is eligible for nothing that asks for one, and for all else

More GPUs than one ResourceSlice can hold:
- the first slice is used up before the second one
"""

from __future__ import annotations

import pytest

from tests.e2e.kit import examples, given, make, wiring
from tests.e2e.kit.sites import Site
from tests.e2e.kit.space import Space

NUMA_NODE = "resource.kubernetes.io/numaNode"
PCIE_ROOT = "resource.kubernetes.io/pcieRoot"
NO_ROOM = "cannot allocate all claims"
BUS = 'device.attributes["resource.kubernetes.io"].pciBusID == "{}"'
ATTRIBUTES = f'device.attributes["{make.CLASS}"]'


@pytest.fixture
def machine(site: Site) -> wiring.Wiring:
    """The wiring."""
    return wiring.read(site.disk.machine)


tray = pytest.mark.machine("gb200-tray")
islands = pytest.mark.machine("two-islands.yaml")
workstation = pytest.mark.machine("workstation-rtx")
many = pytest.mark.machine("seventy-two-gpus.yaml")


@tray
def test_four_gpus_of_one_fabric_clique(site: Site, space: Space, machine: wiring.Wiring) -> None:
    (clique,) = set(machine.fabric.values())
    four = given.get(
        *(site, space, "four", make.request(count=4, where=f'{ATTRIBUTES}.?fabricClique.orValue("") == "{clique}"')),
        constraints=[make.match("fabricClique"), make.match("nvlinkDomain")],
    )
    assert set(four) == {gpu.gpu for gpu in machine.gpus}


@tray
def test_two_gpus_of_one_superchip(site: Site, space: Space, machine: wiring.Wiring) -> None:
    (single,) = given.get(site, space, "single")
    two = given.get(
        *(site, space, "two", make.request(count=2)),
        constraints=[make.match("alignedPair"), make.match(NUMA_NODE), make.distinct(PCIE_ROOT)],
    )
    assert len(machine.numa_nodes(two)) == 1
    assert machine.numa_nodes(two).isdisjoint(machine.numa_nodes([single]))
    given.ask(space, "root", make.request(count=2), constraints=[make.match(PCIE_ROOT)])
    given.ask(space, "switch", make.request(), constraints=[make.match("pcieSwitch")])
    space.pending("root", saying=NO_ROOM)
    space.pending("switch", saying=NO_ROOM)  # there is none


@islands
def test_four_gpus_of_one_nvlink_island(site: Site, space: Space, machine: wiring.Wiring) -> None:
    (single,) = given.get(site, space, "single")
    four = given.get(site, space, "four", make.request(count=4), constraints=[make.match("nvlinkDomain")])
    assert len(machine.joined(four)) == 1
    assert machine.joined(four).isdisjoint(machine.joined([single]))
    assert machine.numa_nodes(four) == {0, 1}
    given.ask(space, "more", make.request(count=4), constraints=[make.match("nvlinkDomain")])
    space.pending("more", saying=NO_ROOM)
    space.delete("Pod", "single")
    more = given.devices(site, space, "more")
    assert len(machine.joined((*more, single))) == 1


@islands
def test_the_example(site: Site, space: Space, machine: wiring.Wiring) -> None:
    (single,) = given.get(site, space, "single")
    name = "four-gpus-of-an-nvlink-island"
    given.ask(space, "holder", make.request(where=BUS.format("0000:a4:00.0")))  # of the ring, whose cliques have two
    given.devices(site, space, "holder")
    with examples.applied(space, name):
        space.pending(name, saying=NO_ROOM)
        space.delete("Pod", "single")
        four = given.devices(site, space, name, "gpus")
    assert single in four
    assert len(machine.joined(four)) == 1


@islands
def test_a_clique_is_smaller_than_a_ring(site: Site, space: Space, machine: wiring.Wiring) -> None:
    clique = given.get(site, space, "clique", make.request(count=4), constraints=[make.match("nvlinkClique")])
    assert len(machine.joined(clique)) == 1
    given.ask(space, "more", make.request(count=3), constraints=[make.match("nvlinkClique")])
    space.pending("more", saying=NO_ROOM)
    two = given.get(site, space, "two", make.request(count=2), constraints=[make.match("nvlinkClique")])
    ring = given.get(site, space, "ring", make.request(count=2), constraints=[make.match("nvlinkDomain")])
    assert machine.joined((*two, *ring)) != machine.joined(clique)
    assert len(machine.joined((*two, *ring))) == 1


@islands
def test_an_island_and_a_numa_node_at_once(site: Site, space: Space, machine: wiring.Wiring) -> None:
    both = [make.match("nvlinkDomain"), make.match(NUMA_NODE)]
    taken = [given.get(site, space, f"p{n}", make.request(count=2), constraints=both) for n in range(4)]
    assert len({device for two in taken for device in two}) == 8
    for two in taken:
        assert len(machine.joined(two)) == len(machine.numa_nodes(two)) == 1


@workstation
def test_no_numa_node_is_known(site: Site, space: Space, machine: wiring.Wiring) -> None:
    assert [gpu.numa for gpu in machine.gpus] == [None]
    for name, attribute in (("numa", NUMA_NODE), ("socket", "cpuSocket"), ("pair", "alignedPair")):
        given.ask(space, name, make.request(), constraints=[make.match(attribute)])
        space.pending(name, saying=NO_ROOM)
    constraints = [make.match(PCIE_ROOT)]
    near = given.get(
        site, space, "p", make.request(where=f'{ATTRIBUTES}.nicDistance == "PHB"'), constraints=constraints
    )
    assert near == ("gpu-0000-01-00-0",)


@many
def test_slices_are_taken_in_the_order_of_their_names(site: Site, space: Space) -> None:
    slices = site.agent.slices()
    assert [len(item["spec"]["devices"]) for item in slices] == [64, 8]
    assert {item["spec"]["pool"]["resourceSliceCount"] for item in slices} == {2}
    order = tuple(device["name"] for device in site.agent.devices())
    half = make.request(count=32)
    assert given.get(site, space, "first", half) == order[:32]
    assert given.get(site, space, "second", half) == order[32:64]
    assert given.get(site, space, "third", make.request(count=8), constraints=[make.match(NUMA_NODE)]) == order[64:]
    given.ask(space, "more")
    space.pending("more", saying=NO_ROOM)
    space.delete("Pod", "second")
    assert given.devices(site, space, "more") == (order[32],)
