# SPDX-License-Identifier: Apache-2.0
"""The agent that the judges kill: it is there after a start, whenever the moment comes that was set for its end."""

from __future__ import annotations

import threading

from hack.judges import agentnode

CONFIGURATION = "apiVersion: config.nearfield.dev/v1alpha1\nkind: AgentConfig\n"


def test_an_agent_that_is_killed_as_it_starts_is_started_again() -> None:
    with agentnode.room() as (directory, api, plugins):
        node = agentnode.AgentNode(directory, "l40s-4-pcie", api, plugins, configuration=CONFIGURATION)
        for wait_s in (0.0, 0.1, 0.3):
            killer = threading.Timer(wait_s, node.kill)
            node.kill()
            killer.start()
            node.start()
            killer.join()
            if not node.alive():
                node.start()  # it came after the start
        assert node.slices()
        node.kill()
