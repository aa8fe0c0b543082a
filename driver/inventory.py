# SPDX-License-Identifier: Apache-2.0
"""The newest good Snapshot of the node, and how fresh it is.

One thread looks: a cheap rescan every interval and after hints that something changes, a full probe when the rescan shows
something new, when somebody asked, or when the last probe failed. A failed probe never replaces a good Snapshot; it is said
in `state()` until one succeeds.

While hints come, no look is made before they end (`quiet`): a change that is seen half would be published twice.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

from discovery import codec, model
from discovery.address import PciAddress
from discovery.errors import ProbeError
from driver import quiet

logger = logging.getLogger(__name__)

PROBE_TIMEOUT_S = 60.0
"""A first probe loads NVML and may wait for the driver to wake every GPU: seconds on a large node, never a minute."""

_NVIDIA = "nvidia"
RESCAN_TIMEOUT_S = 15.0
RETRY_S = (0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
"""Pauses after the first, second, ... failed probe in a row."""

SETTLE_S = (1.0, 2.0, 4.0, 8.0, 15.0, 30.0)
"""Pauses before the looks that follow upon the start and upon hints, at most an interval, while a GPU that NVIDIA's driver
has is not usable: a driver that was just loaded has no device nodes and no library yet, and nothing tells when it has. A GPU
that comes and goes without a hint is looked at no more often than any other.
"""

STALE_INTERVALS = 3
"""A reading older than this many intervals says nothing about now."""


class Prober(Protocol):
    """What looks at the hardware. Every call raises ProbeError when it gave nothing."""

    def probe(self, *, timeout_s: float) -> model.Snapshot:
        """A full look."""

    def rescan(self, *, timeout_s: float) -> model.Rescan:
        """A cheap look at identity and state."""


class ProbeObserver(Protocol):
    """Who counts probes."""

    def probe(self, *, seconds: float, ok: bool, reason: str) -> None:
        """A look ended; `reason` is `probe` or `rescan` where it failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InventoryState:
    """What is known now. `generation` grows with every Snapshot of other content; 0 before the first.

    `readings`: the last state of each GPU that a rescan or probe saw. `read_at`: when that look ended, seconds since the
    epoch; None before the first. `error`: why the last probe failed, None when it did not.
    """

    snapshot: model.Snapshot | None = None
    generation: int = 0
    readings: Mapping[PciAddress, model.GpuReading] = field(default_factory=dict)
    read_at: float | None = None
    error: str | None = None
    fingerprint: str | None = None
    changes: int = 0
    """Grows with every change of anything a watcher may care about: Snapshot, readings, error."""


def _readings(snapshot: model.Snapshot) -> dict[PciAddress, model.GpuReading]:
    return {
        gpu.address: model.GpuReading(
            address=gpu.address,
            state=gpu.state,
            state_reason=gpu.state_reason,
            driver=gpu.pci.driver,
            uuid=gpu.uuid,
            fabric=None if gpu.fabric is None else gpu.fabric.state,
        )
        for gpu in snapshot.gpus
    }


def _newly_named(now: model.NicReading, before: model.NicReading | None) -> bool:
    """Whether a NIC shows a name that it did not have. One that shows none has moved into a pod, and is the same NIC."""
    if now.rdma is not None:
        return before is None or now.rdma != before.rdma
    # An interface is the name of a NIC only where there is no RDMA device.
    return now.interface is not None and (before is None or (before.rdma is None and now.interface != before.interface))


def _seen(
    gpus: Iterable[model.Gpu | model.GpuReading], nics: Iterable[model.Nic | model.NicReading]
) -> tuple[Mapping[PciAddress, str | None], frozenset[PciAddress]]:
    """The GPUs with their drivers, and the NICs."""
    drivers = {gpu.address: gpu.pci.driver if isinstance(gpu, model.Gpu) else gpu.driver for gpu in gpus}
    return drivers, frozenset(nic.address for nic in nics)


