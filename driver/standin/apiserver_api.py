# SPDX-License-Identifier: Apache-2.0
"""The verbs of the stand-in API server: what create, replace, patch and delete do to an object, as one step each.

As apiserver's pkg/registry/generic/registry does it: optimistic concurrency by resourceVersion, preconditions, server
set metadata, finalizers, dryRun=All, no change for an update that changes nothing.
"""

from __future__ import annotations

import copy
import datetime as dt
import random
import string
import uuid
from collections.abc import Callable, Mapping
from typing import Any

from driver.publish import syntax
from driver.standin import apiserver_resources as resources
from driver.standin import apiserver_status as status
from driver.standin import apiserver_store as store

Body = resources.Body

_SERVER_METADATA = ("uid", "creationTimestamp", "deletionTimestamp", "deletionGracePeriodSeconds", "generation")
_SUFFIX = "".join(sorted(set(string.ascii_lowercase + string.digits) - set("aeiou013")))
"""Alphabet of generated name suffixes (apimachinery's util/rand): no vowels, nothing that reads as a word."""

_MAX_GENERATED_PREFIX = 58
_GENERATE_ATTEMPTS = 8


class Verbs:
    """Writes to one store."""

    def __init__(self, objects: store.Store, gates: Mapping[str, bool], clock: Callable[[], dt.datetime]) -> None:
        self._store = objects
        self._gates = gates
        self._clock = clock

    def create(self, resource: resources.Resource, namespace: str, body: Body, *, dry_run: bool) -> Body:
        """POST."""
        body = self._decoded(resource, namespace, body)
        metadata = body["metadata"]
        if metadata.get("resourceVersion"):
            raise status.StatusError(500, "InternalError", "resourceVersion should not be set on objects to be created")
        name, prefix = metadata.get("name"), metadata.get("generateName")
        if not name and not prefix:
            raise status.invalid(
                resource.kind, resource.group, "", ("metadata.name: Required value: name or generateName is required",)
            )
        for key in (*_SERVER_METADATA, "managedFields", "selfLink"):
            metadata.pop(key, None)
        metadata["uid"] = str(uuid.uuid4())
        metadata["creationTimestamp"] = self._now()
        if resource.counts_generation:
            metadata["generation"] = 1
        resource.prepare(body, None, self._context())
        for attempt in range(_GENERATE_ATTEMPTS):
            if not name:
                metadata["name"] = _generate_name(str(prefix))
            self._check(resource, body, None)
            try:
                return self._insert(resource, body, dry_run=dry_run)
            except status.StatusError as error:
                if name or error.reason != "AlreadyExists" or attempt == _GENERATE_ATTEMPTS - 1:
                    raise
        raise AssertionError("every attempt returns or raises")

    def replace(self, resource: resources.Resource, key: str, body: Body, *, subresource: str, dry_run: bool) -> Body:
        """PUT of an object or of its status."""
        namespace = key.rpartition("/")[0]
        body = self._decoded(resource, namespace, body)
        name = key.rpartition("/")[2]
        if body["metadata"].get("name") != name:
            raise status.bad_request(
                f"the name of the object ({body['metadata'].get('name')}) does not match the name on the URL ({name})"
            )
        return self._change(
            resource, key, lambda before: self._updated(resource, before, body, subresource), dry_run=dry_run
        )

    def patch(self, resource: resources.Resource, key: str, patch: Body, *, subresource: str, dry_run: bool) -> Body:
        """PATCH with a merge patch (RFC 7386)."""
        return self._change(
            resource,
            key,
            lambda before: self._updated(resource, before, _merged(copy.deepcopy(before), patch), subresource),
            dry_run=dry_run,
        )

    def delete(self, resource: resources.Resource, key: str, options: Mapping[str, Any], *, dry_run: bool) -> Body:
        """DELETE with preconditions. An object with finalizers is only marked."""
        wanted = options.get("preconditions") or {}
        name = key.rpartition("/")[2]

        def change(before: Body) -> Body | None:
            for field, label in (("uid", "UID"), ("resourceVersion", "ResourceVersion")):
                if wanted.get(field) is not None and wanted[field] != before["metadata"][field]:
                    raise status.conflict(
                        resource.group_resource,
                        name,
                        f"Precondition failed: {label} in precondition: {wanted[field]}, "
                        f"{label} in object meta: {before['metadata'][field]}",
                    )
            if not before["metadata"].get("finalizers"):
                return None
            marked = copy.deepcopy(before)
            marked["metadata"].setdefault("deletionTimestamp", self._now())
            marked["metadata"]["deletionGracePeriodSeconds"] = 0
            return marked

        return self._change(resource, key, change, dry_run=dry_run)

    def _now(self) -> str:
        return self._clock().strftime("%Y-%m-%dT%H:%M:%SZ")

    def _context(self) -> resources.Context:
        return resources.Context(gates=self._gates, now=self._clock())

    def _decoded(self, resource: resources.Resource, namespace: str, body: object) -> Body:
        """A copy of what was sent, in the form every later step relies on."""
        if not isinstance(body, dict):
            raise status.bad_request("the object provided is unrecognized: no JSON object")
        if (body.get("kind") or resource.kind) != resource.kind or (
            body.get("apiVersion") or resource.api_version
        ) != resource.api_version:
            raise status.bad_request(
                f"{body.get('kind')} in version {body.get('apiVersion')!r} cannot be handled as a {resource.kind}"
            )
        metadata = body.get("metadata") or {}
        if not isinstance(metadata, dict):
            raise status.bad_request("json: cannot unmarshal metadata into Go struct field of type ObjectMeta")
        if (metadata.get("namespace") or namespace) != namespace:
            raise status.bad_request(
                "the namespace of the provided object does not match the namespace sent on the request"
            )
        decoded = copy.deepcopy(body)
        decoded.update(kind=resource.kind, apiVersion=resource.api_version, metadata=copy.deepcopy(metadata))
        if resource.namespaced:
            decoded["metadata"]["namespace"] = namespace
        return decoded

    def _check(self, resource: resources.Resource, body: Body, old: Body | None) -> None:
        name = body["metadata"].get("name")
        wrong = () if syntax.is_subdomain(name) else ("metadata.name: must be a DNS subdomain",)
        wrong = (*wrong, *resource.check(body, old, self._context()))
        if wrong:
            raise status.invalid(resource.kind, resource.group, str(name), wrong)

    def _insert(self, resource: resources.Resource, body: Body, *, dry_run: bool) -> Body:
        key = resources.key_of(resource, body)

        def change(before: store.Stored | None) -> Body:
            if before is not None:
                raise status.already_exists(resource.group_resource, body["metadata"]["name"])
            return body

        if dry_run:
            return change(self._store.get(resource.plural, key))
        stored = self._store.transact(resource.plural, key, change)
        assert stored is not None
        return stored.body

    def _change(
        self, resource: resources.Resource, key: str, change: Callable[[Body], Body | None], *, dry_run: bool
    ) -> Body:
        """Run a change of an existing object as one step, or only compute it."""

        def step(before: store.Stored | None) -> Body | None:
            if before is None:
                raise status.not_found(resource.group_resource, key.rpartition("/")[2])
            return change(before.body)

        if dry_run:
            before = self._store.get(resource.plural, key)
            after = step(before)
            assert before is not None
            return after if after is not None else before.body
        stored = self._store.transact(resource.plural, key, step)
        assert stored is not None
        return stored.body

    def _updated(self, resource: resources.Resource, before: Body, body: Body, subresource: str) -> Body | None:
        """What is stored in place of `before`; None when the last finalizer has gone."""
        body = copy.deepcopy(body)
        metadata, old_metadata = body["metadata"], before["metadata"]
        name = old_metadata["name"]
        sent_version = metadata.get("resourceVersion")
        if sent_version and sent_version != old_metadata["resourceVersion"]:
            raise status.modified(resource.group_resource, name)
        if metadata.get("uid") and metadata["uid"] != old_metadata["uid"]:
            raise status.conflict(
                resource.group_resource,
                name,
                f"Precondition failed: UID in precondition: {metadata['uid']}, UID in object meta: {old_metadata['uid']}",
            )
        if subresource == "status":
            return self._with_status(resource, before, body)
        for field in _SERVER_METADATA:
            metadata.pop(field, None)
            if field in old_metadata:
                metadata[field] = old_metadata[field]
        metadata["resourceVersion"] = old_metadata["resourceVersion"]
        if resource.has_status:
            body.pop("status", None)
            if "status" in before:
                body["status"] = before["status"]
        resource.prepare(body, before, self._context())
        self._check(resource, body, before)
        if resource.counts_generation and body.get("spec") != before.get("spec"):
            metadata["generation"] = old_metadata["generation"] + 1
        if metadata.get("deletionTimestamp") and not metadata.get("finalizers"):
            return None
        return body

    def _with_status(self, resource: resources.Resource, before: Body, body: Body) -> Body:
        changed = {**before, "status": body.get("status") or {}}
        resource.prepare_status(changed, before, self._context())
        wrong = resource.check_status(changed, before)
        if wrong:
            raise status.invalid(resource.kind, resource.group, before["metadata"]["name"], wrong)
        return changed


def _generate_name(prefix: str) -> str:
    # Uniqueness in a stand-in, no secret.
    return prefix[:_MAX_GENERATED_PREFIX] + "".join(random.choices(_SUFFIX, k=5))  # noqa: S311


def _merged(target: Any, patch: Any) -> Any:
    if not isinstance(patch, dict):
        return patch
    merged = dict(target) if isinstance(target, dict) else {}
    for key, value in patch.items():
        if value is None:
            merged.pop(key, None)
        else:
            merged[key] = _merged(merged.get(key), value)
    return merged
