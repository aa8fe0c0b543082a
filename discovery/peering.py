# SPDX-License-Identifier: Apache-2.0
"""Whether traffic between two functions stays below the host bridge (peer-to-peer), or access control services (ACS, PCI
Express base specification 6.12) send it up to the root complex and back. Pure.

What decides is the switch where the path turns: a request that comes in at one of its downstream ports goes over to the
other if the first does not redirect. Ports further down on the way pass it upwards anyway, whatever they redirect, and root
ports are not reached. A request is redirected by the port behind which its sender is, so the two directions may differ, as
they do by intention with ConnectX-8 Data Direct. ATS-translated requests, which a port may let pass (Direct Translated P2P),
come from devices that are passed through to virtual machines, where this port is not seen; they are left out of account.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from discovery import findings, model, pcie
from discovery.address import PciAddress

Bridges = Mapping[PciAddress, model.Bridge]
"""Bridges by address."""


def direct(a: model.PciFunction, b: model.PciFunction, bridges: Bridges) -> bool | None:
    """Whether requests stay below the host bridge both ways; None where that is not known. The same whichever comes first."""
    ways = (reaches(a, b, bridges), reaches(b, a, bridges))
    if False in ways:
        return False
    return None if None in ways else True


def reaches(sender: model.PciFunction, receiver: model.PciFunction, bridges: Bridges) -> bool | None:
    """Whether requests of `sender` to `receiver` stay below the host bridge.

    What functions of one device do among themselves, or what hangs beside a switch on one bus, no port tells: None. So is
    what an overlay says of groups, as nobody sees the ports of those.
    """
    if sender.host_bridge is None or receiver.host_bridge is None:
        return None
    if model.Provenance.OVERLAY in (sender.switch_source, receiver.switch_source):
        return None
    if sender.host_bridge != receiver.host_bridge:
        return False
    if sender.address[:3] == receiver.address[:3]:
        return None
    shared = pcie.shared(sender, receiver)
    if shared == 0:
        return False
    meeting = bridges.get(sender.bridges[shared - 1])
    if meeting is None or meeting.port_type is not model.PortType.UPSTREAM or shared == len(receiver.bridges):
        return None
    port = bridges.get(sender.bridges[shared]) if shared < len(sender.bridges) else None
    if port is None or port.port_type is not model.PortType.DOWNSTREAM or port.redirects is None:
        return None
    return not port.redirects


def with_direct(
    pairings: Mapping[PciAddress, model.NicPairing], snapshot: model.Snapshot, bridges: Bridges
) -> dict[PciAddress, model.NicPairing]:
    """The pairings of GPUs with their NICs, each with whether what the NIC sends to the GPU goes there directly."""
    functions = {pci.address: pci for nic in snapshot.nics for pci in (nic.pci, nic.data_direct) if pci is not None}
    return {
        gpu.address: replace(
            pairing, direct=reaches(functions[pairing.data_direct or pairing.address], gpu.pci, bridges)
        )
        for gpu in snapshot.gpus
        if (pairing := pairings.get(gpu.address)) is not None
    }


@dataclass(slots=True)
class _Turn:
    """What goes up at one switch although it could stay below it."""

    pairs: list[tuple[PciAddress, PciAddress]] = field(default_factory=list)
    ports: set[PciAddress] = field(default_factory=set)


def note_redirected(
    gpus: Sequence[model.Gpu], nics: Iterable[model.Nic], bridges: Bridges, found: findings.Findings
) -> None:
    """A Finding for every switch whose ports send up what two GPUs, or a NIC and the GPU it is paired with, say to each
    other. Of a NIC its own requests count, as it is the NIC that reads and writes the memory of the GPU.
    """
    turns: dict[PciAddress, _Turn] = {}
    for sender, receiver in _conversations(gpus, nics):
        if reaches(sender, receiver, bridges) is not False or sender.host_bridge != receiver.host_bridge:
            continue
        shared = pcie.shared(sender, receiver)
        if shared:
            turn = turns.setdefault(sender.bridges[shared - 1], _Turn())
            turn.pairs.append((sender.address, receiver.address))
            turn.ports.add(sender.bridges[shared])
    for where, turn in turns.items():
        a, b = turn.pairs[0]
        count = len({frozenset(pair) for pair in turn.pairs})
        ports = ";".join(map(str, sorted(turn.ports)))
        found.warning(
            "peer-to-peer-redirected",
            where,
            f"below this switch, traffic from {a} to {b}"
            + (f" and of {count - 1} more pairs" if count > 1 else "")
            + " goes "
            f"up to the root complex and back: ports redirect it (ACS), as the kernel tells them where there is an IOMMU. "
            f"pci=disable_acs_redir={ports} on the kernel's command line (or pci=config_acs=) keeps it below the switch, and "
            f"puts these devices into one IOMMU group",
        )


def _conversations(
    gpus: Sequence[model.Gpu], nics: Iterable[model.Nic]
) -> Iterator[tuple[model.PciFunction, model.PciFunction]]:
    """Who sends to whom."""
    beside: dict[object, list[model.PciFunction]] = {}
    for gpu in gpus:
        beside.setdefault(gpu.pci.host_bridge, []).append(gpu.pci)
    for neighbours in beside.values():
        yield from itertools.permutations(neighbours, 2)
    by_address = {nic.address: nic for nic in nics}
    for gpu in gpus:
        nic = None if gpu.nic is None else by_address.get(gpu.nic.address)
        if nic is not None and gpu.nic is not None:
            yield (nic.pci if gpu.nic.data_direct is None or nic.data_direct is None else nic.data_direct), gpu.pci
