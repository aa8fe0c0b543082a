# SPDX-License-Identifier: Apache-2.0
"""A GPU and a NIC in one claim: a second driver on the node offers the NICs of the same machine under dranet's names.

- both drivers are offered side by side, and the container has what both gave
- a pair on one host bridge; an RDMA NIC; a pair in one NUMA node
- two pairs in a claim, one constraint each; one constraint over all four asks for more than the machine has
- every GPU with the NIC of its host bridge
- a derived attribute where the gate is off: the server drops it, and the pod waits
- the examples for users: pairs, a whole node
- eight pairs, where one NIC is taken: how long the scheduler tries before it says so, written three ways
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest

from tests.e2e.kit import examples, given, left, make, nics, page, wiring
from tests.e2e.kit.api import Json
from tests.e2e.kit.sites import Site
from tests.e2e.kit.space import Space
from tests.e2e.nicdriver import inventory

NUMA_NODE = "resource.kubernetes.io/numaNode"
PCIE_ROOT = "resource.kubernetes.io/pcieRoot"
NO_ROOM = "cannot allocate all claims"
RDMA = f'device.attributes["{inventory.DRIVER}"].rdma'


@pytest.fixture
def offered(nothing_left: left.Leftovers, site: Site) -> Iterator[None]:
    """The NICs are offered."""
    del nothing_left
    with nics.offered(site):
        yield


@pytest.fixture
def space(offered: None, spaces: Callable[[], Space]) -> Space:
    """The namespace of the test; its pods are gone before the NICs are."""
    del offered
    return spaces()


@pytest.fixture
def machine(site: Site) -> wiring.Wiring:
    """The wiring."""
    return wiring.read(site.disk.machine)


def nic(name: str = "nic", *, where: str = RDMA) -> Json:
    """A request for one NIC."""
    return make.request(name, device_class=nics.CLASS, where=where)


def pair(space: Space, pod: str, gpu: str = "gpu", of: str = "nic") -> tuple[str, str]:
    """Device of a GPU and address of a NIC that two requests of a pod's claim got."""
    (device,) = space.devices(pod, request=gpu)
    (name,) = space.devices(pod, request=of)
    return device, inventory.address_of(name)


def nics_of(space: Space, pod: str) -> tuple[str, ...]:
    """Addresses of the NICs that the pod of an example got."""
    results = space.claim_of(pod, "gpus")["status"]["allocation"]["devices"]["results"]
    return tuple(inventory.address_of(item["device"]) for item in results if item["driver"] == inventory.DRIVER)


def test_a_gpu_and_a_nic_of_one_host_bridge(site: Site, space: Space, machine: wiring.Wiring) -> None:
    published = site.api.items("ResourceSlice", fields=f"spec.nodeName={site.node_name}")
    assert {item["spec"]["driver"]: len(item["spec"]["devices"]) for item in published} == {
        site.disk.driver: len(machine.gpus),
        inventory.DRIVER: len(machine.nics),
    }
    given.ask(space, "p", make.request(), nic(), constraints=[make.match(PCIE_ROOT)])
    given.devices(site, space, "p")
    gpu, address = pair(space, "p")
    assert machine.gpu(gpu).root == machine.nic(address).root
    assert machine.gpu(gpu).shares_switch(machine.nic(address))
    env = space.look("p").env
    assert [value for name, value in env.items() if name.startswith("NIC_")] == [address]
    verbs = inventory.character_devices(site.disk.machine, address)
    assert space.exec("p", "ls", "/dev/infiniband").split() == [path.rpartition("/")[2] for path in verbs]
    told = site.kubelet.pod_resources(space.name, "p")["main"]
    assert {(entry.driver, entry.device) for entry in told} == {
        (site.disk.driver, gpu),
        (inventory.DRIVER, inventory.device_name(address)),
    }


def test_a_gpu_and_a_nic_of_one_numa_node(site: Site, space: Space, machine: wiring.Wiring) -> None:
    second = f'device.attributes["{site.disk.driver}"].cpuSocket == 1'
    storage = f'{RDMA} && device.attributes["{inventory.DRIVER}"].encapsulation == "ether"'
    given.ask(
        space,
        "p",
        make.request(where=second),
        nic(where=storage),
        constraints=[make.match(NUMA_NODE)],
    )
    given.devices(site, space, "p")
    gpu, address = pair(space, "p")
    assert machine.gpu(gpu).numa == machine.nic(address).numa == 1
    assert not machine.gpu(gpu).shares_switch(machine.nic(address))


