# SPDX-License-Identifier: Apache-2.0
"""The cluster with another machine for a while: one of the zoo, or a document of our own, which the ConfigMap brings into the pod."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from tests.e2e.kit import waiting, wiring
from tests.e2e.kit.sites import Site

OWN = Path(__file__).parents[1] / "machines"
MOUNTED = "/etc/nearfield"


@contextlib.contextmanager
def running(site: Site, machine: str) -> Iterator[Site]:
    """The site with a machine of the zoo, or with a file of `tests/e2e/machines`; with its own one afterwards."""
    if machine.endswith(".yaml"):
        objects = site.agent.manifests(machine=f"{MOUNTED}/{machine}")
        (settings,) = (item for item in objects if item["kind"] == "ConfigMap")
        settings["data"][machine] = (OWN / machine).read_text()
        site.agent.apply_objects(objects)
        site.agent.wait_ready()
    else:
        site.agent.apply(machine=machine)
    try:
        offered(site)
        yield site
    finally:
        site.agent.apply()
        offered(site)


def offered(site: Site) -> wiring.Wiring:
    """The wiring of the machine, once its GPUs and no others are offered."""

    def found() -> wiring.Wiring | None:
        read = wiring.read(site.disk.machine)
        devices = site.agent.devices()
        stands = {device["name"] for device in devices} == {gpu.gpu for gpu in read.gpus}
        return read if stands and not any(device.get("taints") for device in devices) else None

    return waiting.until(
        found, "the machine's GPUs are offered", told=lambda: [device["name"] for device in site.agent.devices()]
    )
