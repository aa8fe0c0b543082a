# SPDX-License-Identifier: Apache-2.0
"""Every metric of the agent: name, kind, meaning and labels, in one table. docs/metrics.md is written from it.

Base units; `_total` for counters only; labels are bounded: those with a known set of values start at zero, the others are
bounded by the hardware. No claim, pod or user ever is a label.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum

from discovery import model, uevents
from driver.observe import partitions, sharers

OTHER = "other"
"""Stands for a label value that is not in its set, so that a set stays bounded whatever is counted."""

RESULTS = ("success", "error")

RPC_METHODS = ("NodePrepareResources", "NodeUnprepareResources")

CALL_BUCKETS_S = (0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 45)
"""A prepare takes milliseconds, and at most kubelet's deadline of 45 s."""

PROBE_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class Kind(StrEnum):
    """How a metric behaves, in the words of the exposition format."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True, kw_only=True)
class Label:
    """A label; `values` is None where the hardware bounds it."""

    name: str
    values: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One metric."""

    name: str
    kind: Kind
    help: str
    labels: tuple[Label, ...] = field(default=())
    buckets: tuple[float, ...] = ()

    def zero_series(self) -> Iterable[tuple[str, ...]]:
        """The label values that exist before anything was counted."""
        return itertools.product(*(label.values or () for label in self.labels))

    def bounded(self, values: tuple[str, ...]) -> tuple[str, ...]:
        """Label values with `other` for what is in no set."""
        return tuple(
            value if label.values is None or value in label.values else OTHER
            for label, value in zip(self.labels, values, strict=True)
        )


_DEVICE = (Label(name="device"), Label(name="uuid"))
_RESULT = Label(name="result", values=RESULTS)

