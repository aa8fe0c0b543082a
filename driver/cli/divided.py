# SPDX-License-Identifier: Apache-2.0
"""How the GPUs of a machine are divided: a bar of memory slices for people, a list for programs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from discovery import model
from discovery.address import PciAddress
from driver import values
from driver.observe import partitions
from driver.sharing import placing, rules

COLUMNS = ("GPU", "MODE", "MIG", "MEMORY SLICES", "INSTANCES", "ROOM FOR")
LEGEND = "= instance  ! made by somebody else  . free  x free, and no offered profile can use it"

_DIVIDING = (rules.Mode.MIG_STATIC, rules.Mode.MIG_DYNAMIC)

_WIDTH = 4
"""Of a memory slice in a bar, without its border."""

_NONE = "-"


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU that is or may be divided. `known`: whether it could be read who has what. `left` is None where the agent makes
    nothing of it.
    """

    gpu: model.Gpu
    mode: rules.Mode
    known: bool
    whole: bool
    """A claim has all of it."""
    instances: tuple[partitions.Instance, ...]
    left: placing.Left | None


def divided(
    snapshot: model.Snapshot, *, policies: Mapping[PciAddress, rules.Policy], held: frozenset[str] | None
) -> tuple[Gpu, ...]:
    """Those on which MIG is on, or that a policy divides. `held`: names of devices that claims have; None where that is not known."""
    sharing = partitions.Sharing(policies=policies)
    names = held or frozenset()
    return tuple(
        Gpu(
            gpu=gpu,
            mode=sharing.policy(gpu).mode,
            known=held is not None,
            whole=values.gpu_device_name(gpu.address) in names,
            instances=partitions.instances(gpu, sharing=sharing, held=names),
            left=partitions.left(gpu, sharing=sharing, held=names),
        )
        for gpu in snapshot.gpus
        if gpu.mig_profiles and (_enabled(gpu) or sharing.policy(gpu).mode in _DIVIDING)
    )


def row(of: Gpu) -> tuple[str, ...]:
    """The cells of a table."""
    counted = Counter(_named(of, entry) for entry in of.instances)
    return (
        values.gpu_device_name(of.gpu.address),
        str(of.mode),
        "on" if _enabled(of.gpu) else "off",
        bar(of),
        _listed(counted),
        _listed({name: count for name, count in _placeable(of).items() if count}),
    )


def bar(of: Gpu) -> str:
    """`|1g  |1g+ |....|....|3g!================|`: a cell for each memory slice, one for all slices of an instance."""
    stranded = of.left.stranded if of.left is not None else frozenset()
    slots = list(partitions.slots(of.gpu, of.instances))
    if of.whole and slots:
        return f"|{'whole '.ljust(len(slots) * (_WIDTH + 1) - 1, '=')}|"
    cells: list[str] = []
    at = 0
    while at < len(slots):
        entry = slots[at]
        if entry is None:
            cells.append(("x" if at in stranded else ".") * _WIDTH)
            at += 1
            continue
        end = at + 1
        while end < len(slots) and slots[end] is entry:
            end += 1
        width = (end - at) * (_WIDTH + 1) - 1
        text = _short(of, entry)
        cells.append(text.ljust(width, "=" if end - at > 1 else " ")[:width])
        at = end
    return f"|{'|'.join(cells)}|" if cells else _NONE


def item(of: Gpu) -> dict[str, object]:
    """The same for programs."""
    found: dict[str, object] = {
        "address": str(of.gpu.address),
        "device": values.gpu_device_name(of.gpu.address),
        "mode": str(of.mode),
        "enabled": _enabled(of.gpu),
        "heldWhole": of.whole,
        "memorySlices": len(list(partitions.slots(of.gpu, ()))),
        "instances": [_instance(of, entry) for entry in of.instances],
    }
    if of.left is not None:
        found |= {"placeable": _placeable(of), "stranded": sorted(of.left.stranded)}
    return found


def _instance(of: Gpu, entry: partitions.Instance) -> dict[str, object]:
    place = entry.placement
    found: dict[str, object] = {
        "device": entry.device,
        "profile": entry.profile,
        "profileId": entry.profile_id,
        "start": place.start,
        "size": place.size,
    }
    return found | ({"origin": str(entry.origin)} if _told(of, entry) else {})


def _told(of: Gpu, entry: partitions.Instance) -> bool:
    """Whether it is known whose it is: without the record that is so of GPUs only that the agent does not divide."""
    return of.known or entry.origin is partitions.Origin.STATIC or of.mode is not rules.Mode.MIG_DYNAMIC


def _named(of: Gpu, entry: partitions.Instance) -> str:
    return entry.profile + ("!" if _foreign(of, entry) else "")


def _short(of: Gpu, entry: partitions.Instance) -> str:
    """`1g`, with a sign for a variant of the profile and for a stranger."""
    compute, _, rest = entry.profile.partition(".")
    variant = next((sign for sign in rest if sign in "+-"), "")
    return compute[: _WIDTH - 2] + variant + ("!" if _foreign(of, entry) else "")


def _foreign(of: Gpu, entry: partitions.Instance) -> bool:
    return entry.origin is partitions.Origin.FOREIGN and _told(of, entry)


def _placeable(of: Gpu) -> dict[str, int]:
    """By name of the profile, the smallest first, as they are offered."""
    if of.left is None:
        return {}
    room = of.left.placeable
    profiles: Sequence[tuple[int, int, str, int]] = sorted(
        (profile.slices, profile.memory_bytes, profile.name, room[profile.id])
        for profile in of.gpu.mig_profiles
        if profile.id in room
    )
    return {name: count for _, _, name, count in profiles}


def _enabled(gpu: model.Gpu) -> bool:
    return gpu.mig_mode is not None and gpu.mig_mode.current


def _listed(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} x {name}" if count > 1 else name for name, count in counts.items()) or _NONE
