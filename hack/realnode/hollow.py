# SPDX-License-Identifier: Apache-2.0
"""Hollow nodes: a Node object, a stand-in for kubelet that registers the plugin, and the agent with a mock machine; no containers.

The scheduler places pods on them as on any node, and there they stay Pending. Their agents have the rights of deploy/daemonset and
tokens that are bound to their Node, as the pods of the DaemonSet have, so what one may write is limited to its own node.
"""

from __future__ import annotations

import contextlib
import http.client
import importlib.util
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from http import HTTPStatus
from pathlib import Path

from hack.realnode import components, kubectl, locks, network, probes, processes, rest
from hack.realnode.errors import ClusterError
from hack.realnode.layout import Layout

TREE = Path(__file__).resolve().parent.parent.parent
MANIFESTS = tuple(
    TREE / "deploy/daemonset/base" / name
    for name in ("namespace.yaml", "rbac.yaml", "admission.yaml", "deviceclass.yaml")
)
"""What an agent needs on the API server, but for the DaemonSet itself."""

KUBELETS = "hollow-kubelets"
"""The component that stands in for kubelet on all hollow nodes."""

LABEL = "nearfield.dev/hollow"
MACHINE_ANNOTATION = "nearfield.dev/machine"
NAMESPACE = "nearfield-system"
SERVICE_ACCOUNT = "nearfield"
TOKEN_S = 30 * 24 * 3600
HTTP_PORT = 9417
NODES_MAX = 200
"""They have addresses of 192.0.2.0/24."""


@dataclass(frozen=True)
class HollowNode:
    """One of them; its name is the cluster's and its number."""

    number: int
    machine: str

    @property
    def agent(self) -> str:
        """The component."""
        return f"agent-{self.number}"

    @property
    def address(self) -> str:
        """The Node's, on which the agent serves HTTP."""
        return f"192.0.2.{self.number + 1}"


def nodes(layout: Layout) -> tuple[HollowNode, ...]:
    """Those of the cluster."""
    try:
        kept = json.loads(layout.hollow_nodes.read_text())
    except FileNotFoundError:
        return ()
    return tuple(HollowNode(**entry) for entry in kept)


def add(layout: Layout, machines: Sequence[str]) -> tuple[HollowNode, ...]:
    """Takes note of new ones, which `ensure` brings up. Raises ClusterError where there are too many."""
    before = nodes(layout)
    new = tuple(HollowNode(len(before) + 1 + index, machine) for index, machine in enumerate(machines))
    if len(before) + len(new) > NODES_MAX:
        raise ClusterError(f"A cluster has at most {NODES_MAX} hollow nodes")
    text = json.dumps([asdict(node) for node in (*before, *new)])
    processes.write(layout.hollow_nodes, text)
    return new


def python() -> str:
    """The Python that can run the agent: this one, or that of the tree. Raises ClusterError."""
    own = TREE / ".venv/bin/python"
    if importlib.util.find_spec("grpc") is not None and importlib.util.find_spec("kubernetes") is not None:
        return sys.executable
    if own.exists():
        return str(own)
    raise ClusterError(
        "Hollow nodes run the agent of this tree, and its packages are not installed: run `make test` first"
    )


def ensure(layout: Layout, *, binaries: Path) -> None:
    """Starts whatever is not there of the hollow nodes, and waits until all of them offer their devices. Raises ClusterError."""
    wanted = nodes(layout)
    if not wanted:
        return
    manifests = [argument for path in MANIFESTS for argument in ("--filename", str(path))]
    kubectl.run(layout, binaries, "apply", *manifests)
    with network.entered(layout):
        for node in wanted:
            _prepare(layout, node)
    for component in component_names(layout):
        start(layout, component)


def component_names(layout: Layout) -> tuple[str, ...]:
    """Their components."""
    wanted = nodes(layout)
    return (*(node.agent for node in wanted), *((KUBELETS,) if wanted else ()))


