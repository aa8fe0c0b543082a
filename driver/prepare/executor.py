# SPDX-License-Identifier: Apache-2.0
"""Prepares and unprepares claims for kubelet: the only writer of claims into the record and of their CDI files.

Prepare of a claim: its lock; the record (a completed claim is answered from it, without the API server); the claim from the
API server; the locks of its GPUs; the plan; the CDI file; the row, synced; the answer from the row. Unprepare: the file, then
the row. So there is a file wherever there is a row, but for the moment of an unprepare, and a record that is lost can be made
of the files. What a crash leaves, and what mends it:

- file without row: the next start takes the row up from it, or removes it; a Prepare writes over it;
- row without file: the claim is still held; Prepare and the collector write the file again, Unprepare ends it;
- neither answers kubelet, which asks again with the same UID.

The only sync is that of the row: a machine that loses power must not have told kubelet of a claim that it forgets. A file
that such a machine loses was of the boot before, and is written again by the Prepare of this one.

A failed Prepare costs the pod 60 to 90 s (kubelet's own retry), so what may soon pass is waited for inside the call, and
what cannot pass fails at once.
"""

from __future__ import annotations

import contextlib
import contextvars
import http
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from driver import context, values
from driver.errors import ApiError, ApiReason, ClaimError, RecordError
from driver.prepare import cdi, cdidir, claims, crashpoints, devnodes, ledger, locks, nodespec, plan, store
from driver.prepare.crashpoints import Point

logger = logging.getLogger(__name__)

Answer = TypeVar("Answer", values.Prepared, values.Unprepared)

WAIT_S = 40.0
"""How long a Prepare waits for what may pass; kubelet's deadline is 45 s."""

RESERVE_S = 5.0
"""What is kept of a deadline for the work after a wait and for the answer."""

PREPARE, UNPREPARE = "prepare", "unprepare"
DONE, REPEATED, FAILED = "done", "repeated", "failed"

_GET_TIMEOUT_S = 10.0
_GET_TIMEOUT_MIN_S = 0.1
PAUSES_S = (0.1, 0.25, 0.5, 1.0)
"""How often a waiting Prepare looks for what nobody tells it: another instance's work, the API server, a cancelled call."""

_MESSAGE_MAX_LENGTH = 900
"""Kubelet puts the message into an Event, whose text ends at 1,024 bytes, behind words of its own."""


class ClaimReader(Protocol):
    """Where claims are read."""

    def get_claim(self, namespace: str, name: str, *, timeout_s: float) -> Any:
        """The ResourceClaim as JSON. Raises ApiError."""


class DeviceIndex(Protocol):
    """Where devices are looked up."""

    def find(self, name: str) -> plan.Device | plan.NotThere:
        """The device as it was last seen, or why there is none."""

    def look_again(self) -> None:
        """Have the hardware looked at soon, whatever the interval. Does not wait."""


class Reports(Protocol):
    """Who is told of what happened to claims."""

    def claim_done(self, *, operation: str, result: str, seconds: float) -> None:
        """A claim was answered: PREPARE or UNPREPARE, and DONE, REPEATED or FAILED."""

    def prepare_failed(self, claim: values.ClaimRef, *, message: str) -> None:
        """A claim could not be prepared; the place for an Event on it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """What makes this agent's answers its own."""

    dialect: cdi.Dialect
    pool: str
    boot_id: str


