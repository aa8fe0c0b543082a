# SPDX-License-Identifier: Apache-2.0
"""Keeps the MPS supervisor in step with the rows: it forgets everything when it ends, and programs are ended with a daemon.

The supervisor is asked only while there are rows that need it, and then it answers when something happens. A share that it has not is
placed, one that no row asks for is removed; that a daemon or the supervisor ended, and with it the programs of claims, is said on
these claims.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from discovery import model
from driver import condition, values
from driver.errors import MpsError, RecordError
from driver.mps import shares as mps_shares
from driver.mps import values as mps_values
from driver.mps.values import DaemonState
from driver.prepare import duties, ledger, locks

logger = logging.getLogger(__name__)

WAIT_S = 60.0
PLACE_S = 10.0
"""How long the GPU of a daemon that does not start is kept from claims; the supervisor goes on by itself."""

REMOVE_S = 10.0
PAUSES_S = (1.0, 2.0, 5.0, 15.0, 30.0)
_GPU_PATIENCE_S = 5.0


class Supervisor(Protocol):
    """What holds MPS daemons; driver.mps.client.Client is one. Its methods raise MpsError."""

    def place_all(self, wanted: Sequence[mps_shares.Share], *, timeout_s: float) -> Mapping[tuple[str, str], MpsError]:
        """Have shares in place; those that are not, by device and share id."""

    def remove(self, device: str, share_id: str, *, timeout_s: float) -> None:
        """Have a share gone. Idempotent."""

    def wait(self, seen: mps_values.Status | None, *, timeout_s: float) -> mps_values.Status:
        """All daemons, once it is another state of affairs than what was seen, or the time is over."""


class Events(Protocol):
    """Who writes Events. Never blocks, never raises."""

    def claim(self, claim: values.ClaimRef, *, reason: str, message: str, warning: bool = True) -> None:
        """An Event on a ResourceClaim."""


Rows = Callable[[], Sequence[ledger.Entry]]
"""The rows of shares of this boot, as they are now. Raises RecordError."""


class MpsCare:
    """`run` in a thread of its own, `needed` and `findings` from any thread."""

    def __init__(
        self,
        supervisor: Supervisor,
        *,
        rows: Rows,
        claim_locks: locks.Locks,
        leads: Callable[[], bool],
        events: Events,
        stop: threading.Event,
        wait_s: float = WAIT_S,
        pauses_s: Sequence[float] = PAUSES_S,
    ) -> None:
        self._supervisor = supervisor
        self._rows = rows
        self._locks = claim_locks
        self._leads = leads
        self._events = events
        self._stop = stop
        self._wait_s = wait_s
        self._pauses_s = pauses_s
        self._wanted = threading.Event()
        self._status: mps_values.Status | None = None
        self._failed: dict[str, str] = {}
        self._away = condition.Condition(logger, recovered="The MPS supervisor answers again")

    def needed(self, *, needed: bool) -> None:
        """Whether there are rows that the supervisor has a part in."""
        if needed:
            self._wanted.set()
        else:
            self._wanted.clear()

    def findings(self) -> tuple[model.Finding, ...]:
        """What a person should know of daemons that do not run."""
        away, status = self._away.text, self._status
        if away is not None and self._wanted.is_set():
            return (_finding("mps-supervisor-away", "mps", f"{away}; claims that share a GPU by MPS have no daemon"),)
        found = {
            daemon.device: f"its MPS daemon does not run ({daemon.error or 'it ended'})"
            for daemon in (status.daemons.values() if status is not None else ())
            if daemon.state is DaemonState.WAITING and daemon.shares
        }
        return tuple(
            _finding("mps-daemon-down", device, f"{message}: programs of its claims get no GPU until it does")
            for device, message in sorted({**self._failed, **found}.items())
        )

    def run(self) -> None:
        """Follow the supervisor until told to stop; `needed` wakes it up."""
        failures = 0
        while not self._stop.is_set():
            self._wanted.wait()
            if self._stop.is_set() or not self._leads():
                self._status = None
                self._stop.wait(self._pauses_s[0])
                continue
            try:
                self._follow()
            except MpsError as error:
                self._away.failed(str(error))
            except RecordError as error:
                logger.warning("The shares that MPS should have cannot be read: %s", error)
            except Exception:
                # The last door of the loop: one bad round must not end the care for all daemons.
                logger.exception("The MPS supervisor could not be followed")
            else:
                failures = 0
                continue
            self._stop.wait(self._pauses_s[min(failures, len(self._pauses_s) - 1)])
            failures += 1

    def sweep(self) -> None:
        """See once that a supervisor that is there has nothing that no row asks for. May raise RecordError."""
        with contextlib.suppress(MpsError):
            self.mend(self._supervisor.wait(None, timeout_s=0.0))

    def _follow(self) -> None:
        """Wait for what happens, and see to it."""
        seen = self._status
        status = self._supervisor.wait(seen, timeout_s=self._pauses_s[-1] if self._failed else self._wait_s)
        self._away.passed()
        self._tell(seen, status)
        self._status = status
        self.mend(status)

    def mend(self, status: mps_values.Status) -> None:
        """Place what the supervisor lacks, and remove what no row asks for. Raises RecordError and MpsError."""
        rows = self._rows()
        wanted = duties.mps(rows)
        devices = {share.device for share in wanted} | set(status.daemons)
        self._failed = {device: why for device, why in self._failed.items() if device in devices}
        for device in sorted(devices):
            there = status.daemons[device].shares if device in status.daemons else ()
            if set(there) != {share.share_id for share in wanted if share.device == device}:
                self._mend(device, frozenset(there))
            else:
                self._failed.pop(device, None)

    def _mend(self, device: str, there: frozenset[str]) -> None:
        gpu = values.address_of(device)
        if gpu is None:
            return
        try:
            with self._locks.gpus((gpu,), patience=locks.Deadline(_GPU_PATIENCE_S)):
                wanted = [share for share in duties.mps(self._rows()) if share.device == device]
                for share_id in sorted(there - {share.share_id for share in wanted}):
                    logger.warning("MPS has share %s of %s that no claim asks for: it is removed", share_id, device)
                    self._supervisor.remove(device, share_id, timeout_s=REMOVE_S)
                missing = [share for share in wanted if share.share_id not in there]
                failed = self._supervisor.place_all(missing, timeout_s=PLACE_S) if missing else {}
        except locks.LockUnavailableError:
            return
        if failed:
            message = f"the MPS daemon has not all its shares: {next(iter(failed.values()))}"
            if self._failed.get(device) != message:
                logger.warning("%s: %s", device, message)
            self._failed[device] = message
        else:
            self._failed.pop(device, None)
            if missing:
                logger.info("MPS has %d shares of %s again", len(missing), device)

    def _tell(self, seen: mps_values.Status | None, status: mps_values.Status) -> None:
        """Say on claims what became of their daemons."""
        if seen is None:
            return
        if seen.instance != status.instance:
            for daemon in seen.daemons.values():
                self._say(
                    daemon,
                    "MpsRestarted",
                    f"The MPS supervisor of this node was restarted, and with it the MPS daemon of device {daemon.device}: programs of this claim"
                    " that used the GPU were ended and have to be started again",
                )
            return
        for device, daemon in status.daemons.items():
            before = seen.daemons.get(device)
            if before is None or not before.shares:
                continue
            if daemon.restarts > before.restarts or (
                before.state is DaemonState.RUNNING and daemon.state is DaemonState.WAITING
            ):
                self._say(
                    before,
                    "MpsDaemonEnded",
                    f"The MPS daemon of device {device} ended"
                    + (f" ({daemon.error})" if daemon.error else "")
                    + ": programs of this claim that used the GPU were ended and have to be started again; the daemon is started"
                    " again by itself",
                )

    def _say(self, daemon: mps_values.Daemon, reason: str, message: str) -> None:
        logger.warning("%s", message)
        shared = frozenset(daemon.shares)
        for row in self._rows():
            if any(result.share_id in shared and result.device == daemon.device for result in row.results):
                self._events.claim(row.claim, reason=reason, message=message)


def _finding(code: str, subject: str, message: str) -> model.Finding:
    return model.Finding(code=code, severity=model.Severity.WARNING, subject=subject, message=message)
