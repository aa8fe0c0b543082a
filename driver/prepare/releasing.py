# SPDX-License-Identifier: Apache-2.0
"""Puts back what was changed for claims: at once where the hardware does it, and otherwise behind kubelet's back.

Kubelet calls Unprepare until it succeeds, and keeps the pod until then. So where an instance cannot be removed now (the library
hangs, somebody's monitoring still uses it), kubelet is told that the claim is unprepared, its row becomes `releasing`, and
nobody gets the device until a thread here, or the one of the next agent on this node, has put it back.

What shares of a GPU have set is put back by whoever is the last, so that is done, and the row forgotten, under the lock of the GPU.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from discovery import address
from discovery.errors import WorkError
from driver import condition, context
from driver.errors import RecordError
from driver.prepare import crashpoints, hands, ledger, locks, partitions, plan, store
from driver.prepare.crashpoints import Point

logger = logging.getLogger(__name__)

REMOVAL_S = 10.0
"""How long one attempt may take: a real driver needs about a second, and kubelet's deadline is 45 s."""

LOOK_S = 3.0
"""How often it is looked whether another instance of the agent has left something to put back: one query."""

PAUSES_S = (3.0, 3.0, 6.0, 12.0, 30.0, 60.0)
"""Before the second, third, ... attempt in a row that fails."""

_CLAIM_PATIENCE_S = 1.0
_RECORD_S = 30.0


class Leadership(Protocol):
    """Which instance of the agent does it."""

    def leads(self) -> bool:
        """Whether no newer instance lives."""


class Enforcer(Protocol):
    """What keeps shares apart. Called under the locks of the claim and of its GPUs. `others`: every other entry of this boot that has
    a share of one of them. Both raise WorkError, and are idempotent.
    """

    def apply(self, entry: ledger.Entry, others: Sequence[ledger.Entry], *, begun: bool, timeout_s: float) -> None:
        """Keep the shares of an entry to what they may use. `begun`: an earlier call may have done some of it."""

    def undo(self, entry: ledger.Entry, others: Sequence[ledger.Entry], *, timeout_s: float) -> None:
        """Put back what `apply` has set, or may have, as far as no other needs it."""