BUILD_INFO = Metric(
    name="nearfield_build_info",
    kind=Kind.GAUGE,
    help="Always 1; the version of the agent and of Python.",
    labels=(Label(name="version"), Label(name="python")),
)
READY = Metric(name="nearfield_ready", kind=Kind.GAUGE, help="1 when /readyz answers 200.")
RPC_TOTAL = Metric(
    name="nearfield_rpc_total",
    kind=Kind.COUNTER,
    help="Calls of kubelet; error: at least one claim of the call failed.",
    labels=(Label(name="method", values=RPC_METHODS), _RESULT),
)
RPC_SECONDS = Metric(
    name="nearfield_rpc_duration_seconds",
    kind=Kind.HISTOGRAM,
    help="Time to answer a call of kubelet.",
    labels=(Label(name="method", values=RPC_METHODS),),
    buckets=CALL_BUCKETS_S,
)
_CLAIM_RESULT = Label(name="result", values=("success", "repeated", "error"))
PREPARE_TOTAL = Metric(
    name="nearfield_prepare_total",
    kind=Kind.COUNTER,
    help="Claims that kubelet asked to prepare; repeated: it was prepared already, and answered from the record.",
    labels=(_CLAIM_RESULT,),
)
PREPARE_SECONDS = Metric(
    name="nearfield_prepare_duration_seconds",
    kind=Kind.HISTOGRAM,
    help="Time to prepare one claim, waiting for the API server and for devices included, repeats left out.",
    buckets=CALL_BUCKETS_S,
)
UNPREPARE_TOTAL = Metric(
    name="nearfield_unprepare_total",
    kind=Kind.COUNTER,
    help="Claims that kubelet asked to unprepare; repeated: it was not prepared any more.",
    labels=(_CLAIM_RESULT,),
)
UNPREPARE_SECONDS = Metric(
    name="nearfield_unprepare_duration_seconds",
    kind=Kind.HISTOGRAM,
    help="Time to unprepare one claim, repeats left out.",
    buckets=CALL_BUCKETS_S,
)
CLAIMS_PREPARED = Metric(name="nearfield_claims_prepared", kind=Kind.GAUGE, help="Claims in the record of this node.")
CLAIMS_COLLECTED = Metric(
    name="nearfield_claims_collected_total",
    kind=Kind.COUNTER,
    help="Claims that were gone from the API server and that kubelet had not asked to unprepare.",
)
RECORD_ERRORS = Metric(
    name="nearfield_record_errors_total",
    kind=Kind.COUNTER,
    help="Uses of the record of prepared claims that failed, and attempts to open it; /readyz says why.",
)
RECORD_REBUILT = Metric(
    name="nearfield_record_rebuilt_total",
    kind=Kind.COUNTER,
    help="Times that the record was damaged, moved aside and rebuilt.",
)
CDI_RECONCILED = Metric(
    name="nearfield_cdi_reconciled_total",
    kind=Kind.COUNTER,
    help="CDI files of prepared claims that were lost or changed, and put right.",
)
PROBE_SECONDS = Metric(
    name="nearfield_probe_duration_seconds",
    kind=Kind.HISTOGRAM,
    help="Time of a full look at the hardware that succeeded.",
    buckets=PROBE_BUCKETS_S,
)
PROBE_ERRORS = Metric(
    name="nearfield_probe_errors_total",
    kind=Kind.COUNTER,
    help="Looks at the hardware that gave nothing, by the kind of look.",
    labels=(Label(name="reason", values=("probe", "rescan", "sample", OTHER)),),
)
UEVENTS_TOTAL = Metric(
    name="nearfield_uevents_total",
    kind=Kind.COUNTER,
    help="Messages of the kernel about devices: a look follows upon those that are heeded or overrun.",
    labels=(Label(name="result", values=tuple(uevents.Heard)),),
)
PROBE_LAST_SUCCESS = Metric(
    name="nearfield_probe_last_success_timestamp_seconds",
    kind=Kind.GAUGE,
    help="When the hardware was last read, full or cheap; no series before the first time.",
)
DEVICES = Metric(
    name="nearfield_devices",
    kind=Kind.GAUGE,
    help="GPUs found on this node, by state; only ready ones can be handed out.",
    labels=(Label(name="type", values=("gpu",)), Label(name="state", values=tuple(model.GpuState))),
)
DEVICE_INFO = Metric(
    name="nearfield_device_info",
    kind=Kind.GAUGE,
    help="Always 1; joins the names of a device: Kubernetes', NVML's and the PCI bus's.",
    labels=(
        Label(name="uuid"),
        Label(name="pci_bus_id"),
        Label(name="device"),
        Label(name="pool"),
        Label(name="product"),
    ),
)
GPU_UTILIZATION = Metric(
    name="nearfield_gpu_utilization_ratio",
    kind=Kind.GAUGE,
    help="Part of the driver's last sampling period in which a kernel ran, 0 to 1; read at most every 15 s.",
    labels=_DEVICE,
)
GPU_MEMORY_USED = Metric(
    name="nearfield_gpu_memory_used_bytes",
    kind=Kind.GAUGE,
    help="Memory of the GPU in use; read at most every 15 s.",
    labels=_DEVICE,
)
GPU_NIC_PAIRS = Metric(
    name="nearfield_gpu_nic_pairs",
    kind=Kind.GAUGE,
    help="GPUs by the path to their paired NIC.",
    labels=(Label(name="class", values=(*model.PathClass, "NONE")),),
)
ALIGNED_SETS_FREE = Metric(
    name="nearfield_aligned_sets_free",
    kind=Kind.GAUGE,
    help="Aligned pairs (size 2) and quads (size 4) of GPUs that could all be handed out whole now.",
    labels=(Label(name="size", values=("2", "4")),),
)
_PROFILE = Label(name="profile")
MIG_INSTANCES = Metric(
    name="nearfield_mig_instances",
    kind=Kind.GAUGE,
    help="MIG instances by profile; ours: made for a claim, static: made by somebody and handed out, foreign: in the way.",
    labels=(_PROFILE, Label(name="origin", values=tuple(partitions.Origin))),
)
MIG_PLACEABLE = Metric(
    name="nearfield_mig_placeable",
    kind=Kind.GAUGE,
    help="How many more MIG instances of a profile there is room for if none of another is made, of those that are offered.",
    labels=(_PROFILE,),
)
MIG_STRANDED = Metric(
    name="nearfield_mig_stranded_slices",
    kind=Kind.GAUGE,
    help="Free memory slices of divided GPUs that no profile which is offered can use any more.",
)
_PORTION = Label(name="state", values=tuple(sharers.PortionState))
SHARED_INFO = Metric(
    name="nearfield_shared_device_info",
    kind=Kind.GAUGE,
    help="Always 1; a GPU or MIG instance that is handed out in shares, and what keeps them apart.",
    labels=(*_DEVICE, Label(name="memory_enforcement"), Label(name="compute_enforcement")),
)
SHARERS = Metric(
    name="nearfield_sharers", kind=Kind.GAUGE, help="Shares of a device that claims have now.", labels=_DEVICE
)
SHARERS_MOST = Metric(
    name="nearfield_sharers_most", kind=Kind.GAUGE, help="Shares of a device that there may be.", labels=_DEVICE
)
SHARED_MEMORY = Metric(
    name="nearfield_shared_memory_bytes",
    kind=Kind.GAUGE,
    help="Memory of a shared device; given: claims have it, free: another share can have it, stranded: left, and no share can.",
    labels=(*_DEVICE, _PORTION),
)
SHARED_COMPUTE = Metric(
    name="nearfield_shared_compute_ratio",
    kind=Kind.GAUGE,
    help="Compute of a shared device, as a part of the multiprocessors of its GPU; no series where sharers take turns.",
    labels=(*_DEVICE, _PORTION),
)
SHARE_LIMIT = Metric(
    name="nearfield_share_memory_limit_bytes",
    kind=Kind.GAUGE,
    help="Memory of a device that pods with a limit may have together, as the driver held it when it was last asked.",
    labels=_DEVICE,
)
SHARE_USED = Metric(
    name="nearfield_share_memory_used_bytes",
    kind=Kind.GAUGE,
    help="Memory of a device that pods with a limit used together, as the driver said when it was last asked.",
    labels=_DEVICE,
)
FINDINGS = Metric(
    name="nearfield_findings",
    kind=Kind.GAUGE,
    help="Odd things found on this node and in publishing it, by severity; the page /topology lists them.",
    labels=(Label(name="severity", values=tuple(model.Severity)),),
)
SLICES_PUBLISHED = Metric(
    name="nearfield_slices_published", kind=Kind.GAUGE, help="ResourceSlices of this node that stand on the API server."
)
SLICE_GENERATION = Metric(
    name="nearfield_slice_generation",
    kind=Kind.GAUGE,
    help="Generation of the pool; no series while nothing is published.",
)
SLICE_PUBLISH_TOTAL = Metric(
    name="nearfield_slice_publish_total",
    kind=Kind.COUNTER,
    help="Writes of ResourceSlices to the API server.",
    labels=(Label(name="verb", values=("create", "update", "delete")), _RESULT),
)
DEVICE_TAINTED = Metric(
    name="nearfield_device_tainted",
    kind=Kind.GAUGE,
    help="Published devices that carry a taint of ours.",
    labels=(Label(name="reason", values=("absent",)),),
)
CONFIG_RELOAD_FAILED = Metric(
    name="nearfield_config_reload_failed",
    kind=Kind.GAUGE,
    help="1 while the configuration file is not valid, and what was read before stays in effect; /readyz says why.",
)
KUBELET_REGISTERED = Metric(
    name="nearfield_kubelet_registered", kind=Kind.GAUGE, help="1 when kubelet has taken the driver."
)
HEALTH_EVENTS = Metric(
    name="nearfield_health_events_total",
    kind=Kind.COUNTER,
    help="Changes of a device's health, by what it became.",
    labels=(Label(name="kind", values=("healthy", "unhealthy", "unknown")),),
)
EVENTS_TOTAL = Metric(
    name="nearfield_events_total",
    kind=Kind.COUNTER,
    help="Kubernetes Events written for people.",
    labels=(_RESULT,),
)

