# SPDX-License-Identifier: Apache-2.0
"""The API server over plain HTTP: objects go in and come out as JSON, as a person writes them and `kubectl -o json` shows them.

Waiting is by watch. A wait that fails says what was seen last, and survives an API server that goes away meanwhile.
"""

from __future__ import annotations

import contextlib
import json
import time
import urllib.parse
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import urllib3
from kubernetes import client, config

from tests.e2e.kit import samples

Json: TypeAlias = dict[str, Any]

WRITES = ("POST", "PUT", "PATCH", "APPLY", "DELETE", "DELETECOLLECTION")
MERGE_PATCH = "application/merge-patch+json"
TIMEOUT_S = 60.0
"""Of one request."""

PATIENCE_S = 240.0
"""Of a wait. Kubelet alone may take a minute and a half before it tries something again."""

_PAUSE_S = 0.2
HOPELESS = (400, 403, 405, 422)
"""Answers that do not become others. 404 may: an API server that starts does not serve all of its groups at once."""


class Kind(NamedTuple):
    """Where objects of a kind are served."""

    version: str
    plural: str
    namespaced: bool = True

    def path(self, namespace: str | None, name: str | None = None) -> str:
        """Of one object, or of all of them in a namespace or everywhere."""
        root = f"/api/{self.version}" if "/" not in self.version else f"/apis/{self.version}"
        place = f"/namespaces/{namespace}" if self.namespaced and namespace is not None else ""
        return f"{root}{place}/{self.plural}" + (f"/{name}" if name is not None else "")


_RBAC = "rbac.authorization.k8s.io/v1"
_DRA = "resource.k8s.io/v1"
_ADMISSION = "admissionregistration.k8s.io/v1"
KINDS: Mapping[str, Kind] = {
    "Namespace": Kind("v1", "namespaces", namespaced=False),
    "Node": Kind("v1", "nodes", namespaced=False),
    "Pod": Kind("v1", "pods"),
    "Event": Kind("v1", "events"),
    "Secret": Kind("v1", "secrets"),
    "ConfigMap": Kind("v1", "configmaps"),
    "ServiceAccount": Kind("v1", "serviceaccounts"),
    "ResourceQuota": Kind("v1", "resourcequotas"),
    "DaemonSet": Kind("apps/v1", "daemonsets"),
    "Deployment": Kind("apps/v1", "deployments"),
    "Job": Kind("batch/v1", "jobs"),
    "ClusterRole": Kind(_RBAC, "clusterroles", namespaced=False),
    "ClusterRoleBinding": Kind(_RBAC, "clusterrolebindings", namespaced=False),
    "Role": Kind(_RBAC, "roles"),
    "RoleBinding": Kind(_RBAC, "rolebindings"),
    "ResourceClaim": Kind(_DRA, "resourceclaims"),
    "ResourceClaimTemplate": Kind(_DRA, "resourceclaimtemplates"),
    "ResourceSlice": Kind(_DRA, "resourceslices", namespaced=False),
    "DeviceClass": Kind(_DRA, "deviceclasses", namespaced=False),
    "ValidatingAdmissionPolicy": Kind(_ADMISSION, "validatingadmissionpolicies", namespaced=False),
    "ValidatingAdmissionPolicyBinding": Kind(_ADMISSION, "validatingadmissionpolicybindings", namespaced=False),
    "PodGroup": Kind("scheduling.k8s.io/v1beta1", "podgroups"),
    "Workload": Kind("scheduling.k8s.io/v1beta1", "workloads"),
}


class ApiError(Exception):
    """The server refused. `status` is that of HTTP, `reason` the API's word (NotFound, Conflict, Forbidden)."""

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(f"{status} {reason}: {message}")
        self.status = status
        self.reason = reason
        self.message = message


