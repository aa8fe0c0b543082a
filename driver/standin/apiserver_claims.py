# SPDX-License-Identifier: Apache-2.0
"""What the stand-in API server checks of a ResourceClaim: its names, its requests, and what the scheduler writes. Pure.

Source: pkg/apis/resource/validation of Kubernetes 1.37. CEL expressions, derived attributes and status.devices are not
looked at: nothing here allocates.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from driver import quantity
from driver.publish import syntax

MAX_REQUESTS = 32
MAX_FIRST_AVAILABLE = 8
MAX_RESULTS = 32
MAX_ALLOCATION_CONFIGS = 64
MAX_RESERVED_FOR = 256
MAX_OPAQUE_BYTES = 10 * 1024

_UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", re.ASCII)


def claim_violations(claim: Mapping[str, Any], old: Mapping[str, Any] | None) -> tuple[str, ...]:
    """Of a claim on create, or on update of anything but its status."""
    if old is not None:
        return () if claim.get("spec") == old.get("spec") else ("spec: field is immutable",)
    spec = claim.get("spec")
    devices = spec.get("devices") if isinstance(spec, Mapping) else None
    if not isinstance(devices, Mapping):
        return ("spec.devices: must be an object",)
    return tuple(_requests(devices.get("requests")))


def status_violations(claim: Mapping[str, Any], old: Mapping[str, Any]) -> tuple[str, ...]:
    """Of an update of the status."""
    given = claim.get("status") or {}
    if not isinstance(given, Mapping):
        return ("status: must be an object",)
    return tuple(_status(given, old.get("status") or {}, set(_request_names(claim))))


def _items(value: object) -> list[Mapping[str, Any]]:
    return [item for item in value if isinstance(item, Mapping)] if isinstance(value, list) else []


def _requests(requests: object) -> Iterator[str]:
    if requests is None:
        return
    if not isinstance(requests, list) or len(requests) > MAX_REQUESTS:
        yield f"spec.devices.requests: must be a list of at most {MAX_REQUESTS}"
        return
    names: set[str] = set()
    for index, request in enumerate(requests):
        path = f"spec.devices.requests[{index}]"
        if not isinstance(request, Mapping):
            yield f"{path}: must be an object"
            continue
        if not syntax.is_label(request.get("name")):
            yield f"{path}.name: must be a DNS label"
        elif request["name"] in names:
            yield f"{path}.name: Duplicate value"
        names.add(str(request.get("name")))
        exactly, available = request.get("exactly"), request.get("firstAvailable")
        if (exactly is None) == (not available):
            yield f"{path}: exactly one of `exactly` or `firstAvailable` is required"
        elif exactly is not None:
            yield from _exact(exactly, f"{path}.exactly")
        elif not isinstance(available, list) or len(available) > MAX_FIRST_AVAILABLE:
            yield f"{path}.firstAvailable: must be a list of at most {MAX_FIRST_AVAILABLE}"
        else:
            for place, subrequest in enumerate(available):
                yield from _exact(subrequest, f"{path}.firstAvailable[{place}]")


def _exact(request: object, path: str) -> Iterator[str]:
    if not isinstance(request, Mapping):
        yield f"{path}: must be an object"
    elif not syntax.is_subdomain(request.get("deviceClassName")):
        yield f"{path}.deviceClassName: Required value"
    elif (capacity := request.get("capacity")) is not None:
        if isinstance(capacity, Mapping):
            yield from _quantities(capacity.get("requests"), f"{path}.capacity.requests")
        else:
            yield f"{path}.capacity: must be an object"


def _request_names(claim: Mapping[str, Any]) -> Iterator[str]:
    for request in _items((claim.get("spec") or {}).get("devices", {}).get("requests")):
        name = str(request.get("name"))
        subrequests = _items(request.get("firstAvailable"))
        yield from (f"{name}/{subrequest.get('name')}" for subrequest in subrequests)
        if not subrequests:
            yield name


def _status(given: Mapping[str, Any], old: Mapping[str, Any], requests: set[str]) -> Iterator[str]:
    allocation, reserved = given.get("allocation"), given.get("reservedFor") or []
    if not isinstance(reserved, list) or len(reserved) > MAX_RESERVED_FOR:
        yield f"status.reservedFor: must be a list of at most {MAX_RESERVED_FOR}"
        return
    for index, consumer in enumerate(reserved):
        if not isinstance(consumer, Mapping) or not all(consumer.get(key) for key in ("resource", "name", "uid")):
            yield f"status.reservedFor[{index}]: resource, name and uid are required"
    if reserved and allocation is None:
        yield "status.reservedFor: Forbidden: may not be specified when `allocated` is not set"
    if allocation is None:
        return
    if old.get("allocation") is not None:
        if allocation != old["allocation"]:
            yield "status.allocation: field is immutable"
        return
    yield from _allocation(allocation, requests)


def _allocation(allocation: object, requests: set[str]) -> Iterator[str]:
    devices = allocation.get("devices") if isinstance(allocation, Mapping) else None
    if devices is None:
        return
    if not isinstance(devices, Mapping):
        yield "status.allocation.devices: must be an object"
        return
    results, configs = devices.get("results") or [], devices.get("config") or []
    if not isinstance(results, list) or len(results) > MAX_RESULTS:
        yield f"status.allocation.devices.results: must be a list of at most {MAX_RESULTS}"
        return
    for index, result in enumerate(results):
        yield from _result(result, requests, f"status.allocation.devices.results[{index}]")
    if not isinstance(configs, list) or len(configs) > MAX_ALLOCATION_CONFIGS:
        yield f"status.allocation.devices.config: must be a list of at most {MAX_ALLOCATION_CONFIGS}"
        return
    for index, config in enumerate(configs):
        yield from _config(config, f"status.allocation.devices.config[{index}]")


def _result(result: object, requests: set[str], path: str) -> Iterator[str]:
    if not isinstance(result, Mapping):
        yield f"{path}: must be an object"
        return
    if result.get("request") not in requests:
        yield f"{path}.request: must be the name of a request in the claim"
    if not syntax.is_driver_name(result.get("driver")):
        yield f"{path}.driver: must be a DNS subdomain"
    if not all(syntax.is_subdomain(part) for part in str(result.get("pool") or "").split("/")):
        yield f"{path}.pool: must be DNS subdomains joined by slashes"
    if not syntax.is_label(result.get("device")):
        yield f"{path}.device: must be a DNS label"
    share = result.get("shareID")
    if share is not None and not (isinstance(share, str) and _UUID.fullmatch(share)):
        yield f"{path}.shareID: must be a lower case UUID"
    yield from _quantities(result.get("consumedCapacity"), f"{path}.consumedCapacity")


def _quantities(amounts: object, path: str) -> Iterator[str]:
    if amounts is None:
        return
    if not isinstance(amounts, Mapping):
        yield f"{path}: must be an object"
        return
    for name, amount in amounts.items():
        try:
            quantity.parse(amount)
        except ValueError as error:
            yield f"{path}[{name}]: {error}"


def _config(config: object, path: str) -> Iterator[str]:
    if not isinstance(config, Mapping) or config.get("source") not in ("FromClass", "FromClaim"):
        yield f"{path}.source: must be FromClass or FromClaim"
        return
    opaque = config.get("opaque")
    if not isinstance(opaque, Mapping):
        yield f"{path}.opaque: Required value"
    elif not isinstance(opaque.get("parameters"), Mapping):
        yield f"{path}.opaque.parameters: must be a valid JSON object"
    elif len(json.dumps(opaque["parameters"])) > MAX_OPAQUE_BYTES:
        yield f"{path}.opaque.parameters: Too long: may not be more than {MAX_OPAQUE_BYTES} bytes"
