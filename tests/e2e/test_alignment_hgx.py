# SPDX-License-Identifier: Apache-2.0
"""Claims that ask for alignment get it, on a DGX H100: eight GPUs on one NVLink fabric, each on a host bridge of its own.

What they get is judged by the wiring as the machine's files show it. A GPU is taken before, so that the first ones that are
free would be the wrong ones.

- four of one NUMA node; a quad; a pair; all of one NVLink island and clique
- two constraints at once; constraints over some of the requests
- different host bridges, different NUMA nodes
- what the wiring has not: pending, with the scheduler's reason; it runs once that is free
- more devices than a claim may have; allocationMode All
- GPUs are taken in the order of the slices, after some came back too; singles and pairs leave quads and pairs whole
"""

from __future__ import annotations

import pytest

from tests.e2e.kit import given, make, wiring
from tests.e2e.kit.sites import Site
from tests.e2e.kit.space import Space

NUMA_NODE = "resource.kubernetes.io/numaNode"
PCIE_ROOT = "resource.kubernetes.io/pcieRoot"
NO_ROOM = "cannot allocate all claims"


@pytest.fixture
def machine(site: Site) -> wiring.Wiring:
    """The wiring."""
    return wiring.read(site.disk.machine)


def test_four_gpus_of_one_numa_node(site: Site, space: Space, machine: wiring.Wiring) -> None:
    (single,) = given.get(site, space, "single")
    four = given.get(site, space, "four", make.request(count=4), constraints=[make.match(NUMA_NODE)])
    assert machine.numa_nodes(four) == {1 - (machine.gpu(single).numa or 0)}
    given.ask(space, "more", make.request(count=4), constraints=[make.match(NUMA_NODE)])
    space.pending("more", saying=NO_ROOM)
    space.delete("Pod", "single")
    more = given.devices(site, space, "more")
    assert machine.numa_nodes(more) == {machine.gpu(single).numa}


def test_quads_and_pairs(site: Site, space: Space, machine: wiring.Wiring) -> None:
    (single,) = given.get(site, space, "single")
    quad = given.get(site, space, "quad", make.request(count=4), constraints=[make.match("alignedQuad")])
    pair = given.get(site, space, "pair", make.request(count=2), constraints=[make.match("alignedPair")])
    assert len({single, *quad, *pair}) == 7
    assert len(machine.numa_nodes(quad)) == len(machine.numa_nodes(pair)) == 1
    assert len(machine.joined(quad)) == len(machine.joined(pair)) == 1
    given.ask(space, "more", make.request(count=2), constraints=[make.match("alignedPair")])
    space.pending("more", saying=NO_ROOM)


def test_all_of_one_nvlink_fabric(site: Site, space: Space, machine: wiring.Wiring) -> None:
    constraints = [make.match("nvlinkDomain"), make.match("nvlinkClique")]
    every = given.get(site, space, "every", make.request(count=8), constraints=constraints)
    assert machine.joined(every) == {frozenset(gpu.address for gpu in machine.gpus)}


def test_two_constraints_at_once(site: Site, space: Space, machine: wiring.Wiring) -> None:
    (single,) = given.get(site, space, "single")
    three = given.get(
        *(site, space, "three", make.request(count=3)),
        constraints=[make.match(NUMA_NODE), make.match("nvlinkDomain"), make.distinct(PCIE_ROOT)],
    )
    assert machine.numa_nodes(three) == machine.numa_nodes([single])  # three of this node are free
    assert len(machine.roots(three)) == 3
    assert len(machine.joined(three)) == 1


def test_constraints_over_some_of_the_requests(site: Site, space: Space, machine: wiring.Wiring) -> None:
    given.ask(
        *(space, "p", make.request("left", count=2), make.request("right", count=2), make.request("third")),
        constraints=[
            make.match("alignedPair", "left"),
            make.match("alignedPair", "right"),
            make.distinct(NUMA_NODE, "right", "third"),
        ],
    )
    space.pending("p", saying=NO_ROOM)  # the pair has one NUMA node twice
    given.ask(
        *(space, "r", make.request("left", count=2), make.request("right", count=2), make.request("third")),
        constraints=[
            make.match("alignedPair", "left"),
            make.match("alignedPair", "right"),
            make.match(NUMA_NODE, "right", "third"),
        ],
    )
    given.devices(site, space, "r")
    left, right, third = (space.devices("r", request=name) for name in ("left", "right", "third"))
    assert [len(left), len(right), len(third)] == [2, 2, 1]
    assert len(machine.numa_nodes(left)) == 1
    assert len(machine.numa_nodes((*right, *third))) == 1


