# SPDX-License-Identifier: Apache-2.0
"""The examples for users on machines that are wired otherwise, as hollow nodes: what is shown is what the scheduler gives, to no container.

- a DGX-1, whose NVLinks are a hybrid mesh: a quad is one of which every two GPUs have links of their own
- a DGX A100 with a NUMA node for every two GPUs, and every GPU on a switch of its own below another: four at a NUMA node there are not,
  nor two below one innermost switch; a quad is of one socket
- ten GPUs on one host bridge: four as near as possible are four at the NUMA node, where one of every quad is taken
- a virtual machine whose firmware tells nothing: nobody is given a GPU for a NUMA node that is not known; pairs there are
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator

import pytest

from tests.e2e.kit import examples, hollows, make, wiring
from tests.e2e.kit.api import Json
from tests.e2e.kit.sites import Site, Sites
from tests.e2e.kit.space import Space

MACHINES = ("dgx-1-v100", "dgx-a100-40gb", "single-root-10", "cloud-vm-a100-8")
NO_ROOM = "cannot allocate all claims"
BUS = 'device.attributes["resource.kubernetes.io"].pciBusID == "{}"'


@pytest.fixture(scope="module")
def site(sites: Sites) -> Iterator[Site]:
    """A cluster whose only GPUs are those of hollow nodes."""
    with sites.other(hollow=MACHINES, with_agent=False) as found:
        yield found


@pytest.fixture(autouse=True)
def nothing_left(site: Site) -> Iterator[None]:
    """In the place of conftest's, which looks at the agent of the real node."""
    yield
    hollows.require_free(site, (node(site, machine) for machine in MACHINES))


def node(site: Site, machine: str) -> str:
    """The Node that has a machine."""
    return site.cluster.layout.hollow_name(MACHINES.index(machine) + 1)


class Asking:
    """Pods for one of the nodes."""

    def __init__(self, site: Site, space: Space, machine: str) -> None:
        self.wiring = wiring.read(hollows.machine(site, MACHINES.index(machine) + 1))
        self.keys = {device["name"]: device["attributes"] for device in hollows.devices(site.api, node(site, machine))}
        self._space = space
        self._node = node(site, machine)
        self._numbers = itertools.count()

    def example(self, name: str) -> str:
        """Make the pod of an example, under another name."""
        (template, pod) = examples.load(name)
        if self._space.api.find("ResourceClaimTemplate", name, self._space.name) is None:
            self._space.create(template)
        pod["metadata"]["name"] = f"{name}-{next(self._numbers)}"
        return self._create(pod)

    def hold(self, address: str) -> None:
        """Take one GPU."""
        name = f"holder-{next(self._numbers)}"
        self._space.create(make.template(name, make.request(where=BUS.format(address))))
        self.given(self._create(make.pod(name, claims={"gpus": f"template:{name}"})))

    def given(self, pod: str, request: str | None = None) -> tuple[str, ...]:
        """What a pod got on this node."""
        assert hollows.placed(self._space, pod) == self._node
        return self._space.devices(pod, "gpus", request=request)

    def waits(self, pod: str) -> None:
        """It gets nothing here."""
        self._space.pending(pod, saying=NO_ROOM)

    def _create(self, pod: Json) -> str:
        pod["spec"]["nodeSelector"] = {"kubernetes.io/hostname": self._node}
        self._space.create(pod)
        return str(pod["metadata"]["name"])


@pytest.fixture
def asking(site: Site, space: Space) -> Callable[[str], Asking]:
    """Asks for GPUs of a machine."""
    return lambda machine: Asking(site, space, machine)


def test_a_hybrid_mesh(site: Site, asking: Callable[[str], Asking]) -> None:
    ask = asking("dgx-1-v100")
    state = json.loads((hollows.machine(site, MACHINES.index("dgx-1-v100") + 1) / "nvml.json").read_text())
    linked = {
        frozenset((gpu["pci"], wiring.end(link))) for gpu in state["nvml"]["gpus"] for link in gpu["nvlinks"] or ()
    }
    for _ in range(2):
        quad = [ask.wiring.gpu(device).address for device in ask.given(ask.example("the-best-quad"))]
        assert len(quad) == 4
        assert all(frozenset(two) in linked for two in itertools.combinations(quad, 2))
    ask.waits(ask.example("the-best-quad"))


def test_a_numa_node_for_every_two_gpus(asking: Callable[[str], Asking]) -> None:
    ask = asking("dgx-a100-40gb")
    near = ask.given(ask.example("two-gpus-of-a-numa-node"))
    assert len(ask.wiring.numa_nodes(near)) == 1
    ask.waits(ask.example("two-gpus-of-a-pcie-switch"))
    quad = ask.given(ask.example("the-best-quad"))
    assert len(ask.wiring.numa_nodes(quad)) == 2
    assert len({ask.keys[device]["cpuSocket"]["int"] for device in quad}) == 1
    ask.waits(ask.example("four-gpus-as-near-as-possible"))  # two are left


def test_one_host_bridge(asking: Callable[[str], Asking]) -> None:
    ask = asking("single-root-10")
    switch = ask.given(ask.example("two-gpus-of-a-pcie-switch"))
    assert len(ask.wiring.switches(switch)) == 1
    quads = {device: keys["alignedQuad"]["string"] for device, keys in ask.keys.items() if "alignedQuad" in keys}
    for address in set(quads.values()) - {quads[device] for device in switch if device in quads}:
        ask.hold(address)  # a group has the name of its first GPU
    four = ask.given(ask.example("four-gpus-as-near-as-possible"), "gpus/numa")
    assert len(set(four)) == 4


def test_no_numa_node_is_known(asking: Callable[[str], Asking]) -> None:
    ask = asking("cloud-vm-a100-8")
    ask.waits(ask.example("two-gpus-of-a-numa-node"))
    pair = ask.given(ask.example("the-best-pair"))
    assert len(ask.wiring.joined(pair)) == 1
