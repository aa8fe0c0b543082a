# SPDX-License-Identifier: Apache-2.0
"""All ResourceSlices of this node as the server has them: one list, then a watch, then both again when something breaks.

Other drivers' slices are in it too, as they decide whether we may publish. Our own writes go in by their replies, before
the watch tells of them. The rules that keep late news from undoing newer ones, all by resource version (comparable as
numbers since Kubernetes 1.35, KEP-5504) and UID (never used twice):
- an object is replaced by a newer version only;
- what was deleted stays deleted, however late a reply or an event brings it up again;
- nothing that happened before the last list says anything new.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from driver import condition, errors
from driver.publish import pacing

logger = logging.getLogger(__name__)

LIST_TIMEOUT_S = 15.0
_DEAD_KEPT = 4096

Body = dict[str, Any]
"""A ResourceSlice as JSON."""


class SliceWatch(Protocol):
    """A running watch."""

    def __iter__(self) -> Iterator[tuple[str, Body]]:
        """Its events. Raises ApiError when it breaks."""

    def close(self) -> None:
        """End it, from any thread."""


class MirrorApi(Protocol):
    """What the mirror asks of the API server."""

    def list_slices(self, *, node_name: str, timeout_s: float) -> tuple[str, list[Body]]:
        """Resource version and slices of a node."""

    def watch_slices(self, *, node_name: str, resource_version: str, timeout_s: float, silence_s: float) -> SliceWatch:
        """Changes after a resource version."""


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """The slices of the node at one moment. `connection` grows with every list: what was learnt about the server's ways
    under another number has to be learnt again.
    """

    slices: tuple[Body, ...]
    connection: int


class Mirror:
    """Owns the thread that lists and watches. Everything else from any thread."""

    def __init__(
        self,
        api: MirrorApi,
        *,
        node_name: str,
        changed: Callable[[], None],
        timing: pacing.Timing,
    ) -> None:
        """`changed` is called after every change, without a lock held."""
        self._api = api
        self._node_name = node_name
        self._changed = changed
        self._timing = timing
        self._lock = threading.Lock()
        self._objects: dict[str, Body] = {}
        self._dead: OrderedDict[str, None] = OrderedDict()
        self._listed = 0
        self._news = 0
        self._news_of: dict[str, int] = {}
        self._connection = 0
        self._stopping = threading.Event()
        self._watch: SliceWatch | None = None
        self._trouble = condition.Condition(logger, recovered="The ResourceSlices of this node are watched again")
        self._thread = threading.Thread(target=self._run, name="slices", daemon=True)

    def start(self) -> None:
        """Begin to list and watch."""
        self._thread.start()

    def stop(self, *, timeout_s: float = 1.0) -> None:
        """End the watch; its connection is broken at once."""
        self._stopping.set()
        with self._lock:
            watch = self._watch
        if watch is not None:
            watch.close()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    @property
    def trouble(self) -> str | None:
        """What keeps the server from being watched now."""
        return self._trouble.text

    def view(self) -> View | None:
        """The slices as they are known, None before the first list."""
        with self._lock:
            if self._connection == 0:
                return None
            ordered = sorted(self._objects.values(), key=lambda body: str(_metadata(body).get("name")))
            return View(slices=tuple(ordered), connection=self._connection)

    def refresh(self) -> None:
        """List now, on this thread: what is known turned out to be out of date. Raises ApiError."""
        self._list(connected=False)
        self._changed()

    def wrote(self, body: Body) -> None:
        """The server answered a write of ours with this object."""
        with self._lock:
            self._put(body)

    def deleted(self, uid: str) -> None:
        """The server says that an object is gone."""
        with self._lock:
            self._bury(uid)

    def _run(self) -> None:
        backoff = pacing.Backoff(first_s=0.1, most_s=5.0)
        while not self._stopping.is_set():
            try:
                version = self._list(connected=True)
                self._trouble.passed()
                self._changed()
                self._follow(version, backoff)
            except errors.ApiError as error:
                if self._stopping.is_set():
                    return
                # A version that is too old is the course of things: list again, and the next watch begins from there.
                if error.reason is not errors.ApiReason.GONE:
                    self._trouble.failed(str(error))
            except Exception:
                # The loop is the last door: without it nobody would notice a deleted slice any more.
                logger.exception("The ResourceSlices of this node could not be watched")
            self._changed()
            self._stopping.wait(backoff.failed())

    def _follow(self, version: str, backoff: pacing.Backoff) -> None:
        """Watch from a version, one watch after the other, until one breaks."""
        while not self._stopping.is_set():
            watch = self._api.watch_slices(
                node_name=self._node_name,
                resource_version=version,
                timeout_s=self._timing.watch_s,
                silence_s=self._timing.silence_s,
            )
            with self._lock:
                self._watch = watch
            if self._stopping.is_set():
                watch.close()
            began = time.monotonic()
            with contextlib.closing(watch):
                for kind, body in watch:
                    backoff.passed()
                    version = str(_metadata(body).get("resourceVersion") or version)
                    if kind != "BOOKMARK" and self._hear(kind, body):
                        self._changed()
            if time.monotonic() - began < 1:
                # Something between us and the server ends every watch at once.
                self._stopping.wait(backoff.failed())

    def _hear(self, kind: str, body: Body) -> bool:
        """Take in an event; whether it changed anything."""
        with self._lock:
            if kind == "DELETED":
                return self._bury(_uid(body))
            return _version(body) > self._listed and self._put(body)

    def _put(self, body: Body) -> bool:
        uid = _uid(body)
        known = self._objects.get(uid)
        # An unknown object from before the last list is one that was gone when the list was made.
        newest = _version(known) if known is not None else self._listed
        if uid in self._dead or _version(body) <= newest:
            return False
        self._objects[uid] = body
        self._news += 1
        self._news_of[uid] = self._news
        return True

    def _bury(self, uid: str) -> bool:
        self._dead[uid] = None
        while len(self._dead) > _DEAD_KEPT:
            self._dead.popitem(last=False)
        return self._objects.pop(uid, None) is not None

    def _list(self, *, connected: bool) -> str:
        """Take the server's state for ours, except for what was heard or written while it was read. Raises ApiError."""
        with self._lock:
            before = self._news
        version, items = self._api.list_slices(node_name=self._node_name, timeout_s=LIST_TIMEOUT_S)
        with self._lock:
            self._connection += connected
            # Another thread may have listed later. But a server restored from a backup counts from a lower version than
            # before, and a new connection to it tells the truth.
            if connected or _number(version) >= self._listed:
                self._listed = _number(version)
                meanwhile = {
                    uid: self._objects[uid]
                    for uid, number in self._news_of.items()
                    if number > before and uid in self._objects and _version(self._objects[uid]) > self._listed
                }
                listed = {_uid(body): body for body in items if _metadata(body)}
                self._objects = {uid: body for uid, body in listed.items() if uid not in self._dead} | meanwhile
                self._news_of = {uid: self._news_of[uid] for uid in meanwhile}
        return version


def _metadata(body: Body) -> Body:
    metadata = body.get("metadata")
    return metadata if isinstance(metadata, dict) else {}


def _uid(body: Body) -> str:
    return str(_metadata(body).get("uid"))


def _version(body: Body) -> int:
    return _number(str(_metadata(body).get("resourceVersion")))


def _number(version: str) -> int:
    return int(version) if version.isascii() and version.isdecimal() else 0
