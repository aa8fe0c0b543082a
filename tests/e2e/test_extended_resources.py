# SPDX-License-Identifier: Apache-2.0
"""Pods that ask for an extended resource get our GPUs: the DeviceClass says which name stands for it (DRAExtendedResource).

- a name that an administrator chose; the name that every class has; `nvidia.com/gpu`, as pods beside NVIDIA's plugin have it
- each container has its own GPUs; the claim is gone with the pod
- more than there are: pending, with the scheduler's reason
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.e2e.kit import given, make
from tests.e2e.kit.api import Json
from tests.e2e.kit.sites import Site
from tests.e2e.kit.space import Space

CHOSEN = "example.com/gpu"
USUAL = "nvidia.com/gpu"
IMPLICIT = f"deviceclass.resource.kubernetes.io/{make.CLASS}"


@pytest.fixture
def named(site: Site) -> Iterator[Callable[[str], None]]:
    """Makes classes of our GPUs that stand for an extended resource."""
    made: list[str] = []

    def name_it(resource: str) -> None:
        body = {
            "apiVersion": make.API,
            "kind": "DeviceClass",
            "metadata": {"name": f"e2e-{len(made)}"},
            "spec": {
                "extendedResourceName": resource,
                "selectors": site.api.get("DeviceClass", make.CLASS)["spec"]["selectors"],
            },
        }
        made.append(body["metadata"]["name"])  # type: ignore[index]
        site.api.create(body)

    yield name_it
    for name in made:
        site.api.delete("DeviceClass", name)


def claim_of(space: Space, pod: str) -> Json:
    """The claim that the scheduler made for a pod."""
    status = space.get("Pod", pod)["status"]["extendedResourceClaimStatus"]
    return space.get("ResourceClaim", status["resourceClaimName"])


def of_container(space: Space, pod: str, container: str) -> tuple[str, ...]:
    """The devices of a container's requests in that claim."""
    mappings = space.get("Pod", pod)["status"]["extendedResourceClaimStatus"]["requestMappings"]
    requests = {item["requestName"] for item in mappings if item["containerName"] == container}
    results = claim_of(space, pod)["status"]["allocation"]["devices"]["results"]
    return tuple(result["device"] for result in results if result["request"] in requests)


@pytest.mark.parametrize("resource", [CHOSEN, USUAL, IMPLICIT])
def test_two_gpus(site: Site, space: Space, named: Callable[[str], None], resource: str) -> None:
    if resource != IMPLICIT:
        named(resource)
    space.create(make.pod("p", containers=[make.container(resources={resource: "2"})]))
    space.running("p")
    order = tuple(device["name"] for device in site.agent.devices())
    assert of_container(space, "p", "main") == order[:2]
    given.require(site, space, "p", order[:2])
    name = claim_of(space, "p")["metadata"]["name"]
    assert name.startswith("p-extended-resources-")
    space.delete("Pod", "p")
    space.gone("ResourceClaim", name)
    assert site.agent.readyz()[0] == 200


def test_each_container_has_its_own(site: Site, space: Space, named: Callable[[str], None]) -> None:
    named(CHOSEN)
    containers = [
        make.container("main", resources={CHOSEN: "1"}),
        make.container("other", resources={CHOSEN: "3"}),
        make.container("none"),
    ]
    space.create(make.pod("p", containers=containers))
    space.running("p")
    given_to = {name: of_container(space, "p", name) for name in ("main", "other", "none")}
    assert [len(devices) for devices in given_to.values()] == [1, 3, 0]
    assert len({device for devices in given_to.values() for device in devices}) == 4
    for name, devices in given_to.items():
        given.require(site, space, "p", devices, container=name)


def test_more_than_there_are(site: Site, space: Space, named: Callable[[str], None]) -> None:
    named(CHOSEN)
    space.create(make.pod("p", containers=[make.container(resources={CHOSEN: "9"})]))
    space.pending("p", saying="cannot allocate all claims")
    given.ask(space, "beside")
    assert len(given.devices(site, space, "beside")) == 1


def test_a_name_that_stands_for_nothing(space: Space) -> None:
    space.create(make.pod("p", containers=[make.container(resources={"example.com/unheard-of": "1"})]))
    space.pending("p", saying="Insufficient example.com/unheard-of")
