# SPDX-License-Identifier: Apache-2.0
"""Another mock machine on the same cluster: one of the zoo, or a document of our own, which the ConfigMap brings into the pod."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from pathlib import Path

from discovery.mock import zoo
from discovery.mock.fault import Kind
from tests.e2e.kit import waiting, wiring
from tests.e2e.kit.sites import Site

ROOT = Path(__file__).parents[3]
OWN = Path(__file__).parents[1] / "machines"
MOUNTED = "/etc/nearfield"
"""Where the overlay mounts the ConfigMap."""

_NOT_OFFERED = (Kind.GPU_LOST, Kind.FALLEN_OFF, Kind.VFIO_BOUND)
"""Faults that a GPU of a machine may have from the start; others are given to machines by tests."""


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
        (settings,) = (item for item in objects if item["kind"] == "ConfigMap" and "machine" in item["data"])
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


def names() -> tuple[str, ...]:
    """Those of the zoo, and the files that are made up for tests, relative to the root of the project."""
    return (*zoo.names(), *sorted(str(path.relative_to(ROOT)) for path in OWN.glob("*.yaml")))


@functools.cache
def slices(machine: str, node_name: str, config: str | None = None) -> str:
    """What `nearfield slices -o yaml` prints of one, with a configuration file."""
    nearfield = str(Path(sys.executable).with_name("nearfield"))
    more = ("--config", config) if config is not None else ()
    command = [nearfield, "slices", "--mock", machine, "--node-name", node_name, "-o", "yaml", *more]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout


def gpus(machine: str) -> int:
    """How many it has that work, and are not divided."""
    described = zoo.load(str(ROOT / machine) if "/" in machine else machine)
    assert described.nvml is not None
    broken = {str(item.target) for item in described.faults if item.kind in _NOT_OFFERED}
    whole = {str(gpu.pci) for gpu in described.nvml.gpus if gpu.mig is None or not gpu.mig.current}
    return len(whole - broken)


def _offered(site: Site) -> bool:
    devices = site.agent.devices()
    state = json.loads((site.disk.machine / "nvml.json").read_text())
    broken = {
        item["target"] for item in (placed["fault"] for placed in state["faults"]) if item["kind"] in _NOT_OFFERED
    }
    names = {gpu.gpu for gpu in wiring.read(site.disk.machine).gpus if gpu.address not in broken}
    return {device["name"] for device in devices} == names and not any(device.get("taints") for device in devices)
