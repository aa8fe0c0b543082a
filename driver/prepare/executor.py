# SPDX-License-Identifier: Apache-2.0
"""Prepares and unprepares claims for kubelet: the only writer of claims into the record and of their CDI files.

Prepare of a claim: its lock; the record (a completed claim is answered from it, without the API server); `attempt`; the answer
from the row. Unprepare: the file, then the hardware, then the row. So there is a file wherever there is a completed row, but for
the moment of an unprepare, and a record that is lost can be made of the files. What a crash leaves, and what mends it:

- file without row: the next start takes the row up from it, or removes it; a Prepare writes over it;
- row without file: the claim is still held; Prepare and the collector write the file again, Unprepare ends it;
- *started* row: perhaps hardware without an answer; a Prepare of the claim goes on from it, an Unprepare removes what is there,
  and a claim that nobody asks for again is collected;
- *releasing* row: put back by the next agent;
- neither answers kubelet, which asks again with the same UID.

The syncs are those of the rows: a machine that loses power must not have told kubelet of a claim that it forgets. A file
that such a machine loses was of the boot before, and is written again by the Prepare of this one.

A failed Prepare costs the pod 60 to 90 s (kubelet's own retry), so what may soon pass is waited for inside the call, and
what cannot pass fails at once.
"""

from __future__ import annotations

import contextlib
import contextvars
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol, TypeVar

from driver import context, values
from driver.errors import ClaimError, RecordError
from driver.prepare import attempt, cdidir, claims, crashpoints, locks, releasing, store, waiting
from driver.prepare.crashpoints import Point

logger = logging.getLogger(__name__)

Answer = TypeVar("Answer", values.Prepared, values.Unprepared)

WAIT_S = 40.0
"""How long a Prepare waits for what may pass; kubelet's deadline is 45 s."""

RESERVE_S = 5.0
"""What is kept of a deadline for the work after a wait and for the answer."""

PREPARE, UNPREPARE = "prepare", "unprepare"
DONE, REPEATED, FAILED = attempt.DONE, attempt.REPEATED, "failed"

_REMOVAL_MIN_S = 0.5
PAUSES_S = (0.1, 0.25, 0.5, 1.0)
"""How often a waiting Prepare looks for what nobody tells it: another instance's work, the API server, a cancelled call."""

_MESSAGE_MAX_LENGTH = 900
"""Kubelet puts the message into an Event, whose text ends at 1,024 bytes, behind words of its own."""


class Reports(Protocol):
    """Who is told of what happened to claims."""

    def claim_done(self, *, operation: str, result: str, seconds: float) -> None:
        """A claim was answered: PREPARE or UNPREPARE, and DONE, REPEATED or FAILED."""

    def prepare_failed(self, claim: values.ClaimRef, *, message: str) -> None:
        """A claim could not be prepared; the place for an Event on it."""


