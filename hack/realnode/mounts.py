# SPDX-License-Identifier: Apache-2.0
"""The cluster's mount namespace: held by one process, gone with it, and with it every mount that kubelet and containerd made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import IO

from hack.realnode import locks, processes
from hack.realnode.errors import ClusterError
from hack.realnode.layout import Layout

HOLDER = "namespaces"
"""The component that holds it."""

READY_S = 120.0

KERNEL_SETTINGS: Mapping[str, str] = {
    "/proc/sys/vm/overcommit_memory": "1",
    "/proc/sys/vm/panic_on_oom": "0",
    "/proc/sys/kernel/panic": "10",
    "/proc/sys/kernel/panic_on_oops": "1",
    "/proc/sys/kernel/keys/root_maxkeys": "1000000",
    "/proc/sys/kernel/keys/root_maxbytes": "25000000",
}
"""What kubelet wants of the kernel (k8s.io/component-helpers/node/util/sysctl), and would set, for the whole machine and for good,
where it finds something else."""

# Mounts made inside stay inside (a slave of the machine), and reach the pods that ask for it (shared among themselves), as on a node
# whose / is shared. What is unmounted outside goes inside too: else the network namespace of another cluster would live on in here.
# The cluster's folder is bound into the folder that hides it, so that its paths are the same on both sides.
SCRIPT = """
set -eu
mount --make-rshared /
root=$1; shift
mkdir -p "$root/lib/${root#/var/lib/}"
mount --bind "$root" "$root/lib/${root#/var/lib/}"
while [ $# -gt 0 ]; do mount --rbind "$2" "$1"; shift 2; done
echo ready
exec sleep infinity
"""

# A mount namespace of kubelet's own, whose mounts go to and come from the cluster's, but for those below /proc: a container with a user
# namespace may not mount a /proc where another one is partly hidden.
KUBELET_SCRIPT = """
set -eu
mount --make-rprivate /proc
while [ "$1" != -- ]; do
    if [ -e "$1" ] && [ -e "$2" ]; then mount --bind "$2" "$1"; fi
    shift 2
done
shift
exec "$@"
"""


def hold(layout: Layout) -> None:
    """Starts the process that holds the namespaces. Raises ClusterError with what failed."""
    for behind in layout.bound.values():
        behind.mkdir(parents=True, exist_ok=True)
    pairs = [str(text) for inside, behind in layout.bound.items() for text in (inside, behind)]
    processes.start_holder(
        layout,
        HOLDER,
        ["unshare", "--mount", "--propagation=slave", "--", "sh", "-c", SCRIPT, "sh", str(layout.root), *pairs],
        ready_s=READY_S,
    )


def holder(layout: Layout) -> int:
    """The process whose namespaces are the cluster's. Raises ClusterError where the cluster does not run."""
    number = processes.pid(layout, HOLDER)
    if number is None:
        raise ClusterError(f"Cluster {layout.name} does not run; hack/cluster --name {layout.name} up")
    return number


def run(layout: Layout, *arguments: str, stdin: bytes | IO[bytes] | None = None) -> str:
    """The output of a program that runs where the components run. Raises ClusterError with what it said."""
    return locks.output(["nsenter", f"--target={holder(layout)}", "--mount", "--net", "--", *arguments], stdin=stdin)


def kernel_files(layout: Layout) -> dict[PurePosixPath, Path]:
    """Setting of the kernel: the file that kubelet reads instead."""
    return {
        PurePosixPath(setting): layout.config / "kernel" / PurePosixPath(setting).relative_to("/proc/sys")
        for setting in KERNEL_SETTINGS
    }


def kubelet_command(layout: Layout, command: Sequence[str]) -> list[str]:
    """Runs kubelet so that it finds the kernel as it wants it, and leaves it as it is."""
    pairs = [str(text) for setting, file in kernel_files(layout).items() for text in (setting, file)]
    return [
        "unshare",
        "--mount",
        "--propagation=unchanged",
        "--",
        "sh",
        "-c",
        KUBELET_SCRIPT,
        "sh",
        *pairs,
        "--",
        *command,
    ]
