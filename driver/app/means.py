# SPDX-License-Identifier: Apache-2.0
"""What shares of this node can be kept apart with: the MPS supervisor, nvidia-smi of the driver root, and the cgroups of pods, looked at
every few seconds.

Who decides on policies gets an answer at once, from the last look. A supervisor that was there is missed only after a while: it is
restarted in seconds, and GPUs that nobody has would be offered otherwise and back.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path

from discovery import model
from driver.mps import values
from driver.mps.shares import Protocol
from driver.sharing import abilities, nodeabilities

logger = logging.getLogger(__name__)

LOOK_S = 5.0
AWAY_S = 120.0
"""How long a supervisor may be away, also when the agent starts, as both do with their node."""


def found(
    ability: values.Ability | None, *, directory: Path, time_slices: str | None, pods: str | None, passing: bool = False
) -> nodeabilities.Means:
    """What was found. `directory`: where a supervisor was asked; `passing`: one that did not answer may be back soon."""
    if ability is None:
        why = f"no MPS supervisor answers in {directory}: run `nearfield mps` on this node, as component mps of the deployment does"
        return nodeabilities.Means(mps_v3=why, mps_legacy=why, time_slices=time_slices, pods=pods, mps_passing=passing)
    return nodeabilities.Means(
        mps_v3=_why_not(ability, Protocol.V3),
        mps_legacy=_why_not(ability, Protocol.LEGACY),
        time_slices=time_slices,
        pods=pods,
    )


def _why_not(ability: values.Ability, protocol: Protocol) -> str | None:
    if protocol in ability.protocols:
        return None
    return ability.reasons.get(protocol) or f"the MPS supervisor does not speak {protocol}"


class Watched:
    """Methods from any thread, `run` from one."""

    def __init__(
        self,
        *,
        directory: Path,
        ability: Callable[[], values.Ability | None],
        time_slices: Callable[[], str | None],
        pods: Callable[[], str | None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`ability`: that of the supervisor in `directory`; `time_slices`: why turns cannot be set; `pods`: why the cgroups of pods
        cannot be reached. None of them raises.
        """
        self._directory = directory
        self._ability = ability
        self._time_slices = time_slices
        self._pods = pods
        self._clock = clock
        self._answered_s = clock()
        self._means = nodeabilities.Means(
            mps_v3="nobody has looked yet",
            mps_legacy="nobody has looked yet",
            time_slices=None,
            pods=None,
            mps_passing=True,
        )
        self._looked = threading.Event()

    def can(self, snapshot: model.Snapshot) -> abilities.Can:
        """What can be enforced of the shares of the GPUs of a Snapshot, by the last look."""
        means = self._means
        return lambda gpu: nodeabilities.node_abilities(gpu, snapshot, means)

    def wait(self, timeout_s: float) -> None:
        """Wait for the first look, or until the time is over."""
        self._looked.wait(timeout_s)

    def look(self) -> bool:
        """Look again; whether anything has changed."""
        ability = self._ability()
        now_s = self._clock()
        if ability is not None:
            self._answered_s = now_s
        before = self._means
        self._means = found(
            ability,
            directory=self._directory,
            time_slices=self._time_slices(),
            pods=self._pods(),
            passing=now_s - self._answered_s < AWAY_S,
        )
        self._looked.set()
        return self._means != before

    def run(self, stop: threading.Event, *, changed: Callable[[], None]) -> None:
        """Look until the end. `changed` is called after a look that found something else."""
        while not stop.is_set():
            try:
                if self.look():
                    changed()
            except Exception:
                # The last door of the loop: one bad look must not be the last one.
                logger.exception("What keeps shares apart could not be looked at")
            stop.wait(LOOK_S)
