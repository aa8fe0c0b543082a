# SPDX-License-Identifier: Apache-2.0
"""What the agent says of itself: gauges, /healthz, /readyz, the inspect page and the health stream, all from the same parts."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from typing import Protocol

from discovery import draw, model
from driver import inventory, values
from driver.app.parts import Parts
from driver.errors import RecordError
from driver.observe import gauges, page, partitions, sharers
from driver.publish import health, publisher

logger = logging.getLogger(__name__)


_OVERLAY_PROBLEMS = ("overlay-refused", "overlay-unknown-device")
"""Findings that a person has to mend in a file; the agent serves meanwhile."""


class AgentState:
    """Reads the parts when asked; keeps nothing but the parts."""

    def __init__(self, parts: Parts, publishing: publisher.Publisher) -> None:
        self._node_name = parts.settings.node_name
        self._hardware = parts.readings
        self._record = parts.claims.record
        self._node_spec = parts.claims.node_spec
        self._kubelet = parts.kubelet
        self._following = parts.following
        self._policies = parts.claims.policies
        self._own = parts.claims.own
        self._keeper = parts.keeper
        self._publishing = publishing
        self._api_problem: str | None = "The client of the API server is being set up"
        self._stopping = parts.stop

    def api(self, problem: str | None) -> None:
        """Why there is no client of the API server; None once there is one."""
        self._api_problem = problem

    def inventory(self) -> inventory.InventoryState:
        """The newest Snapshot, and when the hardware was read."""
        return self._hardware.state()

    def published(self) -> gauges.Published:
        """What is published."""
        state = self._publishing.state()
        absent = sum(device.absent for device in state.devices)
        return gauges.Published(
            slices=state.slices,
            generation=state.generation,
            tainted={"absent": absent},
            findings=(*self._following.findings(), *state.findings, *self._keeper.findings()),
        )

    def recorded(self) -> gauges.Recorded:
        """What is prepared. May raise RecordError."""
        return gauges.Recorded(claims=self._record.count(), devices=self._record.held_devices())

    def sharing(self) -> partitions.Sharing:
        """How the GPUs are shared."""
        snapshot = self._hardware.snapshot()
        if snapshot is None:
            return partitions.Sharing()
        try:
            return partitions.Sharing(
                policies=self._policies.policies(snapshot), released=self._own.names(snapshot.taken_at)
            )
        except RecordError:
            return partitions.Sharing()

    def shared(self) -> Sequence[sharers.Shared]:
        """The devices that are handed out in shares. May raise RecordError."""
        snapshot = self._hardware.snapshot()
        if snapshot is None:
            return ()
        policies = self._policies.policies(snapshot)
        if not any(policy.shares for policy in policies.values()):
            return ()
        return sharers.shared(snapshot, policies=policies, used=sharers.uses(self._record.rows()))

    def seen(self) -> Sequence[sharers.Seen]:
        """What pods with a limit were last seen to use."""
        return tuple(
            sharers.Seen(device=seen.device, pod_uid=seen.pod, claims=seen.claims, used=seen.used, limit=seen.limit)
            for seen in self._keeper.seen()
        )

    def config_refused(self) -> bool:
        """Whether the configuration file is not valid now."""
        return self._following.refused

    def registered(self) -> bool:
        """Whether kubelet has taken the driver."""
        return self._kubelet.status().registered

    def ready(self) -> bool:
        """Whether /readyz would answer 200."""
        return self.readyz()[0]

    def healthz(self) -> tuple[bool, Sequence[str]]:
        """Whether this process can serve kubelet. What a restart would not mend is no reason."""
        if self._stopping.is_set():
            return False, ["The agent is stopping"]
        return True, []

    def readyz(self) -> tuple[bool, Sequence[str]]:
        """Whether pods can get GPUs here: kubelet has the driver, the record is usable, the slices stand."""
        missing: list[str] = []
        notes: list[str] = []
        if self._stopping.is_set():
            missing.append("The agent is stopping")
        registration = self._kubelet.status()
        if not registration.registered:
            missing.append(registration.error or "Kubelet has not registered the driver yet")
        if (problem := self._record.problem()) is not None:
            missing.append(problem)
        if self._api_problem is not None:
            missing.append(self._api_problem)
        else:
            published = self._publishing.state()
            if published.reason is not None:
                (notes if published.ok else missing).append(published.reason)
        hardware = self._hardware.state()
        if hardware.error is not None:
            notes.append(hardware.error)
        notes += _overlay_problems(hardware.snapshot)
        notes += [finding.message for finding in self._following.findings()]
        notes += [f"{finding.subject}: {finding.message}" for finding in self._keeper.findings()]
        if (problem := self._node_spec.problem()) is not None:
            notes.append(f"No container can get a GPU: {problem}")
        return not missing, [*missing, *notes]

    def snapshot(self) -> model.Snapshot | None:
        """The newest Snapshot."""
        return self._hardware.snapshot()

    def view(self) -> page.View:
        """What the inspect page shows."""
        hardware = self._hardware.state()
        ready, reasons = self.readyz()
        claims: tuple[page.PreparedClaim, ...] = ()
        record_error = None
        shared: tuple[sharers.Shared, ...] = ()
        try:
            shared = tuple(self.shared())
            claims = tuple(
                page.PreparedClaim(
                    claim=entry.claim, state=entry.state, devices=tuple(result.device for result in entry.results)
                )
                for entry in self._record.rows()
            )
        except RecordError as error:
            record_error = str(error)
        return page.View(
            node_name=self._node_name,
            snapshot=hardware.snapshot,
            read_at=hardware.read_at,
            ready=ready,
            reasons=tuple(reasons),
            claims=claims,
            publish_findings=(
                *self._following.findings(),
                *self._publishing.state().findings,
                *self._keeper.findings(),
            ),
            record_error=record_error,
            picture=draw.svg(hardware.snapshot) if hardware.snapshot is not None else "",
            sharing=self.sharing(),
            shared=shared,
            seen=tuple(self.seen()) if shared else (),
        )


def _overlay_problems(snapshot: model.Snapshot | None) -> list[str]:
    """What a person wrote in the overlay and does not hold on this machine."""
    return [
        f"{finding.subject}: {finding.message}"
        for finding in (snapshot.findings if snapshot is not None else ())
        if finding.code in _OVERLAY_PROBLEMS
    ]


class HealthObserver(Protocol):
    """Who counts changes of health."""

    def health_changed(self, status: values.HealthStatus) -> None:
        """A device's health became `status`."""


