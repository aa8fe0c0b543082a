# SPDX-License-Identifier: Apache-2.0
"""A real node as the environment of a run: its API server, its kubelet, and a service account for the drivers.

Drivers are processes in the network and the mounts of the node's components, and reach the API server as pods do: by the
Service's variables and a token at the usual place. Most of them have a folder and a Node object of their own, and the
benchmark is their kubelet; `kubelet` is where the real one finds them.
"""

from __future__ import annotations

import http.client
import json
import ssl
import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from hack.bench import apiserver, audit, claims, drivers, exposition, peer, workloads
from hack.bench import bench as benchmark
from hack.bench.errors import BenchError
from hack.realnode import cluster, components, mounts, network

SECRETS = "/var/run/secrets/kubernetes.io/serviceaccount"
TOKEN_S = 6 * 3600
PROGRAMS = ("nearfield/", "gopeer")
"""How the user agents of the drivers begin."""

KUBELETS = "bench-kubelets"
KUBELET_PORT = 10250
REQUEST_TIMEOUT_S = 20.0
REMOVABLE = (f"{apiserver.SLICES}", claims.collection_path())
"""Collections that a part leaves things in."""

REGISTRATION_TIMEOUT_S = 30.0
REGISTRATION_PAUSE_S = 0.25


class RealNode:
    """Prepares a cluster for the benchmark. A context manager, in whose block the calling thread is in the node's network."""

    def __init__(self, standing: cluster.Cluster) -> None:
        self.cluster = standing
        self._inside = standing.entered()
        self._inside.__enter__()
        try:
            layout = standing.layout
            url = components.API_SERVER
            authority = layout.certificates / "apiserver.crt"
            admin = json.loads(standing.kubeconfig.read_text())["users"][0]["user"]["token"]
            self.server = apiserver.ApiServer(apiserver.Address(url=url, token=admin, authority=authority))
            self._create_missing(objects())
            self.remove_traces()  # of a run that was killed
            token = self._account_token()
            self.server.holder = self._holder()
            self.address = apiserver.Address(url=url, token=token, authority=authority)
            secrets = layout.host_path(SECRETS)
            secrets.mkdir(parents=True, exist_ok=True)
            (secrets / "token").write_text(token)
            (secrets / "ca.crt").write_text(authority.read_text())
            host, _, port = url.removeprefix("https://").rpartition(":")
            self.place = drivers.Place(
                enter=("nsenter", f"--target={mounts.holder(layout)}", "--mount", "--net", "--"),
                environment={"KUBERNETES_SERVICE_HOST": host, "KUBERNETES_SERVICE_PORT": port},
            )
            self.kubelet = drivers.Kubelet(
                folder=Path("/var/lib/kubelet"), cdi=Path("/var/run/cdi"), seen=layout.kubelet_dir, real=True
            )
        except BaseException:
            self._inside.__exit__(None, None, None)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.server.close()
        self._inside.__exit__(None, None, None)

    def writes(self) -> int:
        """How many writes of the drivers the API server has taken, Events too; dry ones are none."""
        with self.cluster.layout.audit_log.open(errors="replace") as lines:
            return audit.count_writes(lines, programs=PROGRAMS)

    def slice_writes(self) -> int:
        """How many writes of slices the API server has taken from anybody, by its own count; dry ones are none."""
        text = self.server.get("/metrics").decode()
        return int(
            sum(
                exposition.total(text, "apiserver_request_total", resource="resourceslices", verb=verb, dry_run="")
                for verb in ("POST", "PUT", "PATCH", "APPLY", "DELETE")
            )
        )

    def claim_reads(self) -> int:
        """How often a claim was read, by the API server's own count."""
        text = self.server.get("/metrics").decode()
        return int(exposition.total(text, "apiserver_request_total", resource="resourceclaims", verb="GET"))

    def kubelet_metrics(self) -> str:
        """What the real kubelet counts."""
        # Its certificate is of its own making, and names the Node, not the address.
        context = ssl.create_default_context()
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        connection = http.client.HTTPSConnection(
            network.NODE_ADDRESS, KUBELET_PORT, timeout=REQUEST_TIMEOUT_S, context=context
        )
        try:
            connection.request("GET", "/metrics")
            response = connection.getresponse()
            content = response.read()
        finally:
            connection.close()
        if response.status != http.HTTPStatus.OK:
            raise BenchError(f"GET /metrics of kubelet: {response.status} {content[:500]!r}")
        return content.decode()

    def registered(self, driver: drivers.Spec) -> bool:
        """Whether the real kubelet has registered a driver, as it counts itself."""
        socket = self.kubelet.folder / "plugins_registry" / driver.registration_socket.name
        return (
            exposition.total(
                self.kubelet_metrics(),
                "plugin_manager_total_plugins",
                state="actual_state_of_world",
                socket_path=str(socket),
            )
            > 0
        )

    def remove_traces(self) -> None:
        """Remove what a part leaves: slices, claims, and the Nodes that are not the real one."""
        for collection in REMOVABLE:
            self.server.call("DELETE", collection)
        for node in self.server.call("GET", apiserver.NODES)["items"]:
            if node["metadata"]["name"] != self.cluster.node_name:
                self.server.call("DELETE", f"{apiserver.NODES}/{node['metadata']['name']}")

    def _create_missing(self, objects: Iterable[tuple[str, dict[str, Any]]]) -> None:
        """Create what a run on the same cluster has not created before."""
        for collection, body in objects:
            names = {item["metadata"]["name"] for item in self.server.call("GET", collection)["items"]}
            if body["metadata"]["name"] not in names:
                self.server.call("POST", collection, body)

    def _account_token(self) -> str:
        answer = self.server.call(
            "POST",
            f"/api/v1/namespaces/{claims.NAMESPACE}/serviceaccounts/{workloads.ACCOUNT}/token",
            {
                "apiVersion": "authentication.k8s.io/v1",
                "kind": "TokenRequest",
                "spec": {"expirationSeconds": TOKEN_S},
            },
        )
        token: str = answer["status"]["token"]
        return token

    def _holder(self) -> claims.Holder:
        """A pod that no scheduler places: claims that are reserved for none that is there lose their reservation."""
        pod = self.server.call("GET", f"{workloads.pods_path()}/{claims.NOBODY.name}")
        return claims.Holder(name=pod["metadata"]["name"], uid=pod["metadata"]["uid"])


