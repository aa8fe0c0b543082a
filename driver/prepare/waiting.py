# SPDX-License-Identifier: Apache-2.0
"""How long one Prepare waits for what may pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence


class Wait:
    """How long it has waited, and how long it still may."""

    def __init__(self, clock: Callable[[], float], seconds: float, pauses_s: Sequence[float]) -> None:
        self._clock = clock
        self._pauses_s = pauses_s
        self._began = clock()
        self._end = self._began + seconds
        self.pauses = 0

    def seconds(self) -> float:
        """How long it has been."""
        return self._clock() - self._began

    def left_s(self) -> float:
        """How long it may still be."""
        return self._end - self._clock()

    def next_pause_s(self) -> float:
        """How long to wait before looking again, if nothing is heard before."""
        pause = self._pauses_s[min(self.pauses, len(self._pauses_s) - 1)]
        self.pauses += 1
        return max(0.0, min(pause, self.left_s()))
