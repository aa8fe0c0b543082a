# SPDX-License-Identifier: Apache-2.0
"""From a ResourceClaim as the API server gives it to what it allocates of this driver on this node. Pure.

A claim is written by users, its allocation by the scheduler, and both reach us as arbitrary JSON: nothing is believed
before its type is seen, nothing is shown in a message before it is cut, and whatever is wrong is a ClaimError.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from driver import values
from driver.errors import ClaimError
from driver.prepare import claimconfig, ledger

MEMORY, COMPUTE = "memory", "compute"
"""Capacities of a device that is shared."""

RESULTS_MAX_SIZE = 32
"""AllocationResultsMaxSize of resource.k8s.io/v1: results of all drivers together."""

CONFIG_MAX_SIZE = 64
"""Entries of allocation.devices.config: 32 of the claim and 32 of its classes."""

CONSUMERS_MAX_SIZE = 256
"""ResourceClaimReservedForMaxSize of resource.k8s.io/v1."""

REQUESTS_MAX_SIZE = 32
"""DeviceRequestsMaxSize of resource.k8s.io/v1, and of alternatives FirstAvailableDeviceRequestMaxSize, which is less."""

_UID = re.compile(r"[0-9A-Za-z][0-9A-Za-z-]{0,62}")
"""UIDs and share ids become parts of file names and CDI device names. Kubernetes makes lower-case UUIDs."""

_NAME_MAX_LENGTH = 253
_SHOWN_MAX_LENGTH = 80
_KINDS = {bool: "a boolean", int: "a number", float: "a number", list: "a list", dict: "an object"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Consumer:
    """Somebody for whom a claim is reserved. `kind` is the resource's name, such as `pods`; `pod`: whether it is a pod."""

    kind: str
    name: str
    uid: str
    pod: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    """What a claim allocates of this driver on this node, in the scheduler's order; at least one result. `configs` has the
    configuration of each result, nothing where there is none at all. Only where there are shares it is read for whom the
    claim is reserved (`consumers`), and which results did not ask for an amount of compute (`unasked`, by request).
    """

    claim: values.ClaimRef
    results: tuple[ledger.Result, ...]
    configs: tuple[claimconfig.ClaimConfig, ...] = ()
    consumers: tuple[Consumer, ...] = ()
    unasked: frozenset[str] = frozenset()

    def config(self, number: int) -> claimconfig.ClaimConfig:
        """The configuration of a result."""
        return self.configs[number] if self.configs else claimconfig.NOTHING


def acceptable_uid(uid: str) -> bool:
    """Whether a claim UID can be part of a file name and of a CDI device name."""
    return _UID.fullmatch(uid) is not None


def parse_allocation(claim: Any, *, ref: values.ClaimRef, driver: str, pool: str) -> Allocation:
    """The allocation of `ref` as the API server's answer tells it. `pool` is the only pool that this node has.

    Raises ClaimError: another UID, no or half an allocation, one that is not for this driver and node, or opaque
    configuration for us that cannot be read.
    """
    document = _Reader(claim, ref=ref)
    uid = document.child("metadata").text("uid")
    if uid != ref.uid:
        raise ClaimError(
            f"{ref} was deleted and made again with UID {shown(uid)}; the pod has to be deleted and made again as well"
        )
    status = document.optional_child("status")
    allocation = status.optional_child("allocation")
    if allocation.missing:
        raise ClaimError(
            f"{ref} is not allocated (any more): status.allocation is empty; the pod has to be scheduled again"
        )
    devices = allocation.optional_child("devices")
    results = _results(devices.items("results", limit=RESULTS_MAX_SIZE), driver=driver)
    if not results:
        raise ClaimError(f"{ref} allocates no device of driver {driver}; the pod has to be scheduled again")
    for result in results:
        if result.pool != pool:
            raise ClaimError(
                f"{ref} allocates device {shown(result.device)} of pool {shown(result.pool)}, but this node has only "
                f"pool {shown(pool)}; the pod runs on another node than it was scheduled to"
            )
    configs = _configs(devices.items("config", limit=CONFIG_MAX_SIZE), results, ref=ref, driver=driver)
    shared = any(result.share_id is not None and not result.admin for result in results)
    return Allocation(
        claim=ref,
        results=results,
        configs=configs,
        consumers=_consumers(status) if shared else (),
        unasked=_unasked(document.optional_child("spec")) if shared else frozenset(),
    )


