# SPDX-License-Identifier: Apache-2.0
"""The health stream (KEP-4680), in both versions.

Kubelet keeps what it hears for 30 s, counted from receipt, and forgets the health of the *driver*, all its instances,
when the stream of one instance ends. So every stream gets all devices when it opens, when anything changed, every few
seconds though nothing did, and at once when `resend` is called. It never answers UNIMPLEMENTED: kubelet would stop asking.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator, Sequence
from typing import Protocol

import grpc

from driver import values
from driver.kubelet import wire
from proto.dra_health.v1 import api_pb2 as dra_health_v1

logger = logging.getLogger(__name__)

SERVICES = ("v1.DRAResourceHealth", "v1alpha1.DRAResourceHealth")
"""Full names of the services; the packages are called v1 and v1alpha1, so these are also what registration announces."""

MAX_STREAMS = 8
"""Each open stream holds a thread. Kubelet opens one, and one more while it reconnects."""

REFRESH_S = 8.0
"""Pause between two reports of the same. Must stay below kubelet's time-out with two reports to spare."""

TIMEOUT_S = 30
"""Sent with each device: how long a report holds. It is kubelet's default, said in so many words."""

MESSAGE_MAX_BYTES = 1024
"""ResourceHealthMessageMaxLength of k8s.io/api/core/v1; kubelet cuts what is longer, in the middle of a character too."""

_MIN_PAUSE_S = 0.2

_STATUS = {
    values.HealthStatus.UNKNOWN: dra_health_v1.UNKNOWN,
    values.HealthStatus.HEALTHY: dra_health_v1.HEALTHY,
    values.HealthStatus.UNHEALTHY: dra_health_v1.UNHEALTHY,
}


class HealthSource(Protocol):
    """Who knows how the devices are."""

    def devices(self) -> tuple[values.DeviceHealth, ...]:
        """The health of every published device, now."""

    def wait(self, seen: int, timeout_s: float) -> int:
        """Wait until the count of changes differs from `seen`, or the time is over; the present count is the answer."""


class HealthService:
    """Streams what `source` says. One thread waits for changes, each stream has one of the server's threads."""

    def __init__(self, source: HealthSource, *, refresh_s: float = REFRESH_S) -> None:
        self._source = source
        self._refresh_s = refresh_s
        self._changed = threading.Condition()
        self._round = 0
        self._streams = 0
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="health", daemon=True)

    def handlers(self) -> list[grpc.GenericRpcHandler]:
        """Both services. Their messages are the same on the wire, so the classes of v1 serve both."""
        method = grpc.unary_stream_rpc_method_handler(
            self._watch,
            request_deserializer=dra_health_v1.NodeWatchResourcesRequest.FromString,
            response_serializer=dra_health_v1.NodeWatchResourcesResponse.SerializeToString,
        )
        return [grpc.method_handlers_generic_handler(name, {"NodeWatchResources": method}) for name in SERVICES]

    def start(self) -> None:
        """Follow the source."""
        self._thread.start()

    def resend(self) -> None:
        """Send everything to every stream now."""
        with self._changed:
            self._round += 1
            self._changed.notify_all()

    def stop(self) -> None:
        """End every stream now, and take no new one. The thread ends with its wait, which nobody needs to await."""
        with self._changed:
            self._stopped.set()
            self._changed.notify_all()

    def _follow(self) -> None:
        seen = -1
        while not self._stopped.is_set():
            try:
                count = self._source.wait(seen, self._refresh_s)
                if count == seen:
                    # A source that is being stopped may answer at once; the pause keeps this from spinning.
                    self._stopped.wait(_MIN_PAUSE_S)
                seen = count
            except Exception:
                # The last door of this loop: without it kubelet would soon hear nothing at all.
                logger.exception("Changes of health cannot be waited for")
                self._stopped.wait(self._refresh_s)
            self.resend()

    def _watch(
        self, _request: dra_health_v1.NodeWatchResourcesRequest, context: grpc.ServicerContext
    ) -> Iterator[dra_health_v1.NodeWatchResourcesResponse]:
        ended = threading.Event()

        def end() -> None:
            with self._changed:
                ended.set()
                self._changed.notify_all()

        with self._place(context):
            if not context.add_callback(end):
                return
            seen = -1
            while (current := self._next_round(seen, ended)) is not None:
                yield self._report(context)
                seen = current

    def _next_round(self, seen: int, ended: threading.Event) -> int | None:
        """Wait for a round after `seen`; None when the stream has ended instead."""
        with self._changed:
            self._changed.wait_for(lambda: self._round != seen or ended.is_set() or self._stopped.is_set())
            return None if ended.is_set() or self._stopped.is_set() else self._round

    def _report(self, context: grpc.ServicerContext) -> dra_health_v1.NodeWatchResourcesResponse:
        try:
            return _message(self._source.devices())
        except Exception as error:
            # The RPC door. The end of the stream says UNKNOWN for every device, which is the truth; kubelet opens another.
            logger.exception("The health of the devices cannot be told")
            context.abort(grpc.StatusCode.INTERNAL, f"{type(error).__name__}: {error}")

    @contextlib.contextmanager
    def _place(self, context: grpc.ServicerContext) -> Iterator[None]:
        with self._changed:
            full = self._streams >= MAX_STREAMS
            self._streams += not full
        if full:
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, f"{MAX_STREAMS} health streams are open already")
        try:
            yield
        finally:
            with self._changed:
                self._streams -= 1


def _message(devices: Sequence[values.DeviceHealth]) -> dra_health_v1.NodeWatchResourcesResponse:
    return dra_health_v1.NodeWatchResourcesResponse(
        devices=[
            dra_health_v1.DeviceHealth(
                device=dra_health_v1.DeviceIdentifier(pool_name=device.pool, device_name=device.device),
                health=_STATUS[device.status],
                last_updated_time=device.checked_at,
                health_check_timeout_seconds=TIMEOUT_S,
                message=wire.text(device.message, max_bytes=MESSAGE_MAX_BYTES),
            )
            for device in devices
        ]
    )