class Api:
    """A client. Its connections are made in the network namespace of the thread that asks first."""

    def __init__(self, kubeconfig: Path) -> None:
        self.kubeconfig = kubeconfig
        settings = client.Configuration()
        read: Any = config.load_kube_config  # untyped
        read(str(kubeconfig), client_configuration=settings)
        self._host = str(settings.host)
        bearer = settings.get_api_key_with_prefix("authorization") or settings.get_api_key_with_prefix("BearerToken")
        self._headers = {"Authorization": bearer} if bearer else {}
        self._pool = urllib3.PoolManager(
            ca_certs=settings.ssl_ca_cert, cert_file=settings.cert_file, key_file=settings.key_file, maxsize=8
        )

    def as_token(self, token: str) -> Api:
        """The same server seen with another token, such as the agent's."""
        other = Api(self.kubeconfig)
        other._headers = {"Authorization": f"Bearer {token}"}
        return other

    def send(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: Json | None = None,
        content_type: str = "application/json",
        timeout_s: float = TIMEOUT_S,
    ) -> bytes:
        """One request, as it is. Raises ApiError, and urllib3's errors where nobody answers."""
        answer = self._pool.request(
            method,
            self._url(path, query),
            body=None if body is None else json.dumps(body).encode(),
            headers={**self._headers, "Content-Type": content_type},
            timeout=timeout_s,
            retries=False,
        )
        if answer.status >= 300:
            raise _error(answer.status, answer.data)
        return answer.data

    def get(self, kind: str, name: str, namespace: str | None = None) -> Json:
        """One object."""
        return self._json("GET", KINDS[kind].path(namespace, name))

    def find(self, kind: str, name: str, namespace: str | None = None) -> Json | None:
        """One object, None where there is none."""
        try:
            return self.get(kind, name, namespace)
        except ApiError as error:
            if error.status == 404:
                return None
            raise

    def items(
        self, kind: str, namespace: str | None = None, *, labels: str | None = None, fields: str | None = None
    ) -> list[Json]:
        """All objects of a kind, in a namespace or everywhere."""
        return list(self._json("GET", KINDS[kind].path(namespace), query=_selectors(labels, fields))["items"])

    def create(self, body: Json, *, dry_run: bool = False) -> Json:
        """Make one; its kind and namespace stand in it."""
        return self._json("POST", _place(body), query={"dryRun": "All"} if dry_run else None, body=body)

    def replace(self, body: Json) -> Json:
        """Put one in the place of the stored one."""
        return self._json("PUT", _place(body, body["metadata"]["name"]), body=body)

    def patch(
        self, kind: str, name: str, patch: Json, namespace: str | None = None, *, subresource: str | None = None
    ) -> Json:
        """Change one by merge patch."""
        path = KINDS[kind].path(namespace, name) + (f"/{subresource}" if subresource else "")
        return self._json("PATCH", path, body=patch, content_type=MERGE_PATCH)

    def delete(self, kind: str, name: str, namespace: str | None = None, *, grace_s: int | None = None) -> None:
        """Begin to delete one. `grace_s` 0 removes a pod from the API at once, whatever its node does. Gone: fine."""
        query = None if grace_s is None else {"gracePeriodSeconds": str(grace_s)}
        try:
            self._json("DELETE", KINDS[kind].path(namespace, name), query=query)
        except ApiError as error:
            if error.status != 404:
                raise

    def delete_all(self, kind: str, namespace: str | None = None, *, fields: str | None = None) -> None:
        """Begin to delete all of a kind."""
        self._json("DELETE", KINDS[kind].path(namespace), query=_selectors(None, fields))

    def watch(
        self,
        kind: str,
        namespace: str | None = None,
        *,
        labels: str | None = None,
        fields: str | None = None,
        timeout_s: float,
        trouble: list[Exception] | None = None,
    ) -> Iterator[list[Json]]:
        """All objects that match, now and after each change, for so long. Starts anew when the server goes away; why it went is
        in `trouble`. Raises ApiError where asking again cannot help.
        """
        deadline = time.monotonic() + timeout_s
        while (left := deadline - time.monotonic()) > 0:
            try:
                yield from self._watch_once(KINDS[kind].path(namespace), _selectors(labels, fields), left)
            except (urllib3.exceptions.HTTPError, ApiError) as error:
                if isinstance(error, ApiError) and error.status in HOPELESS:
                    raise
                if trouble is not None:
                    trouble[:] = [error]
                time.sleep(min(_PAUSE_S, max(0.0, deadline - time.monotonic())))

    def wait(
        self,
        kind: str,
        name: str,
        namespace: str | None = None,
        *,
        until: Callable[[Json], object],
        what: str,
        timeout_s: float = PATIENCE_S,
    ) -> Json:
        """The object, once `until` holds for it. Fails with what was seen last."""
        last: Json | None = None
        trouble: list[Exception] = []
        fields = f"metadata.name={name}"
        for items in self.watch(kind, namespace, fields=fields, timeout_s=timeout_s, trouble=trouble):
            last = items[0] if items else None
            if last is not None and until(last):
                return last
        raise AssertionError(
            f"{kind} {name}: not {what} within {timeout_s:g} s; last seen: {describe(last)}{_after(trouble)}"
        )

    def wait_gone(self, kind: str, name: str, namespace: str | None = None, *, timeout_s: float = PATIENCE_S) -> None:
        """Return once there is no such object."""
        last: Json | None = None
        trouble: list[Exception] = []
        fields = f"metadata.name={name}"
        for items in self.watch(kind, namespace, fields=fields, timeout_s=timeout_s, trouble=trouble):
            if not items:
                return
            last = items[0]
        raise AssertionError(
            f"{kind} {name}: not gone within {timeout_s:g} s; last seen: {describe(last)}{_after(trouble)}"
        )

    def events(self, kind: str, name: str, namespace: str | None = None) -> list[Json]:
        """The Events of an object, oldest first. Those of Nodes and other cluster-wide objects are in `default`."""
        fields = f"involvedObject.kind={kind},involvedObject.name={name}"
        found = self.items("Event", namespace or "default", fields=fields)
        return sorted(found, key=lambda event: str(event["metadata"]["creationTimestamp"]))

    def wait_event(
        self, kind: str, name: str, namespace: str | None = None, *, text: str, timeout_s: float = PATIENCE_S
    ) -> Json:
        """The first Event of an object whose reason or message contains the text."""
        seen: list[str] = []
        trouble: list[Exception] = []
        fields = f"involvedObject.kind={kind},involvedObject.name={name}"
        place = namespace or "default"
        for items in self.watch("Event", place, fields=fields, timeout_s=timeout_s, trouble=trouble):
            for event in items:
                if text in event.get("reason", "") or text in event.get("message", ""):
                    return event
            seen = [f"{event.get('reason')}: {event.get('message')}" for event in items]
        raise AssertionError(
            f"{kind} {name}: no Event with {text!r} within {timeout_s:g} s; there are: {seen or 'none'}{_after(trouble)}"
        )

    def metrics(self, *, only: str = "") -> samples.Samples:
        """The API server's own metrics, or those whose names begin with `only`."""
        return samples.parse(self.send("GET", "/metrics").decode(), only=only)

    def writes(self, resource: str = "resourceslices") -> int:
        """How many writes of a resource it has seen, dry runs left out, refused ones included."""
        found = self.metrics(only="apiserver_request_total")
        lines = found.matching("apiserver_request_total", resource=resource, dry_run="")
        return int(sum(line.value for line in lines if line.labels["verb"] in WRITES))

    def _json(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: Json | None = None,
        content_type: str = "application/json",
    ) -> Json:
        found: Json = json.loads(self.send(method, path, query=query, body=body, content_type=content_type))
        return found

    def _url(self, path: str, query: Mapping[str, str] | None) -> str:
        return self._host + path + ("?" + urllib.parse.urlencode(query) if query else "")

    def _watch_once(self, path: str, query: Mapping[str, str], timeout_s: float) -> Iterator[list[Json]]:
        """A list and what a watch tells after it, as whole lists. Ends when the time is over or the server ends it."""
        listed = self._json("GET", path, query=query)
        known = {item["metadata"]["uid"]: item for item in listed["items"]}
        yield list(known.values())
        query = {
            **query,
            "watch": "true",
            "resourceVersion": listed["metadata"]["resourceVersion"],
            "timeoutSeconds": str(max(1, int(timeout_s))),
        }
        answer = self._pool.request(
            "GET",
            self._url(path, query),
            headers=self._headers,
            timeout=urllib3.Timeout(connect=5, read=timeout_s + 0.1),
            retries=False,
            preload_content=False,
        )
        deadline = time.monotonic() + timeout_s
        with contextlib.closing(answer):
            if answer.status >= 300:
                raise _error(answer.status, answer.read())
            for line in answer:
                change = json.loads(line)
                if change["type"] == "ERROR":
                    raise ApiError(410, "Gone", str(change["object"].get("message")))
                item = change["object"]
                if change["type"] == "DELETED":
                    known.pop(item["metadata"]["uid"], None)
                else:
                    known[item["metadata"]["uid"]] = item
                yield list(known.values())
                if time.monotonic() >= deadline:
                    return