def why_released(claim: Any, *, ref: values.ClaimRef) -> str | None:
    """Why what the API server answers for a prepared claim means that it needs no devices any more; None where it needs
    them, and where the answer cannot be read.
    """
    metadata = claim.get("metadata") if isinstance(claim, dict) else None
    uid = metadata.get("uid") if isinstance(metadata, dict) else None
    if not isinstance(claim, dict) or not isinstance(uid, str):
        return None
    if uid != ref.uid:
        return f"was replaced by one with UID {shown(uid)}"
    status = claim.get("status", {})
    return (
        "is not allocated any more"
        if status is None or (isinstance(status, dict) and not status.get("allocation"))
        else None
    )


def shown(value: Any) -> str:
    """A value for a message: short text in quotes, anything else by its kind."""
    if isinstance(value, str):
        return repr(value) if len(value) <= _SHOWN_MAX_LENGTH else repr(value[:_SHOWN_MAX_LENGTH]) + "..."
    return "missing" if value is None else _KINDS.get(type(value), "something else")


class _Reader:
    """A JSON object of a claim, read field by field. Where it stands is only put into words for a message."""

    __slots__ = ("_above", "_fields", "_key", "_ref", "missing")

    def __init__(self, value: Any, *, ref: values.ClaimRef, above: _Reader | None = None, key: str | int = "") -> None:
        self._ref = ref
        self._above = above
        self._key = key
        self.missing = value is None
        if value is not None and not isinstance(value, dict):
            raise self._error(value, "an object")
        self._fields: Mapping[str, Any] = value or {}

    @property
    def place(self) -> str:
        """Where it stands: `status.allocation.devices.results[0]`, nothing for the claim itself."""
        if self._above is None:
            return ""
        above = self._above.place
        if isinstance(self._key, int):
            return f"{above}[{self._key}]"
        return f"{above}.{self._key}" if above else self._key

    def wrong(self, field: str, wanted: str) -> ClaimError:
        """The error for a field that is something else than `wanted`."""
        return _Reader(None, ref=self._ref, above=self, key=field)._error(self._fields.get(field), wanted)  # noqa: SLF001

    def child(self, field: str) -> _Reader:
        value = self._fields.get(field)
        if value is None:
            raise self.wrong(field, "an object")
        return _Reader(value, ref=self._ref, above=self, key=field)

    def optional_child(self, field: str) -> _Reader:
        return _Reader(self._fields.get(field), ref=self._ref, above=self, key=field)

    def items(self, field: str, *, limit: int) -> list[_Reader]:
        value = self._fields.get(field)
        if value is None:
            return []
        if not isinstance(value, list):
            raise self.wrong(field, "a list")
        if len(value) > limit:
            raise self.wrong(field, f"a list of at most {limit}")
        above = _Reader(None, ref=self._ref, above=self, key=field)
        return [_Reader(entry, ref=self._ref, above=above, key=number) for number, entry in enumerate(value)]

    def text(self, field: str) -> str:
        value = self._fields.get(field)
        if not isinstance(value, str) or not value:
            raise self.wrong(field, "text")
        return value

    def name(self, field: str) -> str:
        value = self.text(field)
        if len(value) > _NAME_MAX_LENGTH or not value.isascii() or not value.isprintable():
            raise self.wrong(field, "a name")
        return value

    def optional_text(self, field: str) -> str | None:
        return None if self._fields.get(field) is None else self.text(field)

    def flag(self, field: str) -> bool:
        value = self._fields.get(field)
        if value is not None and not isinstance(value, bool):
            raise self.wrong(field, "a boolean")
        return bool(value)

    def texts(self, field: str) -> Sequence[str]:
        value = self._fields.get(field)
        if value is None:
            return ()
        if not isinstance(value, list) or not all(isinstance(entry, str) for entry in value):
            raise self.wrong(field, "a list of text")
        return value

    def quantities(self, field: str) -> Mapping[str, str]:
        """A map of resource.Quantity: text in canonical JSON."""
        value = self._fields.get(field)
        if value is None:
            return _NO_QUANTITIES
        if not isinstance(value, dict):
            raise self.wrong(field, "an object")
        for name, amount in value.items():
            if not isinstance(amount, str) or len(name) + len(amount) > _NAME_MAX_LENGTH:
                raise self.wrong(field, "an object of quantities")
        return value

    def raw(self, field: str) -> Any:
        return self._fields.get(field)

    def _error(self, value: Any, wanted: str) -> ClaimError:
        return ClaimError(f"{self._ref} cannot be read: {self.place or 'the object'} is {shown(value)}, not {wanted}")


