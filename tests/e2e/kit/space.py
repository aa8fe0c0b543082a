# SPDX-License-Identifier: Apache-2.0
"""The namespace of one test, and what the test does in it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import urllib3

from hack.realnode import cluster as clusters
from hack.realnode.errors import ClusterError
from tests.e2e.kit import inside, make, waiting
from tests.e2e.kit.api import PATIENCE_S, Api, ApiError, Json, describe

T = TypeVar("T")

STEP_S = 5.0
ENDED = ("Succeeded", "Failed")
UNRELATED = "no relationship found between node"
"""Kubelet may not read a claim before the API server's node authorizer has seen in the pod's status that the pod uses it. On a
busy machine kubelet is sometimes the faster one; it then tries again after 60 to 90 s, or when the pod is changed, which we do.
"""

UNREGISTERED = f"DRA driver {make.CLASS} is not registered"
"""Kubelet that has just started may come to a pod before it has found the driver's socket again."""

TOO_FAST = (UNRELATED, UNREGISTERED)

OWN_KINDS = ("Pod", "ResourceClaim", "ResourceClaimTemplate")


class Space:
    """Everything in it is gone when the test is over."""

    def __init__(self, api: Api, cluster: clusters.Cluster, name: str) -> None:
        self.api = api
        self.cluster = cluster
        self.name = name
        self._looked_s: dict[str, float] = {}

    def open(self) -> None:
        """Make the namespace; pods can be made in it afterwards."""
        self.api.create(make.namespace(self.name))
        self.api.wait("ServiceAccount", "default", self.name, until=lambda _: True, what="there")

    def close(self) -> None:
        """Begin to delete what is in it; `left` waits until that is gone, and deletes the namespace."""
        for kind in OWN_KINDS:
            self.api.delete_all(kind, self.name)

    def label(self, labels: Mapping[str, str]) -> None:
        """Give the namespace labels."""
        self.api.patch("Namespace", self.name, {"metadata": {"labels": dict(labels)}})

    def create(self, *bodies: Json, dry_run: bool = False) -> Json:
        """Make objects here; the last one as the server stored it."""
        stored: Json = {}
        for body in bodies:
            here = {**body, "metadata": {**body["metadata"], "namespace": self.name}}
            stored = self.api.create(here, dry_run=dry_run)
        return stored

    def get(self, kind: str, name: str) -> Json:
        """An object here."""
        return self.api.get(kind, name, self.name)

    def delete(self, kind: str, name: str, *, force: bool = False, wait: bool = True) -> None:
        """Delete an object; `force`: a pod vanishes from the API at once, its containers end when kubelet sees it."""
        self.api.delete(kind, name, self.name, grace_s=0 if force else None)
        if wait:
            self.gone(kind, name)

    def gone(self, kind: str, name: str, *, timeout_s: float = PATIENCE_S) -> None:
        """Wait until there is no such object here."""
        self.api.wait_gone(kind, name, self.name, timeout_s=timeout_s)

    def running(self, pod: str, *, timeout_s: float = PATIENCE_S) -> Json:
        """The pod, once it runs with all its containers."""
        return self._phase(pod, _runs, "running", timeout_s)

    def succeeded(self, pod: str, *, timeout_s: float = PATIENCE_S) -> Json:
        """The pod, once it ended well."""
        return self._phase(pod, lambda item: item["status"]["phase"] == "Succeeded", "succeeded", timeout_s)

    def pending(self, pod: str, *, saying: str = "", timeout_s: float = PATIENCE_S) -> Json:
        """The pod, once the scheduler has said that it cannot be placed, with this in its message."""

        def unplaced(item: Json) -> bool:
            return any(
                condition["type"] == "PodScheduled"
                and condition["status"] == "False"
                and saying in condition.get("message", "")
                for condition in item["status"].get("conditions", [])
            )

        return self.api.wait(
            "Pod", pod, self.name, until=unplaced, what=f"refused by the scheduler with {saying!r}", timeout_s=timeout_s
        )

    def retry(self, pod: str) -> None:
        """Have kubelet try a pod again at once that failed to be prepared: it does so at any change of the object."""
        self.api.patch("Pod", pod, {"metadata": {"annotations": {"e2e/retry": str(time.monotonic())}}}, self.name)

    def until(
        self, look: Callable[[], T | None], what: str, *, pods: Sequence[str], timeout_s: float = waiting.USUAL_S
    ) -> T:
        """As `waiting.until`, for what comes of kubelet's work on some pods while they do not run yet."""

        def hurried() -> T | None:
            for pod in pods:
                self._hurry(pod)
            return look()

        return waiting.until(hurried, what, timeout_s=timeout_s)

    def claim_of(self, pod: str, claim: str) -> Json:
        """The claim behind a pod's name for it, be it made from a template or not."""
        item = self.get("Pod", pod)
        for status in item["status"].get("resourceClaimStatuses", []):
            if status["name"] == claim:
                return self.get("ResourceClaim", status["resourceClaimName"])
        (named,) = (entry for entry in item["spec"]["resourceClaims"] if entry["name"] == claim)
        return self.get("ResourceClaim", named["resourceClaimName"])

    def devices(self, pod: str, claim: str = "gpu", *, request: str | None = None) -> tuple[str, ...]:
        """The devices that the scheduler gave to a claim of a pod, in its order; of one request of it, or of all."""
        return allocated(self.claim_of(pod, claim), request=request)

    def logs(self, pod: str, container: str = "main") -> str:
        """What a container wrote."""
        return self.cluster.kubectl("logs", "-n", self.name, pod, "-c", container)

    def exec(self, pod: str, *command: str, container: str = "main") -> str:
        """What a program in a running container writes."""
        return self.cluster.kubectl("exec", "-n", self.name, pod, "-c", container, "--", *command)

    def look(self, pod: str, container: str = "main") -> inside.View:
        """What a running container sees of its GPUs."""
        return inside.parse(self.exec(pod, "sh", "-c", inside.SCRIPT, container=container))

    def looked(self, pod: str, container: str = "main") -> inside.View:
        """What a container saw that ran `inside.SCRIPT` itself."""
        return inside.parse(self.logs(pod, container))

    def _phase(self, pod: str, done: Callable[[Json], object], what: str, timeout_s: float) -> Json:
        """Fails at once when the pod has come to another end. The API server may be away meanwhile."""
        deadline = time.monotonic() + timeout_s
        while True:
            left = max(deadline - time.monotonic(), 0.1)
            try:
                item = self.api.wait(
                    *("Pod", pod, self.name),
                    until=lambda item: done(item) or item["status"].get("phase") in ENDED,
                    what=what,
                    timeout_s=min(STEP_S, left),
                )
            except AssertionError as error:
                if left <= STEP_S:
                    raise AssertionError(f"{error} ({timeout_s:g} s in all); {self._story(pod)}") from None
                self._retry_too_fast(pod)
            else:
                if done(item):
                    return item
                raise AssertionError(f"Pod {pod}: not {what} but {describe(item)}; {self._story(pod)}")

    def _hurry(self, pod: str) -> None:
        """Every few seconds, beginning after as long: have kubelet try a pod again that it was too fast for."""
        now = time.monotonic()
        if now - self._looked_s.setdefault(pod, now) >= STEP_S:
            self._looked_s[pod] = now
            self._retry_too_fast(pod)

    def _retry_too_fast(self, pod: str) -> None:
        """The API server may be away meanwhile."""
        with contextlib.suppress(ApiError, urllib3.exceptions.HTTPError):
            if any(reason in line for line in self.told(pod) for reason in TOO_FAST):
                self.retry(pod)

    def _story(self, pod: str) -> str:
        """Events and logs of a pod that is not as it should be."""
        try:
            logs = self.cluster.kubectl("logs", "-n", self.name, pod, "--all-containers", "--tail=20")
            return f"its Events: {self.told(pod) or 'none'}; its logs: {logs or 'none'}"
        except (ClusterError, ApiError, urllib3.exceptions.HTTPError) as error:
            return f"its Events and logs could not be had: {error}"

    def told(self, pod: str) -> list[str]:
        """Reason and message of the Events of a pod."""
        return [f"{event.get('reason')}: {event.get('message')}" for event in self.api.events("Pod", pod, self.name)]


def allocated(claim: Json, *, request: str | None = None) -> tuple[str, ...]:
    """The devices of a claim as allocated. `request`: as in the result, with the subrequest where there is one."""
    results = claim["status"]["allocation"]["devices"]["results"]
    return tuple(result["device"] for result in results if request in (None, result["request"]))


def _runs(pod: Json) -> bool:
    statuses = pod["status"].get("containerStatuses", [])
    return pod["status"].get("phase") == "Running" and all("running" in status["state"] for status in statuses)
