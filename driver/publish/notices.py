# SPDX-License-Identifier: Apache-2.0
"""What publishing tells people: Findings of this node's pool, and Events on the Node, each once for the same words."""

from __future__ import annotations

from typing import Protocol

from discovery import model


class NodeEvents(Protocol):
    """Who tells people by Events on the Node."""

    def node(self, *, reason: str, message: str, warning: bool = True) -> None:
        """Say something about this Node."""


class Notices:
    """One pool's. One thread."""

    def __init__(self, events: NodeEvents, *, driver_name: str) -> None:
        self._events = events
        self._driver_name = driver_name
        self._told: dict[str, str] = {}

    def finding(self, code: str, message: str, *, severity: model.Severity = model.Severity.WARNING) -> model.Finding:
        """Something about the pool."""
        return model.Finding(code=code, severity=severity, subject=self._driver_name, message=message)

    def tell(self, reason: str, message: str) -> None:
        """An Event on the Node, unless the last one for this reason said the same."""
        if self._told.get(reason) != message:
            self._told[reason] = message
            self._events.node(reason=reason, message=message)

    def over(self, reason: str) -> None:
        """It is not so any more: the same words would be news again."""
        self._told.pop(reason, None)
