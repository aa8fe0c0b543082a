# SPDX-License-Identifier: Apache-2.0
"""What a container has of its pod's claims: device nodes, environment and mounts of the allocated GPUs, and of no others.

- a container without a claim has nothing; one that names a request has that request; one that names none has all
- init containers and sidecars; a container that is started again
- two claims in a pod; a claim of two pods; a claim of two containers
- admin access, in a namespace that is labelled for it, beside a running user
- the libraries of a driver root are found by dlopen in a glibc container
"""

from __future__ import annotations

import re

import pytest

from tests.e2e.kit import inside, make
from tests.e2e.kit.api import ApiError, Json
from tests.e2e.kit.sites import Site
from tests.e2e.kit.space import Space

COMMON_NODES = {"/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools", "/dev/nvidia-modeset"}
"""What the NVIDIA driver has for all GPUs together, as far as its kernel modules are there."""

NULL_DEVICE = (1, 3)
"""/dev/null, which stands behind the nodes of a mock machine."""

ADMIN_LABEL = {"resource.kubernetes.io/admin-access": "true"}


def nodes_of(site: Site, *devices: str) -> tuple[str, ...]:
    """The device nodes of some devices, as a view has them."""
    return tuple(sorted(site.disk.gpu(device).node for device in devices))


def uuids_of(site: Site, *devices: str) -> tuple[str, ...]:
    """Their UUIDs."""
    return tuple(sorted(site.disk.gpu(device).uuid for device in devices))


def test_a_container_has_its_gpus_and_what_all_gpus_share(site: Site, space: Space) -> None:
    space.create(
        make.template("one"),
        make.pod(
            "p",
            claims={"gpu": "template:one"},
            containers=[make.container("with", claims=["gpu"]), make.container("without")],
        ),
    )
    space.running("p")
    (device,) = space.devices("p")
    with_gpu, without = space.look("p", "with"), space.look("p", "without")

    assert set(with_gpu.nodes) == COMMON_NODES | {site.disk.gpu(device).node}
    assert set(with_gpu.nodes.values()) == {NULL_DEVICE}
    assert with_gpu.env["NVIDIA_VISIBLE_DEVICES"] == "void"
    assert with_gpu.gpu_uuids == uuids_of(site, device)
    added = set(with_gpu.env) - set(without.env)
    assert len(added) == 2, added
    assert any(re.fullmatch(r"NEARFIELD_DEVICE_\w+", name) for name in added)

    assert without.nodes == {}
    assert without.gpu_uuids == ()
    (metadata,) = set(with_gpu.mounts) - set(without.mounts)
    assert metadata.endswith(
        "/kubernetes.io/dra-device-attributes/resourceclaimtemplates/gpu/gpu/gpu.nearfield.dev-metadata.json"
    )


def test_a_container_that_names_a_request_has_that_one(site: Site, space: Space) -> None:
    space.create(
        make.template("two", make.request("a"), make.request("b", count=2)),
        make.pod(
            "p",
            claims={"gpu": "template:two"},
            containers=[
                make.container("all", claims=["gpu"]),
                make.container("a", claims=["gpu/a"]),
                make.container("b", claims=["gpu/b"]),
                make.container("both", claims=["gpu/a", "gpu/b"]),
            ],
        ),
    )
    space.running("p")
    of_a, of_b = space.devices("p", request="a"), space.devices("p", request="b")
    assert (len(of_a), len(of_b), len({*of_a, *of_b})) == (1, 2, 3)
    for container, devices in {"all": of_a + of_b, "a": of_a, "b": of_b, "both": of_a + of_b}.items():
        seen = space.look("p", container)
        assert seen.gpu_nodes == nodes_of(site, *devices), container
        assert seen.gpu_uuids == uuids_of(site, *devices), container


def test_init_containers_and_sidecars_have_what_they_ask_for(site: Site, space: Space) -> None:
    space.create(
        make.template("two", make.request("a"), make.request("b")),
        make.pod(
            "p",
            claims={"gpu": "template:two"},
            init=[
                make.container("first", claims=["gpu/a"], script=inside.SCRIPT),
                make.sidecar("beside", claims=["gpu/b"]),
                make.container("second", script=inside.SCRIPT),
            ],
            containers=[make.container(claims=["gpu"])],
        ),
    )
    space.running("p")
    of_a, of_b = space.devices("p", request="a"), space.devices("p", request="b")
    views = {
        "first": (space.looked("p", "first"), of_a),
        "beside": (space.look("p", "beside"), of_b),
        "second": (space.looked("p", "second"), ()),
        "main": (space.look("p"), of_a + of_b),
    }
    for container, (seen, devices) in views.items():
        assert seen.gpu_nodes == nodes_of(site, *devices), container
        assert seen.gpu_uuids == uuids_of(site, *devices), container
    assert views["second"][0].nodes == {}