_NO_QUANTITIES: Mapping[str, str] = MappingProxyType({})


def _results(readers: Sequence[_Reader], *, driver: str) -> tuple[ledger.Result, ...]:
    """The results of this driver; those of others are not looked at."""
    results = []
    for reader in readers:
        if reader.text("driver") != driver:
            continue
        share_id = reader.optional_text("shareID")
        if share_id is not None and not acceptable_uid(share_id):
            raise reader.wrong("shareID", "a UUID")
        results.append(
            ledger.Result(
                request=reader.name("request"),
                pool=reader.name("pool"),
                device=reader.name("device"),
                share_id=share_id,
                consumed_capacity=reader.quantities("consumedCapacity"),
                admin=reader.flag("adminAccess"),
            )
        )
    return tuple(results)


def _applies(requests: Sequence[str], results: Sequence[ledger.Result]) -> bool:
    """Whether a configuration for `requests` is for one of the results: none named means all, a request's name covers its
    subrequests, a subrequest's name only itself.
    """
    return not requests or any(
        result.request in requests or ledger.base_request(result.request) in requests for result in results
    )


_SOURCES = {"FromClass": "its DeviceClass", "FromClaim": "the claim"}


def _configs(
    readers: Sequence[_Reader], results: Sequence[ledger.Result], *, ref: values.ClaimRef, driver: str
) -> tuple[claimconfig.ClaimConfig, ...]:
    """The configuration of each result; () where there is none for us. What is for a subrequest that was not chosen is not read."""
    found: list[tuple[Sequence[str], claimconfig.ClaimConfig]] = []
    for reader in readers:
        opaque = reader.optional_child("opaque")
        requests = reader.texts("requests")
        if opaque.missing or opaque.text("driver") != driver or not _applies(requests, results):
            continue
        source = _SOURCES.get(reader.optional_text("source") or "", "the claim or its DeviceClass")
        where = f"{ref}: {opaque.place}.parameters (from {source})"
        found.append((requests, claimconfig.parse(opaque.raw("parameters"), where=where)))
    if not found:
        return ()
    return tuple(
        claimconfig.merge(config for requests, config in found if _applies(requests, (result,))) for result in results
    )


def _consumers(status: _Reader) -> tuple[Consumer, ...]:
    """For whom a claim is reserved. UIDs become parts of paths."""
    consumers = []
    for reader in status.items("reservedFor", limit=CONSUMERS_MAX_SIZE):
        kind, uid = reader.name("resource"), reader.name("uid")
        if not acceptable_uid(uid):
            raise reader.wrong("uid", "a UUID")
        pod = kind == "pods" and reader.raw("apiGroup") in (None, "")
        consumers.append(Consumer(kind=kind, name=reader.name("name"), uid=uid, pod=pod))
    return tuple(consumers)


def _unasked(spec: _Reader) -> frozenset[str]:
    """The requests and subrequests, by their full names, that name no amount of compute."""
    found = set()
    for request in spec.optional_child("devices").items("requests", limit=REQUESTS_MAX_SIZE):
        name = request.name("name")
        exactly = request.optional_child("exactly")
        if not exactly.missing:
            found |= {name} if _names_no_compute(exactly) else set()
        for alternative in request.items("firstAvailable", limit=REQUESTS_MAX_SIZE):
            if _names_no_compute(alternative):
                found.add(f"{name}/{alternative.name('name')}")
    return frozenset(found)


def _names_no_compute(request: _Reader) -> bool:
    return request.optional_child("capacity").optional_child("requests").raw(COMPUTE) is None
