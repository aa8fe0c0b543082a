# SPDX-License-Identifier: Apache-2.0
"""When to look at the hardware after hints that it changes. Pure: times are given, seconds of one clock.

Hints come in bursts: one GPU that is plugged in gives several, a chassis dozens. One look after a burst sees the whole
change, and so it is published by one write. A burst that does not end is cut, and hints that come again and again are
looked after less and less often: a look costs the CPU and wakes the driver.
"""

from __future__ import annotations

QUIET_S = 0.3
"""A burst has ended when this long nothing was heard. What follows upon a look, until the slice is written, has to fit into
the rest of a second.
"""

LONGEST_S = 5.0
"""A look is due after this long, whether it is quiet or not."""

LOOKS_AT_ONCE = 10
LOOK_EVERY_S = 5.0
"""So many looks may follow upon each other, then one this often."""


class Burst:
    """The hints since the last look. Not for several threads at once."""

    def __init__(self) -> None:
        self._first: float | None = None
        self._last = 0.0
        self._credit = float(LOOKS_AT_ONCE)
        self._counted_at: float | None = None

    def hint(self, now: float) -> bool:
        """Something may have changed. Whether it is the first hint since the last look."""
        begins = self._first is None
        if begins:
            self._first = now
        self._last = now
        return begins

    def due(self) -> float | None:
        """When to look; None without a hint."""
        if self._first is None:
            return None
        at = min(self._last + QUIET_S, self._first + LONGEST_S)
        if self._counted_at is None or self._credit >= 1:
            return at
        return max(at, self._counted_at + (1 - self._credit) * LOOK_EVERY_S)

    def looked(self, now: float) -> None:
        """A look begins, whatever it was due for: it sees what the hints so far were about."""
        if self._first is None:
            return
        earned = 0.0 if self._counted_at is None else (now - self._counted_at) / LOOK_EVERY_S
        self._credit = min(float(LOOKS_AT_ONCE), self._credit + earned) - 1
        self._counted_at = now
        self._first = None
