# SPDX-License-Identifier: Apache-2.0
"""GPUs with MIG, as a Snapshot has them: the profiles of an H100 80GB, and instances wherever a test wants them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from discovery import mig, model
from tests.fakes import publishing


def profile(
    number: int, name: str, size: int, starts: Sequence[int], multiprocessors: int, *, instances: int, ofa: int = 0
) -> mig.MigProfile:
    """A profile of `size` memory slices, with 10 GiB each."""
    return mig.MigProfile(
        id=number,
        number=number,
        compute_number=0,
        name=name,
        slices=int(name[0]),
        memory_bytes=size * 10 << 30,
        multiprocessors=multiprocessors,
        ofa_engines=ofa,
        instances=instances,
        placements=tuple(mig.MigPlacement(start=start, size=size) for start in starts),
    )


H100 = (
    profile(0, "7g.80gb", 8, (0,), 132, instances=1, ofa=1),
    profile(5, "4g.40gb", 4, (0,), 64, instances=1),
    profile(9, "3g.40gb", 4, (0, 4), 60, instances=2),
    profile(14, "2g.20gb", 2, (0, 2, 4), 32, instances=3),
    profile(15, "1g.20gb", 2, (0, 2, 4, 6), 26, instances=4),
    profile(19, "1g.10gb", 1, range(7), 16, instances=7),
    profile(20, "1g.10gb+me", 1, range(7), 16, instances=1, ofa=1),
)


def instance(profile_id: int, start: int, *, size: int | None = None, number: int = 1) -> mig.MigInstance:
    """One that exists, of a profile of H100 or with a size of its own."""
    sizes = {place.size for entry in H100 if entry.id == profile_id for place in entry.placements}
    return mig.MigInstance(
        gpu_instance=number,
        profile_id=profile_id,
        placement=mig.MigPlacement(start=start, size=size or sizes.pop()),
        compute_instance=0,
        uuid=f"MIG-{profile_id:08x}-0000-0000-0000-{start:012x}",
    )


def gpu(bus: int, *instances: mig.MigInstance, enabled: bool = True, **changes: Any) -> model.Gpu:
    """A GPU that is divided so."""
    mode = model.MigMode(current=enabled, pending=enabled)
    found = instances if enabled else None
    return publishing.gpu(bus, mig_mode=mode, mig_profiles=H100, mig_instances=found, **changes)
