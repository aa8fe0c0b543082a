# SPDX-License-Identifier: Apache-2.0
"""The agent as a process keeps shares of GPUs apart: limits of cgroups, compute mode and MPS, turns; over what ends and is lost.

Aspects: the pod's cgroup, in both spellings; pods that join; agent and supervisor killed; what was set before is back at the end.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from discovery import limits, options, workers
from discovery.mock import programs
from driver import values
from driver.errors import MpsError
from driver.mps import client
from driver.standin import kubelet, kubelet_pods
from tests.fakes import agents, driver_roots

pytestmark = pytest.mark.timeout(300)

GIB = 1 << 30
HEAD = "apiVersion: config.nearfield.dev/v1alpha1\nkind: AgentConfig\n"
MACHINE = "l40s-8-shares"


@pytest.fixture
def node() -> Iterator[agents.Node]:
    with agents.node() as made:
        yield made


def start(node: agents.Node, shares: str, *more: str) -> agents.Agent:
    path = node.directory / "agent.yaml"
    path.write_text(f"{HEAD}sharing:\n- mode: shares\n  shares: {{{shares}}}\n", encoding="utf-8")
    return again(node, *more)


def again(node: agents.Node, *more: str) -> agents.Agent:
    return node.start("--config", str(node.directory / "agent.yaml"), *more, mock=MACHINE)


def shared(node: agents.Node) -> str:
    """The first device, once all are given out in shares."""
    found = agents.until(
        lambda: [device for device in node.devices() if device.get("allowMultipleAllocations")], "shared devices"
    )
    return str(found[0]["name"])


def reasons(node: agents.Node, kind: str) -> set[str]:
    return {event["reason"] for event in node.api.objects("events") if event["involvedObject"]["kind"] == kind}


def prepare(standin: kubelet.StandInKubelet, claim: values.ClaimRef, *, pod: str | None = None) -> None:
    answer = standin.prepare(values.DRIVER_NAME, [claim], pod=pod)[claim.uid]
    assert isinstance(answer, values.Prepared), answer


def unprepare(standin: kubelet.StandInKubelet, claim: values.ClaimRef, *, pod: str | None = None) -> None:
    answer = standin.unprepare(values.DRIVER_NAME, [claim], pod=pod)[claim.uid]
    assert isinstance(answer, values.Unprepared), answer


def driver_root(node: agents.Node) -> Path:
    """A driver root whose programs act on the mock machine of a node."""
    root = node.directory / "r"
    driver_roots.install(root, "/usr/lib/x86_64-linux-gnu", version="615.10.01")
    programs.write(root, node.mock_dir)
    return root


class Hardware:
    """The GPU of a device of a mock machine, from outside."""

    def __init__(self, node: agents.Node, device: str) -> None:
        mock = node.mock_dir
        found = values.address_of(device)
        assert found is not None
        self.gpu = found
        source = options.Source.rendered(mock)
        self.work = workers.InProcessWork(source=source, locks=node.state_dir / "locks")

    def limit(self, pod: Path) -> tuple[int, int | None] | None:
        use = self.work.memory_use(self.gpu, [str(pod)], timeout_s=30).get(str(pod))
        return None if use is None else (use.limit.soft, use.limit.hard)

    def forget(self, pod: Path) -> None:
        self.work.limit_memory(self.gpu, {str(pod): limits.NO_LIMIT}, timeout_s=30)

    def mode(self) -> limits.ComputeMode:
        """As it is; set to what it was at once."""
        before = self.work.set_compute_mode(self.gpu, limits.ComputeMode.EXCLUSIVE_PROCESS, timeout_s=30)
        self.work.set_compute_mode(self.gpu, before, timeout_s=30)
        return before


def test_the_cgroup_of_a_pod_is_limited_for_as_long_as_its_claim_is_prepared(node: agents.Node) -> None:
    agent = start(node, "memory: cgroup, compute: none")
    device = shared(node)
    pods = kubelet_pods.PodCgroups(node.cgroup_root, driver="systemd")
    standin = node.kubelet(pods)
    standin.wait_registered(values.DRIVER_NAME)
    hardware = Hardware(node, device)
    first, second = str(uuid.uuid4()), str(uuid.uuid4())
    one = node.share("one", device, memory="8Gi", pods=[first])
    two = node.share("two", device, memory="4Gi", pods=[first])
    three = node.share("three", device, memory="2Gi", pods=[second])
    for claim, pod in ((one, first), (two, first), (three, second)):
        prepare(standin, claim, pod=pod)
    of_first, of_second = pods.make(first), pods.make(second)
    assert hardware.limit(of_first) == (12 * GIB, 12 * GIB)
    assert hardware.limit(of_second) == (2 * GIB, 2 * GIB)
    agents.until(lambda: "ShareAdvisory" in reasons(node, "ResourceClaim"), "an Event that compute is advice")

    agent.kill()
    hardware.forget(of_first)
    hardware.forget(of_second)
    agent = again(node)
    agents.until(lambda: hardware.limit(of_first) == (12 * GIB, 12 * GIB), "limits after a restart")
    agents.until(lambda: hardware.limit(of_second) == (2 * GIB, 2 * GIB), "limits after a restart")
    agents.until(lambda: "was none, and is set to" in agent.said(), "a line about it")

    # Kubelet has the socket of the killed agent until it finds the new one in its place.
    agents.until(agent.ready, "kubelet with the new agent")
    unprepare(standin, one)
    assert hardware.limit(of_first) == (4 * GIB, 4 * GIB)
    unprepare(standin, two)
    assert hardware.limit(of_first) == (0, None)
    unprepare(standin, three, pod=second)
    assert hardware.limit(of_second) is None


def test_where_the_cgroups_of_pods_are_not_seen_nothing_is_promised_of_them(node: agents.Node) -> None:
    hidden = node.directory / "cgroup"
    hidden.mkdir()
    agent = start(node, "memory: cgroup, compute: none", "--cgroup-root", str(hidden))
    node.wait_for_devices(8)
    assert not any(device.get("allowMultipleAllocations") for device in node.devices())
    agents.until(lambda: "there is no kubepods" in agent.said(), "a line that says why")
    (hidden / "kubepods").mkdir()
    shared(node)


def test_a_pod_that_joins_gets_the_same_limit_and_people_are_told(node: agents.Node) -> None:
    agent = start(node, "memory: cgroup, compute: none")
    device = shared(node)
    pods = kubelet_pods.PodCgroups(node.cgroup_root)
    standin = node.kubelet(pods)
    standin.wait_registered(values.DRIVER_NAME)
    hardware = Hardware(node, device)
    first, second, third = (str(uuid.uuid4()) for _ in range(3))
    claim = node.share("one", device, memory="8Gi", pods=[first])
    prepare(standin, claim, pod=first)

    there = pods.make(second)
    consumers = [{"resource": "pods", "name": f"pod-{uid[:8]}", "uid": uid} for uid in (first, second, third)]
    node.api.edit(
        "resourceclaims", f"{agents.NAMESPACE}/one", lambda body: body["status"].update(reservedFor=consumers)
    )
    agents.until(lambda: hardware.limit(there) == (8 * GIB, 8 * GIB), "a limit of the pod that joined")
    late = pods.make(third)
    agents.until(lambda: hardware.limit(late) == (8 * GIB, 8 * GIB), "a limit of the pod that came late")
    agents.until(lambda: "ShareJoined" in reasons(node, "Pod"), "an Event on the pod")
    agents.until(lambda: "ShareJoined" in reasons(node, "ResourceClaim"), "an Event on the claim")
    agents.until(lambda: "3 pods use" in agent.get("/readyz")[1], "a note")

    unprepare(standin, claim, pod=first)
    assert hardware.limit(there) == hardware.limit(late) == (0, None)


def test_turns_are_set_by_the_first_and_restored_by_the_last(node: agents.Node) -> None:
    root = driver_root(node)
    start(node, "memory: none, compute: timeslice, timeSlice: long", "--driver-root", str(root))
    device = shared(node)
    assert "compute" not in node.devices()[0]["capacity"]
    standin = node.kubelet(kubelet_pods.PodCgroups(node.cgroup_root))
    standin.wait_registered(values.DRIVER_NAME)
    uids = [str(uuid.uuid4()) for _ in range(2)]
    claims = [node.share(f"c-{number}", device, compute=None, pods=[pod]) for number, pod in enumerate(uids)]
    smi = [str(root / "usr/bin/nvidia-smi"), "compute-policy", "--list"]

    def turn() -> str:
        said = subprocess.run(smi, capture_output=True, text=True, check=True).stdout
        return "long" if "long" in said.lower() else "default"

    assert turn() == "default"
    for claim, pod in zip(claims, uids, strict=True):
        prepare(standin, claim, pod=pod)
        assert turn() == "long"
    for claim, pod in zip(claims, uids, strict=True):
        assert turn() == "long"
        unprepare(standin, claim, pod=pod)
    assert turn() == "default"


class Supervisor:
    """`nearfield mps` as a process."""

    def __init__(self, directory: Path, root: Path) -> None:
        self._arguments = ["--mps-dir", str(directory), "--driver-root", str(root)]
        self.directory = directory
        self.process = self._started()

    def _started(self) -> subprocess.Popen[bytes]:
        with (self.directory.parent / "mps.log").open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "driver.cli", "mps", "run", *self._arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def restart(self) -> None:
        self.process.kill()
        self.process.wait(agents.WAIT_S)
        self.process = self._started()

    def shares(self) -> set[str]:
        try:
            daemons = client.Client(self.directory).status(timeout_s=30).daemons.values()
        except MpsError:
            return set()
        return {share for daemon in daemons for share in daemon.shares}

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            self.process.wait(agents.WAIT_S)


@pytest.mark.parametrize("agent_too", [False, True])
def test_mps_has_its_shares_over_restarts_and_the_compute_mode_is_restored(
    node: agents.Node, *, agent_too: bool
) -> None:
    root, directory = driver_root(node), node.directory / "m"
    arguments = ("--driver-root", str(root), "--mps-dir", str(directory))
    agent = start(node, "memory: mps, compute: mps", *arguments)
    node.wait_for_devices(8)
    supervisor = Supervisor(directory, root)
    try:
        device = shared(node)
        standin = node.kubelet(kubelet_pods.PodCgroups(node.cgroup_root))
        standin.wait_registered(values.DRIVER_NAME)
        hardware = Hardware(node, device)
        before = hardware.mode()
        assert before is not limits.ComputeMode.EXCLUSIVE_PROCESS
        uids = [str(uuid.uuid4()) for _ in range(2)]
        claims = [node.share(f"c-{number}", device, pods=[pod]) for number, pod in enumerate(uids)]
        for claim, pod in zip(claims, uids, strict=True):
            prepare(standin, claim, pod=pod)
        assert hardware.mode() is limits.ComputeMode.EXCLUSIVE_PROCESS
        placed = supervisor.shares()
        assert len(placed) == 2

        if agent_too:
            agent.kill()
        supervisor.restart()
        if agent_too:
            agent = again(node, *arguments)
        agents.until(lambda: supervisor.shares() == placed, "shares after a restart")
        if not agent_too:
            agents.until(lambda: "MpsRestarted" in reasons(node, "ResourceClaim"), "an Event on the claims")

        agents.until(agent.ready, "kubelet with the agent")
        for claim, pod in zip(claims, uids, strict=True):
            unprepare(standin, claim, pod=pod)
        assert supervisor.shares() == set()
        assert hardware.mode() is before
    finally:
        supervisor.stop()
