# SPDX-License-Identifier: Apache-2.0
"""Which NIC belongs to which GPU, and to which rail. Pure.

Only PCI functions decide: link state changes, and interfaces and RDMA devices move into pods, but a pairing that others
match on has to stay. Candidates are physical functions; one with a Data Direct function is as near as the nearer of the two,
since that is what reads and writes the memory of a GPU. The nearest path class wins and every NIC of that class is a tie.
Of the ties one is chosen by this rule: NICs are given out so that as many GPUs as possible have a device of their own
(the functions of one card share its link, so a card counts once); then a second GPU goes to each card, and so on. Inside
a card the least used function wins. Among cards of one class those that share more bridges with a GPU come first, as the
path class does not tell the halves of a switch apart; then those whose PCIe link can carry more, so that the port of the
mainboard is nobody's NIC while a faster one is as near. Pairs of a GPU and a card are made in that order, better ones before
others. GPUs and NICs come in the order of their addresses, so a free choice gives the first GPU the first NIC. A GPU takes
another's card only if that one has another card of its class that is not more used.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from discovery import findings, model, pcie, topology
from discovery.address import HostBridge, PciAddress

_Card = tuple[int, int, int]
"""Domain, bus and device: the functions of one card."""

_BELOW_A_HOST_BRIDGE = (model.PathClass.PIX, model.PathClass.PXB, model.PathClass.PHB)

_Cards = Mapping[PciAddress, Sequence[_Card]]
"""Cards by GPU."""

_Merit = tuple[int, float]
"""Bridges shared, and what the link can carry."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pairings:
    """GPUs with their NIC, and NICs with their rail."""

    gpus: Mapping[PciAddress, model.NicPairing]
    rails: Mapping[PciAddress, int]
    rail_source: model.Provenance = model.Provenance.SYSFS


@dataclass(frozen=True, slots=True, kw_only=True)
class _Near:
    """The NICs nearest to a GPU."""

    distance: model.PathClass
    ties: tuple[PciAddress, ...]
    data_direct: Mapping[PciAddress, PciAddress]
    """The Data Direct functions of those ties that are near by theirs."""
    merit: Mapping[PciAddress, _Merit]
    """Which of the ties come first, the highest of all."""


def pair(
    gpus: Sequence[model.Gpu],
    nics: Sequence[model.Nic],
    ports: topology.Ports,
    rails: Mapping[PciAddress, int],
    found: findings.Findings,
) -> Pairings:
    """The NIC of every GPU that has one within a known distance.

    Rails come from `rails` (NIC address to rail) if it names any, else they count the paired NICs in the order of their
    addresses, which gives equal nodes equal rails.
    """
    ordered = sorted(gpus, key=lambda gpu: gpu.address)
    candidates = sorted((nic for nic in nics if nic.pci.physical_function is None), key=lambda nic: nic.address)
    below = _by_host_bridge(candidates)
    near = {
        gpu.address: nearest
        for gpu in ordered
        if (nearest := _nearest(gpu, below.get(gpu.pci.host_bridge, ()), candidates, ports)) is not None
    }
    chosen = _share_out(near)
    by_address = {nic.address: nic for nic in nics}
    for address in sorted(rails):
        if address not in by_address:
            found.warning(
                "rail-without-nic", address, f"the configuration gives it rail {rails[address]}: no such NIC here"
            )
    numbers = dict(rails) or {address: rail for rail, address in enumerate(sorted(set(chosen.values())))}
    return Pairings(
        gpus={
            gpu: model.NicPairing(
                address=nic,
                distance=near[gpu].distance,
                name=by_address[nic].name,
                ties=near[gpu].ties,
                rail=numbers.get(nic),
                data_direct=near[gpu].data_direct.get(nic),
            )
            for gpu, nic in chosen.items()
        },
        rails={address: rail for address, rail in numbers.items() if address in by_address},
        rail_source=model.Provenance.OVERLAY if rails else model.Provenance.SYSFS,
    )


def distance(
    gpu: model.PciFunction, nic: model.Nic, ports: topology.Ports
) -> tuple[model.PathClass, model.PciFunction | None]:
    """How far a NIC is from a GPU, and its Data Direct function if that is what is so near."""
    own = topology.path_class(gpu, nic.pci, ports)
    if nic.data_direct is not None:
        other = topology.path_class(gpu, nic.data_direct, ports)
        if topology.NEARNESS[other] < topology.NEARNESS[own]:
            return other, nic.data_direct
    return own, None


def _nearest(
    gpu: model.Gpu, below: Sequence[model.Nic], nics: Sequence[model.Nic], ports: topology.Ports
) -> _Near | None:
    """The NICs nearest to a GPU; `below` are those of its host bridge, which are looked at first."""
    found = _among(gpu, below, ports)
    if found is None or found.distance not in _BELOW_A_HOST_BRIDGE:
        found = _among(gpu, nics, ports)
    return found