class NodeBench(benchmark.Bench):
    """One part of a run on a real node."""

    def __init__(self, options: benchmark.Options, directory: Path, node: RealNode, yardstick: peer.Peer) -> None:
        super().__init__(options, directory, node, yardstick)
        self.node = node

    def contest_at_kubelet(self, stack: ExitStack) -> list[drivers.Ready]:
        """The agent and, where there is one, the Go driver, both registered by the real kubelet and published."""
        name, place, kubelet = self.node.cluster.node_name, self.node.place, self.node.kubelet
        specs = [drivers.agent(self.fresh_directory("agent"), node=name, place=place, kubelet=kubelet)]
        if self.peer.binary is not None:
            specs.append(
                drivers.peer(
                    self.fresh_directory("peer"),
                    subject=drivers.PEER,
                    node=name,
                    place=place,
                    binary=self.peer.binary,
                    kubelet=kubelet,
                )
            )
        return self._at_kubelet(stack, specs)

    def agent_at_kubelet(self, stack: ExitStack, *arguments: str) -> drivers.Ready:
        """The agent with some options of its own, registered by the real kubelet and published."""
        name, place, kubelet = self.node.cluster.node_name, self.node.place, self.node.kubelet
        spec = drivers.agent(self.fresh_directory("agent"), *arguments, node=name, place=place, kubelet=kubelet)
        (ready,) = self._at_kubelet(stack, [spec])
        return ready

    def _at_kubelet(self, stack: ExitStack, specs: Sequence[drivers.Spec]) -> list[drivers.Ready]:
        contest = [stack.enter_context(drivers.Ready(spec, self.server)) for spec in specs]
        deadline = time.perf_counter() + REGISTRATION_TIMEOUT_S
        while not all(self.node.registered(spec) for spec in specs):
            if time.perf_counter() > deadline:
                raise BenchError(f"kubelet did not register the drivers in {REGISTRATION_TIMEOUT_S:.0f} s; see its log")
            self.pause(REGISTRATION_PAUSE_S)
        # A pod whose driver is gone cannot end: those of a part that failed, or of a run that was killed, end before the drivers do.
        workloads.remove_pods(self)
        stack.callback(workloads.remove_pods, self)
        return contest


