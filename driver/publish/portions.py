# SPDX-License-Identifier: Apache-2.0
"""The shares of a device as the API spells them: capacities with request policies, and back. Pure.

Of a device with allowMultipleAllocations the first claim consumes a capacity without a request policy whole, and every other one
by its policy: a request is rounded up to a multiple of the step, and no request is the default (dynamic-resource-allocation,
structured/internal, consumable_capacity.go). So such a device has these capacities and no other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

from driver import quantity
from driver.publish import attributes
from driver.sharing.shares import Capacity, Compute, Enforcement, Memory, Shares, Terms, TimeSlice

_ONE = "1"
"""A claim is one sharer, however much it asks for."""


def amounts(terms: Terms) -> dict[str, int]:
    """How much there is of each capacity."""
    found = {attributes.MEMORY: terms.memory.value, attributes.SHARES: terms.sharers}
    if terms.compute is not None:
        found[attributes.COMPUTE] = terms.compute.value
    return found


def policies_to_json(terms: Terms) -> dict[str, dict[str, Any]]:
    """The CapacityRequestPolicy of each capacity. That of `shares` names its one value, as a range needs two steps below the whole,
    and there may be one sharer only.
    """
    found = {
        attributes.MEMORY: _policy(terms.memory, quantity.format_bytes),
        attributes.SHARES: {"default": _ONE, "validValues": [_ONE]},
    }
    if terms.compute is not None:
        found[attributes.COMPUTE] = _policy(terms.compute, str)
    return found


def terms_from_json(capacity: Mapping[str, Any]) -> Terms:
    """The terms that are told by capacities with their policies. Raises ValueError, KeyError or TypeError for anything else."""
    compute = capacity.get(attributes.COMPUTE)
    return Terms(
        memory=_capacity(capacity[attributes.MEMORY]),
        compute=None if compute is None else _capacity(compute),
        sharers=_whole(capacity[attributes.SHARES]["value"]),
    )


def shares_to_json(shares: Shares) -> dict[str, Any]:
    """What an admin decided, for the record."""
    kept: dict[str, Any] = {
        "memoryStep": shares.memory_step,
        "computeStep": shares.compute_step,
        "maxSharers": shares.max_sharers,
        "memory": shares.memory.value,
        "compute": shares.compute.value,
        "timeSlice": shares.time_slice.value,
    }
    return kept if shares.default_compute is None else {**kept, "defaultCompute": shares.default_compute}


def shares_from_json(body: Mapping[str, Any]) -> Shares:
    """What `shares_to_json` kept. Raises ValueError, KeyError or TypeError for anything else."""
    default = body.get("defaultCompute")
    return Shares(
        memory_step=_whole(body["memoryStep"]),
        compute_step=_whole(body["computeStep"]),
        max_sharers=_whole(body["maxSharers"]),
        memory=Memory(body["memory"]),
        compute=Compute(body["compute"]),
        default_compute=None if default is None else _whole(default),
        time_slice=TimeSlice(body["timeSlice"]),
    )


def enforcement_to_json(enforcement: Enforcement) -> dict[str, str]:
    """What keeps the shares apart, for the record."""
    return {"memory": enforcement.memory.value, "compute": enforcement.compute.value}


def enforcement_from_json(body: Mapping[str, Any]) -> Enforcement:
    """What `enforcement_to_json` kept. Raises ValueError or KeyError for anything else."""
    return Enforcement(memory=Memory(body["memory"]), compute=Compute(body["compute"]))


def _policy(capacity: Capacity, spell: Callable[[int], str]) -> dict[str, Any]:
    step = spell(capacity.step)
    return {
        "default": spell(capacity.default),
        "validRange": {"min": step, "max": spell(capacity.most), "step": step},
    }


def _capacity(body: Mapping[str, Any]) -> Capacity:
    policy = body["requestPolicy"]
    bounds = policy["validRange"]
    return Capacity(
        value=_whole(body["value"]),
        default=_whole(policy["default"]),
        step=_whole(bounds["step"]),
        most=_whole(bounds["max"]),
    )


def _whole(value: object) -> int:
    """A number above 0."""
    number = quantity.parse(value) if isinstance(value, str) else value
    if isinstance(number, bool) or not isinstance(number, int | Fraction) or number != int(number) or number <= 0:
        raise ValueError(f"{value!r} is no whole number above 0")
    return int(number)
