# SPDX-License-Identifier: Apache-2.0
"""Claims that ask for alignment get it, on a server with eight L40S: two on each of four PCIe switches, and no NVLink.

- two of one switch, of one host bridge; a pair is of one switch; four of one NUMA node on two switches; a quad
- one on each switch
- a key that the machine has not makes its GPUs ineligible
- firstAvailable: the second choice where the hardware has not the first, and where the first is used up
- CEL on product, memory, compute capability and driver version
- CEL that is wrong: refused at once, or said in the pod; other pods go on
- GPUs are taken switch by switch
- examples for users: two on different switches, two of one; the second choice
"""

from __future__ import annotations

import pytest

from tests.e2e.kit import examples, given, make, wiring
from tests.e2e.kit.api import ApiError
from tests.e2e.kit.sites import Site
from tests.e2e.kit.space import Space

pytestmark = pytest.mark.machine("l40s-8-pcie")

NUMA_NODE = "resource.kubernetes.io/numaNode"
PCIE_ROOT = "resource.kubernetes.io/pcieRoot"
NO_ROOM = "cannot allocate all claims"
ATTRIBUTES = f'device.attributes["{make.CLASS}"]'
CAPACITY = f'device.capacity["{make.CLASS}"]'


@pytest.fixture
def machine(site: Site) -> wiring.Wiring:
    """The wiring."""
    return wiring.read(site.disk.machine)


def test_two_gpus_of_one_switch(site: Site, space: Space, machine: wiring.Wiring) -> None:
    (single,) = given.get(site, space, "single")
    for attribute in (PCIE_ROOT, "pcieSwitch", "alignedPair"):
        name = attribute.rpartition("/")[2].lower()
        given.ask(space, f"three-{name}", make.request(count=3), constraints=[make.match(attribute)])
        space.pending(f"three-{name}", saying=NO_ROOM)
        two = given.get(site, space, name, make.request(count=2), constraints=[make.match(attribute)])
        assert len(machine.switches(two)) == len(machine.roots(two)) == 1
        assert machine.switches(two).isdisjoint(machine.switches([single]))


def test_four_gpus_of_one_numa_node(site: Site, space: Space, machine: wiring.Wiring) -> None:
    (single,) = given.get(site, space, "single")
    for attribute in (NUMA_NODE, "alignedQuad"):
        name = attribute.rpartition("/")[2].lower()
        four = given.get(site, space, name, make.request(count=4), constraints=[make.match(attribute)])
        assert len(machine.numa_nodes((single, *four))) == 2
        assert len(machine.numa_nodes(four)) == 1
        assert len(machine.switches(four)) == 2
        space.delete("Pod", name)


def test_one_gpu_on_each_switch(site: Site, space: Space, machine: wiring.Wiring) -> None:
    four = given.get(site, space, "four", make.request(count=4), constraints=[make.distinct("pcieSwitch")])
    assert len(machine.switches(four)) == 4
    given.ask(space, "five", make.request(count=5), constraints=[make.distinct("pcieSwitch")])
    space.pending("five", saying=NO_ROOM)


def test_keys_that_the_machine_has_not(space: Space) -> None:
    missing = ("nvlinkDomain", "nvlinkClique", "fabricClique")
    for attribute in missing:
        given.ask(space, attribute.lower(), make.request(), constraints=[make.match(attribute)])
    for attribute in missing:
        space.pending(attribute.lower(), saying=NO_ROOM)


def test_the_second_choice_where_the_hardware_has_not_the_first(
    site: Site, space: Space, machine: wiring.Wiring
) -> None:
    given.ask(
        space,
        "p",
        make.first_of(
            "gpu",
            make.request("h100", where=f'{ATTRIBUTES}.productName.contains("H100")'),
            make.request("pair", count=2, where=f'{ATTRIBUTES}.productName.contains("L40S")'),
        ),
        constraints=[make.match("pcieSwitch", "gpu/pair")],
    )
    two = given.devices(site, space, "p")
    assert space.devices("p", request="gpu/pair") == two
    assert len(two) == 2
    assert len(machine.switches(two)) == 1


def test_the_second_choice_where_the_first_is_used_up(site: Site, space: Space, machine: wiring.Wiring) -> None:
    choices = make.first_of("gpu", make.request("four", count=4), make.request("two", count=2))
    constraints = [make.match(NUMA_NODE)]
    first = given.get(site, space, "first", choices, constraints=constraints)
    single = given.get(site, space, "single")
    second = given.get(site, space, "second", choices, constraints=constraints)
    assert [len(space.devices("first", request="gpu/four")), len(space.devices("second", request="gpu/two"))] == [4, 2]
    assert len(machine.numa_nodes(first)) == len(machine.numa_nodes((*single, *second))) == 1


