# SPDX-License-Identifier: Apache-2.0
"""A node whose GPUs are given out in shares, with the pods that have them."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from discovery import limits, nvmlnumbers, options, workers
from discovery.mock import podcgroups, programs
from driver import values
from driver.errors import MpsError
from driver.mps import client
from hack.judges import agentnode, upstream

CONFIGURATION = """apiVersion: config.nearfield.dev/v1alpha1
kind: AgentConfig
sharing:
- mode: shares
  shares: {memory: none, compute: none}
"""

BY_MPS = "+mps"
"""Behind the name of a machine: with the supervisor of MPS, whose daemons are stand-ins."""

_CALL_S = 30.0
_START_S = 60.0
_PAUSE_S = 0.05


class SharedNode(agentnode.AgentNode):
    """With the cgroups of pods, below a folder of its own, and what the mock's driver limits them to."""

    @property
    def cgroups(self) -> Path:
        """Where kubelet makes the cgroups of pods."""
        return self.directory / "s" / "mock" / "sys" / "fs" / "cgroup"

    def run_pod(
        self, claim: upstream.Body, results: Sequence[upstream.Result], pod: str
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
            source=options.Source.rendered(mock),
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

    def mps_shares(self) -> frozenset[str]:
        """The ids of the shares for which there is a daemon."""
        return frozenset()

    def modes(self) -> frozenset[limits.ComputeMode]:
        """The compute modes of the GPUs that tell it."""
        return frozenset(
            nvmlnumbers.COMPUTE_MODES[gpu.compute_mode] for gpu in self.gpus() if gpu.compute_mode is not None
        )


class SupervisedNode(SharedNode):
    """With the supervisor of MPS beside the agent, which is killed now and then, too."""

    def __init__(self, *arguments: Any, mps: Path, **more: Any) -> None:
        self._mps = mps
        self._root = mps / "root"
        super().__init__(*arguments, options=("--mps-dir", str(mps / "run")), **more)
        programs.write(self._root, self.directory / "s" / "mock")
        self._supervisor: subprocess.Popen[bytes] | None = None

    def start(self, *, crash_at: str | None = None) -> None:
        """As AgentNode. The first time the supervisor, too, whose programs read the machine: it has to be rendered."""
        super().start(crash_at=crash_at)
        if self._supervisor is None:
            self.slices()
            self.supervise()
            self.settle(self._offers_mps, "GPUs shared by MPS")

    def _offers_mps(self) -> bool:
        offered = [device for body in self.slices() for device in body["spec"].get("devices") or []]
        return all(device["attributes"]["computeEnforcement"] == {"string": "mps"} for device in offered)

    def supervise(self) -> None:
        """Start the supervisor, anew where it runs, and wait until it answers."""
        self.end_supervisor()
        with (self._mps / "log").open("ab") as log:
            self._supervisor = subprocess.Popen(
                [
                    *(sys.executable, "-m", "driver.cli", "mps", "run"),
                    *("--mps-dir", str(self._mps / "run"), "--driver-root", str(self._root)),
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        deadline = time.monotonic() + _START_S
        while client.Client(self._mps / "run").ability() is None:
            if time.monotonic() > deadline:
                raise agentnode.NodeError(f"the supervisor does not answer: {(self._mps / 'log').read_text()[-2000:]}")
            threading.Event().wait(_PAUSE_S)

    def end_supervisor(self) -> None:
        """SIGKILL, at once; its daemons go with it."""
        if self._supervisor is not None:
            self._supervisor.kill()
            self._supervisor.wait()

    def mps_shares(self) -> frozenset[str]:
        """As SharedNode."""
        try:
            found = client.Client(self._mps / "run").status(timeout_s=_CALL_S)
        except MpsError:
            return frozenset(["the supervisor is away"])
        return frozenset(share for daemon in found.daemons.values() for share in daemon.shares)


@contextlib.contextmanager
def shared(machine: str) -> Iterator[SharedNode]:
    """A node of a machine of the zoo for the block; its agent is not started yet."""
    name = machine.removesuffix(BY_MPS)
    with agentnode.room() as (directory, api, plugins), contextlib.ExitStack() as stack:
        if name == machine:
            node = SharedNode(directory, name, api, plugins, configuration=CONFIGURATION)
        else:
            # A socket of a namespace has a long path, and room for 107 bytes.
            mps = Path(tempfile.mkdtemp(prefix="nf", dir="/tmp"))
            stack.callback(shutil.rmtree, mps, ignore_errors=True)
            node = supervised = SupervisedNode(directory, name, api, plugins, configuration=CONFIGURATION, mps=mps)
            stack.callback(supervised.end_supervisor)
        stack.callback(node.kill)
        yield node
