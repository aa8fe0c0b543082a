# SPDX-License-Identifier: Apache-2.0
"""The groups of GPUs that claims can match on: NVLink island and clique, best pair, best quad. Pure.

Quads are a partition of a pool: an NVLink island; of the GPUs outside islands, those of one NUMA node (of one switch group
that a person described, else of one host bridge, where the NUMA node is unknown). Of all partitions into as many sets as the
pool allows the one with the best sum over all pairs of GPUs inside a set wins, compared in this order: pairs joined by
NVLink, NVLinks, PCIe switches above both, one host bridge, one NUMA node, one socket. Of several best ones the one wins
whose sets, each and all ordered by address, are lowest when compared address by address; GPUs left over are then the
highest. Pairs are the partition, by the same rule, of each quad, and of what the quads leave over: a pair that reached over
two quads would break both when it is used, which a hybrid mesh with its ring of double links offers.
So the result depends on nothing but the wiring. NVLinks are counted as wired: a link that goes down moves nobody into
another group.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence

from discovery import findings, model, nvlink
from discovery.address import PciAddress

_MAX_POOL = 64
"""No node has more GPUs in one pool; a larger one gets no pairs and quads, and a Finding."""

_MAX_STEPS = 4_000
"""Sets looked at in one search. Wirings of real machines take tens to hundreds; past this the best one so far is taken,
which is as deterministic but may not be the best of all."""

_DIGIT = 1 << 20
"""Radix of one criterion: more than any sum of one over a pool can be."""

_Best = tuple[int, tuple[tuple[int, ...], ...]]
"""Score and sets of a partition."""

Weights = Sequence[Sequence[int]]
"""How good it is for two members of a pool, by index, to share a set."""


def groups(
    gpus: Sequence[model.Gpu], wiring: nvlink.Wiring, found: findings.Findings
) -> Mapping[PciAddress, model.GpuGroups]:
    """The groups of every GPU, computed from all of them; see nvlink.py for those that do not answer.

    A GPU that answers and has no active NVLink is in no NVLink island, and in no pair or quad of one: its place in them
    stays empty, so that the names of the others do not change.
    """
    by_address = {gpu.address: gpu for gpu in gpus}
    islands = nvlink.islands(wiring.joined)
    in_island = {member for island in islands for member in island}
    domains = _named(islands)
    cliques = _named(clique for island in islands for clique in nvlink.cliques(island, wiring.joined))
    pairs: dict[PciAddress, PciAddress] = {}
    quads: dict[PciAddress, PciAddress] = {}
    for pool in (*islands, *_pools(gpu for gpu in gpus if gpu.address not in in_island)):
        if len(pool) > _MAX_POOL:
            found.warning("pool-too-large", pool[0], f"{len(pool)} GPUs in one pool: no pairs and quads are computed")
            continue
        weights = _weights([by_address[member].pci for member in pool], wiring)
        in_fours = best_partition(weights, 4)
        left_over = tuple(sorted(set(range(len(pool))).difference(*in_fours)))
        in_twos = [
            tuple(part[i] for i in two)
            for part in (*in_fours, left_over)
            for two in best_partition([[weights[a][b] for b in part] for a in part], 2)
        ]
        for parts, named in ((in_fours, quads), (in_twos, pairs)):
            named.update(_named(tuple(pool[i] for i in part) for part in parts))
    return {
        gpu.address: model.GpuGroups()
        if gpu.address in in_island and gpu.address in wiring.dark and gpu.state is model.GpuState.READY
        else model.GpuGroups(
            nvlink_domain=domains.get(gpu.address),
            nvlink_clique=cliques.get(gpu.address),
            aligned_pair=pairs.get(gpu.address),
            aligned_quad=quads.get(gpu.address),
        )
        for gpu in gpus
    }


def best_partition(weights: Weights, size: int) -> tuple[tuple[int, ...], ...]:
    """The best partition of `range(len(weights))` into sets of `size`, ordered; what is left over is in none."""
    return _Search(weights, size).best(tuple(range(len(weights))))[1]


class _Search:
    """Exhaustive search that looks at each situation once and stops where nothing better can come.

    Members that are interchangeable (equally near to everybody else) are taken lowest first: any other choice among them
    scores the same and loses by the tie rule. A situation is what is left, so the wirings of real machines, which are
    regular, have few.
    """

    def __init__(self, weights: Weights, size: int) -> None:
        self._weights = weights
        self._size = size
        self._kinds = _interchangeable(weights)
        self._potential = [
            sum(sorted((weight for j, weight in enumerate(row) if j != i), reverse=True)[: size - 1])
            for i, row in enumerate(weights)
        ]
        self._known: dict[tuple[int, ...], _Best] = {}
        self._steps = 0

    def best(self, left: tuple[int, ...]) -> _Best:
        """The best partition of `left`."""
        if len(left) < self._size:
            return 0, ()
        known = self._known.get(left)
        if known is not None:
            return known
        best: _Best | None = None
        ceiling = self._bound(left)
        first, rest = left[0], left[1:]
        for part in self._sets(first, rest):
            self._steps += 1
            if self._steps > _MAX_STEPS:
                greedy = self._greedy(left)
                return best if best is not None and best[0] >= greedy[0] else greedy
            gained = self._score(part)
            remaining = tuple(member for member in rest if member not in part)
            if best is None or gained + self._bound(remaining) > best[0]:
                score, sets = self.best(remaining)
                if best is None or gained + score > best[0]:
                    best = gained + score, (part, *sets)
                if best[0] == ceiling:
                    break
        if len(left) % self._size and all(self._kinds[member] != self._kinds[first] for member in rest):
            score, sets = self.best(rest)
            if best is None or score > best[0]:
                best = score, sets
        assert best is not None
        self._known[left] = best
        return best

    def _sets(self, first: int, rest: Sequence[int]) -> Iterator[tuple[int, ...]]:
        """Every set of `first` and members of `rest` that the tie rule could take, lowest first."""

        def grow(part: tuple[int, ...], start: int) -> Iterator[tuple[int, ...]]:
            if len(part) == self._size:
                yield part
                return
            passed: set[int] = set()
            for index in range(start, len(rest)):
                kind = self._kinds[rest[index]]
                if kind not in passed:
                    yield from grow((*part, rest[index]), index + 1)
                    passed.add(kind)

        return grow((first,), 0)

    def _greedy(self, members: Sequence[int]) -> _Best:
        """A good partition: the lowest member with the partners that add most, one after the other."""
        left = list(members)
        sets = []
        while len(left) >= self._size:
            part = [left.pop(0)]
            while len(part) < self._size:
                gains = [(sum(self._weights[member][other] for other in part), -member) for member in left]
                partner = -max(gains)[1]
                left.remove(partner)
                part.append(partner)
            sets.append(tuple(sorted(part)))
        return sum(self._score(part) for part in sets), tuple(sets)

    def _score(self, part: Sequence[int]) -> int:
        """Twice the sum over the pairs of a set: what each member has in it."""
        return 2 * sum(self._weights[a][b] for a, b in itertools.combinations(part, 2))

    def _bound(self, left: Sequence[int]) -> int:
        """No partition of `left` scores more: every member has its best partners, and the poorest are left over."""
        return sum(sorted(self._potential[member] for member in left)[len(left) % self._size :])


def _interchangeable(weights: Weights) -> list[int]:
    """For each member the lowest member that is interchangeable with it."""
    kinds: list[int] = []
    for j, row in enumerate(weights):
        kinds.append(
            next(
                (
                    i
                    for i in range(j)
                    if kinds[i] == i and all(row[k] == weights[i][k] for k in range(len(weights)) if k not in (i, j))
                ),
                j,
            )
        )
    return kinds


def _weights(members: Sequence[model.PciFunction], wiring: nvlink.Wiring) -> list[list[int]]:
    weights = [[0] * len(members) for _ in members]
    switches = [frozenset(member.switches) for member in members]
    for (i, a), (j, b) in itertools.combinations(enumerate(members), 2):
        links = wiring.wired.get((a.address, b.address), 0)
        criteria = (
            int(links > 0),
            links,
            len(switches[i] & switches[j]),
            int(a.host_bridge is not None and a.host_bridge == b.host_bridge),
            int(a.numa_node is not None and a.numa_node == b.numa_node),
            int(a.cpu_socket is not None and a.cpu_socket == b.cpu_socket),
        )
        value = 0
        for criterion in criteria:
            value = value * _DIGIT + criterion
        weights[i][j] = weights[j][i] = value
    return weights


def _pools(gpus: Iterator[model.Gpu]) -> list[tuple[PciAddress, ...]]:
    """The pools of GPUs without NVLink; what shares nothing that is known is in no pool."""
    pools: dict[tuple[str, object], list[PciAddress]] = {}
    for gpu in gpus:
        pci = gpu.pci
        if pci.numa_node is not None:
            key: tuple[str, object] = ("numa", pci.numa_node)
        elif pci.switches and pci.switch_source is model.Provenance.OVERLAY:
            key = ("switch", pci.switches[-1])
        elif pci.host_bridge is not None:
            key = ("bridge", pci.host_bridge)
        else:
            continue
        pools.setdefault(key, []).append(gpu.address)
    return [tuple(sorted(members)) for members in pools.values()]


def _named(sets: Iterator[tuple[PciAddress, ...]] | Sequence[tuple[PciAddress, ...]]) -> dict[PciAddress, PciAddress]:
    """Each member's group: the lowest address in its set."""
    return {member: min(members) for members in sets for member in members}
