# SPDX-License-Identifier: Apache-2.0
"""What the agent's own token may do on the API server, and what it may not, as somebody who stole it on a node would try.

Aspects: the rights are those of the manifest and no more; everything that the agent does is allowed; other nodes' slices, other
drivers', pools of another name, on what is written and on what is overwritten or removed; Events that pretend; secrets, pods, claims,
nodes, classes and the policies themselves; tokens that are bound to no node.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from driver import values
from tests.e2e.kit import agent as agents
from tests.e2e.kit import waiting
from tests.e2e.kit.api import KINDS, Api, ApiError, Json
from tests.e2e.kit.sites import Site

DRIVER = values.DRIVER_NAME
OTHER_NODE = "other-node"
FOREIGN = "foreign.example.com"
_ACCOUNT = KINDS["ServiceAccount"].path(agents.NAMESPACE, "nearfield")
TOKENS = ("run/secrets/kubernetes.io/serviceaccount/token", "var/run/secrets/kubernetes.io/serviceaccount/token")
"""Where it lies, seen from outside: /var/run may be a link, which leads to the root of who follows it."""

EVERYBODYS = {"selfsubjectreviews", "selfsubjectaccessreviews", "selfsubjectrulesreviews", "clustertrustbundles"}
"""What Kubernetes lets every user do: ask about themselves."""


@dataclass(frozen=True, kw_only=True)
class Try:
    """The agent's token at work: `agent` is the API seen with it."""

    agent: Api
    admin: Api
    node: str


@pytest.fixture
def held(site: Site) -> Try:
    """With the token that lies in the agent's container."""
    root = Path(f"/proc/{site.agent.pids()[0]}/root")
    token = next(path for place in TOKENS if (path := root / place).is_file()).read_text(encoding="ascii")
    return Try(agent=site.api.as_token(token), admin=site.api, node=site.node_name)


@pytest.fixture(autouse=True)
def no_traces(site: Site) -> Iterator[None]:
    """What should have been refused and was not is `x`."""
    yield
    site.api.delete("ResourceSlice", "x")
    site.api.delete("Event", "x", "default")


@pytest.fixture
def stored(site: Site) -> Iterator[Api]:
    """Slices that stand on the server and are none of the agent's business, an Event, a claim, a pod's name to steal."""
    bodies = (
        slice_of("of-another-node", node=OTHER_NODE),
        slice_of("of-another-driver", node=site.node_name, driver=FOREIGN),
        event("of-somebody-else", site.node_name, by="kubelet"),
    )
    for body in bodies:
        site.api.create(body)
    yield site.api
    for body in bodies:
        site.api.delete(body["kind"], body["metadata"]["name"], body["metadata"].get("namespace"))


def slice_of(name: str, *, node: str, driver: str = DRIVER, pool: str | None = None) -> Json:
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceSlice",
        "metadata": {"name": name},
        "spec": {
            "driver": driver,
            "nodeName": node,
            "pool": {"name": pool or node, "generation": 1, "resourceSliceCount": 1},
            "devices": [],
        },
    }


def event(name: str, node: str, *, by: str = DRIVER, about: Json | None = None) -> Json:
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": name, "namespace": "default"},
        "involvedObject": about or {"apiVersion": "v1", "kind": "Node", "name": node, "uid": node},
        "reason": "Tried",
        "message": "a test of rights",
        "type": "Normal",
        "reportingComponent": by,
        "reportingInstance": node,
        "firstTimestamp": "2026-01-01T00:00:00Z",
        "lastTimestamp": "2026-01-01T00:00:00Z",
        "count": 1,
    }


def ask(api: Api, method: str, path: str, body: Json | None = None, *, dry_run: bool = False) -> Json:
    """One request, as it is."""
    answer: Json = json.loads(api.send(method, path, query={"dryRun": "All"} if dry_run else None, body=body))
    return answer


def refused(attempt: Callable[[], object], *words: str, status: int = 403) -> None:
    with pytest.raises(ApiError) as raised:
        attempt()
    assert (raised.value.status, [word for word in words if word not in raised.value.message]) == (status, []), (
        raised.value
    )


Attempts = Mapping[str, tuple[Callable[[Try], object], str]]
"""What is tried -> how, and words of the refusal."""


def not_refused(held: Try, attempts: Attempts) -> dict[str, str]:
    """Those that were not refused as they should be (403, for the reason given), with what was answered."""
    found = {}
    for name, (work, words) in attempts.items():
        try:
            work(held)
        except ApiError as error:
            if error.status != 403 or words not in error.message:
                found[name] = str(error)
        else:
            found[name] = "done"
    return found


