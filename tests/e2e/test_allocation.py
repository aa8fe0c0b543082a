# SPDX-License-Identifier: Apache-2.0
"""GPUs are given out by the scheduler and reach the containers.

- one, two and all GPUs: the container has those that were allocated and no others; kubelet says the same
- a ninth pod waits with the scheduler's reason, and runs when another one ends
- a pod that has ended holds no GPU, though it is still there to be read
"""

from __future__ import annotations

import pytest

from tests.e2e.kit import inside, make
from tests.e2e.kit.sites import Site
from tests.e2e.kit.space import Space

GPUS = 8
NO_ROOM = "cannot allocate all claims"
"""What the scheduler says of a node on which a claim finds no device."""


@pytest.mark.parametrize("count", [1, 2, GPUS])
def test_a_pod_has_the_gpus_that_were_allocated_to_it(site: Site, space: Space, count: int) -> None:
    space.create(make.template("gpus", make.request(count=count)), make.pod("p", claims={"gpu": "template:gpus"}))
    space.running("p")
    devices = space.devices("p")
    assert len(set(devices)) == count
    gpus = [site.disk.gpu(device) for device in devices]

    seen = space.look("p")
    assert seen.gpu_nodes == tuple(sorted(gpu.node for gpu in gpus))
    assert seen.gpu_uuids == tuple(sorted(gpu.uuid for gpu in gpus))

    given = site.kubelet.pod_resources(space.name, "p")["main"]
    assert {(item.driver, item.pool, item.device) for item in given} == {
        ("gpu.nearfield.dev", site.pool, device) for device in devices
    }
    assert site.kubelet.claims_in_use("gpu.nearfield.dev") == 1
    assert site.agent.metrics().one("nearfield_claims_prepared") == 1


def test_a_ninth_pod_waits_until_a_gpu_is_free(site: Site, space: Space) -> None:
    space.create(make.template("one"))
    for number in range(GPUS):
        space.create(make.pod(f"p{number}", claims={"gpu": "template:one"}))
    for number in range(GPUS):
        space.running(f"p{number}")
    taken = {space.devices(f"p{number}") for number in range(GPUS)}
    assert {device for (device,) in taken} == {gpu.device for gpu in site.disk.gpus()}

    space.create(make.pod("ninth", claims={"gpu": "template:one"}))
    space.pending("ninth", saying=NO_ROOM)
    event = space.api.wait_event("Pod", "ninth", space.name, text="FailedScheduling")
    assert NO_ROOM in event["message"]
    assert "allocation" not in space.claim_of("ninth", "gpu").get("status", {})

    freed = space.devices("p3")
    space.delete("Pod", "p3", wait=False)
    space.running("ninth")
    assert space.devices("ninth") == freed
    (gpu,) = (site.disk.gpu(device) for device in freed)
    assert space.look("ninth").gpu_nodes == (gpu.node,)
    assert site.kubelet.calls("NodePrepareResources", code="OK") >= GPUS + 1


def test_a_pod_that_has_ended_holds_nothing(site: Site, space: Space) -> None:
    space.create(make.template("all", make.request(count=GPUS)))
    space.create(make.pod("first", claims={"gpu": "template:all"}, script=inside.SCRIPT))
    space.succeeded("first")
    assert len(space.looked("first").gpu_nodes) == GPUS

    space.create(make.pod("second", claims={"gpu": "template:all"}))
    space.running("second")
    assert len(space.look("second").gpu_nodes) == GPUS
    assert space.get("Pod", "first")["status"]["phase"] == "Succeeded"
    assert [entry.claim.name for entry in site.disk.record()] == [space.claim_of("second", "gpu")["metadata"]["name"]]
