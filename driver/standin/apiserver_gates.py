# SPDX-License-Identifier: Apache-2.0
"""Feature gates of the stand-in API server, by the Kubernetes version it stands in for, and the fields they drop.

A field whose gate is off vanishes from what is stored, without a word, unless the stored object already uses the feature
(pkg/registry/resource: resourceslice/strategy.go, dropDisabledFields, and resourceclaim/strategy.go). Defaults: pkg/features/kube_features.go.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

VERSIONS = ("1.35", "1.36", "1.37")

_ON_FROM = {
    "DRADeviceTaints": "1.36",
    "DRAPartitionableDevices": "1.36",
    "DRAConsumableCapacity": "1.36",
    "DRADeviceBindingConditions": "1.36",
}
_ALPHA = (
    "DRAListTypeAttributes",
    "DRANodeAllocatableResources",
    "DRADeviceCompatibilityGroups",
    "DRAPartitionableDevicesType",
    "DRAOptionalNodeOperations",
    "DRAFractionalCapacityRange",
)


def gates(version: str, overrides: Mapping[str, bool]) -> dict[str, bool]:
    """Which gates are on. Raises ValueError for an unknown version or gate."""
    if version not in VERSIONS:
        raise ValueError(f"Kubernetes {version} is not one of {', '.join(VERSIONS)}")
    known = {gate: since <= version for gate, since in _ON_FROM.items()} | dict.fromkeys(_ALPHA, False)
    if unknown := set(overrides) - set(known):
        raise ValueError(f"unknown feature gates: {', '.join(sorted(unknown))}")
    return known | dict(overrides)


@dataclass(frozen=True, slots=True)
class _Feature:
    """The fields of one gate: of the spec, of each device, and one inside each attribute, capacity or consumption."""

    spec: tuple[str, ...] = ()
    device: tuple[str, ...] = ()
    nested: Callable[[dict[str, Any]], Iterator[tuple[dict[str, Any], tuple[str, ...]]]] | None = None

    def places(self, spec: dict[str, Any]) -> Iterator[tuple[dict[str, Any], str]]:
        """Every place where a field of this feature is used."""
        devices = _objects(spec.get("devices"))
        inner = [pair for device in devices for pair in self.nested(device)] if self.nested is not None else []
        for holder, fields in [(spec, self.spec), *((device, self.device) for device in devices), *inner]:
            yield from ((holder, field) for field in fields if holder.get(field) is not None)


_Places = Iterator[tuple[dict[str, Any], tuple[str, ...]]]


def _objects(value: object) -> list[dict[str, Any]]:
    """The objects in a map or list; none in anything else, as what was sent may be anything."""
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [item for item in items if isinstance(item, dict)]


def _list_values(device: dict[str, Any]) -> _Places:
    yield from ((value, ("bools", "ints", "strings", "versions")) for value in _objects(device.get("attributes")))


def _policies(device: dict[str, Any]) -> _Places:
    yield from ((value, ("requestPolicy",)) for value in _objects(device.get("capacity")))


def _groups(device: dict[str, Any]) -> _Places:
    yield from ((value, ("compatibilityGroups",)) for value in _objects(device.get("consumesCounters")))


_FEATURES = {
    "DRADeviceTaints": _Feature(device=("taints",)),
    "DRAPartitionableDevices": _Feature(
        spec=("sharedCounters", "perDeviceNodeSelection"),
        device=("consumesCounters", "nodeName", "nodeSelector", "allNodes"),
    ),
    "DRADeviceBindingConditions": _Feature(device=("bindingConditions", "bindingFailureConditions", "bindsToNode")),
    "DRAConsumableCapacity": _Feature(device=("allowMultipleAllocations",), nested=_policies),
    "DRADeviceCompatibilityGroups": _Feature(nested=_groups),
    "DRANodeAllocatableResources": _Feature(device=("nodeAllocatableResources",)),
    "DRAListTypeAttributes": _Feature(nested=_list_values),
    "DRAPartitionableDevicesType": _Feature(spec=("partitionTypeAttribute",)),
    "DRAOptionalNodeOperations": _Feature(spec=("skipNodeOperations",)),
}


def drop_disabled(spec: dict[str, Any], old: dict[str, Any] | None, enabled: Mapping[str, bool]) -> None:
    """Take the fields of disabled features out of a slice's spec, in place."""
    for gate, feature in _FEATURES.items():
        in_use = old is not None and next(feature.places(old), None) is not None
        if not enabled[gate] and not in_use:
            for holder, field in list(feature.places(spec)):
                del holder[field]


def drop_disabled_of_claim(spec: object, old: object, enabled: Mapping[str, bool]) -> None:
    """Take out of a claim's spec what asks for a part of a device, in place."""
    if not enabled["DRAConsumableCapacity"] and next(_portions_asked(old), None) is None:
        for holder, field in list(_portions_asked(spec)):
            del holder[field]


def drop_disabled_of_status(status: object, old: Mapping[str, Any], enabled: Mapping[str, bool]) -> None:
    """Take out of a claim's status what it has of a device, in place. `old`: the claim."""
    used = next(_portions_asked(old.get("spec")), None) or next(_portions_given(old.get("status")), None)
    if not enabled["DRAConsumableCapacity"] and used is None:
        for holder, field in list(_portions_given(status)):
            del holder[field]


_Fields = Iterator[tuple[dict[str, Any], str]]


def _portions_asked(spec: object) -> _Fields:
    devices = _object(_object(spec).get("devices"))
    holders = [(constraint, "distinctAttribute") for constraint in _objects(devices.get("constraints"))]
    for request in _objects(devices.get("requests")):
        exacts = [_object(request.get("exactly")), *_objects(request.get("firstAvailable"))]
        holders += [(exact, "capacity") for exact in exacts]
    yield from ((holder, field) for holder, field in holders if holder.get(field) is not None)


def _portions_given(status: object) -> _Fields:
    allocated = _object(_object(_object(status).get("allocation")).get("devices"))
    holders = [
        (result, field) for result in _objects(allocated.get("results")) for field in ("shareID", "consumedCapacity")
    ]
    holders += [(device, "shareID") for device in _objects(_object(status).get("devices"))]
    yield from ((holder, field) for holder, field in holders if holder.get(field) is not None)


def _object(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
