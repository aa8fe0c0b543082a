# SPDX-License-Identifier: Apache-2.0
"""What kubelet remembers of the health of devices, and how it listens (KEP-4680; pkg/kubelet/cm/dra of Kubernetes 1.37).

A report updates the devices it names. An entry holds for 30 s from its receipt, or as long as the report says. When the
stream of any instance of a driver ends, everything known of that driver is forgotten.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import grpc

from driver import values
from proto.dra_health.v1 import api_pb2 as health_v1
from proto.dra_health.v1 import api_pb2_grpc as health_v1_grpc
from proto.dra_health.v1alpha1 import api_pb2 as health_v1alpha1
from proto.dra_health.v1alpha1 import api_pb2_grpc as health_v1alpha1_grpc

DEFAULT_TIMEOUT_S = 30.0
RETRY_S = 5.0
SERVICES = ("v1.DRAResourceHealth", "v1alpha1.DRAResourceHealth")
"""In kubelet's order of preference."""

_STATUS: Mapping[int, values.HealthStatus] = {
    health_v1.UNKNOWN: values.HealthStatus.UNKNOWN,
    health_v1.HEALTHY: values.HealthStatus.HEALTHY,
    health_v1.UNHEALTHY: values.HealthStatus.UNHEALTHY,
}


_Report: TypeAlias = health_v1.NodeWatchResourcesResponse | health_v1alpha1.NodeWatchResourcesResponse


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceHealth:
    """Health of a device as pod status would show it."""

    status: values.HealthStatus
    message: str = ""


@dataclass(frozen=True, slots=True)
class _Entry:
    health: DeviceHealth
    until: float


class HealthBook:
    """Everything heard, by driver. Thread-safe."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._changed = threading.Condition()
        self._drivers: dict[str, dict[tuple[str, str], _Entry]] = {}
        self._reports: dict[str, int] = {}

    def update(self, driver: str, report: _Report) -> None:
        """Take one message in."""
        now = self._clock()
        entries = {
            (device.device.pool_name, device.device.device_name): _Entry(
                DeviceHealth(status=_STATUS.get(device.health, values.HealthStatus.UNKNOWN), message=device.message),
                now
                + (
                    device.health_check_timeout_seconds
                    if device.health_check_timeout_seconds > 0
                    else DEFAULT_TIMEOUT_S
                ),
            )
            for device in report.devices
        }
        with self._changed:
            self._drivers.setdefault(driver, {}).update(entries)
            self._reports[driver] = self._reports.get(driver, 0) + 1
            self._changed.notify_all()

    def clear(self, driver: str) -> None:
        """Forget a driver: the stream of one of its instances has ended."""
        with self._changed:
            self._drivers.pop(driver, None)
            self._changed.notify_all()

    def reports(self, driver: str) -> int:
        """How many messages came so far."""
        with self._changed:
            return self._reports.get(driver, 0)

    def devices(self, driver: str) -> Mapping[tuple[str, str], DeviceHealth]:
        """By pool and device name; what was not heard of in time is UNKNOWN, what was forgotten is absent."""
        with self._changed:
            return self._devices(driver)

    def wait_for(
        self,
        driver: str,
        condition: Callable[[Mapping[tuple[str, str], DeviceHealth]], bool],
        *,
        timeout_s: float,
    ) -> bool:
        """Wait until the devices of a driver meet a condition; whether they did in time."""
        with self._changed:
            return self._changed.wait_for(lambda: condition(self._devices(driver)), timeout_s)

    def _devices(self, driver: str) -> Mapping[tuple[str, str], DeviceHealth]:
        now = self._clock()
        stale = DeviceHealth(status=values.HealthStatus.UNKNOWN)
        return {
            key: entry.health if now <= entry.until else stale for key, entry in self._drivers.get(driver, {}).items()
        }


class _Stream(Protocol):
    """The call of either version."""

    def __iter__(self) -> Iterator[_Report]: ...

    def cancel(self) -> object: ...


class HealthListener:
    """One instance's stream: opened again 5 s after it ended, given up when the plugin says UNIMPLEMENTED."""

    def __init__(
        self, channel: grpc.Channel, *, driver: str, service: str, book: HealthBook, retry_s: float = RETRY_S
    ) -> None:
        self._channel = channel
        self._driver = driver
        self._service = service
        self._book = book
        self._retry_s = retry_s
        self._stopped = threading.Event()
        self._call: _Stream | None = None
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="kubelet-health", daemon=True)

    def start(self) -> None:
        """Listen until `stop`."""
        self._thread.start()

    def stop(self) -> None:
        """End the stream."""
        with self._lock:
            self._stopped.set()
            if self._call is not None:
                self._call.cancel()

    def join(self) -> None:
        """Wait for the end of the stream, after `stop`."""
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        while not self._stopped.is_set():
            code = self._listen()
            self._book.clear(self._driver)
            if code is grpc.StatusCode.UNIMPLEMENTED:
                return
            self._stopped.wait(self._retry_s)

    def _listen(self) -> grpc.StatusCode | None:
        """Take in reports until the stream ends; how it ended, None where nobody said."""
        with self._lock:
            if self._stopped.is_set():
                return None
            stream = self._open()
            self._call = stream
        try:
            for report in stream:
                self._book.update(self._driver, report)
        except grpc.RpcError as error:
            return error.code()
        return None

    def _open(self) -> _Stream:
        if self._service == SERVICES[0]:
            return health_v1_grpc.DRAResourceHealthStub(self._channel).NodeWatchResources(
                health_v1.NodeWatchResourcesRequest()
            )
        return health_v1alpha1_grpc.DRAResourceHealthStub(self._channel).NodeWatchResources(
            health_v1alpha1.NodeWatchResourcesRequest()
        )
