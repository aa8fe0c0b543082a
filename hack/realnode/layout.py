# SPDX-License-Identifier: Apache-2.0
"""Where the things of a cluster lie, and the names that the kernel knows them by.

A cluster's programs run in a mount namespace in which `/run`, `/var/lib` and `/var/log` are folders of the cluster, so that kubelet,
containerd and the pods meet the paths of any other node (`/var/lib/kubelet`, `/var/run/cdi`) and two clusters never share one.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from hack.realnode.errors import ClusterError

ROOT = Path("/var/lib/nf")
"""Short, because a Unix socket's path has at most 107 bytes and kubelet's lie deep below it."""

NAME = re.compile(r"[a-z][a-z0-9]{0,5}")


@dataclass(frozen=True)
class Layout:
    """The paths of the cluster `name`, as seen from the machine. Raises ClusterError where the name does not fit."""

    name: str

    def __post_init__(self) -> None:
        if NAME.fullmatch(self.name) is None:
            raise ClusterError(
                f"--name {self.name!r}: a letter and at most five letters or digits, lower case, as it stands in socket paths"
            )

    @property
    def root(self) -> Path:
        """All of the cluster."""
        return ROOT / self.name

    @property
    def lock(self) -> Path:
        """Held by whoever brings the cluster up or down. It stays: a lock file that is removed locks nobody."""
        return ROOT / f".{self.name}.lock"

    @property
    def config(self) -> Path:
        """Configuration files, keys and kubeconfigs."""
        return self.root / "config"

    @property
    def certificates(self) -> Path:
        """kube-apiserver's own."""
        return self.config / "certificates"

    @property
    def pids(self) -> Path:
        """One file a running component."""
        return self.root / "pids"

    @property
    def logs(self) -> Path:
        """One file a component."""
        return self.root / "logs"

    @property
    def audit_log(self) -> Path:
        """Who wrote what, one JSON document a line, where the cluster keeps it (`Options.audit`)."""
        return self.logs / "audit.log"

    @property
    def etcd(self) -> Path:
        """The data of etcd."""
        return self.root / "etcd"

    @property
    def kubeconfig(self) -> Path:
        """The administrator's."""
        return self.config / "admin.kubeconfig"

    @property
    def failed_logs(self) -> Path:
        """The logs of a cluster that did not come up."""
        return ROOT / f"{self.name}-failed-logs"

    @property
    def kubectl_cache(self) -> Path:
        """What kubectl keeps about the server."""
        return self.root / "kubectl"

    @property
    def hollow_nodes(self) -> Path:
        """Which hollow nodes there are."""
        return self.root / "hollow.json"

    def hollow_dir(self, number: int) -> Path:
        """The folders of a hollow node: its kubelet's, its CDI files, its kubeconfig. Short, as there are sockets in it."""
        return self.root / "h" / str(number)

    @property
    def options(self) -> Path:
        """What the cluster was brought up with; written when it stands, so its absence marks one that does not."""
        return self.root / "cluster.json"

    @property
    def kubelet_dir(self) -> Path:
        """The root folder of kubelet, `/var/lib/kubelet` inside."""
        return self.host_path("/var/lib/kubelet")

    @property
    def cdi_dir(self) -> Path:
        """`/var/run/cdi` inside."""
        return self.host_path("/var/run/cdi")

    @property
    def containerd_socket(self) -> Path:
        """containerd's, CRI included."""
        return self.host_path("/run/containerd/containerd.sock")

    @property
    def namespace(self) -> str:
        """The network namespace's name."""
        return f"nf-{self.name}"

    @property
    def namespace_file(self) -> Path:
        """Where iproute2 keeps it."""
        return Path("/run/netns") / self.namespace

    @property
    def cgroup(self) -> str:
        """Below which kubelet keeps its pods: it ends every pod there that it does not know, so no two clusters may share it."""
        return f"/nf-{self.name}"

    @property
    def node_name(self) -> str:
        """Of the one Node with a kubelet."""
        return f"{self.name}-0"

    def hollow_name(self, number: int) -> str:
        """Of a hollow node, from 1 on."""
        return f"{self.name}-{number}"

    @property
    def bound(self) -> dict[PurePosixPath, Path]:
        """The folders inside, and what stands behind each."""
        return {
            PurePosixPath("/run"): self.root / "run",
            PurePosixPath("/var/lib"): self.root / "lib",
            PurePosixPath("/var/log"): self.root / "log",
        }

    def host_path(self, inside: str | PurePosixPath) -> Path:
        """Where a path of the cluster's programs lies on the machine."""
        path = PurePosixPath(inside)
        if path.is_relative_to("/var/run"):
            path = PurePosixPath("/run") / path.relative_to("/var/run")
        for folder, behind in self.bound.items():
            if path.is_relative_to(folder):
                return behind / path.relative_to(folder)
        return Path(path)
