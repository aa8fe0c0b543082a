# SPDX-License-Identifier: Apache-2.0
"""The stand-in's etcd: objects, one revision counter for all of them, and a bounded history for watches.

What is stored is never changed in place: a write replaces the whole object and puts an event into the history. Every
method is safe from any thread.
"""

from __future__ import annotations

import itertools
import json
import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from driver.standin import apiserver_status as status

HISTORY = 10_000
"""Events kept for watches of one resource."""


@dataclass(frozen=True, slots=True)
class Stored:
    """An object at one revision, with the bytes that a GET answers."""

    body: dict[str, Any]
    encoded: bytes


@dataclass(frozen=True, slots=True)
class Event:
    """A change. `before` is None for ADDED; `after` of DELETED is the last state at the revision of the deletion."""

    revision: int
    type: str
    after: Stored
    before: Stored | None


@dataclass(slots=True)
class _Table:
    objects: dict[str, Stored]
    history: deque[Event]
    compacted: int = 0
    """Watches from a revision below this cannot be served any more."""
    writes: int = 0


def encode(body: Mapping[str, Any]) -> bytes:
    """JSON as the API server spells it: no spaces."""
    return json.dumps(body, separators=(",", ":")).encode()


class Store:
    """Tables of objects by resource; keys are `namespace/name`, or `name` where there are no namespaces."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._tables: dict[str, _Table] = {}
        self._revision = 1
        self._woken = 0

    @property
    def revision(self) -> int:
        """The newest revision of all."""
        with self._changed:
            return self._revision

    def get(self, resource: str, key: str) -> Stored | None:
        """The object, or None."""
        # Reads of one dictionary are atomic; the hot GET takes no lock.
        table = self._tables.get(resource)
        return table.objects.get(key) if table is not None else None

    def items(self, resource: str) -> tuple[int, list[tuple[str, Stored]]]:
        """The present revision and all objects in order of key, as etcd walks them."""
        with self._changed:
            return self._revision, sorted(self._table(resource).objects.items())

    def writes(self, resource: str) -> int:
        """How many changes of this resource were stored."""
        with self._changed:
            return self._table(resource).writes

    def transact(
        self, resource: str, key: str, change: Callable[[Stored | None], dict[str, Any] | None]
    ) -> Stored | None:
        """Replace one object by what `change` makes of it, as one step; None deletes. Errors of `change` leave it as is.

        An object equal to the stored one is no change: no revision, no event, as in the real server.
        """
        with self._changed:
            table = self._table(resource)
            before = table.objects.get(key)
            body = change(before)
            if body is None and before is None:
                return None
            if body is not None and before is not None and body == before.body:
                return before
            revision = self._revision + 1
            after = self._at(body if body is not None else before.body, revision)  # type: ignore[union-attr]
            kind = "DELETED" if body is None else "ADDED" if before is None else "MODIFIED"
            self._revision = revision
            if body is None:
                del table.objects[key]
            else:
                table.objects[key] = after
            if len(table.history) == HISTORY:
                table.compacted = table.history[0].revision
            table.history.append(Event(revision, kind, after, before))
            table.writes += 1
            self._changed.notify_all()
            return after

    def events_after(self, resource: str, revision: int, *, timeout_s: float) -> tuple[int, list[Event]]:
        """The present revision and the events newer than the given one; waits for the first, the end of the time, or
        `wake`. Raises the 410 of a compacted revision.
        """
        with self._changed:
            table = self._table(resource)
            woken = self._woken

            def ready() -> bool:
                last = table.history[-1].revision if table.history else 0
                return last > revision or table.compacted > revision or self._woken != woken

            self._changed.wait_for(ready, timeout_s)
            if revision < table.compacted:
                raise status.expired(f"too old resource version: {revision} ({table.compacted})")
            newer = list(itertools.takewhile(lambda event: event.revision > revision, reversed(table.history)))
            return self._revision, newer[::-1]

    def compact(self, resource: str) -> None:
        """Forget the history, as etcd does every five minutes: watches from before get 410. Counts as a revision, so
        that a watch from the newest one gets it too.
        """
        with self._changed:
            self._revision += 1
            table = self._table(resource)
            table.history.clear()
            table.compacted = self._revision
            self._changed.notify_all()

    def wake(self) -> None:
        """Let every waiting watch look around."""
        with self._changed:
            self._woken += 1
            self._changed.notify_all()

    def _table(self, resource: str) -> _Table:
        return self._tables.setdefault(resource, _Table({}, deque(maxlen=HISTORY)))

    def _at(self, body: dict[str, Any], revision: int) -> Stored:
        metadata = {**body["metadata"], "resourceVersion": str(revision)}
        stamped = {**body, "metadata": metadata}
        return Stored(stamped, encode(stamped))