class PublishedHealth:
    """The health of what is published, for the stream to kubelet. A change is counted and logged once."""

    def __init__(
        self,
        *,
        pool: str,
        hardware: inventory.Inventory,
        publishing: publisher.Publisher,
        observer: HealthObserver,
    ) -> None:
        self._pool = pool
        self._hardware = hardware
        self._publishing = publishing
        self._observer = observer
        self._lock = threading.Lock()
        self._last: Mapping[str, values.HealthStatus] = {}

    def devices(self) -> tuple[values.DeviceHealth, ...]:
        """The health of every published device, now."""
        state = self._hardware.state()
        published = self._publishing.state()
        found = health.build_health(
            published.addresses,
            state.readings,
            pool=self._pool,
            read_at=state.read_at,
            fresh=self._hardware.fresh(),
            vanished=published.vanished,
        )
        with self._lock:
            last, self._last = self._last, {device.device: device.status for device in found}
        for device in found:
            if device.device in last and last[device.device] is not device.status:
                self._observer.health_changed(device.status)
                logger.info("Device %s is %s: %s", device.device, device.status, device.message or "as it should be")
        return found

    def wait(self, seen: int, timeout_s: float) -> int:
        """Wait until the inventory's count of changes differs from `seen`; what is published follows from it."""
        return self._hardware.wait(seen, timeout_s)
