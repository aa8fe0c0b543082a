# SPDX-License-Identifier: Apache-2.0
"""The cluster's mount namespace: held by one process, gone with it, and with it every mount that kubelet and containerd made."""

from __future__ import annotations

import subprocess

from hack.realnode import processes
from hack.realnode.errors import ClusterError
from hack.realnode.layout import Layout

HOLDER = "namespaces"
"""The component that holds it."""

READY_S = 10.0

# Mounts made inside stay inside (slave of the machine's), and reach the pods that ask for it (shared among themselves), as on a node
# whose / is shared. The cluster's folder is bound into the folder that hides it, so that its paths are the same on both sides.
SCRIPT = """
set -eu
mount --make-rslave /
mount --make-rshared /
root=$1; shift
mkdir -p "$root/lib/${root#/var/lib/}"
mount --bind "$root" "$root/lib/${root#/var/lib/}"
while [ $# -gt 0 ]; do mount --rbind "$2" "$1"; shift 2; done
echo ready
exec sleep infinity
"""


def hold(layout: Layout) -> None:
    """Starts the process that holds the namespaces. Raises ClusterError with what failed."""
    pairs = [str(text) for inside, behind in layout.bound.items() for text in (inside, behind)]
    for behind in layout.bound.values():
        behind.mkdir(parents=True, exist_ok=True)
    processes.start_holder(
        layout,
        HOLDER,
        ["unshare", "--mount", "--", "sh", "-c", SCRIPT, "sh", str(layout.root), *pairs],
        ready_s=READY_S,
    )


def holder(layout: Layout) -> int:
    """The process whose namespaces are the cluster's. Raises ClusterError where the cluster does not run."""
    number = processes.pid(layout, HOLDER)
    if number is None:
        raise ClusterError(f"Cluster {layout.name} does not run; hack/cluster --name {layout.name} up")
    return number


def run(layout: Layout, *arguments: str, stdin: bytes | None = None) -> str:
    """The output of a program that runs where the components run. Raises ClusterError with what it said."""
    done = subprocess.run(
        ["nsenter", f"--target={holder(layout)}", "--mount", "--net", "--", *arguments],
        input=stdin,
        stdin=None if stdin is not None else subprocess.DEVNULL,
        capture_output=True,
        check=False,
    )
    if done.returncode != 0:
        said = (done.stderr or done.stdout).decode(errors="replace").strip()
        raise ClusterError(f"{' '.join(arguments)}: {said}")
    return done.stdout.decode(errors="replace")
