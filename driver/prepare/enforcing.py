# SPDX-License-Identifier: Apache-2.0
"""Has the hardware keep the shares of a claim, and put back what was set for them: limits of cgroups, MPS, modes of GPUs.

What is set follows from the rows: those of the claim, and those of the other claims on its GPUs. So all of it is idempotent, a repeat
after a crash needs no memory of how far the first one came, and whoever is last puts a GPU back. The caller holds the locks of
the claim and of its GPUs, over this and over what makes the row durable.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

from discovery import limits, work
from discovery.errors import WorkError
from driver.errors import MpsError
from driver.mps import shares as mps_shares
from driver.prepare import cgroups, duties, ledger, locks, modes

logger = logging.getLogger(__name__)


class Supervisor(Protocol):
    """What holds MPS daemons; driver.mps.client.Client is one. Its methods raise MpsError."""

    def place(self, share: mps_shares.Share, *, timeout_s: float) -> None:
        """Have a share in place. Idempotent."""

    def remove(self, device: str, share_id: str, *, timeout_s: float) -> None:
        """Have a share gone, and with the last one of a device its daemon. Idempotent."""


class Enforcer:
    """Methods from any thread; they raise WorkError."""

    def __init__(
        self,
        limiting: limits.Limiting,
        supervisor: Supervisor,
        pods: cgroups.Cgroups,
        gpu_modes: modes.Modes,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limiting = limiting
        self._supervisor = supervisor
        self._pods = pods
        self._modes = gpu_modes
        self._clock = clock

    def apply(self, entry: ledger.Entry, others: Sequence[ledger.Entry], *, begun: bool, timeout_s: float) -> None:
        """Set what a claim needs before a container of it may run. `others`: every other entry of this boot with a share of one of
        its GPUs. `begun`: a call for this claim had got as far before.
        """
        time_left = locks.Deadline(timeout_s, clock=self._clock)
        for gpu in sorted(duties.one_process((entry,))):
            self._modes.one_process(gpu, begun=begun, timeout_s=_left(time_left))
        self.limit(entry, others, pods=self._there(entry), timeout_s=_left(time_left))
        for gpu, turns in sorted(duties.turns((entry,)).items()):
            self._modes.turns(gpu, turns, timeout_s=_left(time_left))
        for share in duties.mps((entry,)):
            try:
                self._supervisor.place(share, timeout_s=_left(time_left))
            except MpsError as error:
                raise WorkError(str(error), kind=work.Kind.FAILED, retryable=error.retryable) from error

    def limit(
        self, entry: ledger.Entry, others: Sequence[ledger.Entry], *, pods: Iterable[str], timeout_s: float
    ) -> None:
        """Set the limits of some pods of a claim, as large as all their claims together need."""
        time_left = locks.Deadline(timeout_s, clock=self._clock)
        mine = duties.pod_limits((entry,))
        if not mine:
            return
        paths = {pod: self._path(pod) for pod in pods}
        if not paths:
            raise WorkError(
                "no pod is known whose memory is to be limited: status.reservedFor of the claim is empty",
                kind=work.Kind.FAILED,
                retryable=True,
            )
        together = duties.pod_limits((*others, entry))
        for gpu in sorted(mine):
            self._limiting.limit_memory(
                gpu, {path: together[gpu][pod] for pod, path in paths.items()}, timeout_s=_left(time_left)
            )

    def undo(self, entry: ledger.Entry, others: Sequence[ledger.Entry], *, timeout_s: float) -> None:
        """Put back what was set for a claim and no other claim needs. Does as much as it can before it raises."""
        time_left = locks.Deadline(timeout_s, clock=self._clock)
        trouble = _Trouble()
        for share in duties.mps((entry,)):
            with trouble.noted():
                self._remove(share, timeout_s=_left(time_left))
        if not trouble.errors:
            for gpu in sorted(duties.one_process((entry,)) - duties.one_process(others)):
                with trouble.noted():
                    self._modes.restore_process(gpu, timeout_s=_left(time_left))
        needed = duties.turns(others)
        for gpu, turns in sorted(duties.turns((entry,)).items()):
            if gpu not in needed:
                with trouble.noted():
                    self._modes.restore_turns(gpu, turns.uuid, timeout_s=_left(time_left))
        together = duties.pod_limits(others)
        paths = {pod: path for pod in entry.pods if (path := self._pods.find(pod)) is not None}
        for gpu in sorted(duties.pod_limits((entry,))) if paths else ():
            left = together.get(gpu, {})
            with trouble.noted():
                self._limiting.limit_memory(
                    gpu,
                    {path: left.get(pod, limits.NO_LIMIT) for pod, path in paths.items()},
                    timeout_s=_left(time_left),
                )
        trouble.raise_first()

    def _remove(self, share: mps_shares.Share, *, timeout_s: float) -> None:
        try:
            self._supervisor.remove(share.device, share.share_id, timeout_s=timeout_s)
        except MpsError as error:
            # A supervisor that has ended took its daemons with it.
            if not isinstance(error.__cause__, FileNotFoundError | ConnectionRefusedError):
                raise WorkError(str(error), kind=work.Kind.FAILED, retryable=error.retryable) from error

    def _there(self, entry: ledger.Entry) -> tuple[str, ...]:
        """The pods of an entry to be limited: one that joined may have outlived the first. Of a pod that is alone its cgroup has to
        be there, and so has one of several.
        """
        if len(entry.pods) < 2:
            return entry.pods
        return tuple(pod for pod in entry.pods if self._pods.find(pod) is not None) or entry.pods

    def _path(self, pod: str) -> str:
        path = self._pods.find(pod)
        if path is None:
            raise WorkError(
                f"the cgroup of pod {pod} is not below {self._pods.root}, so that its memory cannot be limited: is that where kubelet"
                " of this node has its cgroups (--cgroup-root), and does it have one for each pod (cgroupsPerQOS)?",
                kind=work.Kind.FAILED,
                retryable=False,
            )
        return path


class _Trouble:
    """What failed of several things that are done whatever becomes of the others."""

    def __init__(self) -> None:
        self.errors: list[WorkError] = []

    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
        try:
            yield
        except WorkError as error:
            self.errors.append(error)

    def raise_first(self) -> None:
        for error in self.errors[1:]:
            logger.warning("%s", error)
        if self.errors:
            raise self.errors[0]


def _left(time_left: locks.Deadline) -> float:
    return max(0.0, time_left.remaining_s())
