# SPDX-License-Identifier: Apache-2.0
"""Shares of GPUs: policies and requests for them, what a pod with one was given, and whether ever more was given out than there is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from driver.errors import RecordError
from driver.prepare import shareuse
from tests.e2e.kit import agent as agents
from tests.e2e.kit import make, watched
from tests.e2e.kit.api import Json
from tests.e2e.kit.node import Disk
from tests.e2e.kit.sites import Site
from tests.e2e.kit.space import Space

CLASS = "share.nearfield.dev"
"""The DeviceClass of our manifests."""

MACHINE = "dgx-h100-shares"
"""A machine whose driver can all that keeps shares apart."""

BUS = 'device.attributes["resource.kubernetes.io"].pciBusID == "{}"'
GIB = 1 << 30
MEMORY = 81559 << 20
"""Of a GPU of the machine, in bytes."""


CGROUPS = Path("/sys/fs/cgroup/memory")
"""A hierarchy of kubelet's cgroups, in version 1; kubelet makes the same folders in each."""

IN_CGROUPS = {"NEARFIELD_CGROUP_ROOT": str(CGROUPS), "NEARFIELD_PROBE_INTERVAL": "1s"}


def with_cgroups(template: Json) -> None:
    """The agent sees the node's cgroups, as the base has it."""
    container = agents.agent_container(template)
    mounts, volumes = container["volumeMounts"], template["spec"]["volumes"]
    mounts.append({"name": "e2e-cgroups", "mountPath": str(CGROUPS), "readOnly": True})
    volumes.append({"name": "e2e-cgroups", "hostPath": {"path": str(CGROUPS), "type": "Directory"}})


def pod_cgroup(site: Site, uid: str) -> Path:
    """The folder that kubelet made for a pod."""
    found = [path for path in (CGROUPS / site.cluster.layout.cgroup.lstrip("/")).rglob(f"pod{uid}") if path.is_dir()]
    assert len(found) == 1, (uid, found)
    return found[0]


def rule(
    *,
    memory: str = "none",
    compute: str = "none",
    match: Mapping[str, object] | None = None,
    mode: str = "shares",
    fallback: str = "whole",
    **more: object,
) -> Json:
    """A rule of section `sharing`. `memory` and `compute`: the weakest enforcement that is acceptable; `more`: of the block `shares`."""
    found: Json = {"mode": mode, "shares": {"memory": memory, "compute": compute, **more}}
    if match:
        found["match"] = dict(match)
    return found | ({"fallback": fallback} if mode == "shares" else {})


def request(
    memory: str | None = None,
    compute: int | None = None,
    *,
    name: str = "gpu",
    bus: str | None = None,
    count: int | None = None,
    where: Sequence[str] = (),
) -> Json:
    """A request for a share; what is not said is not asked for. `bus`: of a certain GPU."""
    amounts = {
        **({} if memory is None else {"memory": memory}),
        **({} if compute is None else {"compute": str(compute)}),
    }
    expressions = [*([BUS.format(bus)] if bus else []), *where]
    return make.request(name, count=count, where=expressions, device_class=CLASS, capacity=amounts or None)


def config(*requests: str, **parameters: object) -> Json:
    """An entry of a claim's `config` with a ClaimConfig, for some of its requests."""
    opaque = {
        "driver": make.CLASS,
        "parameters": {"apiVersion": "gpu.nearfield.dev/v1alpha1", "kind": "ClaimConfig", **parameters},
    }
    return {"opaque": opaque, **({"requests": list(requests)} if requests else {})}


def devices(
    site: Site, space: Space, pod: str, claim: str = "gpu", *, request_name: str | None = None, container: str = "main"
) -> tuple[str, ...]:
    """The GPUs of which a running pod's claim has shares, once it is certain that its container has these and no others, and that
    kubelet knows each share by its id.
    """
    space.running(pod)
    results = [
        result
        for result in space.claim_of(pod, claim)["status"]["allocation"]["devices"]["results"]
        if result["driver"] == site.disk.driver and request_name in (None, result["request"])
    ]
    found = tuple(result["device"] for result in results)
    gpus = [site.disk.gpu(device) for device in found]
    seen = space.look(pod, container)
    assert seen.gpu_nodes == tuple(sorted({gpu.node for gpu in gpus})), (pod, found, seen.gpu_nodes)
    assert seen.gpu_uuids == tuple(sorted(gpu.uuid for gpu in gpus)), (pod, found, seen.gpu_uuids)
    told = site.kubelet.pod_resources(space.name, pod)[container]
    assert {entry.device for entry in told if entry.driver == site.disk.driver} >= set(found), (pod, told)
    return found


def uses(site: Site, space: Space, pod: str, claim: str = "gpu") -> tuple[shareuse.ShareUse, ...]:
    """The shares of a pod's claim, as the record has them."""
    uid = space.claim_of(pod, claim)["metadata"]["uid"]
    (entry,) = (entry for entry in site.disk.record() if entry.claim.uid == uid)
    return tuple(result.share for result in entry.results if result.share is not None)


def offered(site: Site) -> tuple[Json, ...]:
    """The devices that are offered in shares."""
    return tuple(device for device in site.agent.devices() if device.get("allowMultipleAllocations"))


class Watched(watched.Watched):
    """Reads the record, and finds where more of a GPU is given out than there is."""

    def __init__(self, disk: Disk) -> None:
        super().__init__()
        self._disk = disk

    def _look(self) -> None:
        try:
            entries = self._disk.record()
        except RecordError:
            return
        memory: Counter[str] = Counter()
        compute: Counter[str] = Counter()
        shares: Counter[str] = Counter()
        wholes: Counter[str] = Counter()
        for entry in entries:
            for result in entry.results:
                if result.share is None:
                    wholes[result.device] += 1
                else:
                    shares[result.device] += 1
                    memory[result.device] += result.share.memory
                    compute[result.device] += result.share.compute or 0
        self.most = max([self.most, *shares.values()])
        self.wrong += [
            f"{device}: {memory[device]} bytes, {compute[device]} %, {wholes[device]} wholes"
            for device in shares
            if memory[device] > MEMORY or compute[device] > 100 or wholes[device]
        ]
        self.wrong += [f"{device}: {count} claims" for device, count in wholes.items() if count > 1]
