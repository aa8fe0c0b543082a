# SPDX-License-Identifier: Apache-2.0
"""What rooms report, put where people look: counted as metrics, and as Events on the claim or the Node."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from driver import values
from driver.observe.metrics import Metrics
from driver.prepare import executor


class Recorder(Protocol):
    """Who writes Events. Never blocks, never raises."""

    def claim(self, ref: values.ClaimRef, *, reason: str, message: str, warning: bool = True) -> None:
        """An Event on a ResourceClaim."""

    def pod(self, namespace: str, name: str, uid: str, *, reason: str, message: str, warning: bool = True) -> None:
        """An Event on a Pod."""

    def node(self, *, reason: str, message: str, warning: bool = True) -> None:
        """An Event on the Node."""


class Reports:
    """The one who is told, for executor, collector, keeper and record."""

    def __init__(
        self, metrics: Metrics, events: Recorder, *, released: Callable[[], None], changed: Callable[[], None]
    ) -> None:
        """`released` is called after a claim let go of its devices, `changed` after one was prepared or unprepared."""
        self._metrics = metrics
        self._events = events
        self._released = released
        self._changed = changed

    def claim_done(self, *, operation: str, result: str, seconds: float) -> None:
        """A claim was answered."""
        self._metrics.claim_done(operation=operation, result=result, seconds=seconds)
        if (operation, result) == (executor.UNPREPARE, executor.DONE):
            self._released()
        if result == executor.DONE:
            self._changed()

    def claim(self, claim: values.ClaimRef, *, reason: str, message: str, warning: bool = True) -> None:
        """Something about a prepared claim: said on it."""
        self._events.claim(claim, reason=reason, message=message, warning=warning)

    def pod(self, namespace: str, name: str, uid: str, *, reason: str, message: str, warning: bool = True) -> None:
        """Something about a pod that uses a prepared claim: said on it."""
        self._events.pod(namespace, name, uid, reason=reason, message=message, warning=warning)

    def prepare_failed(self, claim: values.ClaimRef, *, message: str) -> None:
        """A claim could not be prepared: said on the claim, as kubelet says it on the pod only."""
        self._events.claim(claim, reason="PrepareFailed", message=message)

    def cdi_file_repaired(self) -> None:
        """A CDI file of a prepared claim is back."""
        self._metrics.cdi_file_repaired()

    def claim_collected(self, claim: values.ClaimRef, *, reason: str) -> None:
        """A claim was unprepared that kubelet had not asked about."""
        self._metrics.claim_collected()
        self._events.node(reason="ClaimCollected", message=f"{claim} was unprepared: {reason}", warning=False)

    def record_failed(self) -> None:
        """The record could not be used once; /readyz says why where that lasts."""
        self._metrics.record_failed()

    def record_rebuilt(self, *, reason: str, claims: int) -> None:
        """The record was damaged or lost, and made anew."""
        self._metrics.record_rebuilt()
        self._events.node(
            reason="RecordRebuilt",
            message=f"The record of prepared claims could not be used ({reason}) and was made anew; {claims} claims were "
            "found again in CDI files",
        )
