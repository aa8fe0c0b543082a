# SPDX-License-Identifier: Apache-2.0
"""The configuration that a claim or its DeviceClass may carry for devices of this driver: kind ClaimConfig. Pure.

It only tightens what the claim was allocated, or chooses among what the admin allowed, so that whoever may write claims gets nothing
by it: a lower limit, the weakest enforcement that is good enough, the lower of two priorities. Of several that apply to a device the
strictest of each field holds. It reaches us as arbitrary JSON of up to 10 KiB (OpaqueParametersMaxLength of resource.k8s.io/v1), written
by users: whatever is not exactly as documented is refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeVar

from driver import quantity
from driver.errors import ClaimError
from driver.sharing import shares

API_VERSION = "gpu.nearfield.dev/v1alpha1"
"""The same whatever name the driver was given: it says how the document reads."""

KIND = "ClaimConfig"

LEAST_BYTES = 1 << 20
"""The least memory limit: limits of MPS are given in whole MiB."""

MOST_BYTES = 1 << 60
"""1Ei, far above any device, and below what a quantity of Kubernetes holds."""

QUANTITY_PATTERN = r"[0-9]{1,19}(\.[0-9]{1,9})?([KMGTPE]i|[kMGTPE])?"
"""The quantities that make sense for memory, a subset of those of Kubernetes: no signs, exponents or parts of a byte."""

_QUANTITY = re.compile(QUANTITY_PATTERN, re.ASCII)
_SHOWN_MAX_LENGTH = 80
_SHOWN_MAX_BITS = 64


class MemoryLevel(StrEnum):
    """How a device keeps its memory apart from that of others, strongest first: as attribute memoryEnforcement says it."""

    WHOLE = "whole"
    MIG = "mig"
    CGROUP = "cgroup"
    MPS = "mps"
    COOPERATIVE = "cooperative"
    NONE = "none"


class ComputeLevel(StrEnum):
    """How a device keeps its multiprocessors apart from those of others, strongest first: as attribute computeEnforcement says it."""

    WHOLE = "whole"
    MIG = "mig"
    MPS = "mps"
    COOPERATIVE = "cooperative"
    TIMESLICE = "timeslice"
    NONE = "none"


class Priority(StrEnum):
    """Of the work of one MPS client among those of its server."""

    NORMAL = "normal"
    BELOW_NORMAL = "belowNormal"


Level = TypeVar("Level", MemoryLevel, ComputeLevel)
Choice = TypeVar("Choice", bound=StrEnum)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimConfig:
    """What is asked for; None: nothing. Limits of memory in bytes, of compute in percent of the whole GPU. `require_*`: the weakest
    level that the claim accepts.
    """

    memory_limit: int | None = None
    soft_limit: int | None = None
    compute_limit: int | None = None
    require_memory: MemoryLevel | None = None
    require_compute: ComputeLevel | None = None
    below_normal: bool = False


NOTHING = ClaimConfig()
"""That of a device for which there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one share is limited to, None: not at all. `soft`: the memory that it is sure of, where memory is kept apart by cgroup."""

    memory: int | None
    soft: int | None
    compute: int | None
    below_normal: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Unmet:
    """Why a device cannot be used as its claim's configuration wants, and what to do about it."""

    reason: str


