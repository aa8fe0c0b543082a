# SPDX-License-Identifier: Apache-2.0
"""What holds of the MIG of a GPU. Pure; part of check.py."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from discovery import mig, model


def violations(gpu: model.Gpu) -> Iterator[str]:
    """What does not hold, one sentence each."""
    where, mode = gpu.address, gpu.mig_mode
    if gpu.mig_profiles and mode is None:
        yield f"{where}: it has MIG profiles, but no MIG mode"
    if gpu.mig_instances is not None and (mode is None or not mode.current):
        yield f"{where}: it has MIG instances, and MIG is not enabled"
    yield from (f"{where}: {sentence}" for sentence in _profiles(gpu.mig_profiles, gpu))
    yield from (f"{where}: {sentence}" for sentence in _instances(gpu.mig_instances or (), gpu.mig_profiles))


def _profiles(profiles: tuple[mig.MigProfile, ...], gpu: model.Gpu) -> Iterator[str]:
    ids = [profile.id for profile in profiles]
    if ids != sorted(set(ids)):
        yield "MIG profiles are not ordered by id, or one stands twice"
    for profile in profiles:
        starts = [place.start for place in profile.placements]
        if starts != sorted(set(starts)):
            yield f"placements of MIG profile {profile.name} are not ordered, or one stands twice"
        if len({place.size for place in profile.placements}) > 1:
            yield f"placements of MIG profile {profile.name} are of different sizes"
        if any(place.start < 0 or place.size < 1 for place in profile.placements):
            yield f"a placement of MIG profile {profile.name} cannot be"
        if profile.slices < 1 or profile.instances < 1 or profile.multiprocessors < 1:
            yield f"MIG profile {profile.name} has no slices, multiprocessors or instances"
        for what, part, whole in (
            ("memory", profile.memory_bytes, gpu.memory_bytes),
            ("multiprocessors", profile.multiprocessors, gpu.multiprocessors),
        ):
            if whole is not None and part > whole:
                yield f"MIG profile {profile.name} has more {what} than the GPU"


def _instances(instances: tuple[mig.MigInstance, ...], profiles: tuple[mig.MigProfile, ...]) -> Iterator[str]:
    known = {profile.id: profile for profile in profiles}
    places = [instance.placement for instance in instances]
    if places != sorted(places):
        yield "MIG instances are not ordered by placement"
    for a, b in itertools.combinations(instances, 2):
        if a.placement.overlaps(b.placement):
            yield f"GPU instances {a.gpu_instance} and {b.gpu_instance} have memory slices in common"
        if a.gpu_instance == b.gpu_instance:
            yield f"two GPU instances are number {a.gpu_instance}"
        if a.uuid is not None and a.uuid == b.uuid:
            yield f"GPU instances {a.gpu_instance} and {b.gpu_instance} have the same UUID {a.uuid}"
    for instance in instances:
        profile = known.get(instance.profile_id)
        if profile is None:
            yield f"GPU instance {instance.gpu_instance} is of profile {instance.profile_id}, which the GPU has not"
        elif profile.placements and instance.placement not in profile.placements:
            yield f"GPU instance {instance.gpu_instance} is not at a place of its profile {profile.name}"
        if instance.nodes and not instance.whole:
            yield f"GPU instance {instance.gpu_instance} cannot be used, and has devices"
