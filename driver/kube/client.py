# SPDX-License-Identifier: Apache-2.0
"""The calls to the API server that the agent makes: raw JSON in and out, a time limit on each, errors as ApiError.

No client-side rate limit. No typed models: they would drop fields of newer servers, and cost 1.4 ms a claim. A refused
credential (401) is renewed and the call made again, whatever its verb: the server has not looked at it.
"""

from __future__ import annotations

import http.client
import json
import logging
import os
import ssl
import time
import urllib.parse
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self, TypeVar

from driver import errors
from driver.kube import access, connections, credentials, watching

logger = logging.getLogger(__name__)

MAX_OBJECT_BYTES = 8 * 1024 * 1024
"""Of one object; etcd stores 1.5 MiB, managed fields and pretty printing included."""

MAX_PAGE_BYTES = 64 * 1024 * 1024
CLAIMS_A_PAGE = 250

_RESOURCE = "/apis/resource.k8s.io/v1"
_SLICES = f"{_RESOURCE}/resourceslices"

_REASONS = {
    400: errors.ApiReason.INVALID,
    401: errors.ApiReason.FORBIDDEN,
    403: errors.ApiReason.FORBIDDEN,
    404: errors.ApiReason.NOT_FOUND,
    409: errors.ApiReason.CONFLICT,
    410: errors.ApiReason.GONE,
    413: errors.ApiReason.INVALID,
    415: errors.ApiReason.INVALID,
    422: errors.ApiReason.INVALID,
    429: errors.ApiReason.UNAVAILABLE,
}

_REFUSED_US = "; the server does not accept our credentials: they have expired or are not its own (a pod gets new ones when it is deleted)"

T = TypeVar("T")
Json = dict[str, Any]
"""An object as the API spells it."""