def parse(parameters: Any, *, where: str) -> ClaimConfig:
    """The configuration in opaque parameters. Raises ClaimError, which begins with `where`: the claim, and the place in it."""
    document = _Fields(parameters, where)
    if document.raw("apiVersion") != API_VERSION or document.raw("kind") != KIND:
        raise ClaimError(
            f"{where} is of apiVersion {_shown(document.raw('apiVersion'))} and kind {_shown(document.raw('kind'))}, and this driver "
            f"knows {API_VERSION}, kind {KIND}, only; change it, or take it out"
        )
    document.allow("apiVersion", "kind", "memory", "compute", "require", "mps")
    memory = document.child("memory", "limit", "softLimit")
    compute = document.child("compute", "limit")
    require = document.child("require", "memory", "compute")
    mps = document.child("mps", "priority")
    limit = memory.read("limit", _limit, 'a quantity of bytes in text, at least 1Mi, such as "16Gi"')
    soft = memory.read("softLimit", _bytes, 'a quantity of bytes in text, such as "8Gi"')
    if limit is not None and soft is not None and soft > limit:
        raise ClaimError(
            f"{where}.memory.softLimit is {quantity.format_bytes(soft)}, more than memory.limit, {quantity.format_bytes(limit)}"
        )
    return ClaimConfig(
        memory_limit=limit,
        soft_limit=soft,
        compute_limit=compute.read("limit", _percent, "a whole number of percent from 1 to 100"),
        require_memory=require.choice("memory", MemoryLevel),
        require_compute=require.choice("compute", ComputeLevel),
        below_normal=mps.choice("priority", Priority) is Priority.BELOW_NORMAL,
    )


def merge(configs: Iterable[ClaimConfig]) -> ClaimConfig:
    """The strictest of each field, whatever their order."""
    found = tuple(configs)
    if len(found) < 2:
        return found[0] if found else NOTHING
    return ClaimConfig(
        memory_limit=_least(config.memory_limit for config in found),
        soft_limit=_least(config.soft_limit for config in found),
        compute_limit=_least(config.compute_limit for config in found),
        require_memory=_strongest(MemoryLevel, (config.require_memory for config in found)),
        require_compute=_strongest(ComputeLevel, (config.require_compute for config in found)),
        below_normal=any(config.below_normal for config in found),
    )


def held(
    config: ClaimConfig,
    *,
    memory: int,
    compute: int | None,
    memory_limit: int | None,
    compute_limit: int | None,
    enforcement: shares.Enforcement,
) -> Limits | Unmet:
    """What a share is limited to. `memory` and `compute`: what was allocated, compute None where shares take turns. `memory_limit` and
    `compute_limit`: what it would be limited to without configuration; no limit of memory is that of a share with all of it,
    beside which there is no other, so that it meets every requirement.
    """
    if memory_limit is not None:
        unmet = _weaker("memory", MemoryLevel, config.require_memory, enforcement.memory) or _weaker(
            "compute", ComputeLevel, config.require_compute, enforcement.compute
        )
        if unmet is not None:
            return unmet
    for name, wanted in (("limit", config.memory_limit), ("softLimit", config.soft_limit)):
        if wanted is not None and wanted > memory:
            return Unmet(
                reason=f"memory.{name} of its {KIND} is {quantity.format_bytes(wanted)}, more than the "
                f"{quantity.format_bytes(memory)} that it was allocated; let it request more, or lower it"
            )
    if config.compute_limit is not None:
        if compute is None:
            return Unmet(
                reason=f"compute.limit of its {KIND} is {config.compute_limit}, and shares of this device take turns at all of it, "
                "so that there is no percentage to hold; select devices whose attribute computeEnforcement is another than timeslice"
            )
        if compute_limit is not None and config.compute_limit > compute_limit:
            return Unmet(
                reason=f"compute.limit of its {KIND} is {config.compute_limit}, more than the {compute_limit} percent that it was "
                "allocated; let it request more, or lower it"
            )
    hard = _least((memory_limit, config.memory_limit))
    return Limits(
        memory=hard,
        soft=None if hard is None else _least((hard, config.soft_limit)),
        compute=_least((compute_limit, config.compute_limit)),
        below_normal=config.below_normal,
    )


