# SPDX-License-Identifier: Apache-2.0
"""A GPU and a NIC in one claim: a second driver on the node offers the NICs of the same machine under dranet's names.

- both drivers are offered side by side, and the container has what both gave
- a pair on one host bridge; an RDMA NIC; a pair in one NUMA node
- two pairs in a claim, one constraint each; one constraint over all four asks for more than the machine has
- every GPU with the NIC of its host bridge
- a derived attribute where the gate is off: the server drops it, and the pod waits
- the examples for users
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.e2e.kit import examples, given, left, make, nics, wiring
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
    given.ask(
        *(space, "wrong", make.request("gpu", count=2), nic("nic-0"), nic("nic-1")),
        constraints=[make.match(PCIE_ROOT)],
    )
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


@pytest.mark.parametrize(("name", "pairs"), [("a-gpu-and-the-nic-beside-it", 1), ("two-pairs-of-gpu-and-nic", 2)])
def test_the_examples(site: Site, space: Space, machine: wiring.Wiring, name: str, pairs: int) -> None:
    with examples.applied(space, name):
        gpus = given.devices(site, space, name, "gpus")
    results = space.claim_of(name, "gpus")["status"]["allocation"]["devices"]["results"]
    found = [inventory.address_of(item["device"]) for item in results if item["driver"] == inventory.DRIVER]
    assert len(gpus) == len(found) == pairs
    for gpu in gpus:
        assert any(machine.gpu(gpu).shares_switch(machine.nic(address)) for address in found)