class KubeClient:
    """One API server, for any number of threads."""

    def __init__(
        self, opened: access.Access | None, *, user_agent: str, reload: Callable[[], access.Access] | None = None
    ) -> None:
        """`opened`: None when it is still to be loaded. `reload` gives the Access anew, when credentials are refused."""
        self._credentials = credentials.Credentials(opened, user_agent=user_agent, reload=reload)
        self._watches = watching.Open()

    @classmethod
    def load(cls, kubeconfig: Path | None, *, user_agent: str, loading: access.Loading | None = None) -> Self:
        """From a kubeconfig, or from the pod's service account where there is none. Takes half a second for a kubeconfig, whose
        readings `loading` can end, those for new credentials too.

        Raises ConfigError. Where only a credential plugin fails, the calls fail (retryable) until it gives something.
        """
        if kubeconfig is None:
            return cls(access.in_cluster(os.environ), user_agent=user_agent)

        def reload() -> access.Access:
            return access.load_kubeconfig(kubeconfig, loading=loading)

        try:
            opened: access.Access | None = reload()
        except errors.ApiError as error:
            logger.warning("%s", error)
            opened = None
        return cls(opened, user_agent=user_agent, reload=reload)

    @property
    def server(self) -> str:
        """Where the API server is, for messages."""
        return self._credentials.server

    def close(self) -> None:
        """End idle connections and running watches."""
        self._watches.close()
        self._credentials.close()

    def get_claim(self, namespace: str, name: str, *, timeout_s: float) -> Json:
        """One ResourceClaim."""
        return self._object(
            "GET",
            f"{_RESOURCE}/namespaces/{_quote(namespace)}/resourceclaims/{_quote(name)}",
            f"ResourceClaim {namespace}/{name}",
            timeout_s=timeout_s,
        )

    def list_claims(self, *, timeout_s: float, keep: Callable[[Json], bool] | None = None) -> list[Json]:
        """All ResourceClaims of the cluster of one moment, in pages; only those that `keep` wants stay in memory."""
        claims: list[Json] = []
        query = {"limit": str(CLAIMS_A_PAGE)}
        while True:
            page = self._object(
                "GET",
                f"{_RESOURCE}/resourceclaims?{urllib.parse.urlencode(query)}",
                "the ResourceClaims",
                timeout_s=timeout_s,
                max_bytes=MAX_PAGE_BYTES,
            )
            claims += [item for item in _items(page) if keep is None or keep(item)]
            token = _metadata(page).get("continue")
            if not token:
                return claims
            query["continue"] = str(token)

    def get_node(self, name: str, *, timeout_s: float) -> Json:
        """One Node."""
        return self._object("GET", f"/api/v1/nodes/{_quote(name)}", f"Node {name}", timeout_s=timeout_s)

    def list_slices(self, *, node_name: str, timeout_s: float) -> tuple[str, list[Json]]:
        """The newest state of all ResourceSlices of a node, of every driver, and its resource version."""
        page = self._object(
            "GET",
            f"{_SLICES}?{_of_node(node_name)}",
            f"the ResourceSlices of node {node_name}",
            timeout_s=timeout_s,
            max_bytes=MAX_PAGE_BYTES,
        )
        return str(_metadata(page).get("resourceVersion", "")), _items(page)

    def watch_slices(
        self, *, node_name: str, resource_version: str, timeout_s: float, silence_s: float = watching.SILENCE_S
    ) -> watching.Watch:
        """Every change of the ResourceSlices of a node after a resource version, as (type, object), bookmarks included.

        The server ends it after `timeout_s`; a server that says nothing for `silence_s` is taken for gone. Iterating
        raises ApiError, GONE when the resource version is too old. `close()` ends it from any thread.
        """
        return self._watch(
            f"{_SLICES}?{_of_node(node_name)}",
            f"the ResourceSlices of node {node_name}",
            {"resourceVersion": resource_version},
            timeout_s=timeout_s,
            silence_s=silence_s,
        )

    def watch_claim(
        self, namespace: str, name: str, *, timeout_s: float, silence_s: float = watching.SILENCE_S
    ) -> watching.Watch:
        """One ResourceClaim as it is now, if there is one, as ADDED, and every change of it from then on; else as `watch_slices`."""
        selector = urllib.parse.urlencode({"fieldSelector": f"metadata.name={name}"})
        return self._watch(
            f"{_RESOURCE}/namespaces/{_quote(namespace)}/resourceclaims?{selector}",
            f"ResourceClaim {namespace}/{name}",
            {},
            timeout_s=timeout_s,
            silence_s=silence_s,
        )

    def create_slice(self, body: Mapping[str, Any], *, dry_run: bool = False, timeout_s: float) -> Json:
        """Create a ResourceSlice; what the server stored, or with `dry_run` would have stored."""
        return self._object(
            "POST", f"{_SLICES}{_dry(dry_run=dry_run)}", f"ResourceSlice {_name(body)}", body=body, timeout_s=timeout_s
        )

    def replace_slice(self, body: Mapping[str, Any], *, dry_run: bool = False, timeout_s: float) -> Json:
        """Replace a ResourceSlice of the resource version in the body; what was stored, or with `dry_run` would have been."""
        return self._object(
            "PUT",
            f"{_SLICES}/{_quote(_name(body))}{_dry(dry_run=dry_run)}",
            f"ResourceSlice {_name(body)}",
            body=body,
            timeout_s=timeout_s,
        )

    def delete_slice(self, name: str, *, uid: str, resource_version: str | None, timeout_s: float) -> None:
        """Delete a ResourceSlice if it is still the one meant."""
        preconditions = {"uid": uid} | ({"resourceVersion": resource_version} if resource_version is not None else {})
        self._object(
            "DELETE",
            f"{_SLICES}/{_quote(name)}",
            f"ResourceSlice {name}",
            body={"kind": "DeleteOptions", "apiVersion": "v1", "preconditions": preconditions},
            timeout_s=timeout_s,
        )

    def delete_slices(self, *, node_name: str, driver: str | None, timeout_s: float) -> None:
        """Delete all ResourceSlices of a node, of one driver or of all, as kubelet does."""
        self._object(
            "DELETE",
            f"{_SLICES}?{_of_node(node_name, driver)}",
            f"the ResourceSlices of node {node_name}",
            timeout_s=timeout_s,
            max_bytes=MAX_PAGE_BYTES,
        )

    def create_event(self, namespace: str, body: Mapping[str, Any], *, timeout_s: float) -> Json:
        """Create an Event."""
        return self._object(
            "POST",
            f"/api/v1/namespaces/{_quote(namespace)}/events",
            f"Event {namespace}/{_name(body)}",
            body=body,
            timeout_s=timeout_s,
        )

    def patch_event(self, namespace: str, name: str, patch: Mapping[str, Any], *, timeout_s: float) -> Json:
        """Change an Event by a merge patch."""
        return self._object(
            "PATCH",
            f"/api/v1/namespaces/{_quote(namespace)}/events/{_quote(name)}",
            f"Event {namespace}/{name}",
            body=patch,
            timeout_s=timeout_s,
        )

    def _watch(
        self, path: str, what: str, query: Mapping[str, str], *, timeout_s: float, silence_s: float
    ) -> watching.Watch:
        spelt = urllib.parse.urlencode(
            {"watch": "1", "allowWatchBookmarks": "true", **query, "timeoutSeconds": str(max(1, int(timeout_s)))}
        )

        def begin(session: credentials.Session, _left_s: float) -> watching.Watch:
            return watching.begin(
                session.connections,
                f"{path}&{spelt}",
                session.headers,
                silence_s=silence_s,
                registry=self._watches,
                fail=lambda cause: self._failed("WATCH", what, cause),
            )

        return self._call("WATCH", what, begin, timeout_s=silence_s)

    def _object(
        self,
        method: str,
        path: str,
        what: str,
        *,
        body: Mapping[str, Any] | None = None,
        timeout_s: float,
        max_bytes: int = MAX_OBJECT_BYTES,
    ) -> Json:
        sent = json.dumps(body, separators=(",", ":")).encode() if body is not None else None
        content_type = "application/merge-patch+json" if method == "PATCH" else "application/json"

        def ask(session: credentials.Session, left_s: float) -> connections.Answer:
            headers = session.headers if sent is None else {**session.headers, "Content-Type": content_type}
            asked = connections.Ask(method=method, path=path, headers=headers, body=sent, max_bytes=max_bytes)
            return session.connections.request(asked, timeout_s=left_s)

        answer = self._call(method, what, ask, timeout_s=timeout_s)
        try:
            decoded = json.loads(answer.body)
        except (ValueError, RecursionError):
            decoded = None
        if not isinstance(decoded, dict):
            raise errors.ApiError(
                f"{method} {what} on {self.server}: the answer is no JSON object; does something else listen there?",
                reason=errors.ApiReason.OTHER,
                status=answer.status,
            )
        return decoded

    def _call(self, method: str, what: str, ask: Callable[[credentials.Session, float], T], *, timeout_s: float) -> T:
        """Ask with the present credentials, and once more with new ones when they are refused."""
        ends = time.monotonic() + timeout_s
        try:
            session = self._credentials.session(timeout_s=timeout_s)
            try:
                return ask(session, ends - time.monotonic())
            except connections.RefusedError as refused:
                unauthorized = refused.answer.status == http.client.UNAUTHORIZED
                if not unauthorized or not self._credentials.renew(session, timeout_s=ends - time.monotonic()):
                    raise
            session = self._credentials.session(timeout_s=ends - time.monotonic())
            return ask(session, ends - time.monotonic())
        except connections.RefusedError as refused:
            raise self._failed(method, what, refused.answer) from None
        except (OSError, http.client.HTTPException, connections.TooLargeError) as error:
            raise self._failed(method, what, error) from error

    def _failed(self, method: str, what: str, cause: connections.Answer | Exception) -> errors.ApiError:
        """The ApiError that an answer or an exception stands for; its message names verb, object and server."""
        where = f"{method} {what} on {self.server}"
        match cause:
            case connections.Answer(status, body):
                said, kind = _status(body)
                reason = _REASONS.get(status, errors.ApiReason.UNAVAILABLE if status >= 500 else errors.ApiReason.OTHER)
                if kind == "AlreadyExists":
                    reason = errors.ApiReason.ALREADY_EXISTS
                hint = _REFUSED_US if status == http.client.UNAUTHORIZED else ""
                return errors.ApiError(
                    f"{where}: {said or f'HTTP status {status}'}{hint}", reason=reason, status=status
                )
            case ssl.SSLCertVerificationError():
                return errors.ApiError(
                    f"{where}: its certificate is not trusted ({cause.verify_message}); look at the certificate authority",
                    reason=errors.ApiReason.OTHER,
                )
            case connections.TooLargeError():
                return errors.ApiError(f"{where}: the answer is too long: {cause}", reason=errors.ApiReason.OTHER)
            case TimeoutError():
                return errors.ApiError(f"{where}: no answer in time", reason=errors.ApiReason.UNAVAILABLE)
        return errors.ApiError(f"{where}: {str(cause) or type(cause).__name__}", reason=errors.ApiReason.UNAVAILABLE)


