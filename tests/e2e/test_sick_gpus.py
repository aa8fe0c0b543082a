# SPDX-License-Identifier: Apache-2.0
"""GPUs that get sick while pods have them, on a server that keeps taints and with a kubelet that shows health.

- off the bus while a pod has it: tainted, the pod runs on and its status tells; nobody new gets it; it leaves with the pod, and
  comes back with the GPU;
- off the bus while nobody has it: it leaves the slice;
- a pod that tolerates the taint gets it and is told why it cannot start;
- lost and healed under a pod: unhealthy, healthy again, in the pod's status.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from discovery.address import parse
from discovery.mock import faults
from discovery.mock.fault import Fault, Kind
from driver import values
from tests.e2e.kit import load, machines, make, waiting
from tests.e2e.kit.api import Json
from tests.e2e.kit.node import Gpu
from tests.e2e.kit.sites import Site
from tests.e2e.kit.space import Space

ABSENT = f"{values.DRIVER_NAME}/absent"
SOON_S = 120.0


@pytest.fixture(scope="module", autouse=True)
def _looks_often(site: Site, changed_machines: dict[str, str]) -> Iterator[None]:
    """The agent looks at the hardware every second."""
    machines.bring(site, None, changed=changed_machines)
    site.agent.apply(env={"NEARFIELD_PROBE_INTERVAL": "1s"})
    yield
    site.agent.apply()


@pytest.fixture(autouse=True)
def _healthy_again(site: Site) -> Iterator[None]:
    yield
    faults.apply(site.disk.machine, ())
    waiting.until(lambda: len(site.agent.devices()) == len(site.disk.gpus()), "all GPUs published", timeout_s=SOON_S)


def sick(site: Site, kind: Kind, *gpus: Gpu) -> None:
    """Exactly these GPUs have this fault from now on."""
    faults.apply(site.disk.machine, [Fault(kind=kind, target=parse(gpu.address)) for gpu in gpus])


def one(gpu: Gpu, *, tolerations: tuple[Json, ...] = ()) -> Json:
    """A request for this very GPU."""
    where = f'device.attributes["resource.kubernetes.io"].pciBusID == "{gpu.address}"'
    return make.request(where=where, tolerations=tolerations)


def listed(site: Site) -> dict[str, list[str]]:
    """The devices of the slices and the keys of their taints."""
    return {item["name"]: [taint["key"] for taint in item.get("taints", [])] for item in site.agent.devices()}


def tainted(site: Site) -> float:
    """How many devices are, as the metrics say."""
    return site.agent.metrics().one("nearfield_device_tainted", reason="absent")


def health(pod: Json) -> list[tuple[str, str]]:
    """Health and message of what its container has, from the status of a pod."""
    return [
        (entry["health"], entry.get("message", ""))
        for status in pod["status"]["containerStatuses"]
        for resource in status.get("allocatedResourcesStatus", [])
        for entry in resource["resources"]
    ]


def told(space: Space, pod: str, word: str, message: str = "") -> Json:
    """The pod, once kubelet shows this health of its one GPU."""
    return space.api.wait(
        "Pod",
        pod,
        space.name,
        until=lambda item: [(word, True)] == [(found, message in text) for found, text in health(item)],
        what=f"with a GPU that is {word} ({message!r})",
        timeout_s=SOON_S,
    )


def test_a_gpu_that_falls_off_the_bus_under_a_pod(site: Site, space: Space) -> None:
    gpu, *others = site.disk.gpus()
    space.create(make.template("this", one(gpu)), make.pod("has", claims={"gpu": "template:this"}))
    space.running("has")
    told(space, "has", "Healthy")
    began = site.api.get("Pod", "has", space.name)["status"]["startTime"]

    sick(site, Kind.FALLEN_OFF, gpu)
    waiting.until(lambda: listed(site)[gpu.device] == [ABSENT], "the GPU tainted", timeout_s=SOON_S)
    assert listed(site) == {gpu.device: [ABSENT], **{other.device: [] for other in others}}
    (taint,) = next(item for item in site.agent.devices() if item["name"] == gpu.device)["taints"]
    assert taint["effect"] == "NoSchedule"
    waiting.until(lambda: tainted(site) == 1, "it is counted")
    now = told(space, "has", "Unhealthy", "not on the PCI bus any more")
    assert (now["status"]["phase"], now["status"]["startTime"]) == ("Running", began)
    assert site.agent.readyz()[0] == 200

    space.create(make.pod("wants", claims={"gpu": "template:this"}))
    space.pending("wants", saying="cannot allocate all claims")
    space.delete("Pod", "has")
    waiting.until(lambda: gpu.device not in listed(site), "the GPU out of the slice", timeout_s=SOON_S)
    assert set(listed(site)) == {other.device for other in others}
    waiting.until(lambda: tainted(site) == 0, "it is not counted any more")

    faults.apply(site.disk.machine, ())
    space.running("wants")
    assert space.devices("wants") == (gpu.device,)
    assert space.look("wants").gpu_nodes == (gpu.node,)


def test_a_gpu_that_falls_off_the_bus_and_that_nobody_has_leaves_the_slice(site: Site) -> None:
    gpu, *others = site.disk.gpus()
    sick(site, Kind.FALLEN_OFF, gpu)
    waiting.until(lambda: gpu.device not in listed(site), "the GPU out of the slice", timeout_s=SOON_S)
    assert listed(site) == {other.device: [] for other in others}
    faults.apply(site.disk.machine, ())
    waiting.until(lambda: gpu.device in listed(site), "the GPU back", timeout_s=SOON_S)


def test_who_tolerates_the_taint_is_told_why_it_cannot_start(site: Site, space: Space) -> None:
    gpu, *_ = site.disk.gpus()
    tolerated = one(gpu, tolerations=({"key": ABSENT, "operator": "Exists"},))
    space.create(
        make.claim("had", one(gpu)),
        make.template("anyway", tolerated),
        make.pod("has", claims={"gpu": "had"}),
    )
    space.running("has")
    sick(site, Kind.GPU_LOST, gpu)
    waiting.until(lambda: listed(site)[gpu.device] == [ABSENT], "the GPU tainted", timeout_s=SOON_S)
    space.create(make.pod("bold", claims={"gpu": "template:anyway"}))
    space.pending("bold", saying="cannot allocate all claims")
    # The GPU is given on before the agent hears that it is free, which it does not until it goes on.
    space.delete("Pod", "has", wait=False)
    waiting.until(lambda: site.kubelet.claims_in_use(make.CLASS) == 0, "the GPU given back")
    pid = site.agent.pids()[0]
    os.kill(pid, signal.SIGSTOP)
    try:
        space.gone("Pod", "has")
        space.delete("ResourceClaim", "had")
        space.api.wait("Pod", "bold", space.name, until=lambda pod: pod["spec"].get("nodeName"), what="bound")
    finally:
        os.kill(pid, signal.SIGCONT)
    said = load.refused(space, "bold")
    for words in (f"device {gpu.device} is not usable (lost)", "reset it (nvidia-smi --gpu-reset) or reboot the node"):
        assert words in said
    space.delete("Pod", "bold")


def test_a_gpu_that_is_lost_and_healed_under_a_pod(site: Site, space: Space) -> None:
    gpu, *_ = site.disk.gpus()
    space.create(make.template("this", one(gpu)), make.pod("has", claims={"gpu": "template:this"}))
    space.running("has")
    told(space, "has", "Healthy")
    sick(site, Kind.GPU_LOST, gpu)
    told(space, "has", "Unhealthy", "lost")
    waiting.until(lambda: listed(site)[gpu.device] == [ABSENT], "the GPU tainted", timeout_s=SOON_S)
    faults.apply(site.disk.machine, ())
    told(space, "has", "Healthy")
    waiting.until(lambda: listed(site)[gpu.device] == [], "the taint gone", timeout_s=SOON_S)
