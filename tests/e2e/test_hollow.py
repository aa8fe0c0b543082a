# SPDX-License-Identifier: Apache-2.0
"""Nodes without containers, whose agents publish as those of real nodes do: scheduling across nodes, and who may write what.

- scheduling: a claim that one machine alone can satisfy lands on it; who finds every node full waits for one; pods on several nodes get
  GPUs of one rail; a node with an earlier choice is preferred; a selector that reads what one node has not stops a pod on every node
- rights: an agent's token is bound to its Node, writes its own slices and no other node's, and dies with its Node
- life: nodes stay Ready, an agent that is killed finds its slices again, pods that are deleted go
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Mapping
from functools import partial
from http import HTTPStatus
from typing import Any

import pytest

from driver import values
from hack.realnode import hollow
from tests.e2e.kit import examples, hollows, make, page, waiting
from tests.e2e.kit.api import Api, ApiError
from tests.e2e.kit.sites import Site, Sites
from tests.e2e.kit.space import Space

MACHINES = ("dgx-h100", "l40s-8-pcie")
NODE_LIFECYCLE_S = 40
"""After so long without a heartbeat the node lifecycle controller taints a Node."""


@pytest.fixture(scope="module")
def site(sites: Sites) -> Iterator[Site]:
    """A cluster without the DaemonSet; its only GPUs are those of hollow nodes."""
    with sites.other(hollow=MACHINES, with_agent=False) as found:
        yield found


@pytest.fixture(autouse=True)
def nothing_left(site: Site) -> Iterator[None]:
    """In the place of conftest's, which looks at the agent of the real node: every device is published and free again."""
    yield
    hollows.require_free(site, names(site), gpus=8)


def names(site: Site) -> tuple[str, ...]:
    """Of the hollow nodes, in the order of MACHINES."""
    return tuple(site.cluster.layout.hollow_name(number) for number in range(1, len(MACHINES) + 1))


def token(site: Site, node: str) -> str:
    """Of the agent of a hollow node."""
    number = names(site).index(node) + 1
    kubeconfig = json.loads((site.cluster.layout.hollow_dir(number) / "agent.kubeconfig").read_text())
    return str(kubeconfig["users"][0]["user"]["token"])


def test_a_claim_lands_on_the_machine_that_can_satisfy_it(site: Site, space: Space) -> None:
    for node, product in zip(names(site), ("H100", "L40S"), strict=True):
        where = f'device.attributes["{values.DRIVER_NAME}"].productName.contains("{product}")'
        space.create(
            make.template(f"t-{node}", make.request("gpu", count=2, where=where)),
            make.pod(f"p-{node}", claims={"gpu": f"template:t-{node}"}),
        )
    for node in names(site):
        assert hollows.placed(space, f"p-{node}") == node
        claim = space.claim_of(f"p-{node}", "gpu")
        results = claim["status"]["allocation"]["devices"]["results"]
        assert {result["pool"] for result in results} == {node}
        assert len({result["device"] for result in results}) == 2


def test_who_finds_all_nodes_full_waits_for_one(site: Site, space: Space) -> None:
    space.create(make.template("all", make.request("gpu", count=8)))
    for pod in ("p0", "p1"):
        space.create(make.pod(pod, claims={"gpu": "template:all"}))
    assert {hollows.placed(space, "p0"), hollows.placed(space, "p1")} == set(names(site))
    space.create(make.pod("p2", claims={"gpu": "template:all"}))
    space.pending("p2", saying="cannot allocate all claims")
    freed = hollows.placed(space, "p0")
    space.delete("Pod", "p0")
    assert hollows.placed(space, "p2") == freed


def test_gpus_of_one_rail_on_several_nodes(site: Site, space: Space) -> None:
    rails = {
        (node, item["name"]): item["attributes"]["rail"]["int"]
        for node in names(site)
        for item in hollows.devices(site.api, node)
    }
    on_it = {key for key, rail in rails.items() if rail == 3}
    assert {node for node, _ in on_it} == set(names(site))
    with examples.applied(space, "by-rail"):
        (pod,) = (body for body in examples.load("by-rail") if body["kind"] == "Pod")
        pods = ["by-rail", *(f"by-rail-{number}" for number in range(1, len(on_it) + 1))]
        for name in pods[1:]:
            space.create({**pod, "metadata": {"name": name}})
        given = {(hollows.placed(space, name), *space.devices(name, "gpus")) for name in pods[:-1]}
        assert given == on_it
        space.pending(pods[-1], saying="cannot allocate all claims")


def test_a_node_with_an_earlier_choice_is_preferred(site: Site, space: Space) -> None:
    name = "h100-or-else-l40s"
    first, second = names(site)
    with examples.applied(space, name):
        (pod,) = (body for body in examples.load(name) if body["kind"] == "Pod")
        pods = [name, *(f"{name}-{number}" for number in range(1, len(hollows.devices(site.api, first)) + 1))]
        for other in pods[1:]:
            space.create({**pod, "metadata": {"name": other}})
        found = {pod: (hollows.placed(space, pod), len(space.devices(pod, "gpus"))) for pod in pods}
    assert sorted(found.values()) == sorted([*([(first, 1)] * (len(pods) - 1)), (second, 2)])


