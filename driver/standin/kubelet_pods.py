# SPDX-License-Identifier: Apache-2.0
"""The cgroups that the stand-in for kubelet makes for pods: in the tree of a rendered machine, as either cgroup driver names them."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from discovery.mock import podcgroups
from driver.standin.kubelet_client import KubeletError

DRIVERS: Final[tuple[podcgroups.Driver, ...]] = ("cgroupfs", "systemd")


class PodCgroups:
    """Below `root`. Raises KubeletError."""

    def __init__(self, root: Path, *, driver: podcgroups.Driver = "cgroupfs") -> None:
        self.root = root
        self._driver: podcgroups.Driver = driver

    def make(self, pod: str, *, qos: podcgroups.Qos = "burstable") -> Path:
        """The cgroup of a pod, made if it is missing."""
        try:
            return podcgroups.make(self.root, pod, qos=qos, driver=self._driver)
        except (OSError, ValueError) as error:
            raise KubeletError(
                f"failed to ensure that the pod: {pod} cgroups exist and are correctly applied: {error}"
            ) from error

    def remove(self, pod: str) -> None:
        """Remove it, if it is there."""
        try:
            podcgroups.remove(self.root, pod)
        except (OSError, ValueError) as error:
            raise KubeletError(f"failed to delete the cgroup of pod {pod}: {error}") from error
