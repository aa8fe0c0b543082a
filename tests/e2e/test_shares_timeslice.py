# SPDX-License-Identifier: Apache-2.0
"""GPUs whose sharers take turns: the length of a turn is set by nvidia-smi of the driver root, here a stand-in for the mock machine.

- there is no compute to be asked for; the turn is set with the first sharer and put back with the last one
- it is set again after the agent was killed, and when somebody else changed it
"""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from tests.e2e.kit import configfile, driverroot, given, portions, waiting
from tests.e2e.kit.sites import Site, Sites
from tests.e2e.kit.space import Space

BUS = "0000:9d:00.0"
GPU = "gpu-0000-9d-00-0"
LONG = 3
"""nvidia-smi compute-policy: 0 default, 1 short, 2 medium, 3 long."""


@pytest.fixture(scope="module")
def site(sites: Sites) -> Iterator[Site]:
    with sites.other() as found:
        space = Space(found.api, found.cluster, "programs")
        space.open()
        with driverroot.installed(space):
            configfile.apply(
                found,
                env={"NEARFIELD_PROBE_INTERVAL": "1s", **driverroot.ENV},
                edit=driverroot.mount,
                sharing=[portions.rule(compute="timeslice", timeSlice="long")],
            )
            yield found


def turn(site: Site) -> int:
    """Of the GPU, as the machine's state has it."""
    nvml = json.loads((site.disk.machine / "nvml.json").read_text())["nvml"]
    (gpu,) = (gpu for gpu in nvml["gpus"] if gpu["pci"] == BUS)
    return int(gpu["timeSlice"])


def test_sharers_take_turns(site: Site, space: Space) -> None:
    devices = portions.offered(site)
    assert len(devices) == len(site.disk.gpus())
    for device in devices:
        assert set(device["capacity"]) == {"memory", "shares"}
        assert device["attributes"]["computeEnforcement"] == {"string": "timeslice"}
    assert turn(site) == 0
    given.ask(space, "compute", portions.request("10Gi", 25))
    space.pending("compute", saying="cannot allocate all claims")
    names = ("p", "q")
    for name in names:
        given.ask(space, name, portions.request("30Gi", bus=BUS))
    for name in names:
        assert portions.devices(site, space, name) == (GPU,)
    assert turn(site) == LONG
    space.delete("Pod", "p")
    waiting.until(lambda: len(site.disk.record()) == 1, "one is unprepared")
    assert turn(site) == LONG
    space.delete("Pod", "q")
    waiting.until(lambda: turn(site) == 0, "the turn is put back")


def test_it_is_put_back_by_the_next_agent(site: Site, space: Space) -> None:
    given.ask(space, "p", portions.request("30Gi", bus=BUS))
    portions.devices(site, space, "p")
    site.agent.kill_and_wait()
    assert turn(site) == LONG
    space.delete("Pod", "p")
    waiting.until(lambda: turn(site) == 0, "the turn is put back")
