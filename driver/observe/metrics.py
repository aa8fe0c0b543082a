# SPDX-License-Identifier: Apache-2.0
"""The metrics of the agent: what the other rooms report is counted here, the rest is read when somebody scrapes.

`Metrics` is the observer that publisher, executor, kubelet server and inventory ask for. The exposition format is
prometheus_client's, imported at the first scrape.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator
from typing import TYPE_CHECKING

from discovery import model
from driver import values
from driver.observe import catalog, gauges, samples
from driver.observe.tally import Tally
from driver.version import VERSION

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.core import Metric


class Metrics:
    """Counts, and answers scrapes once it was told what to look at. Safe to use from every thread."""

    def __init__(self, *, pool: str) -> None:
        self._pool = pool
        self._tally = Tally()
        self._state: gauges.AgentState | None = None
        self._sampler: samples.Sampler | None = None
        self._registry: CollectorRegistry | None = None

    def watch(self, state: gauges.AgentState, *, sampled: samples.Sampled | None) -> None:
        """Read the gauges from `state`, and how busy the GPUs are from `sampled`; None: no such series."""
        self._state = state
        if sampled is not None:
            self._sampler = samples.Sampler(sampled, failed=lambda: self._tally.count(catalog.PROBE_ERRORS, "sample"))

    def rpc(self, method: str, *, seconds: float, ok: bool) -> None:
        """A call of kubelet was answered; `ok`: no claim of it failed."""
        self._tally.count(catalog.RPC_TOTAL, method, _result(ok=ok))
        self._tally.observe(catalog.RPC_SECONDS, method, seconds=seconds)

    def claim_done(self, *, operation: str, result: str, seconds: float) -> None:
        """A claim was answered: `operation` prepare or unprepare, `result` done, repeated or failed."""
        preparing = operation == "prepare"
        label = {"done": "success", "failed": "error"}.get(result, result)
        self._tally.count(catalog.PREPARE_TOTAL if preparing else catalog.UNPREPARE_TOTAL, label)
        if result != "repeated":
            self._tally.observe(catalog.PREPARE_SECONDS if preparing else catalog.UNPREPARE_SECONDS, seconds=seconds)

    def claim_collected(self) -> None:
        """A claim was unprepared that kubelet had not asked about."""
        self._tally.count(catalog.CLAIMS_COLLECTED)

    def record_failed(self) -> None:
        """A use of the record failed."""
        self._tally.count(catalog.RECORD_ERRORS)

    def record_rebuilt(self) -> None:
        """The record was damaged, moved aside and made anew."""
        self._tally.count(catalog.RECORD_REBUILT)

    def cdi_file_repaired(self) -> None:
        """A CDI file of a prepared claim was lost or changed and is back."""
        self._tally.count(catalog.CDI_RECONCILED)

    def slice_write(self, verb: str, *, result: str) -> None:
        """A ResourceSlice was written: `verb` create, update or delete, `result` success or error."""
        self._tally.count(catalog.SLICE_PUBLISH_TOTAL, verb, result)

    def probe(self, *, seconds: float, ok: bool, reason: str) -> None:
        """A look at the hardware ended; `reason`: which kind of look gave nothing."""
        if ok:
            self._tally.observe(catalog.PROBE_SECONDS, seconds=seconds)
        else:
            self._tally.count(catalog.PROBE_ERRORS, reason)

    def uevent(self, result: str) -> None:
        """A message about a device came; `result`: what became of it."""
        self._tally.count(catalog.UEVENTS_TOTAL, result)

    def health_changed(self, status: values.HealthStatus) -> None:
        """A device's health became `status`."""
        self._tally.count(catalog.HEALTH_EVENTS, status.lower())

    def event(self, *, ok: bool) -> None:
        """A Kubernetes Event was written, or could not be."""
        self._tally.count(catalog.EVENTS_TOTAL, _result(ok=ok))

    def exposition(self, accept: str = "") -> tuple[bytes, str]:
        """A scrape's answer and its content type, in the format that the Accept header asks for."""
        from prometheus_client import CollectorRegistry, ProcessCollector  # noqa: PLC0415 - at the first scrape only
        from prometheus_client.exposition import choose_encoder  # noqa: PLC0415

        if self._registry is None:
            registry = CollectorRegistry(auto_describe=False)
            registry.register(self)
            ProcessCollector(registry=registry)
            self._registry = registry
        encode, content_type = choose_encoder(accept)
        return encode(self._registry), content_type

    def collect(self) -> Iterator[Metric]:
        """Every metric with its series, as prometheus_client's registry asks for them."""
        from prometheus_client.core import (  # noqa: PLC0415
            CounterMetricFamily,
            GaugeMetricFamily,
            HistogramMetricFamily,
        )

        readings: dict[str, list[gauges.Reading]] = {
            catalog.BUILD_INFO.name: [
                gauges.Reading(metric=catalog.BUILD_INFO, labels=(VERSION, platform.python_version()), value=1)
            ]
        }
        for reading in self._readings():
            readings.setdefault(reading.metric.name, []).append(reading)
        for metric in catalog.METRICS:
            names = [label.name for label in metric.labels]
            match metric.kind:
                case catalog.Kind.COUNTER:
                    counter = CounterMetricFamily(metric.name, metric.help, labels=names)
                    for series, count in self._tally.counter(metric).items():
                        counter.add_metric(series, count)
                    yield counter
                case catalog.Kind.HISTOGRAM:
                    histogram = HistogramMetricFamily(metric.name, metric.help, labels=names)
                    for series, observed in self._tally.histogram(metric).items():
                        histogram.add_metric(series, _cumulative(metric, observed.counts), observed.sum)
                    yield histogram
                case catalog.Kind.GAUGE:
                    gauge = GaugeMetricFamily(metric.name, metric.help, labels=names)
                    for reading in readings.get(metric.name, ()):
                        gauge.add_metric(reading.labels, reading.value)
                    yield gauge

    def _readings(self) -> Iterator[gauges.Reading]:
        state = self._state
        if state is None:
            return
        snapshot = state.inventory().snapshot
        ready = snapshot is not None and any(gpu.state is model.GpuState.READY for gpu in snapshot.gpus)
        taken = self._sampler.samples() if self._sampler is not None and ready else ()
        yield from gauges.read(state, pool=self._pool, samples=taken)


def _result(*, ok: bool) -> str:
    return "success" if ok else "error"


def _cumulative(metric: catalog.Metric, counts: tuple[int, ...]) -> list[tuple[str, float]]:
    total = 0
    buckets: list[tuple[str, float]] = []
    for bound, count in zip((*map(str, map(float, metric.buckets)), "+Inf"), counts, strict=True):
        total += count
        buckets.append((bound, total))
    return buckets
