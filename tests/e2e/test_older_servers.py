# SPDX-License-Identifier: Apache-2.0
"""API servers of Kubernetes 1.35 and 1.36, with the feature gates and fields of those releases.

- plain devices work from the claim to the container;
- a GPU that is lost under a pod: where the server keeps no taints (1.35) it stays offered, and that is said on the Node, on
  /readyz, as a Finding and in the log; where it does (1.36) it is tainted;
- a GPU that is lost and that nobody has leaves the slice on both;
- what the server drops and refuses is what the stand-in of the same release does;
- attributes that are lists, which the configuration asks for and neither server takes: published as one number, and that is said.
- the slices of every machine are accepted, with all their fields;
- the examples for users are taken whole, but for those of which the page says which release they need.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator

import pytest

from discovery.address import parse
from discovery.mock import faults
from discovery.mock.fault import Fault, Kind
from driver.kube import client
from tests.e2e.kit import accepted, configfile, examples, machines, make, waiting
from tests.e2e.kit.node import Gpu
from tests.e2e.kit.sites import Site, Sites
from tests.e2e.kit.space import Space
from tests.fakes import server_cases

KEEPS_TAINTS = {"1.35": False, "1.36": True}
NOT_TAKEN = {
    "1.35": {
        "a-share-of-a-gpu",
        "a-share-or-else-mig-or-else-a-gpu",
        "a-share-that-is-enforced",
        "a-share-with-less-than-it-has",
        "extended-resource",
        "mig-extended-resource",
        "two-gpus-apart",
        "two-mig-slices-of-different-gpus",
        "two-shares-of-a-gpu",
        "two-shares-of-different-gpus",
        "the-exact-nic",
    },
    "1.36": {"the-exact-nic"},
}
QUICK = {"NEARFIELD_PROBE_INTERVAL": "1s"}


@pytest.fixture(scope="module", params=sorted(KEEPS_TAINTS))
def release(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def site(sites: Sites, release: str) -> Iterator[Site]:
    with sites.other(emulate=release, with_agent=False) as found:
        configfile.apply(found, env=QUICK, publish={"numaNode": "list", "pcieSwitches": True})
        yield found


@pytest.fixture(autouse=True)
def _healthy_again(site: Site) -> Iterator[None]:
    yield
    faults.apply(site.disk.machine, ())
    waiting.until(lambda: len(listed(site)) == len(site.disk.gpus()), "all GPUs published")


def well(site: Site) -> bool:
    """Ready, and nothing to say but what every test here has: that the server takes no lists."""
    status, page = site.agent.readyz()
    return status == 200 and len(page.splitlines()) == 2 and "takes no lists" in page


def lose(site: Site, *gpus: Gpu) -> None:
    faults.apply(site.disk.machine, [Fault(kind=Kind.GPU_LOST, target=parse(gpu.address)) for gpu in gpus])


def listed(site: Site) -> dict[str, int]:
    """The devices of the slices and how many taints each has."""
    return {item["name"]: len(item.get("taints", [])) for item in site.agent.devices()}


def test_a_pod_gets_the_gpus_that_it_asks_for(site: Site, space: Space, release: str) -> None:
    version = json.loads(site.api.send("GET", "/version"))
    assert f"{version['emulationMajor']}.{version['emulationMinor']}" == release
    requests = (make.request("one"), make.request("two", count=2))
    together = make.match("nvlinkDomain")
    space.create(
        make.template("three", *requests, constraints=[together]), make.pod("p", claims={"gpu": "template:three"})
    )
    space.running("p")
    given = [site.disk.gpu(device) for device in space.devices("p")]
    assert len(given) == 3
    assert space.look("p").gpu_nodes == tuple(sorted(gpu.node for gpu in given))
    assert well(site)


def test_the_server_drops_and_refuses_what_the_stand_in_does(site: Site, release: str) -> None:
    with contextlib.closing(client.KubeClient.load(site.cluster.kubeconfig, user_agent="tests/0")) as kube:
        assert server_cases.disagreements(kube, release) == {}


def test_a_gpu_that_is_lost_under_a_pod(site: Site, space: Space, release: str) -> None:
    gpu, *others = site.disk.gpus()
    space.create(make.template("one"), make.pod("p", claims={"gpu": "template:one"}))
    space.running("p")
    lose(site, gpu)
    if KEEPS_TAINTS[release]:
        waiting.until(lambda: listed(site)[gpu.device] == 1, "the lost GPU tainted")
        assert well(site)
    else:
        event = site.api.wait_event("Node", site.node_name, text="TaintsNotKept")
        words = f"This API server keeps no device taints, so {gpu.device} stays offered while a claim has it"
        assert words in event["message"]
        assert "turn on DRADeviceTaints, or drain the node" in event["message"]
        waiting.until(lambda: words in site.agent.readyz()[1], "said on /readyz")
        assert site.agent.readyz()[0] == 200
        assert words in site.agent.logs()
        assert site.agent.metrics().one("nearfield_findings", severity="warning") >= 2
        assert listed(site) == dict.fromkeys((gpu.device, *(other.device for other in others)), 0)
    assert space.get("Pod", "p")["status"]["phase"] == "Running"
    space.delete("Pod", "p")
    waiting.until(lambda: gpu.device not in listed(site), "the lost GPU out of the slice")
    waiting.until(lambda: well(site), "nothing more to say")
    faults.apply(site.disk.machine, ())
    waiting.until(lambda: listed(site).get(gpu.device) == 0, "the GPU back")


def test_a_gpu_that_is_lost_and_that_nobody_has_leaves_the_slice(site: Site) -> None:
    gpu, *others = site.disk.gpus()
    lose(site, gpu)
    waiting.until(lambda: listed(site) == {other.device: 0 for other in others}, "the lost GPU out of the slice")
    faults.apply(site.disk.machine, ())
    waiting.until(lambda: gpu.device in listed(site), "the GPU back")


def test_lists_are_published_as_what_the_server_keeps(site: Site, space: Space) -> None:
    status, page = site.agent.readyz()
    assert status == 200
    assert "This API server takes no lists for attributes" in page
    assert "turn on DRAListTypeAttributes, or take them out of the configuration file" in page
    assert site.agent.metrics().one("nearfield_findings", severity="warning") == 1
    said = [item["attributes"] for item in site.agent.devices()]
    assert sorted(item["resource.kubernetes.io/numaNode"]["int"] for item in said) == [0] * 4 + [1] * 4
    assert not any("pcieSwitches" in item for item in said)
    where = 'device.attributes["resource.kubernetes.io"].numaNode == 1'
    space.create(make.template("one", make.request(where=where)), make.pod("p", claims={"gpu": "template:one"}))
    space.running("p")


def test_the_slices_of_every_machine_are_accepted(site: Site) -> None:
    accepted.require(site, *machines.names())


def test_examples_are_taken_whole(site: Site, space: Space, release: str) -> None:
    assert {name for name in examples.names() if not accepted.whole(space, examples.load(name))} == NOT_TAKEN[release]
