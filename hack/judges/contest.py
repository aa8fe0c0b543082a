# SPDX-License-Identifier: Apache-2.0
"""The same claims under several orders of the same devices: what each order breaks, and what it leaves for later.

A group (pair, quad, island) is *broken* while a claim holds some of its GPUs and not all: whoever needs the whole group waits for
a claim that did not. Counted after each claim that came, and averaged over a sequence. *Aligned* is how many claims for an aligned
quad would fit then, one after the other. *Refused* is the part of the claims that did not fit, and went away.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol

from driver.publish import attributes
from hack.judges import nodes, workload

LEVELS: Mapping[str, str] = {
    "pairs": attributes.ALIGNED_PAIR,
    "quads": attributes.ALIGNED_QUAD,
    "islands": attributes.NVLINK_DOMAIN,
}
MATCHED = (*LEVELS.values(), attributes.NUMA_NODE, attributes.PCIE_SWITCH)
"""All that claims match on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Means over a sequence, or over several: broken groups, claims for an aligned quad that would fit, claims refused."""

    pairs: float
    quads: float
    islands: float
    aligned: float
    refused: float


class Allocator(Protocol):
    """Who gets what, as `upstream.Allocator` answers it."""

    def load(self, slices: Sequence[Mapping[str, Any]], classes: Sequence[Mapping[str, Any]]) -> None:
        """From now on the node has these slices."""

    def fit(self, claim: Mapping[str, Any], held: Iterable[str]) -> tuple[str, ...] | None:
        """The names of the devices that the claim would get while these are held; None where it does not fit."""


class Offered:
    """A node whose devices are offered in one order. Answers are upstream's; what was asked before is remembered, as an answer
    depends on nothing but the order, the claim and what is held.
    """

    def __init__(self, node: nodes.Node, order: nodes.Order, allocator: Allocator) -> None:
        self.node = node
        self._slices = node.slices(order)
        self._allocator = allocator
        self._fits: dict[tuple[int, str | None, frozenset[str]], tuple[str, ...] | None] = {}

    def open(self) -> None:
        """From now on the allocator answers for this order."""
        self._allocator.load(self._slices, [nodes.CLASS])

    def fit(self, size: int, attribute: str | None, held: frozenset[str]) -> tuple[str, ...] | None:
        """The devices that a claim gets."""
        key = (size, attribute, held)
        if key not in self._fits:
            asked = workload.claim(size=size, attribute=attribute, driver=nodes.DRIVER)
            self._fits[key] = self._allocator.fit(asked, held)
        return self._fits[key]

    def aligned(self, held: frozenset[str]) -> int:
        """How many claims for an aligned quad would fit, one after the other."""
        count = 0
        while (found := self.fit(4, attributes.ALIGNED_QUAD, held)) is not None:
            held |= frozenset(found)
            count += 1
        return count


def play(offered: Offered, kind: workload.Kind, arrivals: Sequence[workload.Arrival]) -> Outcome:
    """One sequence."""
    groups = {level: offered.node.groups(attribute) for level, attribute in LEVELS.items()}
    running: list[tuple[int, frozenset[str]]] = []
    totals = dict.fromkeys((*LEVELS, "aligned", "refused"), 0)
    for now, arrival in enumerate(arrivals):
        running = [(end, devices) for end, devices in running if end > now]
        held = frozenset().union(*(devices for _, devices in running))
        found = offered.fit(arrival.size, kind.attribute(arrival), held)
        if found is None:
            totals["refused"] += 1
        else:
            running.append((now + arrival.lifetime, frozenset(found)))
            held |= frozenset(found)
        for level, sets in groups.items():
            totals[level] += sum(any(0 < len(group & devices) < len(group) for _, devices in running) for group in sets)
        totals["aligned"] += offered.aligned(held)
    return Outcome(**{name: total / len(arrivals) for name, total in totals.items()})


def mean(outcomes: Iterable[Outcome]) -> Outcome:
    """Of sequences of the same length."""
    listed = list(outcomes)
    return Outcome(
        **{field.name: sum(getattr(one, field.name) for one in listed) / len(listed) for field in fields(Outcome)}
    )


def gain(one: Outcome, other: Outcome, measure: str) -> float:
    """By which part of the other's figure one is better; fewer broken groups are, and more claims that fit."""
    mine, theirs = float(getattr(one, measure)), float(getattr(other, measure))
    difference = mine - theirs if measure == "aligned" else theirs - mine
    if difference == 0:
        return 0.0
    return difference / theirs if theirs else float("inf") if difference > 0 else float("-inf")
