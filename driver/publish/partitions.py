# SPDX-License-Identifier: Apache-2.0
"""What is offered of one GPU: the whole, the MIG instances that somebody made, or every instance that could be made. Pure.

A part that can be made takes counters of its GPU (`counters`), and so does the whole, so that the scheduler gives away what
the hardware has room for and no more. Whether MIG is enabled now, and which instances the agent has made, changes nothing
of what is offered where the agent changes the mode itself: a claim that comes or goes is no write.

- From Hopper on the mode follows the claims: the whole and all parts are offered. Ampere needs a reset for it: the parts while
  MIG is on, the whole while it is off (`mig.toggle_of`).
- An instance that is not the agent's is never removed. What it takes is taken out of the counters, and what cannot be
  made beside it is not offered.
- Instances that exist are offered by themselves under mig-static, without counters: they do not share anything.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace

from discovery import mig, model
from driver import values
from driver.publish import bestfit, counters, limits_device, syntax
from driver.sharing import policy, rules


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A part of a GPU that is offered: an instance that exists, or one that would be made."""

    name: str
    profile: mig.MigProfile
    placement: mig.MigPlacement
    uuid: str | None = None
    """None for one that would be made."""
    consumes: counters.Consumption | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Division:
    """What is offered of one GPU. `consumes` is that of the whole; `uncounted`: whether the whole may be offered without it where
    the server keeps no counters. `full`: the counters without what others take of them, where somebody does.
    """

    whole: bool = False
    consumes: counters.Consumption | None = None
    uncounted: bool = False
    parts: tuple[Part, ...] = ()
    full: counters.Counters | None = None
    findings: tuple[model.Finding, ...] = ()


def divide(gpu: model.Gpu, how: rules.Policy, *, ours: Collection[str] = ()) -> Division:
    """What a policy offers of a GPU that is ready. `ours`: names of the parts that the agent has made, or is about to make or to
    remove; an instance at any other place is somebody else's.
    """
    enabled = gpu.mig_mode is not None and gpu.mig_mode.current
    match how.mode:
        case rules.Mode.MIG_STATIC if gpu.mig_mode is not None:
            return _static(gpu) if enabled else Division()
        case rules.Mode.MIG_DYNAMIC if gpu.mig_mode is not None:
            return _dynamic(gpu, how, ours, enabled=enabled)
    if not enabled:
        return Division(whole=True)
    return Division(findings=(_enabled(gpu),))


def _static(gpu: model.Gpu) -> Division:
    """The instances that exist. That there are none is said with the policy, and which are not whole with the GPU."""
    parts: list[Part] = []
    findings: list[model.Finding] = []
    profiles = _profiles(gpu.mig_profiles)
    for instance in gpu.mig_instances or ():
        profile = profiles.get(instance.profile_id)
        name = _name(gpu, profile, instance.placement.start) if profile is not None else None
        if profile is None or name is None or not gpu.multiprocessors:
            findings.append(_not_offered(gpu, instance, "nothing is known of its profile"))
        elif instance.whole and all(part.name != name for part in parts):
            parts.append(Part(name=name, profile=profile, placement=instance.placement, uuid=instance.uuid))
    if gpu.mig_instances is None:
        findings.append(_not_divided(gpu, "its MIG instances could not be read"))
    rank = {pair: index for index, pair in enumerate(bestfit.order(tuple(profiles.values())))}
    parts.sort(key=lambda part: (rank.get((part.profile, part.placement), len(rank)), part.name))
    return Division(parts=tuple(parts), findings=tuple(findings))


