# SPDX-License-Identifier: Apache-2.0
"""Every limit that resource.k8s.io/v1 puts on ResourceSlices, checked before a slice is sent. Pure.

One wrong device makes the API server refuse the whole slice, and one wrong slice makes the whole pool unusable for the
scheduler, so nothing is sent that this module objects to. Two levels:

- `slice_violations`: what the API server of Kubernetes 1.37 refuses about one slice (pkg/apis/resource/validation);
- `violations`: that for each slice of a pool, what the scheduler asks of a pool (dynamic-resource-allocation,
  structured/internal), and what the API accepts but the scheduler or a later release does not.

Input is raw JSON and may be anything; what has the wrong type is a violation too. Paths are spelled as the API server does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from driver import quantity
from driver.publish import limits_device, syntax

MAX_DEVICES = 128
MAX_DEVICES_WITH_ADVANCED_FEATURES = 64
"""ResourceSliceMaxDevicesWithAdvancedFeatures: as soon as one device has taints, consumed counters or a list attribute."""

MAX_COUNTER_SETS = 8

_NODE_FIELDS = ("nodeName", "nodeSelector", "allNodes", "perDeviceNodeSelection")


def violations(slices: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """What is wrong with these slices as one whole pool of one driver; empty when nothing is."""
    found = [
        f"{_name(body, index)}: {violation}"
        for index, body in enumerate(slices)
        for violation in (*slice_violations(body), *_beyond_the_api(body))
    ]
    # Rules between slices assume well-formed ones.
    return tuple(found) if found else tuple(_pool(slices))


def slice_violations(body: object, *, old: Mapping[str, Any] | None = None, fractions: bool = False) -> tuple[str, ...]:
    """What the API server refuses about one slice, on create or, with `old`, on update; empty when nothing is.

    `fractions`: the gate DRAFractionalCapacityRange, off by default in 1.37.
    """
    if not isinstance(body, Mapping):
        return ("must be an object",)
    spec = body.get("spec")
    found = list(_metadata(body.get("metadata")))
    if not isinstance(spec, Mapping):
        return (*found, "spec: Required value")
    old_spec = old.get("spec", {}) if old is not None else None
    return (*found, *_spec(spec, old_spec, fractions=fractions))


def _name(body: object, index: int) -> str:
    metadata = body.get("metadata") if isinstance(body, Mapping) else None
    name = metadata.get("name") or metadata.get("generateName") if isinstance(metadata, Mapping) else None
    return f"ResourceSlice {name}" if name else f"ResourceSlice {index}"


def _metadata(metadata: object) -> Iterator[str]:
    if not isinstance(metadata, Mapping):
        yield "metadata: Required value"
        return
    if ("name" in metadata or not metadata.get("generateName")) and not syntax.is_subdomain(metadata.get("name")):
        yield "metadata.name: must be a DNS subdomain of at most 253 characters"
    owners = metadata.get("ownerReferences") or []
    if not isinstance(owners, list):
        yield "metadata.ownerReferences: must be a list"
        return
    for index, owner in enumerate(owners):
        for key in ("apiVersion", "kind", "name", "uid"):
            if not isinstance(owner, Mapping) or not isinstance(owner.get(key), str) or not owner[key]:
                yield f"metadata.ownerReferences[{index}].{key}: must not be empty"


def _spec(spec: Mapping[str, Any], old: Mapping[str, Any] | None, *, fractions: bool) -> Iterator[str]:
    if not syntax.is_driver_name(spec.get("driver")):
        yield "spec.driver: must be a DNS subdomain of at most 63 characters"
    yield from _pool_reference(spec.get("pool"))
    if old is not None:
        if spec.get("driver") != old.get("driver"):
            yield "spec.driver: field is immutable"
        if _get(spec, "pool", "name") != _get(old, "pool", "name"):
            yield "spec.pool.name: field is immutable"
        if spec.get("nodeName") != old.get("nodeName"):
            yield "spec.nodeName: field is immutable"
    yield from _node_selection(spec)
    if spec.get("sharedCounters") is not None and spec.get("devices") is not None:
        yield "spec: only one of `sharedCounters` or `devices` is allowed"
    yield from _devices(spec, old, fractions=fractions)
    yield from syntax.unique_items(
        spec.get("sharedCounters"),
        limits_device.counter_set_violations,
        key="name",
        most=MAX_COUNTER_SETS,
        path="spec.sharedCounters",
    )


def _get(value: Mapping[str, Any], *keys: str) -> Any:
    for key in keys:
        nested = value.get(key)
        if not isinstance(nested, Mapping):
            return nested if key == keys[-1] else None
        value = nested
    return value


def _pool_reference(pool: object) -> Iterator[str]:
    if not isinstance(pool, Mapping):
        yield "spec.pool: Required value"
        return
    name = pool.get("name")
    if (
        not isinstance(name, str)
        or len(name) > syntax.MAX_SUBDOMAIN
        or not all(syntax.is_subdomain(part) for part in name.split("/"))
    ):
        yield "spec.pool.name: must be DNS subdomains joined by slashes, at most 253 characters"
    for key, least in (("resourceSliceCount", 1), ("generation", 0)):
        value = pool.get(key, 0)
        wrong = tuple(syntax.typed(value, int, f"spec.pool.{key}"))
        yield from wrong
        if not wrong and value < least:
            yield f"spec.pool.{key}: must be at least {least}"


def _node_selection(spec: Mapping[str, Any]) -> Iterator[str]:
    given = [key for key in _NODE_FIELDS if spec.get(key) is not None]
    if len(given) != 1:
        yield f"spec: exactly one of {', '.join(_NODE_FIELDS)} is required, not {len(given)}"
    if (node := spec.get("nodeName")) is not None and not syntax.is_subdomain(node):
        yield "spec.nodeName: must be the name of a node"
    for key in ("allNodes", "perDeviceNodeSelection"):
        if spec.get(key) not in (None, True):
            yield f"spec.{key}: must be either unset or set to true"
    selector = spec.get("nodeSelector")
    if selector is not None:
        terms = selector.get("nodeSelectorTerms") if isinstance(selector, Mapping) else None
        if not isinstance(terms, list) or len(terms) != 1:
            yield "spec.nodeSelector.nodeSelectorTerms: must have exactly one node selector term"


def _devices(spec: Mapping[str, Any], old: Mapping[str, Any] | None, *, fractions: bool) -> Iterator[str]:
    devices = spec.get("devices")
    listed = [device for device in devices if isinstance(device, Mapping)] if isinstance(devices, list) else []
    advanced = any(
        device.get("taints") or device.get("consumesCounters") or limits_device.has_lists(device) for device in listed
    )
    before = _get(old, "devices") if old is not None else None
    olds = {device.get("name"): device for device in before} if isinstance(before, list) else {}
    per_device = spec.get("perDeviceNodeSelection") is True
    yield from syntax.unique_items(
        devices,
        lambda device, path: limits_device.device_violations(
            device, olds.get(str(device.get("name"))), path, per_device=per_device, fractions=fractions
        ),
        key="name",
        most=MAX_DEVICES_WITH_ADVANCED_FEATURES if advanced else MAX_DEVICES,
        path="spec.devices",
    )


def _beyond_the_api(body: object) -> Iterator[str]:
    """What passes the API and then stops the scheduler or is refused by a later release."""
    spec = body.get("spec") if isinstance(body, Mapping) else None
    devices = spec.get("devices") if isinstance(spec, Mapping) else None
    if not isinstance(spec, Mapping) or not isinstance(devices, list):
        return
    for index, device in enumerate(devices):
        yield from _consumed_whole(device, f"spec.devices[{index}]")
        attributes = limits_device.attributes_of(device) if isinstance(device, Mapping) else {}
        for name, value in attributes.items():
            path = f"spec.devices[{index}].attributes[{name}]"
            if str(name).count("/") > 1:
                yield f"{path}: more than one slash"
            if str(name).startswith(f"{spec.get('driver')}/"):
                yield f"{path}: a name of the driver's own domain is written without it"
            version = value.get("version") if isinstance(value, Mapping) else None
            if version is not None and not syntax.is_semver(version):
                yield f"{path}.version: a number above 64 bits ends the allocation of every pod that looks at it"


def _consumed_whole(device: object, path: str) -> Iterator[str]:
    """The first claim for a device that many may have takes all of a capacity whose policy does not say what no request is."""
    if not isinstance(device, Mapping) or device.get("allowMultipleAllocations") is not True:
        return
    capacities = device.get("capacity")
    for name, capacity in capacities.items() if isinstance(capacities, Mapping) else ():
        if not isinstance(capacity, Mapping) or _get(capacity, "requestPolicy", "default") is None:
            yield f"{path}.capacity[{name}].requestPolicy.default: without it the first claim takes all"


def _pool(slices: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """One pool: same place and generation, as many slices as it says, no name twice, every counter there."""
    for keys in (("driver",), ("nodeName",), ("pool", "name"), ("pool", "generation")):
        if len({_get(body["spec"], *keys) for body in slices}) > 1:
            yield f"spec.{'.'.join(keys)} differs between the slices of the pool"
    for body in slices:
        if (said := _get(body["spec"], "pool", "resourceSliceCount")) != len(slices):
            yield f"spec.pool.resourceSliceCount is {said}, and the pool has {len(slices)} slices"
    devices = [device for body in slices for device in body["spec"].get("devices") or []]
    counters: dict[str, set[str]] = {}
    for counter_set in (entry for body in slices for entry in body["spec"].get("sharedCounters") or []):
        if counter_set["name"] in counters:
            yield f"counter set {counter_set['name']} is there twice"
        counters[counter_set["name"]] = set(counter_set["counters"])
        yield from _negative(counter_set["counters"], f"counter set {counter_set['name']}")
    seen: set[str] = set()
    for device in devices:
        if device["name"] in seen:
            yield f"device {device['name']} is there twice"
        seen.add(device["name"])
        for consumption in device.get("consumesCounters") or []:
            missing = set(consumption["counters"]) - counters.get(consumption["counterSet"], set())
            if missing:
                yield f"device {device['name']} consumes counters that no slice has: {', '.join(sorted(missing))}"
            yield from _negative(consumption["counters"], f"device {device['name']}")


def _negative(counters: Mapping[str, Any], whose: str) -> Iterator[str]:
    """A counter below zero passes the API, and then the scheduler allocates nothing of the pool that consumes any."""
    for name, counter in counters.items():
        if counter is not None and counter.get("value") is not None and quantity.parse(counter["value"]) < 0:
            yield f"{whose}: counter {name} is below zero"
