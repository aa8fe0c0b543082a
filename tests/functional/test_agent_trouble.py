# SPDX-License-Identifier: Apache-2.0
"""The whole agent as a process, in trouble that no part of it sees alone.

Aspects: the end while something hangs; its state taken away from under it.
"""

from __future__ import annotations

import contextlib
import shutil
import signal
from collections.abc import Iterator

import pytest

from driver import values
from driver.standin import kubelet_client
from tests.fakes import agents

pytestmark = pytest.mark.timeout(120)

DRIVER = values.DRIVER_NAME


@pytest.fixture(name="node")
def fixture_node() -> Iterator[agents.Node]:
    with agents.node() as node:
        yield node


def test_an_agent_that_waits_for_the_sockets_of_another_ends_when_told_and_leaves_them_alone(node: agents.Node) -> None:
    first = node.start()
    kubelet = node.kubelet()
    kubelet.wait_registered(DRIVER)
    names = [device["name"] for device in node.wait_for_devices(8)]
    second = node.start()
    agents.until(lambda: "has epoch" in second.said(), "the second at the sockets")
    second.process.send_signal(signal.SIGTERM)
    assert second.process.wait(30) == 0
    assert "another running instance" not in second.said()

    claim = node.claim("c1", names[0])
    assert isinstance(kubelet.prepare(DRIVER, [claim])[claim.uid], values.Prepared)
    node.api.remove("resourceslices", node.slices()[0]["metadata"]["name"])
    node.wait_for_devices(8)
    assert first.terminate() == 0


@pytest.mark.parametrize("folder", ["s/locks", "s"])
def test_an_agent_whose_state_is_removed_starts_anew_with_all_claims(node: agents.Node, folder: str) -> None:
    agent = node.start()
    kubelet = node.kubelet()
    kubelet.wait_registered(DRIVER)
    claim = node.claim("c1", node.wait_for_devices(8)[0]["name"])
    answer = kubelet.prepare(DRIVER, [claim])[claim.uid]
    assert isinstance(answer, values.Prepared)
    shutil.rmtree(node.directory / folder)
    assert agent.process.wait(30) == 1
    assert f"state folder {node.state_dir} was removed" in agent.said()
    assert "Traceback" not in agent.said()

    node.start()

    def again() -> values.Prepared | values.Failed | None:
        with contextlib.suppress(kubelet_client.KubeletError):
            return kubelet.prepare(DRIVER, [claim])[claim.uid]
        return None

    assert agents.until(again, "the claim answered again") == answer