def _dynamic(gpu: model.Gpu, how: rules.Policy, ours: Collection[str], *, enabled: bool) -> Division:
    changes = mig.toggle_of(gpu.architecture) is mig.Toggle.AT_NEED
    if not (changes or enabled):
        return Division(whole=True)
    profiles = _profiles(gpu.mig_profiles)
    full = counters.totals(profiles.values())
    reason = None
    if not gpu.multiprocessors:
        reason = "the number of its multiprocessors is not known"
    elif not full:
        reason = "no MIG profile of it could be read"
    elif len(full) > limits_device.MAX_COUNTERS:
        reason = f"it has {len(full)} things to count, and the API takes {limits_device.MAX_COUNTERS} counters"
    if reason is not None:
        return Division(whole=not enabled, findings=(_not_divided(gpu, reason),))
    offered = {profile.id for profile in policy.offered_profiles(how, gpu)}
    taken, findings = _foreign(gpu, profiles, full, ours)
    remaining = {name: max(0, amount) for name, amount in counters.left(full, taken).items()}

    def consumption(amounts: counters.Counters) -> counters.Consumption:
        return counters.Consumption(counter_set=values.gpu_device_name(gpu.address), counters=amounts, totals=remaining)

    parts: list[Part] = []
    for profile, placement in bestfit.order(tuple(profile for profile in profiles.values() if profile.id in offered)):
        amounts = counters.taken(profile, placement, full)
        name = _name(gpu, profile, placement.start)
        if name is not None and counters.fits(amounts, remaining):
            parts.append(Part(name=name, profile=profile, placement=placement, consumes=consumption(amounts)))
    return Division(
        whole=changes and not taken,
        consumes=consumption(full) if offered else None,
        uncounted=how.fallback is rules.Fallback.WHOLE,
        parts=tuple(parts),
        full=full if taken else None,
        findings=tuple(findings),
    )


def _foreign(
    gpu: model.Gpu, profiles: dict[int, mig.MigProfile], full: counters.Counters, ours: Collection[str]
) -> tuple[list[counters.Counters], list[model.Finding]]:
    """What instances that are not the agent's take, and a Finding for each."""
    taken: list[counters.Counters] = []
    findings: list[model.Finding] = []
    for instance in gpu.mig_instances or ():
        profile = profiles.get(instance.profile_id)
        if profile is not None and _name(gpu, profile, instance.placement.start) in ours:
            continue
        known = profile is not None
        taken.append(
            counters.taken(profile, instance.placement, full) if profile else counters.place(instance.placement, full)
        )
        findings.append(
            _finding(
                "mig-instance-foreign",
                model.Severity.WARNING,
                gpu,
                f"{_spelled(instance, profile)} was not made by the agent, which leaves it alone and offers what fits beside "
                f"it{'' if known else '; its profile is not known'}; to free its place: nvidia-smi mig -i {gpu.address} "
                f"-gi {instance.gpu_instance} -dci, then the same with -dgi",
            )
        )
    return taken, findings


def _profiles(listed: Iterable[mig.MigProfile]) -> dict[int, mig.MigProfile]:
    """By id, the first of each, with one placement at each start: what NVML says is not trusted to be unique."""
    found: dict[int, mig.MigProfile] = {}
    for profile in listed:
        places: dict[int, mig.MigPlacement] = {}
        for placement in profile.placements:
            if placement.size > 0 and placement.start >= 0:
                places.setdefault(placement.start, placement)
        found.setdefault(profile.id, replace(profile, placements=tuple(places.values())))
    return found


def _name(gpu: model.Gpu, profile: mig.MigProfile, start: int) -> str | None:
    """None where it would be no device name."""
    name = values.partition_device_name(gpu.address, profile=profile.name, profile_id=profile.id, start=start)
    return name if syntax.is_label(name) else None


def _enabled(gpu: model.Gpu) -> model.Finding:
    return _finding(
        "mig-enabled",
        model.Severity.ERROR,
        gpu,
        "Nothing of it is offered: MIG is enabled and only the whole GPU would be offered. Make instances (nvidia-smi mig -i "
        f"{gpu.address} -cgi PROFILE -C) and give the GPU mode mig-static, or give it mode mig-dynamic, or disable MIG (nvidia-smi -i {gpu.address} -mig 0)",
    )


def _not_divided(gpu: model.Gpu, why: str) -> model.Finding:
    return _finding("mig-not-divided", model.Severity.ERROR, gpu, f"No part of it is offered: {why}")


def _not_offered(gpu: model.Gpu, instance: mig.MigInstance, why: str) -> model.Finding:
    profile = _profiles(gpu.mig_profiles).get(instance.profile_id)
    return _finding(
        "mig-instance-not-offered",
        model.Severity.WARNING,
        gpu,
        f"{_spelled(instance, profile)} is not offered: {why}",
    )


def _spelled(instance: mig.MigInstance, profile: mig.MigProfile | None) -> str:
    what = profile.name if profile is not None else f"of profile {instance.profile_id}"
    where = f"GPU instance {instance.gpu_instance}, memory slices from {instance.placement.start}"
    return f"MIG instance {what} ({where}{f', {instance.uuid}' if instance.uuid else ''})"


def _finding(code: str, severity: model.Severity, gpu: model.Gpu, message: str) -> model.Finding:
    return model.Finding(code=code, severity=severity, subject=str(gpu.address), message=message)
