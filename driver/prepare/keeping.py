# SPDX-License-Identifier: Apache-2.0
"""Keeps what was set for shares as the rows say, for as long as they are there.

A driver that is reloaded, a supervisor that is restarted, an admin, an agent that was killed: each may leave another state than the rows
ask for. So the leading instance looks at the start and every minute at each GPU that shares have a part in, under its lock; follows
the MPS supervisor (mpscare.py) and the claims that more pods may join (joining.py); and says on claims what people should know.
On a node that shares nothing this costs one query of the record every few seconds.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from discovery import model
from discovery.address import PciAddress
from discovery.errors import WorkError
from driver import condition, values
from driver.errors import RecordError
from driver.prepare import cgroups, duties, enforcing, joining, ledger, locks, modes, mpscare, plan, settling, telling

logger = logging.getLogger(__name__)

LOOK_S = 3.0
"""How often it is looked whether another instance of the agent has changed the record: one query."""

ROUND_S = 60.0
RETRIES_S = (3.0, 6.0, 12.0, 30.0)
"""After the first, second, ... round in a row that left something undone."""

TURNS_EVERY = 10
"""In how many rounds turns are set again: that takes a program, and no call tells cheaply what they are."""

_SETTLE_S = 0.05
"""How long to wait for more after a claim was prepared: a node that starts all its pods at once is looked at some times, not for each."""

_GPU_PATIENCE_S = 1.0
_WORK_S = 10.0
"""Of one call for a GPU, with the start of a process for it on a node that has just come up."""

_JOIN_S = 10.0
_RECORD_S = 30.0


class Events(mpscare.Events, Protocol):
    """Who writes Events. Never blocks, never raises."""

    def pod(self, namespace: str, name: str, uid: str, *, reason: str, message: str, warning: bool = True) -> None:
        """An Event on a Pod."""


class Record(Protocol):
    """The rows; store.Store is one. Raises RecordError."""

    def version(self) -> tuple[int, int]:
        """Another one whenever somebody changed a row."""

    def sharing(self) -> tuple[ledger.Entry, ...]:
        """The entries that have shares."""

    def get(self, uid: str) -> ledger.Entry | None:
        """The entry of a claim."""

    def put(self, planned: plan.PreparePlan, *, previous: ledger.Entry | None, timeout_s: float) -> None:
        """Record an entry in the place of another."""


class Files(Protocol):
    """The CDI files of claims; cdidir.CdiDirectory is one. Raises OSError."""

    def write_claim(self, entry: ledger.Entry, columns: ledger.Columns) -> None:
        """Place the file of a claim."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """A GPU of this node. `limits_pods`: it is offered in shares whose memory the cgroups of pods keep."""

    uuid: str | None
    limits_pods: bool = False


Gpus = Callable[[], Mapping[PciAddress, Gpu]]
"""The GPUs of this node as they were last seen. May raise RecordError."""


class Rows:
    """The rows of shares of this boot, read when somebody has changed the record. Thread-safe; raises RecordError."""

    def __init__(self, record: Record, *, boot_id: str) -> None:
        self._record = record
        self._boot_id = boot_id
        self._lock = threading.Lock()
        self._known: tuple[tuple[int, int], tuple[ledger.Entry, ...]] | None = None

    def __call__(self) -> tuple[ledger.Entry, ...]:
        """As they are now."""
        with self._lock:
            version = self._record.version()
            if self._known is None or self._known[0] != version:
                rows = tuple(row for row in self._record.sharing() if row.boot_id == self._boot_id)
                self._known = version, rows
            return self._known[1]


class Keeper:
    """`run` in a thread of its own; `wake`, `seen` and `findings` from any thread."""

    def __init__(
        self,
        rows: Rows,
        *,
        record: Record,
        files: Files,
        claim_locks: locks.Locks,
        leads: Callable[[], bool],
        enforcer: enforcing.Enforcer,
        settler: settling.Settler,
        gpu_modes: modes.Modes,
        pods: cgroups.Cgroups,
        gpus: Gpus,
        api: joining.Api,
        supervisor: mpscare.Supervisor,
        events: Events,
        stop: threading.Event,
        look_s: float = LOOK_S,
        round_s: float = ROUND_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._rows = rows
        self._record = record
        self._files = files
        self._locks = claim_locks
        self._leads = leads
        self._enforcer = enforcer
        self._settler = settler
        self._modes = gpu_modes
        self._pods = pods
        self._gpus = gpus
        self._events = events
        self._stop = stop
        self._look_s = look_s
        self._round_s = round_s
        self._clock = clock
        self._mps = mpscare.MpsCare(
            supervisor, rows=rows, claim_locks=claim_locks, leads=leads, events=events, stop=stop
        )
        self._joining = joining.Joining(api, self, stop=stop)
        self._told = telling.Telling(events)
        self._woken = threading.Event()
        self._woken.set()
        self._followed: tuple[ledger.Entry, ...] | None = None
        self._due_s = float("-inf")
        self._rounds = 0
        self._failures = 0
        self._limited: set[PciAddress] = set()
        """GPUs on which pods may have limits."""
        self._seen: dict[PciAddress, tuple[settling.Seen, ...]] = {}
        self._unsettled: dict[PciAddress, str] = {}
        self._trouble = condition.Condition(logger, recovered="Shares are looked after again")

    def wake(self) -> None:
        """A claim was prepared or unprepared, or the agent stops."""
        self._woken.set()

    def seen(self) -> tuple[settling.Seen, ...]:
        """What pods used of GPUs when that was last read."""
        return tuple(seen for of_gpu in tuple(self._seen.values()) for seen in of_gpu)

    def findings(self) -> tuple[model.Finding, ...]:
        """What a person should know of shares that are not kept as they should."""
        found = [*self._mps.findings()]
        found += [
            _finding("share-limit-lost", str(gpu), f"What keeps its shares apart cannot be checked or set: {why}")
            for gpu, why in sorted(self._unsettled.items())
        ]
        if self._joining.problem is not None:
            found.append(_finding("share-unwatched", "claims", self._joining.problem))
        found += [
            _finding("share-joined", f"{row.claim.namespace}/{row.claim.name}", telling.joined(row, pods))
            for row in self._followed or ()
            if len(row.pods) > 1 and len(pods := [pod for pod in row.pods if self._pods.find(pod) is not None]) > 1
        ]
        found += [
            _finding("share-joined", f"{claim.namespace}/{claim.name}", message)
            for claim, message in self._told.unlimited()
        ]
        return tuple(found)

    def run(self) -> None:
        """Look after shares until told to stop."""
        for work, name in ((self._mps.run, "mps"), (self._joining.run, "joining")):
            threading.Thread(target=work, name=name, daemon=True).start()
        while not self._stop.is_set():
            if self._woken.wait(self._look_s) and self._stop.wait(_SETTLE_S):
                break
            self._woken.clear()
            try:
                self.look()
            except RecordError as error:
                self._trouble.failed(f"Shares cannot be looked after: {error}")
            except Exception:
                # The last door of the loop: one bad round must not end the care for all shares.
                logger.exception("Shares could not be looked after")
            else:
                self._trouble.passed()
        self._mps.needed(needed=True)
        self._joining.follow({})
        self._joining.wake()

    def look(self) -> None:
        """Follow what has changed in the record, and do a round when it is time. Raises RecordError."""
        if not self._leads():
            self._followed = None
            self._joining.follow({})
            self._mps.needed(needed=False)
            return
        rows = self._rows()
        if rows is not self._followed:
            self._follow(rows)
        if self._clock() >= self._due_s:
            self._due_s = self._clock() + self._round_s
            self._round(rows)
            self._failures = self._failures + 1 if self._unsettled else 0
            if 0 < self._failures <= len(RETRIES_S):
                self._due_s = self._clock() + RETRIES_S[self._failures - 1]

    def _follow(self, rows: tuple[ledger.Entry, ...]) -> None:
        completed = [row for row in rows if row.state is ledger.ClaimState.COMPLETED]
        self._joining.follow({row.claim.uid: row.claim for row in completed if row.pods})
        self._mps.needed(needed=bool(duties.mps(rows)))
        self._told.tell(completed, first=self._followed is None)
        self._followed = rows
        self._limited |= duties.pod_limits(rows).keys()

    def _round(self, rows: Sequence[ledger.Entry]) -> None:
        if not duties.mps(rows):
            self._mps.sweep()
        known = self._gpus()
        self._limited |= {gpu for gpu, each in known.items() if each.limits_pods}
        again = self._rounds % TURNS_EVERY == 0
        self._rounds += 1
        try:
            changed = self._modes.gpus()
        except WorkError as error:
            logger.warning("%s", error)
            changed = ()
        wanted = {*duties.one_process(rows), *duties.turns(rows), *changed, *self._limited}
        self._unsettled = {gpu: why for gpu, why in self._unsettled.items() if gpu in wanted}
        for gpu in sorted(wanted):
            if self._stop.is_set() or not self._leads():
                return
            self._settle(gpu, known.get(gpu), again=again)

    def _settle(self, gpu: PciAddress, known: Gpu | None, *, again: bool) -> None:
        """Bring one GPU into the state that the rows ask for."""
        try:
            with self._locks.gpus((gpu,), patience=locks.Deadline(_GPU_PATIENCE_S)):
                rows = self._rows()
                if gpu in self._limited:
                    self._seen[gpu] = self._settler.settle_limits(gpu, rows, timeout_s=_WORK_S)
                    if gpu not in duties.pod_limits(rows) and (known is None or not known.limits_pods):
                        self._limited.discard(gpu)
                        del self._seen[gpu]
                self._settler.settle_modes(
                    gpu, None if known is None else known.uuid, rows, again=again, timeout_s=_WORK_S
                )
        except locks.LockUnavailableError:
            return
        except WorkError as error:
            if self._unsettled.get(gpu) != str(error):
                logger.warning("GPU %s: what keeps its shares apart cannot be checked or set: %s", gpu, error)
            self._unsettled[gpu] = str(error)
        else:
            if self._unsettled.pop(gpu, None) is not None:
                logger.info("GPU %s: what keeps its shares apart is set again", gpu)

    # joining.Joins

    def has(self, claim: values.ClaimRef, pod: joining.Pod) -> bool:
        """Whether a pod has the limits of a claim by the row, or the claim is not prepared any more. May raise RecordError."""
        entry = self._record.get(claim.uid)
        return entry is None or not self._keeps(entry) or pod.uid in entry.pods

    def there(self, pod: joining.Pod) -> bool:
        """Whether a pod has its cgroup."""
        return self._pods.find(pod.uid) is not None

    def join(self, claim: values.ClaimRef, pod: joining.Pod) -> bool:
        """Give a pod that has its cgroup the limits of a claim; whether there is nothing more to do. Never raises.

        The row comes first: what it says is set again by every round, and put back with the claim.
        """
        patience = locks.Deadline(_JOIN_S)
        try:
            with self._locks.claim(claim.uid, patience=patience):
                entry = self._record.get(claim.uid)
                if entry is None or not self._keeps(entry):
                    return True
                with self._locks.gpus(duties.gpus(entry), patience=patience):
                    if pod.uid not in entry.pods:
                        planned = plan.joined(entry, (pod.uid,))
                        self._files.write_claim(planned.entry, planned.columns)
                        self._record.put(planned, previous=entry, timeout_s=_RECORD_S)
                        entry = planned.entry
                    mine = duties.gpus(entry)
                    others = [row for row in self._rows() if row.claim.uid != claim.uid and duties.gpus(row) & mine]
                    self._enforcer.limit(entry, others, pods=(pod.uid,), timeout_s=_WORK_S)
        except locks.LockUnavailableError:
            return False
        except (OSError, RecordError, WorkError) as error:
            logger.warning("Pod %s has joined %s and could not get its limits yet: %s", pod.name, claim, error)
            return False
        message = telling.joins(entry, pod)
        logger.warning("%s", message)
        self._events.claim(claim, reason=telling.JOINED, message=message)
        self._events.pod(claim.namespace, pod.name, pod.uid, reason=telling.JOINED, message=message)
        self.wake()
        return True

    def others(self, claim: values.ClaimRef, consumers: tuple[str, ...]) -> None:
        """Whom but pods a claim is reserved for; nobody any more, too. Never raises."""
        self._told.reserved(claim, consumers)

    def _keeps(self, entry: ledger.Entry) -> bool:
        """Whether pods of a claim have limits."""
        return entry.state is ledger.ClaimState.COMPLETED and bool(duties.pod_limits((entry,)))


def _finding(code: str, subject: str, message: str) -> model.Finding:
    return model.Finding(code=code, severity=model.Severity.WARNING, subject=subject, message=message)
