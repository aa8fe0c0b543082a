# SPDX-License-Identifier: Apache-2.0
"""The resources that the stand-in API server serves, and what each does to an object before it is stored.

A strategy mirrors one of pkg/registry of Kubernetes 1.37: what it resets, defaults, drops, normalises and refuses.
"""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from driver import quantity
from driver.publish import limits
from driver.standin import apiserver_claims, apiserver_gates

Body = dict[str, Any]
"""One object as JSON."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """What strategies need to know of the server."""

    gates: Mapping[str, bool]
    now: dt.datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class Resource:
    """One kind of object. `prepare` may change the new body in place; `check` says what is wrong with it."""

    kind: str
    plural: str
    group: str
    namespaced: bool
    fields: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Field selectors besides metadata.name and metadata.namespace: label -> path of keys."""
    fields_since: Mapping[str, str] = field(default_factory=dict)
    """Selectors that older servers refuse with 400: label -> first version."""
    has_status: bool = False
    counts_generation: bool = False
    """Whether metadata.generation grows with every change of the spec."""
    prepare: Callable[[Body, Body | None, Context], None] = lambda _body, _old, _context: None
    check: Callable[[Body, Body | None, Context], tuple[str, ...]] = lambda _body, _old, _context: ()
    prepare_status: Callable[[Body, Body, Context], None] = lambda _body, _old, _context: None
    check_status: Callable[[Body, Body], tuple[str, ...]] = lambda _body, _old: ()

    @property
    def api_version(self) -> str:
        """As objects spell it."""
        return f"{self.group}/v1" if self.group else "v1"

    @property
    def group_resource(self) -> str:
        """As messages spell it."""
        return f"{self.plural}.{self.group}" if self.group else self.plural


def key_of(resource: Resource, body: Mapping[str, Any]) -> str:
    """The key under which an object is stored: `namespace/name` or `name`, in etcd's order."""
    metadata = body["metadata"]
    return f"{metadata['namespace']}/{metadata['name']}" if resource.namespaced else str(metadata["name"])


def field_value(body: Mapping[str, Any], path: tuple[str, ...]) -> str:
    """The value of a selectable field as text; empty where it is not set."""
    value: Any = body
    for key in path:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value if isinstance(value, str) else "" if value is None else json.dumps(value)


def _prepare_slice(body: Body, old: Body | None, context: Context) -> None:
    spec = body.get("spec")
    if not isinstance(spec, dict):
        return
    for device in _objects(spec.get("devices")):
        for taint in _objects(device.get("taints")):
            taint["timeAdded"] = _time(taint.get("timeAdded"), context.now)
    apiserver_gates.drop_disabled(spec, old.get("spec") if old is not None else None, context.gates)
    for holder in _quantity_holders(spec):
        for key in ("value", "default", "min", "max", "step"):
            if key in holder:
                holder[key] = _canonical(holder[key])


def _check_slice(body: Body, old: Body | None, context: Context) -> tuple[str, ...]:
    wrong = limits.slice_violations(body, old=old, fractions=context.gates["DRAFractionalCapacityRange"])
    if not wrong:
        _prune(body["spec"])
    return wrong


def _objects(value: object) -> list[Body]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def _values(value: object) -> list[Body]:
    return [item for item in value.values() if isinstance(item, dict)] if isinstance(value, dict) else []


def _quantity_holders(spec: Body) -> Iterator[Body]:
    for counter_set in _objects(spec.get("sharedCounters")):
        yield from _values(counter_set.get("counters"))
    for device in _objects(spec.get("devices")):
        for consumption in _objects(device.get("consumesCounters")):
            yield from _values(consumption.get("counters"))
        for capacity in _values(device.get("capacity")):
            yield capacity
            policy = capacity.get("requestPolicy")
            if isinstance(policy, dict):
                yield policy
                if isinstance(policy.get("validRange"), dict):
                    yield policy["validRange"]


