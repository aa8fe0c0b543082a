# SPDX-License-Identifier: Apache-2.0
"""Which of the missing devices somebody still has: the record knows what was prepared here, claims what was allocated.

Claims are listed only while a device is missing that the record does not name: one LIST when such a device appears, then
one after 3 s, 6 s, 12 s, at last every ten minutes. Soon at first, because kubelet unprepares a claim before its pod is gone,
and the control plane takes the allocation back after that: the first LIST always finds a claim that is about to go. A LIST
that fails counts as "held": nothing is dropped on no answer, and the taint need not wait for a server that answers
everything but this.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from driver import condition, errors
from driver.publish import absent, pacing

logger = logging.getLogger(__name__)

LIST_TIMEOUT_S = 15.0
RECORD_AGAIN_S = 30.0
"""How often the record is looked at again while it names a missing device; a query, and `notify` is quicker."""

FIRST_AGAIN_S = 3.0
MOST_AGAIN_S = 600.0
FAILED_AGAIN_S = 2.0
"""First pause after a LIST that failed."""

FAILED_MOST_S = 60.0

FREE_FOR_S = 10.0
"""How long "nobody has it" is believed: until the slice is written the scheduler may give the device away."""


class ClaimsApi(Protocol):
    """Where all claims are listed."""

    def list_claims(self, *, timeout_s: float, keep: Callable[[dict[str, Any]], bool]) -> list[dict[str, Any]]:
        """The claims of the cluster that `keep` wants. Raises ApiError."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """Names of missing devices that somebody has, and in how many seconds to ask again (None: no need)."""

    names: frozenset[str]
    again_s: float | None = None
    trouble: str | None = None
    """Why claims could not be listed."""


class HeldDevices:
    """Answers for one pool. One thread."""

    def __init__(self, api: ClaimsApi, *, driver_name: str, pool: str, clock: Callable[[], float]) -> None:
        self._api = api
        self._driver_name = driver_name
        self._pool = pool
        self._clock = clock
        self._asked: frozenset[str] = frozenset()
        """The names that the last LIST was made for."""
        self._found: frozenset[str] = frozenset()
        self._listed_at = 0.0
        self._due = 0.0
        self._interval_s = FIRST_AGAIN_S
        self._failures = pacing.Backoff(first_s=FAILED_AGAIN_S, most_s=FAILED_MOST_S)
        self._trouble = condition.Condition(logger, recovered="ResourceClaims can be listed again")

    def look(self, missing: Collection[str], recorded: Collection[str]) -> Held:
        """Of `missing`, what is held: everything in `recorded`, and what the last LIST found, made now if it is due."""
        known = frozenset(missing) & frozenset(recorded)
        open_names = frozenset(missing) - known
        if not open_names:
            self._asked = frozenset()
            return Held(names=known, again_s=RECORD_AGAIN_S if known else None)
        now = self._clock()
        fresh = not open_names <= self._asked
        if fresh:
            self._interval_s = FIRST_AGAIN_S
        doubtful = bool(open_names - self._found) and now - self._listed_at > FREE_FOR_S
        if fresh or doubtful or now >= self._due:
            self._listed_at = now
            if self._list(open_names):
                self._failures.passed()
                self._due = now + self._interval_s
                self._interval_s = min(self._interval_s * 2, MOST_AGAIN_S)
            else:
                self._due = now + self._failures.failed()
        still = open_names & self._found
        due = ([max(0.0, self._due - now)] if still else []) + ([RECORD_AGAIN_S] if known else [])
        return Held(names=known | still, again_s=min(due, default=None), trouble=self._trouble.text)

    def _list(self, names: frozenset[str]) -> bool:
        """Ask the server; whether it answered."""
        self._asked = names

        def concerns(claim: Mapping[str, Any]) -> bool:
            return bool(names & absent.held_by(claim, driver_name=self._driver_name, pool=self._pool))

        try:
            claims = self._api.list_claims(timeout_s=LIST_TIMEOUT_S, keep=concerns)
        except errors.ApiError as error:
            self._trouble.failed(f"Nobody knows whether {', '.join(sorted(names))} can leave the slices: {error}")
            self._found = names
            return False
        self._trouble.passed()
        held = (absent.held_by(claim, driver_name=self._driver_name, pool=self._pool) for claim in claims)
        self._found = names & frozenset().union(*held)
        return True