def objects() -> Iterable[tuple[str, dict[str, Any]]]:
    """Collection and body of everything that a run needs, in the order in which it can be created."""
    rbac = "/apis/rbac.authorization.k8s.io/v1"
    resource = "/apis/resource.k8s.io/v1"
    namespace = claims.NAMESPACE
    yield (
        "/api/v1/namespaces",
        {"metadata": {"name": namespace, "labels": {"resource.kubernetes.io/admin-access": "true"}}},
    )
    yield f"/api/v1/namespaces/{namespace}/serviceaccounts", {"metadata": {"name": workloads.ACCOUNT}}
    # One account for both drivers, with what either asks for: the informers and patches of the Go helper too. The admission policy of
    # the manifests is left out: it holds for the agent's own account alone, and would be measured for one of the two.
    yield (
        f"{rbac}/clusterroles",
        {
            "metadata": {"name": workloads.ACCOUNT},
            "rules": [
                {
                    "apiGroups": ["resource.k8s.io"],
                    "resources": ["resourceclaims", "resourceslices"],
                    "verbs": ["get", "list", "watch"],
                },
                {
                    "apiGroups": ["resource.k8s.io"],
                    "resources": ["resourceslices"],
                    "verbs": ["create", "update", "patch", "delete"],
                },
                {"apiGroups": [""], "resources": ["nodes"], "verbs": ["get"]},
                {"apiGroups": [""], "resources": ["events"], "verbs": ["create", "patch"]},
            ],
        },
    )
    yield (
        f"{rbac}/clusterrolebindings",
        {
            "metadata": {"name": workloads.ACCOUNT},
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": workloads.ACCOUNT},
            "subjects": [{"kind": "ServiceAccount", "name": workloads.ACCOUNT, "namespace": namespace}],
        },
    )
    # The authorizer of nodes lets kubelet read a claim once it has heard that a pod of the node uses it. On a busy machine kubelet is
    # faster, is refused, and asks again after a minute: not what is measured here, so RBAC allows it at once.
    yield (
        f"{rbac}/clusterroles",
        {
            "metadata": {"name": KUBELETS},
            "rules": [{"apiGroups": ["resource.k8s.io"], "resources": ["resourceclaims"], "verbs": ["get"]}],
        },
    )
    yield (
        f"{rbac}/clusterrolebindings",
        {
            "metadata": {"name": KUBELETS},
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": KUBELETS},
            "subjects": [{"apiGroup": "rbac.authorization.k8s.io", "kind": "Group", "name": "system:nodes"}],
        },
    )
    yield workloads.pods_path(), workloads.pod(claims.NOBODY.name, node=None, template=None, scheduler="none")
    for subject, driver in ((drivers.AGENT, drivers.AGENT_DRIVER), (drivers.PEER, drivers.PEER_DRIVER)):
        name = workloads.class_name(subject)
        selector = {"cel": {"expression": f"device.driver == '{driver}'"}}
        yield f"{resource}/deviceclasses", {"metadata": {"name": name}, "spec": {"selectors": [selector]}}
        request = {"name": claims.REQUEST, "exactly": {"deviceClassName": name}}
        yield (
            f"{resource}/namespaces/{namespace}/resourceclaimtemplates",
            {"metadata": {"name": name}, "spec": {"spec": {"devices": {"requests": [request]}}}},
        )
