# SPDX-License-Identifier: Apache-2.0
"""The rules for one device of a ResourceSlice and for counters. Pure.

Source: pkg/apis/resource/validation of Kubernetes 1.37, validateDevice and below.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from driver.publish import limits_capacity, syntax

MAX_ATTRIBUTES_AND_CAPACITIES = 32
MAX_ATTRIBUTE_VALUES = 48
MAX_TAINTS = 16
MAX_COUNTERS = 32
MAX_COUNTER_CONSUMPTIONS = 2
MAX_COMPATIBILITY_GROUPS = 2
MAX_BINDING_CONDITIONS = 4

_SCALARS = ("bool", "int", "string", "version")
_LISTS = ("bools", "ints", "strings", "versions")
_EFFECTS = ("None", "NoSchedule", "NoExecute")


def device_violations(
    device: Mapping[str, Any], old: Mapping[str, Any] | None, path: str, *, per_device: bool, fractions: bool
) -> Iterator[str]:
    """What is wrong with one device; `old` is the device of the same name in the stored slice, on update."""
    if not syntax.is_label(device.get("name")):
        yield f"{path}.name: must be a DNS label of at most 63 characters"
    attributes, capacity = device.get("attributes") or {}, device.get("capacity") or {}
    if not isinstance(attributes, Mapping) or not isinstance(capacity, Mapping):
        yield f"{path}: attributes and capacity must be objects"
        return
    if (entries := len(attributes) + len(capacity)) > MAX_ATTRIBUTES_AND_CAPACITIES:
        yield f"{path}: the total number of attributes and capacities, {entries}, must not exceed {MAX_ATTRIBUTES_AND_CAPACITIES}"
    if (count := _count_values(attributes)) > MAX_ATTRIBUTE_VALUES:
        yield f"{path}: the total number of attribute values, {count}, must not exceed {MAX_ATTRIBUTE_VALUES}"
    for name, value in attributes.items():
        yield from _qualified_name(name, f"{path}.attributes")
        yield from _attribute(value, f"{path}.attributes[{name}]")
    # An unchanged capacity or taint list of a device of the same name is not looked at again on update.
    if old is None or (old.get("capacity") or {}) != capacity:
        shareable = device.get("allowMultipleAllocations") is True
        for name, value in capacity.items():
            yield from _qualified_name(name, f"{path}.capacity")
            yield from limits_capacity.capacity_violations(
                value, f"{path}.capacity[{name}]", shareable=shareable, fractions=fractions
            )
    if old is None or (old.get("taints") or []) != (device.get("taints") or []):
        yield from _taints(device.get("taints"), f"{path}.taints")
    yield from syntax.unique_items(
        device.get("consumesCounters"),
        _consumption,
        key="counterSet",
        most=MAX_COUNTER_CONSUMPTIONS,
        path=f"{path}.consumesCounters",
    )
    own = [key for key in ("nodeName", "nodeSelector", "allNodes") if device.get(key) is not None]
    if len(own) != (1 if per_device else 0):
        yield f"{path}: nodeName, nodeSelector and allNodes: one is required with perDeviceNodeSelection, none allowed without"
    yield from _binding_conditions(device, path)


def attributes_of(device: Mapping[str, Any]) -> Mapping[str, Any]:
    """The attributes of a device; none where they are no object."""
    attributes = device.get("attributes")
    return attributes if isinstance(attributes, Mapping) else {}


def has_lists(device: Mapping[str, Any]) -> bool:
    """Whether a device has an attribute of list form."""
    return any(
        isinstance(value, Mapping) and any(value.get(key) is not None for key in _LISTS)
        for value in attributes_of(device).values()
    )


def _count_values(attributes: Mapping[str, Any]) -> int:
    count = 0
    for value in attributes.values():
        lists = [value[key] for key in _LISTS if isinstance(value.get(key), list)] if isinstance(value, Mapping) else []
        count += sum(map(len, lists)) or 1
    return count


def _qualified_name(name: object, path: str) -> Iterator[str]:
    """One C identifier, or a domain and one. The API lets `a/b/c` pass; `_beyond_the_api` does not."""
    parts = str(name).split("/")
    if len(parts) > 2:
        return
    domain, identifier = parts if len(parts) == 2 else (None, parts[0])
    if domain is not None and not syntax.is_driver_name(domain):
        yield f"{path}: {name!r}: the domain must be a DNS subdomain of at most 63 characters"
    if not syntax.is_c_identifier(identifier):
        yield f"{path}: {name!r}: the name must be a C identifier of at most {syntax.MAX_ID} characters"


def _attribute(value: object, path: str) -> Iterator[str]:
    if not isinstance(value, Mapping):
        yield f"{path}: must be an object"
        return
    given = [key for key in (*_SCALARS, *_LISTS) if value.get(key) is not None]
    if len(given) != 1:
        yield f"{path}: exactly one value must be specified"
    for key in given:
        if key in _SCALARS:
            yield from _attribute_value(value[key], key, f"{path}.{key}")
        elif not isinstance(value[key], list) or not value[key]:
            yield f"{path}.{key}: must be a list and not empty"
        else:
            for index, item in enumerate(value[key]):
                yield from _attribute_value(item, key[:-1], f"{path}.{key}[{index}]")


def _attribute_value(value: object, kind: str, path: str) -> Iterator[str]:
    yield from syntax.typed(value, {"bool": bool, "int": int}.get(kind, str), path)
    if not isinstance(value, str) or kind not in {"string", "version"}:
        return
    if len(value.encode("utf-8", "surrogatepass")) > syntax.MAX_VALUE_BYTES:
        yield f"{path}: Too long: may not be more than {syntax.MAX_VALUE_BYTES} bytes"
    elif kind == "version" and not syntax.is_storable_semver(value):
        yield f"{path}: {value!r} must be a string compatible with semver.org spec 2.0.0"


def _taints(taints: object, path: str) -> Iterator[str]:
    if taints is None:
        return
    if not isinstance(taints, list) or len(taints) > MAX_TAINTS:
        yield f"{path}: must be a list of at most {MAX_TAINTS}"
        return
    for index, taint in enumerate(taints):
        if not isinstance(taint, Mapping):
            yield f"{path}[{index}]: must be an object"
            continue
        if not syntax.is_label_name(taint.get("key")):
            yield f"{path}[{index}].key: must be a label name"
        if not syntax.is_label_value(taint.get("value") or ""):
            yield f"{path}[{index}].value: must be a label value"
        if taint.get("effect") not in _EFFECTS:
            yield f"{path}[{index}].effect: must be one of {', '.join(_EFFECTS)}"


def counter_set_violations(counter_set: Mapping[str, Any], path: str) -> Iterator[str]:
    """What is wrong with one counter set."""
    if not syntax.is_label(counter_set.get("name")):
        yield f"{path}.name: must be a DNS label"
    yield from _counter_map(counter_set.get("counters"), f"{path}.counters")


def _consumption(consumption: Mapping[str, Any], path: str) -> Iterator[str]:
    if not syntax.is_label(consumption.get("counterSet")):
        yield f"{path}.counterSet: must be a DNS label"
    yield from _counter_map(consumption.get("counters"), f"{path}.counters")
    groups = consumption.get("compatibilityGroups") or []
    if (
        not isinstance(groups, list)
        or len(groups) > MAX_COMPATIBILITY_GROUPS
        or len(set(map(str, groups))) != len(groups)
    ):
        yield f"{path}.compatibilityGroups: must be a list of at most {MAX_COMPATIBILITY_GROUPS}, unique"


def _counter_map(counters: object, path: str) -> Iterator[str]:
    if not isinstance(counters, Mapping) or not counters:
        yield f"{path}: Required value"
        return
    if len(counters) > MAX_COUNTERS:
        yield f"{path}: Too many: {len(counters)}: must have at most {MAX_COUNTERS} items"
        return
    for name, counter in counters.items():
        if not syntax.is_label(name):
            yield f"{path}: {name!r} must be a DNS label"
        # What is not there is 0 to the API.
        if counter is None or (isinstance(counter, Mapping) and counter.get("value") is None):
            continue
        if not isinstance(counter, Mapping):
            yield f"{path}[{name}]: must be an object"
            continue
        _, wrong = limits_capacity.read_quantity(counter["value"], f"{path}[{name}].value")
        yield from wrong


def _binding_conditions(device: Mapping[str, Any], path: str) -> Iterator[str]:
    lists = [device.get(key) or [] for key in ("bindingConditions", "bindingFailureConditions")]
    for key, conditions in zip(("bindingConditions", "bindingFailureConditions"), lists, strict=True):
        if not isinstance(conditions, list) or len(conditions) > MAX_BINDING_CONDITIONS:
            yield f"{path}.{key}: must be a list of at most {MAX_BINDING_CONDITIONS}"
            return
        if not all(syntax.is_label_name(condition) for condition in conditions):
            yield f"{path}.{key}: must be label names"
            return
    if bool(lists[0]) != bool(lists[1]):
        yield f"{path}: bindingConditions and bindingFailureConditions need each other"
    if len({*lists[0], *lists[1]}) != len(lists[0]) + len(lists[1]):
        yield f"{path}: a binding condition must be there once"
