# SPDX-License-Identifier: Apache-2.0
"""Watches of the stand-in API server: events from a revision on, bookmarks, 410 as an event, an end in time.

As the watch cache does it (apiserver's pkg/storage/cacher): errors after the first byte come as an event of type ERROR;
an object that enters or leaves the selection is ADDED or DELETED; bookmarks come about every minute and shortly before
the end.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from driver.standin import apiserver_faults as faults
from driver.standin import apiserver_http as http
from driver.standin import apiserver_resources as resources
from driver.standin import apiserver_status as status
from driver.standin import apiserver_store as store

_TICK_S = 0.5
"""How long a watch may take to notice that its client or the server has gone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchOrder:
    """What a client asked for. `revision`: None for the present state first."""

    resource: resources.Resource
    matches: Callable[[str, dict[str, Any]], bool]
    """Key and body of an object -> whether it is selected."""
    revision: int | None
    bookmarks: bool
    initial_events: bool
    """sendInitialEvents: the present state, then a bookmark that says that it is complete."""
    timeout_s: float
    bookmark_interval_s: float


class Watch:
    """One watch, served on the thread of its connection."""

    def __init__(
        self, order: WatchOrder, objects: store.Store, ordered: faults.Faults, running: Callable[[], bool]
    ) -> None:
        self._order = order
        self._store = objects
        self._faults = ordered
        self._running = running

    def serve(self, channel: http.Channel) -> None:
        """Stream until the time is over, the client goes, the server stops, or the revision is gone."""
        order = self._order
        ends = time.monotonic() + order.timeout_s
        next_bookmark = time.monotonic() + order.bookmark_interval_s
        channel.start_stream()
        revision = order.revision
        if revision is None or order.initial_events:
            revision = self._send_state(channel)
        elif revision > self._store.revision:
            self._send_error(channel, status.too_large_version(revision, self._store.revision))
            return
        while self._running() and (left := ends - time.monotonic()) > 0:
            try:
                present, events = self._store.events_after(
                    order.resource.plural, revision, timeout_s=min(left, _TICK_S)
                )
            except status.StatusError as error:
                self._send_error(channel, error)
                return
            if self._faults.silent_watches:
                continue
            for event in events:
                self._send_event(channel, event)
            revision = present
            if channel.client_gone():
                raise http.Hangup
            now = time.monotonic()
            if order.bookmarks and now >= min(next_bookmark, ends - _TICK_S):
                next_bookmark = now + order.bookmark_interval_s
                self._send_bookmark(channel, revision, {})
        if not self._running():
            raise http.Hangup
        channel.end_stream()

    def _send_state(self, channel: http.Channel) -> int:
        revision, items = self._store.items(self._order.resource.plural)
        for key, stored in items:
            if self._order.matches(key, stored.body):
                self._send(channel, "ADDED", stored)
        if self._order.initial_events:
            self._send_bookmark(channel, revision, {"k8s.io/initial-events-end": "true"})
        return revision

    def _send_event(self, channel: http.Channel, event: store.Event) -> None:
        key = resources.key_of(self._order.resource, event.after.body)
        now = event.type != "DELETED" and self._order.matches(key, event.after.body)
        before = event.before is not None and self._order.matches(key, event.before.body)
        if now:
            self._send(channel, "MODIFIED" if before else "ADDED", event.after)
        elif before:
            self._send(channel, "DELETED", event.after)

    def _send(self, channel: http.Channel, kind: str, stored: store.Stored) -> None:
        channel.send_chunk(b'{"type":"%b","object":%b}\n' % (kind.encode(), stored.encoded))

    def _send_bookmark(self, channel: http.Channel, revision: int, annotations: dict[str, str]) -> None:
        metadata: dict[str, Any] = {"resourceVersion": str(revision)}
        if annotations:
            metadata["annotations"] = annotations
        resource = self._order.resource
        body = {"kind": resource.kind, "apiVersion": resource.api_version, "metadata": metadata}
        channel.send_chunk(store.encode({"type": "BOOKMARK", "object": body}) + b"\n")

    def _send_error(self, channel: http.Channel, error: status.StatusError) -> None:
        channel.send_chunk(store.encode({"type": "ERROR", "object": error.body()}) + b"\n")
        channel.end_stream()
