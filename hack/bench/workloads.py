# SPDX-License-Identifier: Apache-2.0
"""The pods of a run on a real node."""

from __future__ import annotations

import contextlib
import time
import urllib.parse
from collections.abc import Sequence
from typing import Any

from hack.bench import apiserver, claims
from hack.bench import bench as benchmark
from hack.bench.errors import BenchError
from hack.realnode import components

ACCOUNT = "bench"
"""The service account of drivers and pods."""

CLASS_PREFIX = "bench"
TIMEOUT_S = 120.0
POLL_S = 0.1
SLOW_S = 8.0
"""After which a pod that is not Running is asked what it waits for."""

UNHEARD = "no relationship found between node"
"""From the message of the authorizer of nodes."""


def pods_path() -> str:
    """Where pods are created."""
    return f"/api/v1/namespaces/{claims.NAMESPACE}/pods"


def class_name(subject: str) -> str:
    """The DeviceClass, and the ResourceClaimTemplate, of a driver's devices."""
    return f"{CLASS_PREFIX}-{subject}"


def pod(name: str, *, node: str | None, template: str | None, scheduler: str = "default-scheduler") -> dict[str, Any]:
    """A pod that runs until it is told to end, with a claim from a template unless that is None."""
    container: dict[str, Any] = {
        "name": "main",
        "image": components.PAUSE_IMAGE,
        "command": ["/pause"],
        "imagePullPolicy": "IfNotPresent",
    }
    spec: dict[str, Any] = {
        "serviceAccountName": ACCOUNT,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "schedulerName": scheduler,
        "terminationGracePeriodSeconds": 5,
        "containers": [container],
    }
    if node is not None:
        spec["nodeSelector"] = {"kubernetes.io/hostname": node}
    if template is not None:
        container["resources"] = {"claims": [{"name": claims.REQUEST}]}
        spec["resourceClaims"] = [{"name": claims.REQUEST, "resourceClaimTemplateName": template}]
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": claims.NAMESPACE, "labels": {"app": CLASS_PREFIX}},
        "spec": spec,
    }


def await_running(bench: benchmark.Bench, watch: apiserver.Watch, names: Sequence[str]) -> float | None:
    """When the last of these pods was Running, on the clock of the watch; None where that says nothing.

    On a busy machine kubelet may ask for a claim before the API server's authorizer of nodes has heard that the pod uses it. It is
    refused, and kubelet asks again after 60 to 90 s, or once the pod changes: so such a pod is changed, and its time is worthless.
    """
    missing = set(names)
    disturbed = False
    deadline = time.perf_counter() + TIMEOUT_S

    def last(event: apiserver.Event) -> bool:
        if event.kind != "DELETED" and event.object.get("status", {}).get("phase") == "Running":
            missing.discard(event.object["metadata"]["name"])
        return not missing

    while (event := watch.wait(last, timeout_s=SLOW_S)) is None:
        if time.perf_counter() > deadline:
            raise BenchError(f"{', '.join(sorted(missing))}: not Running in {TIMEOUT_S:.0f} s")
        refused = [name for name in missing if _refused_unheard(bench, name)]
        disturbed |= bool(refused)
        for name in refused:
            changed = {"metadata": {"annotations": {"again": str(time.perf_counter())}}}
            bench.server.call("PATCH", f"{pods_path()}/{name}", changed)
    return None if disturbed else event.at


def await_gone(watch: apiserver.Watch, names: Sequence[str]) -> None:
    """Wait until these pods are gone."""
    missing = set(names)

    def last(event: apiserver.Event) -> bool:
        if event.kind == "DELETED":
            missing.discard(event.object["metadata"]["name"])
        return not missing

    if watch.wait(last, timeout_s=TIMEOUT_S) is None:
        raise BenchError(f"{', '.join(sorted(missing))}: not gone in {TIMEOUT_S:.0f} s")


def _refused_unheard(bench: benchmark.Bench, name: str) -> bool:
    selector = urllib.parse.urlencode({"fieldSelector": f"involvedObject.name={name}"})
    events = bench.server.call("GET", f"/api/v1/namespaces/{claims.NAMESPACE}/events?{selector}")["items"]
    return any(UNHEARD in event.get("message", "") for event in events)


def remove_pods(bench: benchmark.Bench) -> None:
    """Remove the pods that a part has left, and wait until they are gone; that of the holder stays."""
    began = time.perf_counter()
    while names := [
        item["metadata"]["name"]
        for item in bench.server.call("GET", pods_path())["items"]
        if item["metadata"]["name"] != bench.server.holder.name
    ]:
        if time.perf_counter() - began > TIMEOUT_S:
            raise BenchError(f"{', '.join(names)}: not gone in {TIMEOUT_S:.0f} s")
        for name in names:
            with contextlib.suppress(BenchError):  # it was gone in between
                bench.server.call("DELETE", f"{pods_path()}/{name}")
        bench.pause(POLL_S)
    await_no_claims(bench)


def await_no_claims(bench: benchmark.Bench) -> None:
    """Wait until the claims of pods that are gone are gone too, so that their devices are free."""
    began = time.perf_counter()
    while bench.server.call("GET", claims.collection_path())["items"]:
        if time.perf_counter() - began > TIMEOUT_S:
            raise BenchError(f"Claims of pods that are gone were still there after {TIMEOUT_S:.0f} s")
        bench.pause(POLL_S)