class Releaser:
    """Removes the instances of claims, and what was set for their shares. `run` in a thread of its own, everything else from any thread
    under the claim's lock.
    """

    def __init__(
        self,
        boot_id: str,
        *,
        record: store.Store,
        hardware: hands.Hands,
        enforcer: Enforcer,
        own: partitions.Own,
        claim_locks: locks.Locks,
        leadership: Leadership,
        stop: threading.Event,
        look_s: float = LOOK_S,
        pauses_s: Sequence[float] = PAUSES_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._boot_id = boot_id
        self._record = record
        self._hands = hardware
        self._enforcer = enforcer
        self._in_force: set[str] = set()
        self._own = own
        self._locks = claim_locks
        self._leadership = leadership
        self._stop = stop
        self._look_s = look_s
        self._pauses_s = pauses_s
        self._clock = clock
        self._version: tuple[int, int] | None = None
        self._failing: frozenset[str] = frozenset()
        self._failures = 0
        self._due_s = clock()
        self._trouble = condition.Condition(logger, recovered="Everything has been put back")

    def gpus(self, entry: ledger.Entry, *, timeout_s: float) -> AbstractContextManager[object]:
        """The locks under which an entry is put back: those of the GPUs that it has shares of. Raises LockUnavailableError."""
        if entry.boot_id != self._boot_id or not entry.enforced:
            return contextlib.nullcontext()
        places = {address.parse(device.address) for device, _ in entry.shared}
        return self._locks.gpus(places, patience=locks.Deadline(timeout_s))

    def enforce(
        self, entry: ledger.Entry, *, begun: bool, timeout_s: float, others: Sequence[ledger.Entry] | None = None
    ) -> None:
        """Keep the shares of an entry to what they may use, under the locks of `gpus`: as Enforcer.apply. `others`: as there, where
        they are known already. Raises WorkError, and RecordError.
        """
        found = self._others(entry) if others is None else others
        self._enforcer.apply(entry, found, begun=begun, timeout_s=timeout_s)
        self._in_force.add(entry.claim.uid)

    def in_force(self, entry: ledger.Entry) -> bool:
        """Whether `enforce` was the last that this agent has done for the shares of an entry."""
        return entry.claim.uid in self._in_force

    def _others(self, entry: ledger.Entry) -> tuple[ledger.Entry, ...]:
        holders = self._record.holders(device.name for device, _ in entry.shared)
        return plan.sharers(holders, entry.claim, self._boot_id)

    def put_back(self, entry: ledger.Entry, *, timeout_s: float) -> None:
        """Remove what was made and set for an entry, or may have been, under the locks of `gpus`. Raises WorkError, and RecordError. What
        is of another boot is gone.
        """
        if entry.boot_id != self._boot_id:
            return
        if entry.enforced:
            self._in_force.discard(entry.claim.uid)
            crashpoints.reach(Point.SHARES_BEFORE_UNDO)
            self._enforcer.undo(entry, self._others(entry), timeout_s=timeout_s)
            crashpoints.reach(Point.SHARES_UNDONE)
        if entry.partitions:
            self._hands.remove(entry.partitions, timeout_s=timeout_s)
            self._own.released(entry.devices)

    def nothing_left(self, entry: ledger.Entry) -> None:
        """What was made for an entry has been removed already; said before the record forgets it."""
        self._own.released(entry.devices)

    def release(self, entry: ledger.Entry, *, timeout_s: float, commit_s: float) -> bool:
        """Put back what a claim has that kubelet wants unprepared, and forget it, or see that it is put back later; whether it is
        now. Raises RecordError.
        """
        try:
            with self.gpus(entry, timeout_s=timeout_s):
                self.put_back(entry, timeout_s=timeout_s)
                self._record.remove(entry, timeout_s=commit_s)
        except (WorkError, locks.LockUnavailableError) as error:
            logger.warning("It is not put back yet, and will be: %s", error)
            if entry.state is not ledger.ClaimState.RELEASING:
                planned = plan.releasing(entry)
                self._record.put(planned, previous=entry, timeout_s=_RECORD_S)
            return False
        return True

    def run(self, released: Callable[[], None]) -> None:
        """Put back what is left to put back, until told to stop. `released` is called whenever something was."""
        while not self._stop.wait(self._look_s):
            try:
                if self._leadership.leads() and self._round():
                    released()
            except RecordError as error:
                self._trouble.failed(f"What is left to put back cannot be read: {error}")
            except Exception:
                # The last door of the loop: one bad round must not leave a device unusable for ever.
                logger.exception("What is left could not be put back")

    def _round(self) -> int:
        """Attempt what is due; how many are done. What is new is due at once, what has failed after its pause."""
        due = self._failing and self._clock() >= self._due_s
        version = self._record.version()
        if version == self._version and not due:
            return 0
        self._version = version
        left = frozenset(self._record.releasing())
        new = left - self._failing
        done = {uid for uid in sorted(left if due else new) if self._attempt(uid)}
        failing = left - done
        if not failing:
            self._trouble.passed()
            self._failures = 0
        elif due or new:
            self._due_s = self._clock() + self._pauses_s[min(self._failures, len(self._pauses_s) - 1)]
            self._failures += 1
        self._failing = failing
        return len(done)

    def _attempt(self, uid: str) -> bool:
        """Put one claim back; whether nothing is left of it to put back. Raises RecordError."""
        try:
            with self._locks.claim(uid, patience=locks.Deadline(_CLAIM_PATIENCE_S)):
                self._finish(uid)
        except locks.LockUnavailableError:
            return False
        except WorkError as error:
            self._trouble.failed(f"Claim {uid} cannot be put back yet: {error}")
            return False
        return True

    def _finish(self, uid: str) -> None:
        entry = self._record.get(uid)
        if entry is None or entry.state is not ledger.ClaimState.RELEASING:
            return
        with context.bound(claim=str(entry.claim)):
            with self.gpus(entry, timeout_s=_CLAIM_PATIENCE_S):
                self.put_back(entry, timeout_s=REMOVAL_S)
                self._record.remove(entry, timeout_s=_RECORD_S)
            logger.info("Put back %s", ", ".join(device.name for device in entry.devices))
