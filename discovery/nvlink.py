# SPDX-License-Identifier: Apache-2.0
"""Which GPUs NVLink joins: link counts of every pair, islands, all-to-all cliques. Pure.

Two things are kept apart. *Active* links are what works now between GPUs that answer. *Wired* links are what is in place,
as far as anybody can say: also links that are down, and those of a GPU that cannot be asked (lost, unbound, bound to
vfio-pci). Groups are named by their lowest address, so the groups of healthy GPUs must not change when one of them dies.
What can be known about a GPU that does not answer:
- its peers still name it as the far end of their own links, also one that has no others and so no active link any more;
- if GPUs of the same model (PCI device and subsystem) have links to NVSwitches, it sits on the same fabric, because boards
  of that kind wire every GPU alike. This is an inference, and said in a Finding.
What cannot: its links to peers that do not name the far end of a link that is down. That is a Finding too.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from discovery import findings, model
from discovery.address import PciAddress

Pair = tuple[PciAddress, PciAddress]
"""Two GPUs, lower address first."""

_MAX_CLIQUE_STEPS = 20_000
"""Hybrid meshes have 8 GPUs and take tens of steps; past this a made-up mesh gets cliques that are valid, not largest."""

_MAX_SEARCHED = 64
"""No node has an NVLink island of more GPUs; larger ones take the first clique that comes."""

_Fabric = tuple[str, int] | None
"""Cluster UUID and clique of a fabric; None where they are not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wiring:
    """The NVLinks of a node. Pairs without any are not in the mappings."""

    active: Mapping[Pair, int] = field(default_factory=dict)
    wired: Mapping[Pair, int] = field(default_factory=dict)
    joined: frozenset[Pair] = frozenset()
    """Pairs that belong together: active links where both ends answer, wired links where one cannot be asked."""
    dark: frozenset[PciAddress] = frozenset()
    """GPUs whose own links say nothing: they cannot be asked, or none of their links is active though a far end answers."""


@dataclass(slots=True)
class _Ends:
    """Links of one GPU, counted by far end."""

    direct_active: dict[PciAddress, int] = field(default_factory=dict)
    direct_wired: dict[PciAddress, int] = field(default_factory=dict)
    switch_active: int = 0
    switch_wired: int = 0


def wiring(gpus: Sequence[model.Gpu], found: findings.Findings) -> Wiring:
    """The wiring between GPUs, from what each says about its own links."""
    ordered = sorted(gpus, key=lambda gpu: gpu.address)
    ends = {gpu.address: _ends(gpu, {other.address for other in ordered}) for gpu in ordered}
    silent = {gpu.address for gpu in ordered if gpu.state is not model.GpuState.READY}
    dark = silent | {
        gpu.address
        for gpu in ordered
        if gpu.nvlinks and not any(link.active for link in gpu.nvlinks) and not _is_left_alone(gpu, silent)
    }
    fabrics = _fabrics(ordered, ends, dark, found)
    active: dict[Pair, int] = {}
    wired: dict[Pair, int] = {}
    joined: set[Pair] = set()
    for a, b in itertools.combinations((gpu.address for gpu in ordered), 2):
        now = in_place = 0
        if ends[a].direct_wired or ends[b].direct_wired:
            ways = ((a, b), (b, a))
            now = min((ends[near].direct_active.get(far, 0) for near, far in ways if near not in silent), default=0)
            in_place = min((ends[near].direct_wired.get(far, 0) for near, far in ways if near not in dark), default=0)
        if a in fabrics and b in fabrics and fabrics[a] == fabrics[b]:
            now += min(ends[a].switch_active, ends[b].switch_active)
            in_place += min(ends[a].switch_wired, ends[b].switch_wired)
        if now:
            active[a, b] = now
        if in_place:
            wired[a, b] = in_place
        if now or (in_place and (a in dark or b in dark)):
            joined.add((a, b))
    return Wiring(active=active, wired=wired, joined=frozenset(joined), dark=frozenset(dark))


def islands(joined: Iterable[Pair]) -> tuple[tuple[PciAddress, ...], ...]:
    """The connected sets of two and more, members and sets ordered by address."""
    lowest: dict[PciAddress, PciAddress] = {}

    def find(member: PciAddress) -> PciAddress:
        lowest.setdefault(member, member)
        while lowest[member] != member:
            lowest[member] = lowest[lowest[member]]
            member = lowest[member]
        return member

    for a, b in joined:
        one, other = find(a), find(b)
        lowest[max(one, other)] = min(one, other)
    sets: dict[PciAddress, list[PciAddress]] = {}
    for member in sorted(lowest):
        sets.setdefault(find(member), []).append(member)
    return tuple(tuple(members) for _, members in sorted(sets.items()))


def cliques(island: Sequence[PciAddress], joined: Iterable[Pair]) -> tuple[tuple[PciAddress, ...], ...]:
    """A partition of an island into all-to-all sets, ordered by address: the largest set that there is, then the largest
    of what is left, and so on; of several equally large ones the one that is lowest when compared address by address. A
    GPU that is left over is a set of its own.
    """
    members = sorted(island)
    index = {member: i for i, member in enumerate(members)}
    near = [0] * len(members)
    for a, b in joined:
        if a in index and b in index:
            near[index[a]] |= 1 << index[b]
            near[index[b]] |= 1 << index[a]
    left = (1 << len(members)) - 1
    found = []
    while left:
        clique = _largest_clique(left, near)
        found.append(tuple(member for i, member in enumerate(members) if clique >> i & 1))
        left &= ~clique
    return tuple(sorted(found))


