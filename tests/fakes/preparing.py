# SPDX-License-Identifier: Apache-2.0
"""The prepare room with a node of eight mock GPUs around it: claims in a folder of files, so that another process can read
them too, and the whole composition that the agent has.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from discovery import address, mig, model, work, workers
from driver import values
from driver.errors import ApiError, ApiReason
from driver.prepare import (
    attempt,
    cdi,
    cdidir,
    collector,
    devnodes,
    epoch,
    executor,
    files,
    hands,
    ledger,
    locks,
    metadatadir,
    nodespec,
    partitions,
    plan,
    releasing,
    rootfs,
    store,
    tenancy,
)
from driver.sharing import shares
from tests.fakes import enforced, mighands, mockmachine

DRIVER = values.DRIVER_NAME
POOL = "node-1"
BOOT_ID = "11111111-2222-3333-4444-555555555555"
ADDRESSES = tuple(address.PciAddress(0, 0x10 + number, 0, 0) for number in range(8))
GIB = 1 << 30
NAMES = tuple(values.gpu_device_name(place) for place in ADDRESSES)


def ref(number: int, *, name: str | None = None) -> values.ClaimRef:
    """A claim as kubelet names it."""
    return values.ClaimRef(
        uid=values.ClaimUid(f"0000{number:04d}-aaaa-4bbb-8ccc-0123456789ab"),
        namespace="team-a",
        name=name or f"claim-{number}",
    )


def result(device: str, *, request: str = "gpu", driver: str = DRIVER, pool: str = POOL, **more: Any) -> dict[str, Any]:
    """One allocation result."""
    return {"request": request, "driver": driver, "pool": pool, "device": device, **more}


def claim(
    named: values.ClaimRef, results: Sequence[dict[str, Any]], *, config: Sequence[dict[str, Any]] = ()
) -> dict[str, Any]:
    """An allocated ResourceClaim as the API server gives it."""
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaim",
        "metadata": {"name": named.name, "namespace": named.namespace, "uid": named.uid},
        "spec": {"devices": {"requests": [{"name": "gpu", "exactly": {"deviceClassName": "gpu.nearfield.dev"}}]}},
        "status": {"allocation": {"devices": {"results": list(results), "config": list(config)}}},
    }


class ClaimFolder:
    """An API server's claims, one file each; `down` makes it unreachable for every process that uses the folder."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.reads = 0
        path.mkdir(parents=True, exist_ok=True)

    def put(self, named: values.ClaimRef, document: Any) -> None:
        """Make or replace a claim, whole for whoever reads it meanwhile."""
        path = self._file(named.namespace, named.name)
        written = path.with_suffix(".new")
        written.write_text(json.dumps(document))
        written.replace(path)

    def allocate(self, named: values.ClaimRef, *devices: str) -> values.ClaimRef:
        """Make a claim that has these devices, and name it."""
        self.put(named, claim(named, [result(device) for device in devices]))
        return named

    def allocate_shares(
        self, named: values.ClaimRef, *results: dict[str, Any], pods: Sequence[dict[str, str]] | None = None
    ) -> values.ClaimRef:
        """Make a claim with these results, reserved for one pod if for no other, and name it."""
        document = claim(named, results)
        document["status"]["reservedFor"] = [pod(int(named.uid[4:8]))] if pods is None else list(pods)
        self.put(named, document)
        return named

    def delete(self, named: values.ClaimRef) -> None:
        """Delete a claim."""
        self._file(named.namespace, named.name).unlink()

    def down(self, *, is_down: bool) -> None:
        """Make it unreachable, or reachable again."""
        if is_down:
            (self._path / "down").touch()
        else:
            (self._path / "down").unlink(missing_ok=True)

    def get_claim(self, namespace: str, name: str, *, timeout_s: float) -> Any:
        """As the API client."""
        assert timeout_s > 0
        self.reads += 1
        if (self._path / "down").exists():
            raise ApiError("the API server is not reached", reason=ApiReason.UNAVAILABLE)
        try:
            return json.loads(self._file(namespace, name).read_bytes())
        except FileNotFoundError:
            raise ApiError(f"claims {name!r} not found", reason=ApiReason.NOT_FOUND, status=404) from None

    def _file(self, namespace: str, name: str) -> Path:
        return self._path / f"{namespace}_{name}.json"