METRICS: tuple[Metric, ...] = (
    BUILD_INFO,
    READY,
    DEVICES,
    DEVICE_INFO,
    GPU_UTILIZATION,
    GPU_MEMORY_USED,
    GPU_NIC_PAIRS,
    ALIGNED_SETS_FREE,
    MIG_INSTANCES,
    MIG_PLACEABLE,
    MIG_STRANDED,
    SHARED_INFO,
    SHARERS,
    SHARERS_MOST,
    SHARED_MEMORY,
    SHARED_COMPUTE,
    SHARE_LIMIT,
    SHARE_USED,
    FINDINGS,
    PROBE_SECONDS,
    PROBE_ERRORS,
    PROBE_LAST_SUCCESS,
    UEVENTS_TOTAL,
    SLICES_PUBLISHED,
    SLICE_GENERATION,
    SLICE_PUBLISH_TOTAL,
    DEVICE_TAINTED,
    CONFIG_RELOAD_FAILED,
    KUBELET_REGISTERED,
    RPC_TOTAL,
    RPC_SECONDS,
    CLAIMS_PREPARED,
    PREPARE_TOTAL,
    PREPARE_SECONDS,
    UNPREPARE_TOTAL,
    UNPREPARE_SECONDS,
    CLAIMS_COLLECTED,
    RECORD_ERRORS,
    RECORD_REBUILT,
    CDI_RECONCILED,
    HEALTH_EVENTS,
    EVENTS_TOTAL,
)
"""In the order of the documentation: the node, what is published, what kubelet asks."""


def table() -> str:
    """The catalogue as a Markdown table."""
    rows = ["| metric | kind | labels | meaning |", "|---|---|---|---|"]
    for metric in METRICS:
        labels = "; ".join(
            f"`{label.name}`" + (f" ({', '.join(label.values)})" if label.values else "") for label in metric.labels
        )
        rows.append(f"| `{metric.name}` | {metric.kind} | {labels} | {metric.help} |")
    return "\n".join(rows) + "\n"


if __name__ == "__main__":
    sys.stdout.write(table())
