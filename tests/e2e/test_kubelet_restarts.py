# SPDX-License-Identifier: Apache-2.0
"""Kubelet ends and comes back. That it loses its state is in test_outages.

- it is restarted (SIGTERM) or killed (SIGKILL) with pods that run, pods that wait, one that came and one that went meanwhile
"""

from __future__ import annotations

import signal

import pytest

from tests.e2e.kit import make, waiting
from tests.e2e.kit.api import Json
from tests.e2e.kit.sites import Site
from tests.e2e.kit.space import Space


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL], ids=["stopped", "killed"])
def test_restart(site: Site, space: Space, how: signal.Signals) -> None:
    devices = [device["name"] for device in site.agent.devices()]
    space.create(
        make.template("one"),
        make.template("eight", make.request(count=len(devices))),
        make.pod("runs", claims={"gpu": "template:one"}),
        make.pod("leaves", claims={"gpu": "template:one"}),
    )
    before = space.running("runs")
    space.running("leaves")
    space.create(make.pod("waits", claims={"gpu": "template:eight"}))
    space.pending("waits", saying="cannot allocate all claims")
    slices = {item["metadata"]["uid"] for item in site.agent.slices()}

    if how is signal.SIGKILL:
        site.cluster.kill("kubelet")
    else:
        site.cluster.stop("kubelet")
    # What happens meanwhile it finds when it is back: a pod for it, and one that has to go.
    space.create(make.pod("later", claims={"gpu": "template:one"}))
    space.delete("Pod", "leaves", wait=False)
    site.cluster.start("kubelet")

    later = space.running("later")
    assert _restarts(later) == 0
    space.gone("Pod", "leaves")
    _slices_again(site, slices)
    assert space.get("Pod", "runs")["status"]["containerStatuses"] == before["status"]["containerStatuses"]
    assert space.look("runs").gpu_nodes == (site.disk.gpu(space.devices("runs")[0]).node,)
    # After a restart kubelet counts what it has prepared since, and nobody is asked again about a container that runs.
    assert site.kubelet.claims_in_use(make.CLASS) == 1
    assert site.kubelet.calls("NodePrepareResources") == 1
    assert _recorded(site) == {space.claim_of(pod, "gpu")["metadata"]["uid"] for pod in ("runs", "later")}
    space.delete("Pod", "runs")
    space.delete("Pod", "later")
    space.running("waits")
    assert sorted(space.devices("waits")) == sorted(devices)


def _slices_again(site: Site, before: set[str]) -> None:
    """Kubelet wipes the slices when it starts, perhaps after others are there already; new ones follow."""
    waiting.until(
        lambda: site.agent.devices() and not before & {item["metadata"]["uid"] for item in site.agent.slices()},
        "the slices were wiped and are back",
    )


def _recorded(site: Site) -> set[str]:
    return {entry.claim.uid for entry in site.disk.record()}


def _restarts(pod: Json) -> int:
    return sum(status["restartCount"] for status in pod["status"].get("containerStatuses", []))
