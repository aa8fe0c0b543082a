# SPDX-License-Identifier: Apache-2.0
"""Claims for parts of GPUs and for whole ones, as people write them and as the API server stores them. Pure.

The classes are those that are installed (deploy/daemonset/base/deviceclass.yaml).
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

from driver.publish import attributes, devices
from hack.judges import nodes

Body = dict[str, Any]

GPU_CLASS = nodes.DRIVER
MIG_CLASS = "mig.nearfield.dev"
PARENT = f"{nodes.DRIVER}/{attributes.PARENT_UUID}"
NAMESPACE = "ml"

_ATTRIBUTES = f'device.attributes["{nodes.DRIVER}"]'
CLASSES: tuple[Body, ...] = tuple(
    {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "DeviceClass",
        "metadata": {"name": name},
        "spec": {
            "selectors": [
                {"cel": {"expression": f'device.driver == "{nodes.DRIVER}" && {_ATTRIBUTES}.type == "{of_type}"'}}
            ]
        },
    }
    for name, of_type in ((GPU_CLASS, "gpu"), (MIG_CLASS, "mig"))
)


def of_profile(profile: str) -> str:
    """The CEL expression of a profile."""
    return f'{_ATTRIBUTES}.profile == "{profile}"'


def of_memory(mebibytes: int) -> str:
    """The CEL expression of so much memory or more."""
    return f'device.capacity["{nodes.DRIVER}"].memory.compareTo(quantity("{mebibytes}Mi")) >= 0'


def asked(
    selector: str | None = None, *, count: int = 1, of: str = MIG_CLASS, memory: int | None = None
) -> dict[str, Any]:
    """What is asked of a request or of an alternative. `memory`: MiB, asked for as a capacity."""
    found: dict[str, Any] = {"deviceClassName": of, "allocationMode": "ExactCount", "count": count}
    if selector is not None:
        found["selectors"] = [{"cel": {"expression": selector}}]
    if memory is not None:
        found["capacity"] = {"requests": {"memory": f"{memory}Mi"}}
    return found


def exactly(name: str, what: Mapping[str, Any]) -> dict[str, Any]:
    """A request."""
    return {"name": name, "exactly": what}


def first_available(name: str, *alternatives: Mapping[str, Any]) -> dict[str, Any]:
    """A request for the first of these that can be had."""
    return {
        "name": name,
        "firstAvailable": [{"name": f"or-{index}", **what} for index, what in enumerate(alternatives)],
    }


def claim(
    name: str, *requests: Mapping[str, Any], match: str | None = None, distinct: str | None = None
) -> dict[str, Any]:
    """A claim, all of whose devices share an attribute, or share none of its values."""
    wanted: dict[str, Any] = {"requests": list(requests)}
    constraints = [
        {kind: attribute}
        for kind, attribute in (("matchAttribute", match), ("distinctAttribute", distinct))
        if attribute
    ]
    if constraints:
        wanted["constraints"] = constraints
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaim",
        "metadata": {"name": name, "namespace": NAMESPACE, "uid": name},
        "spec": {"devices": wanted},
    }


class Author:
    """Writes random claims for what a node offers; the same ones for the same seed."""

    def __init__(self, seed: str, offered: Sequence[devices.Device]) -> None:
        self._draw = random.Random(seed)
        parts = [device for device in offered if attributes.PROFILE in device.attributes]
        sizes = {str(device.attributes[attributes.PROFILE]): device.capacity[attributes.MEMORY] for device in parts}
        self._profiles = sorted(sizes, key=lambda profile: (sizes[profile], profile))
        self._memories = sorted({size >> 20 for size in sizes.values()})
        self._gpus = len({device.address for device in offered})

    def claim(self, name: str) -> Body:
        """A claim. Small parts are asked for more often than large ones, and few claims are for more than one device."""
        kind = self._draw.choices(
            (
                self._one,
                self._some,
                self._by_memory,
                self._by_capacity,
                self._of_one_gpu,
                self._apart,
                self._list,
                self._gpu,
            ),
            (8, 3, 3, 2, 3, 2, 3, 3),
        )[0]
        return kind(name)

    def _profile(self) -> str:
        """One of the smaller half, mostly."""
        half = self._profiles[: (len(self._profiles) + 1) // 2]
        return self._draw.choice(half if self._draw.random() < 0.6 else self._profiles)

    def _one(self, name: str) -> Body:
        return claim(name, exactly("part", asked(of_profile(self._profile()))))

    def _some(self, name: str) -> Body:
        return claim(name, exactly("parts", asked(of_profile(self._profile()), count=self._draw.randint(2, 4))))

    def _by_memory(self, name: str) -> Body:
        return claim(name, exactly("part", asked(of_memory(self._draw.choice(self._memories)))))

    def _by_capacity(self, name: str) -> Body:
        return claim(name, exactly("part", asked(memory=self._draw.choice(self._memories))))

    def _of_one_gpu(self, name: str) -> Body:
        requests = [exactly(f"part-{index}", asked(of_profile(self._profile()))) for index in range(2)]
        return claim(name, *requests, match=PARENT)

    def _apart(self, name: str) -> Body:
        count = min(2, self._gpus)
        return claim(name, exactly("parts", asked(of_profile(self._profile()), count=count)), distinct=PARENT)

    def _list(self, name: str) -> Body:
        larger, smaller = self._draw.choice(self._profiles), self._profiles[0]
        alternatives = [asked(of_profile(larger)), asked(of_profile(smaller), count=2), asked(of=GPU_CLASS)]
        return claim(name, first_available("any", *alternatives))

    def _gpu(self, name: str) -> Body:
        return claim(name, exactly("gpu", asked(of=GPU_CLASS, count=self._draw.choice((1, 1, 2)))))
