# SPDX-License-Identifier: Apache-2.0
"""The devices of one GPU that share its counters, as they are listed together. Pure.

The scheduler takes what allocated devices consume from the totals that are published now, and one counter below zero stops
every allocation of the pool that consumes any. So totals go down only as far as nobody has what is taken away, a device that
somebody has stays with its counters, and nothing that it excludes is offered beside it without them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from driver import values
from driver.publish import absent, counters, devices

Totals = Mapping[str, counters.Counters]
"""Counter set -> its counters."""


def totals_of(listed: Iterable[devices.Device]) -> dict[str, counters.Counters]:
    """The counter sets of some devices; those of devices that can be used now, where there are any."""
    found: dict[str, counters.Counters] = {}
    fresh: set[str] = set()
    for device in listed:
        if (consumes := device.consumes) is not None and consumes.counter_set not in fresh:
            if not device.absent:
                fresh.add(consumes.counter_set)
            if not device.absent or consumes.counter_set not in found:
                found[consumes.counter_set] = consumes.totals
    return found


def lowered(ready: Iterable[devices.Device], published: absent.Published, full: Totals) -> dict[str, counters.Counters]:
    """The counter sets whose totals would go down, and the totals from which they do. `full`: those of sets of which somebody
    takes a part, for the case that nothing is known of what was published.
    """
    before = {**full, **totals_of(published.values())}
    return {
        name: known
        for name, wanted in totals_of(ready).items()
        if (known := before.get(name)) is not None
        and any(wanted.get(counter, 0) < amount for counter, amount in known.items())
    }


def members(sets: Collection[str], *listed: Iterable[devices.Device]) -> frozenset[str]:
    """The names of all devices that consume one of some counter sets."""
    return frozenset(
        device.name
        for some in listed
        for device in some
        if device.consumes is not None and device.consumes.counter_set in sets
    )


def settle(
    listed: Sequence[devices.Device], *, used: Collection[str], least: Totals | None = None
) -> tuple[devices.Device, ...]:
    """The devices with the totals that can be published: what is wanted, but no counter below what those in `used` consume of it,
    nor below `least`, nor without one that a listed device consumes. A whole GPU that would be offered without counters
    beside a part of it consumes them all.
    """
    listed = _with_wholes(listed)
    totals = {name: dict(wanted) for name, wanted in totals_of(listed).items()}
    in_use: dict[str, dict[str, int]] = {name: {} for name in totals}
    for device in listed:
        if (consumes := device.consumes) is not None:
            for counter, amount in consumes.counters.items():
                totals[consumes.counter_set].setdefault(counter, 0)
                if device.name in used:
                    sums = in_use[consumes.counter_set]
                    sums[counter] = sums.get(counter, 0) + amount
    for name, wanted in totals.items():
        for floor in (in_use[name], (least or {}).get(name, {})):
            wanted.update({counter: max(amount, wanted.get(counter, 0)) for counter, amount in floor.items()})
    return tuple(
        device
        if (consumes := device.consumes) is None or consumes.totals == totals[consumes.counter_set]
        else replace(device, consumes=replace(consumes, totals=totals[consumes.counter_set]))
        for device in listed
    )


def without_counters(
    listed: Sequence[devices.Device],
) -> tuple[tuple[devices.Device, ...], tuple[devices.Device, ...]]:
    """What can be listed on a server that keeps no counters, and what is kept back although somebody has it: of a GPU of which a
    part is in use nothing is offered, as the server would give it away again.
    """
    split = {
        consumes.counter_set
        for device in listed
        if (consumes := device.consumes) is not None and device.name != consumes.counter_set
    }
    back = [device for device in listed if values.gpu_of(device.name) in split and _excludes(device)]
    names = {device.name for device in back}
    shown = tuple(replace(device, consumes=None) for device in listed if device.name not in names)
    return shown, tuple(device for device in back if device.absent)


def _excludes(device: devices.Device) -> bool:
    """Whether it is the whole GPU, or a part that shares with others."""
    return device.consumes is not None or device.name == values.gpu_of(device.name)


def _with_wholes(listed: Sequence[devices.Device]) -> tuple[devices.Device, ...]:
    totals = totals_of(listed)
    return tuple(
        replace(
            device,
            consumes=counters.Consumption(
                counter_set=device.name,
                counters={name: amount for name, amount in totals[device.name].items() if amount > 0},
                totals=totals[device.name],
            ),
        )
        if device.consumes is None and device.name in totals
        else device
        for device in listed
    )
