# SPDX-License-Identifier: Apache-2.0
"""What a GPU can be divided into, as NVML tells it (nvml.h, "Multi Instance GPU"): its GPU instance profiles and their places.
Part of nvmlmig.py.

All of it is checked before anything is built on it: a name becomes the name of a device, a placement the memory of somebody's
program.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from discovery import errors, mig, nvmllibrary, nvmlnumbers

Noted = Callable[[Callable[[], Any]], Any]
"""Reads something, and makes a Finding of a SourceError that is no reason to give the GPU up: None is then the answer."""

_PROFILES = 0x12
"""NVML_GPU_INSTANCE_PROFILE_COUNT: their numbers are below it."""

_ABSENT = frozenset({"not-supported", "invalid-argument"})
"""The answers to a number that names no profile of this GPU, or that this driver does not know."""

_OLD = frozenset({"function-not-found", "argument-version-mismatch"})
"""The answers of a driver that has only the first version of a structure."""

MAX_SLICES = 64
MAX_INSTANCES = 64
"""More than any GPU has; a larger number is no answer."""

_NAME = re.compile(r"[0-9]{1,2}g\.[0-9]{1,4}gb(?:[+-][A-Za-z0-9.,]{1,16})?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What of a profile must be known to list its instances."""

    id: int
    slices: int
    multiprocessors: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Profiles:
    """The profiles of a GPU, in order of id. Immutable while the MIG mode stays (nvml.h, nvmlDeviceGetGpuInstanceProfileInfo).

    `shapes` has also those that are left out of `named`, because no name or place is known: their instances take memory.
    `complete`: none is missing there.
    """

    named: tuple[mig.MigProfile, ...] = ()
    shapes: tuple[Shape, ...] = ()
    complete: bool = True

    def of(self, profile_id: int) -> mig.MigProfile | None:
        """The profile of an id."""
        return next((profile for profile in self.named if profile.id == profile_id), None)


class Description:
    """Describes the GPU of a handle."""

    def __init__(self, pynvml: Any, handle: Any) -> None:
        self._pynvml = pynvml
        self._handle = handle
        self._structure = 2

    def profiles(self, memory_bytes: int | None, noted: Noted) -> Profiles:
        """All that the GPU has, whether MIG is on or not. `memory_bytes`: of the whole GPU, by which a profile is named that has
        no name.
        """
        try:
            self._described(0)
        except errors.SourceError as err:
            if err.kind == "function-not-found":  # a library from before profiles: MIG may be on all the same
                return Profiles(complete=False)
        named: dict[int, mig.MigProfile] = {}
        shapes: dict[int, Shape] = {}
        asked = 0
        for number in range(_PROFILES):
            told = noted(functools.partial(self._described, number))
            asked += told is not None
            for info in told or ():
                shapes[info.id] = Shape(id=info.id, slices=info.sliceCount, multiprocessors=info.multiprocessorCount)
                profile = noted(functools.partial(self._profile, info, number, memory_bytes))
                if profile is not None:
                    named.setdefault(profile.id, profile)
        named |= _revised(named)
        return Profiles(
            named=tuple(named[key] for key in sorted(named)),
            shapes=tuple(shapes[key] for key in sorted(shapes)),
            complete=asked == _PROFILES,
        )

    def _described(self, number: int) -> tuple[Any, ...]:
        """What NVML says of the profile of a number; nothing where the GPU has none."""
        info = self.structured("nvmlDeviceGetGpuInstanceProfileInfo", self._handle, number)
        return () if info is None else (info,)

    def _profile(self, info: Any, number: int, memory_bytes: int | None) -> mig.MigProfile:
        compute = nvmlnumbers.COMPUTE_OF_SLICES.get(info.sliceCount)
        if compute is None or not 0 < info.instanceCount <= MAX_INSTANCES or not info.multiprocessorCount:
            raise malformed(
                f"profile {info.id}: {info.sliceCount} slices, {info.multiprocessorCount} multiprocessors, "
                f"{info.instanceCount} instances"
            )
        return mig.MigProfile(
            id=info.id,
            number=number,
            compute_number=compute,
            name=_name(info, number, memory_bytes),
            slices=info.sliceCount,
            memory_bytes=info.memorySizeMB << 20,
            multiprocessors=info.multiprocessorCount,
            copy_engines=info.copyEngineCount,
            decoders=info.decoderCount,
            encoders=info.encoderCount,
            jpeg_engines=info.jpegCount,
            ofa_engines=info.ofaCount,
            instances=info.instanceCount,
            placements=self._placements(info.id),
        )

    def _placements(self, profile_id: int) -> tuple[mig.MigPlacement, ...]:
        """All that are possible, whatever exists (nvml.h, nvmlDeviceGetGpuInstancePossiblePlacements)."""
        pynvml, function = self._pynvml, "nvmlDeviceGetGpuInstancePossiblePlacements"
        count = pynvml.c_uint(0)
        self._ask(function, self._handle, profile_id, None, pynvml.byref(count))
        if not 0 < count.value <= MAX_SLICES:
            raise malformed(f"profile {profile_id}: {count.value} placements")
        room = (pynvml.c_nvmlGpuInstancePlacement_t * count.value)()
        self._ask(function, self._handle, profile_id, room, pynvml.byref(count))
        places = {mig.MigPlacement(start=each.start, size=each.size) for each in room[: count.value]}
        if not all(each.size and each.start + each.size <= MAX_SLICES for each in places):
            raise malformed(f"profile {profile_id}: placements {sorted(places)}")
        return tuple(sorted(places))

    def structured(self, function: str, *arguments: Any) -> Any:
        """A description in the newest structure that pynvml and the driver both know; None where there is no such thing."""
        while True:
            try:
                return self._ask(function, *arguments, self._structure)
            except errors.SourceError as err:
                if err.kind in _ABSENT:
                    return None
                if err.kind not in _OLD or self._structure == 1:
                    raise
                self._structure = 1

    def _ask(self, function: str, *arguments: Any) -> Any:
        return nvmllibrary.ask(self._pynvml, function, *arguments)


def _revised(named: Mapping[int, mig.MigProfile]) -> dict[int, mig.MigProfile]:
    """The one-slice profiles of more multiprocessors than the plain one has, as those of twice the memory on Hopper: what takes
    all of them is not the plain compute instance, but its first revision.
    """
    plain = next((each.multiprocessors for each in named.values() if each.number == nvmlnumbers.ONE_SLICE), None)
    return {
        key: replace(each, compute_number=nvmlnumbers.ONE_SLICE_REVISED)
        for key, each in named.items()
        if plain is not None and each.slices == 1 and each.multiprocessors > plain
    }


def _name(info: Any, number: int, memory_bytes: int | None) -> str:
    """The name that the driver gives (`MIG 1g.10gb+me`); drivers that give none leave it to whoever asks."""
    try:
        told = str(getattr(info, "name", "") or "").removeprefix("MIG ").strip()
    except UnicodeDecodeError as err:
        raise malformed(f"the name of profile {info.id} is no text") from err
    if told:
        if not _NAME.fullmatch(told):
            raise malformed(f"the name {told[:40]!r} of profile {info.id}")
        return told
    if not memory_bytes:
        raise malformed(
            f"profile {info.id} has no name, and the memory of the GPU is not known, which would give it one"
        )
    part = info.memorySizeMB << 20
    return nvmlnumbers.profile_name(number, info.sliceCount, part_bytes=part, whole_bytes=memory_bytes)


def malformed(what: str) -> errors.SourceError:
    """The error for an answer that should not have been given."""
    return errors.SourceError("nvml", errors.MALFORMED, f"MIG: {what}")
