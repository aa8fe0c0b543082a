# SPDX-License-Identifier: Apache-2.0
"""What the rows of shares ask of the hardware of this node. Pure.

The limit of a cgroup belongs to a pod and a GPU, not to a claim: what the claims of one pod may use of one GPU adds up. The compute
mode and the turns belong to a whole GPU and stay as long as one row asks for them; a MIG instance has neither.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from discovery import address, limits
from discovery.address import PciAddress
from driver.mps import shares as mps_shares
from driver.prepare import held, ledger
from driver.sharing.shares import Compute, TimeSlice


@dataclass(frozen=True, slots=True, kw_only=True)
class Turns:
    """How long a turn of a GPU is to be."""

    uuid: str
    turn: TimeSlice


def gpus(entry: ledger.Entry) -> frozenset[PciAddress]:
    """The GPUs of which it has shares."""
    return frozenset(address.parse(device.address) for device, _ in entry.shared)


def pod_limits(entries: Iterable[ledger.Entry]) -> Mapping[PciAddress, Mapping[str, limits.MemoryLimit]]:
    """The limit of each pod on each GPU, by its UID."""
    found: dict[PciAddress, dict[str, limits.MemoryLimit]] = {}
    for entry, device, use in _uses(entries):
        if not use.cgroup_limit:
            continue
        assert use.memory_limit is not None
        soft = use.memory_limit if use.soft_limit is None else use.soft_limit
        of_gpu = found.setdefault(address.parse(device.address), {})
        for pod in entry.pods:
            known = of_gpu.get(pod)
            of_gpu[pod] = limits.MemoryLimit(
                soft=soft + (0 if known is None else known.soft),
                hard=use.memory_limit + (0 if known is None else known.hard or 0),
            )
    return found


def mps(entries: Iterable[ledger.Entry]) -> tuple[mps_shares.Share, ...]:
    """What the MPS supervisor is to have."""
    found = (held.mps_share(device, result) for entry in entries for device, result in entry.shared)
    return tuple(share for share in found if share is not None)


def one_process(entries: Iterable[ledger.Entry]) -> frozenset[PciAddress]:
    """The GPUs that only the server of MPS may use, so that who leaves MPS gets an error and not the GPU."""
    return frozenset(
        address.parse(device.address) for _, device, use in _uses(entries) if use.by_mps and device.place is None
    )


def turns(entries: Iterable[ledger.Entry]) -> Mapping[PciAddress, Turns]:
    """The GPUs at which programs take turns."""
    return {
        address.parse(device.address): Turns(uuid=device.uuid, turn=use.time_slice)
        for _, device, use in _uses(entries)
        if use.enforcement.compute is Compute.TIMESLICE and device.place is None
    }


def _uses(entries: Iterable[ledger.Entry]) -> Iterator[tuple[ledger.Entry, ledger.HeldDevice, ledger.ShareUse]]:
    for entry in entries:
        for device, result in entry.shared:
            if result.share is not None:
                yield entry, device, result.share
