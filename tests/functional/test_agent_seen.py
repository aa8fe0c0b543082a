# SPDX-License-Identifier: Apache-2.0
"""What people and programs see of an agent that runs, and an agent on a machine without any GPU.

Aspects: the inspect page and the Snapshot; `nearfield claims` beside it; JSON lines with the claim; an empty pool.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator

import pytest

from driver import values
from tests.fakes import agents

pytestmark = pytest.mark.timeout(300)

DRIVER = values.DRIVER_NAME


@pytest.fixture(name="node")
def fixture_node() -> Iterator[agents.Node]:
    with agents.node() as node:
        yield node


def test_people_see_the_machine_its_claims_and_why_one_failed(node: agents.Node) -> None:
    agent = node.start("--inspect", "127.0.0.1:0", "--log-format", "json")
    kubelet = node.kubelet()
    kubelet.wait_registered(DRIVER)
    device = node.wait_for_devices(8)[0]["name"]
    good, bad = node.claim("c-good", device), node.claim("c-bad", "gpu-ffff-00-00-0")
    kubelet.prepare(DRIVER, [good, bad])

    status, page = agent.get("/topology", server="inspect")
    assert status == 200
    assert "<svg" in page
    assert "c-good" in page
    assert "c-bad" not in page
    snapshot = json.loads(agent.get("/snapshot", server="inspect")[1])
    assert (snapshot["kind"], len(snapshot["gpus"])) == ("Snapshot", 8)
    assert agent.get("/topology")[0] == 404

    command = [sys.executable, "-m", "driver.cli", "claims", "--state-dir", str(node.state_dir), "-o", "json"]
    shown = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    assert [(item["name"], item["state"], item["devices"][0]["device"]) for item in shown["items"]] == [
        ("c-good", "completed", device)
    ]
    assert isinstance(kubelet.unprepare(DRIVER, [good])[good.uid], values.Unprepared)

    whole, _, _ = agent.said().rpartition("\n")
    lines = [json.loads(line) for line in whole.splitlines()]
    failed = [line for line in lines if "Failed to prepare" in line["message"]]
    assert [(line["level"], line["claim"], line["method"]) for line in failed] == [
        ("warning", str(bad), "NodePrepareResources")
    ]


def test_a_node_without_any_gpu_offers_one_empty_slice_and_is_ready(node: agents.Node) -> None:
    (node.directory / "sys/bus/pci/devices").mkdir(parents=True)
    agent = node.start("--sysfs", str(node.directory / "sys"), mock=None)
    kubelet = node.kubelet()
    kubelet.wait_registered(DRIVER)
    (body,) = agents.until(node.slices, "a slice")
    assert body["spec"]["pool"] == {"name": agents.NODE, "generation": 1, "resourceSliceCount": 1}
    assert node.devices() == []
    agents.until(agent.ready, "ready")
    claim = node.claim("c1", "gpu-0000-1b-00-0")
    answer = kubelet.prepare(DRIVER, [claim])[claim.uid]
    assert isinstance(answer, values.Failed)
    assert "no GPU of this name is on this node" in answer.message
    assert "nearfield_gpu_memory_used_bytes{" not in agent.get("/metrics")[1]
    assert agent.terminate() == 0
    assert "Traceback" not in agent.said()