def describe(item: Json | None) -> str:
    """An object in one line, with what a person looks at first."""
    if item is None:
        return "no such object"
    status = item.get("status", {})
    parts = [f"phase {status['phase']}"] if "phase" in status else []
    if "deletionTimestamp" in item["metadata"]:
        parts.append(f"being deleted since {item['metadata']['deletionTimestamp']}")
    parts += [
        f"{condition['type']}={condition['status']} {condition.get('reason', '')} {condition.get('message', '')}".strip()
        for condition in status.get("conditions", [])
        if condition["status"] != "True" or condition.get("message")
    ]
    for container in (*status.get("initContainerStatuses", []), *status.get("containerStatuses", [])):
        states: Json = container.get("state", {})
        state = next(iter(states), "in no state")
        detail: Json = states.get(state, {})
        told = " ".join(str(detail[key]) for key in ("reason", "exitCode", "message") if key in detail)
        parts.append(f"{container['name']} {state} {told}".strip())
    return "; ".join(parts) or json.dumps(status or item.get("spec", {}))[:500]


def _after(trouble: list[Exception]) -> str:
    return "".join(f"; the last trouble with the API server: {error}" for error in trouble)


def _selectors(labels: str | None, fields: str | None) -> dict[str, str]:
    chosen = {"labelSelector": labels, "fieldSelector": fields}
    return {key: value for key, value in chosen.items() if value is not None}


def _place(body: Json, name: str | None = None) -> str:
    return KINDS[body["kind"]].path(body["metadata"].get("namespace"), name)


def _error(status: int, data: bytes) -> ApiError:
    try:
        told = json.loads(data)
        return ApiError(status, str(told.get("reason", "")), str(told.get("message", "")))
    except (ValueError, AttributeError):
        return ApiError(status, "", data.decode(errors="replace")[:500])
