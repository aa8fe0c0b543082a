# SPDX-License-Identifier: Apache-2.0
"""MIG instances that an administrator makes and removes while the agent runs (`mig-static`).

- they appear and vanish; MIG that is on without an instance is said
- pods have them, and the agent neither makes nor removes any
- one that vanishes under a pod stays listed, tainted, until the pod is gone
- beside them the other GPUs are whole
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from discovery import address
from discovery.mock import mig
from tests.e2e.kit import configfile, given, make, partitions, waiting
from tests.e2e.kit.sites import Site, Sites
from tests.e2e.kit.space import Space

BUS = "0000:1b:00.0"
GPU = "gpu-0000-1b-00-0"
SMALL, HALF = f"{GPU}-mig-1g-10gb-19-0", f"{GPU}-mig-3g-40gb-9-4"


@pytest.fixture(scope="module")
def site(sites: Sites) -> Iterator[Site]:
    with sites.other(with_agent=False) as found:
        configfile.apply(
            found,
            env={"NEARFIELD_PROBE_INTERVAL": "1s"},
            sharing=[{"match": {"address": BUS}, "mode": "mig-static"}],
        )
        yield found


@pytest.fixture(autouse=True)
def _divided(site: Site, nothing_left: object) -> Iterator[None]:
    """Without an instance, before and after."""
    machine, gpu = site.disk.machine, address.parse(BUS)
    mig.admin_mode(machine, gpu, True)
    yield
    for entry in partitions.there(machine):
        mig.admin_destroy(machine, gpu, entry.profile, entry.start)
    waiting.until(lambda: not offered(site), "nothing of it is offered")


def offered(site: Site) -> dict[str, bool]:
    """The devices of the GPU, and whether they are tainted."""
    return {
        item["name"]: bool(item.get("taints"))
        for item in site.agent.devices()
        if item["name"].partition("-mig-")[0] == GPU
    }


def test_instances_appear_and_vanish(site: Site, space: Space) -> None:
    machine, gpu = site.disk.machine, address.parse(BUS)
    waiting.until(lambda: site.agent.metrics().one("nearfield_findings", severity="warning") >= 1, "it is said")
    assert offered(site) == {}
    assert len(site.agent.devices()) == len(site.disk.gpus()) - 1
    mig.admin_create(machine, gpu, "1g.10gb", 0)
    mig.admin_create(machine, gpu, "3g.40gb", 4)
    waiting.until(lambda: offered(site) == {SMALL: False, HALF: False}, "both are offered")
    assert partitions.get(site, space, "p", partitions.request("3g.40gb")) == (HALF,)
    assert {entry.device for entry in partitions.there(machine)} == {SMALL, HALF}
    mig.admin_destroy(machine, gpu, "1g.10gb", 0)
    waiting.until(lambda: offered(site) == {HALF: False}, "the other one has vanished")
    space.delete("Pod", "p")
    waiting.until(lambda: not site.disk.record(), "the claim is unprepared")
    assert {entry.device for entry in partitions.there(machine)} == {HALF}
    assert partitions.get(site, space, "again", partitions.request("3g.40gb")) == (HALF,)


def test_one_that_vanishes_under_a_pod(site: Site, space: Space) -> None:
    machine, gpu = site.disk.machine, address.parse(BUS)
    mig.admin_create(machine, gpu, "1g.10gb", 0)
    waiting.until(lambda: SMALL in offered(site), "it is offered")
    assert partitions.get(site, space, "p", partitions.request("1g.10gb")) == (SMALL,)
    mig.admin_destroy(machine, gpu, "1g.10gb", 0)
    waiting.until(lambda: offered(site) == {SMALL: True}, "it is tainted")
    given.ask(space, "next", partitions.request("1g.10gb"))
    space.pending("next", saying="cannot allocate all claims")
    space.delete("Pod", "p")
    waiting.until(lambda: offered(site) == {}, "it has vanished")
    mig.admin_create(machine, gpu, "1g.10gb", 0)
    assert partitions.devices(site, space, "next") == (SMALL,)


def test_the_other_gpus_are_whole(site: Site, space: Space) -> None:
    mig.admin_create(site.disk.machine, address.parse(BUS), "1g.10gb", 0)
    waiting.until(lambda: SMALL in offered(site), "it is offered")
    count = len(site.disk.gpus()) - 1
    assert len(given.get(site, space, "wholes", make.request(count=count))) == count
    assert partitions.get(site, space, "slice", partitions.request("1g.10gb")) == (SMALL,)
