# SPDX-License-Identifier: Apache-2.0
"""Keeps the ResourceSlices of this node as they should be, whoever changes what.

One thread looks whenever the inventory, the record, or any slice of the node changes, and lets `reconciler` compare and
write. With no difference nothing is written, nothing logged, and the thread sleeps.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection
from typing import Protocol

from discovery import model
from driver import errors
from driver.publish import aim, held, mirror, node, notices, pacing, reconciler, rivals, slices, wanted, writer

logger = logging.getLogger(__name__)

PublishState = reconciler.PublishState


class PublishApi(mirror.MirrorApi, held.ClaimsApi, writer.WriteApi, node.NodeApi, Protocol):
    """All that publishing asks of the API server."""


class Publisher:
    """One pool. `start` once the API client is there, `stop` once; `notify` and `state` from any thread, at any time."""

    def __init__(
        self,
        *,
        driver_name: str,
        node_name: str,
        wanted_now: Callable[[aim.Holders], wanted.Wanted],
        may_write: Callable[[], bool],
        holders: Callable[[], Collection[str]],
        store: reconciler.PublishedStore,
        events: notices.NodeEvents,
        observer: writer.WriteObserver,
        listed: Callable[[], None] = lambda: None,
        waits: Callable[[], bool] = lambda: False,
        allow_coexistence: bool = False,
        timing: pacing.Timing | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`wanted_now`: what should be offered; it is told whom to ask who has some devices. `may_write`: whether this instance leads. `holders`: names of the devices
        that the record of prepared claims names; may raise RecordError. `listed`: called when `state` has other devices, or one vanished.
        `waits`: whether a change of policy waits for devices to be let go.
        """
        self._place = slices.Place(driver_name=driver_name, node_name=node_name)
        self._questions = reconciler.Questions(wanted_now=wanted_now, may_write=may_write, holders=holders)
        self._store = store
        self._events = events
        self._observer = observer
        self._listed = listed
        self._waits = waits
        self._allow_coexistence = allow_coexistence
        self._timing = timing if timing is not None else pacing.Timing()
        self._clock = clock
        self._wake = threading.Event()
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._mirror: mirror.Mirror | None = None
        self._reconciler: reconciler.Reconciler | None = None
        self._aiming: aim.Aiming | None = None
        self._state = PublishState(reason="The API server has not been reached yet")

    def start(self, api: PublishApi) -> None:
        """Begin to look and to write."""
        known = mirror.Mirror(api, node_name=self._place.node_name, changed=self._wake.set, timing=self._timing)
        budget = pacing.WriteBudget(
            burst=self._timing.writes_at_once, refill_s=self._timing.write_every_s, clock=self._clock
        )
        facts = node.NodeFacts(api, name=self._place.node_name, clock=self._clock)
        writing = writer.Writer(api, known, may_write=self._questions.may_write, budget=budget, observer=self._observer)
        telling = notices.Notices(self._events, driver_name=self._place.driver_name)
        aiming = aim.Aiming(
            place=self._place,
            recorded=self._questions.holders,
            holding=self._holding(api),
            changing=self._holding(api),
            facts=facts,
            in_the_way=None
            if self._allow_coexistence
            else rivals.Rivals(facts, quiet_s=self._timing.quiet_after_conflict_s, clock=self._clock),
            writing=writing,
            telling=telling,
            clock=self._clock,
        )
        worker = reconciler.Reconciler(
            place=self._place,
            questions=self._questions,
            known=known,
            facts=facts,
            aiming=aiming,
            writing=writing,
            budget=budget,
            store=self._store,
            telling=telling,
            timing=self._timing,
            clock=self._clock,
        )
        self._aiming = aiming
        self._mirror, self._reconciler = known, worker
        self._thread = threading.Thread(target=self._run, args=(worker,), name="publisher", daemon=True)
        known.start()
        self._thread.start()

    def stop(self, *, timeout_s: float = 1.0) -> None:
        """End. The slices stay: the next start finds them, and kubelet wipes them where none follows."""
        self._stopping.set()
        self._wake.set()
        if self._mirror is not None:
            self._mirror.stop(timeout_s=timeout_s)
        if self._thread is not None:
            self._thread.join(timeout_s)

    def notify(self) -> None:
        """The inventory has changed: look again now, also where the last try failed."""
        if self._reconciler is not None:
            self._reconciler.unblock()
        self._wake.set()

    def released(self) -> None:
        """A claim let go of its devices: look again if somebody waits for that. Every Unprepare comes by, and a look costs more
        than it.
        """
        if (self._aiming is not None and self._aiming.watching) or self._waits():
            self.notify()

    def state(self) -> PublishState:
        """How things stand."""
        return self._state

    def _holding(self, api: PublishApi) -> held.HeldDevices:
        return held.HeldDevices(api, driver_name=self._place.driver_name, pool=self._place.node_name, clock=self._clock)

    def _run(self, worker: reconciler.Reconciler) -> None:
        last_door = pacing.Backoff(first_s=1.0, most_s=60.0)
        while not self._stopping.is_set():
            self._wake.clear()
            pause_s: float | None
            try:
                state, pause_s = worker.look()
            except errors.RecordError as error:
                state, pause_s = worker.troubled(str(error)), self._timing.record_again_s
            except Exception:
                # The loop is the last door: without it the slices would stay as they are for good.
                logger.exception("The ResourceSlices could not be looked after")
                state = worker.troubled("The ResourceSlices could not be looked after; see the log")
                pause_s = last_door.failed()
            else:
                last_door.passed()
            self._show(state)
            self._wake.wait(pause_s)

    def _show(self, state: PublishState) -> None:
        before, self._state = self._state, state
        if (state.addresses, state.vanished) != (before.addresses, before.vanished):
            self._listed()
        new = sorted(set(state.findings) - set(before.findings), key=lambda finding: finding.subject)
        for finding in new:
            level = logging.INFO if finding.severity is model.Severity.INFO else logging.WARNING
            logger.log(level, "%s: %s (%s)", finding.subject, finding.message, finding.code)
        if (state.ok, state.reason) == (before.ok, before.reason) or state.reason in {item.message for item in new}:
            return
        if state.reason is not None:
            logger.log(logging.INFO if state.ok else logging.WARNING, "%s", state.reason)
        else:
            logger.info("%d devices are published in %d slices", len(state.devices), state.slices)