def _largest_clique(among: int, near: Sequence[int]) -> int:
    """The largest clique inside a set of vertices, as bits; the lowest of several. Depth first from the lowest vertex, so
    that the first of a size is the lowest of that size.
    """
    best = 0
    steps = 0
    if among.bit_count() > _MAX_SEARCHED:
        while among:
            vertex = among & -among
            best |= vertex
            among &= near[vertex.bit_length() - 1]
        return best

    def extend(clique: int, candidates: int) -> None:
        nonlocal best, steps
        if not candidates:
            if clique.bit_count() > best.bit_count():
                best = clique
            return
        while (
            candidates and clique.bit_count() + candidates.bit_count() > best.bit_count() and steps < _MAX_CLIQUE_STEPS
        ):
            steps += 1
            vertex = candidates & -candidates
            candidates ^= vertex
            extend(clique | vertex, candidates & near[vertex.bit_length() - 1])

    extend(0, among)
    return best or among & -among


def _is_left_alone(gpu: model.Gpu, silent: set[PciAddress]) -> bool:
    """Whether a GPU without an active link was joined to nothing but GPUs that cannot be asked: its links are down because of
    them, as those of one half of a bridged pair are, and what it says of them stays true.
    """
    remotes = {link.remote for link in gpu.nvlinks if link.remote is not None}
    to_gpus = all(link.remote_kind in (None, model.RemoteKind.GPU) for link in gpu.nvlinks)
    return to_gpus and bool(remotes) and remotes <= silent


def _ends(gpu: model.Gpu, gpus: set[PciAddress]) -> _Ends:
    """Where the links of a GPU go. A link whose far end is not told counts as a switch link, down, if the GPU has any
    link to a switch: boards do not mix the two.
    """
    ends = _Ends()
    untold = 0
    for link in gpu.nvlinks:
        remote = link.remote
        if remote is not None and remote in gpus and remote != gpu.address:
            ends.direct_wired[remote] = ends.direct_wired.get(remote, 0) + 1
            if link.active:
                ends.direct_active[remote] = ends.direct_active.get(remote, 0) + 1
        elif link.remote_kind is model.RemoteKind.SWITCH:
            ends.switch_wired += 1
            ends.switch_active += link.active
        elif link.remote_kind is None and not link.active:
            untold += 1
    if ends.switch_wired:
        ends.switch_wired += untold
    return ends


def _fabrics(
    gpus: Sequence[model.Gpu], ends: Mapping[PciAddress, _Ends], dark: set[PciAddress], found: findings.Findings
) -> dict[PciAddress, _Fabric]:
    """The NVSwitch fabric of each GPU that sits on one. GPUs that cannot be asked join that of their like, and get the
    link count of their like in `ends`.

    A fabric is told apart by cluster UUID and clique. Where they are not known (no fabric registration, or still under
    way) and all known ones agree, there is one fabric.
    """
    told = {
        gpu.address: (gpu.fabric.cluster_uuid, gpu.fabric.clique_id)
        for gpu in gpus
        if gpu.fabric is not None and gpu.fabric.cluster_uuid is not None and gpu.fabric.clique_id is not None
    }
    on_switch = [gpu for gpu in gpus if gpu.address not in dark and ends[gpu.address].switch_active]
    several = len({told[gpu.address] for gpu in on_switch if gpu.address in told}) > 1
    fabrics: dict[PciAddress, _Fabric] = {gpu.address: told.get(gpu.address) if several else None for gpu in on_switch}
    by_model: dict[tuple[int | None, ...], list[PciAddress]] = {}
    for gpu in on_switch:
        by_model.setdefault(board(gpu), []).append(gpu.address)
    linked = {board(gpu) for gpu in gpus if gpu.address not in dark and gpu.nvlinks}
    for gpu in gpus:
        if gpu.address not in dark:
            continue
        like = by_model.get(board(gpu), [])
        joins = {fabrics[other] for other in like}
        ready = gpu.state is model.GpuState.READY
        if len(joins) == 1:
            fabrics[gpu.address] = joins.pop()
            ends[gpu.address].switch_wired = max(ends[other].switch_wired for other in like)
            found.info(
                "nvlink-inferred",
                gpu.address,
                f"{'none of its NVLinks is active' if ready else f'its NVLinks cannot be read ({gpu.state})'}; for the "
                f"names of groups it is counted to the NVSwitch fabric of {like[0]}, which is the same model",
            )
        elif not ready and board(gpu) in linked:
            found.info(
                "nvlink-unknown",
                gpu.address,
                f"its NVLinks cannot be read ({gpu.state}), and only links that its peers name are known; if it is the "
                "lowest address of its NVLink group, the group has another name until it answers again",
            )
    return fabrics


def board(gpu: model.Gpu) -> tuple[int | None, ...]:
    """The model of a GPU, as its PCI identity tells it: equal ones are wired alike."""
    pci = gpu.pci
    return (pci.vendor_id, pci.device_id, pci.subsystem_vendor_id, pci.subsystem_device_id)
