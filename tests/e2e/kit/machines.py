# SPDX-License-Identifier: Apache-2.0
"""Another mock machine on the same cluster: one of the zoo, or a document of our own, which the ConfigMap brings into the pod."""

from __future__ import annotations

from pathlib import Path

from tests.e2e.kit import waiting, wiring
from tests.e2e.kit.sites import Site

OWN = Path(__file__).parents[1] / "machines"
MOUNTED = "/etc/nearfield"
"""Where the overlay mounts the ConfigMap."""


def bring(site: Site, machine: str | None, *, changed: dict[str, str]) -> None:
    """See to it that the site has a machine (None: the one of most tests), and that its GPUs and no others are offered.

    `changed`: cluster -> machine that an earlier call brought. The agent is rolled only where that differs.
    """
    if machine == changed.get(site.cluster.name):
        return
    changed[site.cluster.name] = ""  # until it stands
    if machine is None:
        site.agent.apply()
    elif machine.endswith(".yaml"):
        objects = site.agent.manifests(machine=f"{MOUNTED}/{machine}")
        (settings,) = (item for item in objects if item["kind"] == "ConfigMap")
        settings["data"][machine] = (OWN / machine).read_text()
        site.agent.apply_objects(objects)
        site.agent.wait_ready()
    else:
        site.agent.apply(machine=machine)
    waiting.until(
        lambda: _offered(site),
        "the machine's GPUs are offered",
        told=lambda: [device["name"] for device in site.agent.devices()],
    )
    if machine is None:
        del changed[site.cluster.name]
    else:
        changed[site.cluster.name] = machine


def _offered(site: Site) -> bool:
    devices = site.agent.devices()
    names = {gpu.gpu for gpu in wiring.read(site.disk.machine).gpus}
    return {device["name"] for device in devices} == names and not any(device.get("taints") for device in devices)