def _canonical(text: object) -> object:
    """A quantity in the spelling that Quantity.String() gives: the largest suffix of its family without a fraction."""
    try:
        value = quantity.parse(text)
    except ValueError:
        return text
    if str(text).endswith("i") and value.denominator == 1 and abs(value) >= 1024:
        return quantity.format_bytes(int(value))
    for suffix, power in (("E", 18), ("P", 15), ("T", 12), ("G", 9), ("M", 6), ("k", 3), ("", 0), ("m", -3), ("u", -6)):
        scaled = value / Fraction(10) ** power
        if value and scaled.denominator == 1:
            return f"{scaled}{suffix}"
    return "0" if not value else text


def _time(given: object, now: dt.datetime) -> object:
    """metav1.Time: whole seconds, UTC; now where none is given. What is no time stays, to be refused as the wrong type."""
    if given is None:
        moment = now
    else:
        try:
            moment = dt.datetime.fromisoformat(str(given))
        except ValueError:
            return given
        if moment.tzinfo is None:
            return given
    return moment.astimezone(dt.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _prune(value: object) -> None:
    """Fields that are empty vanish when the server encodes an object (`omitempty`)."""
    if isinstance(value, dict):
        for key in [key for key, item in value.items() if item is None or item in ({}, [])]:
            del value[key]
        for item in value.values():
            _prune(item)
    elif isinstance(value, list):
        for item in value:
            _prune(item)


def _prepare_claim(body: Body, old: Body | None, context: Context) -> None:
    if old is None:
        body["status"] = {}
    spec = body.get("spec")
    apiserver_gates.drop_disabled_of_claim(spec, old.get("spec") if old is not None else None, context.gates)
    devices = spec.get("devices") if isinstance(spec, dict) else None
    for request in _objects(devices.get("requests") if isinstance(devices, dict) else None):
        for exact in [request.get("exactly"), *_objects(request.get("firstAvailable"))]:
            if isinstance(exact, dict):
                exact.setdefault("allocationMode", "ExactCount")
                if exact["allocationMode"] == "ExactCount":
                    exact.setdefault("count", 1)


def _prepare_claim_status(body: Body, old: Body, context: Context) -> None:
    apiserver_gates.drop_disabled_of_status(body.get("status"), old, context.gates)


def _check_claim(body: Body, old: Body | None, _context: Context) -> tuple[str, ...]:
    return apiserver_claims.claim_violations(body, old)


_EVENT_FIELDS = ("kind", "namespace", "name", "uid", "apiVersion", "resourceVersion", "fieldPath")

RESOURCES = {
    resource.plural: resource
    for resource in (
        Resource(
            kind="ResourceSlice",
            plural="resourceslices",
            group="resource.k8s.io",
            namespaced=False,
            fields={
                "spec.nodeName": ("spec", "nodeName"),
                "spec.driver": ("spec", "driver"),
                "spec.pool.name": ("spec", "pool", "name"),
            },
            fields_since={"spec.pool.name": "1.37"},
            counts_generation=True,
            prepare=_prepare_slice,
            check=_check_slice,
        ),
        Resource(
            kind="ResourceClaim",
            plural="resourceclaims",
            group="resource.k8s.io",
            namespaced=True,
            has_status=True,
            prepare=_prepare_claim,
            check=_check_claim,
            prepare_status=_prepare_claim_status,
            check_status=apiserver_claims.status_violations,
        ),
        Resource(
            kind="Node",
            plural="nodes",
            group="",
            namespaced=False,
            fields={"spec.unschedulable": ("spec", "unschedulable")},
            has_status=True,
        ),
        Resource(
            kind="Event",
            plural="events",
            group="",
            namespaced=True,
            fields={f"involvedObject.{key}": ("involvedObject", key) for key in _EVENT_FIELDS}
            | {"reason": ("reason",), "type": ("type",)},
        ),
    )
}
