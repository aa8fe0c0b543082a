# SPDX-License-Identifier: Apache-2.0
"""Shares of MIG instances that an administrator made (`mig-static` with a block `shares`).

- several pods have one instance, and no more than there is; a slice and a GPU are not with them
- its compute is counted in percent of the whole GPU, and who asks for nothing has all of the instance
- an instance that vanishes under sharers stays listed, tainted, until all are gone; it is not handed out as it was before they are
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from discovery import address
from discovery.mock import mig
from tests.e2e.kit import configfile, given, partitions, portions, waiting
from tests.e2e.kit.api import Json
from tests.e2e.kit.portions import GIB
from tests.e2e.kit.sites import Site, Sites
from tests.e2e.kit.space import Space

BUS = "0000:1b:00.0"
GPU = "gpu-0000-1b-00-0"
HALF = f"{GPU}-mig-3g-40gb-9-4"


@pytest.fixture(scope="module")
def site(sites: Sites) -> Iterator[Site]:
    with sites.other(with_agent=False) as found:
        configfile.apply(
            found,
            env={"NEARFIELD_PROBE_INTERVAL": "1s"},
            sharing=[portions.rule(match={"address": BUS}, mode="mig-static")],
        )
        yield found


@pytest.fixture(autouse=True)
def _divided(site: Site, nothing_left: object) -> Iterator[None]:
    """With one instance meanwhile, without any before and after."""
    machine, gpu = site.disk.machine, address.parse(BUS)
    mig.admin_mode(machine, gpu, True)
    mig.admin_create(machine, gpu, "3g.40gb", 4)
    waiting.until(lambda: HALF in offered(site), "it is offered")
    yield
    waiting.until(lambda: not site.disk.record(), "the claims are unprepared")
    for entry in partitions.there(machine):
        mig.admin_destroy(machine, gpu, entry.profile, entry.start)
    waiting.until(lambda: not offered(site), "nothing of it is offered")


def offered(site: Site) -> dict[str, Json]:
    """The devices of the GPU."""
    return {item["name"]: item for item in site.agent.devices() if item["name"].partition("-mig-")[0] == GPU}


def test_pods_share_an_instance(site: Site, space: Space) -> None:
    device = offered(site)[HALF]
    assert device["allowMultipleAllocations"] is True
    assert device["attributes"]["type"] == {"string": "mig"}
    assert set(device["capacity"]) == {"memory", "compute", "shares"}
    assert device["capacity"]["compute"]["value"] == "45"
    names = ("p", "q")
    for name in names:
        given.ask(space, name, portions.request("19Gi", 20, bus=BUS))
    for name in names:
        assert partitions.devices(site, space, name) == (HALF,)
        (use,) = portions.uses(site, space, name)
        assert (use.memory, use.compute) == (19 * GIB, 20)
    given.ask(space, "third", portions.request("5Gi", 5, bus=BUS))
    space.pending("third", saying="cannot allocate all claims")
    space.delete("Pod", "p")
    assert partitions.devices(site, space, "third") == (HALF,)
    for name in ("q", "third"):
        space.delete("Pod", name, wait=False)
    given.ask(space, "alone", partitions.request("3g.40gb"))
    assert partitions.devices(site, space, "alone") == (HALF,)
    (use,) = portions.uses(site, space, "alone")
    assert (use.memory_limit, use.compute_limit) == (None, None)
    metrics = site.agent.metrics()
    assert metrics.one("nearfield_sharers", device=HALF) == 1
    assert metrics.one("nearfield_shared_memory_bytes", device=HALF, state="free") == 0


def test_an_instance_that_vanishes_under_sharers(site: Site, space: Space) -> None:
    machine, gpu = site.disk.machine, address.parse(BUS)
    names = ("p", "q")
    for name in names:
        given.ask(space, name, portions.request("10Gi", 10, bus=BUS))
    for name in names:
        partitions.devices(site, space, name)
    mig.admin_destroy(machine, gpu, "3g.40gb", 4)
    waiting.until(lambda: offered(site).get(HALF, {}).get("taints"), "it is tainted")
    given.ask(space, "next", portions.request("5Gi", 5, bus=BUS))
    space.pending("next", saying="cannot allocate all claims")
    space.delete("Pod", "p")
    waiting.until(lambda: len(site.disk.record()) == 1, "one is unprepared")
    assert offered(site)[HALF]["taints"]
    space.delete("Pod", "q")
    waiting.until(lambda: not offered(site), "it has vanished")
    mig.admin_create(machine, gpu, "3g.40gb", 4)
    assert partitions.devices(site, space, "next") == (HALF,)
