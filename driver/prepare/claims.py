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
from driver.prepare import ledger

RESULTS_MAX_SIZE = 32
"""AllocationResultsMaxSize of resource.k8s.io/v1: results of all drivers together."""

CONFIG_MAX_SIZE = 64
"""Entries of allocation.devices.config: 32 of the claim and 32 of its classes."""

_UID = re.compile(r"[0-9A-Za-z][0-9A-Za-z-]{0,62}")
"""UIDs and share ids become parts of file names and CDI device names. Kubernetes makes lower-case UUIDs."""

_NAME_MAX_LENGTH = 253
_SHOWN_MAX_LENGTH = 80
_KINDS = {bool: "a boolean", int: "a number", float: "a number", list: "a list", dict: "an object"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    """What a claim allocates of this driver on this node, in the scheduler's order; at least one result."""

    claim: values.ClaimRef
    results: tuple[ledger.Result, ...]


def acceptable_uid(uid: str) -> bool:
    """Whether a claim UID can be part of a file name and of a CDI device name."""
    return _UID.fullmatch(uid) is not None


def parse_allocation(claim: Any, *, ref: values.ClaimRef, driver: str, pool: str) -> Allocation:
    """The allocation of `ref` as the API server's answer tells it. `pool` is the only pool that this node has.

    Raises ClaimError: another UID, no or half an allocation, one that is not for this driver and node, or opaque
    configuration for us that this version does not know.
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
    _refuse_configs(devices.items("config", limit=CONFIG_MAX_SIZE), results, ref=ref, driver=driver)
    return Allocation(claim=ref, results=results)


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


def _refuse_configs(
    readers: Sequence[_Reader], results: Sequence[ledger.Result], *, ref: values.ClaimRef, driver: str
) -> None:
    """Check the configuration that is for us. There is no kind of it yet, so whatever applies is refused;
    what is for a subrequest that was not chosen does not apply.
    """
    for reader in readers:
        opaque = reader.optional_child("opaque")
        if opaque.missing or opaque.text("driver") != driver or not _applies(reader.texts("requests"), results):
            continue
        parameters = opaque.raw("parameters")
        if not isinstance(parameters, dict):
            raise opaque.wrong("parameters", "an object with apiVersion and kind")
        raise ClaimError(
            f"{ref} has configuration that driver {driver} does not know: {opaque.place}.parameters is of apiVersion "
            f"{shown(parameters.get('apiVersion'))} and kind {shown(parameters.get('kind'))}, and devices of this driver take none. "
            f"Remove it from {_SOURCES.get(reader.optional_text('source') or '', 'the claim or its DeviceClass')}"
        )