class FixedIndex:
    """Eight ready GPUs that are given out whole, until a test says otherwise."""

    def __init__(self, hardware: mighands.Hands | None = None) -> None:
        self.devices: dict[str, plan.Device | plan.NotThere] = {
            values.gpu_device_name(place): gpu(number) for number, place in enumerate(ADDRESSES)
        }
        self.looks = 0
        self._hardware = hardware

    def divide(self, *, toggle: bool = True) -> None:
        """From now on all GPUs are of mode mig-dynamic."""
        for number, place in enumerate(ADDRESSES):
            whole = replace(gpu(number), divisible=True, toggle=toggle)
            self.devices[whole.name] = whole
            for profile, starts in mighands.PLACES.items():
                for start in starts:
                    part = plan.PartitionDevice(
                        name=part_name(number, profile, start),
                        gpu=whole,
                        partition=mig.Partition(gpu=place, profile_id=profile, start=start),
                        place=mig.MigPlacement(start=start, size=mighands.SIZES[profile]),
                        dynamic=True,
                    )
                    self.devices[part.name] = part

    def share(
        self,
        *,
        memory: shares.Memory = shares.Memory.CGROUP,
        compute: shares.Compute = shares.Compute.NONE,
        default_compute: int | None = None,
        sharers: int = 8,
    ) -> None:
        """From now on all GPUs are of mode shares, and so are MIG instances that somebody made, if `divide` was called before."""
        for name, device in self.devices.items():
            if isinstance(device, plan.NotThere):
                continue
            part = isinstance(device, plan.PartitionDevice)
            self.devices[name] = replace(
                device,
                sharing=sharing(
                    memory=memory,
                    compute=compute,
                    default_compute=default_compute,
                    sharers=sharers,
                    gib=10 if part else 80,
                    percent=14 if part else 100,
                ),
            )

    def find(self, name: str) -> plan.Device | plan.NotThere:
        """As the inventory's index."""
        return self.devices.get(name) or plan.NotThere(reason="no GPU of this name is on this node", retryable=False)

    def lacks(self, name: str, uuid: str, *, since: float) -> bool:
        """What the hardware says, as if it had been looked at just now."""
        assert since < time.time()
        device = self.devices[name]
        assert isinstance(device, plan.PartitionDevice)
        if self._hardware is None or not device.dynamic:
            return device.instance is None or device.instance.uuid != uuid
        seen = self._hardware.seen(device.partition.gpu, device.partition)
        return seen is None or seen.uuid != uuid

    def look_again(self) -> None:
        """Counted."""
        self.looks += 1


