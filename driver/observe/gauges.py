# SPDX-License-Identifier: Apache-2.0
"""From the state of the agent to the values of its gauges. What it reads, it reads through the Protocol here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from discovery import model
from discovery.address import PciAddress
from driver import inventory, values
from driver.errors import DriverError
from driver.observe import catalog, partitions, sharers
from driver.sharing import shares


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """What stands on the API server for this node. `generation` is None or 0 before the first write of a slice; `tainted`:
    reason -> number of devices; `findings`: what was odd about it.
    """

    slices: int = 0
    generation: int | None = None
    tainted: Mapping[str, int] = field(default_factory=dict)
    findings: tuple[model.Finding, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """What the record of prepared claims holds. `devices`: names of all devices that a claim holds."""

    claims: int = 0
    devices: frozenset[str] = frozenset()


class AgentState(Protocol):
    """What the agent knows now. Every method answers at once and may be called from every thread."""

    def inventory(self) -> inventory.InventoryState:
        """The newest Snapshot, and when the hardware was read."""

    def published(self) -> Published:
        """What is published."""

    def recorded(self) -> Recorded:
        """What is prepared. May raise RecordError."""

    def sharing(self) -> partitions.Sharing:
        """How the GPUs are shared."""

    def shared(self) -> Sequence[sharers.Shared]:
        """The devices that are handed out in shares. May raise RecordError."""

    def seen(self) -> Sequence[sharers.Seen]:
        """What pods with a limit were last seen to use."""

    def config_refused(self) -> bool:
        """Whether the configuration file is not valid now."""

    def registered(self) -> bool:
        """Whether kubelet has taken the driver."""

    def ready(self) -> bool:
        """Whether /readyz would answer 200."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """One series of a gauge."""

    metric: catalog.Metric
    labels: tuple[str, ...] = ()
    value: float


def read(state: AgentState, *, pool: str, samples: Iterable[model.GpuSample]) -> Iterator[Reading]:
    """Every gauge that is known now. What cannot be read has no series; it takes no other gauge with it."""
    now = state.inventory()
    if now.read_at is not None:
        yield Reading(metric=catalog.PROBE_LAST_SUCCESS, value=now.read_at)
    recorded = _recorded(state)
    if recorded is not None:
        yield Reading(metric=catalog.CLAIMS_PREPARED, value=recorded.claims)
    if now.snapshot is not None:
        yield from _hardware(now.snapshot, pool=pool)
        yield from _samples(now.snapshot, samples)
        if recorded is not None:
            sharing = state.sharing()
            yield from _free_sets(now.snapshot, sharing, recorded.devices)
            yield from _partitions(now.snapshot, sharing, recorded.devices)
        yield from _shares(state)
    published = state.published()
    if now.snapshot is not None:
        found = (*now.snapshot.findings, *published.findings)
        yield from _counted(catalog.FINDINGS, Counter(str(finding.severity) for finding in found))
    yield Reading(metric=catalog.SLICES_PUBLISHED, value=published.slices)
    if published.generation:
        yield Reading(metric=catalog.SLICE_GENERATION, value=published.generation)
    yield from _counted(catalog.DEVICE_TAINTED, published.tainted)
    yield Reading(metric=catalog.CONFIG_RELOAD_FAILED, value=state.config_refused())
    yield Reading(metric=catalog.KUBELET_REGISTERED, value=state.registered())
    yield Reading(metric=catalog.READY, value=state.ready())


def _recorded(state: AgentState) -> Recorded | None:
    try:
        return state.recorded()
    except DriverError:
        return None


def _hardware(snapshot: model.Snapshot, *, pool: str) -> Iterator[Reading]:
    states = Counter(gpu.state for gpu in snapshot.gpus)
    for state in model.GpuState:
        yield Reading(metric=catalog.DEVICES, labels=("gpu", state), value=states[state])
    for gpu in snapshot.gpus:
        if gpu.state is model.GpuState.READY and gpu.uuid is not None:
            name = values.gpu_device_name(gpu.address)
            labels = (gpu.uuid, str(gpu.address), name, pool, gpu.product or "")
            yield Reading(metric=catalog.DEVICE_INFO, labels=labels, value=1)
    yield from _counted(
        catalog.GPU_NIC_PAIRS, Counter("NONE" if gpu.nic is None else str(gpu.nic.distance) for gpu in snapshot.gpus)
    )


def _samples(snapshot: model.Snapshot, samples: Iterable[model.GpuSample]) -> Iterator[Reading]:
    for sample in samples:
        gpu = snapshot.gpu(sample.address)
        if gpu is None or gpu.uuid is None:
            continue
        labels = (values.gpu_device_name(gpu.address), gpu.uuid)
        if sample.utilization_ratio is not None:
            yield Reading(metric=catalog.GPU_UTILIZATION, labels=labels, value=sample.utilization_ratio)
        if sample.memory_used_bytes is not None:
            yield Reading(metric=catalog.GPU_MEMORY_USED, labels=labels, value=sample.memory_used_bytes)


def _free_sets(snapshot: model.Snapshot, sharing: partitions.Sharing, held: frozenset[str]) -> Iterator[Reading]:
    usable = {gpu.address: partitions.free_whole(gpu, sharing=sharing, held=held) for gpu in snapshot.gpus}
    for size, groups in (
        ("2", {gpu.address: gpu.groups.aligned_pair for gpu in snapshot.gpus}),
        ("4", {gpu.address: gpu.groups.aligned_quad for gpu in snapshot.gpus}),
    ):
        free: dict[PciAddress, bool] = {}
        for gpu in snapshot.gpus:
            group = groups[gpu.address]
            if group is not None:
                free[group] = free.get(group, True) and usable[gpu.address]
        yield Reading(metric=catalog.ALIGNED_SETS_FREE, labels=(size,), value=sum(free.values()))


def _partitions(snapshot: model.Snapshot, sharing: partitions.Sharing, held: frozenset[str]) -> Iterator[Reading]:
    """Nothing is divided on a node without MIG: it has no such series but the one without a label."""
    counted = partitions.count(snapshot, sharing=sharing, held=held)
    for (profile, origin), number in sorted(counted.instances.items()):
        yield Reading(metric=catalog.MIG_INSTANCES, labels=(profile, origin), value=number)
    for profile, number in sorted(counted.placeable.items()):
        yield Reading(metric=catalog.MIG_PLACEABLE, labels=(profile,), value=number)
    yield Reading(metric=catalog.MIG_STRANDED, value=counted.stranded)


def _shares(state: AgentState) -> Iterator[Reading]:
    """A node whose GPUs are not shared has no such series."""
    try:
        shared = state.shared()
    except DriverError:
        return
    limits: Counter[str] = Counter()
    use: Counter[str] = Counter()
    for seen in state.seen() if shared else ():
        if seen.limit is not None:
            limits[seen.device] += seen.limit
        if seen.used is not None:
            use[seen.device] += seen.used
    for entry in shared:
        labels = (entry.device, entry.uuid)
        by = (str(entry.enforcement.memory), str(entry.enforcement.compute))
        yield Reading(metric=catalog.SHARED_INFO, labels=(*labels, *by), value=1)
        yield Reading(metric=catalog.SHARERS, labels=labels, value=entry.sharers)
        yield Reading(metric=catalog.SHARERS_MOST, labels=labels, value=entry.terms.sharers)
        for part, amount in entry.memory.by_state().items():
            yield Reading(metric=catalog.SHARED_MEMORY, labels=(*labels, part), value=amount)
        for part, amount in entry.compute.by_state().items() if entry.compute is not None else ():
            ratio = amount / shares.COMPUTE_WHOLE
            yield Reading(metric=catalog.SHARED_COMPUTE, labels=(*labels, part), value=ratio)
        if entry.device in limits:
            yield Reading(metric=catalog.SHARE_LIMIT, labels=labels, value=limits[entry.device])
        if entry.device in use:
            yield Reading(metric=catalog.SHARE_USED, labels=labels, value=use[entry.device])


def _counted(metric: catalog.Metric, counts: Mapping[str, int]) -> Iterator[Reading]:
    """One series for each known value of a metric's only label; what is unknown is left out."""
    for (value,) in metric.zero_series():
        yield Reading(metric=metric, labels=(value,), value=counts.get(value, 0))
