# SPDX-License-Identifier: Apache-2.0
"""The compute instance profiles of a GPU instance, as far as `nvidia-smi mig -lcip` is public. Pure.

Of 1, 2, 3 and 4 compute slices there are those that are less than it has (3 of 7 only), and one that takes all, with the ids of
NVML_COMPUTE_INSTANCE_PROFILE_*. A GPU instance of one slice that has more multiprocessors than a compute slice (1g with twice the
memory, on most GPUs from Hopper on) has both: id 0 is the slice, id 7 (1_SLICE_REV1) takes all and is what nvidia-smi makes
(1g.24gb of a GH200: https://github.com/kf-cuanschutz/NVIDIA_Grace_Hopper_benchmarking_logs_; 1g.67gb of a B300:
https://github.com/kubernetes-sigs/dra-driver-nvidia-gpu/issues/1454). Where a smaller one may begin in a GPU instance is not
public: anywhere.
"""

from __future__ import annotations

from collections.abc import Mapping

from discovery.mock import abi, state

_NOT_OFFERED = {(3, 4)}
"""Compute slices, and those of the GPU instance."""


def profiles(profile: state.MigProfile, multiprocessors: Mapping[int, int]) -> tuple[state.MigComputeProfile, ...]:
    """Those of a GPU instance profile. `multiprocessors`: of compute instances of so many slices that do not take all."""
    smaller = [
        _profile(abi.COMPUTE_INSTANCE_PROFILES[slices], f"{slices}c.{profile.name}", slices, count, profile.slices)
        for slices, count in sorted(multiprocessors.items())
        if count < profile.multiprocessors and _is_offered(slices, profile.slices)
    ]
    both = profile.slices == 1 and bool(smaller)
    whole = abi.COMPUTE_INSTANCE_1_SLICE_REV1 if both else abi.COMPUTE_INSTANCE_PROFILES[profile.slices]
    return (*smaller, _profile(whole, profile.name, profile.slices, profile.multiprocessors, profile.slices))


def _is_offered(slices: int, of: int) -> bool:
    return slices in abi.COMPUTE_INSTANCE_PROFILES and (slices, of) not in _NOT_OFFERED and (slices < of or of == 1)


def _profile(number: int, name: str, slices: int, multiprocessors: int, of: int) -> state.MigComputeProfile:
    return state.MigComputeProfile(
        number=number,
        id=number,
        name=name,
        slices=slices,
        multiprocessors=multiprocessors,
        instances=of // slices,
        placements=tuple(state.MigPlacement(start=start, size=slices) for start in range(of - slices + 1)),
    )