def test_distinct_values(site: Site, space: Space, machine: wiring.Wiring) -> None:
    two = given.get(site, space, "two", make.request(count=2), constraints=[make.distinct(NUMA_NODE)])
    assert machine.numa_nodes(two) == {0, 1}
    four = given.get(site, space, "four", make.request(count=4), constraints=[make.distinct(PCIE_ROOT)])
    assert len(machine.roots(four)) == 4
    given.ask(space, "three", make.request(count=3), constraints=[make.distinct(NUMA_NODE)])
    space.pending("three", saying=NO_ROOM)


def test_what_the_wiring_has_not_stays_pending(space: Space) -> None:
    impossible = [(2, PCIE_ROOT), (2, "pcieSwitch"), (5, NUMA_NODE), (3, "alignedPair"), (1, "fabricClique")]
    for number, (count, attribute) in enumerate(impossible):
        given.ask(space, f"p{number}", make.request(count=count), constraints=[make.match(attribute)])
    for number, _ in enumerate(impossible):
        space.pending(f"p{number}", saying=NO_ROOM)
        event = space.api.wait_event("Pod", f"p{number}", space.name, text="FailedScheduling")
        assert NO_ROOM in event["message"]
        assert "allocation" not in space.claim_of(f"p{number}", "gpu").get("status", {})


def test_more_devices_than_a_claim_may_have(space: Space) -> None:
    given.ask(space, "p", make.request(count=33))
    space.pending("p", saying="exceeds the claim limit of 32")


def test_every_gpu_that_matches(site: Site, space: Space, machine: wiring.Wiring) -> None:
    second = f'device.attributes["{site.disk.driver}"].cpuSocket == 1'
    every = given.get(site, space, "every", make.request(every=True, where=second))
    assert set(every) == {gpu.gpu for gpu in machine.gpus if gpu.numa == 1}
    given.ask(space, "again", make.request(every=True))
    space.pending("again", saying=NO_ROOM)  # All means all, those in use too


def test_singles_are_given_in_the_order_of_the_slices(site: Site, space: Space, machine: wiring.Wiring) -> None:
    order = tuple(device["name"] for device in site.agent.devices())
    given.ask(space, "p0")
    taken = [*given.devices(site, space, "p0")]
    for number in range(1, 8):
        taken += given.get(site, space, f"p{number}")
        assert taken == list(order[: number + 1])
    # Who comes first fills a NUMA node before the next one, and an aligned pair before the next one.
    assert len(machine.numa_nodes(order[:4])) == len(machine.numa_nodes(order[4:])) == 1
    given.ask(space, "waiting")
    space.pending("waiting", saying=NO_ROOM)
    space.delete("Pod", "p5")
    assert given.devices(site, space, "waiting") == (order[5],)
    for pod in ("p6", "p2"):
        space.delete("Pod", pod)
    assert [given.get(site, space, "q"), given.get(site, space, "r")] == [(order[2],), (order[6],)]


def test_singles_leave_quads_and_pairs_whole(site: Site, space: Space, machine: wiring.Wiring) -> None:
    """First fit is best fit as long as nobody leaves: the order is the only preference that a driver can express."""
    singles = [device for name in ("a", "b", "c") for device in given.get(site, space, name)]
    quad = given.get(site, space, "quad", make.request(count=4), constraints=[make.match("alignedQuad")])
    assert len(machine.numa_nodes(singles)) == 1
    assert machine.numa_nodes(quad).isdisjoint(machine.numa_nodes(singles))
    given.ask(space, "pair", make.request(count=2), constraints=[make.match("alignedPair")])
    space.pending("pair", saying=NO_ROOM)  # the last one of its quad is left
    last = given.get(site, space, "d")
    assert machine.numa_nodes(last) == machine.numa_nodes(singles)
    for name in ("a", "b"):
        space.delete("Pod", name)
    assert set(given.devices(site, space, "pair")) == set(singles[:2])


def test_pairs_and_singles_fill_one_quad_before_the_next(site: Site, space: Space, machine: wiring.Wiring) -> None:
    pair = [make.match("alignedPair")]
    first = given.get(site, space, "single")
    two = given.get(site, space, "two", make.request(count=2), constraints=pair)
    second = given.get(site, space, "fill")
    assert len(machine.numa_nodes((*first, *two, *second))) == 1
    quad = given.get(site, space, "quad", make.request(count=4), constraints=[make.match("alignedQuad")])
    assert len({*first, *two, *second, *quad}) == 8


def test_two_gpus_without_a_constraint_are_the_next_two(site: Site, space: Space) -> None:
    order = tuple(device["name"] for device in site.agent.devices())
    pairs = {item["name"]: item["attributes"]["alignedPair"] for item in site.agent.devices()}
    assert given.get(site, space, "single") == order[:1]
    two = given.get(site, space, "two", make.request(count=2))
    assert two == order[1:3]
    assert pairs[two[0]] != pairs[two[1]]
