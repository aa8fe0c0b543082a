# SPDX-License-Identifier: Apache-2.0
"""A cluster as a whole: up, down, and what can be done to one that stands."""

from __future__ import annotations

import contextlib
import fcntl
import http.client
import json
import os
import secrets
import shutil
import signal
import ssl
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from hack.realnode import binaries, cgroups, components, images, mounts, needs, network, processes
from hack.realnode.errors import ClusterError
from hack.realnode.layout import ROOT, Layout

Options = components.Options

POLL_S = 0.05
READY_S = 120.0
REQUEST_S = 10.0


@dataclass(frozen=True)
class Cluster:
    """A cluster that stands. What needs it running raises ClusterError when it does not."""

    layout: Layout
    options: Options
    binaries: Path

    @property
    def name(self) -> str:
        """Its name."""
        return self.layout.name

    @property
    def node_name(self) -> str:
        """The Node's."""
        return self.layout.node_name

    @property
    def kubeconfig(self) -> Path:
        """The administrator's; its server is reached from inside only (`entered`)."""
        return self.layout.kubeconfig

    def entered(self) -> AbstractContextManager[None]:
        """The calling thread, and threads and processes that it starts in the block, are in the cluster's network."""
        return network.entered(self.layout)

    def kubectl(self, *arguments: str, stdin: str | None = None) -> str:
        """The output of kubectl, as the administrator."""
        return mounts.run(
            self.layout,
            str(self.binaries / "kubectl"),
            f"--kubeconfig={self.kubeconfig}",
            *arguments,
            stdin=None if stdin is None else stdin.encode(),
        )

    def run(self, *arguments: str) -> str:
        """The output of a program that runs where the components run, with their paths and their network."""
        return mounts.run(self.layout, *arguments)

    def pid(self, component: str) -> int | None:
        """The component's process, None where it does not run."""
        return processes.pid(self.layout, component)

    def start(self, component: str) -> None:
        """Starts a component that does not run."""
        if component not in components.ORDER:
            raise ClusterError(f"No component is named {component}; there are {', '.join(components.ORDER)}")
        if self.pid(component) is not None:
            return
        processes.start(
            self.layout,
            component,
            components.arguments(component, layout=self.layout, options=self.options, binaries=self.binaries),
            inside=mounts.holder(self.layout),
            environment={
                "PATH": f"{self.binaries}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
                "HOME": "/root",
            },
        )

    def stop(self, component: str) -> None:
        """Asks a component to end, and waits until it has."""
        processes.end(self.layout, component)

    def kill(self, component: str) -> None:
        """Ends a component as a crash would."""
        processes.end(self.layout, component, how=signal.SIGKILL)

    def log(self, component: str) -> Path:
        """What the component printed."""
        return self.layout.logs / f"{component}.log"

    def load(self, archive: Path) -> None:
        """Imports a docker or OCI archive, so that pods can name its image."""
        images.load(self.layout, archive, binaries=self.binaries)

    def get(self, path: str) -> tuple[int, bytes]:
        """Status and body of a GET at the API server, as the administrator. The caller has `entered`. Raises OSError."""
        token = json.loads(self.kubeconfig.read_text())["users"][0]["user"]["token"]
        context = ssl.create_default_context(cafile=str(self.layout.certificates / "apiserver.crt"))
        connection = http.client.HTTPSConnection(network.SERVICE_ADDRESS, 443, timeout=REQUEST_S, context=context)
        with contextlib.closing(connection):
            connection.request("GET", path, headers={"Authorization": f"Bearer {token}"})
            response = connection.getresponse()
            return response.status, response.read()

    def wait_api(self) -> None:
        """Waits until the API server is ready."""
        self._wait("kube-apiserver", "the API server is ready", lambda: self._answer("/readyz") is not None)

    def wait_node(self) -> None:
        """Waits until the Node is Ready and pods can be created."""
        self._wait("kubelet", f"Node {self.node_name} is Ready", self._node_ready)
        self._wait(
            "kube-controller-manager",
            "ServiceAccount default/default exists",
            lambda: self._answer("/api/v1/namespaces/default/serviceaccounts/default") is not None,
        )

    def down(self) -> None:
        """Takes it down and removes all that it was made of."""
        down(self.name)

    def _answer(self, path: str) -> bytes | None:
        with contextlib.suppress(OSError, http.client.HTTPException):
            status, body = self.get(path)
            if status == http.HTTPStatus.OK:
                return body
        return None

    def _node_ready(self) -> bool:
        body = self._answer(f"/api/v1/nodes/{self.node_name}")
        conditions = [] if body is None else json.loads(body)["status"].get("conditions", [])
        return any(condition["type"] == "Ready" and condition["status"] == "True" for condition in conditions)

    def _wait(self, component: str, what: str, done: Callable[[], bool]) -> None:
        deadline = time.monotonic() + READY_S
        with self.entered():
            while not done():
                if self.pid(component) is None:
                    raise ClusterError(
                        f"{component} ended before {what}; {self.log(component)} ends:\n{_tail(self.log(component))}"
                    )
                if time.monotonic() > deadline:
                    raise ClusterError(
                        f"Waited {READY_S:.0f} s, and not yet: {what}; see the logs in {self.layout.logs}"
                    )
                time.sleep(POLL_S)


