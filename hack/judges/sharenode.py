# SPDX-License-Identifier: Apache-2.0
"""A node whose GPUs are given out in shares, with the pods that have them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from discovery import options, workers
from discovery.mock import podcgroups
from driver import values
from hack.judges import agentnode, migclaims, upstream

CONFIGURATION = """apiVersion: config.nearfield.dev/v1alpha1
kind: AgentConfig
sharing:
- mode: shares
  shares: {memory: none, compute: none}
"""

_CALL_S = 30.0


class SharedNode(agentnode.AgentNode):
    """With the cgroups of pods, below a folder of its own, and what the mock's driver limits them to."""

    @property
    def cgroups(self) -> Path:
        """Where kubelet makes the cgroups of pods."""
        return self.directory / "s" / "mock" / "sys" / "fs" / "cgroup"

    def run_pod(
        self, claim: migclaims.Body, results: Sequence[upstream.Result], pod: str
    ) -> tuple[values.ClaimRef, Path | None]:
        """A pod has got a claim, and kubelet has made its cgroup, which comes before the claim is prepared; None where the machine
        has no hierarchy of cgroups.
        """
        cgroup = podcgroups.make(self.cgroups, pod) if self.cgroups.is_dir() else None
        return self.allocate(claim, results, pods=[pod]), cgroup

    def end_pod(self, pod: str) -> None:
        """Kubelet removes the cgroup, which comes after the claims are unprepared."""
        if self.cgroups.is_dir():
            podcgroups.remove(self.cgroups, pod)

    def limited(self, pods: Mapping[str, str]) -> dict[tuple[str, str], int]:
        """What the driver holds each pod to: (device name of the GPU, UID of the pod) -> bytes. `pods`: cgroup -> UID."""
        mock = self.directory / "s" / "mock"
        work = workers.InProcessWork(
            source=options.Source(sys=mock / "sys", proc=mock / "proc", dev=mock / "dev", mock=mock),
            locks=self.directory / "s" / "locks",
        )
        try:
            return {
                (values.gpu_device_name(gpu.pci), pods[path]): use.limit.hard
                for gpu in self.gpus()
                for path, use in work.memory_use(gpu.pci, list(pods), timeout_s=_CALL_S).items()
                if use.limit.hard is not None
            }
        finally:
            work.close()


@contextlib.contextmanager
def shared(machine: str) -> Iterator[SharedNode]:
    """A node of a machine of the zoo for the block; its agent is not started yet."""
    with agentnode.room() as (directory, api, plugins):
        node = SharedNode(directory, machine, api, plugins, configuration=CONFIGURATION)
        try:
            yield node
        finally:
            node.kill()
