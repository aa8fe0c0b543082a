# SPDX-License-Identifier: Apache-2.0
"""The devices and the results of a claim in the record, as values and as the JSON that is kept of them. Pure.

As in ledger.py: keys are added, never renamed and never given another meaning.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from discovery import mig
from driver.mps import shares as mps
from driver.prepare import shareuse, typed
from driver.sharing import shares

_NOT_BY_MPS = frozenset({shares.Compute.TIMESLICE, shares.Compute.NONE})


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldDevice:
    """A device of a claim with what a container needs of it, so that neither hardware nor probe is asked again."""

    name: str
    address: str
    uuid: str
    """Empty in a started entry, for an instance that is still to be made."""
    nodes: tuple[str, ...]
    """Paths in the container, such as `/dev/nvidia0`."""
    caps: tuple[mig.CapabilityNode, ...] = ()
    """The nodes that give the right to use a MIG instance. They need not be on the host: their numbers are known."""
    place: mig.MigPlacement | None = None
    """The memory slices that it has of its GPU; None for the whole GPU."""
    room: shareuse.Room | None = None
    """What there is of it for all its shares; None where nobody shares it with the claim."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One allocation result of ours, as the scheduler wrote it. `request` is the full name, with a subrequest. `share`: what it has of
    a device that is shared; admin access has nothing of one.
    """

    request: str
    pool: str
    device: str
    share_id: str | None = None
    consumed_capacity: Mapping[str, str] = field(default_factory=dict)
    admin: bool = False
    share: shareuse.ShareUse | None = None
    described: str | None = None
    """The folder of its claim below that of metadata files in a container; on the first result of each request that has a file."""


def mps_share(device: HeldDevice, result: Result) -> mps.Share | None:
    """What MPS has to hold of a share; None where it has no part in it. A limit that something else holds is none of MPS."""
    use = result.share
    if use is None or result.share_id is None or not use.by_mps:
        return None
    levels = use.enforcement
    by_cgroup = levels.memory is shares.Memory.CGROUP
    advice = levels.memory is shares.Memory.NONE
    return mps.Share(
        device=device.name,
        uuid=device.uuid,
        share_id=result.share_id,
        protocol=mps.Protocol.V3 if levels.by_mps else mps.Protocol.LEGACY,
        memory=None if by_cgroup or advice else use.memory_limit,
        compute=None if levels.compute in _NOT_BY_MPS else use.compute_limit,
        below_normal=use.below_normal,
    )


def device_object(device: HeldDevice) -> dict[str, Any]:
    """A device as JSON; what most have not is left out."""
    document: dict[str, Any] = {
        "name": device.name,
        "address": device.address,
        "uuid": device.uuid,
        "nodes": device.nodes,
    }
    if device.caps:
        document["caps"] = [{"path": cap.path, "major": cap.major, "minor": cap.minor} for cap in device.caps]
    if device.place is not None:
        document["place"] = [device.place.start, device.place.size]
    if device.room is not None:
        document["room"] = shareuse.room_to_object(device.room)
    return document


def result_object(result: Result) -> dict[str, Any]:
    """A result as JSON; what most have not is left out."""
    document: dict[str, Any] = {"request": result.request, "pool": result.pool, "device": result.device}
    if result.share_id is not None:
        document["shareID"] = result.share_id
    if result.consumed_capacity:
        document["consumedCapacity"] = dict(result.consumed_capacity)
    if result.admin:
        document["adminAccess"] = True
    if result.share is not None:
        document["share"] = shareuse.to_object(result.share)
    if result.described is not None:
        document["described"] = result.described
    return document


def result_of(value: Any) -> Result:
    """The result in JSON. Raises DamagedError."""
    document = typed.mapping(value)
    return Result(
        request=typed.string(document, "request"),
        pool=typed.string(document, "pool"),
        device=typed.string(document, "device"),
        share_id=typed.string(document, "shareID") if "shareID" in document else None,
        consumed_capacity={
            name: typed.text(quantity) for name, quantity in typed.mapping(document.get("consumedCapacity", {})).items()
        },
        admin=document.get("adminAccess") is True,
        share=shareuse.from_object(document["share"]) if "share" in document else None,
        described=typed.string(document, "described") if "described" in document else None,
    )


def device_of(value: Any) -> HeldDevice:
    """The device in JSON. Raises DamagedError."""
    document = typed.mapping(value)
    return HeldDevice(
        name=typed.string(document, "name"),
        address=typed.string(document, "address"),
        uuid=typed.string(document, "uuid"),
        nodes=tuple(typed.text(node) for node in typed.items(document.get("nodes"))),
        caps=tuple(_capability(cap) for cap in typed.items(document.get("caps", []))),
        place=_place(document["place"]) if "place" in document else None,
        room=shareuse.room_from_object(document["room"]) if "room" in document else None,
    )


def _capability(value: Any) -> mig.CapabilityNode:
    document = typed.mapping(value)
    return mig.CapabilityNode(
        path=typed.string(document, "path"),
        major=typed.number(document.get("major")),
        minor=typed.number(document.get("minor")),
    )


def _place(value: Any) -> mig.MigPlacement:
    numbers = [typed.number(number) for number in typed.items(value)]
    if len(numbers) != 2:
        raise typed.DamagedError("a place has not a start and a size")
    return mig.MigPlacement(start=numbers[0], size=numbers[1])
