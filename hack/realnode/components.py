# SPDX-License-Identifier: Apache-2.0
"""What each component is started with: its arguments, and the files that they name. Functions of values."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hack.realnode import gates, mounts, network
from hack.realnode.layout import Layout

ORDER = ("etcd", "containerd", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubelet")
"""The order in which they are started; they are stopped the other way round, but for containerd, whose containers kubelet's end first."""

STOP_ORDER = ("kubelet", "containerd", "kube-scheduler", "kube-controller-manager", "kube-apiserver", "etcd")

EMULATED = ("1.35", "1.36", "1.37")

TOKENS: Mapping[str, tuple[str, str]] = {
    "admin": ("admin", "system:masters"),
    "scheduler": ("system:kube-scheduler", ""),
    "controller-manager": ("system:kube-controller-manager", ""),
}
"""Kubeconfig: user and group of its token. The tokens are made for a cluster; the node's is beside them, as its name holds the cluster's."""

ENVIRONMENT: Mapping[str, str] = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "HOME": "/root",
}
"""Of every process of a cluster: what the caller has set does not change it."""

PAUSE_IMAGE = "localhost/nearfield/pause:e2e"
API_SERVER = f"https://{network.SERVICE_ADDRESS}:443"


@dataclass(frozen=True)
class Options:
    """What a cluster is brought up with.

    `emulate` is the release whose API the control plane serves ("1.35"); `gates` are feature gates of every component;
    `runtime_config` are API groups to serve beside the default ones; with `audit` the API server keeps a log of all writes, each
    with who made it, in `layout.audit_log`; `hollow` are the mock machines of further nodes, one each, that have an agent and no
    containers.
    """

    name: str = "node"
    emulate: str | None = None
    gates: Mapping[str, bool] = field(default_factory=dict)
    runtime_config: Mapping[str, bool] = field(default_factory=dict)
    audit: bool = False
    hollow: Sequence[str] = ()

    def to_json(self) -> dict[str, Any]:
        """As it is kept beside the cluster."""
        return {
            "name": self.name,
            "emulate": self.emulate,
            "gates": dict(sorted(self.gates.items())),
            "runtime_config": dict(sorted(self.runtime_config.items())),
            "audit": self.audit,
            "hollow": list(self.hollow),
        }


def arguments(component: str, *, layout: Layout, options: Options, binaries: Path) -> list[str]:
    """The command line of a component."""
    program = str(binaries / component)
    config = layout.config
    certificate = layout.certificates / "apiserver.crt"
    control_plane = _control_plane(options)
    served = gates.runtime_config(options.gates, emulate=options.emulate, given=options.runtime_config)
    match component:
        case "etcd":
            return [
                program,
                *("--data-dir", str(layout.etcd)),
                *("--listen-client-urls", "http://127.0.0.1:2379"),
                *("--advertise-client-urls", "http://127.0.0.1:2379"),
                *("--listen-peer-urls", "http://127.0.0.1:2380"),
                *("--initial-advertise-peer-urls", "http://127.0.0.1:2380"),
                *("--initial-cluster", "default=http://127.0.0.1:2380"),
                "--unsafe-no-fsync",  # the cluster does not outlive a crash of its machine
                "--log-level=warn",
            ]
        case "containerd":
            return [program, "--config", str(config / "containerd.toml")]
        case "kube-apiserver":
            return [
                program,
                "--etcd-servers=http://127.0.0.1:2379",
                f"--cert-dir={layout.certificates}",
                "--secure-port=443",
                f"--advertise-address={network.NODE_ADDRESS}",
                "--service-account-issuer=https://kubernetes.default.svc",
                f"--service-account-key-file={config / 'service-accounts.key'}",
                f"--service-account-signing-key-file={config / 'service-accounts.key'}",
                f"--service-cluster-ip-range={network.SERVICE_RANGE}",
                "--authorization-mode=Node,RBAC",
                f"--token-auth-file={config / 'tokens.csv'}",
                "--allow-privileged=true",
                "--enable-admission-plugins=NodeRestriction",
                "--kubelet-preferred-address-types=InternalIP",  # a name would be looked up in DNS
                *([f"--runtime-config={_pairs(served)}"] if served else []),
                *(
                    [f"--audit-policy-file={config / 'audit.json'}", f"--audit-log-path={layout.audit_log}"]
                    if options.audit
                    else []
                ),
                *control_plane,
            ]
        case "kube-controller-manager":
            return [
                program,
                f"--kubeconfig={config / 'controller-manager.kubeconfig'}",
                f"--service-account-private-key-file={config / 'service-accounts.key'}",
                f"--root-ca-file={certificate}",
                "--use-service-account-credentials",
                "--leader-elect=false",
                *control_plane,
            ]
        case "kube-scheduler":
            return [program, f"--kubeconfig={config / 'scheduler.kubeconfig'}", "--leader-elect=false", *control_plane]
        case "kubelet":
            return mounts.kubelet_command(
                layout,
                [
                    program,
                    f"--config={config / 'kubelet.yaml'}",
                    f"--kubeconfig={config / 'kubelet.kubeconfig'}",
                    f"--hostname-override={layout.node_name}",
                    f"--node-ip={network.NODE_ADDRESS}",
                ],
            )
        case _:
            raise AssertionError(component)


