# SPDX-License-Identifier: Apache-2.0
"""The agent as a process between the stand-ins: what a test of the whole starts, asks and ends."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from driver import values
from driver.standin import apiserver, kubelet, kubelet_pods

NODE = "n1"
NAMESPACE = "ml"
WAIT_S = 90.0
_SHOWN = 8000

T = TypeVar("T")


def until(look: Callable[[], T | None], what: str) -> T:
    """Wait until a look gives something, failing loudly when it never does."""
    deadline = time.monotonic() + WAIT_S
    pause = threading.Event()
    while time.monotonic() < deadline:
        found = look()
        if found:
            return found
        pause.wait(0.05)
    raise AssertionError(f"never came: {what}")


class Agent:
    """One `nearfield run`. It is killed with the block that started it, if it still runs then."""

    def __init__(self, node: Node, arguments: Sequence[str], *, name: str) -> None:
        self.log = node.directory / f"{name}.log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "driver.cli", "run", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def said(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")

    def told(self, *words: str) -> bool:
        """Whether one line of its log has all these words."""
        return any(all(word in line for word in words) for line in self.said().splitlines())

    def port(self, server: str) -> int:
        """The free port that --http or --inspect took, from the log line that tells it."""
        return int(until(lambda: _after(self.said(), f"Serving {server} on port "), f"the {server} port"))

    def get(self, path: str, *, server: str = "http") -> tuple[int, str]:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port(server)}{path}", timeout=WAIT_S) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def ready(self) -> bool:
        return self.get("/readyz")[0] == 200

    def terminate(self) -> int:
        """SIGTERM, and the exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(WAIT_S)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(WAIT_S)


def _after(text: str, marker: str) -> str | None:
    for line in text.splitlines():
        _, found, rest = line.partition(marker)
        if found:
            return re.split(r'[\s.,"]', rest)[0]
    return None


class Node:
    """The folders of a node, and the stand-ins at both ends of an agent."""

    def __init__(self, directory: Path, api: apiserver.ApiServer, stack: contextlib.ExitStack) -> None:
        self.directory = directory
        self.api = api
        self.kubelet_dir = directory / "k"
        self.cdi_dir = directory / "cdi"
        self.state_dir = directory / "s"
        self.mock_dir = self.state_dir / "mock"
        self.kubeconfig = api.write_kubeconfig(directory / "kubeconfig")
        self._stack = stack
        self._count = 0

    def start(self, *more: str, mock: str | None = "l40s-8-pcie") -> Agent:
        """An agent on a mock machine, or on the one that `more` describes."""
        self._count += 1
        arguments = [
            *("--node-name", NODE, "--kubeconfig", str(self.kubeconfig)),
            *(("--mock", mock) if mock is not None else ()),
            *("--kubelet-dir", str(self.kubelet_dir), "--cdi-dir", str(self.cdi_dir)),
            *("--state-dir", str(self.state_dir), "--http", "127.0.0.1:0", "--inspect", ""),
            *("--probe-interval", "500ms"),
            *more,
        ]
        agent = Agent(self, arguments, name=f"agent-{self._count}")
        self._stack.callback(agent.process.wait)
        self._stack.callback(agent.process.kill)
        return agent

    def kubelet(self, pods: kubelet_pods.PodCgroups | None = None) -> kubelet.StandInKubelet:
        return self._stack.enter_context(kubelet.StandInKubelet(self.kubelet_dir, pods=pods))

    @property
    def cgroup_root(self) -> Path:
        """The cgroups of the mock machine."""
        return self.mock_dir / "sys/fs/cgroup"

    def share(
        self, name: str, device: str, *, memory: str = "8Gi", compute: str | None = "25", pods: Sequence[str] = ()
    ) -> values.ClaimRef:
        """A claim with a share of a device, reserved for pods by their UIDs."""
        consumed = {"memory": memory, "shares": "1"} | ({} if compute is None else {"compute": compute})
        requests = {name: amount for name, amount in consumed.items() if name != "shares"}
        exactly = {"deviceClassName": "share", "capacity": {"requests": requests}}
        stored = self.api.seed(
            "resourceclaims",
            {
                "metadata": {"name": name, "namespace": NAMESPACE},
                "spec": {"devices": {"requests": [{"name": "gpu", "exactly": exactly}]}},
                "status": {
                    "allocation": {
                        "devices": {
                            "results": [
                                {
                                    "request": "gpu",
                                    "driver": values.DRIVER_NAME,
                                    "pool": NODE,
                                    "device": device,
                                    "shareID": str(uuid.uuid4()),
                                    "consumedCapacity": consumed,
                                }
                            ]
                        }
                    },
                    "reservedFor": [{"resource": "pods", "name": f"pod-{pod[:8]}", "uid": pod} for pod in pods],
                },
            },
        )
        return values.ClaimRef(uid=values.ClaimUid(stored["metadata"]["uid"]), namespace=NAMESPACE, name=name)

    def slices(self) -> list[dict[str, Any]]:
        """The agent's slices, whole pools only."""
        found: list[dict[str, Any]] = [
            json.loads(json.dumps(body))
            for body in self.api.objects("resourceslices")
            if body["spec"]["driver"] == values.DRIVER_NAME
        ]
        newest = max((body["spec"]["pool"]["generation"] for body in found), default=0)
        pool = [body for body in found if body["spec"]["pool"]["generation"] == newest]
        return pool if pool and len(pool) == pool[0]["spec"]["pool"]["resourceSliceCount"] else []

    def devices(self) -> list[dict[str, Any]]:
        return [device for body in self.slices() for device in body["spec"].get("devices", [])]

    def wait_for_devices(self, count: int) -> list[dict[str, Any]]:
        return until(lambda: found if len(found := self.devices()) == count else None, f"{count} devices")

    def claim(self, name: str, *devices: str, driver: str = values.DRIVER_NAME, pool: str = NODE) -> values.ClaimRef:
        """A claim with an allocation, as the scheduler leaves it."""
        stored = self.api.seed(
            "resourceclaims",
            {
                "metadata": {"name": name, "namespace": NAMESPACE},
                "spec": {"devices": {"requests": [{"name": "gpu", "exactly": {"deviceClassName": "gpu"}}]}},
                "status": {
                    "allocation": {
                        "devices": {
                            "results": [
                                {"request": "gpu", "driver": driver, "pool": pool, "device": device}
                                for device in devices
                            ]
                        }
                    }
                },
            },
        )
        return values.ClaimRef(uid=values.ClaimUid(stored["metadata"]["uid"]), namespace=NAMESPACE, name=name)

    def cdi_files(self) -> list[str]:
        return sorted(path.name for path in self.cdi_dir.glob("*") if "_" in path.name)


@contextlib.contextmanager
def node() -> Iterator[Node]:
    """A node with an API server. Its folder has a short name, as unix sockets lie in it, and is in memory where it can be: a
    mock machine is thousands of files.
    """
    memory = "/dev/shm"
    directory = Path(tempfile.mkdtemp(prefix="nf-", dir=memory if os.access(memory, os.W_OK) else None))
    try:
        with apiserver.ApiServer() as api, contextlib.ExitStack() as stack:
            api.seed("nodes", {"metadata": {"name": NODE}})
            yield Node(directory, api, stack)
    finally:
        for log in sorted(directory.glob("agent-*.log")):
            # Shown where a test fails.
            print(f"{log.name}: {log.read_text(encoding='utf-8', errors='replace')[-_SHOWN:]}")
        shutil.rmtree(directory, ignore_errors=True)
