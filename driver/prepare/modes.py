# SPDX-License-Identifier: Apache-2.0
"""What is set on a whole GPU while shares of it are prepared, and put back after the last one: who may use it, and for how long a turn.

Idempotent in both directions, and whatever was set before is on disk before it is changed. The caller holds the lock of the GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from discovery import limits, work
from discovery.address import PciAddress
from discovery.errors import WorkError
from discovery.limits import ComputeMode
from driver.prepare import duties, gpusettings
from driver.sharing.shares import TimeSlice

SeenMode = Callable[[PciAddress], ComputeMode | None]
"""The compute mode of a GPU as it was last seen."""


class Slices(Protocol):
    """Where it is set how long a turn of a GPU is; timeslices.TimeSlices is one. Its methods raise WorkError."""

    def get(self, uuid: str, *, timeout_s: float) -> TimeSlice | None:
        """How long a turn of a GPU is, None where that is not known."""

    def set(self, uuid: str, turn: TimeSlice, *, timeout_s: float) -> None:
        """Set it."""


class Modes:
    """Changes and restores. Methods raise WorkError."""

    def __init__(
        self,
        limiting: limits.Limiting,
        slices: Slices,
        settings: gpusettings.GpuSettings,
        *,
        seen: SeenMode,
    ) -> None:
        self._limiting = limiting
        self._slices = slices
        self._settings = settings
        self._seen = seen

    def one_process(self, gpu: PciAddress, *, begun: bool, timeout_s: float) -> ComputeMode:
        """Leave a GPU to one program, which the server of MPS is; the mode before. `begun`: an earlier call may have done that
        already, so that what is found tells nothing.
        """
        found = self._get(gpu)
        known = found.compute_mode is not None
        if not known:
            seen = self._seen(gpu)
            if seen is None or (begun and seen is ComputeMode.EXCLUSIVE_PROCESS):
                seen = ComputeMode.DEFAULT
            found = replace(found, compute_mode=seen)
            self._put(gpu, found)
        before = self._limiting.set_compute_mode(gpu, ComputeMode.EXCLUSIVE_PROCESS, timeout_s=timeout_s)
        if not known and not begun and before is not found.compute_mode:
            self._put(gpu, replace(found, compute_mode=before))
        return before

    def restore_process(self, gpu: PciAddress, *, timeout_s: float) -> None:
        """Let those use a GPU again who might before."""
        found = self._get(gpu)
        if found.compute_mode is not None:
            self._limiting.set_compute_mode(gpu, found.compute_mode, timeout_s=timeout_s)
            self._put(gpu, replace(found, compute_mode=None))

    def turns(self, gpu: PciAddress, wanted: duties.Turns, *, timeout_s: float, again: bool = False) -> None:
        """Have programs take turns of that length. `again`: also where that was done before, as a reload of the driver forgets it."""
        found = self._get(gpu)
        if found.time_slice_set is wanted.turn and not again:
            return
        if found.time_slice is None:
            before = self._slices.get(wanted.uuid, timeout_s=timeout_s)
            found = replace(found, time_slice=before or TimeSlice.DEFAULT)
            self._put(gpu, found)
        self._slices.set(wanted.uuid, wanted.turn, timeout_s=timeout_s)
        self._put(gpu, replace(found, time_slice_set=wanted.turn))

    def restore_turns(self, gpu: PciAddress, uuid: str, *, timeout_s: float) -> None:
        """Have turns of a GPU be as long as before."""
        found = self._get(gpu)
        if found.time_slice is not None:
            self._slices.set(uuid, found.time_slice, timeout_s=timeout_s)
            self._put(gpu, replace(found, time_slice=None, time_slice_set=None))

    def restore(self, gpu: PciAddress, uuid: str | None, *, timeout_s: float) -> bool:
        """Put back all that was changed on a GPU of which nothing is shared any more; whether that was anything. `uuid`: None where
        it is not known, so that turns cannot be restored.
        """
        found = self._get(gpu)
        if found == gpusettings.NOTHING:
            self._put(gpu, found)
            return False
        self.restore_process(gpu, timeout_s=timeout_s)
        if uuid is not None:
            self.restore_turns(gpu, uuid, timeout_s=timeout_s)
        return True

    def gpus(self) -> tuple[PciAddress, ...]:
        """The GPUs of which something may have been changed."""
        try:
            return self._settings.gpus()
        except OSError as error:
            raise _unusable(error) from error

    def _get(self, gpu: PciAddress) -> gpusettings.Found:
        try:
            return self._settings.get(gpu)
        except OSError as error:
            raise _unusable(error) from error

    def _put(self, gpu: PciAddress, found: gpusettings.Found) -> None:
        try:
            self._settings.put(gpu, found)
        except OSError as error:
            raise _unusable(error) from error


def _unusable(error: OSError) -> WorkError:
    return WorkError(
        f"what was set on a GPU before cannot be kept in the state folder: {error}",
        kind=work.Kind.FAILED,
        retryable=True,
    )