class Executor:
    """Answers for claims. Methods from any thread; claims never wait for each other unless they share a device."""

    def __init__(
        self,
        attempts: attempt.Attempts,
        *,
        record: store.Store,
        directory: cdidir.CdiDirectory,
        claim_locks: locks.Locks,
        releaser: releasing.Releaser,
        reports: Reports,
        stop: threading.Event,
        wait_s: float = WAIT_S,
        reserve_s: float = RESERVE_S,
        pauses_s: Sequence[float] = PAUSES_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._attempts = attempts
        self._record = record
        self._directory = directory
        self._locks = claim_locks
        self._releaser = releaser
        self._reports = reports
        self._stop = stop
        self._wait_s = wait_s
        self._reserve_s = reserve_s
        self._pauses_s = pauses_s
        self._clock = clock
        self._changed = threading.Condition()
        self._changes = 0
        self._preparing = 0

    def prepare(
        self, refs: Sequence[values.ClaimRef], call: values.Call
    ) -> Mapping[values.ClaimUid, values.Prepared | values.Failed]:
        """Prepare claims side by side; exactly one answer for each UID."""
        with self._counted():
            return self._side_by_side(refs, lambda ref: self._answered(PREPARE, ref, lambda: self._prepare(ref, call)))

    def unprepare(
        self, refs: Sequence[values.ClaimRef], call: values.Call
    ) -> Mapping[values.ClaimUid, values.Unprepared | values.Failed]:
        """Unprepare claims side by side; exactly one answer for each UID. A claim that is not known is unprepared."""
        return self._side_by_side(refs, lambda ref: self._answered(UNPREPARE, ref, lambda: self._unprepare(ref, call)))

    def preparing(self) -> bool:
        """Whether a Prepare is under way."""
        return self._preparing > 0

    def finish(self, timeout_s: float) -> None:
        """Return when no Prepare is under way any more, the agent is told to stop at once (`wake`), or the time is over."""
        with self._changed:
            self._changed.wait_for(lambda: not self._preparing or self._stop.is_set(), timeout_s)

    def wake(self) -> None:
        """Something that a waiting Prepare may wait for has changed: devices, the API server, the record."""
        with self._changed:
            self._changes += 1
            self._changed.notify_all()

    def _side_by_side(
        self, refs: Sequence[values.ClaimRef], work: Callable[[values.ClaimRef], Answer | values.Failed]
    ) -> dict[values.ClaimUid, Answer | values.Failed]:
        """Do the work of each UID once: the first in the caller's thread, each other in one of its own, as one that waits
        for 40 s in a pool would keep those behind it from starting.
        """
        if len(refs) == 1:
            return {refs[0].uid: work(refs[0])}
        unique = tuple({ref.uid: ref for ref in reversed(refs)}.values())
        answers: dict[values.ClaimUid, Answer | values.Failed] = {
            ref.uid: values.Failed(message=f"{ref}: internal error; the log of the agent on this node has the details")
            for ref in unique
        }

        def answer(ref: values.ClaimRef) -> None:
            answers[ref.uid] = work(ref)

        threads = [
            threading.Thread(target=contextvars.copy_context().run, args=(answer, ref), name="claim", daemon=True)
            for ref in unique[1:]
        ]
        for thread in threads:
            thread.start()
        for ref in unique[:1]:
            answer(ref)
        for thread in threads:
            thread.join()
        return answers

    def _answered(
        self, operation: str, ref: values.ClaimRef, work: Callable[[], tuple[Answer, str]]
    ) -> Answer | values.Failed:
        """Do the work of one claim; whatever goes wrong with it is its answer."""
        began = self._clock()
        with context.bound(claim=str(ref)):
            try:
                answer, result = work()
            except ClaimError as error:
                message = str(error)
                logger.warning("Failed to %s: %s", operation, message)
            except locks.LockUnavailableError:
                message = f"{ref}: an earlier call for it, or another claim with one of its GPUs, is still at work"
                logger.warning("Failed to %s: %s", operation, message)
            except OSError as error:
                message = f"{ref}: {error}"
                logger.warning("Failed to %s: %s", operation, message)
            except Exception as error:
                logger.exception("Failed to %s %s", operation, ref)
                message = (
                    f"{ref}: internal error ({type(error).__name__}); the log of the agent on this node has the details"
                )
            else:
                self._reports.claim_done(operation=operation, result=result, seconds=self._clock() - began)
                return answer
            self._reports.claim_done(operation=operation, result=FAILED, seconds=self._clock() - began)
            message = message if len(message) <= _MESSAGE_MAX_LENGTH else message[:_MESSAGE_MAX_LENGTH] + "..."
            if operation == PREPARE:
                self._reports.prepare_failed(ref, message=message)
            return values.Failed(message=message)

    def _prepare(self, ref: values.ClaimRef, call: values.Call) -> tuple[values.Prepared, str]:
        if not claims.acceptable_uid(ref.uid):
            raise ClaimError(f"{claims.shown(ref.uid)} is no UID of a ResourceClaim")
        with self._locks.claim(ref.uid, patience=call):
            crashpoints.reach(Point.PREPARE_LOCKED)
            if call.over():
                raise ClaimError(f"{ref}: kubelet stopped waiting before its turn came; nothing was done")
            waited = waiting.Wait(self._clock, min(self._wait_s, call.remaining_s() - self._reserve_s), self._pauses_s)
            try:
                return self._attempt_until(ref, waited, call)
            except attempt.HardwareError as error:
                if not error.hung:
                    self._attempts.undo(ref, call, clean=error.clean)
                raise

    def _attempt_until(
        self, ref: values.ClaimRef, waited: waiting.Wait, call: values.Call
    ) -> tuple[values.Prepared, str]:
        """Attempt it until it works, it cannot work, or there is no time left to wait."""
        while True:
            seen = self._changes
            try:
                return self._attempts.prepare(ref, call)
            except ClaimError as error:
                if not error.retryable:
                    raise
                if not self._wait(seen, waited, call):
                    error.waited(waited.seconds())
                    raise
                if waited.pauses == 1:
                    logger.info("Waiting: %s", error)

    @contextlib.contextmanager
    def _counted(self) -> Iterator[None]:
        with self._changed:
            self._preparing += 1
        try:
            yield
        finally:
            with self._changed:
                self._preparing -= 1
                self._changed.notify_all()

    def _wait(self, seen: int, waited: waiting.Wait, call: values.Call) -> bool:
        """Wait for a change or a while; False when there is no time left to wait, or nobody who waits."""
        with self._changed:
            self._changed.wait_for(lambda: self._changes != seen or self._stop.is_set(), waited.next_pause_s())
        return waited.left_s() > 0 and not call.over() and not self._stop.is_set()

    def _unprepare(self, ref: values.ClaimRef, call: values.Call) -> tuple[values.Unprepared, str]:
        if not claims.acceptable_uid(ref.uid):
            return values.Unprepared(), REPEATED
        with self._locks.claim(ref.uid, patience=call):
            crashpoints.reach(Point.UNPREPARE_LOCKED)
            try:
                entry = self._record.get(ref.uid)
                self._directory.remove_claim(ref.uid)
                crashpoints.reach(Point.UNPREPARE_AFTER_CDI_FILE)
                if entry is None:
                    return values.Unprepared(), REPEATED
                commit_s = max(call.remaining_s(), self._reserve_s)
                if not (entry.partitions or entry.enforced):
                    self._record.remove(entry, timeout_s=commit_s)
                elif not self._releaser.release(entry, timeout_s=self._removal_s(call), commit_s=commit_s):
                    return values.Unprepared(), DONE
            except RecordError as error:
                raise ClaimError(f"{ref}: {error}", retryable=error.retryable) from error
            except OSError as error:
                raise ClaimError(f"{ref}: its CDI file in {self._directory.path} cannot be removed: {error}") from error
        self.wake()
        logger.info("Unprepared %s", ", ".join(device.name for device in entry.devices))
        crashpoints.reach(Point.UNPREPARE_BEFORE_ANSWER)
        return values.Unprepared(), DONE

    def _removal_s(self, call: values.Call) -> float:
        """How long an Unprepare waits for the hardware: so that kubelet has its answer in time."""
        return max(_REMOVAL_MIN_S, min(releasing.REMOVAL_S, call.remaining_s() - self._reserve_s))