def _status(body: bytes) -> tuple[str, str]:
    """Message and reason of a Status, empty where the body is none."""
    try:
        decoded = json.loads(body)
    except (ValueError, RecursionError):
        return "", ""
    if not isinstance(decoded, dict):
        return "", ""
    return str(decoded.get("message") or ""), str(decoded.get("reason") or "")


def _quote(name: str) -> str:
    return urllib.parse.quote(name, safe="")


def _dry(*, dry_run: bool) -> str:
    return "?dryRun=All" if dry_run else ""


def _of_node(node_name: str, driver: str | None = None) -> str:
    """The one selector that the API server has an index for (spec.nodeName)."""
    selector = f"spec.nodeName={node_name}" + (f",spec.driver={driver}" if driver is not None else "")
    return urllib.parse.urlencode({"fieldSelector": selector})


def _metadata(body: Mapping[str, Any]) -> Mapping[str, Any]:
    metadata = body.get("metadata")
    return metadata if isinstance(metadata, Mapping) else {}


def _name(body: Mapping[str, Any]) -> str:
    metadata = _metadata(body)
    return str(metadata.get("name") or metadata.get("generateName") or "")


def _items(page: Mapping[str, Any]) -> list[Json]:
    """The objects of a list; what is none is left out, as one odd entry must not hide the others."""
    items = page.get("items")
    return [item for item in items if isinstance(item, dict)] if isinstance(items, list) else []
