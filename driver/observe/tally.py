# SPDX-License-Identifier: Apache-2.0
"""Counters and histograms as plain numbers under one lock.

The library that writes the exposition format takes time and memory to import, and nothing of it is needed to count: the
agent serves kubelet before anybody scrapes, and on many machines nobody ever does.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from driver.observe import catalog

Series = tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Histogram:
    """Observations by bucket, not cumulative; the last bucket is for what is above all bounds."""

    counts: tuple[int, ...]
    sum: float


class Tally:
    """Counts metrics of the catalogue. Series with known labels start at zero. Safe to use from every thread."""

    def __init__(self, metrics: Iterable[catalog.Metric] = catalog.METRICS) -> None:
        self._lock = threading.Lock()
        self._counters: dict[str, dict[Series, float]] = {}
        self._histograms: dict[str, dict[Series, tuple[list[int], list[float]]]] = {}
        for metric in metrics:
            if metric.kind is catalog.Kind.COUNTER:
                self._counters[metric.name] = dict.fromkeys(metric.zero_series(), 0.0)
            elif metric.kind is catalog.Kind.HISTOGRAM:
                self._histograms[metric.name] = {series: _empty(metric) for series in metric.zero_series()}

    def count(self, metric: catalog.Metric, *labels: str) -> None:
        """Add one to a counter."""
        series = metric.bounded(labels)
        with self._lock:
            counter = self._counters[metric.name]
            counter[series] = counter.get(series, 0.0) + 1

    def observe(self, metric: catalog.Metric, *labels: str, seconds: float) -> None:
        """Add one observation to a histogram."""
        series = metric.bounded(labels)
        # `le` is inclusive: a value that equals a bound belongs to that bound's bucket.
        bucket = bisect_left(metric.buckets, seconds)
        with self._lock:
            counts, total = self._histograms[metric.name].setdefault(series, _empty(metric))
            counts[bucket] += 1
            total[0] += seconds

    def counter(self, metric: catalog.Metric) -> Mapping[Series, float]:
        """The counts of one counter."""
        with self._lock:
            return dict(self._counters[metric.name])

    def histogram(self, metric: catalog.Metric) -> Mapping[Series, Histogram]:
        """The observations of one histogram."""
        with self._lock:
            return {
                series: Histogram(counts=tuple(counts), sum=total[0])
                for series, (counts, total) in self._histograms[metric.name].items()
            }


def _empty(metric: catalog.Metric) -> tuple[list[int], list[float]]:
    return [0] * (len(metric.buckets) + 1), [0.0]
