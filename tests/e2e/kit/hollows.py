# SPDX-License-Identifier: Apache-2.0
"""Hollow nodes: what their agents publish, and where the scheduler puts pods among them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from tests.e2e.kit import waiting
from tests.e2e.kit.api import Api, Json
from tests.e2e.kit.sites import Site
from tests.e2e.kit.space import Space

GONE_S = 240.0


def slices(api: Api, node: str) -> list[Json]:
    """What a node publishes."""
    return api.items("ResourceSlice", fields=f"spec.nodeName={node}")


def devices(api: Api, node: str) -> list[Json]:
    """Of all slices of a node."""
    return [device for item in slices(api, node) for device in item["spec"]["devices"]]


def placed(space: Space, pod: str) -> str:
    """The node that the scheduler has chosen for a pod."""
    bound = space.api.wait(
        "Pod", pod, space.name, until=lambda item: "nodeName" in item["spec"], what="placed on a node"
    )
    return str(bound["spec"]["nodeName"])


def machine(site: Site, number: int) -> Path:
    """Where the machine of a node was rendered."""
    return site.cluster.layout.hollow_dir(number) / "kubelet/plugins/gpu.nearfield.dev/state/mock"


def require_free(site: Site, nodes: Iterable[str], *, gpus: int | None = None) -> None:
    """No claim is left, and every node publishes its GPUs, so many where that is said."""
    waiting.until(lambda: not site.api.items("ResourceClaim"), "no claim left", timeout_s=GONE_S)
    for node in nodes:
        found = devices(site.api, node)
        assert found, node
        assert not any(device.get("taints") for device in found), node
        assert gpus is None or len(found) == gpus, node