def _among(gpu: model.Gpu, nics: Sequence[model.Nic], ports: topology.Ports) -> _Near | None:
    distances = [(*distance(gpu.pci, nic, ports), nic) for nic in nics]
    known = [item for item in distances if item[0] is not model.PathClass.UNKNOWN]
    if not known:
        return None
    nearest = min((path_class for path_class, _, _ in known), key=topology.NEARNESS.__getitem__)
    ties = [(nic, by) for path_class, by, nic in known if path_class is nearest]
    return _Near(
        distance=nearest,
        ties=tuple(nic.address for nic, _ in ties),
        data_direct={nic.address: by.address for nic, by in ties if by is not None},
        merit={nic.address: (_shared(gpu.pci, by or nic.pci), _capacity(nic.pci.link)) for nic, by in ties},
    )


def _by_host_bridge(nics: Sequence[model.Nic]) -> Mapping[HostBridge | None, Sequence[model.Nic]]:
    """The NICs that are below each host bridge, themselves or with their Data Direct function; of a large machine few are below
    that of a GPU, and no other is nearer than over the CPU. None are told where an overlay has groups, which reach over
    host bridges.
    """
    below: dict[HostBridge | None, list[model.Nic]] = {}
    for nic in nics:
        functions = [pci for pci in (nic.pci, nic.data_direct) if pci is not None]
        if any(pci.switch_source is model.Provenance.OVERLAY for pci in functions):
            return {}
        for bridge in {pci.host_bridge for pci in functions}:
            below.setdefault(bridge, []).append(nic)
    return below


def _shared(a: model.PciFunction, b: model.PciFunction) -> int:
    """The bridges above both; of two that a person put into switch groups, the groups that hold both."""
    if a.switch_source is b.switch_source is model.Provenance.OVERLAY:
        return len(set(a.switches).intersection(b.switches))
    if a.host_bridge is None or a.host_bridge != b.host_bridge:
        return 0
    return pcie.shared(a, b)


def _capacity(link: model.PcieLink | None) -> float:
    """Lanes times the speed of each that a link can have; 0 where that is not known, as in many virtual machines."""
    return (link.max_width or 0) * (link.max_speed_gts or 0.0) if link is not None else 0.0


def _share_out(near: Mapping[PciAddress, _Near]) -> dict[PciAddress, PciAddress]:
    """The NIC of every GPU: rounds of matching GPUs and cards, each round giving every card one GPU at most."""
    tiers = _tiers(near)
    used: dict[PciAddress, int] = {}
    chosen: dict[PciAddress, PciAddress] = {}
    waiting = list(near)
    while waiting:
        taken = _match(waiting, tiers)
        for card, gpu in sorted(taken.items(), key=lambda item: item[1]):
            functions = [nic for nic in near[gpu].ties if _card(nic) == card]
            nic = min(functions, key=lambda function: (used.get(function, 0), function))
            used[nic] = used.get(nic, 0) + 1
            chosen[gpu] = nic
        waiting = [gpu for gpu in waiting if gpu not in chosen]
    return chosen


def _tiers(near: Mapping[PciAddress, _Near]) -> list[_Cards]:
    """The cards of each GPU: first only those of the highest merit, at the end all of its class."""
    merits = sorted({merit for nearest in near.values() for merit in nearest.merit.values()}, reverse=True)
    return [
        {
            gpu: list(dict.fromkeys(_card(nic) for nic in nearest.ties if nearest.merit[nic] >= merit))
            for gpu, nearest in near.items()
        }
        for merit in merits
    ]


def _match(gpus: Sequence[PciAddress], tiers: Sequence[_Cards]) -> dict[_Card, PciAddress]:
    """A matching of as many GPUs as possible, by shortest augmenting paths; nearer cards, earlier GPUs, earlier cards first."""
    taken: dict[_Card, PciAddress] = {}
    held: dict[PciAddress, _Card] = {}
    for cards in tiers:
        for gpu in gpus:
            if gpu not in held:
                _give(gpu, cards, taken, held)
    return taken


def _give(gpu: PciAddress, cards: _Cards, taken: dict[_Card, PciAddress], held: dict[PciAddress, _Card]) -> None:
    """Gives a GPU a card if one is free, or becomes free when others change theirs."""
    reached: dict[_Card, PciAddress] = {}
    queue = [gpu]
    free: _Card | None = None
    for holder in queue:
        for card in cards[holder]:
            if card in reached:
                continue
            reached[card] = holder
            if card not in taken:
                free = card
                break
            queue.append(taken[card])
        if free is not None:
            break
    while free is not None:
        holder = reached[free]
        taken[free] = holder
        held[holder], free = free, held.get(holder)


def _card(nic: PciAddress) -> _Card:
    return (nic.domain, nic.bus, nic.device)


def with_rails(nics: Sequence[model.Nic], pairings: Pairings) -> tuple[model.Nic, ...]:
    """The NICs, each with its rail if it has one."""
    return tuple(
        replace(nic, rail=pairings.rails[nic.address], rail_source=pairings.rail_source)
        if nic.address in pairings.rails
        else nic
        for nic in nics
    )
