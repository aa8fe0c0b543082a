# SPDX-License-Identifier: Apache-2.0
"""Claims that come and go: random sequences that can be repeated, and what each kind of claim asks for. Pure."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from driver.publish import attributes

WEIGHTS: Mapping[int, int] = {1: 8, 2: 4, 4: 2, 8: 1}
"""How often a claim asks for so many GPUs. Each size asks for the same number of GPUs in all."""

LOAD = 0.7
"""GPUs that the claims of a sequence would hold on average if all of them fitted, as a part of the node's."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """A claim: how many GPUs it asks for, whether its author wrote a constraint (of claims of a mixed kind), and how many claims
    later it ends.
    """

    size: int
    careful: bool
    lifetime: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A way to write claims: the attribute that the GPUs of a claim of so many must share, if any.

    `half`: only every second author writes it.
    """

    name: str
    matches: Mapping[int, str]
    half: bool = False

    def attribute(self, arrival: Arrival) -> str | None:
        """What a claim matches on."""
        return self.matches.get(arrival.size) if arrival.careful or not self.half else None


ALIGNED: Mapping[int, str] = {2: attributes.ALIGNED_PAIR, 4: attributes.ALIGNED_QUAD}
KINDS = (
    Kind(name="no constraint", matches={}),
    Kind(name="pairs and quads", matches=ALIGNED),
    Kind(name="half of them", matches=ALIGNED, half=True),
    Kind(name="one island", matches=dict.fromkeys((2, 4, 8), attributes.NVLINK_DOMAIN)),
    Kind(name="one NUMA node", matches=dict.fromkeys((2, 4, 8), attributes.NUMA_NODE)),
    Kind(name="one switch", matches=dict.fromkeys((2, 4, 8), attributes.PCIE_SWITCH)),
)


def sequence(seed: str, *, gpus: int, claims: int) -> list[Arrival]:
    """A random sequence for a node of so many GPUs, the same for the same seed. No claim asks for more than all of them."""
    source = random.Random(seed)
    sizes = [size for size in WEIGHTS if size <= gpus]
    weights = [WEIGHTS[size] for size in sizes]
    mean = LOAD * gpus * sum(weights) / sum(size * weight for size, weight in zip(sizes, weights, strict=True))
    return [
        Arrival(
            size=source.choices(sizes, weights)[0],
            careful=source.random() < 0.5,
            lifetime=1 + int(source.expovariate(1 / mean)),
        )
        for _ in range(claims)
    ]


def applicable(kind: Kind, largest: Mapping[str, int]) -> Kind | None:
    """The kind as it can be asked of a node whose largest group by each attribute has so many GPUs: what never fits is asked
    without a constraint. None where nothing of it is left.
    """
    matches = {size: name for size, name in kind.matches.items() if largest.get(name, 0) >= size}
    if kind.matches and not matches:
        return None
    return Kind(name=kind.name, matches=matches, half=kind.half)


def claim(*, size: int, attribute: str | None, driver: str) -> dict[str, object]:
    """A ResourceClaim as the API server stores it."""
    devices: dict[str, object] = {
        "requests": [
            {
                "name": "gpu",
                "exactly": {"deviceClassName": driver, "allocationMode": "ExactCount", "count": size},
            }
        ]
    }
    if attribute is not None:
        devices["constraints"] = [{"matchAttribute": attribute if "/" in attribute else f"{driver}/{attribute}"}]
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaim",
        "metadata": {"name": "claim", "namespace": "default", "uid": "claim"},
        "spec": {"devices": devices},
    }


def largest_groups(groups: Mapping[str, Sequence[frozenset[str]]]) -> dict[str, int]:
    """How many devices the largest group by each attribute has."""
    return {name: max((len(group) for group in sets), default=0) for name, sets in groups.items()}