def files(*, layout: Layout, options: Options, tokens: Mapping[str, str]) -> dict[Path, str]:
    """The files that the command lines name, but the key and the certificate, which OpenSSL and kube-apiserver make."""
    users = {**TOKENS, "kubelet": (f"system:node:{layout.node_name}", "system:nodes")}
    made = {layout.config / f"{name}.kubeconfig": kubeconfig(layout, tokens[name]) for name in users}
    made[layout.config / "tokens.csv"] = "".join(
        f'{tokens[name]},{user},{user},"{group}"\n' for name, (user, group) in users.items()
    )
    made |= {file: f"{mounts.KERNEL_SETTINGS[str(setting)]}\n" for setting, file in mounts.kernel_files(layout).items()}
    made[layout.config / "audit.json"] = json.dumps(_audit(), indent=1)
    made[layout.config / "kubelet.yaml"] = json.dumps(_kubelet(layout, options), indent=1)
    made[layout.config / "containerd.toml"] = _containerd(layout)
    made[layout.config / "cni" / "10-pods.conflist"] = json.dumps(_cni(), indent=1)
    return made


def user_names() -> tuple[str, ...]:
    """Whoever needs a token."""
    return (*TOKENS, "kubelet")


def _control_plane(options: Options) -> list[str]:
    return [
        *([f"--emulated-version=kube={options.emulate}"] if options.emulate else []),
        *([f"--feature-gates={_pairs(options.gates)}"] if options.gates else []),
    ]


def _pairs(switches: Mapping[str, bool]) -> str:
    return ",".join(f"{name}={str(value).lower()}" for name, value in sorted(switches.items()))


def kubeconfig(layout: Layout, token: str) -> str:
    """Of whoever has the token."""
    return json.dumps(
        {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [
                {
                    "name": layout.name,
                    "cluster": {
                        "server": API_SERVER,
                        "certificate-authority": str(layout.certificates / "apiserver.crt"),
                    },
                }
            ],
            "users": [{"name": "user", "user": {"token": token}}],
            "contexts": [{"name": "context", "context": {"cluster": layout.name, "user": "user"}}],
            "current-context": "context",
        },
        indent=1,
    )


def _kubelet(layout: Layout, options: Options) -> dict[str, Any]:
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        # Whoever can reach it is in the cluster's own network namespace.
        "authentication": {"anonymous": {"enabled": True}, "webhook": {"enabled": False}},
        "authorization": {"mode": "AlwaysAllow"},
        "containerRuntimeEndpoint": "unix:///run/containerd/containerd.sock",
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": layout.cgroup,
        "failCgroupV1": False,
        "failSwapOn": False,
        "enforceNodeAllocatable": [],
        # The disk is the machine's, which may be as full as it likes.
        "evictionHard": {"memory.available": "0%", "nodefs.available": "0%", "imagefs.available": "0%"},
        "imageGCHighThresholdPercent": 100,
        "imageGCLowThresholdPercent": 99,
        "featureGates": dict(options.gates),
        # A node that is looked at by tests: said at once, not 10 s later.
        "nodeStatusUpdateFrequency": "5s",
        "volumePluginDir": "/var/lib/kubelet/volume-plugins",  # its default is a folder of the machine
        "registryPullQPS": 0,
        "eventRecordQPS": 0,
        "maxPods": 250,
    }


def _audit() -> dict[str, Any]:
    """Who writes what, without the bodies; reads, which are most of what there is, are left out."""
    return {
        "apiVersion": "audit.k8s.io/v1",
        "kind": "Policy",
        "omitStages": ["RequestReceived", "ResponseStarted"],
        "rules": [{"level": "None", "verbs": ["get", "list", "watch"]}, {"level": "Metadata"}],
    }


def _cni() -> dict[str, Any]:
    return {
        "cniVersion": "0.4.0",
        "name": "pods",
        "plugins": [
            {
                "type": "bridge",
                "bridge": "pods0",
                "isGateway": True,
                "ipam": {
                    "type": "host-local",
                    "ranges": [[{"subnet": network.POD_RANGE}]],
                    "routes": [{"dst": "0.0.0.0/0"}],
                },
            }
        ],
    }


def _containerd(layout: Layout) -> str:
    return f"""version = 3
root = "/var/lib/containerd"
state = "/run/containerd"
disabled_plugins = ["io.containerd.nri.v1.nri", "io.containerd.internal.v1.opt"]  # the second makes /opt/containerd

[grpc]
  address = "/run/containerd/containerd.sock"

[plugins."io.containerd.cri.v1.images"]
  snapshotter = "overlayfs"

[plugins."io.containerd.cri.v1.images".pinned_images]
  sandbox = "{PAUSE_IMAGE}"

[plugins."io.containerd.cri.v1.runtime"]
  cdi_spec_dirs = ["/etc/cdi", "/var/run/cdi"]
  restrict_oom_score_adj = true  # a root without CAP_SYS_RESOURCE may not lower it, and runc then dies

[plugins."io.containerd.cri.v1.runtime".cni]
  bin_dirs = ["/usr/lib/cni"]
  conf_dir = "{layout.config / "cni"}"

[plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc]
  runtime_type = "io.containerd.runc.v2"

[plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc.options]
  SystemdCgroup = false
"""
