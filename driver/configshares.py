# SPDX-License-Identifier: Apache-2.0
"""Key `shares` of a sharing rule in the configuration file: its strict model, and the way from there to `sharing.shares.Shares`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal, cast

import pydantic

from discovery import document, strict
from driver import quantity
from driver.sharing import rules, shares

MEMORY_STEP_MIN = 1 << 20
"""MPS takes limits in whole mebibytes."""

MEMORY_STEP_MAX = 1 << 40
COMPUTE_STEPS = tuple(step for step in range(1, 51) if shares.COMPUTE_WHOLE % step == 0)
"""Divisors of the whole of which two fit into it, as the API wants."""

SHARERS_MAX = 128
WHOLE = "whole"


def _is_a_step(value: object) -> object:
    if isinstance(value, int) and not isinstance(value, bool):
        value = str(value)
    if not isinstance(value, str):
        raise ValueError("must be a quantity of bytes such as 1Gi")  # noqa: TRY004 - pydantic tells of ValueError alone
    step = quantity.parse(value)
    if not MEMORY_STEP_MIN <= step <= MEMORY_STEP_MAX or step % MEMORY_STEP_MIN != 0:
        raise ValueError(
            f"{value[:64]!r} is not a multiple of 1Mi between {quantity.format_bytes(MEMORY_STEP_MIN)} and"
            f" {quantity.format_bytes(MEMORY_STEP_MAX)}"
        )
    return value


def _is_a_compute_step(value: int) -> int:
    if value not in COMPUTE_STEPS:
        raise ValueError(
            f"{value} percent do not divide the whole into equal parts, two at least: one of"
            f" {', '.join(map(str, COMPUTE_STEPS))}"
        )
    return value


def _is_a_charge(value: object) -> object:
    if value == WHOLE:
        return value
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= shares.COMPUTE_WHOLE:
        raise ValueError(f"must be {WHOLE}, or a number of percent between 1 and {shares.COMPUTE_WHOLE}")
    return value


MemoryStep = Annotated[
    str,
    pydantic.BeforeValidator(_is_a_step),
    pydantic.WithJsonSchema(
        {
            "oneOf": [
                {"type": "string", "pattern": r"^[0-9.]+([eE][0-9]+|[KMGT]i|[kMGT])?$"},
                {
                    "type": "integer",
                    "minimum": MEMORY_STEP_MIN,
                    "maximum": MEMORY_STEP_MAX,
                    "multipleOf": MEMORY_STEP_MIN,
                },
            ]
        }
    ),
]
ComputeStep = Annotated[
    int,
    pydantic.AfterValidator(_is_a_compute_step),
    pydantic.Field(json_schema_extra={"enum": list(COMPUTE_STEPS)}),
]
Charge = Annotated[
    object,
    pydantic.PlainValidator(_is_a_charge),
    pydantic.WithJsonSchema(
        {"oneOf": [{"const": WHOLE}, {"type": "integer", "minimum": 1, "maximum": shares.COMPUTE_WHOLE}]}
    ),
]


class Shares(strict.Section):
    """In which shares the memory and the compute of a device are given out, and what must keep them apart."""

    memory_step: MemoryStep = "1Gi"
    """A share's memory is a multiple of this quantity of bytes, itself a multiple of 1Mi."""

    compute_step: ComputeStep = 5
    """A share's compute is a multiple of so many percent of the multiprocessors of the whole GPU; divides 100."""

    default_compute: Charge = WHOLE
    """What a claim that asks for memory only is charged: whole, or a multiple of computeStep; with a number it has no compute limit."""

    max_sharers: Annotated[int, pydantic.Field(ge=1, le=SHARERS_MAX)] = 8
    """How many shares of a device there may be at a time."""

    memory: Literal["cgroup", "mps", "cooperative", "none"]
    """The weakest that may keep a share inside its memory, of the levels from the strongest to none."""

    compute: Literal["mps", "cooperative", "timeslice", "none"]
    """The weakest that may keep a share inside its compute, of the levels from the strongest to none."""

    time_slice: Literal["default", "short", "medium", "long"] = "default"
    """How long a turn is where shares take turns."""


def value(read: Shares) -> shares.Shares:
    """What the section says."""
    return shares.Shares(
        memory_step=int(quantity.parse(read.memory_step)),
        compute_step=read.compute_step,
        default_compute=None if read.default_compute == WHOLE else cast("int", read.default_compute),
        max_sharers=read.max_sharers,
        memory=shares.Memory(read.memory),
        compute=shares.Compute(read.compute),
        time_slice=shares.TimeSlice(read.time_slice),
    )


def problems(rule: rules.Rule, source: document.Document, place: document.Place) -> Iterator[str]:
    """What a rule says of shares that cannot be meant."""
    section = (*place, "shares")
    if rule.shares is None:
        if rule.mode is rules.Mode.SHARES:
            yield (
                f"{source.where(place)}: mode {rule.mode} needs shares: with memory and compute, the weakest that may keep shares"
                " apart"
            )
        return
    if rule.mode not in (rules.Mode.SHARES, rules.Mode.MIG_STATIC):
        yield (
            f"{source.where(section)}: only mode shares gives out shares, and mig-static those of its instances, not"
            f" {rule.mode}"
        )
        return
    charge = rule.shares.default_compute
    if charge is not None and charge % rule.shares.compute_step:
        yield (
            f"{source.where((*section, 'defaultCompute'))}: {charge} is no multiple of computeStep"
            f" ({rule.shares.compute_step})"
        )
    if rule.shares.time_slice is not shares.TimeSlice.DEFAULT:
        yield from _turns(rule, source, (*section, "timeSlice"))


def _turns(rule: rules.Rule, source: document.Document, place: document.Place) -> Iterator[str]:
    assert rule.shares is not None
    if rule.mode is not rules.Mode.SHARES:
        yield f"{source.where(place)}: the turns at a MIG instance cannot be set: leave it out"
    elif rule.shares.compute not in (shares.Compute.TIMESLICE, shares.Compute.NONE):
        yield (
            f"{source.where(place)}: shares take turns only where compute may be timeslice, not with {rule.shares.compute}"
            " at least: leave it out"
        )


def to_json(given: shares.Shares) -> dict[str, object]:
    """The section with nothing left out."""
    return {
        "memoryStep": quantity.format_bytes(given.memory_step),
        "computeStep": given.compute_step,
        "defaultCompute": WHOLE if given.default_compute is None else given.default_compute,
        "maxSharers": given.max_sharers,
        "memory": given.memory.value,
        "compute": given.compute.value,
        "timeSlice": given.time_slice.value,
    }
