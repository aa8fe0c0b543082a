# SPDX-License-Identifier: Apache-2.0
"""The prepare room as one thing: record, CDI files, locks and what works on them, built for the settings of an agent."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from discovery import limits, model, workers
from discovery.address import PciAddress
from driver import config, inventory
from driver.app import hardware, late, means, reports, sharing
from driver.mps import client
from driver.prepare import (
    attempt,
    cdi,
    cdidir,
    cgroups,
    collector,
    devnodes,
    enforcing,
    epoch,
    executor,
    gpusettings,
    hands,
    index,
    locks,
    metadatadir,
    modes,
    nodespec,
    partitions,
    releasing,
    rootfs,
    store,
    timeslices,
)
from driver.sharing import effective, policy, rules, shares

if TYPE_CHECKING:
    from driver.prepare import keeping


@dataclass(frozen=True, kw_only=True)
class PrepareRoom:
    """What serves claims. `reader` gets its client of the API server later."""

    record: store.Store
    policies: effective.Effective
    means: means.Watched
    leadership: epoch.Epoch
    node_spec: nodespec.NodeSpec
    reader: late.LateReader
    executor: executor.Executor
    collector: collector.Collector
    releaser: releasing.Releaser
    make_keeper: Callable[[], keeping.Keeper]
    own: partitions.Own
    workers: workers.Workers

    def open(self) -> None:
        """Open the record, take a place among the instances, bring files and rows together."""
        self.record.open()
        self.leadership.take(self.record)
        self.collector.reconcile()

    def expect_work(self, snapshot: model.Snapshot | None) -> bool:
        """Have a worker ready where GPUs are divided at need, or are shared by what it sets, so that the first claim need not wait for
        one to start; whether.
        """
        if snapshot is None:
            return False
        wanted = policy.resolve(self.policies.rules, snapshot.gpus, can=self.means.can(snapshot)).policies
        needed = any(how.mode is rules.Mode.MIG_DYNAMIC or _is_set(how) for how in wanted.values())
        if needed:
            self.workers.start()
        return needed


def build(
    settings: config.Settings,
    *,
    given: Sequence[rules.Rule],
    boot_id: str,
    readings: inventory.Inventory,
    told: reports.Reports,
    stop: threading.Event,
    stack: contextlib.ExitStack,
) -> PrepareRoom:
    """Build the room; what it holds open is closed by `stack`. Nothing is read or written yet but lock files. `given`: the rules by
    which GPUs are shared.
    """
    dialect = cdi.Dialect(
        driver=settings.driver_name, mock=settings.mocked, mps=PurePosixPath(settings.mps_dir.absolute())
    )
    node = attempt.Node(dialect=dialect, pool=settings.node_name, boot_id=boot_id)
    record = store.Store(
        settings.state_dir,
        boot_id=boot_id,
        salvage=lambda: directory.entries(boot_id=boot_id),
        reports=told,
    )
    stack.callback(record.close)
    described = metadatadir.MetadataDirectory(
        (settings.plugin_dir / metadatadir.FOLDER).absolute(),
        driver=settings.driver_name,
        published=record.published_attributes,
    )
    directory = cdidir.CdiDirectory(settings.cdi_dir, dialect=dialect, described=described)
    driver_root = rootfs.installed(settings.driver_root, mount=settings.driver_root_mount, mocked=settings.mocked)
    supervisor = client.Client(settings.mps_dir)
    turns = timeslices.TimeSlices(driver_root)
    pods = cgroups.Cgroups(hardware.cgroup_root(settings))
    watched = means.Watched(
        directory=settings.mps_dir,
        ability=supervisor.ability,
        time_slices=turns.problem,
        pods=pods.problem if hardware.has_pods(settings) else lambda: None,
    )
    policies = sharing.build(record, given, can=watched.can)
    leadership = epoch.Epoch(settings.state_dir)
    stack.callback(leadership.close)
    claim_locks = locks.Locks(settings.state_dir, stop=stop)
    nodes = devnodes.DeviceNodes(hardware.source(settings).dev, mock=settings.mocked)
    node_spec = nodespec.NodeSpec(
        directory,
        dialect=dialect,
        root=driver_root,
        nodes=nodes,
        node_locks=claim_locks,
        driver_version=lambda: _driver_version(readings),
    )
    reader = late.LateReader()
    own = partitions.Own(record)
    working = workers.Workers(source=hardware.source(settings), locks=locks.directory(settings.state_dir))
    stack.callback(working.close)
    worker = hands.Hands(working)
    gpu_modes = modes.Modes(
        working,
        turns,
        gpusettings.GpuSettings(settings.state_dir, boot_id=boot_id),
        seen=lambda gpu: _seen_mode(readings, gpu),
    )
    enforcer = enforcing.Enforcer(working, supervisor, pods, gpu_modes)

    def make_keeper() -> keeping.Keeper:
        from driver.prepare import keeping, settling  # noqa: PLC0415 - kubelet need not wait for it

        return keeping.Keeper(
            keeping.Rows(record, boot_id=boot_id),
            record=record,
            files=directory,
            claim_locks=claim_locks,
            leads=leadership.leads,
            enforcer=enforcer,
            settler=settling.Settler(working, pods, gpu_modes),
            gpu_modes=gpu_modes,
            pods=pods,
            gpus=lambda: sharing.gpus(readings.snapshot(), policies),
            api=reader,
            supervisor=supervisor,
            events=told,
            stop=stop,
        )

    releaser = releasing.Releaser(
        boot_id,
        record=record,
        hardware=worker,
        enforcer=enforcer,
        own=own,
        claim_locks=claim_locks,
        leadership=leadership,
        stop=stop,
    )
    attempts = attempt.Attempts(
        node,
        record=record,
        directory=directory,
        node_spec=node_spec,
        nodes=nodes,
        claim_locks=claim_locks,
        reader=reader,
        index=index.InventoryIndex(readings.state, look_again=readings.request_probe, policies=policies.policies),
        hardware=worker,
        releaser=releaser,
        reserve_s=executor.RESERVE_S,
    )
    answers = executor.Executor(
        attempts,
        record=record,
        directory=directory,
        claim_locks=claim_locks,
        releaser=releaser,
        reports=told,
        stop=stop,
    )
    care = collector.Collector(
        node,
        record=record,
        directory=directory,
        node_spec=node_spec,
        claim_locks=claim_locks,
        reader=reader,
        unpreparer=answers,
        leadership=leadership,
        reports=told,
        stop=stop,
        interval_s=settings.collect_interval_s,
    )
    return PrepareRoom(
        record=record,
        policies=policies,
        means=watched,
        leadership=leadership,
        node_spec=node_spec,
        reader=reader,
        executor=answers,
        collector=care,
        releaser=releaser,
        make_keeper=make_keeper,
        own=own,
        workers=working,
    )


def _is_set(how: rules.Policy) -> bool:
    """Whether something is set on the GPU for each share: a limit, or a compute mode."""
    by = how.enforcement
    return by is not None and (by.memory is shares.Memory.CGROUP or by.by_mps or by.by_legacy_mps)


def _seen_mode(readings: inventory.Inventory, address: PciAddress) -> limits.ComputeMode | None:
    """The compute mode of a GPU as it was last read."""
    snapshot = readings.snapshot()
    gpu = None if snapshot is None else snapshot.gpu(address)
    return None if gpu is None else gpu.compute_mode


def _driver_version(readings: inventory.Inventory) -> str | None:
    """The version of the loaded NVIDIA driver as it was last read."""
    snapshot = readings.snapshot()
    return None if snapshot is None or snapshot.nvidia_driver is None else snapshot.nvidia_driver.version
