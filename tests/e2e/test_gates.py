# SPDX-License-Identifier: Apache-2.0
"""Features that are off by default in 1.37, on a cluster where they are on.

- a claim of a PodGroup, made from its template or given by name: prepared once for two pods, unprepared once, gone with the group;
- attributes that are lists: published, and pods are placed by them.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.kit import configfile, make, waiting
from tests.e2e.kit.api import Json
from tests.e2e.kit.sites import Site, Sites
from tests.e2e.kit.space import Space

GATES = ("GenericWorkload", "DRAWorkloadResourceClaims", "DRAListTypeAttributes")
SCHEDULING = "scheduling.k8s.io/v1beta1"


@pytest.fixture(scope="module")
def site(sites: Sites) -> Iterator[Site]:
    gates = dict.fromkeys(GATES, True)
    with sites.other(gates=gates, runtime_config={SCHEDULING: True}, with_agent=False) as found:
        configfile.apply(found, publish={"numaNode": "list", "pcieSwitches": True})
        yield found


def group(name: str, claim: Json) -> Json:
    """A PodGroup whose pods share a claim."""
    return {
        "apiVersion": SCHEDULING,
        "kind": "PodGroup",
        "metadata": {"name": name},
        "spec": {"schedulingPolicy": {"basic": {}}, "resourceClaims": [claim]},
    }


def member(name: str, group_name: str, claim: Json) -> Json:
    """A pod of it that uses the claim."""
    body = make.pod(name, containers=[make.container(claims=("gpu",))], schedulingGroup={"podGroupName": group_name})
    body["spec"]["resourceClaims"] = [claim]
    return body


def share(site: Site, space: Space, claim: Json) -> str:
    """Two pods of a group run on one claim until both are gone; the name of the claim."""
    before = {method: site.kubelet.calls(method) for method in ("NodePrepareResources", "NodeUnprepareResources")}
    first, *_ = site.disk.gpus()
    space.create(group("g", claim), member("a", "g", claim))
    space.running("a")
    space.create(member("b", "g", claim))
    space.running("b")
    (entry,) = site.disk.record()
    stored = space.get("ResourceClaim", entry.claim.name)
    consumers = [(user["apiGroup"], user["resource"], user["name"]) for user in stored["status"]["reservedFor"]]
    assert consumers == [("scheduling.k8s.io", "podgroups", "g")]
    assert space.look("a").gpu_nodes == space.look("b").gpu_nodes == (first.node,)

    space.delete("Pod", "a")
    assert [held.claim for held in site.disk.record()] == [entry.claim]
    assert space.look("b").gpu_nodes == (first.node,)
    space.delete("Pod", "b")
    # The claim is kubelet's until it has counted the call.
    waiting.until(lambda: site.kubelet.claims_in_use() == 0, "the claim unprepared")
    assert site.disk.record() == ()
    now = {method: site.kubelet.calls(method) for method in before}
    assert {method: now[method] - before[method] for method in before} == dict.fromkeys(before, 1)
    return entry.claim.name


def test_a_claim_made_from_the_template_of_a_group(site: Site, space: Space) -> None:
    space.create(make.template("one"))
    claim = share(site, space, {"name": "gpu", "resourceClaimTemplateName": "one"})
    # It stays allocated for the group, whose next pod gets the same GPU, and goes with it.
    assert space.get("ResourceClaim", claim)["status"].get("allocation") is not None
    space.delete("PodGroup", "g")
    space.gone("ResourceClaim", claim)


def test_a_claim_that_a_group_names(site: Site, space: Space) -> None:
    space.create(make.claim("ours"))
    assert share(site, space, {"name": "gpu", "resourceClaimName": "ours"}) == "ours"
    space.delete("PodGroup", "g")
    space.api.wait(
        "ResourceClaim",
        "ours",
        space.name,
        until=lambda item: not item["status"].get("allocation"),
        what="not allocated any more",
    )


def test_lists_are_published_and_pods_are_placed_by_them(site: Site, space: Space) -> None:
    assert site.agent.readyz() == (200, "ok\n")
    said = {item["name"]: item["attributes"] for item in site.agent.devices()}
    nodes = {name: values["resource.kubernetes.io/numaNode"]["ints"] for name, values in said.items()}
    assert {tuple(node) for node in nodes.values()} == {(0,), (1,)}
    assert all(values["pcieSwitches"]["strings"] for values in said.values())
    where = 'device.attributes["resource.kubernetes.io"].numaNode.includes(1)'
    together = make.match("resource.kubernetes.io/numaNode")
    space.create(
        make.template("four", make.request(count=4, where=where), constraints=[together]),
        make.pod("p", claims={"gpu": "template:four"}),
    )
    space.running("p")
    assert set(space.devices("p")) == {name for name, node in nodes.items() if node == [1]}