def test_cel_that_matches(site: Site, space: Space) -> None:
    """Eight requests, one GPU each: the last expression names one, and leaves the others to those before."""
    expressions = (
        f'{ATTRIBUTES}.productName == "NVIDIA L40S"',
        f'{ATTRIBUTES}.architecture in ["Ada Lovelace", "Hopper"]',
        f'{CAPACITY}.memory.compareTo(quantity("40Gi")) >= 0',
        f'{ATTRIBUTES}.cudaComputeCapability.compareTo(semver("8.9.0")) >= 0',
        f'{ATTRIBUTES}.driverVersion.isGreaterThan(semver("580.0.0"))',
        f'{ATTRIBUTES}.nicDistance == "PIX" && {ATTRIBUTES}.memoryEnforcement == "whole"',
        f'{ATTRIBUTES}.?nvlinkDomain.orValue("none") == "none"',
        'device.attributes["resource.kubernetes.io"].pciBusID == "0000:23:00.0"',
    )
    given.ask(space, "p", *(make.request(f"r{n}", where=expression) for n, expression in enumerate(expressions)))
    assert len(set(given.devices(site, space, "p"))) == 8
    assert space.devices("p", request="r7") == ("gpu-0000-23-00-0",)


def test_cel_that_does_not_match(space: Space) -> None:
    expressions = (
        f'{ATTRIBUTES}.productName.matches("H100|H200")',
        f'{CAPACITY}.memory.compareTo(quantity("48Gi")) >= 0',  # of 48 GB, 45 GiB are for use
        f'{ATTRIBUTES}.cudaDriverVersion.isLessThan(semver("13.0.0"))',
        f'has({ATTRIBUTES}.nvlinkDomain) && {ATTRIBUTES}.nvlinkDomain == "x"',
        f"{ATTRIBUTES}.?nvlinkDomain.hasValue()",
    )
    for number, expression in enumerate(expressions):
        given.ask(space, f"p{number}", make.request(where=expression))
    for number, _ in enumerate(expressions):
        space.pending(f"p{number}", saying=NO_ROOM)


@pytest.mark.parametrize(
    ("expression", "said"),
    [
        (f'{ATTRIBUTES}.productName == "NVIDIA', "Syntax error"),
        (f"{CAPACITY}.memory > 40", "no matching overload"),
        (f'device.attributes["{make.CLASS}"]', "must evaluate to bool"),
    ],
)
def test_cel_that_cannot_be_meant_is_refused_at_once(space: Space, expression: str, said: str) -> None:
    with pytest.raises(ApiError, match=said) as refused:
        space.create(make.claim("wrong", make.request(where=expression)))
    assert refused.value.status == 422
    assert "spec.devices.requests[0].exactly.selectors[0].cel.expression" in refused.value.message


def test_cel_on_a_missing_attribute_is_said_in_the_pod_and_stops_no_other(site: Site, space: Space) -> None:
    for missing in ("nvlinkDomain", "productname"):
        given.ask(space, missing.lower(), make.request(where=f'{ATTRIBUTES}.{missing} == "x"'))
        space.pending(missing.lower(), saying=f"CEL runtime error: no such key: {missing}")
        event = space.api.wait_event("Pod", missing.lower(), space.name, text="FailedScheduling")
        assert f"selector #0 on device {site.disk.driver}/{site.pool}/gpu-" in event["message"]
    assert given.get(site, space, "right")


def test_singles_fill_one_switch_before_the_next(site: Site, space: Space, machine: wiring.Wiring) -> None:
    order = tuple(device["name"] for device in site.agent.devices())
    switches = [machine.gpu(device).switch for device in order]
    assert switches == sorted(switches, key=switches.index)
    singles = [device for name in ("a", "b", "c") for device in given.get(site, space, name)]
    assert singles == list(order[:3])
    four = given.get(site, space, "four", make.request(count=4), constraints=[make.match(NUMA_NODE)])
    assert machine.switches(four).isdisjoint(machine.switches(singles))
    given.ask(space, "two", make.request(count=2), constraints=[make.match("pcieSwitch")])
    space.pending("two", saying=NO_ROOM)
    space.delete("Pod", "c")
    assert given.devices(site, space, "two") == order[2:4]
    space.delete("Pod", "a")
    assert given.get(site, space, "again") == (order[0],)


def test_the_examples(site: Site, space: Space, machine: wiring.Wiring) -> None:
    order = tuple(device["name"] for device in site.agent.devices())
    name = "two-gpus-apart"
    with examples.applied(space, name):
        assert given.devices(site, space, name, "gpus") == (order[0], order[2])
    name = "two-gpus-of-a-pcie-switch"
    with examples.applied(space, name):
        assert given.devices(site, space, name, "gpus") == order[4:6]
        space.delete("Pod", name)
    name = "h100-or-else-l40s"
    with examples.applied(space, name):
        two = given.devices(site, space, name, "gpus")
    assert space.devices(name, "gpus", request="gpus/l40s") == two == order[4:6]
    assert len(machine.switches(two)) == 1
