# SPDX-License-Identifier: Apache-2.0
"""The whole agent while what keeps shares apart comes and goes: a mock machine, an MPS supervisor, the stand-ins of the API server and
of kubelet.

- a supervisor that comes changes GPUs that are free, and one in use when the last share ends, over a restart too
- a new step waits for the last share as well; a second share of the GPU is prepared under the old policy meanwhile
- without a supervisor nothing is shared that needs one, and the reason is told
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from discovery.mock import podcgroups
from driver import values
from tests.fakes import agents, mps

pytestmark = pytest.mark.timeout(300)

HEAD = "apiVersion: config.nearfield.dev/v1alpha1\nkind: AgentConfig\nsharing:\n"
MACHINE = "dgx-h100-shares"
LOOSE = HEAD + "- match: {count: 2}\n  mode: shares\n  shares: {memory: cgroup, compute: none}\n"
STRICT = LOOSE.replace("compute: none", "compute: mps")
WIDER = LOOSE.replace("compute: none", "compute: none, memoryStep: 4Gi")


@pytest.fixture(name="node")
def fixture_node() -> Iterator[agents.Node]:
    with agents.node() as node:
        yield node


@pytest.fixture(name="beside")
def fixture_beside() -> Iterator[mps.Node]:
    """Where a supervisor will be."""
    with mps.node(start=False) as beside:
        yield beside


def start(node: agents.Node, beside: mps.Node, text: str) -> tuple[agents.Agent, Path]:
    path = node.directory / "agent.yaml"
    path.write_text(text, encoding="utf-8")
    return node.start("--config", str(path), "--mps-dir", str(beside.directory), mock=MACHINE), path


def shared(node: agents.Node) -> dict[str, tuple[str, str, str]]:
    """Of each shared GPU: what keeps memory and compute apart, and the step of memory."""
    return {
        device["name"]: (
            device["attributes"]["memoryEnforcement"]["string"],
            device["attributes"]["computeEnforcement"]["string"],
            device["capacity"]["memory"]["requestPolicy"]["validRange"]["step"],
        )
        for device in node.devices()
        if device.get("allowMultipleAllocations")
    }


def share(node: agents.Node, name: str, device: str, *, memory: str = "20Gi", compute: str = "25") -> values.ClaimRef:
    """A claim for a share, allocated, reserved for a pod whose cgroup is there."""
    pod = f"00000000-0000-0000-0000-{sum(name.encode()):012d}"
    podcgroups.make(node.mock_dir / "sys/fs/cgroup", pod)
    consumed = {"memory": memory, "compute": compute, "shares": "1"}
    result: dict[str, Any] = {
        "request": "gpu",
        "driver": values.DRIVER_NAME,
        "pool": agents.NODE,
        "device": device,
        "shareID": f"11111111-1111-1111-1111-{sum(name.encode()):012d}",
        "consumedCapacity": consumed,
    }
    wanted = {"requests": {"memory": memory, "compute": compute}}
    stored = node.api.seed(
        "resourceclaims",
        {
            "metadata": {"name": name, "namespace": agents.NAMESPACE},
            "spec": {
                "devices": {"requests": [{"name": "gpu", "exactly": {"deviceClassName": "share", "capacity": wanted}}]}
            },
            "status": {
                "allocation": {"devices": {"results": [result]}},
                "reservedFor": [{"resource": "pods", "name": name, "uid": pod}],
            },
        },
    )
    return values.ClaimRef(uid=values.ClaimUid(stored["metadata"]["uid"]), namespace=agents.NAMESPACE, name=name)


def test_what_comes_waits_for_the_last_share(node: agents.Node, beside: mps.Node) -> None:
    agent, path = start(node, beside, LOOSE)
    kubelet = node.kubelet()
    kubelet.wait_registered(values.DRIVER_NAME)
    node.wait_for_devices(8)
    before = agents.until(lambda: found if len(found := shared(node)) == 2 else None, "two shared GPUs")
    used, free = sorted(before)
    assert set(before.values()) == {("cgroup", "none", "1Gi")}
    first = share(node, "first", used)
    assert isinstance(kubelet.prepare(values.DRIVER_NAME, [first])[first.uid], values.Prepared)

    beside.start()
    agents.until(lambda: shared(node).get(free) == ("cgroup", "mps", "1Gi"), "the free GPU by MPS")
    assert shared(node)[used] == ("cgroup", "none", "1Gi")
    agents.until(lambda: agent.told("(sharing-waits)", f"{used} ({first})"), "what it waits for")

    # Another step waits too, and another share of the GPU is as the one that it is beside.
    path.write_text(WIDER, encoding="utf-8")
    agent.process.send_signal(signal.SIGHUP)
    agents.until(lambda: shared(node).get(free) == ("cgroup", "mps", "4Gi"), "the new step")
    second = share(node, "second", used)
    assert isinstance(kubelet.prepare(values.DRIVER_NAME, [second])[second.uid], values.Prepared)
    assert shared(node)[used] == ("cgroup", "none", "1Gi")

    stood = shared(node)
    assert agent.terminate() == 0
    again, _ = start(node, beside, WIDER)
    agents.until(again.ready, "ready")
    agents.until(lambda: "(sharing-waits)" in again.said(), "the Finding after the restart")
    assert shared(node) == stood
    for claim in (first, second):
        assert shared(node) == stood
        assert isinstance(kubelet.unprepare(values.DRIVER_NAME, [claim])[claim.uid], values.Unprepared)
        node.api.remove("resourceclaims", f"{agents.NAMESPACE}/{claim.name}")
    agents.until(lambda: shared(node).get(used) == ("cgroup", "mps", "4Gi"), "the change when nobody has it")
    assert "Traceback" not in agent.said() + again.said()


def test_what_needs_a_supervisor_waits_for_one(node: agents.Node, beside: mps.Node) -> None:
    agent, _ = start(node, beside, STRICT)
    node.wait_for_devices(8)
    assert shared(node) == {}
    why = f"compute by mps: no MPS supervisor answers in {beside.directory}"
    agents.until(lambda: agent.told("(sharing-not-possible)", why), "why nothing is shared")
    beside.start()
    agents.until(lambda: len(shared(node)) == 2, "shares")
    assert set(shared(node).values()) == {("cgroup", "mps", "1Gi")}
    assert "Traceback" not in agent.said()
