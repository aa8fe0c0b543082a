# SPDX-License-Identifier: Apache-2.0
"""An API server of Kubernetes 1.35, which drops the fields of shares, and GPUs that would be shared.

- the manifests are taken, the class for shares among them, which then matches nothing
- by `fallback` a GPU is offered whole, or not at all; both are said
- claims for a share stay pending, as the server dropped the amounts; whole GPUs work, and so do MIG slices that would be shared
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from discovery import address
from discovery.mock import mig
from tests.e2e.kit import configfile, given, make, partitions, portions, waiting
from tests.e2e.kit.sites import Site, Sites
from tests.e2e.kit.space import Space

STATIC = "0000:df:00.0"
SLICE = "gpu-0000-df-00-0-mig-3g-40gb-9-4"
WHOLE = {"gpu-0000-1b-00-0", "gpu-0000-43-00-0", "gpu-0000-52-00-0"}
SHARING = [
    portions.rule(match={"address": STATIC}, mode="mig-static"),
    portions.rule(match={"count": 3}),
    portions.rule(fallback="none"),
]


@pytest.fixture(scope="module")
def site(sites: Sites) -> Iterator[Site]:
    with sites.other(emulate="1.35", with_agent=False) as found:
        configfile.apply(found, env={"NEARFIELD_PROBE_INTERVAL": "1s"}, sharing=SHARING)
        yield found


def test_what_is_offered_and_said(site: Site, space: Space) -> None:
    names = waiting.until(lambda: {device["name"] for device in site.agent.devices()}, "something is offered")
    assert names == WHOLE
    for device in site.agent.devices():
        assert not device.get("allowMultipleAllocations")
        assert device["attributes"]["memoryEnforcement"] == {"string": "whole"}
        assert "shares" not in device["capacity"]
        assert not any("requestPolicy" in capacity for capacity in device["capacity"].values())
    status, page = site.agent.readyz()
    assert (status, "share" in page) == (200, True), page
    assert site.api.wait_event("Node", site.node_name, text="Shares")
    assert site.api.get("DeviceClass", portions.CLASS)
    given.ask(space, "share", portions.request("10Gi", 10))
    space.pending("share", saying="cannot allocate all claims")
    assert set(given.get(site, space, "all", make.request(count=3))) == WHOLE


def test_slices_that_would_be_shared(site: Site, space: Space) -> None:
    machine, gpu = site.disk.machine, address.parse(STATIC)
    mig.admin_mode(machine, gpu, True)
    mig.admin_create(machine, gpu, "3g.40gb", 4)
    waiting.until(lambda: SLICE in {device["name"] for device in site.agent.devices()}, "it is offered")
    assert partitions.get(site, space, "p", partitions.request("3g.40gb")) == (SLICE,)
    given.ask(space, "q", partitions.request("3g.40gb"))
    space.pending("q", saying="cannot allocate all claims")
    for name in ("p", "q"):
        space.delete("Pod", name)
    waiting.until(lambda: not site.disk.record(), "the claim is unprepared")
    mig.admin_destroy(machine, gpu, "3g.40gb", 4)
    waiting.until(lambda: {device["name"] for device in site.agent.devices()} == WHOLE, "it has vanished")
