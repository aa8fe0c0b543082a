# SPDX-License-Identifier: Apache-2.0
"""Devices that were published and cannot be used now: lost, unbound, gone from the bus, or withheld. Pure.

An allocated device that leaves the slices is forgotten by the scheduler while its claim still has it, so it stays listed,
with a NoSchedule taint, as long as the record of prepared claims or the allocation of any claim names it. One that nobody
holds leaves. Comes it back, it is listed as before. What was published is known from the agent's own record, not from the
server: there anybody can write, and kubelet deletes all slices of the node when it starts.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any

from driver.publish import attributes, devices, wire

Published = Mapping[str, devices.Device]
"""What was published last, by name, in the order of the slices."""


def missing(ready: Iterable[devices.Device], published: Published) -> frozenset[str]:
    """The published devices that are not ready now."""
    return frozenset(published) - {device.name for device in ready}


def merge(
    ready: Iterable[devices.Device], published: Published, *, held: Collection[str]
) -> tuple[devices.Device, ...]:
    """What the slices should list: everything that is ready, and what is missing and held, marked as absent.

    An absent device keeps its place behind the one it stood behind, so that its loss moves no other.
    """
    merged = [remember(device, published.get(device.name)) for device in ready]
    names = [device.name for device in merged]
    behind = 0
    for name, device in published.items():
        if name in names:
            behind = names.index(name) + 1
        elif name in held:
            merged.insert(behind, replace(device, absent=True))
            names.insert(behind, name)
            behind += 1
    return tuple(merged)


def remember(now: devices.Device, before: devices.Device | None) -> devices.Device:
    """A device with the name its NIC had when it could last be seen: what moves into a pod's network namespace takes its name
    along, and the NIC stays the same. An interface that is left does not take the place of the RDMA device that moved.
    """
    if before is None or attributes.NIC not in before.attributes:
        return now
    if now.attributes.get(attributes.NIC_PCI_BUS_ID) != before.attributes.get(attributes.NIC_PCI_BUS_ID):
        return now
    if attributes.NIC in now.attributes and (now.nic_is_rdma or not before.nic_is_rdma):
        return now
    known = {**now.attributes, attributes.NIC: before.attributes[attributes.NIC]}
    return replace(now, attributes=dict(sorted(known.items())), nic_is_rdma=before.nic_is_rdma)


def held_by(claim: Mapping[str, Any], *, driver_name: str, pool: str) -> frozenset[str]:
    """The devices of this pool that a claim's allocation names. Admin access looks at a device and does not hold it."""
    value: Any = claim
    for key in ("status", "allocation", "devices", "results"):
        value = value.get(key) if isinstance(value, Mapping) else None
    return frozenset(
        str(result.get("device"))
        for result in (value if isinstance(value, list) else [])
        if isinstance(result, Mapping)
        and result.get("driver") == driver_name
        and result.get("pool") == pool
        and result.get("adminAccess") is not True
    )


def to_json(published: Published) -> dict[str, Any]:
    """For the record."""
    return {
        name: {"position": position, **wire.published_to_json(device)}
        for position, (name, device) in enumerate(published.items())
    }


def from_json(body: Mapping[str, Any]) -> tuple[Published, tuple[str, ...]]:
    """What `to_json` made, and why entries of another shape were left out."""
    read: list[tuple[int, str, devices.Device]] = []
    wrong: list[str] = []
    for name, entry in body.items():
        try:
            device = wire.published_from_json(name, entry)
        except ValueError as error:
            wrong.append(str(error))
        else:
            position = entry.get("position")
            read.append((position if isinstance(position, int) else len(body), name, device))
    return {name: device for _, name, device in sorted(read, key=lambda entry: entry[:2])}, tuple(wrong)