def up(options: Options) -> Cluster:
    """A cluster that stands: this one if it runs with the same options, else a new one, after what was left of an old one is gone.

    Raises ClusterError: no root, no Go, one of that name runs with other options, a component does not start.
    """
    needs.require_root()
    layout = Layout(options.name)
    needs.install()
    programs = binaries.build()
    with _locked(layout):
        standing = _standing(options.name)
        if standing is not None:
            if standing.options.to_json() != options.to_json():
                raise ClusterError(
                    f"Cluster {options.name} runs with other options ({json.dumps(standing.options.to_json())}):"
                    f" hack/cluster --name {options.name} down"
                )
            return standing
        _down(layout)
        cluster = Cluster(layout=layout, options=options, binaries=programs)
        try:
            _create(cluster)
        except (ClusterError, OSError):
            saved = ROOT / f"{layout.name}-failed-logs"
            shutil.rmtree(saved, ignore_errors=True)
            if layout.logs.is_dir():
                shutil.copytree(layout.logs, saved)
            _down(layout)
            raise
        return cluster


def attach(name: str) -> Cluster:
    """The cluster of that name. Raises ClusterError where none stands."""
    layout = Layout(name)
    try:
        kept = json.loads(layout.options.read_text())
    except (OSError, ValueError) as error:
        raise ClusterError(f"Cluster {name} does not run; hack/cluster --name {name} up") from error
    mounts.holder(layout)
    return Cluster(layout=layout, options=Options(**kept["options"]), binaries=Path(kept["binaries"]))


def _standing(name: str) -> Cluster | None:
    try:
        cluster = attach(name)
    except ClusterError:
        return None
    return cluster if all(cluster.pid(component) is not None for component in components.ORDER) else None


def down(name: str) -> None:
    """Leaves nothing of a cluster: processes, mounts, namespaces, cgroups, files; one that is half there, or not at all, is fine."""
    needs.require_root()
    layout = Layout(name)
    with _locked(layout):
        _down(layout)


def names() -> tuple[str, ...]:
    """The clusters that are there, half or whole."""
    if not ROOT.is_dir():
        return ()
    return tuple(sorted(path.name for path in ROOT.iterdir() if path.is_dir() and "-" not in path.name))


def _create(cluster: Cluster) -> None:
    layout = cluster.layout
    layout.root.mkdir(parents=True, mode=0o755)
    layout.certificates.mkdir(parents=True)
    tokens = {name: secrets.token_urlsafe(32) for name in components.user_names()}
    for path, content in components.files(layout=layout, options=cluster.options, tokens=tokens).items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
        path.chmod(0o600)
    _key(layout.config / "service-accounts.key")
    network.create(layout)
    cgroups.create(layout.cgroup)
    mounts.hold(layout)
    layout.cdi_dir.mkdir(parents=True, exist_ok=True)
    for component in ("etcd", "containerd", "kube-apiserver"):
        cluster.start(component)
    cluster.wait_api()
    for component in ("kube-controller-manager", "kube-scheduler", "kubelet"):
        cluster.start(component)
    images.load_own(layout, binaries=cluster.binaries)
    cluster.wait_node()
    layout.options.write_text(json.dumps({"options": cluster.options.to_json(), "binaries": str(cluster.binaries)}))


def _down(layout: Layout) -> None:
    layout.options.unlink(missing_ok=True)
    for component in components.STOP_ORDER:
        processes.end(layout, component)
    processes.end_all(layout)
    network.remove(layout)
    cgroups.remove(layout.cgroup)
    _unmount(layout.root)
    if layout.root.exists():
        shutil.rmtree(layout.root)


def _unmount(folder: Path) -> None:
    """Unmounts what is mounted below; nothing is, but after somebody mounted there from outside."""
    below = [
        line.split()[1]
        for line in cgroups.MOUNTS.read_text().splitlines()
        if Path(line.split()[1]).is_relative_to(folder)
    ]
    for target in reversed(below):
        done = subprocess.run(["umount", "--lazy", target], capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise ClusterError(f"umount {target}: {done.stderr.strip()}")


def _key(path: Path) -> None:
    done = subprocess.run(["openssl", "genrsa", "-out", str(path), "2048"], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise ClusterError(f"openssl genrsa: {done.stderr.strip()}")


@contextlib.contextmanager
def _locked(layout: Layout) -> Iterator[None]:
    ROOT.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(layout.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _tail(log: Path) -> str:
    try:
        return "\n".join(log.read_text(errors="replace").splitlines()[-15:])
    except OSError as error:
        return str(error)
