# SPDX-License-Identifier: Apache-2.0
"""What publishing has to know of the Node object: its UID, as the owner of the slices, and what device plugins offer on it.

It is read when the agent starts, before slices are created, and then again: after 15 s, 30 s, 60 s, at last every five
minutes, or every minute while a device plugin keeps us from publishing. A watch would cost a connection a node; but what is
installed together with us comes up within the first minutes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from driver import errors

READ_FIRST_S = 15.0
READ_EVERY_S = 300.0
READ_AGAIN_S = 60.0
"""After a reading that failed, while the last one still serves; and at the latest while it keeps us from publishing."""

TIMEOUT_S = 10.0


class NodeApi(Protocol):
    """Where Nodes are read."""

    def get_node(self, name: str, *, timeout_s: float) -> Mapping[str, Any]:
        """The Node. Raises ApiError."""


class NodeFacts:
    """The Node as it was last read. One thread."""

    def __init__(self, api: NodeApi, *, name: str, clock: Callable[[], float]) -> None:
        self._api = api
        self._name = name
        self._clock = clock
        self._body: Mapping[str, Any] | None = None
        self._due = 0.0
        self._pause_s = READ_FIRST_S

    def look(self) -> Mapping[str, Any]:
        """The Node, not older than five minutes unless the server is away. Raises ApiError."""
        if self._body is not None and self._clock() < self._due:
            return self._body
        try:
            return self.read()
        except errors.ApiError as error:
            if self._body is None or not error.retryable:
                raise
            self._due = self._clock() + READ_AGAIN_S
            return self._body

    def read(self) -> Mapping[str, Any]:
        """The Node as it is now. Raises ApiError."""
        try:
            body = self._api.get_node(self._name, timeout_s=TIMEOUT_S)
        except errors.ApiError as error:
            if error.reason is not errors.ApiReason.NOT_FOUND:
                raise
            self._body = None
            raise errors.ApiError(
                f"{error}; kubelet registers the Node, and --node-name must be its name",
                reason=errors.ApiReason.UNAVAILABLE,
                status=error.status,
            ) from error
        if _uid(body) is None:
            # Something between us and the server spoke for it; what it said must not last five minutes.
            raise errors.ApiError(
                f"What was answered for Node {self._name} has no UID", reason=errors.ApiReason.UNAVAILABLE
            )
        self._body = body
        self._due = self._clock() + self._pause_s
        self._pause_s = min(self._pause_s * 2, READ_EVERY_S)
        return body

    def hurry(self) -> None:
        """What it says keeps us from publishing: read it again within a minute."""
        self._due = min(self._due, self._clock() + READ_AGAIN_S)
        self._pause_s = min(self._pause_s, READ_AGAIN_S)

    def uid(self) -> str:
        """Its UID. Raises ApiError."""
        uid = _uid(self.look())
        assert uid is not None
        return uid

    def due_s(self) -> float:
        """In how many seconds it should be read again."""
        return max(0.0, self._due - self._clock())


def _uid(body: Mapping[str, Any]) -> str | None:
    metadata = body.get("metadata")
    uid = metadata.get("uid") if isinstance(metadata, Mapping) else None
    return uid if isinstance(uid, str) and uid else None
