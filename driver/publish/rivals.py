# SPDX-License-Identifier: Apache-2.0
"""Who else offers our GPUs, remembered for a while after it was last seen. One thread.

Kubelet wipes a driver's slices when its plugin is away for half a minute, and the driver publishes them again: its silence
must last before we take its place.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from discovery.address import PciAddress
from driver.publish import coexistence, node


class Rivals:
    """Looks at other drivers' slices and at the Node."""

    def __init__(self, facts: node.NodeFacts, *, quiet_s: float, clock: Callable[[], float]) -> None:
        """`quiet_s`: how long nobody may have been seen."""
        self._facts = facts
        self._quiet_s = quiet_s
        self._clock = clock
        self._seen: str | None = None
        self._until = 0.0

    def look(self, foreign: Iterable[Mapping[str, Any]], *, ours: Collection[PciAddress]) -> str | None:
        """Why nothing may be published; None when nobody is in the way. `foreign`: the slices of other drivers on this node.

        Raises ApiError where the Node cannot be read.
        """
        by_plugin = coexistence.device_plugin(self._facts.look())
        if by_plugin is not None:
            self._facts.hurry()
        seen = coexistence.other_driver(foreign, ours=ours) or by_plugin
        if seen is not None:
            self._seen, self._until = seen, self._clock() + self._quiet_s
        elif self._clock() >= self._until:
            self._seen = None
        if self._seen is None:
            return None
        return f"Nothing is published: {self._seen}. Remove one of the two, or start with --allow-coexistence"

    def again_s(self) -> float | None:
        """In how many seconds to look again even if nothing changes."""
        return self._until - self._clock() if self._seen is not None else None
