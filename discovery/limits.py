# SPDX-License-Identifier: Apache-2.0
"""What keeps programs that share a GPU apart, as far as NVML sets it: the memory of a cgroup, and the compute mode. The interface
alone; workers.py does it in processes of their own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from discovery.address import PciAddress


class ComputeMode(StrEnum):
    """Which programs may use a GPU (nvmlComputeMode_t)."""

    DEFAULT = "default"
    EXCLUSIVE_THREAD = "exclusive-thread"
    PROHIBITED = "prohibited"
    EXCLUSIVE_PROCESS = "exclusive-process"
    """One program alone, which the server of MPS is for all its clients."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryLimit:
    """How much memory of a GPU a cgroup may have, in bytes. Above `soft` it may lose it when others are short of it; above `hard` an
    allocation fails; None: as much as there is.
    """

    soft: int
    hard: int | None


NO_LIMIT = MemoryLimit(soft=0, hard=None)
"""That of a cgroup for which nobody set one; setting it takes away the one that was set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryUse:
    """The limit of a cgroup on one GPU, and what it uses of it in bytes; `used` None where the driver does not tell."""

    limit: MemoryLimit
    used: int | None


_ROUNDING = 16


def alike(asked: MemoryLimit, told: MemoryLimit) -> bool:
    """Whether the limit that a driver tells is the one that was asked for. Drivers may round: NVIDIA's own example sets 8000 MiB and
    reads 8192 ("MPS v3 Memory Partitioning"), so a sixteenth more or less is the same.
    """
    if (asked.hard is None) != (told.hard is None):
        return False
    pairs = [(asked.soft, told.soft)]
    if asked.hard is not None and told.hard is not None:
        pairs.append((asked.hard, told.hard))
    return all(abs(a - b) * _ROUNDING <= a for a, b in pairs)


def check(wanted: Iterable[MemoryLimit]) -> None:
    """ValueError for limits that no driver can take."""
    for limit in wanted:
        if limit.soft < 0 or (limit.hard is not None and not limit.soft <= limit.hard < 1 << 63):
            raise ValueError(f"no limit of memory: {limit}")


class Limiting(Protocol):
    """Something that sets limits. Thread-safe; calls for one GPU take turns with each other and with those of work.Work.

    Every call raises errors.WorkError when it did not do what it says: `not-supported` where driver, kernel or GPU cannot do it
    (a driver older than 615, cgroup v1, MIG), `failed` with the path where a cgroup cannot be limited: it is not there, or its
    parent does not hand the dmem controller down.
    """

    def limit_memory(self, gpu: PciAddress, wanted: Mapping[str, MemoryLimit], *, timeout_s: float) -> None:
        """Set the limits of cgroups, by their full paths below the root of cgroups that the caller was given, and read them back. A cgroup that is gone has no limit: with NO_LIMIT that
        is done, with any other it is an error. Every one is tried before the first error leaves. Raises ValueError as `check`.
        """

    def memory_use(self, gpu: PciAddress, cgroups: Sequence[str], *, timeout_s: float) -> Mapping[str, MemoryUse]:
        """The limits of cgroups, by their full paths; those that are gone are left out."""

    def set_compute_mode(self, gpu: PciAddress, mode: ComputeMode, *, timeout_s: float) -> ComputeMode:
        """Set the compute mode; the one before."""
