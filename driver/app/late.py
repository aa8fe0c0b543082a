# SPDX-License-Identifier: Apache-2.0
"""The API server's client before it is there.

Loading credentials takes longer than serving kubelet may wait, so the client comes late. Until then a claim cannot be read;
it is said as what it is, unavailable for now, and a Prepare waits for it.
"""

from __future__ import annotations

import threading
from typing import Any, Protocol

from driver.errors import ApiError, ApiReason


class ClaimReader(Protocol):
    """Who reads claims once it is there."""

    def get_claim(self, namespace: str, name: str, *, timeout_s: float) -> Any:
        """The ResourceClaim as JSON. Raises ApiError."""


class LateClaimReader:
    """Hands calls on to `reader` as soon as one was set."""

    def __init__(self) -> None:
        self._reader: ClaimReader | None = None
        self._there = threading.Event()

    def set(self, reader: ClaimReader) -> None:
        """From now on there is one."""
        self._reader = reader
        self._there.set()

    def get_claim(self, namespace: str, name: str, *, timeout_s: float) -> Any:
        """The ResourceClaim as JSON. Raises ApiError, also when no client came within the time."""
        if not self._there.wait(timeout_s) or self._reader is None:
            raise ApiError(
                "The client of the API server is still being set up: are kubeconfig and service account in order?",
                reason=ApiReason.UNAVAILABLE,
            )
        return self._reader.get_claim(namespace, name, timeout_s=timeout_s)
