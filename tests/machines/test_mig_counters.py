# SPDX-License-Identifier: Apache-2.0
"""For every product with MIG, the counters that are published let in exactly what its driver makes: whatever stands there, the
next partition fits by the counters if and only if NVML makes the instance, as the mock does by the rules of nvml.h.
"""

from __future__ import annotations

import random
from dataclasses import fields

import pytest

from discovery import mig
from discovery.address import PciAddress
from discovery.mock import machine, migrules, migstate, products, state, status, zoo
from driver.publish import counters

DIVISIBLE = {
    name: gpu.mig for name, gpu in sorted(zoo.catalogue().gpus.items()) if gpu.mig is not None and gpu.mig.profiles
}
_RENAMED = {"memory_bytes": "memory_mib", "compute_number": "number"}


def gpu(product: products.Mig) -> state.Gpu:
    """A GPU of a product, MIG on and nothing made."""
    made = migstate.build(product, (), machine.MigTimes(), gpu="GPU-0", place=("test",))
    return state.Gpu(pci=PciAddress(0, 1, 0, 0), pci_device_id=0, architecture=None, mig=made)


def known(profile: state.MigProfile) -> mig.MigProfile:
    """As the probe reads it."""
    values = {field.name: getattr(profile, _RENAMED.get(field.name, field.name)) for field in fields(mig.MigProfile)}
    places = tuple(mig.MigPlacement(start=place.start, size=place.size) for place in profile.placements)
    return mig.MigProfile(**{**values, "memory_bytes": profile.memory_mib << 20, "placements": places})


@pytest.mark.parametrize("name", DIVISIBLE)
def test_the_counters_let_in_what_the_driver_makes(name: str) -> None:
    chance = random.Random(name)
    empty = gpu(DIVISIBLE[name])
    assert empty.mig is not None
    profiles = tuple(map(known, empty.mig.profiles))
    whole = counters.totals(profiles)
    places = [(profile, place) for profile in profiles for place in profile.placements]
    assert len(whole) <= 32
    made, refused = 0, 0
    for _ in range(60):
        there, remaining = empty, dict(whole)
        for profile, place in chance.sample(places, len(places)):
            if chance.random() < 0.4:
                continue
            takes = counters.taken(profile, place, whole)
            try:
                there, _ = migrules.create(there, profile.id, state.MigPlacement(start=place.start, size=place.size))
            except status.StatusError:
                assert not counters.fits(takes, remaining), (profile.name, place.start)
                refused += 1
            else:
                assert counters.fits(takes, remaining), (profile.name, place.start)
                remaining = counters.left(remaining, [takes])
                made += 1
    assert min(made, refused) > 50


@pytest.mark.parametrize("name", DIVISIBLE)
def test_the_whole_gpu_and_any_partition_exclude_each_other(name: str) -> None:
    profiles = tuple(map(known, gpu(DIVISIBLE[name]).mig.profiles))  # type: ignore[union-attr]
    whole = counters.totals(profiles)
    for profile in profiles:
        for place in profile.placements:
            takes = counters.taken(profile, place, whole)
            assert counters.fits(takes, whole)
            assert not counters.fits(whole, counters.left(whole, [takes]))
