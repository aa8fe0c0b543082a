# SPDX-License-Identifier: Apache-2.0
"""One attempt to prepare a claim, under the claim's lock: from the record, or from the API server to the record.

A claim that changes no hardware: the claim from the API server; the locks of its GPUs; the plan; the CDI file; the row, synced.
A claim for which MIG instances are made has a *started* row before the first of them, and is completed by the row after the CDI
file: what a crash leaves in between is found by its places, which the started row names, and belongs to this claim. So has one
whose shares MPS has to know of. Limits of cgroups and the turns of a GPU need none: they are set again by the next attempt,
and one that nobody repeats leaves nothing that anybody else would stumble over.
"""

from __future__ import annotations

import contextlib
import http
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from discovery import address, work
from discovery.address import PciAddress
from discovery.errors import WorkError
from driver import values
from driver.errors import ApiError, ApiReason, ClaimError, RecordError
from driver.prepare import (
    cdi,
    cdidir,
    claims,
    crashpoints,
    devnodes,
    hands,
    ledger,
    locks,
    metadata,
    nodespec,
    plan,
    releasing,
    store,
)
from driver.prepare.crashpoints import Point

logger = logging.getLogger(__name__)

DONE, REPEATED = "done", "repeated"

_GET_TIMEOUT_S = 10.0
_GET_TIMEOUT_MIN_S = 0.1
_WORK_MIN_S = 1.0


class ClaimReader(Protocol):
    """Where claims are read."""

    def get_claim(self, namespace: str, name: str, *, timeout_s: float) -> Any:
        """The ResourceClaim as JSON. Raises ApiError."""


class DeviceIndex(Protocol):
    """Where devices are looked up."""

    def find(self, name: str) -> plan.Device | plan.NotThere:
        """The device as it was last seen, or why there is none."""

    def lacks(self, name: str, uuid: str, *, since: float) -> bool:
        """Whether a look after `since` has shown that a MIG instance is not, or not any more, at the place of this name."""

    def look_again(self) -> None:
        """Have the hardware looked at soon, whatever the interval. Does not wait."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """What makes this agent's answers its own."""

    dialect: cdi.Dialect
    pool: str
    boot_id: str


class HardwareError(ClaimError):
    """The hardware did not do what a claim needs. `hung`: there was no answer in time; `clean`: as of a WorkError."""

    def __init__(self, ref: values.ClaimRef, error: WorkError) -> None:
        super().__init__(f"{ref}: {error}", retryable=error.retryable)
        self.hung = error.kind == work.Kind.TIMEOUT
        self.clean = error.clean