def test_a_container_that_is_started_again_has_the_same_gpu(site: Site, space: Space) -> None:
    """A crash of the user's program: kubelet starts the container anew, and asks the driver for nothing."""
    space.create(make.template("one"), make.pod("p", claims={"gpu": "template:one"}, restart="Always"))
    space.running("p")
    first, calls = space.look("p"), site.kubelet.calls("NodePrepareResources")
    space.exec("p", "sh", "-c", "(sleep 1; kill -TERM 1) > /dev/null 2>&1 &")
    space.api.wait("Pod", "p", space.name, until=_started_again, what="started again")
    again = space.look("p")
    assert again.gpu_nodes == first.gpu_nodes == nodes_of(site, *space.devices("p"))
    assert again.gpu_uuids == first.gpu_uuids
    assert site.kubelet.calls("NodePrepareResources") == calls


def test_a_pod_with_two_claims_has_both(site: Site, space: Space) -> None:
    space.create(
        make.template("one"),
        make.claim("pair", make.request(count=2)),
        make.pod(
            "p",
            claims={"mine": "template:one", "named": "pair"},
            containers=[
                make.container("both", claims=["mine", "named"]),
                make.container("mine", claims=["mine"]),
                make.container("named", claims=["named"]),
            ],
        ),
    )
    space.running("p")
    mine, named = space.devices("p", "mine"), space.devices("p", "named")
    assert len({*mine, *named}) == 3
    for container, devices in {"both": mine + named, "mine": mine, "named": named}.items():
        seen = space.look("p", container)
        assert seen.gpu_nodes == nodes_of(site, *devices), container
        assert seen.gpu_uuids == uuids_of(site, *devices), container
    assert site.agent.metrics().one("nearfield_claims_prepared") == 2


def test_pods_and_containers_share_a_claim(site: Site, space: Space) -> None:
    """One claim, two pods, two containers each: prepared once in all, and there until the last pod is gone."""
    prepared = site.agent.metrics().total("nearfield_prepare_total", result="success")
    space.create(make.claim("shared"))
    containers = [make.container("x", claims=["gpu"]), make.container("y", claims=["gpu"])]
    for name in ("p", "q"):  # one after the other: kubelet asks for both where neither has the claim yet
        space.create(make.pod(name, claims={"gpu": "shared"}, containers=containers))
        space.running(name)
    (device,) = space.devices("p")
    views = [space.look(pod, container) for pod in ("p", "q") for container in ("x", "y")]
    assert [view.gpu_nodes for view in views] == [nodes_of(site, device)] * 4
    assert [view.gpu_uuids for view in views] == [uuids_of(site, device)] * 4
    assert len(space.get("ResourceClaim", "shared")["status"]["reservedFor"]) == 2
    assert site.kubelet.claims_in_use() == 1
    assert site.agent.metrics().total("nearfield_prepare_total", result="success") == prepared + 1

    space.delete("Pod", "p")
    assert site.kubelet.claims_in_use() == 1
    assert space.look("q", "x").gpu_nodes == nodes_of(site, device)
    assert [entry.claim.name for entry in site.disk.record()] == ["shared"]

    space.delete("Pod", "q")
    assert site.disk.record() == ()
    space.create(make.pod("r", claims={"gpu": "shared"}))
    space.running("r")
    assert space.look("r").gpu_nodes == nodes_of(site, *space.devices("r"))


def test_admin_access_sees_all_gpus_beside_their_users(site: Site, space: Space) -> None:
    space.create(make.template("one"), make.pod("user", claims={"gpu": "template:one"}))
    space.running("user")
    monitor = make.claim("monitor", make.request("all", every=True, admin=True))
    with pytest.raises(ApiError, match="admin-access"):
        space.create(monitor)

    space.label(ADMIN_LABEL)
    space.create(monitor, make.pod("monitor", claims={"gpus": "monitor"}))
    space.running("monitor")
    every = tuple(gpu.device for gpu in site.disk.gpus())
    for pod, devices in {"monitor": every, "user": space.devices("user")}.items():
        seen = space.look(pod)
        assert seen.gpu_nodes == nodes_of(site, *devices), pod
        assert seen.gpu_uuids == uuids_of(site, *devices), pod

    # Admin access holds nothing: the other seven are given out all the same.
    space.create(make.template("seven", make.request(count=7)), make.pod("rest", claims={"gpu": "template:seven"}))
    space.running("rest")
    assert {*space.devices("rest"), *space.devices("user")} == set(every)


def _started_again(pod: Json) -> bool:
    return any(
        status["restartCount"] > 0 and "running" in status["state"] for status in pod["status"]["containerStatuses"]
    )
