# SPDX-License-Identifier: Apache-2.0
"""What a pod was given, as three see it: the scheduler, kubelet and its container."""

from __future__ import annotations

from collections.abc import Sequence

from tests.e2e.kit import make
from tests.e2e.kit.api import Json
from tests.e2e.kit.sites import Site
from tests.e2e.kit.space import Space


def devices(site: Site, space: Space, pod: str, claim: str = "gpu", container: str = "main") -> tuple[str, ...]:
    """Our devices of a running pod's claim in the scheduler's order, once it is certain that its container has these and no others."""
    space.running(pod)
    results = space.claim_of(pod, claim)["status"]["allocation"]["devices"]["results"]
    given = tuple(result["device"] for result in results if result["driver"] == site.disk.driver)
    require(site, space, pod, given, container=container)
    return given


def require(site: Site, space: Space, pod: str, given: Sequence[str], container: str = "main") -> None:
    """A running container has these devices and no others."""
    gpus = [site.disk.gpu(device) for device in given]
    seen = space.look(pod, container)
    assert seen.gpu_nodes == tuple(sorted(gpu.node for gpu in gpus)), (pod, container, given, seen.gpu_nodes)
    assert seen.gpu_uuids == tuple(sorted(gpu.uuid for gpu in gpus)), (pod, container, given, seen.gpu_uuids)
    # Kubelet lists all devices of a claim here, also where the container has only some of its requests.
    told = site.kubelet.pod_resources(space.name, pod)[container]
    assert {entry.device for entry in told if entry.driver == site.disk.driver} >= set(given), (pod, told)


def ask(space: Space, pod: str, *requests: Json, constraints: Sequence[Json] = ()) -> None:
    """Make a pod with a claim of its own for these requests."""
    space.create(
        make.template(pod, *requests, constraints=constraints), make.pod(pod, claims={"gpu": f"template:{pod}"})
    )


def get(site: Site, space: Space, pod: str, *requests: Json, constraints: Sequence[Json] = ()) -> tuple[str, ...]:
    """Make such a pod, and give what it got once it runs."""
    ask(space, pod, *requests, constraints=constraints)
    return devices(site, space, pod)