def test_two_pairs_in_a_claim(site: Site, space: Space, machine: wiring.Wiring) -> None:
    with examples.applied(space, "two-pairs-of-gpu-and-nic"):  # brings the class
        space.delete("Pod", "two-pairs-of-gpu-and-nic")
        requests, constraints = page.wrong("one constraint over two GPUs and two NICs")
        given.ask(space, "wrong", *requests, constraints=constraints)
        space.pending("wrong", saying=NO_ROOM)
    given.ask(
        *(space, "right", make.request("gpu-0"), make.request("gpu-1"), nic("nic-0"), nic("nic-1")),
        constraints=[
            make.match(PCIE_ROOT, "gpu-0", "nic-0"),
            make.match(PCIE_ROOT, "gpu-1", "nic-1"),
            make.match("alignedPair", "gpu-0", "gpu-1"),
        ],
    )
    given.devices(site, space, "right")
    pairs = [pair(space, "right", f"gpu-{n}", f"nic-{n}") for n in range(2)]
    assert len(machine.numa_nodes(gpu for gpu, _ in pairs)) == 1
    assert all(machine.gpu(gpu).shares_switch(machine.nic(address)) for gpu, address in pairs)


def test_every_gpu_with_its_nic(site: Site, space: Space, machine: wiring.Wiring) -> None:
    space.create(make.template("pair", make.request(), nic(), constraints=[make.match(PCIE_ROOT)]))
    pods = [f"p{number}" for number in range(len(machine.gpus))]
    for pod in pods:
        space.create(make.pod(pod, claims={"gpu": "template:pair"}))
    for pod in pods:
        given.devices(site, space, pod)
        gpu, address = pair(space, pod)
        assert machine.gpu(gpu).shares_switch(machine.nic(address))
    space.create(make.pod("more", claims={"gpu": "template:pair"}))
    space.pending("more", saying=NO_ROOM)


def test_a_derived_attribute_where_the_gate_is_off(space: Space) -> None:
    gpu = make.request()
    gpu["exactly"]["derivedAttributes"] = [{"name": "derived/nic", "expression": '"x"'}]
    given.ask(space, "p", gpu, constraints=[make.match("derived/nic")])
    assert "derivedAttributes" not in space.get("ResourceClaimTemplate", "p")["spec"]["spec"]["devices"]["requests"][0]
    space.pending("p", saying=NO_ROOM)


PAIRS = {
    "a-gpu-and-the-nic-beside-it": 1,
    "a-gpu-and-its-nic-by-address": 1,
    "a-gpu-and-the-nearest-nic": 1,
    "two-pairs-of-gpu-and-nic": 2,
    "eight-pairs-of-gpu-and-nic": 8,
}


@pytest.mark.parametrize(("name", "pairs"), PAIRS.items())
def test_examples_of_pairs(site: Site, space: Space, machine: wiring.Wiring, name: str, pairs: int) -> None:
    with examples.applied(space, name):
        gpus = given.devices(site, space, name, "gpus")
    found = nics_of(space, name)
    assert len(gpus) == len(found) == pairs
    for gpu in gpus:
        assert any(machine.gpu(gpu).shares_switch(machine.nic(address)) for address in found)


def test_the_example_of_a_whole_node(site: Site, space: Space, machine: wiring.Wiring) -> None:
    name = "all-gpus-and-nics-of-a-node"
    with examples.applied(space, name):
        gpus = given.devices(site, space, name, "gpus")
    assert set(gpus) == {gpu.gpu for gpu in machine.gpus}
    verbs = {nic.address: inventory.character_devices(site.disk.machine, nic.address) for nic in machine.nics}
    assert set(nics_of(space, name)) == {address for address, nodes in verbs.items() if nodes}
    assert set(nics_of(space, name)) < verbs.keys()


def test_eight_pairs_where_a_nic_is_taken(
    site: Site, space: Space, machine: wiring.Wiring, record_property: Callable[[str, object], None]
) -> None:
    numbers = range(len(machine.gpus))
    rail = f'device.attributes["{site.disk.driver}"].?rail.orValue(-1) == {{}}'
    gpus = [make.request(f"gpu-{n}") for n in numbers]
    pairs = [nic(f"nic-{n}") for n in numbers]
    told = [make.request(f"gpu-{n}", where=rail.format(n)) for n in numbers]
    ways = {
        "each GPU told by its rail": [request for pair in zip(told, pairs, strict=True) for request in pair],
        "each GPU, then its NIC": [request for pair in zip(gpus, pairs, strict=True) for request in pair],
        "all GPUs first": [*gpus, *pairs],
    }
    (paired, *_) = (item["attributes"]["nicPciBusID"]["string"] for item in site.agent.devices())
    given.get(site, space, "holder", nic(where=f'device.attributes["{inventory.DRIVER}"].pciAddress == "{paired}"'))
    for number, (way, requests) in enumerate(ways.items()):
        matches = [make.match(PCIE_ROOT, f"gpu-{n}", f"nic-{n}") for n in numbers]
        began = time.monotonic()
        given.ask(space, f"p{number}", *requests, constraints=matches)
        space.pending(f"p{number}")
        record_property(f"{way}: pod said to wait after", f"{time.monotonic() - began:.1f} s")
        space.delete("Pod", f"p{number}")