class Executor:
    """Answers for claims. Methods from any thread; claims never wait for each other unless they share a device."""

    def __init__(
        self,
        node: Node,
        *,
        record: store.Store,
        directory: cdidir.CdiDirectory,
        node_spec: nodespec.NodeSpec,
        nodes: devnodes.DeviceNodes,
        claim_locks: locks.Locks,
        reader: ClaimReader,
        index: DeviceIndex,
        reports: Reports,
        stop: threading.Event,
        wait_s: float = WAIT_S,
        reserve_s: float = RESERVE_S,
        pauses_s: Sequence[float] = PAUSES_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._node = node
        self._record = record
        self._directory = directory
        self._node_spec = node_spec
        self._nodes = nodes
        self._locks = claim_locks
        self._reader = reader
        self._index = index
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
            waited = _Wait(self._clock, min(self._wait_s, call.remaining_s() - self._reserve_s), self._pauses_s)
            return self._attempt_until(ref, waited, call)

    def _attempt_until(self, ref: values.ClaimRef, waited: _Wait, call: values.Call) -> tuple[values.Prepared, str]:
        """Attempt it until it works, it cannot work, or there is no time left to wait."""
        while True:
            seen = self._changes
            try:
                return self._attempt(ref, call)
            except ClaimError as error:
                if not error.retryable:
                    raise
                if not self._wait(seen, waited, call):
                    raise ClaimError(f"{error} (waited {waited.seconds():.0f} s)", retryable=True) from error
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

    def _wait(self, seen: int, waited: _Wait, call: values.Call) -> bool:
        """Wait for a change or a while; False when there is no time left to wait, or nobody who waits."""
        with self._changed:
            self._changed.wait_for(lambda: self._changes != seen or self._stop.is_set(), waited.next_pause_s())
        return waited.left_s() > 0 and not call.over() and not self._stop.is_set()

    def _attempt(self, ref: values.ClaimRef, call: values.Call) -> tuple[values.Prepared, str]:
        """Prepare a claim under its lock, or say whether it may work later."""
        try:
            known = self._record.get(ref.uid)
            if known is not None and known.answers(self._node.boot_id):
                return self._repeat(ref, known), REPEATED
            return self._carry_out(ref, known, call), DONE
        except RecordError as error:
            raise ClaimError(f"{ref}: {error}", retryable=error.retryable) from error

    def _repeat(self, ref: values.ClaimRef, entry: ledger.Entry) -> values.Prepared:
        self._require_node(ref, entry)
        try:
            if self._directory.ensure_claim(entry):
                logger.warning("The CDI file was lost or changed, and has been written again")
        except OSError as error:
            raise self._unwritable(ref, error) from error
        return ledger.answer(entry)

    def _carry_out(self, ref: values.ClaimRef, known: ledger.Entry | None, call: values.Call) -> values.Prepared:
        document = self._read_claim(ref, call)
        crashpoints.reach(Point.PREPARE_CLAIM_READ)
        dialect = self._node.dialect
        allocation = claims.parse_allocation(document, ref=ref, driver=dialect.driver, pool=self._node.pool)
        devices = {result.device: self._index.find(result.device) for result in allocation.results}
        with self._locks.gpus(plan.addresses(devices.values()), patience=call):
            planned = plan.plan_prepare(
                allocation,
                devices=devices,
                holders=self._record.holders(devices),
                dialect=dialect,
                boot_id=self._node.boot_id,
            )
            if isinstance(planned, plan.Rejection):
                if planned.look_again:
                    self._index.look_again()
                raise ClaimError(planned.message, retryable=planned.retryable)
            self._require_node(ref, planned.entry)
            crashpoints.reach(Point.PREPARE_PLANNED)
            self._make_durable(ref, planned, known, call)
        logger.info("Prepared %s", ", ".join(device.name for device in planned.entry.devices))
        crashpoints.reach(Point.PREPARE_BEFORE_ANSWER)
        return ledger.answer(planned.entry)

    def _make_durable(
        self, ref: values.ClaimRef, planned: plan.PreparePlan, known: ledger.Entry | None, call: values.Call
    ) -> None:
        try:
            self._directory.write_claim(planned.entry, planned.columns)
        except OSError as error:
            raise self._unwritable(ref, error) from error
        try:
            self._record.put(planned, previous=known, timeout_s=call.remaining_s())
        except RecordError:
            with contextlib.suppress(OSError):
                self._directory.remove_claim(ref.uid)
            raise

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
                self._record.remove(entry, timeout_s=max(call.remaining_s(), self._reserve_s))
            except RecordError as error:
                raise ClaimError(f"{ref}: {error}", retryable=error.retryable) from error
            except OSError as error:
                raise ClaimError(f"{ref}: its CDI file in {self._directory.path} cannot be removed: {error}") from error
        self.wake()
        logger.info("Unprepared %s", ", ".join(device.name for device in entry.devices))
        crashpoints.reach(Point.UNPREPARE_BEFORE_ANSWER)
        return values.Unprepared(), DONE

    def _read_claim(self, ref: values.ClaimRef, call: values.Call) -> Any:
        try:
            return self._reader.get_claim(
                ref.namespace, ref.name, timeout_s=max(_GET_TIMEOUT_MIN_S, min(_GET_TIMEOUT_S, call.remaining_s()))
            )
        except ApiError as error:
            if error.reason is ApiReason.NOT_FOUND:
                raise ClaimError(f"{ref} does not exist (any more): the pod has to be deleted") from error
            if error.reason is not ApiReason.FORBIDDEN:
                raise ClaimError(f"{ref} cannot be read: {error}", retryable=error.retryable) from error
            # An API server that has just started answers before it knows who may do what, and refuses everybody.
            if error.status == http.HTTPStatus.UNAUTHORIZED:
                raise ClaimError(f"{ref} cannot be read: {error}", retryable=True) from error
            raise ClaimError(
                f"{ref} may not be read ({error}): the agent's ServiceAccount needs `get` on resourceclaims",
                retryable=True,
            ) from error

    def _require_node(self, ref: values.ClaimRef, entry: ledger.Entry) -> None:
        """See that what the CDI files name is there."""
        try:
            self._node_spec.ensure()
        except nodespec.NodeSpecError as error:
            raise ClaimError(f"{ref}: {error}", retryable=True) from error
        missing = self._nodes.missing([node for device in entry.devices for node in device.nodes])
        if missing:
            raise ClaimError(
                f"{ref}: {', '.join(missing)} is missing on this node: run `nvidia-smi` there, which makes device nodes, or "
                "see what became of the NVIDIA driver",
                retryable=True,  # nodes come one after the other while a driver is loaded
            )

    def _unwritable(self, ref: values.ClaimRef, error: OSError) -> ClaimError:
        return ClaimError(f"{ref}: its CDI file in {self._directory.path} cannot be written: {error}")


class _Wait:
    """How long one Prepare has waited, and how long it still may."""

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
