# SPDX-License-Identifier: Apache-2.0
"""The API server refuses the agent: it says so where people look, lives on, and goes on when it may again.

- its rights are taken away while it runs: said on /readyz and in the log, pods end; given back: published, the pod that waited
  starts;
- its token is void, because its ServiceAccount was made anew: the same, and deleting its pod, as it says, helps.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from hack.realnode.cluster import Cluster
from tests.e2e.kit import agent as agents
from tests.e2e.kit import make, waiting
from tests.e2e.kit.api import ApiError
from tests.e2e.kit.sites import Site
from tests.e2e.kit.space import Space

BINDING = "nearfield"
ACCOUNT = "nearfield"
AGAIN_S = 180.0
"""What is refused is tried again at most a minute later."""


@pytest.fixture
def _allowed_again(site: Site) -> Iterator[None]:
    binding = site.api.get("ClusterRoleBinding", BINDING)
    yield
    if site.api.find("ClusterRoleBinding", BINDING) is None:
        give(site, binding)
    waiting.until(site.agent.devices, "published", timeout_s=AGAIN_S)


def give(site: Site, binding: dict[str, object]) -> None:
    kept = {key: binding[key] for key in ("apiVersion", "kind", "roleRef", "subjects")}
    site.api.create({**kept, "metadata": {"name": BINDING}})


def take_slices(site: Site) -> None:
    """Somebody deletes all slices of the node."""
    for item in site.agent.slices():
        site.api.delete("ResourceSlice", item["metadata"]["name"])


@pytest.mark.usefixtures("_allowed_again")
def test_rights_that_are_taken_away_and_given_back(site: Site, space: Space) -> None:
    binding = site.api.get("ClusterRoleBinding", BINDING)
    pod, restarts = site.agent.pod()["metadata"]["uid"], site.agent.restarts()
    space.create(make.claim("c"), make.template("one"), make.pod("before", claims={"gpu": "template:one"}))
    space.running("before")

    site.api.delete("ClusterRoleBinding", BINDING)
    space.create(make.pod("p", claims={"gpu": "c"}))
    space.api.wait("Pod", "p", space.name, until=lambda item: item["spec"].get("nodeName"), what="scheduled")
    take_slices(site)
    waiting.until(lambda: site.agent.readyz()[0] == 503, "not ready")
    waiting.until(lambda: "is forbidden" in site.agent.readyz()[1], "why not, on /readyz")
    # The Node is read before a slice is made; the right to do so is the first that is missing.
    missing = f'User "system:serviceaccount:{agents.NAMESPACE}:{ACCOUNT}" cannot get resource "nodes"'
    assert missing in site.agent.readyz()[1]
    waiting.until(lambda: missing in site.agent.logs(), "why not, in the log")
    assert site.agent.get("/healthz")[0] == 200
    # What needs no API server goes on: the pod that ran ends and is unprepared.
    space.delete("Pod", "before")
    waiting.until(lambda: not site.disk.record(), "unprepared without rights")

    give(site, binding)
    space.retry("p")  # where more than the 40 s have gone for which a Prepare waits
    space.running("p")
    waiting.until(lambda: site.agent.readyz() == (200, "ok\n"), "ready again", timeout_s=AGAIN_S)
    assert (site.agent.pod()["metadata"]["uid"], site.agent.restarts()) == (pod, restarts)


def token(cluster: Cluster, pod: str) -> str:
    """The token that kubelet made for a pod."""
    volumes = f"/var/lib/kubelet/pods/{pod}/volumes/kubernetes.io~projected"
    return cluster.run("sh", "-c", f"cat {volumes}/kube-api-access-*/token")


def refused(site: Site, shown: str) -> bool:
    """Whether the server does not accept a token; it believes one that it has just checked for ten seconds more."""
    try:
        site.api.as_token(shown).items("ResourceSlice", fields=f"spec.nodeName={site.node_name}")
    except ApiError as error:
        return error.status == 401
    return False


def test_credentials_that_are_refused(site: Site, space: Space) -> None:
    pod = site.agent.pod()["metadata"]
    shown = token(site.cluster, pod["uid"])
    account = site.api.get("ServiceAccount", ACCOUNT, agents.NAMESPACE)
    # Its successor of the same name is another one: tokens of the old one stay void, and kubelet makes no new one in time.
    site.api.delete("ServiceAccount", ACCOUNT, agents.NAMESPACE)
    metadata = {key: account["metadata"][key] for key in ("name", "namespace", "labels")}
    site.api.create(
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": metadata, "automountServiceAccountToken": False}
    )
    waiting.until(lambda: refused(site, shown), "the server refuses the agent's token")
    take_slices(site)
    waiting.until(lambda: "does not accept our credentials" in site.agent.readyz()[1], "said on /readyz")
    status, page = site.agent.readyz()
    assert status == 503
    assert "a pod gets new ones when it is deleted" in page
    assert "does not accept our credentials" in site.agent.logs()
    assert site.agent.get("/healthz")[0] == 200

    site.api.delete("Pod", pod["name"], agents.NAMESPACE)
    site.api.wait_gone("Pod", pod["name"], agents.NAMESPACE)
    site.agent.wait_ready()
    space.create(make.template("one"), make.pod("p", claims={"gpu": "template:one"}))
    space.running("p")