def test_a_key_without_a_guard_stops_a_pod_on_every_node(site: Site, space: Space) -> None:
    requests, constraints = page.wrong("a key without a guard")
    space.create(
        make.template("wrong", *requests, constraints=constraints), make.pod("wrong", claims={"gpu": "template:wrong"})
    )
    space.pending("wrong", saying="CEL runtime error: no such key: nvlinkDomain")
    there = names(site)[MACHINES.index("dgx-h100")]
    selected = {"kubernetes.io/hostname": there}
    space.create(make.pod("selected", claims={"gpu": "template:wrong"}, nodeSelector=selected))
    assert hollows.placed(space, "selected") == there
    guarded = f'device.attributes["{values.DRIVER_NAME}"].?nvlinkDomain.hasValue()'
    space.create(
        make.template("right", make.request(where=guarded)), make.pod("right", claims={"gpu": "template:right"})
    )
    assert hollows.placed(space, "right") == there


def test_a_token_is_bound_to_its_node(site: Site) -> None:
    for node in names(site):
        payload = token(site, node).split(".")[1]
        claims: Mapping[str, Any] = json.loads(base64.urlsafe_b64decode(payload + "=" * (-len(payload) % 4)))
        bound = claims["kubernetes.io"]["node"]
        assert bound == {"name": node, "uid": site.api.get("Node", node)["metadata"]["uid"]}
        assert claims["sub"] == f"system:serviceaccount:{hollow.NAMESPACE}:{hollow.SERVICE_ACCOUNT}"


def test_an_agent_cannot_write_the_slices_of_another(site: Site) -> None:
    one, other = names(site)
    thief = site.api.as_token(token(site, one))
    name = hollows.slices(site.api, other)[0]["metadata"]["name"]
    theirs = site.api.get("ResourceSlice", name)
    new = {**theirs, "metadata": {"name": "stolen"}}
    for attempt in (
        lambda: thief.delete("ResourceSlice", name),
        lambda: thief.replace(theirs),
        lambda: thief.create(new),
    ):
        with pytest.raises(ApiError) as refused:
            attempt()
        assert refused.value.status == HTTPStatus.FORBIDDEN
        assert one in str(refused.value)
    assert site.api.get("ResourceSlice", name) == theirs
    own = site.api.get("ResourceSlice", hollows.slices(site.api, one)[0]["metadata"]["name"])
    thief.replace(own)  # what it may do: write its own, as it is


def test_an_agent_that_is_killed_finds_its_slices_again(site: Site) -> None:
    before = {node: hollows.slices(site.api, node) for node in names(site)}
    site.cluster.kill("agent-1")
    site.cluster.start("agent-1")
    site.cluster.wait_ready("agent-1")
    assert {node: hollows.slices(site.api, node) for node in names(site)} == before


def test_nodes_are_added_while_the_cluster_runs_and_tokens_die_with_their_node(site: Site) -> None:
    (name,) = site.cluster.add_hollow(["gb200-tray"])
    assert len(hollows.devices(site.api, name)) == 4
    number = len(MACHINES) + 1
    kubeconfig = json.loads((site.cluster.layout.hollow_dir(number) / "agent.kubeconfig").read_text())
    agent = site.api.as_token(kubeconfig["users"][0]["user"]["token"])
    assert hollows.slices(agent, name) == hollows.slices(site.api, name)
    site.cluster.stop(f"agent-{number}")
    site.api.delete("Node", name)
    site.api.wait_gone("Node", name)
    # The API server keeps what it found about a token for 10 s.
    waiting.until(lambda: status(agent, name) == HTTPStatus.UNAUTHORIZED, "the token is refused")


def status(agent: Api, node: str) -> int:
    """What a look at the slices of a node comes to."""
    try:
        hollows.slices(agent, node)
    except ApiError as error:
        return error.status
    return HTTPStatus.OK


def test_nodes_stay_ready(site: Site) -> None:
    for node in names(site):
        item = site.api.get("Node", node)
        (ready,) = (condition for condition in item["status"]["conditions"] if condition["type"] == "Ready")
        assert (ready["status"], item["spec"].get("taints")) == ("True", None)
        waiting.until(partial(renewed, site, node), "its lease is renewed")


def renewed(site: Site, node: str) -> bool:
    """Whether the lease of a node was renewed since it was made."""
    lease = json.loads(site.cluster.kubectl("get", "lease", node, "-n", "kube-node-lease", "-o", "json"))
    assert lease["spec"]["leaseDurationSeconds"] == NODE_LIFECYCLE_S
    return bool(lease["spec"]["renewTime"] > lease["metadata"]["creationTimestamp"])