class Attempts:
    """Attempts for any claims at once. Every method is called under the lock of its claim, and raises ClaimError."""

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
        hardware: hands.Hands,
        releaser: releasing.Releaser,
        reserve_s: float,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._node = node
        self._record = record
        self._directory = directory
        self._node_spec = node_spec
        self._nodes = nodes
        self._locks = claim_locks
        self._reader = reader
        self._index = index
        self._hands = hardware
        self._releaser = releaser
        self._reserve_s = reserve_s
        self._clock = clock

    def prepare(self, ref: values.ClaimRef, call: values.Call) -> tuple[values.Prepared, str]:
        """Prepare a claim, or say whether it may work later."""
        try:
            known = self._record.get(ref.uid)
            if known is not None and known.answers(self._node.boot_id):
                return self._repeat(ref, known, call)
            return self._carry_out(ref, known, call), DONE
        except RecordError as error:
            raise ClaimError(f"{ref}: {error}", retryable=error.retryable) from error
        except WorkError as error:
            raise HardwareError(ref, error) from error

    def undo(self, ref: values.ClaimRef, call: values.Call, *, clean: bool) -> None:
        """Nothing came of a Prepare whose hardware failed: remove what may have been made, unless it is `clean`, and forget that it
        had begun, so that an instance that somebody makes there now is not taken for the claim's. Where that is not possible the
        row stays, and the next Prepare or Unprepare of the claim goes on from it.
        """
        timeout_s = min(hands.UNDO_S, call.remaining_s() - _WORK_MIN_S)
        try:
            entry = self._record.get(ref.uid)
            if entry is None or entry.state is not ledger.ClaimState.STARTED or timeout_s <= 0:
                return
            with self._releaser.gpus(entry, timeout_s=timeout_s):
                if not clean:
                    self._releaser.put_back(entry, timeout_s=timeout_s)
                self._record.remove(entry, timeout_s=self._reserve_s)
        except (RecordError, WorkError, locks.LockUnavailableError) as error:
            logger.warning("What was begun for it is not undone: %s", error)

    def _repeat(self, ref: values.ClaimRef, entry: ledger.Entry, call: values.Call) -> tuple[values.Prepared, str]:
        lost = self._lost(entry)
        if lost:
            entry = self._restored(ref, entry, lost, call)
        elif entry.enforced and not self._releaser.in_force(entry):
            # An agent that ended in the middle of an Unprepare has put back what this row says.
            with self._releaser.gpus(entry, timeout_s=self._work_s(call)):
                self._releaser.enforce(entry, begun=True, timeout_s=self._work_s(call))
        self._require_node(ref, entry)
        try:
            if self._directory.ensure_claim(entry):
                logger.warning("The CDI file was lost or changed, and has been written again")
        except OSError as error:
            raise self._unwritable(ref, error) from error
        return ledger.answer(entry), DONE if lost else REPEATED

    def _lost(self, entry: ledger.Entry) -> frozenset[str]:
        """The MIG devices of a prepared claim whose instances somebody has removed meanwhile."""
        since = float("-inf") if entry.made_at is None else entry.made_at
        held = frozenset(entry.holds)
        return frozenset(
            device.name
            for device in entry.devices
            if device.place is not None
            and device.name in held
            and self._index.lacks(device.name, device.uuid, since=since)
        )

    def _restored(
        self, ref: values.ClaimRef, entry: ledger.Entry, lost: frozenset[str], call: values.Call
    ) -> ledger.Entry:
        """Have what is lost made again where the agent has made it, and found again where somebody else has."""
        logger.warning("Its MIG instances of %s are gone: was the driver reloaded?", ", ".join(sorted(lost)))
        gpus = {name: self._index.find(name) for name in {values.gpu_of(name) for name in lost}}
        mine = {device.name for device in entry.devices if device.name in lost and entry.partition_of(device)}
        places = {address.parse(device.address) for device in entry.devices}
        with self._locks.gpus(places, patience=call):
            planned = self._accepted(plan.seen_again(entry, {name: self._index.find(name) for name in lost - mine}))
            if mine:
                toggle = {name: isinstance(gpu, plan.GpuDevice) and gpu.toggle for name, gpu in gpus.items()}
                planned = plan.again(planned.entry, mine, toggle=toggle)
                planned = self._made(planned, begun=True, commit=lambda: None, call=call)
            if planned.entry.enforced:
                planned = self._enforced(planned, others=None, begun=True, call=call)
            self._make_durable(ref, planned, entry, call)
        return planned.entry

    def _carry_out(self, ref: values.ClaimRef, known: ledger.Entry | None, call: values.Call) -> values.Prepared:
        document = self._read_claim(ref, call)
        crashpoints.reach(Point.PREPARE_CLAIM_READ)
        dialect = self._node.dialect
        allocation = claims.parse_allocation(document, ref=ref, driver=dialect.driver, pool=self._node.pool)
        if self._directory.describes:
            allocation = replace(allocation, results=metadata.marked(allocation.results, document, ref))
        devices = {result.device: self._index.find(result.device) for result in allocation.results}
        with self._locks.gpus({*plan.addresses(devices.values()), *self._left_on(known)}, patience=call):
            planned = self._accepted(
                plan.plan_prepare(
                    allocation,
                    devices=devices,
                    holders=self._record.holders(devices),
                    dialect=dialect,
                    boot_id=self._node.boot_id,
                )
            )
            self._require_node(ref, planned.entry)
            crashpoints.reach(Point.PREPARE_PLANNED)
            if planned.work or planned.entry.enforced or (known is not None and (known.hardware or known.enforced)):
                planned, known = self._work(planned, known, call)
            self._make_durable(ref, planned, known, call)
        logger.info("Prepared %s", ", ".join(device.name for device in planned.entry.devices))
        crashpoints.reach(Point.PREPARE_BEFORE_ANSWER)
        return ledger.answer(planned.entry)

    @staticmethod
    def _left_on(known: ledger.Entry | None) -> frozenset[PciAddress]:
        """The GPUs that an earlier attempt may have changed for shares, when the claim was allocated others."""
        shared = () if known is None else known.shared
        return frozenset(address.parse(device.address) for device, _ in shared)

    def _accepted(self, planned: plan.PreparePlan | plan.Rejection) -> plan.PreparePlan:
        if isinstance(planned, plan.Rejection):
            if planned.look_again:
                self._index.look_again()
            raise ClaimError(planned.message, retryable=planned.retryable)
        return planned

    def _work(
        self, planned: plan.PreparePlan, known: ledger.Entry | None, call: values.Call
    ) -> tuple[plan.PreparePlan, ledger.Entry | None]:
        """Do what a plan needs of the hardware; the plan with what was made, and the row that there is now. What an earlier call
        left of the claim is gone on from where it was for the same, and removed where it was not.
        """
        left = known if known is not None and known.boot_id == self._node.boot_id else None
        begun = (
            left is not None
            and left.state is ledger.ClaimState.STARTED
            and left.partitions == planned.entry.partitions
            and left.shared == planned.entry.shared
        )
        if left is not None and not begun:
            self._releaser.put_back(left, timeout_s=self._work_s(call))
        recorded = known

        def commit() -> None:
            nonlocal recorded
            if not begun:
                self._record.put(planned, previous=known, timeout_s=call.remaining_s())
                recorded = planned.entry

        started = planned.entry.state is ledger.ClaimState.STARTED
        if planned.work:
            try:
                planned = self._made(planned, begun=begun and bool(planned.entry.partitions), commit=commit, call=call)
            except WorkError as error:
                # The next attempt begins anew: an instance that it finds there is somebody else's.
                if error.clean and recorded is not None and recorded is not known:
                    self._releaser.nothing_left(recorded)
                    with contextlib.suppress(RecordError):
                        self._record.remove(recorded, timeout_s=self._reserve_s)
                raise
        if planned.entry.enforced:
            if started and recorded is known:
                commit()
            planned = self._enforced(planned, others=planned.others, begun=begun, call=call)
        return planned, recorded

    def _enforced(
        self, planned: plan.PreparePlan, *, others: Sequence[ledger.Entry] | None, begun: bool, call: values.Call
    ) -> plan.PreparePlan:
        self._releaser.enforce(planned.entry, others=others, begun=begun, timeout_s=self._work_s(call))
        crashpoints.reach(Point.SHARES_APPLIED)
        return plan.enforced(planned)

    def _made(
        self, planned: plan.PreparePlan, *, begun: bool, commit: Callable[[], None], call: values.Call
    ) -> plan.PreparePlan:
        made = self._hands.make(planned.work, begun=begun, commit=commit, timeout_s=self._work_s(call))
        return self._accepted(plan.completed(planned, made, at=self._clock())) if made else planned

    def _work_s(self, call: values.Call) -> float:
        return max(_WORK_MIN_S, call.remaining_s() - self._reserve_s)

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
