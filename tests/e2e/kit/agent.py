# SPDX-License-Identifier: Apache-2.0
"""The agent as an administrator has it: a DaemonSet made of the project's own manifests, its pods, its pages, its processes."""

from __future__ import annotations

import os
import signal
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path

import yaml

from driver import values
from driver.kubelet import sockets
from hack.realnode import cluster as clusters
from tests.e2e.kit import make, samples, waiting
from tests.e2e.kit.api import Api, Json, describe
from tests.e2e.kit.node import Disk

NAMESPACE = "nearfield-system"
NAME = "nearfield"
CONTAINER = "agent"
LABELS = "app.kubernetes.io/name=nearfield"
PORT = 9417
MACHINE = "dgx-h100"
READY_S = 240.0
OVERLAY = Path(__file__).parents[3] / "deploy/daemonset/overlays/mock"


class Agent:
    """The DaemonSet on a cluster."""

    def __init__(self, cluster: clusters.Cluster, api: Api, disk: Disk, *, build: str) -> None:
        """`build` tells one image from another of the same name: with a new one the DaemonSet is rolled."""
        self._cluster = cluster
        self._api = api
        self._disk = disk
        self._build = build
        self._applied: list[Json] = []
        self._usual: list[Json] = []

    def manifests(
        self,
        *,
        machine: str = MACHINE,
        env: Mapping[str, str] | None = None,
        edit: Callable[[Json], None] | None = None,
    ) -> list[Json]:
        """The objects of the mock overlay, with a machine and more variables of the agent. `edit` changes the pod template."""
        objects = [
            item for item in yaml.safe_load_all(self._cluster.kubectl("kustomize", str(OVERLAY))) if item is not None
        ]
        (daemonset,) = (item for item in objects if item["kind"] == "DaemonSet")
        template = daemonset["spec"]["template"]
        template["metadata"].setdefault("annotations", {})["e2e.nearfield.dev/build"] = self._build
        container = agent_container(template)
        container["image"] = make.AGENT_IMAGE
        variables = {"NEARFIELD_MOCK": machine, **(env or {})}
        container["env"] = [item for item in container.get("env", []) if item["name"] not in variables]
        container["env"] += [{"name": name, "value": value} for name, value in variables.items()]
        if edit is not None:
            edit(template)
        return objects

    def apply(
        self,
        *,
        machine: str = MACHINE,
        env: Mapping[str, str] | None = None,
        edit: Callable[[Json], None] | None = None,
        wait: bool = True,
    ) -> None:
        """Bring the manifests onto the cluster, and wait until they stand there and everything is ready. What an earlier call
        set and this one does not is gone afterwards.
        """
        self.apply_objects(self.manifests(machine=machine, env=env, edit=edit))
        if wait:
            self.wait_ready()

    def remember(self) -> None:
        """What stands there now is what `restore` brings back."""
        self._usual = self._applied

    def restore(self) -> None:
        """Bring back what was there when `remember` was called, in the place of what a failed test left."""
        if self._usual:
            self.apply_objects(self._usual)
        else:
            self.apply_objects(self.manifests())
        self.wait_ready()

    def apply_objects(self, objects: list[Json]) -> None:
        """As `kubectl apply --server-side` does."""
        self._applied = objects
        self._cluster.kubectl(
            *("apply", "--server-side", "--force-conflicts", "-f", "-"), stdin=yaml.safe_dump_all(objects)
        )

    def wait_ready(self, *, timeout_s: float = READY_S) -> None:
        """Return once the newest version of the DaemonSet is ready and nothing older is left of it. The pod is asked as well: its
        DaemonSet may not know yet that it has just been killed.
        """
        self._api.wait(
            "DaemonSet", NAME, NAMESPACE, until=_rolled_out, what="rolled out and ready", timeout_s=timeout_s
        )
        waiting.until(
            lambda: len(pods := self.pods()) == 1 and is_ready(pods[0]),
            "one pod of the agent, and ready",
            timeout_s=timeout_s,
            told=lambda: [(pod["metadata"]["name"], describe(pod)) for pod in self.pods()],
        )

    def roll(self) -> None:
        """Begin a rolling update, as `kubectl rollout restart` does."""
        self._cluster.kubectl("rollout", "restart", f"daemonset/{NAME}", "-n", NAMESPACE)

    def remove(self) -> None:
        """Delete the DaemonSet, and wait until its pods are gone. Everything else stays."""
        self._api.delete("DaemonSet", NAME, NAMESPACE)
        waiting.until(lambda: not self.pods(), "the agent's pods gone", timeout_s=READY_S)

    def pods(self) -> list[Json]:
        """All of its pods, leaving ones included."""
        return self._api.items("Pod", NAMESPACE, labels=LABELS)

    def pod(self) -> Json:
        """Its one pod that is not being deleted."""
        staying = [pod for pod in self.pods() if "deletionTimestamp" not in pod["metadata"]]
        assert len(staying) == 1, [pod["metadata"]["name"] for pod in staying]
        return staying[0]

    def restarts(self) -> int:
        """How often kubelet started its container again."""
        return sum(status["restartCount"] for status in self.pod()["status"].get("containerStatuses", []))

    def pids(self, pod: Json | None = None) -> tuple[int, ...]:
        """The processes of its container, the first process in front."""
        (status,) = (item for item in (pod or self.pod())["status"]["containerStatuses"] if item["name"] == CONTAINER)
        container_id = status["containerID"].rpartition("/")[2]
        found = [int(path.parent.name) for path in Path("/proc").glob("[0-9]*/cgroup") if container_id in _read(path)]
        return tuple(sorted(found, key=lambda pid: (not _is_first(pid), pid)))

    def kill(self, pod: Json | None = None) -> int:
        """SIGKILL to its first process, which ends the container. Gives the process id."""
        pid = self.pids(pod)[0]
        assert _is_first(pid), pid
        os.kill(pid, signal.SIGKILL)
        return pid

    def kill_and_wait(self) -> None:
        """Kill it, and return once kubelet has started its container again and it is ready."""
        before = self.restarts()
        self.kill()
        self.wait_restarted(before)

    def wait_restarted(self, before: int) -> None:
        """Return once kubelet has started its container once more than `before`, and it is ready."""
        waiting.until(
            lambda: self.restarts() == before + 1, "kubelet has started the container again", timeout_s=READY_S
        )
        self.wait_ready()

    def logs(self, *, previous: bool = False) -> str:
        """What its pod wrote."""
        more = ("--previous",) if previous else ()
        return self._cluster.kubectl("logs", "-n", NAMESPACE, self.pod()["metadata"]["name"], "-c", CONTAINER, *more)

    def get(self, path: str, pod: Json | None = None) -> tuple[int, str]:
        """One of its pages: status and text."""
        address = (pod or self.pod())["status"]["podIP"]
        try:
            with urllib.request.urlopen(f"http://{address}:{PORT}{path}", timeout=10) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def readyz(self) -> tuple[int, str]:
        """Whether it is ready, and why not."""
        return self.get("/readyz")

    def metrics(self, pod: Json | None = None) -> samples.Samples:
        """Its metrics."""
        status, text = self.get("/metrics", pod)
        assert status == 200, text
        return samples.parse(text)

    def slices(self) -> list[Json]:
        """Its ResourceSlices, by name."""
        node = f"spec.nodeName={self._cluster.node_name}"
        found = [
            item
            for item in self._api.items("ResourceSlice", fields=node)
            if item["spec"]["driver"] == self._disk.driver
        ]
        return sorted(found, key=lambda item: str(item["metadata"]["name"]))

    def devices(self) -> list[Json]:
        """The devices of its slices, in the order in which the scheduler walks them."""
        return [device for item in self.slices() for device in item["spec"].get("devices", [])]

    def socket_paths(self, pod: Json | None = None) -> frozenset[Path]:
        """The sockets that its instance has to have."""
        paths = sockets.socket_paths(
            driver_name=values.DRIVER_NAME,
            registry_dir=Path("/var/lib/kubelet/plugins_registry"),
            plugin_dir=Path("/var/lib/kubelet/plugins") / values.DRIVER_NAME,
            pod_uid=(pod or self.pod())["metadata"]["uid"],
        )
        return frozenset(
            {self._disk.registry_dir / paths.registration.name, self._disk.plugin_dir / paths.service.name}
        )


def agent_container(template: Json) -> Json:
    """The agent's container in a pod template, to be changed."""
    container: Json
    (container,) = (item for item in template["spec"]["containers"] if item["name"] == CONTAINER)
    return container


def is_ready(pod: Json) -> bool:
    """Whether kubelet says so of a pod."""
    conditions = pod["status"].get("conditions", [])
    return any((condition["type"], condition["status"]) == ("Ready", "True") for condition in conditions)


def _rolled_out(daemonset: Json) -> bool:
    status = daemonset.get("status", {})
    wanted = status.get("desiredNumberScheduled", 0)
    return bool(
        status.get("observedGeneration") == daemonset["metadata"]["generation"]
        and wanted > 0
        and status.get("updatedNumberScheduled", 0) == status.get("numberReady", 0) == wanted
    )


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _is_first(pid: int) -> bool:
    """Whether it is process 1 of its container."""
    for line in _read(Path(f"/proc/{pid}/status")).splitlines():
        if line.startswith("NSpid:"):
            return line.split()[-1] == "1"
    return False
