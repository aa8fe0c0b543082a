# SPDX-License-Identifier: Apache-2.0
"""Changing the hardware: GPU instances are made and removed, and GPUs switch between whole and divided. The interface alone;
workers.py does it in processes of their own.

A partition is named by where it is (GPU, profile, start), never by the numbers or the UUID that the driver gives to an
instance, which are others after every creation: what a crash left behind is found again by its place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Protocol

from discovery import mig
from discovery.address import PciAddress


class Kind(StrEnum):
    """Why work was not done: the `kind` of a WorkError."""

    OCCUPIED = "occupied"
    """An instance that is not of this claim overlaps a wanted place; the message says which: its id, profile, UUID, slices."""
    IN_USE = "in-use"
    """Programs use the GPU, or the instance; the message lists their process ids where NVML tells them."""
    INSUFFICIENT_RESOURCES = "insufficient-resources"
    """The driver has no room for the instance, although its memory slices are free: others hold the multiprocessors or engines."""
    NOT_SUPPORTED = "not-supported"
    """This GPU, driver or node cannot do it at all: no NVML, a library without the function, MIG off and not to be enabled."""
    LOST = "lost"
    """The GPU does not answer on the bus."""
    TIMEOUT = "timeout"
    """No answer in time. The worker is killed, and how far it came is not known: repeat it with `begun`, or destroy."""
    FAILED = "failed"
    """Anything else: the worker crashed, or NVML gave another error. As for `timeout`, it may be half done."""


class Work(Protocol):
    """Something that changes the hardware. Thread-safe; calls for different GPUs never wait for each other, calls for one GPU
    take turns, over all processes of this node that share a state folder.

    Every call raises errors.WorkError when it did not do what it says. `timeout_s` bounds a call: waiting for the turn,
    for a worker, for NVML. The time that `commit` takes is not counted.
    """

    def create(
        self,
        gpu: PciAddress,
        wanted: Sequence[mig.Partition],
        *,
        begun: bool,
        toggle: bool,
        commit: Callable[[], None],
        timeout_s: float,
    ) -> tuple[mig.MigInstance, ...]:
        """Make GPU instances, each with one compute instance that takes all of it. All or none. The answer is in the order of
        `wanted`, and all of it is `whole`.

        First looks that every place is free. Then calls `commit` in the calling thread, once, which makes durable that this
        has begun: if it raises, nothing was changed and that error leaves here. Then, if MIG is off and `toggle`, enables it;
        then creates. On a failure in the middle what this call made is removed again; that a `timeout` or a crash comes
        before the removal is possible. The error is `clean` where there is surely nothing of the call: never with `begun`.

        `begun`: `commit` was reached before, in a call whose end is not known. An instance that is found at exactly a wanted
        place, of exactly the wanted profile, is then of this claim: it is kept, completed with a compute instance if it has
        none, and answered. Without `begun` it is as foreign as any other instance that overlaps a wanted place.

        `wanted` are partitions of `gpu`, at least one, no two of them alike; ValueError otherwise.
        """

    def destroy(self, gpu: PciAddress, partitions: Sequence[mig.Partition], *, timeout_s: float) -> None:
        """Remove the instances of these profiles at these places, compute instances first. What is not there is done; that the
        GPU has no MIG, or MIG is off, or an instance of another profile is there, means that it is not there.
        """

    def whole(self, gpu: PciAddress, *, toggle: bool, timeout_s: float) -> None:
        """See that the GPU can be used whole, that is: MIG is off, or there is none. Disables it if `toggle` and no instance
        exists; an instance that exists is `occupied`, whosever it is. MIG on and not `toggle` is `not-supported`.
        """

    def close(self) -> None:
        """End the workers; idempotent, and from any thread. Calls under way and later ones raise WorkError."""
