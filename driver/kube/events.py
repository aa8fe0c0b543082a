# SPDX-License-Identifier: Apache-2.0
"""Events on the objects where a person would look: the claim that could not be prepared, the Node that is not published.

Telling people must never cost the work: `claim`, `pod` and `node` only put into a bounded queue, one thread writes, and what
cannot be written is counted and forgotten. The same thing said again within ten minutes raises the count of its Event.
"""

from __future__ import annotations

import datetime as dt
import logging
import queue
import threading
import uuid
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from driver import condition, errors, values

logger = logging.getLogger(__name__)

QUEUE = 256
REMEMBERED = 512
SAME_FOR = dt.timedelta(minutes=10)
"""The same event after this is a new one, as in client-go's correlator."""

AT_MOST_EVERY = dt.timedelta(seconds=30)
"""How often the count of one Event is raised; what comes in between is added to the next."""

MAX_MESSAGE_BYTES = 1024
"""The API refuses longer ones."""

MAX_NAME = 253
TIMEOUT_S = 10.0
RETRIES = 3
RETRY_S = 5.0


class EventApi(Protocol):
    """What writes Events."""

    def create_event(self, namespace: str, body: Mapping[str, Any], *, timeout_s: float) -> Mapping[str, Any]:
        """Create one."""

    def patch_event(
        self, namespace: str, name: str, patch: Mapping[str, Any], *, timeout_s: float
    ) -> Mapping[str, Any]:
        """Change one."""


