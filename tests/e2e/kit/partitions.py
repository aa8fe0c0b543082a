# SPDX-License-Identifier: Apache-2.0
"""The MIG instances of the mock machine as its state has them, and what pods with a MIG slice were given, judged by that."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from discovery.mock import live, state
from tests.e2e.kit import given, make
from tests.e2e.kit.api import Json
from tests.e2e.kit.node import Disk
from tests.e2e.kit.sites import Site
from tests.e2e.kit.space import Space

CLASS = "mig.nearfield.dev"
"""The DeviceClass of our manifests."""

PROFILE = 'device.attributes["gpu.nearfield.dev"].profile == "{}"'
BUS = 'device.attributes["resource.kubernetes.io"].pciBusID == "{}"'


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """A GPU instance with its compute instance."""

    address: str
    profile: str
    profile_id: int
    start: int
    size: int
    uuid: str | None
    number: int

    @property
    def device(self) -> str:
        """Its name in slices."""
        whole = "gpu-" + self.address.replace(":", "-").replace(".", "-")
        return f"{whole}-mig-{self.profile.replace('.', '-').replace('+', '-')}-{self.profile_id}-{self.start}"


def there(machine: Path) -> tuple[Instance, ...]:
    """All that exist, by address and place. Fails where two of a GPU need one memory slice."""
    found: list[Instance] = []
    for gpu in _gpus(machine):
        mig = gpu.get("mig") or {}
        names = {profile["id"]: profile["name"] for profile in mig.get("profiles", ())}
        own = [_instance(gpu["pci"], entry, names) for entry in mig.get("instances", ())]
        for one, other in itertools.combinations(own, 2):
            assert one.start + one.size <= other.start or other.start + other.size <= one.start, (one, other)
        found += own
    return tuple(sorted(found, key=lambda entry: (entry.address, entry.start)))


def _instance(address: str, entry: Json, names: dict[int, str]) -> Instance:
    place, compute = entry["placement"], list(entry.get("compute", ()))
    return Instance(
        address=address,
        profile=names[entry["profileId"]],
        profile_id=entry["profileId"],
        start=place["start"],
        size=place["size"],
        uuid=compute[0]["uuid"] if len(compute) == 1 else None,
        number=entry["id"],
    )


def enabled(machine: Path) -> frozenset[str]:
    """Addresses of the GPUs on which MIG is on."""
    return frozenset(gpu["pci"] for gpu in _gpus(machine) if (gpu.get("mig") or {}).get("current"))


def _gpus(machine: Path) -> list[Json]:
    file = machine / "nvml.json"
    nvml = json.loads(file.read_text())["nvml"] if file.exists() else None
    return nvml["gpus"] if nvml else []


def take(machine: Path, *, create_s: float = 0.0, destroy_s: float = 0.0, mode_s: float = 0.0) -> None:
    """From now on the hardware takes this long."""
    file = live.LiveFile(machine)
    times = state.MigTimes(create_s=create_s, destroy_s=destroy_s, mode_s=mode_s)
    with file.locked():
        now = file.read()
        assert now.nvml is not None
        gpus = tuple(replace(gpu, mig=replace(gpu.mig, times=times)) if gpu.mig else gpu for gpu in now.nvml.gpus)
        file.write(replace(now, nvml=replace(now.nvml, gpus=gpus)))


def request(profile: str, *, name: str = "gpu", bus: str | None = None, count: int | None = None) -> Json:
    """A request for slices of a profile, of a certain GPU or of any."""
    where = [PROFILE.format(profile), *([BUS.format(bus)] if bus else [])]
    return make.request(name, where=where, device_class=CLASS, count=count)


def devices(site: Site, space: Space, pod: str, claim: str = "gpu") -> tuple[str, ...]:
    """The slices of a running pod's claim, once it is certain that its container has these and no others."""
    space.running(pod)
    got = space.devices(pod, claim)
    require(site, space, pod, got)
    return got


def require(site: Site, space: Space, pod: str, got: Sequence[str], *, container: str = "main") -> None:
    """A running container has these instances, which exist, their capability nodes, the nodes of their GPUs, and nothing else."""
    by_name = {entry.device: entry for entry in there(site.disk.machine)}
    own = [by_name[device] for device in got]
    seen = space.look(pod, container)
    assert seen.mig_uuids == tuple(sorted(str(entry.uuid) for entry in own)), (pod, got, seen.mig_uuids)
    gpus = {gpu.address: gpu for gpu in site.disk.gpus()}
    assert seen.gpu_nodes == tuple(sorted({gpus[entry.address].node for entry in own})), (pod, got, seen.gpu_nodes)
    assert seen.caps == capabilities(site.disk, own), (pod, got, seen.caps)
    assert seen.gpu_uuids == ()
    told = site.kubelet.pod_resources(space.name, pod)[container]
    assert {entry.device for entry in told if entry.driver == site.disk.driver} >= set(got), (pod, told)


def capabilities(disk: Disk, instances: Sequence[Instance]) -> tuple[str, ...]:
    """The nodes that the rendered procfs names for these instances."""
    minors = {gpu.address: gpu.minor for gpu in disk.gpus()}
    found: list[str] = []
    for entry in instances:
        folder = disk.machine / f"proc/driver/nvidia/capabilities/gpu{minors[entry.address]}/mig/gi{entry.number}"
        for file in (folder / "access", *sorted(folder.glob("ci*/access"))):
            (line,) = (text for text in file.read_text().splitlines() if text.startswith("DeviceFileMinor:"))
            found.append(f"/dev/nvidia-caps/nvidia-cap{line.split()[-1]}")
    return tuple(sorted(found))


def get(site: Site, space: Space, pod: str, *requests: Json, constraints: Sequence[Json] = ()) -> tuple[str, ...]:
    """Make a pod with a claim of its own for these slices, and give what it got once it runs."""
    given.ask(space, pod, *requests, constraints=constraints)
    return devices(site, space, pod)
