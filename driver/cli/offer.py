# SPDX-License-Identifier: Apache-2.0
"""What the agent would publish of a machine, for the verbs that show it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from discovery import model
from discovery.address import PciAddress
from driver import config
from driver.publish import devices, wanted
from driver.sharing import policy, rules


def policies(snapshot: model.Snapshot, agent: config.AgentConfig) -> Mapping[PciAddress, rules.Policy]:
    """How the configuration file shares the GPUs."""
    return policy.resolve(agent.sharing, snapshot.gpus).policies


def build(
    snapshot: model.Snapshot, parsed: Mapping[str, Any], agent: config.AgentConfig, *, ours: Collection[str] = ()
) -> wanted.Wanted:
    """The decision of the agent, by the options of the command line and the configuration file. `ours`: names of devices that
    claims have, among them the MIG instances that the agent has made.
    """
    options = devices.PublishOptions(
        driver_name=parsed["driver_name"],
        numa_list=agent.publish.numa_node is config.NumaNodeForm.LIST,
        pcie_switches=agent.publish.pcie_switches,
    )
    shared = policy.resolve(agent.sharing, snapshot.gpus)
    return wanted.from_snapshot(
        snapshot, options=options, policies=shared.policies, ours=ours, findings=shared.findings
    )


def offered(decided: wanted.Wanted) -> tuple[tuple[devices.Device, ...], str | None, tuple[model.Finding, ...]]:
    """The devices of a decision, why there is nothing to publish (None where there is), and what was odd."""
    match decided:
        case wanted.Offering(offer=offer):
            return offer.devices, None, offer.findings
        case wanted.Withheld(reason=reason, findings=findings):
            return (), reason, findings
        case wanted.Undecided(reason=reason):
            return (), reason, ()