def exclusive(config: ClaimConfig, *, mig: bool) -> Unmet | None:
    """Why a device that is not shared cannot be used as the configuration wants. `mig`: it is a MIG instance, else a whole GPU. There
    is no way to limit it, and a limit that nothing holds is none.
    """
    limits = {
        "memory.limit": config.memory_limit,
        "memory.softLimit": config.soft_limit,
        "compute.limit": config.compute_limit,
    }
    limited = next((name for name, value in limits.items() if value is not None), None)
    if limited is not None:
        return Unmet(
            reason=f"{limited} of its {KIND} is for shares, and this device is not shared; name the requests (of alternatives: "
            "REQUEST/SUBREQUEST) that are for shares in `requests` beside the configuration"
        )
    level = "mig" if mig else "whole"
    return _weaker("memory", MemoryLevel, config.require_memory, level) or _weaker(
        "compute", ComputeLevel, config.require_compute, level
    )


def _weaker(what: str, levels: type[Level], required: Level | None, is_: str) -> Unmet | None:
    ordered = tuple(levels)
    if required is None or ordered.index(levels(is_)) <= ordered.index(required):
        return None
    return Unmet(
        reason=f"its {KIND} requires {what} to be kept apart by {required} or stronger, and this device has {is_}; select devices by "
        f"their attribute {what}Enforcement, or accept less"
    )


def _least(numbers: Iterable[int | None]) -> int | None:
    return min((number for number in numbers if number is not None), default=None)


def _strongest(levels: type[Level], required: Iterable[Level | None]) -> Level | None:
    wanted = frozenset(required)
    return next((level for level in levels if level in wanted), None)


class _Fields:
    """A JSON object of the configuration, read field by field; whatever is not expected of it is an error."""

    __slots__ = ("_fields", "_where")

    def __init__(self, value: Any, where: str) -> None:
        if not isinstance(value, dict):
            raise ClaimError(f"{where} is {_shown(value)}, not an object")
        self._fields: Mapping[Any, Any] = value
        self._where = where

    def raw(self, field: str) -> Any:
        return self._fields.get(field)

    def allow(self, *known: str) -> None:
        unknown = next((name for name in self._fields if name not in known), None)
        if unknown is not None:
            raise ClaimError(f"{self._where} has a field {_shown(unknown)}; there may be {', '.join(known)}")

    def child(self, field: str, *known: str) -> _Fields:
        found = _Fields(self._fields.get(field, {}), f"{self._where}.{field}")
        found.allow(*known)
        return found

    def read(self, field: str, reader: Callable[[Any], int | None], wanted: str) -> int | None:
        if field not in self._fields:
            return None
        found = reader(self._fields[field])
        if found is None:
            raise ClaimError(f"{self._where}.{field} is {_shown(self._fields[field])}, not {wanted}")
        return found

    def choice(self, field: str, choices: type[Choice]) -> Choice | None:
        if field not in self._fields:
            return None
        value = self._fields[field]
        found = next((choice for choice in choices if choice.value == value), None)
        if found is None:
            raise ClaimError(f"{self._where}.{field} is {_shown(value)}, not one of {', '.join(choices)}")
        return found


def _bytes(value: Any) -> int | None:
    if not isinstance(value, str) or _QUANTITY.fullmatch(value) is None:
        return None
    amount = quantity.parse(value)
    return amount.numerator if amount.denominator == 1 and amount <= MOST_BYTES else None


def _limit(value: Any) -> int | None:
    found = _bytes(value)
    return None if found is None or found < LEAST_BYTES else found


def _percent(value: Any) -> int | None:
    return value if type(value) is int and 1 <= value <= shares.COMPUTE_WHOLE else None


def _shown(value: Any) -> str:
    """A value for a message: in JSON's spelling and ASCII, cut."""
    if isinstance(value, str):
        return json.dumps(value[:_SHOWN_MAX_LENGTH]) + ("..." if len(value) > _SHOWN_MAX_LENGTH else "")
    if isinstance(value, int | float | None):
        return "a huge number" if isinstance(value, int) and value.bit_length() > _SHOWN_MAX_BITS else json.dumps(value)
    return "a list" if isinstance(value, list) else "an object"
