# SPDX-License-Identifier: Apache-2.0
"""Metrics.

- the catalogue keeps the conventions: prefix, units, _total for counters only, bounded labels, a sentence of help
- before anything happened: zero series for what is known, no series for what is not
- what the other rooms report is counted; label values that nobody foresaw are `other`
- gauges are read from the state at the scrape; what cannot be read costs its own series only
- device_info joins samples; samples of GPUs without a name have no series
- text and OpenMetrics parse; the library is imported at the first scrape only
- docs/metrics.md lists the catalogue
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families

from discovery import address, model
from driver import inventory, values
from driver.errors import RecordError
from driver.observe import catalog, gauges, partitions, sharers, tally
from driver.observe.metrics import Metrics
from driver.sharing import rules
from tests.fakes import divided, portions, publishing

ROOT = Path(__file__).parents[4]
HOST = model.Host()
NOTHING: dict[str, str] = {}


LOOKED = inventory.InventoryState(snapshot=publishing.snapshot(publishing.gpu(1)))


def gpu(
    place: str,
    *,
    state: model.GpuState = model.GpuState.READY,
    uuid: str | None = "GPU-1",
    pair: str | None = None,
    distance: model.PathClass | None = None,
) -> model.Gpu:
    pci = model.PciFunction(address=address.parse(place), vendor_id=0x10DE, device_id=0x2330, class_code=0x030200)
    return model.Gpu(
        pci=pci,
        state=state,
        uuid=uuid,
        product="NVIDIA H100",
        groups=model.GpuGroups(aligned_pair=address.parse(pair) if pair else None),
        nic=model.NicPairing(address=address.parse("0000:aa:00.0"), distance=distance) if distance else None,
    )


def snapshot(*gpus: model.Gpu, findings: tuple[model.Finding, ...] = ()) -> model.Snapshot:
    return model.Snapshot(origin=model.Origin.RECORDING, taken_at=0.0, host=HOST, gpus=gpus, findings=findings)


@dataclass
class State:
    """An agent as the metrics see it."""

    known: inventory.InventoryState = field(default_factory=inventory.InventoryState)
    on_server: gauges.Published = field(default_factory=lambda: gauges.Published(generation=0))
    on_disk: gauges.Recorded | None = field(default_factory=gauges.Recorded)
    dividing: partitions.Sharing = field(default_factory=partitions.Sharing)
    portions: tuple[sharers.Shared, ...] = ()
    last_seen: tuple[sharers.Seen, ...] = ()
    refused: bool = False

    def inventory(self) -> inventory.InventoryState:
        return self.known

    def published(self) -> gauges.Published:
        return self.on_server

    def recorded(self) -> gauges.Recorded:
        if self.on_disk is None:
            raise RecordError("the record is locked")
        return self.on_disk

    def sharing(self) -> partitions.Sharing:
        return self.dividing

    def shared(self) -> tuple[sharers.Shared, ...]:
        if self.on_disk is None:
            raise RecordError("the record is locked")
        return self.portions

    def seen(self) -> tuple[sharers.Seen, ...]:
        return self.last_seen

    def config_refused(self) -> bool:
        return self.refused

    def registered(self) -> bool:
        return True

    def ready(self) -> bool:
        return False


@dataclass
class Sampled:
    answer: tuple[model.GpuSample, ...]
    calls: int = 0

    def sample(self, *, timeout_s: float) -> tuple[model.GpuSample, ...]:
        assert timeout_s > 0
        self.calls += 1
        return self.answer


def scrape(metrics: Metrics) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
    """Sample name -> labels -> value."""
    text, content_type = metrics.exposition()
    assert content_type.startswith("text/plain; version=0.0.4")
    series: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
    for family in text_string_to_metric_families(text.decode()):
        for sample in family.samples:
            series.setdefault(sample.name, {})[tuple(sorted(sample.labels.items()))] = sample.value
    return series


def labels(given: Mapping[str, str] = NOTHING, **more: str) -> tuple[tuple[str, str], ...]:
    return tuple(sorted({**given, **more}.items()))


def watching(state: State, *, sampled: Sampled | None = None) -> Metrics:
    metrics = Metrics(pool="n1")
    metrics.watch(state, sampled=sampled)
    return metrics


@pytest.mark.parametrize("metric", catalog.METRICS, ids=lambda metric: metric.name)
def test_the_catalogue_keeps_the_conventions(metric: catalog.Metric) -> None:
    assert re.fullmatch(r"nearfield_[a-z][a-z0-9_]*", metric.name)
    assert metric.name.endswith("_total") == (metric.kind is catalog.Kind.COUNTER)
    assert bool(metric.buckets) == (metric.kind is catalog.Kind.HISTOGRAM)
    assert list(metric.buckets) == sorted(set(metric.buckets))
    assert not re.search(r"_(ms|milliseconds|mib|percent)(_|$)", metric.name)
    assert metric.help.endswith(".")
    assert not {label.name for label in metric.labels} & {"claim", "pod", "namespace", "claim_uid", "pod_uid", "user"}
    if metric.kind is not catalog.Kind.GAUGE:
        assert all(label.values is not None for label in metric.labels)


def test_names_are_unique() -> None:
    assert len({metric.name for metric in catalog.METRICS}) == len(catalog.METRICS)


def test_an_agent_that_has_just_started_shows_zeros_not_gaps() -> None:
    series = scrape(Metrics(pool="n1"))
    assert series["nearfield_prepare_total"] == {
        labels(result=result): 0 for result in ("success", "repeated", "error")
    }
    assert series["nearfield_prepare_duration_seconds_count"] == {(): 0}
    assert len(series["nearfield_slice_publish_total"]) == 6
    assert "nearfield_probe_last_success_timestamp_seconds" not in series
    assert "nearfield_device_info" not in series
    assert list(series["nearfield_build_info"].values()) == [1]
    assert series["process_open_fds"][()] > 0


def test_what_is_reported_is_counted() -> None:
    metrics = Metrics(pool="n1")
    metrics.rpc("NodePrepareResources", seconds=0.004, ok=True)
    metrics.rpc("NodePrepareResources", seconds=1.5, ok=False)
    metrics.claim_done(operation="prepare", result="done", seconds=0.004)
    metrics.claim_done(operation="prepare", result="repeated", seconds=0.001)
    metrics.claim_done(operation="unprepare", result="failed", seconds=0.002)
    metrics.claim_collected()
    metrics.slice_write("create", result="success")
    metrics.slice_write("update", result="error")
    metrics.probe(seconds=0.02, ok=True, reason="")
    metrics.probe(seconds=60, ok=False, reason="rescan")
    metrics.record_failed()
    metrics.record_rebuilt()
    metrics.cdi_file_repaired()
    metrics.health_changed(values.HealthStatus.UNHEALTHY)
    metrics.event(ok=True)
    series = scrape(metrics)
    call = {"method": "NodePrepareResources"}
    assert series["nearfield_rpc_total"][labels(call, result="success")] == 1
    assert series["nearfield_rpc_total"][labels(call, result="error")] == 1
    assert series["nearfield_rpc_duration_seconds_sum"][labels(call)] == pytest.approx(1.504)
    assert series["nearfield_rpc_duration_seconds_bucket"][labels(call, le="0.0025")] == 0
    assert series["nearfield_rpc_duration_seconds_bucket"][labels(call, le="0.005")] == 1
    assert series["nearfield_rpc_duration_seconds_bucket"][labels(call, le="+Inf")] == 2
    assert series["nearfield_prepare_total"][labels(result="success")] == 1
    assert series["nearfield_prepare_total"][labels(result="repeated")] == 1
    assert series["nearfield_unprepare_total"][labels(result="error")] == 1
    assert series["nearfield_prepare_duration_seconds_count"][()] == 1
    assert series["nearfield_unprepare_duration_seconds_count"][()] == 1
    assert series["nearfield_slice_publish_total"][labels(verb="create", result="success")] == 1
    assert series["nearfield_slice_publish_total"][labels(verb="update", result="error")] == 1
    assert series["nearfield_probe_duration_seconds_count"][()] == 1
    assert series["nearfield_probe_errors_total"][labels(reason="rescan")] == 1
    assert series["nearfield_record_errors_total"][()] == 1
    assert series["nearfield_record_rebuilt_total"][()] == 1
    assert series["nearfield_claims_collected_total"][()] == 1
    assert series["nearfield_cdi_reconciled_total"][()] == 1
    assert series["nearfield_health_events_total"][labels(kind="unhealthy")] == 1
    assert series["nearfield_events_total"][labels(result="success")] == 1


def test_labels_that_nobody_foresaw_stay_bounded() -> None:
    metrics = Metrics(pool="n1")
    for number in range(50):
        metrics.probe(seconds=1, ok=False, reason=f"strange-{number}")
    series = scrape(metrics)["nearfield_probe_errors_total"]
    assert series[labels(reason="other")] == 50
    assert len(series) == 4


def test_a_value_on_a_bound_belongs_to_that_bucket() -> None:
    metric = catalog.Metric(name="x", kind=catalog.Kind.HISTOGRAM, help=".", buckets=(1, 2))
    counted = tally.Tally([metric])
    for seconds in (0.0, 1.0, 1.5, 2.0, 2.5):
        counted.observe(metric, seconds=seconds)
    assert counted.histogram(metric) == {(): tally.Histogram(counts=(2, 2, 1), sum=7.0)}


def test_the_state_is_read_at_the_scrape() -> None:
    finding = model.Finding(code="x", severity=model.Severity.WARNING, subject="s", message="m")
    state = State()
    metrics = watching(state)
    before = scrape(metrics)
    assert "nearfield_devices" not in before
    assert "nearfield_slice_generation" not in before
    state.known = inventory.InventoryState(
        snapshot=snapshot(
            gpu("0000:1b:00.0", distance=model.PathClass.PIX),
            gpu("0000:1c:00.0", uuid="GPU-2", state=model.GpuState.LOST),
            gpu("0000:1d:00.0", uuid=None, state=model.GpuState.VFIO),
            findings=(finding, finding),
        ),
        read_at=123.0,
    )
    state.on_server = gauges.Published(
        slices=1, generation=4, tainted={"absent": 1, "unknown-reason": 7}, findings=(finding,)
    )
    state.on_disk = gauges.Recorded(claims=3, devices=frozenset())
    series = scrape(metrics)
    assert series["nearfield_devices"][labels(type="gpu", state="ready")] == 1
    assert series["nearfield_devices"][labels(type="gpu", state="lost")] == 1
    assert series["nearfield_devices"][labels(type="gpu", state="vfio")] == 1
    assert series["nearfield_devices"][labels(type="gpu", state="no-driver")] == 0
    assert series["nearfield_device_info"] == {
        labels(uuid="GPU-1", pci_bus_id="0000:1b:00.0", device="gpu-0000-1b-00-0", pool="n1", product="NVIDIA H100"): 1
    }
    assert series["nearfield_gpu_nic_pairs"][labels({"class": "PIX"})] == 1
    assert series["nearfield_gpu_nic_pairs"][labels({"class": "NONE"})] == 2
    assert series["nearfield_findings"][labels(severity="warning")] == 3
    assert series["nearfield_probe_last_success_timestamp_seconds"][()] == 123.0
    assert series["nearfield_slices_published"][()] == 1
    assert series["nearfield_slice_generation"][()] == 4
    assert series["nearfield_device_tainted"] == {labels(reason="absent"): 1}
    assert series["nearfield_claims_prepared"][()] == 3
    assert series["nearfield_kubelet_registered"][()] == 1
    assert series["nearfield_config_reload_failed"][()] == 0
    assert series["nearfield_ready"][()] == 0


def test_a_record_that_cannot_be_read_costs_its_own_series_only() -> None:
    state = State(known=inventory.InventoryState(snapshot=snapshot(gpu("0000:1b:00.0"))), on_disk=None)
    series = scrape(watching(state))
    assert "nearfield_claims_prepared" not in series
    assert "nearfield_aligned_sets_free" not in series
    assert series["nearfield_devices"][labels(type="gpu", state="ready")] == 1


def test_free_sets_are_those_of_ready_gpus_that_nobody_holds() -> None:
    pairs = [
        gpu("0000:01:00.0", pair="0000:01:00.0"),
        gpu("0000:02:00.0", pair="0000:01:00.0"),
        gpu("0000:03:00.0", pair="0000:03:00.0"),
        gpu("0000:04:00.0", pair="0000:03:00.0"),
        gpu("0000:05:00.0", pair="0000:05:00.0"),
        gpu("0000:06:00.0", pair="0000:05:00.0", state=model.GpuState.LOST),
        gpu("0000:07:00.0"),
    ]
    state = State(known=inventory.InventoryState(snapshot=snapshot(*pairs)))
    metrics = watching(state)
    assert scrape(metrics)["nearfield_aligned_sets_free"] == {labels(size="2"): 2, labels(size="4"): 0}
    state.on_disk = gauges.Recorded(claims=1, devices=frozenset(["gpu-0000-04-00-0"]))
    assert scrape(metrics)["nearfield_aligned_sets_free"] == {labels(size="2"): 1, labels(size="4"): 0}


def test_a_part_of_a_gpu_is_missed_by_its_set() -> None:
    pair = [gpu("0000:01:00.0", pair="0000:01:00.0"), gpu("0000:02:00.0", pair="0000:01:00.0")]
    parted = replace(
        pair[1],
        mig_mode=model.MigMode(current=True, pending=True),
        mig_profiles=(divided.profile(19, "1g.10gb", 1, range(7), 16, instances=7),),
        architecture="Hopper",
    )
    dynamic = partitions.Sharing(policies={parted.address: rules.Policy(mode=rules.Mode.MIG_DYNAMIC)})
    known = inventory.InventoryState(snapshot=snapshot(pair[0], parted))
    state = State(known=known, dividing=dynamic)
    metrics = watching(state)
    assert scrape(metrics)["nearfield_aligned_sets_free"][labels(size="2")] == 1
    assert scrape(metrics)["nearfield_mig_placeable"] == {labels(profile="1g.10gb"): 7}
    state.on_disk = gauges.Recorded(claims=1, devices=frozenset(["gpu-0000-02-00-0-mig-1g-10gb-19-3"]))
    series = scrape(metrics)
    assert series["nearfield_aligned_sets_free"][labels(size="2")] == 0
    assert series["nearfield_mig_placeable"] == {labels(profile="1g.10gb"): 6}
    assert series["nearfield_mig_instances"] == {labels(profile="1g.10gb", origin="ours"): 1}
    assert series["nearfield_mig_stranded_slices"] == {(): 0}


def test_shares_given_out_and_left() -> None:
    """By device, whoever has them; use and limit of all pods of a device together, as far as somebody knows them."""
    name = values.gpu_device_name(publishing.at(1))
    (device,) = sharers.shared(
        publishing.snapshot(publishing.gpu(1)),
        policies={publishing.at(1): portions.policy()},
        used=[portions.use(name, 1, gib=20, compute=25), portions.use(name, 2, gib=40, compute=50)],
    )

    def seen(pod: str, used: int | None, limit: int | None, *, of: str = name) -> sharers.Seen:
        return sharers.Seen(device=of, pod_uid=pod, claims=(values.ClaimUid("u-1"),), used=used, limit=limit)

    last_seen = (seen("a", 5, 20), seen("b", None, 40), seen("c", 7, None), seen("d", 9, 9, of="gpu-of-nobody"))
    series = scrape(watching(State(known=LOOKED, portions=(device,), last_seen=last_seen)))
    of = {"device": name, "uuid": device.uuid}
    info = labels(of, memory_enforcement="cgroup", compute_enforcement="mps")
    assert series["nearfield_shared_device_info"] == {info: 1}
    assert series["nearfield_sharers"] == {labels(of): 2}
    assert series["nearfield_sharers_most"] == {labels(of): 8}
    assert series["nearfield_shared_memory_bytes"] == {
        labels(of, state="given"): 60 << 30,
        labels(of, state="free"): 19 << 30,
        labels(of, state="stranded"): (81559 << 20) - (79 << 30),
    }
    assert series["nearfield_shared_compute_ratio"] == {
        labels(of, state="given"): 0.75,
        labels(of, state="free"): 0.25,
        labels(of, state="stranded"): 0,
    }
    assert series["nearfield_share_memory_used_bytes"] == {labels(of): 12}
    assert series["nearfield_share_memory_limit_bytes"] == {labels(of): 60}


def test_a_node_that_shares_nothing_has_no_series_of_shares() -> None:
    series = scrape(watching(State(known=LOOKED)))
    assert not {name for name in series if "share" in name}


def test_shares_that_take_turns_have_no_compute() -> None:
    (device,) = sharers.shared(
        publishing.snapshot(publishing.gpu(1)),
        policies={publishing.at(1): portions.policy(enforcement=portions.TURNS)},
    )
    series = scrape(watching(State(known=LOOKED, portions=(device,))))
    assert not {name for name in series if "compute" in name and "info" not in name}
    assert "nearfield_share_memory_limit_bytes" not in series


def test_samples_have_series_where_they_have_values_and_a_name() -> None:
    named, unnamed = gpu("0000:1b:00.0"), gpu("0000:1c:00.0", uuid=None)
    sampled = Sampled(
        answer=(
            model.GpuSample(address=named.address, utilization_ratio=0.5, memory_used_bytes=1024),
            model.GpuSample(address=unnamed.address, utilization_ratio=0.5),
            model.GpuSample(address=address.parse("0000:ff:00.0"), utilization_ratio=0.5),
        )
    )
    metrics = watching(State(known=inventory.InventoryState(snapshot=snapshot(named, unnamed))), sampled=sampled)
    series = scrape(metrics)
    joined = labels(device="gpu-0000-1b-00-0", uuid="GPU-1")
    assert series["nearfield_gpu_utilization_ratio"] == {joined: 0.5}
    assert series["nearfield_gpu_memory_used_bytes"] == {joined: 1024}


def test_unknown_samples_and_nodes_without_a_gpu_have_no_series() -> None:
    sampled = Sampled(answer=(model.GpuSample(address=address.parse("0000:1b:00.0")),))
    one = inventory.InventoryState(snapshot=snapshot(gpu("0000:1b:00.0")))
    assert "nearfield_gpu_utilization_ratio" not in scrape(watching(State(known=one), sampled=sampled))
    assert sampled.calls == 1
    none = replace(one, snapshot=snapshot(gpu("0000:1b:00.0", state=model.GpuState.LOST)))
    assert "nearfield_gpu_utilization_ratio" not in scrape(watching(State(known=none), sampled=sampled))
    assert sampled.calls == 1
    assert "nearfield_gpu_utilization_ratio" not in scrape(watching(State(known=one)))


def test_openmetrics_is_written_where_it_is_asked_for() -> None:
    state = State(known=inventory.InventoryState(snapshot=snapshot(gpu("0000:1b:00.0")), read_at=1.0))
    text, content_type = watching(state).exposition("application/openmetrics-text; version=1.0.0")
    assert content_type.startswith("application/openmetrics-text; version=1.0.0")
    families = {family.name for family in parse_openmetrics(text.decode())}  # type: ignore[no-untyped-call]
    assert {metric.name.removesuffix("_total") for metric in catalog.METRICS} <= families


def test_counting_does_not_import_the_library() -> None:
    code = (
        "import sys; from driver.observe.metrics import Metrics; m = Metrics(pool='n'); m.cdi_file_repaired();"
        "assert 'prometheus_client' not in sys.modules; m.exposition(); assert 'prometheus_client' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_the_documentation_lists_the_catalogue() -> None:
    """To rewrite the table: python -m driver.observe.catalog."""
    page = (ROOT / "docs/metrics.md").read_text(encoding="utf-8")
    assert catalog.table() in page
