# SPDX-License-Identifier: Apache-2.0
"""Somebody else writes to the slices of the node, or to the Node itself.

- slices are deleted and edited
- slices of our driver that are not ours: in our pool, and in another pool of this node
- the Node object is deleted and made again, so that its UID, the owner of the slices, is another
"""

from __future__ import annotations

import copy

from tests.e2e.kit import make, waiting
from tests.e2e.kit.api import Json
from tests.e2e.kit.sites import Site
from tests.e2e.kit.space import Space


def test_deleted_and_edited(site: Site, space: Space) -> None:
    space.create(make.template("one"), make.pod("p", claims={"gpu": "template:one"}))
    before = space.running("p")
    (slice_,) = site.agent.slices()
    spec = copy.deepcopy(slice_["spec"])
    name = slice_["metadata"]["name"]

    space.api.delete("ResourceSlice", name)
    waiting.until(lambda: _same(site, spec), "the deleted slice is back")

    (slice_,) = site.agent.slices()
    devices = slice_["spec"]["devices"][:2]
    devices[0]["attributes"].pop("uuid")
    space.api.patch("ResourceSlice", name, {"spec": {"devices": devices}})
    waiting.until(lambda: _same(site, spec), "the edited slice is as it was")

    # Labels are nobody's harm; another owner would have the garbage collector delete the slice.
    space.api.patch("ResourceSlice", name, {"metadata": {"labels": {"e2e": "stays"}, "ownerReferences": []}})
    waiting.until(lambda: _owner(site) == _node_uid(site), "the Node owns the slice again")
    assert site.agent.slices()[0]["metadata"]["labels"] == {"e2e": "stays"}
    space.api.patch("ResourceSlice", name, {"metadata": {"labels": None}})
    assert space.get("Pod", "p")["status"]["containerStatuses"] == before["status"]["containerStatuses"]


def test_foreign_slices_of_our_driver(site: Site, space: Space) -> None:
    (slice_,) = site.agent.slices()
    spec = copy.deepcopy(slice_["spec"])
    invented = copy.deepcopy(spec["devices"][0])
    invented["name"] = "gpu-of-nobody"
    foreign = _slice("zz-in-our-pool", site, pool=site.pool, devices=[invented])
    foreign["spec"]["pool"]["generation"] = spec["pool"]["generation"] + 5

    space.api.create(foreign)

    waiting.until(lambda: _same(site, spec), "the slice in our pool is gone, ours stands")
    assert space.api.find("ResourceSlice", "zz-in-our-pool") is None
    space.create(make.template("one"), make.pod("p", claims={"gpu": "template:one"}))
    space.running("p")
    assert space.devices("p")[0] in {device["name"] for device in spec["devices"]}


def test_foreign_pool_of_our_driver(site: Site, space: Space) -> None:
    (slice_,) = site.agent.slices()
    spec = copy.deepcopy(slice_["spec"])
    invented = copy.deepcopy(spec["devices"][0])
    invented["name"] = "gpu-of-nobody"
    space.api.create(_slice("zz-other-pool", site, pool="other", devices=[invented]))
    space.api.delete("ResourceSlice", slice_["metadata"]["name"])
    try:
        waiting.until(lambda: slice_["metadata"]["name"] in _names(site), "our slice is back")
        # The agent's token is good for its own pool only, so it says what it may not do.
        event = space.api.wait_event("Node", site.node_name, text="ForeignSlices")
        assert "zz-other-pool" in event["message"]
        waiting.until(lambda: site.agent.metrics().total("nearfield_findings", severity="warning"), "it is a Finding")
        assert site.agent.readyz()[0] == 200
        assert "zz-other-pool" in _names(site)
    finally:
        space.api.delete("ResourceSlice", "zz-other-pool")
    waiting.until(
        lambda: site.agent.metrics().total("nearfield_findings", severity="warning") == 0, "nothing left to say"
    )


def test_node_made_again(site: Site, space: Space) -> None:
    space.create(make.template("one"), make.pod("p", claims={"gpu": "template:one"}))
    space.running("p")
    before = _node_uid(site)
    (slice_,) = site.agent.slices()
    spec = copy.deepcopy(slice_["spec"])

    space.api.delete("Node", site.node_name)
    # Kubelet registers its Node when it starts, and not again.
    site.cluster.stop("kubelet")
    site.cluster.start("kubelet")
    site.cluster.wait_node()

    assert _node_uid(site) != before
    waiting.until(lambda: _same(site, spec) and _owner(site) == _node_uid(site), "the slices belong to the new Node")
    site.agent.wait_ready()
    space.create(make.pod("q", claims={"gpu": "template:one"}))
    space.running("q")


def _slice(name: str, site: Site, *, pool: str, devices: list[Json]) -> Json:
    return {
        "apiVersion": make.API,
        "kind": "ResourceSlice",
        "metadata": {"name": name},
        "spec": {
            "driver": site.disk.driver,
            "nodeName": site.node_name,
            "pool": {"name": pool, "generation": 1, "resourceSliceCount": 1},
            "devices": devices,
        },
    }


def _same(site: Site, spec: Json) -> bool:
    """Whether the one slice that stands has the spec, its generation apart."""
    found = [copy.deepcopy(item["spec"]) for item in site.agent.slices()]
    for item in (*found, wanted := copy.deepcopy(spec)):
        del item["pool"]["generation"]
    return found == [wanted]


def _names(site: Site) -> set[str]:
    return {item["metadata"]["name"] for item in site.agent.slices()}


def _owner(site: Site) -> str:
    """Of the one slice; nobody, while it is not one or has not one."""
    found = [owner["uid"] for item in site.agent.slices() for owner in item["metadata"].get("ownerReferences", [])]
    return str(found[0]) if len(found) == 1 else ""


def _node_uid(site: Site) -> str:
    return str(site.api.get("Node", site.node_name)["metadata"]["uid"])
