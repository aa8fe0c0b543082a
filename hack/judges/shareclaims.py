# SPDX-License-Identifier: Apache-2.0
"""Claims for shares of GPUs and for whole ones, as people write them and as the API server stores them. Pure."""

from __future__ import annotations

import random

from hack.judges import migclaims, nodes

SHARE_CLASS = "share.nearfield.dev"
CLASSES: tuple[migclaims.Body, ...] = (
    *migclaims.CLASSES,
    {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "DeviceClass",
        "metadata": {"name": SHARE_CLASS},
        "spec": {
            "selectors": [
                {"cel": {"expression": f'device.driver == "{nodes.DRIVER}" && device.allowMultipleAllocations'}}
            ]
        },
    },
)

_GIB = 1 << 30
_ODD = ("1", "500M", "1536Mi", "1Ki", "7.5Gi")
"""Amounts that no step divides: the scheduler rounds them up."""


def asked(*, memory: str | None = None, compute: int | None = None, count: int = 1) -> migclaims.Body:
    """What is asked of a share; what is not given is what the device charges by default."""
    requests = {
        name: value
        for name, value in (("memory", memory), ("compute", None if compute is None else str(compute)))
        if value is not None
    }
    found = migclaims.asked(of=SHARE_CLASS, count=count)
    return found | {"capacity": {"requests": requests}} if requests else found


class Author:
    """Writes random claims for GPUs of so many bytes; the same ones for the same seed."""

    def __init__(self, seed: str, memory: int) -> None:
        self._draw = random.Random(seed)
        self._gibibytes = max(1, memory // _GIB)

    def claim(self, name: str) -> migclaims.Body:
        """A claim. Small shares are asked for more often than large ones, and few claims are for more than one."""
        kind = self._draw.choices(
            (self._share, self._by_memory, self._odd, self._whole, self._several, self._apart, self._or_else),
            weights=(40, 15, 10, 8, 12, 7, 8),
        )[0]
        return kind(name)

    def _memory(self) -> str:
        return f"{1 + int(self._draw.random() ** 2 * self._gibibytes)}Gi"

    def _compute(self) -> int:
        return self._draw.choice((1, 5, 5, 10, 10, 20, 25, 33, 50, 75, 100))

    def _share(self, name: str) -> migclaims.Body:
        return migclaims.claim(name, migclaims.exactly("share", asked(memory=self._memory(), compute=self._compute())))

    def _by_memory(self, name: str) -> migclaims.Body:
        return migclaims.claim(name, migclaims.exactly("share", asked(memory=self._memory())))

    def _odd(self, name: str) -> migclaims.Body:
        memory = self._draw.choice(_ODD)
        return migclaims.claim(name, migclaims.exactly("share", asked(memory=memory, compute=self._compute())))

    def _whole(self, name: str) -> migclaims.Body:
        return migclaims.claim(name, migclaims.exactly("gpu", migclaims.asked(of=migclaims.GPU_CLASS)))

    def _several(self, name: str) -> migclaims.Body:
        """Shares by requests of their own, which may come from one device."""
        requests = (
            migclaims.exactly(f"share-{number}", asked(memory=self._memory(), compute=5))
            for number in range(self._draw.randint(2, 4))
        )
        return migclaims.claim(name, *requests)

    def _apart(self, name: str) -> migclaims.Body:
        """Shares by one request, which come from as many devices."""
        return migclaims.claim(name, migclaims.exactly("shares", asked(memory=self._memory(), compute=10, count=2)))

    def _or_else(self, name: str) -> migclaims.Body:
        share = asked(memory=self._memory(), compute=50)
        return migclaims.claim(
            name, migclaims.first_available("either", share, migclaims.asked(of=migclaims.GPU_CLASS))
        )
