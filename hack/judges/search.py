# SPDX-License-Identifier: Apache-2.0
"""Whether there is a better order than ours: hill climbing from several orders, by swapping two devices and by moving one.

It shows what can be found, and proves nothing about what cannot. Orders that first fit cannot tell apart are tried once.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hack.judges import contest, nodes, workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The best order that was found, how much better than ours it is (mean over the measures, a part of ours), and how many
    orders were tried.
    """

    order: nodes.Order
    gain: float
    tried: int


def search(
    node: nodes.Node,
    allocator: contest.Allocator,
    *,
    kinds: Sequence[workload.Kind],
    sequences: Sequence[Sequence[workload.Arrival]],
    measures: Sequence[str],
    starts: int,
) -> Found:
    """Climbs from our order, from that by address and from so many random ones."""
    gains: dict[tuple[tuple[int, ...], ...], float] = {}

    def outcome(order: nodes.Order) -> contest.Outcome:
        offered = contest.Offered(node, order, allocator)
        offered.open()
        return contest.mean(contest.play(offered, kind, arrivals) for kind in kinds for arrivals in sequences)

    ours = outcome(node.published())

    def gain(order: nodes.Order) -> float:
        shape = node.shape(order, contest.MATCHED)
        if shape not in gains:
            found = outcome(order)
            gains[shape] = sum(contest.gain(found, ours, measure) for measure in measures) / len(measures)
        return gains[shape]

    def climb(order: nodes.Order) -> nodes.Order:
        best = order
        for other in _neighbours(order):
            if gain(other) > gain(best):
                best = other
        return best if best == order else climb(best)

    peaks = [
        climb(start)
        for start in (node.published(), node.by_address(), *(node.shuffled(number) for number in range(starts)))
    ]
    best = max(peaks, key=gain)
    return Found(order=best, gain=gain(best), tried=len(gains))


def _neighbours(order: nodes.Order) -> Iterator[nodes.Order]:
    for i, j in itertools.combinations(range(len(order)), 2):
        swapped, moved = list(order), list(order)
        swapped[i], swapped[j] = swapped[j], swapped[i]
        moved.insert(i, moved.pop(j))
        yield tuple(swapped)
        yield tuple(moved)