def test_the_token_has_the_rights_of_the_manifest_and_no_more(held: Try, site: Site) -> None:
    (role,) = (item for item in site.agent.manifests() if item["kind"] == "ClusterRole")
    written = {
        (group, resource, verb)
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }
    body = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SelfSubjectRulesReview",
        "spec": {"namespace": agents.NAMESPACE},
    }
    rules = ask(held.agent, "POST", "/apis/authorization.k8s.io/v1/selfsubjectrulesreviews", body)["status"]
    granted = {
        (group, resource, verb)
        for rule in rules["resourceRules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }
    assert {right for right in granted if right[1] not in EVERYBODYS} == written
    assert {verb for rule in rules["nonResourceRules"] for verb in rule["verbs"]} == {"get"}


def test_everything_that_the_agent_does_is_allowed(held: Try, site: Site) -> None:
    own = slice_of("own", node=held.node)
    created = held.agent.create(own, dry_run=True)
    assert created["spec"]["nodeName"] == held.node
    (standing,) = site.agent.slices()
    path = KINDS["ResourceSlice"].path(None, standing["metadata"]["name"])
    ask(held.agent, "PUT", path, standing, dry_run=True)
    ask(held.agent, "DELETE", path, dry_run=True)
    assert held.agent.items("ResourceSlice", fields=f"spec.nodeName={held.node}")
    assert held.agent.items("ResourceClaim") == []
    assert held.agent.get("Node", held.node)["metadata"]["name"] == held.node
    claim = {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaim",
        "name": "c",
        "namespace": "default",
        "uid": "u",
    }
    pod = {"apiVersion": "v1", "kind": "Pod", "name": "p", "namespace": "default", "uid": "u"}
    for name, about in (("about-the-node", None), ("about-a-claim", claim), ("about-a-pod", pod)):
        held.agent.create(event(name, held.node, about=about))
        held.agent.patch("Event", name, {"count": 2}, "default")
        site.api.delete("Event", name, "default")


OF_SLICES: Attempts = {
    "a slice for another node": (
        lambda held: held.agent.create(slice_of("x", node=OTHER_NODE)),
        "spec.nodeName must be the node of the agent",
    ),
    "a slice for another node, tried first": (
        lambda held: held.agent.create(slice_of("x", node=OTHER_NODE), dry_run=True),
        "spec.nodeName must be the node of the agent",
    ),
    "a slice for all nodes": (
        lambda held: held.agent.create(
            {
                **(body := slice_of("x", node="")),
                "spec": {**body["spec"], "nodeName": None, "pool": _pool("x"), "allNodes": True},
            }
        ),
        "spec.nodeName must be the node of the agent",
    ),
    "a slice of another driver": (
        lambda held: held.agent.create(slice_of("x", node=held.node, driver=FOREIGN)),
        "spec.driver must be gpu.nearfield.dev",
    ),
    "a pool of another name": (
        lambda held: held.agent.create(slice_of("x", node=held.node, pool=OTHER_NODE)),
        "spec.pool.name must be the node of the agent",
    ),
    "a change of another node's slice": (
        lambda held: held.agent.patch("ResourceSlice", "of-another-node", {"metadata": {"labels": {"x": "y"}}}),
        'cannot patch resource "resourceslices"',
    ),
    "another node's slice replaced": (
        lambda held: held.agent.replace(_changed(held.admin.get("ResourceSlice", "of-another-node"))),
        "spec.nodeName must be the node of the agent",
    ),
    "another node's slice deleted": (
        lambda held: ask(held.agent, "DELETE", KINDS["ResourceSlice"].path(None, "of-another-node")),
        "spec.nodeName must be the node of the agent",
    ),
    "another driver's slice on the own node replaced": (
        lambda held: held.agent.replace(_changed(held.admin.get("ResourceSlice", "of-another-driver"))),
        "spec.driver must be gpu.nearfield.dev",
    ),
    "another driver's slice on the own node deleted": (
        lambda held: ask(held.agent, "DELETE", KINDS["ResourceSlice"].path(None, "of-another-driver")),
        "spec.driver must be gpu.nearfield.dev",
    ),
    "all slices at once": (
        lambda held: held.agent.delete_all("ResourceSlice"),
        "cannot deletecollection",
    ),
    "all slices of another node at once": (
        lambda held: held.agent.delete_all("ResourceSlice", fields=f"spec.nodeName={OTHER_NODE}"),
        "cannot deletecollection",
    ),
}


def test_slices_of_others_are_out_of_reach(held: Try, stored: Api) -> None:
    before = stored.items("ResourceSlice")
    assert not_refused(held, OF_SLICES) == {}
    assert stored.items("ResourceSlice") == before


@pytest.fixture
def more_verbs(site: Site) -> Iterator[None]:
    """An administrator who gave the agent more verbs on slices than it needs."""
    name = "e2e-more-verbs"
    rbac = "rbac.authorization.k8s.io"
    rule = {"apiGroups": ["resource.k8s.io"], "resources": ["resourceslices"], "verbs": ["patch", "deletecollection"]}
    head = {"apiVersion": f"{rbac}/v1", "metadata": {"name": name}}
    site.api.create({**head, "kind": "ClusterRole", "rules": [rule]})
    subject = {"kind": "ServiceAccount", "name": agents.NAME, "namespace": agents.NAMESPACE}
    role = {"apiGroup": rbac, "kind": "ClusterRole", "name": name}
    site.api.create({**head, "kind": "ClusterRoleBinding", "roleRef": role, "subjects": [subject]})
    yield
    site.api.delete("ClusterRoleBinding", name)
    site.api.delete("ClusterRole", name)


@pytest.mark.usefixtures("more_verbs")
def test_the_policy_holds_for_every_way_to_write(held: Try, stored: Api) -> None:
    before = stored.items("ResourceSlice")
    words = "spec.nodeName must be the node of the agent"
    change = {"spec": {"pool": {"generation": 7}}}

    def allowed_by_rbac() -> bool:
        with pytest.raises(ApiError) as raised:
            held.agent.patch("ResourceSlice", "of-another-node", change)
        return "cannot patch" not in raised.value.message

    waiting.until(allowed_by_rbac, "the right to patch slices")
    refused(lambda: held.agent.patch("ResourceSlice", "of-another-node", change), words)
    refused(lambda: held.agent.delete_all("ResourceSlice", fields=f"spec.nodeName={OTHER_NODE}"), words)
    assert stored.items("ResourceSlice") == before


def test_an_own_slice_cannot_be_moved_to_another_node(held: Try, site: Site) -> None:
    """Kubernetes itself refuses these, before any policy is asked: 422."""
    (listed,) = site.agent.slices()
    standing = site.api.get("ResourceSlice", listed["metadata"]["name"])
    pool = {**standing["spec"]["pool"], "name": OTHER_NODE}
    for change in ({"nodeName": OTHER_NODE}, {"pool": pool}, {"driver": FOREIGN}):
        moved = {**standing, "spec": {**standing["spec"], **change}}
        refused(lambda moved=moved: held.agent.replace(moved), "immutable", status=422)  # type: ignore[misc]


def _pool(name: str) -> Json:
    return {"name": name, "generation": 1, "resourceSliceCount": 1}


def _changed(body: Json) -> Json:
    return {**body, "spec": {**body["spec"], "pool": {**body["spec"]["pool"], "generation": 2}}}


def test_events_that_pretend_are_refused(held: Try, stored: Api) -> None:
    secret = {"apiVersion": "v1", "kind": "Secret", "name": "s", "namespace": "default"}
    reported, about = "an Event must be reported by gpu.nearfield.dev on the node", "an Event must be about"
    refused(lambda: held.agent.create(event("x", OTHER_NODE)), reported)
    refused(lambda: held.agent.create(event("x", held.node, by="kubelet")), reported)
    refused(lambda: held.agent.create(event("x", held.node, about=secret)), about)
    elsewhere = {"apiVersion": "v1", "kind": "Node", "name": OTHER_NODE}
    refused(lambda: held.agent.create(event("x", held.node, about=elsewhere)), about)
    taken_over = {"reportingComponent": DRIVER, "reportingInstance": held.node, "message": "all is well"}
    refused(lambda: held.agent.patch("Event", "of-somebody-else", taken_over, "default"), reported)
    assert stored.get("Event", "of-somebody-else", "default")["message"] == "a test of rights"


OF_ANYTHING_ELSE: Attempts = {
    "read secrets": (lambda held: held.agent.items("Secret"), 'cannot list resource "secrets"'),
    "read a secret": (lambda held: held.agent.get("Secret", "x", agents.NAMESPACE), 'cannot get resource "secrets"'),
    "read a config map": (
        lambda held: held.agent.items("ConfigMap", agents.NAMESPACE),
        'cannot list resource "configmaps"',
    ),
    "read pods": (lambda held: held.agent.items("Pod"), 'cannot list resource "pods"'),
    "create a pod": (
        lambda held: held.agent.create(
            {
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": {"name": "x", "namespace": agents.NAMESPACE},
                "spec": {"containers": [{"name": "c", "image": "i"}]},
            }
        ),
        'cannot create resource "pods"',
    ),
    "delete a pod": (
        lambda held: ask(held.agent, "DELETE", KINDS["Pod"].path(agents.NAMESPACE, "x")),
        'cannot delete resource "pods"',
    ),
    "run a program in a pod": (
        lambda held: ask(held.agent, "POST", KINDS["Pod"].path(agents.NAMESPACE, "x") + "/exec?command=sh"),
        'cannot create resource "pods/exec"',
    ),
    "give a claim another allocation": (
        lambda held: held.agent.patch("ResourceClaim", "x", {"status": {}}, "default", subresource="status"),
        'cannot patch resource "resourceclaims/status"',
    ),
    "change a claim": (
        lambda held: held.agent.patch("ResourceClaim", "x", {"metadata": {"labels": {"x": "y"}}}, "default"),
        'cannot patch resource "resourceclaims"',
    ),
    "delete a claim": (
        lambda held: ask(held.agent, "DELETE", KINDS["ResourceClaim"].path("default", "x")),
        'cannot delete resource "resourceclaims"',
    ),
    "label its Node": (
        lambda held: held.agent.patch("Node", held.node, {"metadata": {"labels": {"x": "y"}}}),
        'cannot patch resource "nodes"',
    ),
    "change the status of its Node": (
        lambda held: held.agent.patch("Node", held.node, {"status": {}}, subresource="status"),
        'cannot patch resource "nodes/status"',
    ),
    "list Nodes": (lambda held: held.agent.items("Node"), 'cannot list resource "nodes"'),
    "speak to kubelet": (
        lambda held: ask(held.agent, "GET", KINDS["Node"].path(None, held.node) + "/proxy/pods"),
        'cannot get resource "nodes/proxy"',
    ),
    "change the class": (
        lambda held: held.agent.patch("DeviceClass", DRIVER, {"spec": {"selectors": []}}),
        'cannot patch resource "deviceclasses"',
    ),
    "make a class": (
        lambda held: held.agent.create(
            {"apiVersion": "resource.k8s.io/v1", "kind": "DeviceClass", "metadata": {"name": "x"}, "spec": {}}
        ),
        'cannot create resource "deviceclasses"',
    ),
    "remove the policy": (
        lambda held: ask(
            held.agent,
            "DELETE",
            "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicybindings/nearfield-resourceslices",
        ),
        'cannot delete resource "validatingadmissionpolicybindings"',
    ),
    "give itself more rights": (
        lambda held: held.agent.patch("ClusterRole", "nearfield", {"rules": []}),
        'cannot patch resource "clusterroles"',
    ),
    "make another token": (
        lambda held: ask(held.agent, "POST", f"{_ACCOUNT}/token", _token_request({})),
        'cannot create resource "serviceaccounts/token"',
    ),
    "change its DaemonSet": (
        lambda held: held.agent.patch("DaemonSet", "nearfield", {"spec": {"paused": True}}, agents.NAMESPACE),
        'cannot patch resource "daemonsets"',
    ),
}


def test_everything_else_is_out_of_reach(held: Try) -> None:
    assert not_refused(held, OF_ANYTHING_ELSE) == {}


def _token_request(spec: Json) -> Json:
    return {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": spec}


def _token(api: Api, spec: Json) -> str:
    return str(ask(api, "POST", f"{_ACCOUNT}/token", _token_request(spec))["status"]["token"])


def test_a_token_that_is_bound_to_no_node_writes_nothing(site: Site) -> None:
    unbound = site.api.as_token(_token(site.api, {}))
    unbound_words = "is not bound to a node"
    refused(lambda: unbound.create(slice_of("x", node=site.node_name)), unbound_words)
    refused(lambda: unbound.create(event("x", site.node_name)), unbound_words)
    (standing,) = site.agent.slices()
    refused(
        lambda: ask(unbound, "DELETE", KINDS["ResourceSlice"].path(None, standing["metadata"]["name"])), unbound_words
    )


def test_a_token_that_is_bound_to_another_node_writes_nothing_here(site: Site) -> None:
    # Without the labels of a node that is one, so that it gets no pod of the agent.
    node = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": OTHER_NODE}}
    uid = site.api.create(node)["metadata"]["uid"]
    try:
        bound = {"boundObjectRef": {"apiVersion": "v1", "kind": "Node", "name": OTHER_NODE, "uid": uid}}
        there = site.api.as_token(_token(site.api, bound))
        assert there.create(slice_of("x", node=OTHER_NODE), dry_run=True)["spec"]["nodeName"] == OTHER_NODE
        refused(lambda: there.create(slice_of("x", node=site.node_name)), f"the agent, which is {OTHER_NODE}")
        (standing,) = site.agent.slices()
        refused(
            lambda: ask(there, "DELETE", KINDS["ResourceSlice"].path(None, standing["metadata"]["name"])),
            f"the agent, which is {OTHER_NODE}",
        )
    finally:
        site.api.delete("Node", OTHER_NODE)


def test_the_policies_are_about_the_agent_only(stored: Api) -> None:
    """Other drivers and administrators write what they always could."""
    before = stored.get("ResourceSlice", "of-another-node")
    assert stored.replace(_changed(before))["spec"]["pool"]["generation"] == 2