def sharing(
    *,
    memory: shares.Memory = shares.Memory.CGROUP,
    compute: shares.Compute = shares.Compute.NONE,
    default_compute: int | None = None,
    sharers: int = 8,
    gib: int = 80,
    percent: int = 100,
) -> tenancy.Sharing:
    """How a device with half a GiB more than so many is shared, in steps of 1Gi and of 5 percent."""
    policy = shares.Shares(
        memory_step=GIB,
        compute_step=5,
        max_sharers=sharers,
        memory=memory,
        compute=compute,
        default_compute=default_compute,
    )
    levels = shares.Enforcement(memory=memory, compute=compute)
    terms = shares.terms(policy, levels, memory_bytes=gib * GIB + GIB // 2, compute=percent)
    assert terms is not None
    return tenancy.Sharing(terms=terms, policy=policy, enforcement=levels)


def share(
    device: str, share_id: str, *, memory: str = "20Gi", compute: str | None = "25", request: str = "gpu", **more: Any
) -> dict[str, Any]:
    """An allocation result that is a share."""
    consumed = {"memory": memory, "shares": "1"} | ({} if compute is None else {"compute": compute})
    return result(device, request=request, shareID=share_id, consumedCapacity=consumed, **more)


def share_id(number: int) -> str:
    """As the scheduler makes them."""
    return f"{number:08d}-5555-4666-8777-0123456789ab"


def pod(number: int) -> dict[str, str]:
    """A pod for which a claim is reserved."""
    return {"resource": "pods", "name": f"pod-{number}", "uid": f"0000{number:04d}-9999-4bbb-8ccc-0123456789ab"}


def part_name(number: int, profile: int, start: int) -> str:
    """The device name of a place of one of the GPUs."""
    return values.partition_device_name(
        ADDRESSES[number], profile=mighands.NAMES[profile], profile_id=profile, start=start
    )


def gpu(number: int, *, state: model.GpuState = model.GpuState.READY, reason: str | None = None) -> plan.GpuDevice:
    """One of the GPUs."""
    return plan.GpuDevice(
        name=NAMES[number], address=ADDRESSES[number], state=state, reason=reason, uuid=f"GPU-{number}", minor=number
    )


def holder(
    claim: values.ClaimRef,
    device: ledger.HeldDevice,
    *,
    boot_id: str = BOOT_ID,
    state: ledger.ClaimState = ledger.ClaimState.COMPLETED,
) -> plan.Holder:
    """A claim that has a device alone."""
    entry = ledger.Entry(
        claim=claim,
        state=state,
        boot_id=boot_id,
        devices=(device,),
        results=(ledger.Result(request="gpu", pool=POOL, device=device.name),),
        cdi_ids=((f"{DRIVER}/claim={claim.uid}-{device.name}",),),
    )
    return plan.Holder(entry=entry, device=device)


@dataclass
class Reports:
    """Remembers everything that is reported."""

    done: list[tuple[str, str]] = field(default_factory=list)
    failed: list[tuple[values.ClaimRef, str]] = field(default_factory=list)
    rebuilt: list[tuple[str, int]] = field(default_factory=list)
    record_errors: int = 0
    repaired: int = 0
    collected: list[values.ClaimRef] = field(default_factory=list)

    def claim_done(self, *, operation: str, result: str, seconds: float) -> None:
        assert seconds >= 0
        self.done.append((operation, result))

    def prepare_failed(self, claim: values.ClaimRef, *, message: str) -> None:
        self.failed.append((claim, message))

    def record_failed(self) -> None:
        self.record_errors += 1

    def record_rebuilt(self, *, reason: str, claims: int) -> None:
        self.rebuilt.append((reason, claims))

    def cdi_file_repaired(self) -> None:
        self.repaired += 1

    def claim_collected(self, claim: values.ClaimRef, *, reason: str) -> None:
        assert reason
        self.collected.append(claim)


class Rpc:
    """A call with a deadline that a test can end early."""

    def __init__(self, seconds: float = 45.0) -> None:
        self._deadline = locks.Deadline(seconds)
        self.cancelled = False

    def remaining_s(self) -> float:
        return self._deadline.remaining_s()

    def over(self) -> bool:
        return self.cancelled or self._deadline.over()


class Agent:
    """One instance of the prepare room on a node's folders, from start to stop."""

    directory_type = cdidir.CdiDirectory
    record_type = store.Store
    hands_type = mighands.Hands

    def __init__(
        self,
        node: Path,
        *,
        boot_id: str = BOOT_ID,
        wait_s: float = 2.0,
        reserve_s: float = 0.5,
        interval_s: float = 600.0,
        look_after_s: float = collector.LOOK_AFTER_S,
        pauses_s: Sequence[float] = executor.PAUSES_S,
        clock: Callable[[], float] = time.monotonic,
        mock: bool = True,
        root: Path = Path("/"),
        machine: Path | None = None,
    ) -> None:
        """`machine`: a rendered mock machine whose GPUs are divided at need; otherwise there are eight GPUs and `hardware`."""
        self.stop_event = threading.Event()
        self.reports = Reports()
        self.api = ClaimFolder(node / "claims")
        self.hardware = self.hands_type(node / "hardware.json")
        self.enforcer = enforced.Enforcer(node / "shares.json")
        self.index = FixedIndex(self.hardware)
        self.dialect = cdi.Dialect(driver=DRIVER, mock=mock)
        state, dev = node / "state", node / "dev" if machine is None else machine / "dev"
        files.make_private_directory(state)
        if not dev.exists():
            dev.mkdir()
            for number in range(len(NAMES)):
                (dev / f"nvidia{number}").touch()
        place = attempt.Node(dialect=self.dialect, pool=POOL, boot_id=boot_id)
        self.locks = locks.Locks(state, stop=self.stop_event)
        self._others_locks = locks.Locks(state, stop=threading.Event())
        self.enforcer.locked = self._is_locked
        self.nodes = devnodes.DeviceNodes(dev, mock=mock)
        self.record = self.record_type(
            state,
            boot_id=boot_id,
            salvage=lambda: self.directory.entries(boot_id=boot_id),
            reports=self.reports,
        )
        self.metadata = metadatadir.MetadataDirectory(
            node / "metadata", driver=DRIVER, published=self.record.published_attributes
        )
        self.directory = self.directory_type(node / "cdi", dialect=self.dialect, described=self.metadata)
        self.node_spec = nodespec.NodeSpec(
            self.directory,
            dialect=self.dialect,
            root=None if mock else rootfs.DriverRoot(root, mount=root),
            nodes=self.nodes,
            node_locks=self.locks,
            driver_version=lambda: None,
        )
        self.epoch = epoch.Epoch(state)
        self.own = partitions.Own(self.record)
        self.work: work.Work = self.hardware
        found: attempt.DeviceIndex = self.index
        if machine is not None:
            self.work = workers.Workers(source=mockmachine.source(machine), locks=locks.directory(state))
            found = mockmachine.index(machine)
        worker = hands.Hands(self.work)
        self.releaser = releasing.Releaser(
            boot_id,
            record=self.record,
            hardware=worker,
            enforcer=self.enforcer,
            own=self.own,
            claim_locks=self.locks,
            leadership=self.epoch,
            stop=self.stop_event,
            look_s=0.02,
            pauses_s=(0.05,),
        )
        self.attempts = attempt.Attempts(
            place,
            record=self.record,
            directory=self.directory,
            node_spec=self.node_spec,
            nodes=self.nodes,
            claim_locks=self.locks,
            reader=self.api,
            index=found,
            hardware=worker,
            releaser=self.releaser,
            reserve_s=reserve_s,
        )
        self.executor = executor.Executor(
            self.attempts,
            record=self.record,
            directory=self.directory,
            claim_locks=self.locks,
            releaser=self.releaser,
            reports=self.reports,
            stop=self.stop_event,
            wait_s=wait_s,
            reserve_s=reserve_s,
            pauses_s=pauses_s,
        )
        self.collector = collector.Collector(
            place,
            record=self.record,
            directory=self.directory,
            node_spec=self.node_spec,
            claim_locks=self.locks,
            reader=self.api,
            unpreparer=self.executor,
            leadership=self.epoch,
            reports=self.reports,
            stop=self.stop_event,
            interval_s=interval_s,
            look_after_s=look_after_s,
            clock=clock,
        )

    def _is_locked(self, gpu: address.PciAddress) -> bool:
        """Whether another agent would have to wait for a GPU."""
        try:
            with self._others_locks.gpus((gpu,), patience=locks.Deadline(0)):
                return False
        except locks.LockUnavailableError:
            return True

    def start(self) -> Agent:
        """As at the start of the agent, before its sockets."""
        self.record.open()
        self.epoch.take(self.record)
        self.collector.reconcile()
        return self

    def stop(self) -> None:
        """As at its end. Idempotent."""
        self.stop_event.set()
        self.executor.wake()
        self.work.close()
        self.record.close()
        self.epoch.close()

    def prepare(self, *refs: values.ClaimRef, seconds: float = 45.0) -> Any:
        """The answer for one claim, or the answers for several."""
        answers = self.executor.prepare(refs, Rpc(seconds))
        return answers[refs[0].uid] if len(refs) == 1 else answers

    def unprepare(self, *refs: values.ClaimRef, seconds: float = 45.0) -> Any:
        """The answer for one claim, or the answers for several."""
        answers = self.executor.unprepare(refs, Rpc(seconds))
        return answers[refs[0].uid] if len(refs) == 1 else answers

    def claim_files(self) -> set[str]:
        """Names of all files in the CDI folder that are not the node's."""
        return {path.name for path in self.directory.path.iterdir()} - {self.dialect.node_file}

    def prepared_uids(self) -> set[str]:
        """Claims in the record."""
        return {entry.claim.uid for entry in self.record.rows()}
