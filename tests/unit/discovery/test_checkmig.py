# SPDX-License-Identifier: Apache-2.0
"""The invariants of MIG: a sound GPU has no violation, and each thing that can be wrong is found."""

from __future__ import annotations

from dataclasses import replace

import pytest

from discovery import check, checkmig, mig, model
from tests.fakes import wiring
from tests.fakes.wiring import at
from tests.unit.discovery import test_check

GIB = 1 << 30


def places(size: int, *starts: int) -> tuple[mig.MigPlacement, ...]:
    return tuple(mig.MigPlacement(start=start, size=size) for start in starts)


def profile(profile_id: int, slices: int, where: tuple[mig.MigPlacement, ...], **changes: object) -> mig.MigProfile:
    return mig.MigProfile(
        **{  # type: ignore[arg-type]
            "id": profile_id,
            "number": 0,
            "compute_number": 0,
            "name": f"{slices}g.{slices * 10}gb",
            "slices": slices,
            "memory_bytes": slices * 10 * GIB,
            "multiprocessors": slices * 16,
            "instances": len(where),
            "placements": where,
            **changes,
        }
    )


def instance(number: int, profile_id: int, start: int, size: int, **changes: object) -> mig.MigInstance:
    return mig.MigInstance(
        **{  # type: ignore[arg-type]
            "gpu_instance": number,
            "profile_id": profile_id,
            "placement": mig.MigPlacement(start=start, size=size),
            "compute_instance": 0,
            "uuid": f"MIG-{number}",
            "nodes": (mig.CapabilityNode(path="/dev/nvidia-caps/nvidia-cap1", major=1, minor=1),),
            **changes,
        }
    )


PROFILES = (profile(9, 3, places(4, 0, 4)), profile(19, 1, places(1, *range(7))))
INSTANCES = (instance(1, 9, 0, 4), instance(11, 19, 4, 1))
SOUND = replace(
    wiring.gpu(at(4)),
    memory_bytes=80 * GIB,
    multiprocessors=132,
    mig_mode=model.MigMode(current=True, pending=True),
    mig_profiles=PROFILES,
    mig_instances=INSTANCES,
)


def test_a_sound_gpu_has_no_violation() -> None:
    assert tuple(checkmig.violations(SOUND)) == ()
    assert tuple(checkmig.violations(replace(SOUND, mig_mode=None, mig_profiles=(), mig_instances=None))) == ()


def test_the_rules_are_part_of_the_snapshot() -> None:
    sound = test_check.sound()
    gpu = replace(sound.gpus[0], mig_profiles=PROFILES)
    found = check.violations(replace(sound, gpus=(gpu, *sound.gpus[1:])))
    assert f"{gpu.address}: it has MIG profiles, but no MIG mode" in found


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"mig_mode": None}, "it has MIG profiles, but no MIG mode"),
        ({"mig_mode": model.MigMode(current=False, pending=True)}, "it has MIG instances, and MIG is not enabled"),
        ({"mig_profiles": PROFILES[::-1]}, "MIG profiles are not ordered by id"),
        ({"mig_profiles": (PROFILES[0], PROFILES[0], PROFILES[1])}, "one stands twice"),
        ({"mig_profiles": (profile(9, 3, places(4, 4, 0)), PROFILES[1])}, "are not ordered, or one stands twice"),
        ({"mig_profiles": (profile(9, 3, places(4, 0) + places(3, 4)), PROFILES[1])}, "are of different sizes"),
        ({"mig_profiles": (*PROFILES, profile(20, 1, places(1, -1)))}, "cannot be"),
        ({"mig_profiles": (*PROFILES, profile(20, 0, ()))}, "has no slices, multiprocessors or instances"),
        ({"mig_profiles": (*PROFILES, profile(20, 9, places(1, 0)))}, "has more memory than the GPU"),
        (
            {"mig_profiles": (*PROFILES, profile(20, 1, places(1, 0), multiprocessors=133))},
            "has more multiprocessors than the GPU",
        ),
        ({"mig_instances": INSTANCES[::-1]}, "MIG instances are not ordered by placement"),
        (
            {"mig_instances": (INSTANCES[0], instance(8, 19, 3, 1))},
            "GPU instances 1 and 8 have memory slices in common",
        ),
        ({"mig_instances": (INSTANCES[0], instance(1, 19, 4, 1))}, "two GPU instances are number 1"),
        ({"mig_instances": (INSTANCES[0], instance(11, 19, 4, 1, uuid="MIG-1"))}, "have the same UUID MIG-1"),
        ({"mig_instances": (instance(1, 5, 0, 4),)}, "is of profile 5, which the GPU has not"),
        ({"mig_instances": (instance(1, 9, 2, 4),)}, "is not at a place of its profile 3g.30gb"),
        ({"mig_instances": (instance(1, 9, 0, 4, uuid=None),)}, "cannot be used, and has devices"),
    ],
)
def test_what_is_wrong_is_found(changes: dict[str, object], sentence: str) -> None:
    found = tuple(checkmig.violations(replace(SOUND, **changes)))  # type: ignore[arg-type]
    assert any(sentence in each for each in found), found
