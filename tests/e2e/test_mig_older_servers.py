# SPDX-License-Identifier: Apache-2.0
"""An API server of Kubernetes 1.35, which keeps no counters, and GPUs that would be divided at need.

- no partition is offered; by `fallback` a GPU is offered whole, or not at all; both are said
- whole GPUs work, and so do instances that somebody made
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from discovery import address
from discovery.mock import mig
from tests.e2e.kit import configfile, given, make, partitions, waiting
from tests.e2e.kit.sites import Site, Sites
from tests.e2e.kit.space import Space

STATIC = "0000:df:00.0"
WHOLE = {"gpu-0000-1b-00-0", "gpu-0000-43-00-0", "gpu-0000-52-00-0"}
SHARING = [
    {"match": {"address": STATIC}, "mode": "mig-static"},
    {"match": {"count": 3}, "mode": "mig-dynamic", "fallback": "whole"},
    {"mode": "mig-dynamic", "fallback": "none"},
]


@pytest.fixture(scope="module")
def site(sites: Sites) -> Iterator[Site]:
    with sites.other(emulate="1.35", with_agent=False) as found:
        configfile.apply(found, env={"NEARFIELD_PROBE_INTERVAL": "1s"}, sharing=SHARING)
        yield found


def test_what_is_offered_and_said(site: Site, space: Space) -> None:
    names = waiting.until(lambda: {device["name"] for device in site.agent.devices()}, "something is offered")
    assert names == WHOLE
    assert not any("sharedCounters" in item["spec"] for item in site.agent.slices())
    status, page = site.agent.readyz()
    assert (status, "counters" in page) == (200, True)
    assert site.api.wait_event("Node", site.node_name, text="Counters")
    assert set(given.get(site, space, "all", make.request(count=3))) == WHOLE


def test_instances_that_somebody_made(site: Site, space: Space) -> None:
    machine, gpu = site.disk.machine, address.parse(STATIC)
    mig.admin_mode(machine, gpu, True)
    mig.admin_create(machine, gpu, "3g.40gb", 4)
    name = "gpu-0000-df-00-0-mig-3g-40gb-9-4"
    waiting.until(lambda: name in {device["name"] for device in site.agent.devices()}, "it is offered")
    assert partitions.get(site, space, "p", partitions.request("3g.40gb")) == (name,)
    space.delete("Pod", "p")
    waiting.until(lambda: not site.disk.record(), "the claim is unprepared")
    mig.admin_destroy(machine, gpu, "3g.40gb", 4)
    waiting.until(lambda: {device["name"] for device in site.agent.devices()} == WHOLE, "it has vanished")
