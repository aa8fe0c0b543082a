# SPDX-License-Identifier: Apache-2.0
"""Pods that join a claim after it was prepared get its limits, too.

Kubelet has a claim prepared once a node, however many pods use it. The limit of a cgroup share belongs to the pod for which it was
prepared, so each such claim is watched by its name: a pod that status.reservedFor names and the row does not is added to the row,
and its cgroup gets the limit as soon as kubelet has made it, before a container of it runs. Each of the pods may then use as
much as the share has, so together they may exceed it, which is said on pod and claim.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from driver import condition, context, values
from driver.errors import ApiError, RecordError

logger = logging.getLogger(__name__)

WATCH_S = 600.0
PAUSES_S = (1.0, 2.0, 5.0, 15.0, 30.0)
LOOK_S = 0.05
"""How often the cgroup of a pod that has just joined is looked for: kubelet makes it some hundred milliseconds before the first
container runs.
"""

LOOK_LATER_S = 1.0
EXPECTED_S = 120.0
"""How long a pod is looked for often: one whose volumes or images take longer is looked for every second."""

_CONSUMERS_MAX = 256
"""ResourceClaimReservedForMaxSize of resource.k8s.io/v1."""

_SHOWN_MAX = 253


class Watch(Protocol):
    """A watch under way. Iterating raises ApiError."""

    def __iter__(self) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """(type, object)."""

    def close(self) -> None:
        """End it, from any thread."""


class Api(Protocol):
    """Who watches; driver.kube.client.KubeClient does. Raises ApiError."""

    def watch_claim(self, namespace: str, name: str, *, timeout_s: float) -> Watch:
        """The claim as it is now, and every change of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pod:
    """A pod that a claim is reserved for; it is in the claim's namespace."""

    name: str
    uid: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Consumers:
    """Whom a claim is reserved for: pods, and others, in words (a PodGroup, whose pods the claim does not name)."""

    pods: tuple[Pod, ...] = ()
    others: tuple[str, ...] = ()


def consumers(claim: Any, *, uid: str) -> Consumers | None:
    """Whom a claim of this UID is reserved for; None where it is another claim, or cannot be read."""
    metadata = claim.get("metadata") if isinstance(claim, Mapping) else None
    if not isinstance(metadata, Mapping) or metadata.get("uid") != uid:
        return None
    status = claim.get("status")
    reserved = status.get("reservedFor") if isinstance(status, Mapping) else None
    pods: list[Pod] = []
    others: list[str] = []
    for consumer in reserved[:_CONSUMERS_MAX] if isinstance(reserved, list) else ():
        if not isinstance(consumer, Mapping):
            continue
        name, found, kind = (str(consumer.get(key) or "")[:_SHOWN_MAX] for key in ("name", "uid", "resource"))
        if kind == "pods" and not consumer.get("apiGroup"):
            if found:
                pods.append(Pod(name=name, uid=found))
        elif kind:
            others.append(f"{kind} {name}")
    return Consumers(pods=tuple(pods), others=tuple(others))


class Joins(Protocol):
    """What is done about pods that join. Called from threads of its own."""

    def has(self, claim: values.ClaimRef, pod: Pod) -> bool:
        """Whether a pod has the limits of a claim by the row, or the claim is not prepared any more. May raise RecordError."""

    def there(self, pod: Pod) -> bool:
        """Whether a pod has its cgroup."""

    def join(self, claim: values.ClaimRef, pod: Pod) -> bool:
        """Give a pod that has its cgroup the limits of a claim; whether there is nothing more to do. Never raises."""

    def others(self, claim: values.ClaimRef, consumers: tuple[str, ...]) -> None:
        """Whom but pods a claim is reserved for; nobody any more, too. Never raises."""


