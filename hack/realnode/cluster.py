# SPDX-License-Identifier: Apache-2.0
"""A cluster as a whole: up, down, and what can be done to one that stands."""

from __future__ import annotations

import json
import secrets
import shutil
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from hack.realnode import (
    binaries,
    cgroups,
    components,
    hollow,
    images,
    kubectl,
    locks,
    mounts,
    needs,
    network,
    probes,
    processes,
    rest,
)
from hack.realnode.errors import ClusterError
from hack.realnode.layout import ROOT, Layout

Options = components.Options

POLL_S = 0.05
READY_S = 240.0
TAIL_LINES = 15


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
        return kubectl.run(self.layout, self.binaries, *arguments, stdin=stdin)

    def run(self, *arguments: str) -> str:
        """The output of a program that runs where the components run, with their paths and their network."""
        return mounts.run(self.layout, *arguments)

    def pid(self, component: str) -> int | None:
        """The component's process, None where it does not run."""
        return processes.pid(self.layout, component)

    @property
    def components(self) -> tuple[str, ...]:
        """All that run, those of hollow nodes included."""
        return (*components.ORDER, *hollow.component_names(self.layout))

    def start(self, component: str) -> None:
        """Starts a component that does not run. `wait_ready` tells when it serves."""
        self._require_known(component)
        if self.pid(component) is not None:
            return
        if component not in components.ORDER:
            hollow.start(self.layout, component)
            return
        processes.start(
            self.layout,
            component,
            components.arguments(component, layout=self.layout, options=self.options, binaries=self.binaries),
            inside=mounts.holder(self.layout),
            environment={**components.ENVIRONMENT, "PATH": f"{self.binaries}:{components.ENVIRONMENT['PATH']}"},
        )

    def stop(self, component: str) -> None:
        """Asks a component to end, and waits until it has."""
        self._require_known(component)
        processes.end(self.layout, component)

    def kill(self, component: str) -> None:
        """Ends a component as a crash would."""
        self._require_known(component)
        processes.end(self.layout, component, how=signal.SIGKILL)

    def restart(self, component: str) -> None:
        """Stops it, starts it, and waits until it serves."""
        self.stop(component)
        self.start(component)
        self.wait_ready(component)

    def log(self, component: str) -> Path:
        """What the component printed."""
        return self.layout.logs / f"{component}.log"

    def load(self, image: Path | str) -> None:
        """Imports a docker or OCI archive, or an image of an engine of this machine, so that pods can name it."""
        images.load(self.layout, image, binaries=self.binaries)

    def add_hollow(self, machines: Sequence[str]) -> tuple[str, ...]:
        """Adds nodes that have an agent and no containers, one for each mock machine; the names of their Nodes."""
        with locks.held(self.layout.lock):
            new = hollow.add(self.layout, machines)
            self._ensure_hollow()
        return tuple(self.layout.hollow_name(node.number) for node in new)

    def get(self, path: str) -> tuple[int, bytes]:
        """Status and body of a GET at the API server, as the administrator. The caller has `entered`. Raises OSError."""
        return rest.call(self.layout, "GET", path)

    def wait_ready(self, component: str) -> None:
        """Waits until a component serves; of kubelet also until the Node is Ready."""
        self._require_known(component)
        if component in components.ORDER:
            self._wait(f"{component} is ready", lambda: probes.serves(self.layout, component))
        else:
            self._wait_hollow()

    def wait_api(self) -> None:
        """Waits until the API server is ready."""
        self.wait_ready("kube-apiserver")

    def wait_node(self) -> None:
        """Waits until the Node is Ready and pods can be created."""
        self.wait_ready("kubelet")
        self._wait(
            "ServiceAccount default/default exists",
            lambda: probes.found(self.layout, "/api/v1/namespaces/default/serviceaccounts/default") is not None,
        )

    def down(self) -> None:
        """Takes it down and removes all that it was made of."""
        down(self.name)

    def _ensure_hollow(self) -> None:
        hollow.ensure(self.layout, binaries=self.binaries)
        self._wait_hollow()

    def _wait_hollow(self) -> None:
        for node in hollow.nodes(self.layout):
            name = self.layout.hollow_name(node.number)
            self._wait(f"hollow node {name} offers its devices", lambda node=node: hollow.ready(self.layout, node))  # type: ignore[misc]

    def _require_known(self, component: str) -> None:
        if component not in self.components:
            raise ClusterError(f"No component is named {component}; there are {', '.join(self.components)}")

    def _wait(self, what: str, done: Callable[[], bool]) -> None:
        """Raises ClusterError as soon as a component that was started has ended by itself: none does."""
        deadline = time.monotonic() + READY_S
        with self.entered():
            while not done():
                for component in processes.recorded(self.layout):
                    if self.pid(component) is None:
                        log = self.log(component)
                        raise ClusterError(f"{component} does not stay up. The end of {log}:\n{_tail(log)}")
                if time.monotonic() > deadline:
                    raise ClusterError(f"Not so after {READY_S:.0f} s: {what}. The logs are in {self.layout.logs}")
                time.sleep(POLL_S)


