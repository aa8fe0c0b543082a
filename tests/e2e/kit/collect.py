# SPDX-License-Identifier: Apache-2.0
"""What a person wants to read after a failure, written into a folder while everything is still there."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

from hack.realnode import cluster as clusters
from hack.realnode import components
from tests.e2e.kit import agent, node

_SHOWN = ("nodes", "pods", "resourceclaims", "resourceclaimtemplates", "deviceclasses", "daemonsets", "events")


def collect(into: Path, *, cluster: clusters.Cluster, disk: node.Disk) -> None:
    """Write what can be had. Nothing here raises: it runs after a failure, and the failure is what counts."""
    into.mkdir(parents=True, exist_ok=True)

    def save(name: str, look: Callable[[], str]) -> None:
        try:
            text = look()
        except Exception as error:  # noqa: BLE001 - whatever is broken, the rest is still wanted
            text = f"{type(error).__name__}: {error}"
        (into / name).write_text(text, encoding="utf-8", errors="replace")

    save("get.txt", lambda: cluster.kubectl("get", ",".join(_SHOWN), "-A", "-o", "wide"))
    save("slices.yaml", lambda: cluster.kubectl("get", "resourceslices", "-o", "yaml"))
    save("describe.txt", lambda: cluster.kubectl("describe", "nodes,pods,resourceclaims,daemonsets", "-A"))
    save("objects.yaml", lambda: cluster.kubectl("get", "pods,resourceclaims", "-A", "-o", "yaml"))
    save("record.txt", lambda: "\n".join(map(str, disk.record())))
    save("sockets.txt", lambda: "\n".join(sorted(map(str, disk.sockets()))))
    save("processes.txt", lambda: subprocess.run(["ps", "axfww"], capture_output=True, text=True, check=True).stdout)
    for folder in cluster.layout.host_path("/var/log/pods").glob(f"{agent.NAMESPACE}_*"):
        with contextlib.suppress(OSError, shutil.Error):
            shutil.copytree(folder, into / folder.name, dirs_exist_ok=True)
    with contextlib.suppress(OSError):
        shutil.copytree(disk.cdi_dir, into / "cdi", dirs_exist_ok=True)
    for component in components.ORDER:
        with contextlib.suppress(OSError):
            shutil.copyfile(cluster.log(component), into / f"{component}.log")