class Joining:
    """Watches claims. `follow` from one thread, `run` in another, `findings` from any."""

    def __init__(
        self,
        api: Api,
        joins: Joins,
        *,
        stop: threading.Event,
        look_s: float = LOOK_S,
        pauses_s: tuple[float, ...] = PAUSES_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._api = api
        self._joins = joins
        self._stop = stop
        self._look_s = look_s
        self._pauses_s = pauses_s
        self._clock = clock
        self._changed = threading.Condition()
        self._watched: dict[str, _Watched] = {}
        self._expected: dict[tuple[str, str], _Expected] = {}
        self._trouble = condition.Condition(logger, recovered="Claims are watched again")

    def follow(self, claims: Mapping[str, values.ClaimRef]) -> None:
        """Watch these claims, by UID, and no others."""
        with self._changed:
            gone = [self._watched.pop(uid) for uid in self._watched.keys() - claims.keys()]
            new = [claims[uid] for uid in sorted(claims.keys() - self._watched.keys())]
            started = [_Watched(claim) for claim in new]
            self._watched.update({watched.claim.uid: watched for watched in started})
            self._expected = {key: each for key, each in self._expected.items() if key[0] in claims}
        for watched in gone:
            watched.end()
        for watched in started:
            threading.Thread(target=self._watch, args=(watched,), name="claim-watch", daemon=True).start()

    @property
    def problem(self) -> str | None:
        """Why claims cannot be watched now."""
        return self._trouble.text if self._watched else None

    def run(self) -> None:
        """Look for the cgroups of pods that joined, until told to stop."""
        while not self._stop.is_set():
            with self._changed:
                self._changed.wait_for(lambda: self._expected or self._stop.is_set())
                expected = dict(self._expected)
            now = self._clock()
            for key, each in expected.items():
                if now >= each.next_s and self._joined(each, now):
                    with self._changed:
                        self._expected.pop(key, None)
            late = all(each.next_s > now for each in expected.values())
            self._stop.wait(LOOK_LATER_S if late else self._look_s)

    def wake(self) -> None:
        """Have `run` see that it is to stop."""
        with self._changed:
            self._changed.notify_all()
            watched = tuple(self._watched.values())
        if self._stop.is_set():
            for each in watched:
                each.end()

    def _joined(self, each: _Expected, now: float) -> bool:
        with context.bound(claim=str(each.claim)):
            try:
                done = self._joins.there(each.pod) and self._joins.join(each.claim, each.pod)
            except Exception:
                logger.exception("Pod %s could not get the limits of the claim", each.pod.name)
                done = False
        if not done and now - each.since_s > EXPECTED_S:
            each.next_s = now + LOOK_LATER_S
        return done

    def _watch(self, watched: _Watched) -> None:
        failures = 0
        while not (self._stop.is_set() or watched.over.is_set()):
            began_s = self._clock()
            try:
                watch = self._api.watch_claim(watched.claim.namespace, watched.claim.name, timeout_s=WATCH_S)
                if not watched.begun(watch):
                    return
                with contextlib.closing(watch):
                    for kind, body in watch:
                        failures = 0
                        self._trouble.passed()
                        if kind in ("ADDED", "MODIFIED"):
                            self._heard(watched, body)
            except (ApiError, RecordError) as error:
                if watched.over.is_set():
                    return
                self._trouble.failed(f"Pods that join prepared claims are not seen: {error}")
            except Exception:
                logger.exception("%s could not be watched", watched.claim)
            else:
                if self._clock() - began_s >= self._pauses_s[0]:
                    continue
            watched.over.wait(self._pauses_s[min(failures, len(self._pauses_s) - 1)])
            failures += 1

    def _heard(self, watched: _Watched, body: Mapping[str, Any]) -> None:
        """Expect the cgroups of pods that are new, and no longer those of pods that have gone. One that the row has, and that could
        not be limited yet, is expected still.
        """
        claim = watched.claim
        found = consumers(body, uid=claim.uid)
        if found is None:
            return
        if found.others != watched.others:
            watched.others = found.others
            self._joins.others(claim, found.others)
        named = frozenset(pod.uid for pod in found.pods)
        new = {pod.uid: pod for pod in found.pods if not self._joins.has(claim, pod)}
        with self._changed:
            if claim.uid not in self._watched:
                return
            for key in [key for key in self._expected if key[0] == claim.uid and key[1] not in named]:
                del self._expected[key]
            for uid, pod in new.items():
                self._expected.setdefault((claim.uid, uid), _Expected(claim, pod, self._clock()))
            self._changed.notify_all()


class _Watched:
    """A claim that is watched in a thread."""

    def __init__(self, claim: values.ClaimRef) -> None:
        self.claim = claim
        self.others: tuple[str, ...] = ()
        self.over = threading.Event()
        self._lock = threading.Lock()
        self._watch: Watch | None = None

    def begun(self, watch: Watch) -> bool:
        """It is this watch now; False, and it is closed, where that is not wanted any more."""
        with self._lock:
            self._watch = watch
            if not self.over.is_set():
                return True
        watch.close()
        return False

    def end(self) -> None:
        with self._lock:
            self.over.set()
            watch = self._watch
        if watch is not None:
            watch.close()


@dataclass(slots=True)
class _Expected:
    """A pod whose cgroup is looked for."""

    claim: values.ClaimRef
    pod: Pod
    since_s: float
    next_s: float = float("-inf")
