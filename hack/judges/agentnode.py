# SPDX-License-Identifier: Apache-2.0
"""A node with a real agent on a mock machine, between the stand-ins, that is killed at any moment.

Claims come with the allocation that upstream's allocator made of them, and are prepared as kubelet does it: again and again
until it works, when the agent died in between.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from discovery.mock import live, state
from driver import values
from driver.prepare import ledger, store
from driver.standin import apiserver, kubelet, kubelet_client
from hack.judges import migclaims, nodes, upstream

NODE = "oracle"
START_S = 60.0
SETTLE_S = 60.0
"""The longest that anything may take that is done behind an answer."""

_PAUSE_S = 0.02
_REGISTRATION_S = 2.0
_MEMORY = Path("/dev/shm")
"""A mock machine is thousands of files. Where there is no such folder, any will do."""

_LAST_WORDS = 3000

T = TypeVar("T")


class NodeError(Exception):
    """The agent did what it must not, or not what it must."""


class AgentNode:
    """The agent, killed and started again as asked. Not thread-safe, but `kill` may be called while a claim is prepared."""

    def __init__(
        self,
        directory: Path,
        machine: str,
        api: apiserver.ApiServer,
        plugins: kubelet.StandInKubelet,
        *,
        configuration: str,
        options: Sequence[str] = (),
    ) -> None:
        """`configuration`: the file of the agent, as an admin writes it. `options`: more of its command line."""
        self.directory = directory
        self._options = tuple(options)
        self._machine = machine
        self._api = api
        self._kubelet = plugins
        self._kubeconfig = api.write_kubeconfig(directory / "kubeconfig")
        self._configuration = directory / "agent.yaml"
        self._configuration.write_text(configuration, encoding="utf-8")
        self._numbers = itertools.count(1)
        self._live = live.LiveFile(directory / "s" / "mock")
        self._log = directory / "log"
        self._process: subprocess.Popen[bytes] | None = None
        self.starts = 0
        self._kills = 0

    def start(self, *, crash_at: str | None = None) -> None:
        """Start it, to die at a named point if one is given, and wait until kubelet can call it."""
        kills = self._kills
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "driver.cli", "run", "--node-name", NODE, "--mock", self._machine),
                    *("--kubeconfig", str(self._kubeconfig), "--config", str(self._configuration)),
                    *("--kubelet-dir", str(self.directory / "k"), "--cdi-dir", str(self.directory / "cdi")),
                    *("--state-dir", str(self.directory / "s"), "--http", "127.0.0.1:0", "--inspect", ""),
                    *("--probe-interval", "2s", *self._options),
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=os.environ | ({"NEARFIELD_CRASH_AT": crash_at} if crash_at else {}),
            )
        self.starts += 1
        deadline = time.monotonic() + START_S
        while True:
            try:
                self._kubelet.wait_registered(values.DRIVER_NAME, timeout_s=_REGISTRATION_S)
            except kubelet_client.KubeletError as error:
                # It passed the point as it started, or the moment to die that had been set for another life came now.
                if not self.alive() and (crash_at is not None or self._kills != kills):
                    self.start()
                elif not self.alive() or time.monotonic() > deadline:
                    raise NodeError(f"{error}; the agent's last words:\n{self.last_words()}") from error
                else:
                    continue
            return

    def alive(self) -> bool:
        """Whether it runs."""
        return self._process is not None and self._process.poll() is None

    def kill(self) -> None:
        """SIGKILL, at once."""
        self._kills += 1
        if (process := self._process) is not None:
            process.kill()
            process.wait()

    def slices(self) -> list[dict[str, Any]]:
        """What is published, as soon as the pool is whole."""

        def whole() -> list[dict[str, Any]]:
            found = [body for body in self._api.objects("resourceslices") if body["spec"]["nodeName"] == NODE]
            newest = max((body["spec"]["pool"]["generation"] for body in found), default=0)
            pool = [body for body in found if body["spec"]["pool"]["generation"] == newest]
            return pool if pool and len(pool) == pool[0]["spec"]["pool"]["resourceSliceCount"] else []

        return self._until(whole, "slices", within_s=START_S)

    def allocate(
        self, claim: Mapping[str, Any], results: Sequence[upstream.Result], *, pods: Sequence[str] = ()
    ) -> values.ClaimRef:
        """Store a claim with its allocation, as the scheduler leaves it. `pods`: UIDs of those that it is reserved for."""
        name = f"{claim['metadata']['name']}-{next(self._numbers)}"
        stored = self._api.seed(
            "resourceclaims",
            {
                **claim,
                "metadata": {"name": name, "namespace": migclaims.NAMESPACE},
                "status": {
                    "allocation": {"devices": {"results": [_result(one) for one in results]}},
                    "reservedFor": [{"resource": "pods", "name": f"pod-{uid}", "uid": uid} for uid in pods],
                },
            },
        )
        return values.ClaimRef(uid=values.ClaimUid(stored["metadata"]["uid"]), namespace=migclaims.NAMESPACE, name=name)

    def prepare(self, ref: values.ClaimRef) -> values.Prepared | values.Failed | None:
        """One call; None where the agent died of it, or was not there."""
        try:
            return self._kubelet.prepare(values.DRIVER_NAME, [ref])[ref.uid]
        except (kubelet_client.KubeletError, ValueError):  # ValueError: of a channel that the stand-in closed just now
            return None

    def unprepare(self, ref: values.ClaimRef) -> values.Unprepared | values.Failed | None:
        """One call; None where the agent died of it, or was not there."""
        try:
            return self._kubelet.unprepare(values.DRIVER_NAME, [ref])[ref.uid]
        except (kubelet_client.KubeletError, ValueError):  # ValueError: of a channel that the stand-in closed just now
            return None

    def prepare_again(self, ref: values.ClaimRef) -> values.Prepared | values.Failed:
        """Calls until there is an answer; the agent is started where it is down."""
        answers: list[values.Prepared | values.Failed] = []

        def answered() -> bool:
            if (answer := self._revived().prepare(ref)) is not None:
                answers.append(answer)
            return bool(answers)

        self._until(answered, f"{ref} prepared", within_s=START_S)
        return answers[0]

    def unprepare_again(self, ref: values.ClaimRef) -> values.Unprepared | values.Failed:
        """The same for the other direction."""
        answers: list[values.Unprepared | values.Failed] = []

        def answered() -> bool:
            if (answer := self._revived().unprepare(ref)) is not None:
                answers.append(answer)
            return bool(answers)

        self._until(answered, f"{ref} unprepared", within_s=START_S)
        return answers[0]

    def _revived(self) -> AgentNode:
        if not self.alive():
            self.start()
        return self

    def forget(self, ref: values.ClaimRef) -> None:
        """Delete a claim whose pod is gone."""
        self._api.remove("resourceclaims", f"{ref.namespace}/{ref.name}")

    def gpus(self) -> tuple[state.Gpu, ...]:
        """The GPUs of the mock, as they are now."""
        nvml = self._live.read().nvml
        return () if nvml is None else nvml.gpus

    def rows(self) -> tuple[ledger.Entry, ...]:
        """What the record holds."""
        return store.read_rows(self.directory / "s")

    def cdi_files(self) -> list[str]:
        """Files of claims."""
        return sorted(path.name for path in (self.directory / "cdi").glob(f"{values.DRIVER_NAME}_*"))

    def last_words(self) -> str:
        """The end of the agent's log."""
        return self._log.read_text(encoding="utf-8", errors="replace")[-_LAST_WORDS:]

    def settle(self, done: Callable[[], bool], what: str, *, otherwise: Callable[[], str] | None = None) -> None:
        """Wait for what is done behind an answer. `otherwise`: what there is in its place, for the message."""
        try:
            self._until(done, what, within_s=SETTLE_S)
        except NodeError as error:
            if otherwise is None:
                raise
            raise NodeError(f"{otherwise()}, not {error}") from error

    def _until(self, look: Callable[[], T], what: str, *, within_s: float) -> T:
        deadline = time.monotonic() + within_s
        pause = threading.Event()
        while not (found := look()):
            if time.monotonic() > deadline:
                raise NodeError(f"{what}: not in {within_s:.0f} s; the agent's last words:\n{self.last_words()}")
            pause.wait(_PAUSE_S)
        return found


@contextlib.contextmanager
def room() -> Iterator[tuple[Path, apiserver.ApiServer, kubelet.StandInKubelet]]:
    """What a node needs, for the block. The folder has a short name, as sockets lie in it."""
    directory = Path(tempfile.mkdtemp(prefix="nf-", dir=_MEMORY if os.access(_MEMORY, os.W_OK) else None))
    try:
        with apiserver.ApiServer() as api, kubelet.StandInKubelet(directory / "k") as plugins:
            api.seed("nodes", {"metadata": {"name": NODE}})
            yield directory, api, plugins
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _result(result: upstream.Result) -> dict[str, Any]:
    found: dict[str, Any] = {"request": result.request, "driver": nodes.DRIVER, "pool": NODE, "device": result.device}
    if result.share_id is not None:
        found |= {"shareID": result.share_id, "consumedCapacity": dict(result.consumed)}
    return found
