# SPDX-License-Identifier: Apache-2.0
"""Shares of a device: in which portions memory and compute are given out, and what keeps a claim inside its portion. Pure.

Two levels of enforcement, apart: one for memory, one for compute, each listed from the strongest to the weakest. An admin names
the weakest that is acceptable; the strongest that the node can do is used, and what is used is what is published. Each
level says what a container can do that does its best to get more than its share.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

COMPUTE_WHOLE = 100
"""Percent of the multiprocessors of a whole GPU."""


class Memory(StrEnum):
    """What keeps a share inside its memory, strongest first."""

    CGROUP = "cgroup"
    """The driver counts all device memory of the pod's cgroup (nvmlDeviceSetMemoryLimits_v1, driver 615 and newer, cgroup v2)."""
    MPS = "mps"
    """The server of MPS v3 holds the limit of the share's namespace (driver 615 and newer). A program can drop it: one that names a
    GPU which it has not in CUDA_MPS_PINNED_DEVICE_MEM_LIMIT has no limit at all (NVIDIA Dynamo documentation, "Per-GPU Compute and
    Memory Limits with MPS"), so this holds programs that do not try.
    """
    COOPERATIVE = "cooperative"
    """Legacy MPS: a limit of each process, in an environment that the container can change."""
    NONE = "none"
    """Nothing: the share is advice."""


class Compute(StrEnum):
    """What keeps a share inside its percentage of the multiprocessors, strongest first."""

    MPS = "mps"
    """The server of MPS v3 holds the limit of the share's namespace."""
    COOPERATIVE = "cooperative"
    """Legacy MPS: a limit of each process, in an environment that the container can change."""
    TIMESLICE = "timeslice"
    """Processes take turns at the whole GPU; there is no percentage."""
    NONE = "none"
    """Nothing is set: the share is advice."""


class TimeSlice(StrEnum):
    """How long a turn is (`nvidia-smi compute-policy --set-timeslice`)."""

    DEFAULT = "default"
    SHORT = "short"
    MEDIUM = "medium"
    LONG = "long"


@dataclass(frozen=True, slots=True, kw_only=True)
class Enforcement:
    """What keeps the shares of one device apart."""

    memory: Memory
    compute: Compute

    @property
    def by_mps(self) -> bool:
        """Whether MPS v3 has a part in it."""
        return self.memory is Memory.MPS or self.compute is Compute.MPS

    @property
    def by_legacy_mps(self) -> bool:
        """Whether legacy MPS has a part in it."""
        return self.memory is Memory.COOPERATIVE or self.compute is Compute.COOPERATIVE


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """How a device is divided into shares, as an admin says it. `memory_step` in bytes; `compute_step` in percent of the whole GPU,
    a divisor of 100; `default_compute`: what a claim that asks for memory only is charged, None: all; `memory` and `compute`: the
    weakest enforcement that is acceptable; `time_slice`: how long a turn is where shares take turns.
    """

    memory_step: int
    compute_step: int
    max_sharers: int
    memory: Memory
    compute: Compute
    default_compute: int | None = None
    time_slice: TimeSlice = TimeSlice.DEFAULT


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """One capacity of a device and its request policy (resource.k8s.io/v1 CapacityRequestPolicy): a request is rounded up to a
    multiple of `step`, which is the least, too; no request is `default`; more than `most` is impossible. All <= `value`.
    """

    value: int
    default: int
    step: int
    most: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What is offered of one device. `memory` in bytes; `compute` in percent of the whole GPU, None where shares take turns;
    `sharers`: how many claims there may be.
    """

    memory: Capacity
    compute: Capacity | None
    sharers: int


def terms(shares: Shares, enforcement: Enforcement, *, memory_bytes: int, compute: int) -> Terms | None:
    """The terms of a device with so much memory, and so many percent of the multiprocessors of its GPU (100: a whole GPU). None
    where two steps are more than there is, which the API does not take (validateRequestPolicyRange).
    """
    memory = _capacity(memory_bytes, shares.memory_step, None)
    if memory is None:
        return None
    if enforcement.compute is Compute.TIMESLICE:
        return Terms(memory=memory, compute=None, sharers=shares.max_sharers)
    portion = _capacity(compute, shares.compute_step, shares.default_compute)
    if portion is None:
        return None
    return Terms(memory=memory, compute=portion, sharers=shares.max_sharers)


def _capacity(value: int, step: int, default: int | None) -> Capacity | None:
    if 2 * step > value:
        return None
    most = value // step * step
    return Capacity(value=value, default=most if default is None else min(default, most), step=step, most=most)
