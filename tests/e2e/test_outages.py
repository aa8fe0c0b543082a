# SPDX-License-Identifier: Apache-2.0
"""What pods need goes away and comes back.

- the API server is away for a moment, while a Prepare needs it: it waits, and the pod runs without a failure
- the API server is away for a minute while pods start: what runs goes on, what ends is unprepared, and afterwards all start.
  In the same minute: kubelet had lost its state (dra_manager_state) with a pod on the node, so it never unprepares that pod's
  claim, and the agent frees it by itself after having looked twice
- connections to the API server are cut: what was changed behind the agent's back is repaired at once
- the node is rebooted: its processes and everything in /run are gone, the kernel has another boot id, its disk is as it was.
  The same claims are prepared again, and their pods run again
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from hack.realnode import cgroups, processes
from tests.e2e.kit import agent as agents
from tests.e2e.kit import load, machines, make, signs, waiting
from tests.e2e.kit.api import Json
from tests.e2e.kit.sites import Site
from tests.e2e.kit.space import Space

AWAY_S = 60.0
STATE = "/var/lib/kubelet/dra_manager_state"
BOOT_ID = "/var/lib/nearfield-e2e/boot_id"
"""On the node: a file that the agent's container has in the place of the kernel's boot id."""

SOURCE = "/proc/sys/kernel/random/boot_id"
FIRST, SECOND = "11111111-0000-4000-8000-000000000000", "22222222-0000-4000-8000-000000000000"

RUN = f"""
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
if libc.mount(b"/boot/boot_id", b"{SOURCE}", None, 4096, None):
    raise OSError(ctypes.get_errno(), "mount")
