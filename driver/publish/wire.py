# SPDX-License-Identifier: Apache-2.0
"""Devices as the API spells them, and back, and whether two such spellings mean the same. Pure."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable, Mapping
from typing import Any

from discovery import address
from driver import quantity
from driver.publish import attributes, counters, devices, portions
from driver.sharing import rules

ABSENT_EFFECT = "NoSchedule"
_QUANTITIES = frozenset({"value", "default", "min", "max", "step"})
"""Fields of capacities, request policies and counters."""

_TIMES = frozenset({"timeAdded"})


def absent_key(driver_name: str) -> str:
    """The taint of a device that cannot be used now."""
    return f"{driver_name}/absent"


def device_to_json(device: devices.Device, *, driver_name: str) -> dict[str, Any]:
    """A Device of a ResourceSlice."""
    body: dict[str, Any] = {
        "name": device.name,
        "attributes": {name: _value_to_json(value) for name, value in sorted(device.attributes.items())},
        "capacity": {name: {"value": _spell(name, value)} for name, value in sorted(device.capacity.items())},
    }
    if device.terms is not None:
        body["allowMultipleAllocations"] = True
        for name, policy in portions.policies_to_json(device.terms).items():
            body["capacity"][name]["requestPolicy"] = policy
    if device.absent:
        body["taints"] = [{"key": absent_key(driver_name), "effect": ABSENT_EFFECT}]
    if device.consumes is not None:
        consumed = {"counterSet": device.consumes.counter_set, "counters": _counters_to_json(device.consumes.counters)}
        body["consumesCounters"] = [consumed]
    return body


def counter_sets_to_json(listed: Iterable[devices.Device]) -> list[dict[str, Any]]:
    """The CounterSets that the devices consume, in order of the first that does."""
    sets = {device.consumes.counter_set: device.consumes.totals for device in listed if device.consumes is not None}
    return [{"name": name, "counters": _counters_to_json(totals)} for name, totals in sets.items()]


def published_to_json(device: devices.Device) -> dict[str, Any]:
    """What is kept of a device that was published, so that it can stay listed when it cannot be read any more."""
    body = device_to_json(device, driver_name="")
    kept = {"address": str(device.address), "attributes": body["attributes"], "capacity": body["capacity"]}
    if device.nic_is_rdma:
        kept["nicIsRdma"] = True
    if (consumes := device.consumes) is not None:
        kept["consumes"] = {
            "counterSet": consumes.counter_set,
            "counters": dict(sorted(consumes.counters.items())),
            "totals": dict(sorted(consumes.totals.items())),
        }
    if device.uncounted:
        kept["uncounted"] = True
    if device.mode is not rules.Mode.EXCLUSIVE:
        kept["mode"] = device.mode.value
    if device.shares is not None and device.enforcement is not None:
        kept["shares"] = portions.shares_to_json(device.shares)
        kept["enforcement"] = portions.enforcement_to_json(device.enforcement)
    return kept


def published_from_json(name: str, body: object) -> devices.Device:
    """The device that `published_to_json` kept. Raises ValueError for anything else."""
    if not isinstance(body, Mapping):
        raise ValueError(f"device {name}: no object")  # noqa: TRY004 - bad data, not a bad call
    try:
        # What was given out in shares has a policy that says in which.
        divided = attributes.SHARES in body["capacity"]
        shared = divided or body.get("shares") is not None
        return devices.Device(
            name=name,
            address=address.parse(body["address"]),
            attributes={str(key): _value_from_json(value) for key, value in body["attributes"].items()},
            capacity={str(key): int(quantity.parse(value["value"])) for key, value in body["capacity"].items()},
            nic_is_rdma=body.get("nicIsRdma") is True,
            consumes=_consumption_from_json(body.get("consumes")),
            uncounted=body.get("uncounted") is True,
            mode=rules.Mode(body.get("mode", rules.Mode.EXCLUSIVE)),
            shares=portions.shares_from_json(body["shares"]) if shared else None,
            enforcement=portions.enforcement_from_json(body["enforcement"]) if shared else None,
            terms=portions.terms_from_json(body["capacity"]) if divided else None,
        )
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"device {name}: {error}") from error


def equal(one: object, other: object) -> bool:
    """Whether two pieces of API JSON mean the same: quantities as numbers, times as instants, empty and missing alike."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return all(_equal_field(key, one.get(key), other.get(key)) for key in one.keys() | other.keys())
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(equal(a, b) for a, b in zip(one, other, strict=True))
    if _empty(one) or _empty(other):
        return _empty(one) and _empty(other)
    return type(one) is type(other) and one == other


def _equal_field(key: str, one: object, other: object) -> bool:
    if key in _QUANTITIES and one is not None and other is not None:
        try:
            return quantity.parse(one) == quantity.parse(other)
        except ValueError:
            return one == other
    if key in _TIMES and one is not None and other is not None:
        first, second = _instant(one), _instant(other)
        return first == second if first is not None and second is not None else one == other
    return equal(one, other)


def _instant(text: object) -> dt.datetime | None:
    """Whole seconds, as the API keeps them."""
    try:
        moment = dt.datetime.fromisoformat(str(text))
    except ValueError:
        return None
    return moment.replace(microsecond=0).astimezone(dt.UTC) if moment.tzinfo is not None else None


def _empty(value: object) -> bool:
    return value is None or (isinstance(value, list | Mapping) and not value)


def _spell(name: str, value: int) -> str:
    return quantity.format_bytes(value) if name == attributes.MEMORY else str(value)


def _counters_to_json(amounts: counters.Counters) -> dict[str, Any]:
    return {name: {"value": str(amount)} for name, amount in sorted(amounts.items())}


def _consumption_from_json(body: Mapping[str, Any] | None) -> counters.Consumption | None:
    if body is None:
        return None
    consumes = counters.Consumption(
        counter_set=str(body["counterSet"]),
        counters={str(name): _amount(amount) for name, amount in body["counters"].items()},
        totals={str(name): _amount(amount) for name, amount in body["totals"].items()},
    )
    if not consumes.counters or consumes.counters.keys() - consumes.totals.keys():
        raise ValueError(f"{sorted(consumes.counters)} are not counters of {sorted(consumes.totals)}")
    return consumes


def _amount(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{value!r} is no number of a counter")
    return value


def _value_to_json(value: devices.AttributeValue) -> dict[str, Any]:
    match value:
        case bool():
            return {"bool": value}
        case int():
            return {"int": value}
        case str():
            return {"string": value}
        case devices.Version(text):
            return {"version": text}
        case tuple():
            return {"ints" if isinstance(value[0], int) else "strings": list(value)}


def _value_from_json(value: Mapping[str, Any]) -> devices.AttributeValue:
    ((kind, given),) = value.items()
    match kind, given:
        case "bool", bool():
            return given
        case "int", int():
            return given
        case "string", str():
            return given
        case "version", str():
            return devices.Version(given)
        case "ints", [int(), *_]:
            return tuple(int(item) for item in given)
        case "strings", [str(), *_]:
            return tuple(str(item) for item in given)
    raise ValueError(f"{value!r} is no attribute")