def start(layout: Layout, component: str) -> None:
    """Starts one of their components, if it does not run."""
    if processes.pid(layout, component) is not None:
        return
    arguments = {KUBELETS: ["hack.realnode.hollow_kubelets", layout.name]} | {
        node.agent: ["driver.cli", "run", *_agent_options(layout, node)] for node in nodes(layout)
    }
    processes.start_in_network(
        layout,
        component,
        [python(), "-P", "-m", *arguments[component]],
        environment={"PYTHONPATH": str(TREE), **components.ENVIRONMENT},
    )


def _agent_options(layout: Layout, node: HollowNode) -> list[str]:
    folder = layout.hollow_dir(node.number)
    return [
        *("--node-name", layout.hollow_name(node.number), "--mock", node.machine),
        *("--kubeconfig", str(folder / "agent.kubeconfig")),
        *("--kubelet-dir", str(folder / "kubelet"), "--cdi-dir", str(folder / "cdi")),
        *("--http", f"{node.address}:{HTTP_PORT}", "--inspect", ""),
    ]


def ready(layout: Layout, node: HollowNode) -> bool:
    """Whether the scheduler can place pods on it: the Node is Ready and the agent has published. The caller is in the network."""
    with contextlib.suppress(OSError, http.client.HTTPException):
        return probes.healthy(node.address, HTTP_PORT, "/readyz") and _schedulable(layout, node)
    return False


def _schedulable(layout: Layout, node: HollowNode) -> bool:
    body = probes.found(layout, f"/api/v1/nodes/{layout.hollow_name(node.number)}")
    return body is not None and not json.loads(body)["spec"].get("taints")


def _prepare(layout: Layout, node: HollowNode) -> None:
    """Address, folders, Node and token; what is there stays."""
    folder = layout.hollow_dir(node.number)
    for name in ("kubelet", "cdi"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    locks.output(["/bin/ip", "address", "replace", f"{node.address}/32", "dev", "lo"])
    name = layout.hollow_name(node.number)
    try:
        made = rest.create(layout, "/api/v1/nodes", _node(name, node))
        kubeconfig = folder / "agent.kubeconfig"
        if not kubeconfig.exists():
            token = _token(layout, name, made["metadata"]["uid"])
            processes.write(kubeconfig, components.kubeconfig(layout, token), mode=0o600)
    except (OSError, http.client.HTTPException) as error:
        raise ClusterError(f"The API server does not answer, so there is no hollow node {name}: {error}") from error


def _token(layout: Layout, node_name: str, node_uid: str) -> str:
    """Of the agent's ServiceAccount, good as long as the Node is there."""
    path = f"/api/v1/namespaces/{NAMESPACE}/serviceaccounts/{SERVICE_ACCOUNT}/token"
    body = {
        "apiVersion": "authentication.k8s.io/v1",
        "kind": "TokenRequest",
        "spec": {
            "expirationSeconds": TOKEN_S,
            "boundObjectRef": {"apiVersion": "v1", "kind": "Node", "name": node_name, "uid": node_uid},
        },
    }
    status, answer = rest.call(layout, "POST", path, body)
    if status != HTTPStatus.CREATED:
        raise ClusterError(f"No token for {node_name}: {json.loads(answer).get('message', status)}")
    token: str = json.loads(answer)["status"]["token"]
    return token


def _node(name: str, node: HollowNode) -> dict[str, object]:
    """As kubelet would create it. It says no operating system, so DaemonSets that want Linux, ours too, leave it alone."""
    room = {"cpu": "256", "memory": "2Ti", "ephemeral-storage": "1Ti", "pods": "250"}
    conditions = {
        "Ready": "True",
        "MemoryPressure": "False",
        "DiskPressure": "False",
        "PIDPressure": "False",
    }
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {
            "name": name,
            "labels": {"kubernetes.io/hostname": name, LABEL: "true"},
            "annotations": {MACHINE_ANNOTATION: node.machine},
        },
        "status": {
            "capacity": room,
            "allocatable": room,
            "addresses": [{"type": "InternalIP", "address": node.address}, {"type": "Hostname", "address": name}],
            "conditions": [
                {"type": kind, "status": status, "reason": "Hollow", "message": "a stand-in says so"}
                for kind, status in conditions.items()
            ],
        },
    }
