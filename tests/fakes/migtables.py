# SPDX-License-Identifier: Apache-2.0
"""MIG profiles of GPUs that differ in kind, by hand and in short, and GPUs that have them; all products are in the mock's own list.

H100: seven compute slices over eight memory slices, one OFA engine. A100: fewer decoders than slices. A30: four slices. RTX PRO
6000: twelve memory slices, profiles without media engines and with all of them. Sources stand in discovery/mock/products.yaml.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from discovery import mig, model
from tests.fakes import publishing


def profile(number: int, name: str, starts: Iterable[int], size: int, **fields: int) -> mig.MigProfile:
    """A profile; `most` at once, memory in GiB."""
    memory_gib = int(name.partition(".")[2].partition("gb")[0])
    return mig.MigProfile(
        id=number,
        number=number,
        compute_number=0,
        name=name,
        slices=int(name[0]),
        memory_bytes=fields.pop("mib", memory_gib * 1000) << 20,
        multiprocessors=fields.pop("sm"),
        copy_engines=fields.pop("ce", 0),
        decoders=fields.pop("dec", 0),
        encoders=fields.pop("enc", 0),
        jpeg_engines=fields.pop("jpeg", 0),
        ofa_engines=fields.pop("ofa", 0),
        instances=fields.pop("most"),
        placements=tuple(mig.MigPlacement(start=start, size=size) for start in starts),
    )


H100 = (
    profile(19, "1g.10gb", range(7), 1, sm=16, ce=1, dec=1, jpeg=1, most=7),
    profile(20, "1g.10gb+me", range(7), 1, sm=16, ce=1, dec=1, jpeg=1, ofa=1, most=1),
    profile(15, "1g.20gb", (0, 2, 4, 6), 2, sm=26, ce=1, dec=1, jpeg=1, most=4),
    profile(14, "2g.20gb", (0, 2, 4), 2, sm=32, ce=2, dec=2, jpeg=2, most=3),
    profile(9, "3g.40gb", (0, 4), 4, sm=60, ce=3, dec=3, jpeg=3, most=2),
    profile(5, "4g.40gb", (0,), 4, sm=64, ce=4, dec=4, jpeg=4, most=1),
    profile(0, "7g.80gb", (0,), 8, sm=132, ce=8, dec=7, jpeg=7, ofa=1, most=1),
)
A100 = (
    profile(19, "1g.5gb", range(7), 1, sm=14, ce=1, most=7),
    profile(20, "1g.5gb+me", range(7), 1, sm=14, ce=1, dec=1, jpeg=1, ofa=1, most=1),
    profile(15, "1g.10gb", (0, 2, 4, 6), 2, sm=14, ce=1, dec=1, most=4),
    profile(14, "2g.10gb", (0, 2, 4), 2, sm=28, ce=2, dec=1, most=3),
    profile(9, "3g.20gb", (0, 4), 4, sm=42, ce=3, dec=2, most=2),
    profile(5, "4g.20gb", (0,), 4, sm=56, ce=4, dec=2, most=1),
    profile(0, "7g.40gb", (0,), 8, sm=98, ce=7, dec=5, jpeg=1, ofa=1, most=1),
)
A30 = (
    profile(14, "1g.6gb", range(4), 1, sm=14, ce=1, dec=1, most=4),
    profile(21, "1g.6gb+me", range(4), 1, sm=14, ce=1, dec=1, jpeg=1, ofa=1, most=1),
    profile(5, "2g.12gb", (0, 2), 2, sm=28, ce=2, dec=2, most=2),
    profile(6, "2g.12gb+me", (0, 2), 2, sm=28, ce=2, dec=2, jpeg=1, ofa=1, most=1),
    profile(0, "4g.24gb", (0,), 4, sm=56, ce=4, dec=4, jpeg=1, ofa=1, most=1),
)
RTX = (
    profile(14, "1g.24gb", (0, 3, 6, 9), 3, sm=46, ce=1, dec=1, enc=1, jpeg=1, most=4),
    profile(21, "1g.24gb+me", (0, 3, 6, 9), 3, sm=46, ce=1, dec=1, enc=1, jpeg=1, ofa=1, most=1),
    profile(65, "1g.24gb+me.all", (0, 3, 6, 9), 3, sm=46, ce=1, dec=4, enc=4, jpeg=4, ofa=1, most=1),
    profile(67, "1g.24gb-me", (0, 3, 6, 9), 3, sm=46, ce=1, most=4),
    profile(5, "2g.48gb", (0, 6), 6, sm=94, ce=2, dec=2, enc=2, jpeg=2, most=2),
    profile(64, "2g.48gb+me.all", (0, 6), 6, sm=94, ce=2, dec=4, enc=4, jpeg=4, ofa=1, most=1),
    profile(0, "4g.96gb", (0,), 12, sm=188, ce=4, dec=4, enc=4, jpeg=4, ofa=1, most=1),
)
TABLES = {"h100": H100, "a100": A100, "a30": A30, "rtx": RTX}

OFF = model.MigMode(current=False, pending=False)
ON = model.MigMode(current=True, pending=True)


def gpu(bus: int, **changes: Any) -> model.Gpu:
    """An H100 with its profiles, MIG off."""
    return publishing.gpu(bus, **{"mig_mode": OFF, "mig_profiles": H100, **changes})


def ampere(bus: int, **changes: Any) -> model.Gpu:
    """An A100 with its profiles, MIG off."""
    facts = {"product": "NVIDIA A100-SXM4-40GB", "architecture": "Ampere", "compute_capability": (8, 0)}
    return gpu(bus, **{"mig_profiles": A100, "multiprocessors": 108, "memory_bytes": 40960 << 20, **facts, **changes})


def instance(number: int, start: int, profile_id: int = 19, *, size: int = 1, **changes: Any) -> mig.MigInstance:
    """A GPU instance that can be handed out."""
    made = mig.MigInstance(
        gpu_instance=number,
        profile_id=profile_id,
        placement=mig.MigPlacement(start=start, size=size),
        compute_instance=0,
        uuid=f"MIG-{number:08x}-{start:04x}-0000-0000-000000000000",
    )
    return replace(made, **changes)
