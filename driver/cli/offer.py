# SPDX-License-Identifier: Apache-2.0
"""What the agent would publish of a machine, for the verbs that show it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from discovery import model
from driver import config
from driver.publish import devices, wanted
from driver.sharing import abilities, nodeabilities, policy

_CGROUPS = "/sys/fs/cgroup"


def shared(snapshot: model.Snapshot, parsed: Mapping[str, Any], agent: config.AgentConfig) -> policy.Resolved:
    """How the configuration file shares the GPUs, with what this node can enforce now."""
    return policy.resolve(agent.sharing, snapshot.gpus, can=_can(snapshot, parsed, agent))


def _can(snapshot: model.Snapshot, parsed: Mapping[str, Any], agent: config.AgentConfig) -> abilities.Can:
    """What can be enforced; nothing is looked at, and nothing imported, where no rule asks for shares."""
    if not any(rule.shares for rule in agent.sharing):
        return abilities.unknown
    from driver.app import means
    from driver.mps import client
    from driver.prepare import cgroups, rootfs, timeslices

    directory: Path = parsed["mps_dir"]
    mocked = parsed["mock"] is not None or parsed["mock_node_label"] is not None
    root = rootfs.installed(parsed["driver_root"], mount=parsed.get("driver_root_mount"), mocked=mocked)
    cgroup_root: Path | None = parsed.get("cgroup_root", None if mocked else Path(_CGROUPS))
    found = means.found(
        client.Client(directory).ability(),
        directory=directory,
        time_slices=timeslices.TimeSlices(root).problem(),
        pods=None if cgroup_root is None else cgroups.Cgroups(cgroup_root).problem(),
    )
    return lambda gpu: nodeabilities.node_abilities(gpu, snapshot, found)


def build(
    snapshot: model.Snapshot,
    parsed: Mapping[str, Any],
    agent: config.AgentConfig,
    *,
    resolved: policy.Resolved,
    ours: Collection[str] = (),
) -> wanted.Wanted:
    """The decision of the agent, by the options of the command line and the configuration file. `resolved`: from `shared`; `ours`:
    names of devices that claims have, among them the MIG instances that the agent has made.
    """
    options = devices.PublishOptions(
        driver_name=parsed["driver_name"],
        numa_list=agent.publish.numa_node is config.NumaNodeForm.LIST,
        pcie_switches=agent.publish.pcie_switches,
    )
    return wanted.from_snapshot(
        snapshot, options=options, policies=resolved.policies, ours=ours, findings=resolved.findings
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