class EventObserver(Protocol):
    """Who counts Events."""

    def event(self, *, ok: bool) -> None:
        """One was written, or lost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _About:
    """One thing to say: which object, why, and in which words."""

    kind: str
    api_version: str
    namespace: str
    name: str
    uid: str
    reason: str
    message: str
    warning: bool

    @property
    def event_namespace(self) -> str:
        """Events of cluster-wide objects live in `default`."""
        return self.namespace or "default"


@dataclass(slots=True)
class _Written:
    """An Event that stands on the server."""

    name: str
    count: int
    last: dt.datetime


class EventRecorder:
    """Takes what is to be said from any thread, from its creation on; writes once `start` gave it an API."""

    def __init__(
        self,
        *,
        component: str,
        host: str,
        observer: EventObserver,
        clock: Callable[[], dt.datetime] = lambda: dt.datetime.now(dt.UTC),
        retry_s: float = RETRY_S,
    ) -> None:
        """`component`: the driver's name. `host`: the node's."""
        self._retry_s = retry_s
        self._component = component
        self._host = host
        self._observer = observer
        self._clock = clock
        self._queue: queue.Queue[_About | None] = queue.Queue(QUEUE)
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._written: OrderedDict[_About, _Written] = OrderedDict()
        self._trouble = condition.Condition(logger, recovered="Events can be written again")

    def start(self, api: EventApi) -> None:
        """Begin to write."""
        self._thread = threading.Thread(target=self._run, args=(api,), name="events", daemon=True)
        self._thread.start()

    def stop(self, *, timeout_s: float = 1.0) -> None:
        """Write what is queued if that is quick, and end."""
        try:
            self._queue.put_nowait(None)
        except queue.Full:
            self._stopping.set()
        if self._thread is not None:
            self._thread.join(timeout_s)
        self._stopping.set()

    def idle(self) -> bool:
        """Whether everything that was said is written or lost."""
        return self._queue.unfinished_tasks == 0

    def claim(self, claim: values.ClaimRef, *, reason: str, message: str, warning: bool = True) -> None:
        """Say something about a ResourceClaim."""
        self._put(
            _About(
                kind="ResourceClaim",
                api_version="resource.k8s.io/v1",
                namespace=claim.namespace,
                name=claim.name,
                uid=claim.uid,
                reason=reason,
                message=_cut(message),
                warning=warning,
            )
        )

    def pod(self, namespace: str, name: str, uid: str, *, reason: str, message: str, warning: bool = True) -> None:
        """Say something about a Pod."""
        self._put(
            _About(
                kind="Pod",
                api_version="v1",
                namespace=namespace,
                name=name,
                uid=uid,
                reason=reason,
                message=_cut(message),
                warning=warning,
            )
        )

    def node(self, *, reason: str, message: str, warning: bool = True) -> None:
        """Say something about this Node. Its name stands for its UID, as in kubelet's own Events."""
        self._put(
            _About(
                kind="Node",
                api_version="v1",
                namespace="",
                name=self._host,
                uid=self._host,
                reason=reason,
                message=_cut(message),
                warning=warning,
            )
        )

    def _put(self, about: _About) -> None:
        try:
            self._queue.put_nowait(about)
        except queue.Full:
            self._observer.event(ok=False)

    def _run(self, api: EventApi) -> None:
        while not self._stopping.is_set() and (about := self._queue.get()) is not None:
            try:
                ok = self._write(api, about)
            except Exception:
                # The loop is the last door: no Event is worth the recorder.
                logger.exception("An Event could not be written")
                ok = False
            if ok is not None:
                self._observer.event(ok=ok)
            self._queue.task_done()

    def _write(self, api: EventApi, about: _About) -> bool | None:
        """Whether it stands on the server now; None when it only adds to a later count."""
        now = self._clock()
        known = self._written.get(about)
        if known is not None and now - known.last < SAME_FOR:
            known.count += 1
            if now - known.last < AT_MOST_EVERY:
                return None
            known.last = now
            patch = {"count": known.count, "lastTimestamp": _spell(now)}
            try:
                api.patch_event(about.event_namespace, known.name, patch, timeout_s=TIMEOUT_S)
            except errors.ApiError as error:
                if error.reason is not errors.ApiReason.NOT_FOUND:
                    self._trouble.failed(str(error))
                    return False
                # Events expire after an hour: the next one of this kind begins anew.
            else:
                self._trouble.passed()
                return True
        return self._create(api, about, now)

    def _create(self, api: EventApi, about: _About, now: dt.datetime) -> bool:
        name = f"{about.name[: MAX_NAME - 17]}.{uuid.uuid4().hex[:16]}"
        body = self._body(about, name, now)
        for attempt in range(RETRIES):
            try:
                api.create_event(about.event_namespace, body, timeout_s=TIMEOUT_S)
            except errors.ApiError as error:
                self._trouble.failed(str(error))
                if not error.retryable or attempt == RETRIES - 1 or self._stopping.wait(self._retry_s):
                    return False
            else:
                self._trouble.passed()
                self._written[about] = _Written(name, 1, now)
                self._written.move_to_end(about)
                while len(self._written) > REMEMBERED:
                    self._written.popitem(last=False)
                return True
        return False

    def _body(self, about: _About, name: str, now: dt.datetime) -> dict[str, Any]:
        involved = {"apiVersion": about.api_version, "kind": about.kind, "name": about.name, "uid": about.uid}
        if about.namespace:
            involved["namespace"] = about.namespace
        return {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"name": name, "namespace": about.event_namespace},
            "involvedObject": involved,
            "reason": about.reason,
            "message": about.message,
            "type": "Warning" if about.warning else "Normal",
            "source": {"component": self._component, "host": self._host},
            "reportingComponent": self._component,
            "reportingInstance": self._host,
            "firstTimestamp": _spell(now),
            "lastTimestamp": _spell(now),
            "count": 1,
        }


def _spell(moment: dt.datetime) -> str:
    return moment.astimezone(dt.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _cut(message: str) -> str:
    """At most as many bytes as the API takes, cut between characters."""
    encoded = message.encode("utf-8", "replace")
    if len(encoded) <= MAX_MESSAGE_BYTES:
        return encoded.decode()
    return encoded[: MAX_MESSAGE_BYTES - 3].decode("utf-8", "ignore") + "..."
