# SPDX-License-Identifier: Apache-2.0
"""The whole agent and the terms on which GPUs are given out in shares: a mock machine, the stand-in API server and kubelet.

- a GPU of which a claim has a share, prepared or only allocated, keeps its terms while the configuration changes and over a
  restart without a write, until it is let go; so does one that a claim has alone
- a server that keeps no shares gets the GPU for one claim; when it keeps them, who has it alone keeps it
"""

from __future__ import annotations

import signal
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from driver import values
from tests.fakes import agents

pytestmark = pytest.mark.timeout(300)

HEAD = "apiVersion: config.nearfield.dev/v1alpha1\nkind: AgentConfig\n"
SHARED = (
    HEAD
    + "sharing:\n- match: {{count: 1}}\n  mode: shares\n  shares: {{memory: none, compute: none, maxSharers: {}}}\n"
)
MACHINE = "l40s-4-pcie"


@pytest.fixture(name="node")
def fixture_node() -> Iterator[agents.Node]:
    with agents.node() as node:
        yield node


def start(node: agents.Node, text: str) -> tuple[agents.Agent, Path]:
    path = node.directory / "agent.yaml"
    path.write_text(text, encoding="utf-8")
    return node.start("--config", str(path), mock=MACHINE), path


def change(agent: agents.Agent, path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
    agent.process.send_signal(signal.SIGHUP)


def sharers(node: agents.Node) -> dict[str, str]:
    """How many may share each device that is shared."""
    return {
        device["name"]: device["capacity"]["shares"]["value"]
        for device in node.devices()
        if device.get("allowMultipleAllocations")
    }


def share(node: agents.Node, name: str, device: str) -> values.ClaimRef:
    """A claim with a share of a device, as the scheduler leaves it."""
    claim = node.claim(name, device)

    def give(body: dict[str, Any]) -> None:
        (result,) = body["status"]["allocation"]["devices"]["results"]
        result["shareID"] = str(uuid.uuid4())
        result["consumedCapacity"] = {"memory": "10Gi", "compute": "25", "shares": "1"}

    node.api.edit("resourceclaims", f"{agents.NAMESPACE}/{name}", give)
    return claim


def test_what_claims_have_stays_as_it_was_published(node: agents.Node) -> None:
    agent, path = start(node, SHARED.format(8))
    kubelet = node.kubelet()
    kubelet.wait_registered(values.DRIVER_NAME)
    node.wait_for_devices(4)
    ((name, most),) = sharers(node).items()
    assert most == "8"
    assert node.devices()[-1]["name"] == name, "what is shared comes last"
    claims = [share(node, f"c{number}", name) for number in range(3)]
    answers = kubelet.prepare(values.DRIVER_NAME, claims[:2])
    assert all(isinstance(answers[claim.uid], values.Prepared) for claim in claims[:2]), answers

    writes = node.api.writes("resourceslices")
    change(agent, path, SHARED.format(4))
    agents.until(lambda: "(sharing-waits)" in agent.said(), "the change waits")
    assert agent.terminate() == 0
    again = node.start("--config", str(path), mock=MACHINE)
    kubelet.wait_registered(values.DRIVER_NAME)
    agents.until(lambda: "(sharing-waits)" in again.said(), "it waits after the restart")
    agents.until(again.ready, "ready")
    change(again, path, HEAD)
    agents.until(lambda: "then by exclusive" in again.said(), "so does the next")
    assert (sharers(node), node.api.writes("resourceslices")) == ({name: "8"}, writes)

    kubelet.unprepare(values.DRIVER_NAME, claims[:2])
    for number in range(2):
        node.api.remove("resourceclaims", f"{agents.NAMESPACE}/c{number}")
    assert sharers(node) == {name: "8"}, "one is allocated"
    node.api.remove("resourceclaims", f"{agents.NAMESPACE}/c2")
    agents.until(lambda: sharers(node) == {}, "it is for one claim")
    assert len(node.devices()) == 4


def test_a_gpu_that_a_claim_has_alone_is_not_shared_before_it_is_let_go(node: agents.Node) -> None:
    agent, path = start(node, HEAD)
    kubelet = node.kubelet()
    kubelet.wait_registered(values.DRIVER_NAME)
    node.wait_for_devices(4)
    first = min(device["name"] for device in node.devices())
    claim = node.claim("alone", first)
    assert isinstance(kubelet.prepare(values.DRIVER_NAME, [claim])[claim.uid], values.Prepared)
    change(agent, path, SHARED.format(8))
    agents.until(lambda: "then by shares" in agent.said(), "the change waits")
    assert sharers(node) == {}
    kubelet.unprepare(values.DRIVER_NAME, [claim])
    node.api.remove("resourceclaims", f"{agents.NAMESPACE}/alone")
    agents.until(lambda: sharers(node) == {first: "8"}, "it is shared")


def test_a_server_that_keeps_no_shares_at_first(node: agents.Node) -> None:
    node.api.turn("DRAConsumableCapacity", on=False)
    agent, _ = start(node, SHARED.format(8))
    kubelet = node.kubelet()
    kubelet.wait_registered(values.DRIVER_NAME)
    node.wait_for_devices(4)
    agents.until(agent.ready, "ready")
    assert "keeps no shares" in agent.get("/readyz")[1]
    events = agents.until(
        lambda: [event for event in node.api.objects("events") if event["reason"] == "SharesNotKept"], "an Event"
    )
    assert [event["involvedObject"]["kind"] for event in events] == ["Node"]
    first = min(device["name"] for device in node.devices())
    claim = node.claim("alone", first)
    assert isinstance(kubelet.prepare(values.DRIVER_NAME, [claim])[claim.uid], values.Prepared)

    node.api.stop()
    node.api.turn("DRAConsumableCapacity", on=True)
    node.api.start()
    agents.until(lambda: "(sharing-waits)" in agent.said(), "who has it alone keeps it")
    assert sharers(node) == {}
    kubelet.unprepare(values.DRIVER_NAME, [claim])
    node.api.remove("resourceclaims", f"{agents.NAMESPACE}/alone")
    agents.until(lambda: sharers(node) == {first: "8"}, "it is shared")
    agents.until(lambda: agent.get("/readyz")[1].strip() == "ok", "nothing is missing any more")
