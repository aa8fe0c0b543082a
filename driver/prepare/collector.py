# SPDX-License-Identifier: Apache-2.0
"""Keeps record, CDI files and claims in step while nobody asks for anything.

Kubelet repairs no CDI file and, once it has lost its own state, never unprepares a claim. So the files of prepared claims
are looked after every few seconds, and the claims themselves are looked up now and then: a claim that is gone, replaced or
deallocated, twice and a minute apart, is unprepared. While the API server does not answer, nothing follows from it.
Only the leading instance does any of this, each step under the lock of the claim.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from driver import condition, context, values
from driver.errors import ApiError, ApiReason, RecordError
from driver.prepare import attempt, cdidir, claims, epoch, ledger, locks, nodespec, store

logger = logging.getLogger(__name__)

LOOK_AFTER_S = 3.0
_PAUSE_FOR_WORK = 1000
"""Looking at all files takes at most a thousandth of the time: 3 s apart up to a few hundred claims."""

_READS_A_ROUND = 100
"""Files that are read in one round, as after a restart all of them must be."""

CONFIRM_S = 60.0
"""How far two looks at a claim must be apart: a claim that is made again is gone for a moment."""

_UNPREPARE_S = 30.0
_CLAIM_PATIENCE_S = 1.0
"""How long to wait for a claim that is being worked at; it is looked at again the next time."""

_GET_TIMEOUT_S = 10.0
_GET_PAUSE_S = 0.05
"""Between two looks at claims, so that a node with many claims is no burst to the API server."""


class Unpreparer(Protocol):
    """What frees a claim."""

    def unprepare(
        self, refs: Sequence[values.ClaimRef], call: values.Call
    ) -> Mapping[values.ClaimUid, values.Unprepared | values.Failed]:
        """As for kubelet."""


class Reports(Protocol):
    """Who is told of what was mended."""

    def cdi_file_repaired(self) -> None:
        """A CDI file of a prepared claim was lost or changed and is back."""

    def claim_collected(self, claim: values.ClaimRef, *, reason: str) -> None:
        """A claim was unprepared that kubelet had not asked about."""


@dataclass(frozen=True, slots=True)
class _Doubt:
    claim: values.ClaimRef
    since_s: float


class Collector:
    """Looks after what is prepared. `reconcile` once at the start, then `run` in a thread of its own."""

    def __init__(
        self,
        node: attempt.Node,
        *,
        record: store.Store,
        directory: cdidir.CdiDirectory,
        node_spec: nodespec.NodeSpec,
        claim_locks: locks.Locks,
        reader: attempt.ClaimReader,
        unpreparer: Unpreparer,
        leadership: epoch.Epoch,
        reports: Reports,
        stop: threading.Event,
        interval_s: float,
        look_after_s: float = LOOK_AFTER_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._node = node
        self._record = record
        self._directory = directory
        self._node_spec = node_spec
        self._locks = claim_locks
        self._reader = reader
        self._unpreparer = unpreparer
        self._leadership = leadership
        self._reports = reports
        self._stop = stop
        self._interval_s = interval_s
        self._look_after_s = look_after_s
        self._clock = clock
        self._claims: dict[str, store.Summary] = {}
        self._with_file: frozenset[str] = frozenset()
        self._version: tuple[int, int] | None = None
        self._stamp: tuple[int, int] | None = None
        self._look_at_all_s = float("-inf")
        self._doubts: dict[str, _Doubt] = {}
        self._complaints: dict[str, str] = {}

    def run(self) -> None:
        """Look after files every few seconds until told to stop, and beside that, as the API server may take its time, look
        claims up every interval. Raises StateLostError.
        """
        threading.Thread(target=self._run_lookups, name="lookups", daemon=True).start()
        trouble = condition.Condition(logger, recovered="What is prepared is looked after again")
        while not self._stop.wait(self._look_after_s):
            self._record.require_place()
            self._guarded(self.look_after, trouble)

    def _run_lookups(self) -> None:
        trouble = condition.Condition(logger, recovered="Prepared claims are looked up again")
        next_collection_s = self._clock() + self._interval_s
        while not self._stop.wait(self._look_after_s):
            self._guarded(self.confirm, trouble)
            if self._clock() >= next_collection_s:
                next_collection_s = self._clock() + self._interval_s
                self._guarded(self.collect, trouble)

    def _guarded(self, work: Callable[[], None], trouble: condition.Condition) -> None:
        try:
            work()
        except (OSError, RecordError) as error:
            trouble.failed(f"What is prepared cannot be looked after: {error}")
        except Exception:
            # The last door of the loop: one bad round must not end the care for all claims.
            logger.exception("What is prepared could not be looked after")
        else:
            trouble.passed()

    def reconcile(self) -> None:
        """Bring files and record together at the start: a file whose row was lost gives it back, others without a row go,
        and so do those from before a reboot and left-over temporary ones. Content is compared by the first `look_after`.
        """
        try:
            self._directory.make()
        except OSError as error:
            logger.warning("The CDI folder %s cannot be made: %s", self._directory.path, error)
            return
        if not self._may_act():
            return
        try:
            self._read_claims()
            listing = self._directory.listing()
        except (OSError, RecordError) as error:
            logger.warning("Prepared claims and CDI files cannot be compared now: %s", error)
            return
        for uid in sorted(listing.others - self._with_file):
            self._under_lock(uid, self._remove_outlived if uid in self._claims else self._adopt_or_remove)
        for uid in sorted(listing.temporaries):
            self._under_lock(uid, self._remove_leftovers)
        self._sweep()

    def look_after(self) -> None:
        """See that each prepared claim has its CDI file, that no other claim has one, and that the node's file is true.

        A file that comes, goes or is replaced shows in its folder; one that is edited in its place shows in its own times
        only, so all are looked at as often as that costs next to nothing.
        """
        if not self._may_act():
            return
        self._node_spec.watch()
        known = self._version
        self._read_claims()
        stamp = self._directory.stamp()
        if known == self._version and stamp == self._stamp and self._clock() < self._look_at_all_s:
            return
        began = self._clock()
        listing = self._directory.listing()
        lost = self._with_file - listing.untouched - listing.others
        doubtful = sorted(self._with_file & listing.others)
        for uid in (*sorted(lost), *doubtful[:_READS_A_ROUND]):
            entry = self._record.get(uid)
            if entry is not None and not self._directory.verify_claim(entry):
                self._under_lock(uid, self._repair)
        for uid in sorted((listing.untouched | listing.others) - self._claims.keys()):
            self._under_lock(uid, self._remove_orphan)
        self._stamp = stamp
        pause_s = 0.0 if doubtful else (self._clock() - began) * _PAUSE_FOR_WORK
        self._look_at_all_s = self._clock() + pause_s

    def collect(self) -> None:
        """Look every claim up once; not those of which kubelet was told that they are gone. Remove what none of them needs."""
        if not self._may_act():
            return
        self._sweep()
        summaries = [s for s in self._record.summaries() if s.state is not ledger.ClaimState.RELEASING]
        for doubted in self._doubts.keys() - {summary.claim.uid for summary in summaries}:
            del self._doubts[doubted]
        for summary in summaries:
            if self._stop.wait(_GET_PAUSE_S) or not self._leadership.leads():
                return
            self._look_up(summary.claim)

    def confirm(self) -> None:
        """Look up again those claims that were gone at a first look, when it is long enough ago."""
        for doubt in tuple(self._doubts.values()):
            if self._clock() - doubt.since_s >= CONFIRM_S and self._may_act():
                self._look_up(doubt.claim)

    def _may_act(self) -> bool:
        """Whether the record is in use and no newer instance lives."""
        return self._record.look_after() is None and self._leadership.take(self._record) and self._leadership.leads()

    def _read_claims(self) -> None:
        """Know which claims the record has; it is read only when somebody has changed it."""
        version = self._record.version()
        if version != self._version:
            self._claims = {summary.claim.uid: summary for summary in self._record.summaries()}
            self._with_file = frozenset(
                uid
                for uid, summary in self._claims.items()
                if summary.state is ledger.ClaimState.COMPLETED and summary.boot_id == self._node.boot_id
            )
            self._version = version

    def _under_lock(self, uid: str, work: Callable[[str], None]) -> None:
        """Mend one claim's file. What fails is said once and tried again the next time."""
        try:
            with self._locks.claim(uid, patience=locks.Deadline(_CLAIM_PATIENCE_S)):
                work(uid)
        except locks.LockUnavailableError:
            return
        except (OSError, RecordError) as error:
            if self._complaints.get(uid) != str(error):
                logger.warning("The CDI file of claim %s cannot be looked after: %s", uid, error)
            self._complaints[uid] = str(error)
        else:
            self._complaints.pop(uid, None)

    def _repair(self, uid: str) -> None:
        entry = self._record.get(uid)
        if entry is not None and entry.answers(self._node.boot_id) and self._directory.ensure_claim(entry):
            logger.warning("The CDI file of prepared %s was lost or changed, and has been written again", entry.claim)
            self._reports.cdi_file_repaired()

    def _adopt_or_remove(self, uid: str) -> None:
        """A file without a row at a start: its agent was killed before the commit, or the end of the log was lost. The row
        is taken up where nothing speaks against it: a device held too long comes back, one given out twice does not.
        """
        if self._record.get(uid) is not None:
            return
        try:
            entry = self._directory.entry(uid)
        except ledger.DamagedError as error:
            logger.warning("The CDI file of claim %s says nothing about it (%s) and is removed", uid, error)
        else:
            if entry.answers(self._node.boot_id) and self._record.adopt(entry):
                logger.warning("The record had lost %s: it has been taken up from its CDI file", entry.claim)
                return
        self._directory.remove_claim(uid)

    def _remove_orphan(self, uid: str) -> None:
        if self._record.get(uid) is None and self._directory.remove_claim(uid):
            logger.warning("A CDI file of claim %s, which is not prepared, has been removed", uid)

    def _remove_outlived(self, uid: str) -> None:
        """A file from before a reboot: kubelet has its claim prepared again before any container may use it, and a machine
        that lost power may have kept only a part of it.
        """
        entry = self._record.get(uid)
        if entry is not None and entry.boot_id != self._node.boot_id:
            self._directory.remove_claim(uid)

    def _remove_leftovers(self, uid: str) -> None:
        self._directory.remove_temporary(uid)

    def _sweep(self) -> None:
        """Metadata of a claim that is not prepared, such as of a Prepare that did not come to its end."""
        for uid in sorted(
            self._directory.with_metadata() - {summary.claim.uid for summary in self._record.summaries()}
        ):
            self._under_lock(uid, self._remove_metadata)

    def _remove_metadata(self, uid: str) -> None:
        if self._record.get(uid) is None:
            self._directory.remove_metadata(uid)

    def _look_up(self, claim: values.ClaimRef) -> None:
        try:
            reason = self._gone(claim)
        except ApiError as error:
            logger.debug("%s could not be looked up: %s", claim, error)
            return
        doubt = self._doubts.get(claim.uid)
        if reason is None:
            self._doubts.pop(claim.uid, None)
        elif doubt is None:
            self._doubts[claim.uid] = _Doubt(claim, self._clock())
        elif self._clock() - doubt.since_s >= CONFIRM_S:
            self._unprepare(claim, reason)

    def _unprepare(self, claim: values.ClaimRef, reason: str) -> None:
        with context.bound(claim=str(claim)):
            logger.warning("%s %s, and kubelet did not unprepare it: this is done now", claim, reason)
            answers = self._unpreparer.unprepare((claim,), locks.Deadline(_UNPREPARE_S))
        if isinstance(answers[claim.uid], values.Unprepared):
            del self._doubts[claim.uid]
            self._reports.claim_collected(claim, reason=reason)

    def _gone(self, claim: values.ClaimRef) -> str | None:
        """Why a claim needs no devices here any more, None if it does. Raises ApiError: nothing follows from that."""
        try:
            found = self._reader.get_claim(claim.namespace, claim.name, timeout_s=_GET_TIMEOUT_S)
        except ApiError as error:
            if error.reason is ApiReason.NOT_FOUND:
                return "is gone"
            raise
        return claims.why_released(found, ref=claim)
