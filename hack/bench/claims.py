# SPDX-License-Identifier: Apache-2.0
"""The claims of the benchmark, as the scheduler would leave them."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

NAMESPACE = "bench"
REQUEST = "gpu"


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A claim that the API server has."""

    uid: str
    name: str

    @property
    def path(self) -> str:
        """Its path in the API."""
        return f"{collection_path()}/{self.name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """A pod that claims are reserved for."""

    name: str
    uid: str


NOBODY = Holder(name="nobody", uid="00000000-0000-4000-8000-000000000000")
"""Where no one looks whether the pod is there."""


def collection_path() -> str:
    """Where claims are created."""
    return f"/apis/resource.k8s.io/v1/namespaces/{NAMESPACE}/resourceclaims"


def body(name: str, *, count: int, admin: bool) -> dict[str, Any]:
    """A claim for `count` devices, not yet allocated."""
    exactly: dict[str, Any] = {"deviceClassName": "bench", "allocationMode": "ExactCount", "count": count}
    if admin:
        exactly["adminAccess"] = True
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaim",
        "metadata": {"name": name, "namespace": NAMESPACE},
        "spec": {"devices": {"requests": [{"name": REQUEST, "exactly": exactly}]}},
    }


def allocated(
    claim: Mapping[str, Any],
    *,
    driver: str,
    node: str,
    devices: Sequence[str],
    admin: bool = False,
    share: Mapping[str, str] | None = None,
    holder: Holder = NOBODY,
) -> dict[str, Any]:
    """The stored claim with the allocation that the scheduler writes into its status. `share`: what a share takes of each capacity of
    its device.
    """
    result: dict[str, Any] = {"request": REQUEST, "driver": driver, "pool": node}
    if admin:
        result["adminAccess"] = True
    if share is not None:
        result |= {"shareID": str(uuid.uuid4()), "consumedCapacity": dict(share)}
    return {
        **claim,
        "status": {
            "allocation": {
                "devices": {"results": [{**result, "device": device} for device in devices]},
                "nodeSelector": {
                    "nodeSelectorTerms": [
                        {"matchFields": [{"key": "metadata.name", "operator": "In", "values": [node]}]}
                    ]
                },
            },
            "reservedFor": [{"resource": "pods", "name": holder.name, "uid": holder.uid}],
        },
    }
