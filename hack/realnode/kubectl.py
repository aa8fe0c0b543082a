# SPDX-License-Identifier: Apache-2.0
"""kubectl as the administrator of a cluster."""

from __future__ import annotations

import os
from pathlib import Path

from hack.realnode import locks
from hack.realnode.layout import Layout


def command(layout: Layout, binaries: Path) -> list[str]:
    """The beginning of its command line; to be run in the cluster's network."""
    return [str(binaries / "kubectl"), f"--kubeconfig={layout.kubeconfig}"]


def environment(layout: Layout) -> dict[str, str]:
    """Its environment. What it keeps about a server is kept with the cluster: all clusters have the same address."""
    return {**os.environ, "KUBECACHEDIR": str(layout.kubectl_cache), "KUBECTL_KUBERC": "false"}


def run(layout: Layout, binaries: Path, *arguments: str, stdin: str | None = None) -> str:
    """What it prints. Raises ClusterError with what it said."""
    return locks.output(
        ["nsenter", f"--net={layout.namespace_file}", "--", *command(layout, binaries), *arguments],
        stdin=None if stdin is None else stdin.encode(),
        environment=environment(layout),
    )