class Inventory:
    """Owns the probing thread. `start` and `stop` once each; everything else from any thread."""

    def __init__(
        self,
        prober: Prober,
        *,
        interval_s: float,
        observer: ProbeObserver,
        clock: Callable[[], float] = time.time,
        elapsed: Callable[[], float] = time.monotonic,
    ) -> None:
        """`clock` tells people when the hardware was read; `elapsed` how long ago, whoever sets the clock meanwhile."""
        self._prober = prober
        self._interval_s = interval_s
        self._observer = observer
        self._clock = clock
        self._elapsed = elapsed
        self._looked_at: float | None = None
        self._changed = threading.Condition()
        self._state = InventoryState()
        self._wanted = False
        self._burst = quiet.Burst()
        self._nics: Mapping[PciAddress, model.NicReading] = {}
        """The names of NICs as they were at the last full probe."""
        self._settling = 0
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="inventory", daemon=True)

    def start(self) -> None:
        """Begin with a full probe, at once."""
        self._thread.start()

    def hold_up(self, reason: str | None) -> None:
        """Say, before `start`, why the hardware cannot be looked at yet; None when nothing is in the way any more."""
        self._set(replace(self.state(), error=reason))

    def stop(self) -> None:
        """End the loop. A look under way ends when its prober is closed, which is the caller's to do."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()

    def state(self) -> InventoryState:
        """What is known now, as one value."""
        with self._changed:
            return self._state

    def snapshot(self) -> model.Snapshot | None:
        """The newest good Snapshot, None before the first."""
        return self.state().snapshot

    def request_probe(self) -> None:
        """Ask for a full probe soon."""
        with self._changed:
            self._wanted = True
            self._changed.notify_all()

    def stir(self) -> None:
        """Something may have changed: ask for a look as soon as no more of this comes."""
        with self._changed:
            if self._burst.hint(self._elapsed()):
                self._changed.notify_all()

    def wait(self, seen: int, timeout_s: float) -> int:
        """Wait until `state().changes` differs from `seen`, or the time is over; the present count is the answer."""
        with self._changed:
            self._changed.wait_for(lambda: self._state.changes != seen or self._stopping, timeout_s)
            return self._state.changes

    def fresh(self) -> bool:
        """Whether the last look is young enough to speak for now."""
        looked_at = self._looked_at
        return looked_at is not None and self._elapsed() - looked_at <= STALE_INTERVALS * self._interval_s

    def _set(self, state: InventoryState) -> None:
        with self._changed:
            if state.error is None and state.snapshot is not None:
                self._looked_at = self._elapsed()
            if replace(state, changes=0, read_at=None) != replace(self._state, changes=0, read_at=None):
                state = replace(state, changes=self._state.changes + 1)
            self._state = state
            self._changed.notify_all()

    def _run(self) -> None:
        failures = 0
        must_probe = True
        while not self._stopping:
            try:
                self._look(full=must_probe)
            except Exception:
                # The loop is the last door: whatever a prober throws, the node keeps its last good Snapshot.
                logger.exception("The hardware could not be looked at")
                failed = True
            else:
                failed = self._state.error is not None
            failures = failures + 1 if failed else 0
            pause = RETRY_S[min(failures, len(RETRY_S)) - 1] if failures else self._pause()
            must_probe = self._await(pause) or failed

    def _pause(self) -> float:
        """How long until the next look, if nothing comes in between."""
        waking = any(r.driver == _NVIDIA and r.state is not model.GpuState.READY for r in self._state.readings.values())
        if not waking or self._settling >= len(SETTLE_S):
            return self._interval_s
        self._settling += 1
        return min(self._interval_s, SETTLE_S[self._settling - 1])

    def _await(self, pause_s: float) -> bool:
        """Wait until a look is due; whether somebody asked for a full probe."""
        with self._changed:
            due = self._elapsed() + pause_s
            while not (self._wanted or self._stopping):
                hinted = self._burst.due()
                left = (due if hinted is None else hinted) - self._elapsed()
                if left <= 0:
                    break
                self._changed.wait(left)
            if self._burst.due() is not None:
                self._settling = 0
            self._burst.looked(self._elapsed())
            wanted, self._wanted = self._wanted, False
            return wanted

    def _look(self, *, full: bool) -> None:
        """Look cheaply and, if that shows something new, whole; or whole at once."""
        rescan = None
        if not full:
            rescan = self._rescan()
            if rescan is None:
                return
        self._probe(rescan)

    def _probe(self, rescan: model.Rescan | None) -> None:
        """Look at everything. `rescan`: the cheap look that went before; without it one follows, and if the two see different
        hardware, something has changed in between.
        """
        began = time.monotonic()
        followed = rescan is None
        try:
            snapshot = self._prober.probe(timeout_s=PROBE_TIMEOUT_S)
            if rescan is None:
                rescan = self._prober.rescan(timeout_s=RESCAN_TIMEOUT_S)
        except ProbeError as error:
            self._failed("probe", error, began)
            return
        if followed and _seen(snapshot.gpus, snapshot.nics) != _seen(rescan.gpus, rescan.nics):
            rescan = replace(rescan, fingerprint="")
            self.stir()
        self._observer.probe(seconds=time.monotonic() - began, ok=True, reason="")
        self._nics = {nic.address: nic for nic in rescan.nics}
        before = self._state
        same = before.snapshot is not None and codec.same_content(before.snapshot, snapshot)
        if before.error is not None:
            logger.info("The hardware can be read again")
        if not same:
            ready = sum(gpu.state is model.GpuState.READY for gpu in snapshot.gpus)
            logger.info(
                "Node read: %d GPUs, %d ready, %d NICs, %d findings",
                len(snapshot.gpus),
                ready,
                len(snapshot.nics),
                len(snapshot.findings),
            )
            for finding in set(snapshot.findings) - set(before.snapshot.findings if before.snapshot else ()):
                logger.log(
                    logging.INFO if finding.severity is model.Severity.INFO else logging.WARNING,
                    "%s: %s (%s)",
                    finding.subject,
                    finding.message,
                    finding.code,
                )
        self._set(
            replace(
                before,
                snapshot=before.snapshot if same else snapshot,
                generation=before.generation + (not same),
                readings=_readings(snapshot),
                read_at=self._clock(),
                error=None,
                fingerprint=rescan.fingerprint,
            )
        )

    def _rescan(self) -> model.Rescan | None:
        """Look cheaply; what was seen if a full probe is due."""
        began = time.monotonic()
        try:
            rescan = self._prober.rescan(timeout_s=RESCAN_TIMEOUT_S)
        except ProbeError as error:
            self._failed("rescan", error, began)
            return None
        before = self._state
        readings = {reading.address: reading for reading in rescan.gpus}
        if (
            rescan.fingerprint != before.fingerprint
            # A change of state matters to what is published, so the whole picture is taken again.
            or {a: r.state for a, r in readings.items()} != {a: r.state for a, r in before.readings.items()}
            or any(_newly_named(nic, self._nics.get(nic.address)) for nic in rescan.nics)
        ):
            return rescan
        self._set(replace(before, readings=readings, read_at=self._clock(), error=None))
        return None

    def _failed(self, what: str, error: ProbeError, began: float) -> None:
        self._observer.probe(seconds=time.monotonic() - began, ok=False, reason=what)
        before = self._state
        message = f"The {what} of the hardware failed: {error}"
        if before.error != message and not self._stopping:
            logger.warning("%s; the last good reading stays valid", message)
        self._set(replace(before, error=message))
