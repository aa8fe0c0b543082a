# SPDX-License-Identifier: Apache-2.0
"""A GPU with exactly the NIC that discovery paired it with: two drivers that share no attribute, joined by a derived one.

Gate DRADerivedAttributes (alpha in 1.37). Our `nicPciBusID` is compared with dranet's `pciAddress`.

- the NIC on the GPU's switch, for each GPU of a DGX H100; the example for users
- where no NIC shares a host bridge with a GPU: nothing by pcieRoot, the pair by the derived attribute, and by what the examples for
  users say instead
- an expression that fails is said in the pod; one that nothing uses is refused
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.e2e.kit import examples, given, left, make, nics, wiring
from tests.e2e.kit.api import ApiError, Json
from tests.e2e.kit.sites import Site, Sites
from tests.e2e.kit.space import Space
from tests.e2e.nicdriver import inventory

DERIVED = "derived/nic"
OURS = f'device.attributes["{make.CLASS}"].?nicPciBusID.orValue("none")'
THEIRS = f'device.attributes["{inventory.DRIVER}"].pciAddress'
NUMA_NODE = "resource.kubernetes.io/numaNode"
NO_ROOM = "cannot allocate all claims"


@pytest.fixture(scope="module")
def site(sites: Sites) -> Iterator[Site]:
    """A cluster with the gate."""
    with sites.other(gates={"DRADerivedAttributes": True}) as found:
        yield found


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


def deriving(request: Json, expression: str, name: str = DERIVED) -> Json:
    """The request with a derived attribute."""
    request["exactly"]["derivedAttributes"] = [{"name": name, "expression": expression}]
    return request


def paired(site: Site, space: Space, pod: str) -> tuple[str, str]:
    """Device of the GPU and address of the NIC that a pod got by the derived attribute."""
    given.ask(
        space,
        pod,
        deriving(make.request(), OURS),
        deriving(make.request("nic", device_class=nics.CLASS), THEIRS),
        constraints=[make.match(DERIVED)],
    )
    given.devices(site, space, pod)
    (gpu,) = space.devices(pod, request="gpu")
    (name,) = space.devices(pod, request="nic")
    return gpu, inventory.address_of(name)


def test_each_gpu_gets_the_nic_on_its_switch(site: Site, space: Space, machine: wiring.Wiring) -> None:
    pairs = [paired(site, space, f"p{number}") for number in range(len(machine.gpus))]
    assert len({gpu for gpu, _ in pairs}) == len({address for _, address in pairs}) == len(machine.gpus)
    for gpu, address in pairs:
        assert machine.gpu(gpu).shares_switch(machine.nic(address)), (gpu, address)


def test_the_example(site: Site, space: Space, machine: wiring.Wiring) -> None:
    name = "the-exact-nic"
    with examples.applied(space, name):
        (gpu,) = given.devices(site, space, name, "gpus")
        (nic,) = space.devices(name, "gpus", request="nic")
    assert machine.gpu(gpu).shares_switch(machine.nic(inventory.address_of(nic)))


def test_an_expression_that_fails_is_said_in_the_pod(space: Space) -> None:
    given.ask(
        space,
        "p",
        deriving(make.request(), f'device.attributes["{make.CLASS}"].nicAddress'),
        deriving(make.request("nic", device_class=nics.CLASS), THEIRS),
        constraints=[make.match(DERIVED)],
    )
    space.pending("p", saying="evaluate derived attribute derived/nic on device gpu.nearfield.dev/")


def test_an_attribute_that_nothing_uses_is_refused(space: Space) -> None:
    with pytest.raises(ApiError, match="must be referenced by at least one") as refused:
        space.create(make.claim("wrong", deriving(make.request(), OURS)))
    assert refused.value.status == 422


@pytest.mark.machine("gb200-tray")
def test_no_host_bridge_is_shared(site: Site, space: Space, machine: wiring.Wiring) -> None:
    nic = make.request("nic", device_class=nics.CLASS, where=f'device.attributes["{inventory.DRIVER}"].rdma')
    given.ask(space, "root", make.request(), nic, constraints=[make.match("resource.kubernetes.io/pcieRoot")])
    space.pending("root", saying=NO_ROOM)
    pairs = [paired(site, space, f"p{number}") for number in range(len(machine.gpus))]
    assert len({gpu for gpu, _ in pairs}) == len({address for _, address in pairs}) == len(machine.gpus)
    for gpu, address in pairs:
        assert machine.gpu(gpu).numa == machine.nic(address).numa, (gpu, address)
        assert inventory.character_devices(site.disk.machine, address)


@pytest.mark.machine("gb200-tray")
def test_examples_where_no_host_bridge_is_shared(site: Site, space: Space, machine: wiring.Wiring) -> None:
    given.get(site, space, "holder", make.request(count=2), constraints=[make.match(NUMA_NODE)])
    for near in ("a-gpu-and-a-nic-of-its-numa-node", "a-gpu-and-the-nearest-nic"):
        with examples.applied(space, near):
            (gpu,) = given.devices(site, space, near, "gpus")
            (nic,) = space.devices(near, "gpus", request="nic")
        assert machine.gpu(gpu).numa == machine.nic(inventory.address_of(nic)).numa == 1
        space.delete("Pod", near)
    exact = "a-gpu-and-its-nic-by-address"
    paired = {item["name"]: item["attributes"]["nicPciBusID"]["string"] for item in site.agent.devices()}
    with examples.applied(space, exact, replace={"0000:18:00.0": paired[gpu]}):
        assert given.devices(site, space, exact, "gpus") == (gpu,)
        (nic,) = space.devices(exact, "gpus", request="nic")
    assert inventory.address_of(nic) == paired[gpu]
