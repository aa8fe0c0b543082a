# SPDX-License-Identifier: Apache-2.0
"""Summaries of measured values. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """What is told of a series of values. Every field is a value that was measured, or between two of them."""

    n: int
    min: float
    p50: float
    p99: float
    max: float


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that at least `percent` of all values do not exceed (nearest rank): always one that was measured.
    With fewer than 100 values the 99th percentile is the largest.
    """
    if not values:
        raise ValueError("no values")
    if not 0 < percent <= 100:
        raise ValueError(f"{percent} is not a percentage above 0")
    return sorted(values)[math.ceil(percent / 100 * len(values)) - 1]


def summarize(values: Sequence[float]) -> Summary:
    """The summary of at least one value."""
    return Summary(
        n=len(values),
        min=min(values),
        p50=statistics.median(values),
        p99=percentile(values, 99),
        max=max(values),
    )


def paired_ratios(values: Sequence[float], bases: Sequence[float]) -> tuple[float, ...]:
    """values[i] / bases[i] of measurements that were taken turn by turn: what slows the machine for a while slows both
    members of a pair, and leaves their ratio alone.
    """
    return tuple(value / base for value, base in zip(values, bases, strict=True))
