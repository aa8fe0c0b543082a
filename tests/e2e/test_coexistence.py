# SPDX-License-Identifier: Apache-2.0
"""Another driver offers the GPUs of this node too: two that hand out one device hand it out twice, so nothing is published.

- a foreign ResourceSlice with our PCI addresses, and NVIDIA's device plugin in the Node's allocatable: nothing is published; the
  reason is on the Node, on /readyz and in the log, a metric counts it; a running pod keeps its GPU, which stays listed;
- both gone: published again without a restart;
- `--allow-coexistence`: published beside it.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from driver import values
from tests.e2e.kit import make, waiting
from tests.e2e.kit.api import Api, Json
from tests.e2e.kit.sites import Site
from tests.e2e.kit.space import Space

FOREIGN = "gpu.example.com"
RESOURCE = "nvidia.com/gpu"
QUIET_S = 60.0
"""For so long nobody else may have been seen: a driver whose slices kubelet has wiped is back soon."""

AGAIN_S = 240.0
"""Kubelet waits before it starts a container that has failed again."""


def foreign_slice(site: Site, address: str) -> Json:
    """What a driver of somebody else publishes of a GPU of this node."""
    return {
        "apiVersion": make.API,
        "kind": "ResourceSlice",
        "metadata": {"name": "foreign"},
        "spec": {
            "driver": FOREIGN,
            "nodeName": site.node_name,
            "pool": {"name": "foreign", "generation": 1, "resourceSliceCount": 1},
            "devices": [{"name": "gpu-0", "attributes": {"resource.kubernetes.io/pciBusID": {"string": address}}}],
        },
    }


def advertise(api: Api, node: str, amount: str | None) -> None:
    """As kubelet does for a device plugin; None takes it back."""
    offered = {RESOURCE: amount}
    api.patch("Node", node, {"status": {"capacity": offered, "allocatable": offered}}, subresource="status")


@pytest.fixture
def alone_again(site: Site) -> Iterator[None]:
    """Whatever a test does, nobody else offers GPUs after it."""
    yield
    site.api.delete("ResourceSlice", "foreign")
    advertise(site.api, site.node_name, None)
    waiting.until(lambda: len(site.agent.devices()) == len(site.disk.gpus()), "all GPUs published", timeout_s=180)


@pytest.mark.usefixtures("alone_again")
def test_beside_another_driver_nothing_is_published_and_people_are_told(site: Site, space: Space) -> None:
    first, second, *_ = site.disk.gpus()
    space.create(make.template("one"), make.pod("running", claims={"gpu": "template:one"}))
    space.running("running")
    assert space.devices("running") == (first.device,)

    site.api.create(foreign_slice(site, second.address))
    waiting.until(lambda: [d["name"] for d in site.agent.devices()] == [first.device], "only the GPU in use listed")
    (held,) = site.agent.devices()
    assert [taint["key"] for taint in held["taints"]] == [f"{values.DRIVER_NAME}/absent"]
    told = f"driver {FOREIGN} publishes GPU {second.address} of this node too (device gpu-0 of pool foreign)"
    event = site.api.wait_event("Node", site.node_name, text=told)
    assert (event["type"], event["reason"]) == ("Warning", "NotPublished")
    assert told in site.cluster.kubectl("describe", "node", site.node_name)
    status, page = site.agent.readyz()
    assert (status, told in page, "--allow-coexistence" in page) == (200, True, True), page
    assert told in site.agent.logs()
    assert site.agent.metrics().one("nearfield_findings", severity="warning") >= 1

    space.create(make.pod("waiting", claims={"gpu": "template:one"}))
    space.pending("waiting", saying="cannot allocate all claims")
    assert len(space.look("running").gpu_nodes) == 1
    space.delete("Pod", "running")
    waiting.until(lambda: not site.agent.slices(), "no slice at all")

    # One that starts beside both never begins; the Node is read at the start.
    advertise(site.api, site.node_name, "8")
    restarts = site.agent.restarts() + 1
    site.agent.kill()
    waiting.until(
        lambda: site.agent.restarts() == restarts and told in site.agent.readyz()[1],
        "the driver named again",
        timeout_s=AGAIN_S,
    )
    site.api.delete("ResourceSlice", "foreign")
    by_plugin = f"NVIDIA's device plugin offers {RESOURCE}: 8 on this node too"
    waiting.until(lambda: by_plugin in site.agent.readyz()[1], "the plugin named on /readyz")
    site.api.wait_event("Node", site.node_name, text=by_plugin)
    assert site.agent.slices() == []

    pod = site.agent.pod()["metadata"]["uid"]
    advertise(site.api, site.node_name, None)
    waiting.until(site.agent.devices, "published again", timeout_s=QUIET_S + waiting.USUAL_S)
    space.running("waiting")
    assert site.agent.readyz() == (200, "ok\n")
    assert (site.agent.pod()["metadata"]["uid"], site.agent.restarts()) == (pod, restarts)


@pytest.mark.usefixtures("alone_again")
def test_with_allow_coexistence_gpus_are_published_beside_another_driver(site: Site, space: Space) -> None:
    first, *_ = site.disk.gpus()
    site.api.create(foreign_slice(site, first.address))
    site.agent.apply(env={"NEARFIELD_ALLOW_COEXISTENCE": "true"})
    try:
        space.create(make.template("one"), make.pod("p", claims={"gpu": "template:one"}))
        space.running("p")
        assert space.devices("p") == (first.device,)
        assert site.agent.readyz() == (200, "ok\n")
    finally:
        site.api.delete("ResourceSlice", "foreign")
        site.agent.apply()
