# SPDX-License-Identifier: Apache-2.0
"""What somebody has, alone or a share of it, is offered as it was when they got it. Pure.

The scheduler adds up the shares that were taken of a device and compares the sum with what is published now; and who has a device
alone is not among them. So neither values, nor request policies, nor whether there are shares at all, change under anybody.
A policy waits for that by itself (`driver.sharing.effective`); this is for what changes otherwise: the memory that NVML tells
(ECC, another driver), and a server that keeps no shares.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

from driver.publish import absent, attributes, devices

_ENFORCED = (attributes.MEMORY_ENFORCEMENT, attributes.COMPUTE_ENFORCEMENT)


def differing(ready: Iterable[devices.Device], published: absent.Published) -> frozenset[str]:
    """The names of the devices that would be given out on other terms than they were published with."""
    return frozenset(
        device.name
        for device in ready
        if (before := published.get(device.name)) is not None and _terms(device) != _terms(before)
    )


def keep(
    listed: Sequence[devices.Device], published: absent.Published, *, held: Collection[str]
) -> tuple[tuple[devices.Device, ...], tuple[str, ...]]:
    """The devices, those that somebody has on the terms they were published with, and the names of these."""
    kept = sorted(differing(listed, published) & frozenset(held))
    return tuple(
        _on_terms_of(published[device.name], device) if device.name in kept else device for device in listed
    ), tuple(kept)


def at_risk(
    ready: Iterable[devices.Device], sharing: Iterable[devices.Device], published: absent.Published
) -> frozenset[str]:
    """On a server that keeps no shares: the names of devices of which a claim may have a share. `ready`: what is offered there,
    `sharing`: what would be elsewhere.
    """
    new = {device.name for device in ready if device.name not in published}
    return frozenset(
        device.name
        for device in (*published.values(), *(device for device in sharing if device.name in new))
        if device.terms is not None
    )


def hide(
    listed: Sequence[devices.Device],
    sharing: Iterable[devices.Device],
    published: absent.Published,
    *,
    held: Collection[str],
) -> tuple[tuple[devices.Device, ...], tuple[devices.Device, ...]]:
    """What can be listed on a server that keeps no shares, and what is kept back: to the scheduler a device of which somebody has
    a share would be free.
    """
    known = {device.name: device for device in sharing} | dict(published)
    hidden = {
        device.name: known[device.name]
        for device in listed
        if device.name in held and device.name in known and known[device.name].terms is not None
    }
    return tuple(device for device in listed if device.name not in hidden), tuple(hidden.values())


def _terms(device: devices.Device) -> tuple[object, ...] | None:
    """None where one claim has all of it: what it has then is told by nothing but the device."""
    return None if device.terms is None else (device.terms, *map(device.attributes.get, _ENFORCED))


def _on_terms_of(before: devices.Device, now: devices.Device) -> devices.Device:
    enforced = {name: before.attributes[name] for name in _ENFORCED if name in before.attributes}
    return replace(
        now,
        attributes={**now.attributes, **enforced},
        capacity=before.capacity,
        consumes=before.consumes,
        uncounted=before.uncounted,
        mode=before.mode,
        shares=before.shares,
        enforcement=before.enforcement,
        terms=before.terms,
    )