def up(options: Options) -> Cluster:
    """A cluster that stands: this one if it runs with the same options, else a new one, after what was left of an old one is gone.

    Raises ClusterError: no root, no Go, one of that name runs with other options, a component does not start.
    """
    layout = Layout(options.name)
    needs.require_rights()
    needs.install()
    programs = binaries.build()
    with locks.held(layout.lock):
        standing = _standing(options.name)
        if standing is not None:
            if standing.options.to_json() != options.to_json():
                raise ClusterError(
                    f"Cluster {options.name} runs with other options ({json.dumps(standing.options.to_json())}):"
                    f" hack/cluster --name {options.name} down"
                )
            standing._ensure_hollow()  # noqa: SLF001
            return standing
        needs.require_room(ROOT, needs.CLUSTER_BYTES, "A cluster")
        _down(layout)
        cluster = Cluster(layout=layout, options=options, binaries=programs)
        try:
            _create(cluster)
        except BaseException as error:
            kept = _keep_logs(layout)
            _down(layout)
            if isinstance(error, ClusterError | OSError):
                raise ClusterError(f"{str(error).replace(str(layout.logs), str(kept))}") from error
            raise
        shutil.rmtree(layout.failed_logs, ignore_errors=True)
        return cluster


def attach(name: str) -> Cluster:
    """The cluster of that name. Raises ClusterError where none stands."""
    layout = Layout(name)
    needs.require_root()
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
    layout = Layout(name)
    needs.require_root()
    with locks.held(layout.lock):
        _down(layout)
        shutil.rmtree(layout.failed_logs, ignore_errors=True)


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
    locks.output(["openssl", "genrsa", "-out", str(layout.config / "service-accounts.key"), "2048"])
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
    for component in components.ORDER:
        cluster.wait_ready(component)
    hollow.add(layout, cluster.options.hollow)
    cluster._ensure_hollow()  # noqa: SLF001
    kept = {"options": cluster.options.to_json(), "binaries": str(cluster.binaries)}
    processes.write(layout.options, json.dumps(kept))


def _down(layout: Layout) -> None:
    layout.options.unlink(missing_ok=True)
    for component in components.STOP_ORDER:  # who starts others first; nothing is kept, so nothing has to end in order
        processes.end(layout, component, how=signal.SIGKILL)
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
        locks.output(["umount", "--lazy", target])


def _keep_logs(layout: Layout) -> Path:
    """Puts the logs of a cluster that does not come up where they outlive it."""
    shutil.rmtree(layout.failed_logs, ignore_errors=True)
    if layout.logs.is_dir():
        shutil.copytree(layout.logs, layout.failed_logs)
    return layout.failed_logs


def _tail(log: Path) -> str:
    try:
        return "\n".join(log.read_text(errors="replace").splitlines()[-TAIL_LINES:])
    except OSError as error:
        return str(error)
