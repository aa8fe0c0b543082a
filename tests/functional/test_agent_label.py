# SPDX-License-Identifier: Apache-2.0
"""The agent whose machine a label of its Node names, as a process.

Aspects: the label's machine, not that of --mock; what the commands beside it show; another label at the next start; sockets and
reasons while the API server does not answer; a label that names nothing.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from driver import values
from driver.standin import apiserver_faults
from tests.fakes import agents

pytestmark = pytest.mark.timeout(300)

KEY = "mock.nearfield.dev/machine"
LABELLED = ("--mock-node-label", KEY)


@pytest.fixture(name="node")
def fixture_node() -> Iterator[agents.Node]:
    with agents.node() as node:
        yield node


def label(node: agents.Node, value: str) -> None:
    node.api.seed("nodes", {"metadata": {"name": agents.NODE, "labels": {KEY: value}}})


def product(node: agents.Node, count: int) -> str:
    (name,) = {device["attributes"]["productName"]["string"] for device in node.wait_for_devices(count)}
    return str(name)


def shown(node: agents.Node, verb: str, *arguments: str) -> list[dict[str, object]]:
    """What a command prints that runs with the variables of the agent."""
    variables = {
        "NEARFIELD_MOCK": "l40s-8-pcie",
        "NEARFIELD_MOCK_NODE_LABEL": KEY,
        "NEARFIELD_STATE_DIR": str(node.state_dir),
    }
    done = subprocess.run(
        [sys.executable, "-m", "driver.cli", verb, *arguments, "-o", "json"],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=True,
        timeout=50,
    )
    found = json.loads(done.stdout)["items"]
    assert isinstance(found, list)
    return found


def test_the_machine_of_the_label_and_another_one_at_the_next_start(node: agents.Node) -> None:
    label(node, "gb200-tray")
    agent = node.start(*LABELLED)
    node.kubelet().wait_registered(values.DRIVER_NAME)
    assert "GB200" in product(node, 4)
    agents.until(agent.ready, "ready")

    assert len(shown(node, "devices")) == 4
    assert len(shown(node, "devices", "--mock", "dgx-h100")) == 8

    label(node, "dgx-h100")
    assert agent.terminate() == 0
    node.start(*LABELLED)
    assert "H100" in agents.until(lambda: product(node, 8), "the other machine")


def test_sockets_before_the_machine_is_known_and_the_reason_where_people_look(node: agents.Node) -> None:
    label(node, "workstation-rtx")
    node.api.faults.inject(apiserver_faults.Refuse(503, "ServiceUnavailable"), verb="get", resource="nodes")
    agent = node.start(*LABELLED, mock=None)
    kubelet = node.kubelet()
    kubelet.wait_registered(values.DRIVER_NAME)
    agents.until(lambda: f"label {KEY} of the Node" in agent.get("/readyz")[1], "the reason on /readyz")
    assert agent.get("/healthz")[0] == 200
    assert node.devices() == []

    node.api.faults.clear()
    assert agents.until(node.devices, "devices")
    agents.until(agent.ready, "ready")


@pytest.mark.parametrize(
    ("labels", "words"),
    [({KEY: "dgx-h200"}, f"Label {KEY}=dgx-h200 of Node n1"), ({}, f"Node n1 has no label {KEY}")],
)
def test_no_machine_ends_the_start_with_what_to_do(node: agents.Node, labels: dict[str, str], words: str) -> None:
    node.api.seed("nodes", {"metadata": {"name": agents.NODE, "labels": labels}})
    agent = node.start(*LABELLED, mock=None)
    assert agent.process.wait(agents.WAIT_S) == 2
    assert words in agent.said()
    assert "dgx-h100, " in agent.said()
