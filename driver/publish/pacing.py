# SPDX-License-Identifier: Apache-2.0
"""How fast to try again, and how often to write at most. Values in, seconds out; clocks are given.

A repair is due at once. Only when somebody undoes our writes again and again do they slow down, to a steady trickle that
never ends: the API server is not ours alone, and giving up would leave the node out of use for good.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """The periods of publishing, in seconds."""

    watch_s: float = 480.0
    """The server ends a watch after this, in good order; client-go asks for five to ten minutes."""

    silence_s: float = 90.0
    """Bookmarks come every minute; without one for this long the server is taken for gone."""

    unled_look_s: float = 2.0
    """How often an instance that may not write looks whether it may: the one that leads can die without a word."""

    record_again_s: float = 5.0
    """The record is put right by the room that owns it; this often we look whether it is."""

    quiet_after_conflict_s: float = 60.0
    """A driver whose slices kubelet has just wiped is back soon: its silence must last before we take its place."""

    writes_at_once: int = 20
    write_every_s: float = 1.5
    """Against somebody who undoes our writes: so many at once, then one this often, which still puts a slice back within 2 s."""


class Backoff:
    """Pauses that double from `first_s` to `most_s`, with some chance in them so that nodes do not march in step."""

    def __init__(self, *, first_s: float, most_s: float) -> None:
        self._first_s = first_s
        self._most_s = most_s
        self._next_s = first_s

    def failed(self) -> float:
        """How long to wait after one more failure."""
        pause, self._next_s = self._next_s, min(self._next_s * 2, self._most_s)
        return pause * random.uniform(0.75, 1.0)  # noqa: S311 - no secret

    def passed(self) -> None:
        """It works again."""
        self._next_s = self._first_s


class WriteBudget:
    """Writes that may be done: `burst` at once, and one more every `refill_s`."""

    def __init__(self, *, burst: int, refill_s: float, clock: Callable[[], float]) -> None:
        self._burst = burst
        self._refill_s = refill_s
        self._clock = clock
        self._left = float(burst)
        self._at = clock()

    def wait_s(self, *, urgent: bool = False) -> float:
        """How long until a change may begin; 0: now. An urgent one may go as far into debt as the burst is long."""
        self._refill()
        least = 1 - self._burst if urgent else 1
        return 0.0 if self._left >= least else (least - self._left) * self._refill_s

    def spend(self) -> None:
        """A write was made. A change of several slices is never cut in the middle: it may leave a debt."""
        self._refill()
        self._left -= 1

    def _refill(self) -> None:
        now = self._clock()
        self._left = min(float(self._burst), self._left + (now - self._at) / self._refill_s)
        self._at = now
