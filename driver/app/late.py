# SPDX-License-Identifier: Apache-2.0
"""What kubelet is served with before it is there.

The client of the API server and the publisher come after the sockets. Until then a claim cannot be read, which is said as
what it is, unavailable for now, and a Prepare waits for it; and no device is published, so none has a health.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, Protocol

from driver import values
from driver.errors import ApiError, ApiReason

if TYPE_CHECKING:
    from driver.prepare import joining

_SOON_S = 10.0


class Reader(Protocol):
    """Who reads objects once it is there."""

    def get_claim(self, namespace: str, name: str, *, timeout_s: float) -> Any:
        """The ResourceClaim as JSON. Raises ApiError."""

    def get_node(self, name: str, *, timeout_s: float) -> Any:
        """The Node as JSON. Raises ApiError."""

    def watch_claim(self, namespace: str, name: str, *, timeout_s: float) -> joining.Watch:
        """The ResourceClaim, and its changes. Raises ApiError."""


class LateReader:
    """Hands calls on to `reader` as soon as one was set."""

    def __init__(self) -> None:
        self._reader: Reader | None = None
        self._there = threading.Event()

    def set(self, reader: Reader) -> None:
        """From now on there is one."""
        self._reader = reader
        self._there.set()

    def get_claim(self, namespace: str, name: str, *, timeout_s: float) -> Any:
        """The ResourceClaim as JSON. Raises ApiError, also when no client came within the time."""
        return self._wait(timeout_s).get_claim(namespace, name, timeout_s=timeout_s)

    def get_node(self, name: str, *, timeout_s: float) -> Any:
        """The Node as JSON. Raises ApiError, also when no client came within the time."""
        return self._wait(timeout_s).get_node(name, timeout_s=timeout_s)

    def watch_claim(self, namespace: str, name: str, *, timeout_s: float) -> joining.Watch:
        """The ResourceClaim, and its changes. Raises ApiError, also when no client comes soon."""
        return self._wait(min(timeout_s, _SOON_S)).watch_claim(namespace, name, timeout_s=timeout_s)

    def _wait(self, timeout_s: float) -> Reader:
        if not self._there.wait(timeout_s) or self._reader is None:
            raise ApiError(
                "The client of the API server is still being set up: are kubeconfig and service account in order?",
                reason=ApiReason.UNAVAILABLE,
            )
        return self._reader


class HealthSource(Protocol):
    """Who knows how the devices are once it is there."""

    def devices(self) -> tuple[values.DeviceHealth, ...]:
        """The health of every published device, now."""

    def wait(self, seen: int, timeout_s: float) -> int:
        """Wait until the count of changes differs from `seen`, or the time is over; the present count is the answer."""


class LateHealth:
    """Hands calls on to `source` as soon as one was set; its coming is a change."""

    def __init__(self) -> None:
        self._source: HealthSource | None = None
        self._there = threading.Event()

    def set(self, source: HealthSource) -> None:
        """From now on there is one."""
        self._source = source
        self._there.set()

    def devices(self) -> tuple[values.DeviceHealth, ...]:
        """The health of every published device, now."""
        return () if self._source is None else self._source.devices()

    def wait(self, seen: int, timeout_s: float) -> int:
        """As HealthSource; before there is one the count is -1."""
        if self._source is None and not self._there.wait(timeout_s):
            return -1
        assert self._source is not None
        return self._source.wait(seen, timeout_s)