os.execvp("nearfield", ["nearfield", "run"])
"""
"""No runtime mounts anything there, so the container does it itself."""


@pytest.fixture(scope="module", autouse=True)
def _prepared_agent(site: Site, changed_machines: dict[str, str]) -> Iterator[None]:
    """The agent, with a boot id that can be changed, and looking for forgotten claims all the time."""

    def edit(template: Json) -> None:
        spec = template["spec"]
        (container,) = (item for item in spec["containers"] if item["name"] == agents.CONTAINER)
        container["command"] = ["python3", "-c", RUN]
        container.pop("args", None)
        container["securityContext"] = {**container["securityContext"], "privileged": True}
        container["securityContext"].pop("capabilities", None)
        container["securityContext"].pop("allowPrivilegeEscalation", None)
        container["volumeMounts"].append({"name": "boot", "mountPath": "/boot"})
        spec["volumes"].append({"name": "boot", "hostPath": {"path": str(Path(BOOT_ID).parent)}})

    machines.bring(site, None, changed=changed_machines)
    path = site.cluster.layout.host_path(BOOT_ID)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(FIRST + "\n")
    site.agent.apply(env={"NEARFIELD_COLLECT_INTERVAL": "2s"}, edit=edit)
    yield
    site.agent.apply()


def test_away_for_a_moment(site: Site, space: Space) -> None:
    uid = space.create(make.claim("one"))["metadata"]["uid"]
    agent = site.agent.pod()
    pid = site.agent.pids(agent)[0]
    failed = site.kubelet.calls("NodePrepareResources") - site.kubelet.calls("NodePrepareResources", code="OK")
    os.kill(pid, signal.SIGSTOP)
    try:
        space.create(make.pod("p", claims={"gpu": "one"}))
        # Kubelet writes this before it calls, when it has read the claim itself.
        space.until(
            lambda: uid in site.cluster.layout.host_path(STATE).read_text(), "kubelet is calling the agent", pods=["p"]
        )
        site.cluster.kill("kube-apiserver")
    finally:
        os.kill(pid, signal.SIGCONT)
    waiting.until(lambda: "Waiting: " in _log(site, agent), "the agent waits for the API server")
    site.cluster.start("kube-apiserver")
    site.cluster.wait_api()

    space.running("p")
    assert load.failures(space, "p") == []
    assert site.kubelet.calls("NodePrepareResources") - site.kubelet.calls("NodePrepareResources", code="OK") == failed


def test_away_for_a_minute(site: Site, space: Space) -> None:
    layout = site.cluster.layout
    for name in ("stays", "ends"):
        signs.take_back(layout, name)
    space.create(
        make.template("one"),
        make.pod("forgotten", claims={"gpu": "template:one"}),
        make.claim("kept"),
        make.claim("let-go"),
    )
    space.running("forgotten")
    forgotten = _claim(space, "forgotten")
    site.cluster.stop("kubelet")
    layout.host_path(STATE).unlink()
    site.cluster.start("kubelet")
    site.cluster.wait_node()
    space.create(signs.pod("stays", claims={"gpu": "kept"}), signs.pod("ends", claims={"gpu": "let-go"}))
    before = space.running("stays")
    space.running("ends")
    space.delete("Pod", "forgotten")
    waiting.until(lambda: len(site.agent.devices()) == len(site.disk.gpus()), "the slices are back")
    versions = _versions(site)
    agent = site.agent.pod()
    restarts = site.agent.restarts()
    names = [f"starts-{number}" for number in range(3)]
    time.sleep(4)  # the agent has looked once

    space.create(*(make.pod(name, claims={"gpu": "template:one"}) for name in names))
    for name in names:
        space.api.wait("Pod", name, space.name, until=lambda pod: pod["spec"].get("nodeName"), what="bound")
    site.cluster.kill("kube-apiserver")
    began = time.monotonic()
    assert site.agent.get("/healthz", agent)[0] == 200
    signs.give(layout, "ends")
    waiting.until(lambda: "let-go" not in _names(site), "what ended is unprepared, without the API server")
    assert "kept" in _names(site)
    assert forgotten in _uids(site)
    time.sleep(max(0.0, AWAY_S - (time.monotonic() - began)))
    site.cluster.start("kube-apiserver")
    site.cluster.wait_api()

    for name in names:
        waiting.until(partial(_tried_again, space, name), f"pod {name} runs")
    waiting.until(lambda: forgotten not in _uids(site), "the forgotten claim is unprepared", timeout_s=240)
    assert space.get("Pod", "stays")["status"]["containerStatuses"] == before["status"]["containerStatuses"]
    assert _versions(site) == versions  # the slices were not written again
    assert site.agent.restarts() == restarts
    assert site.agent.metrics().one("nearfield_claims_collected_total") == 1


def test_connections_are_cut(site: Site, space: Space) -> None:
    (slice_,) = site.agent.slices()
    agent = site.agent.pod()["status"]["podIP"]
    cut = ("ss", "-K", "-H", "-t", "-n", "state", "established", "src", "10.96.0.1", "dst", agent)
    waiting.until(lambda: agent in site.cluster.run(*cut), "it had a connection")
    space.api.delete("ResourceSlice", slice_["metadata"]["name"])
    waiting.until(site.agent.slices, "the slices are back")
    space.create(make.template("one"), make.pod("p", claims={"gpu": "template:one"}))
    space.running("p")
    assert load.failures(space, "p") == []


def test_reboot(site: Site, space: Space, record_property: Callable[[str, object], None]) -> None:
    space.create(
        make.template("one"),
        make.template("two", make.request(count=2)),
        make.pod("a", claims={"gpu": "template:one"}, restart="Always"),
        make.pod("b", claims={"gpu": "template:two"}, restart="Always"),
    )
    space.running("a")
    space.running("b")
    claims = {pod: space.claim_of(pod, "gpu") for pod in ("a", "b")}
    assert {entry.boot_id for entry in site.disk.record()} == {FIRST}
    files = {path.name for path in site.disk.cdi_dir.iterdir()}
    devices = site.agent.devices()

    _reboot(site)
    began = time.monotonic()
    name = site.agent.pod()["metadata"]["name"]
    space.api.wait("Pod", name, agents.NAMESPACE, until=_runs_again, what="running again")
    site.agent.wait_ready()
    waiting.until(lambda: site.agent.readyz()[0] == 200, "the agent is ready")
    record_property("agent ready after kubelet started", f"{time.monotonic() - began:.1f} s")
    for pod in ("a", "b"):
        # Kubelet had tried before the agent was there; it would come back to it after more than a minute.
        space.retry(pod)
    for pod, claim in claims.items():
        seen = space.api.wait("Pod", pod, space.name, until=_runs_again, what="running again")
        record_property(f"pod {pod} runs again after kubelet started", f"{time.monotonic() - began:.1f} s")
        assert seen["spec"]["nodeName"] == site.node_name
        now = space.claim_of(pod, "gpu")
        assert now["metadata"]["uid"] == claim["metadata"]["uid"]
        assert now["status"]["allocation"] == claim["status"]["allocation"]
        assert space.look(pod).gpu_nodes == tuple(sorted(site.disk.gpu(name).node for name in space.devices(pod)))
    assert {(entry.claim.uid, entry.boot_id) for entry in site.disk.record()} == {
        (claim["metadata"]["uid"], SECOND) for claim in claims.values()
    }
    assert {path.name for path in site.disk.cdi_dir.iterdir()} == files
    assert site.kubelet.calls("NodePrepareResources", code="OK") == len(claims)
    assert site.kubelet.claims_in_use(make.CLASS) == len(claims)
    waiting.until(lambda: site.agent.devices() == devices, "the same devices are published")


def _tried_again(space: Space, pod: str) -> Json:
    """The pod, running. Kubelet comes back to a failed Prepare after more than a minute, and could not tell of it meanwhile."""
    space.retry(pod)
    return space.running(pod, timeout_s=5)


def _claim(space: Space, pod: str) -> str:
    return str(space.claim_of(pod, "gpu")["metadata"]["uid"])


def _uids(site: Site) -> set[str]:
    return {entry.claim.uid for entry in site.disk.record()}


def _names(site: Site) -> set[str]:
    return {entry.claim.name for entry in site.disk.record()}


def _versions(site: Site) -> set[tuple[str, str]]:
    return {(item["metadata"]["uid"], item["metadata"]["resourceVersion"]) for item in site.agent.slices()}


def _log(site: Site, pod: Json) -> str:
    """What a container of the agent wrote, as it lies on the node."""
    metadata = pod["metadata"]
    folder = site.cluster.layout.host_path("/var/log/pods") / "_".join(
        (metadata["namespace"], metadata["name"], metadata["uid"])
    )
    return "".join(path.read_text() for path in sorted(folder.glob("*/*.log")))


def _reboot(site: Site) -> None:
    cluster = site.cluster
    for component in ("kubelet", "containerd"):
        cluster.kill(component)
    for pid in cgroups.members(cluster.layout.cgroup) | _shims(site):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    waiting.until(lambda: not cgroups.members(cluster.layout.cgroup), "no container's process is left")
    cgroups.remove(cluster.layout.cgroup)
    cgroups.create(cluster.layout.cgroup)
    # /run is in memory, and so are the mounts below it.
    cluster.run("sh", "-c", "while read -r _ at _; do case $at in /run/*) umount -l $at;; esac; done < /proc/mounts")
    for path in cluster.layout.host_path("/run").iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    cluster.layout.host_path(BOOT_ID).write_text(SECOND + "\n")
    cluster.start("containerd")
    cluster.start("kubelet")
    cluster.wait_node()


def _shims(site: Site) -> set[int]:
    """What holds the containers; it outlives containerd."""
    found = set()
    for pid in processes.members(site.cluster.layout):
        with contextlib.suppress(OSError):
            if Path(f"/proc/{pid}/comm").read_text().startswith("containerd-shim"):
                found.add(pid)
    return found


def _runs_again(pod: Json) -> bool:
    statuses = pod["status"].get("containerStatuses", [])
    return bool(statuses) and all("running" in item["state"] and item["restartCount"] > 0 for item in statuses)
