# SPDX-License-Identifier: Apache-2.0
"""Which MIG instances on this node are the agent's own, for those who look at a Snapshot that is already a little old."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from typing import Protocol

from driver import values
from driver.prepare import ledger

_FORGET_S = 3600.0
"""A Snapshot of before that long ago is not looked at any more."""


class Record(Protocol):
    """What this needs of the record."""

    def held_devices(self) -> frozenset[str]:
        """The devices that some claim has. Raises RecordError."""


class Own:
    """Knows the agent's own partitions by their device names. Methods from any thread."""

    def __init__(self, record: Record, *, clock: Callable[[], float] = time.time) -> None:
        self._record = record
        self._clock = clock
        self._guard = threading.Lock()
        self._released: dict[str, float] = {}

    def released(self, devices: Iterable[ledger.HeldDevice]) -> None:
        """The instances of some devices were just removed; said before the record forgets that they were there."""
        now = self._clock()
        with self._guard:
            for name, at in tuple(self._released.items()):
                if now - at > _FORGET_S:
                    del self._released[name]
            self._released |= {device.name: now for device in devices if device.place is not None}

    def names(self, taken_at: float) -> frozenset[str]:
        """The partitions that the record holds, and those that were removed after a Snapshot that began at `taken_at` (seconds
        since the epoch). An instance in that Snapshot at any other place was made by somebody else. Raises RecordError.

        Asked after the Snapshot was taken out of the inventory: an instance of ours is in the record before it is on the GPU.
        """
        held = frozenset(name for name in self._record.held_devices() if values.gpu_of(name) != name)
        with self._guard:
            return held | {name for name, at in self._released.items() if at >= taken_at}
