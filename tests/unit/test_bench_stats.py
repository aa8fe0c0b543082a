# SPDX-License-Identifier: Apache-2.0
"""Statistics of the benchmark.

- percentiles are values that were measured (nearest rank), the 99th of a short series is its largest
- a summary is ordered and inside its values
- paired ratios do not see a drift that slows both members of a pair
"""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hack.bench import stats

VALUES = st.lists(st.floats(min_value=0.001, max_value=1e6), min_size=1, max_size=300)


def test_percentiles_are_nearest_rank() -> None:
    values = [float(value) for value in range(1, 201)]
    assert stats.percentile(values, 99) == 198
    assert stats.percentile(values, 50) == 100
    assert stats.percentile(values, 100) == 200
    assert stats.percentile([3.0, 1.0, 2.0], 99) == 3.0
    assert stats.percentile([7.0], 1) == 7.0


@pytest.mark.parametrize("percent", [0, -1, 100.5])
def test_a_percentage_outside_its_range_is_refused(percent: float) -> None:
    with pytest.raises(ValueError, match="percentage"):
        stats.percentile([1.0], percent)


def test_no_values_have_no_percentile() -> None:
    with pytest.raises(ValueError, match="no values"):
        stats.percentile([], 50)


def test_summary() -> None:
    assert stats.summarize([4.0, 1.0, 3.0, 2.0]) == stats.Summary(n=4, min=1.0, p50=2.5, p99=4.0, max=4.0)


@given(VALUES)
def test_a_summary_is_ordered(values: list[float]) -> None:
    summary = stats.summarize(values)
    assert summary.min <= summary.p50 <= summary.p99 <= summary.max
    assert summary.n == len(values)
    assert {summary.min, summary.p99, summary.max} <= set(values)


@given(VALUES, st.floats(min_value=0.1, max_value=10))
def test_paired_ratios_do_not_see_a_common_drift(bases: list[float], factor: float) -> None:
    drifting = [base * (1 + index / len(bases)) for index, base in enumerate(bases)]
    ratios = stats.paired_ratios([base * factor for base in drifting], drifting)
    assert all(math.isclose(ratio, factor) for ratio in ratios)


def test_pairs_have_two_members() -> None:
    with pytest.raises(ValueError, match="zip"):
        stats.paired_ratios([1.0, 2.0], [1.0])
