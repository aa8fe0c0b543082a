# SPDX-License-Identifier: Apache-2.0
"""What kubelet itself says of the claims of its pods, by its metrics and its PodResources API; our logs are not asked.

- every container has exactly the devices of its requests, with the pool, the name and the CDI ids that reach the runtime
- claims in use and calls to the driver are counted by kubelet as they happened
"""

from __future__ import annotations

from tests.e2e.kit import make
from tests.e2e.kit.sites import Site
from tests.e2e.kit.space import Space

DRIVER = "gpu.nearfield.dev"
PREPARE, UNPREPARE = "NodePrepareResources", "NodeUnprepareResources"


def test_pod_resources_names_the_devices_of_each_claim(site: Site, space: Space) -> None:
    space.create(
        make.template("two", make.request("a"), make.request("b")),
        make.claim("own"),
        make.pod(
            "p",
            claims={"gpu": "template:two", "mine": "own"},
            containers=[make.container("all", claims=["gpu", "mine"]), make.container("none")],
        ),
    )
    space.running("p")
    claims = {name: space.claim_of("p", name) for name in ("gpu", "mine")}
    given = site.kubelet.pod_resources(space.name, "p")
    assert given["none"] == ()
    assert {(item.claim, item.driver, item.pool, item.device, item.share_id) for item in given["all"]} == {
        (claim["metadata"]["name"], DRIVER, site.pool, device, None)
        for name, claim in claims.items()
        for device in space.devices("p", name)
    }

    # A claim's own id of a device, and the node's: both are in a CDI file that is there, and the container got what it says.
    uid = claims["mine"]["metadata"]["uid"]
    (mine,) = (item for item in given["all"] if item.claim == "own")
    assert mine.cdi_ids == (f"{DRIVER}/claim={uid}-{mine.device}", f"{DRIVER}/node=driver")
    spec = site.disk.claim_file(uid)
    assert [f"{spec['kind']}={device['name']}" for device in spec["devices"]] == [mine.cdi_ids[0]]
    nodes = [node["path"] for device in spec["devices"] for node in device["containerEdits"]["deviceNodes"]]
    assert nodes == [site.disk.gpu(mine.device).node]
    assert set(nodes) < set(space.look("p", "all").nodes)


def test_kubelet_counts_one_prepare_and_one_unprepare_of_a_claim(site: Site, space: Space) -> None:
    calls = {method: site.kubelet.calls(method, code="OK") for method in (PREPARE, UNPREPARE)}
    every = {method: site.kubelet.calls(method) for method in (PREPARE, UNPREPARE)}
    space.create(make.claim("c"))
    for name in ("p", "q"):
        space.create(make.pod(name, claims={"gpu": "c"}))
        space.running(name)
    assert site.kubelet.claims_in_use(DRIVER) == site.kubelet.claims_in_use() == 1
    for name in ("p", "q"):
        space.delete("Pod", name)
    assert site.kubelet.claims_in_use(DRIVER) == 0
    for method in (PREPARE, UNPREPARE):
        assert site.kubelet.calls(method, code="OK") == calls[method] + 1, method
        assert site.kubelet.calls(method) == every[method] + 1, method
