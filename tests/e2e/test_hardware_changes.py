# SPDX-License-Identifier: Apache-2.0
"""Hardware that comes and goes under the agent's pod, which looks by itself once a minute only.

- GPUs that nobody has, one, and all behind two switches: out by one write of the real slice, and back by one, as it was before
- one that a pod has: tainted by one write and whole by one, and the pod runs on
- NICs that flap and move into pods: no write
- the agent hears this machine's kernel from inside a pod, with the rights that the manifests give it
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path

import pytest

from discovery import address
from discovery.mock import faults, hotplug, recording, ueventsocket
from discovery.mock.fault import Fault, Kind
from driver import quiet, values
from tests.e2e.kit import agent as agents
from tests.e2e.kit import make, waiting
from tests.e2e.kit.api import Json
from tests.e2e.kit.node import Gpu
from tests.e2e.kit.sites import Site
from tests.e2e.kit.space import Space

ABSENT = f"{values.DRIVER_NAME}/absent"
SOON_S = 30.0
"""Well below the minute after which the agent would look by itself."""

HINT = hotplug.Event(action="change", devpath="/devices/pci0000:00/0000:00:00.0", subsystem="pci").message(0)
"""Is heeded, and a look finds nothing new."""


@pytest.fixture(autouse=True)
def _whole_again(site: Site) -> Iterator[None]:
    yield
    faults.apply(site.disk.machine, ())
    waiting.until(lambda: len(site.agent.devices()) == len(site.disk.gpus()), "all GPUs published")


def change(site: Site, *items: Fault) -> None:
    """Exactly these faults from now on, when the looks upon what was before are over: none sees this one half made."""
    settle(site)
    faults.apply(site.disk.machine, items)


def settle(site: Site) -> None:
    """Wait for the look that follows upon the hints so far, and upon one more: it cannot be over before now and the quiet."""
    hinted_at = time.time()
    ueventsocket.send(site.disk.machine, [HINT])
    waiting.until(
        lambda: site.agent.metrics().one("nearfield_probe_last_success_timestamp_seconds") > hinted_at + quiet.QUIET_S,
        "a look after the last hint",
        timeout_s=SOON_S,
    )


def out(*gpus: Gpu) -> list[Fault]:
    return [Fault(kind=Kind.FALLEN_OFF, target=address.parse(gpu.address)) for gpu in gpus]


def tree(site: Site) -> recording.Tree:
    """The whole machine."""
    return recording.Tree(recording.read(site.disk.machine / faults.RECORDING_FILE).files)


def root_port(site: Site, gpu: Gpu) -> address.PciAddress:
    """The port above the switch of a GPU and its NIC."""
    directory = tree(site).function(gpu.address)
    assert directory is not None
    return address.parse(directory.split("/")[3])


def listed(site: Site) -> dict[str, list[str]]:
    """The devices of the slices and the keys of their taints."""
    return {item["name"]: [taint["key"] for taint in item.get("taints", [])] for item in site.agent.devices()}


def writes(site: Site) -> int:
    """How often the slice was written: the API server counts changes of its spec."""
    (body,) = site.agent.slices()
    generation: int = body["metadata"]["generation"]
    return generation


def specs(site: Site) -> list[Json]:
    return [body["spec"] for body in site.agent.slices()]


def nic_names(site: Site) -> dict[str, str]:
    """Device -> the NIC beside it."""
    return {device["name"]: device["attributes"]["nic"]["string"] for device in site.agent.devices()}


def test_gpus_that_nobody_has_go_and_come_by_one_write_each(site: Site) -> None:
    first, *others = site.disk.gpus()
    before, written = specs(site), writes(site)
    change(site, *out(first))
    waiting.until(lambda: set(listed(site)) == {gpu.device for gpu in others}, "one is out", timeout_s=SOON_S)
    change(site)
    waiting.until(lambda: len(listed(site)) == 8, "it is back", timeout_s=SOON_S)
    assert specs(site) == before

    change(site, *(Fault(kind=Kind.FALLEN_OFF, target=root_port(site, gpu)) for gpu in (first, others[0])))
    left = {gpu.device for gpu in others[1:]}
    waiting.until(lambda: set(listed(site)) == left, "what is behind two switches is out", timeout_s=SOON_S)
    change(site)
    waiting.until(lambda: len(listed(site)) == 8, "all are back", timeout_s=SOON_S)
    assert specs(site) == before
    assert writes(site) == written + 4


def test_a_gpu_that_a_pod_has_goes_and_comes_by_one_write_each(site: Site, space: Space) -> None:
    gpu, *others = site.disk.gpus()
    where = f'device.attributes["resource.kubernetes.io"].pciBusID == "{gpu.address}"'
    space.create(make.template("this", make.request(where=where)), make.pod("has", claims={"gpu": "template:this"}))
    space.running("has")
    before, written = specs(site), writes(site)
    change(site, *out(gpu))
    waiting.until(lambda: listed(site).get(gpu.device) == [ABSENT], "it is tainted", timeout_s=SOON_S)
    assert listed(site) == {gpu.device: [ABSENT], **{other.device: [] for other in others}}
    change(site)
    waiting.until(lambda: listed(site)[gpu.device] == [], "it is whole", timeout_s=SOON_S)
    assert specs(site) == before
    assert writes(site) == written + 2
    assert space.api.get("Pod", "has", space.name)["status"]["phase"] == "Running"


def test_nics_that_flap_and_move_write_nothing(site: Site) -> None:
    gpu, *_ = site.disk.gpus()
    drivers = "sys/bus/pci/drivers/mlx5_core/"
    nics = [address.parse(path.removeprefix(drivers)) for path in tree(site).files if path.startswith(drivers)]
    assert nics
    written = writes(site)
    names = nic_names(site)
    down, moved = (
        [Fault(kind=kind, target=nic) for kind in kinds for nic in nics]
        for kinds in ((Kind.LINK_DOWN,), (Kind.NETDEV_MOVED, Kind.RDMA_MOVED))
    )
    for items in (down, moved, []):
        faults.apply(site.disk.machine, items)
    # What comes last is seen, with all NICs away: by one write, which no other was before.
    change(site, *moved, *out(gpu))
    waiting.until(lambda: len(listed(site)) == 7, "a GPU is out", timeout_s=SOON_S)
    assert writes(site) == written + 1
    assert nic_names(site) == {device: name for device, name in names.items() if device != gpu.device}


def test_the_kernel_can_be_heard_with_the_rights_of_the_mock_overlay(site: Site) -> None:
    """No capability, no privilege, the runtime's seccomp profile: more than the base has not."""
    pod = site.agent.pod()["metadata"]["name"]
    hear = "import signal; signal.alarm(90); from discovery import uevents; print(uevents.kernel().hear())"
    command = ("exec", "-n", agents.NAMESPACE, pod, "-c", agents.CONTAINER, "--", "/opt/nearfield/bin/python3", "-c")
    trigger = next(iter(sorted(Path("/sys/bus/pci/devices").glob("*/uevent"))))
    with futures.ThreadPoolExecutor(1) as pool:
        said = pool.submit(site.cluster.kubectl, *command, hear)
        waiting.until(lambda: trigger.write_text("change") and said.done(), "the pod hears the kernel", timeout_s=180)
        assert said.result().strip() in {"heeded", "ignored"}
