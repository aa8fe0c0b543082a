# SPDX-License-Identifier: Apache-2.0
"""Hardware that comes, goes and changes its driver under a running agent that looks by itself only once an hour.

- whatever happens at once is one write; back again is one write, and the slices are as before
- one GPU, a whole switch; unplugged, bound to another driver, the driver of the node unloaded and loaded
- what a claim has never leaves: through restarts, with a Prepare under way, until record and claims let go of it
- NICs that flap or move into pods: no write, no probe; their names stay, also over a restart, and new ones are published
- two instances hear, one writes; where nothing can be heard, the look of every interval finds the change

"No more writes" is seen by the count of the next step: a late one would be in it. A step begins when the look after the one
before is over: a look that sees a change half made is what the agent mends by another write.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from dataclasses import replace
from typing import Any

import pytest

from discovery.address import PciAddress, parse
from discovery.mock import fault, faults, hotplug, live, recording, ueventsocket, zoo
from discovery.mock.fault import Fault, Kind
from driver import quiet, values
from driver.standin import apiserver_faults
from tests.fakes import agents

pytestmark = pytest.mark.timeout(300)

DRIVER = values.DRIVER_NAME
RARELY = ("--probe-interval", "3600s")
"""No look comes by itself while a test runs."""

HINT = hotplug.Event(action="change", devpath="/devices/pci0000:00/0000:00:00.0", subsystem="pci").message(0)
"""Is heeded, and a look finds nothing new."""


@pytest.fixture(name="node")
def fixture_node() -> Iterator[agents.Node]:
    with agents.node() as node:
        yield node


class Bench:
    """An agent that has published a machine, and the counts of what it did since the last step."""

    def __init__(self, node: agents.Node, *, machine: str = "l40s-8-pcie", gpus: int = 8) -> None:
        self.node = node
        self.machine = machine
        self.agent = node.start(*RARELY, mock=machine)
        node.wait_for_devices(gpus)
        agents.until(lambda: "Listening to uevents" in self.agent.said(), "it listens")
        self._writes = 0
        self._probes = 0
        self.step()

    def restart(self) -> None:
        assert self.agent.terminate() == 0
        self.agent = self.node.start(*RARELY, mock=self.machine)
        agents.until(lambda: self.count("nearfield_slices_published") == 1, "the slices stand again")
        self._probes = 0

    def fault(self, *items: Fault) -> None:
        """Exactly these faults from now on, when the looks upon what was before are over."""
        self.settle()
        self.fault_at_once(*items)

    def fault_at_once(self, *items: Fault) -> None:
        faults.apply(self.node.mock_dir, items)

    def value(self, sample: str) -> float:
        found = re.search(rf"^{re.escape(sample)} (\S+)$", self.agent.get("/metrics")[1], re.MULTILINE)
        return float(found[1]) if found else 0.0

    def count(self, sample: str) -> int:
        return int(self.value(sample))

    def settle(self) -> None:
        """Wait for the look that follows upon the hints so far, and upon one more: it cannot be over before now and the quiet."""
        hinted_at = time.time()
        ueventsocket.send(self.node.mock_dir, [HINT])
        last = "nearfield_probe_last_success_timestamp_seconds"
        agents.until(lambda: self.value(last) > hinted_at + quiet.QUIET_S, "a look after the last hint")

    def step(self) -> tuple[int, int]:
        """Slice writes and full probes since the last step."""
        writes = self.node.api.writes("resourceslices")
        probes = self.count("nearfield_probe_duration_seconds_count")
        since = (writes - self._writes, probes - self._probes)
        self._writes, self._probes = writes, probes
        return since

    def listed(self) -> dict[str, list[str]]:
        """The devices of the slices, in their order, and the keys of their taints."""
        return {item["name"]: [taint["key"] for taint in item.get("taints", ())] for item in self.node.devices()}

    def until(self, holds: Callable[[dict[str, list[str]]], bool], what: str) -> None:
        agents.until(lambda: holds(self.listed()), what)


def address_of(device: str) -> PciAddress:
    return parse(re.sub(r"^gpu-(\w+)-(\w+)-(\w+)-(\w+)$", r"\1:\2:\3.\4", device))


def unplugged(*devices: str) -> list[Fault]:
    return [Fault(kind=Kind.FALLEN_OFF, target=address_of(device)) for device in devices]


def of_nics(machine: str, *kinds: Kind) -> list[Fault]:
    """The same fault of every NIC."""
    tree = recording.Tree(zoo.load(machine).files)
    classes = ("sys/class/net/", "sys/class/infiniband/")
    places = [tree.resolve(path) or "" for path in tree.files if path.startswith(classes)]
    nics = sorted({parse(place.split("/")[-3]) for place in places if "/pci" in place})
    assert nics
    return [Fault(kind=kind, target=nic) for kind in kinds for nic in nics]


ABSENT = [f"{DRIVER}/absent"]


def whole(*devices: str) -> dict[str, list[str]]:
    """What is listed where these devices are and no other, without a taint."""
    return {device: [] for device in devices}


@pytest.mark.parametrize("kind", [Kind.FALLEN_OFF, Kind.VFIO_BOUND])
def test_free_gpus_that_go_and_come_back_are_one_write_each(node: agents.Node, kind: Kind) -> None:
    bench = Bench(node)
    before = node.devices()
    names = list(bench.listed())
    gone, stay = names[:3], names[3:]
    bench.fault(*(Fault(kind=kind, target=address_of(name)) for name in gone))
    bench.until(lambda listed: list(listed) == stay, "the three are out")
    if kind is Kind.VFIO_BOUND:
        # They are still on the bus, and so nobody else's groups change.
        assert node.devices() == before[3:]
    bench.fault()
    bench.until(lambda listed: len(listed) == 8, "all are back")
    assert node.devices() == before
    bench.fault(*unplugged(names[-1]))
    bench.until(lambda listed: len(listed) == 7, "another is out")
    assert bench.step() == (3, 3)


def test_a_whole_switch_that_is_pulled_out_and_put_back_is_one_write_each(node: agents.Node) -> None:
    """Eight GPUs and their NIC, of a chassis of sixteen."""
    bench = Bench(node, machine="h100-16-pcie", gpus=16)
    before = node.devices()
    tree = recording.Tree(zoo.load(bench.machine).files)
    behind: dict[str, list[str]] = {}
    for name in bench.listed():
        for bridge in (tree.function(address_of(name)) or "").split("/")[3:-1]:
            behind.setdefault(bridge, []).append(name)
    switch, gone = next((bridge, gpus) for bridge, gpus in sorted(behind.items()) if len(gpus) == 8)
    bench.fault(Fault(kind=Kind.FALLEN_OFF, target=parse(switch)))
    bench.until(lambda listed: len(listed) == 8 and not listed.keys() & set(gone), "eight GPUs are out")
    bench.fault()
    bench.until(lambda listed: len(listed) == 16, "all are back")
    assert node.devices() == before
    bench.fault(*unplugged(gone[0]))
    bench.until(lambda listed: len(listed) == 15, "one is out")
    assert bench.step() == (3, 3)


def test_a_driver_that_is_unloaded_and_loaded_is_one_write_each(node: agents.Node) -> None:
    bench = Bench(node)
    before = node.devices()
    bench.fault(Fault(kind=Kind.NO_DRIVER))
    agents.until(lambda: not node.slices(), "no slice")
    bench.fault()
    node.wait_for_devices(8)
    assert node.devices() == before
    bench.fault(*unplugged(before[0]["name"]))
    node.wait_for_devices(7)
    assert bench.step() == (3, 3)


@pytest.mark.parametrize("kind", [Kind.FALLEN_OFF, Kind.VFIO_BOUND])
def test_what_a_claim_has_never_leaves_and_heals(node: agents.Node, kind: Kind) -> None:
    bench = Bench(node)
    kubelet = node.kubelet()
    kubelet.wait_registered(DRIVER)
    before = node.devices()
    held, free, *others = bench.listed()
    claim = node.claim("c1", held)
    assert isinstance(kubelet.prepare(DRIVER, [claim])[claim.uid], values.Prepared)
    loss = [Fault(kind=kind, target=address_of(name)) for name in (held, free)]

    bench.fault(*loss)
    bench.until(lambda listed: listed == {held: ABSENT, **whole(*others)}, "one is tainted, one is out")
    bench.restart()
    assert bench.listed() == {held: ABSENT, **whole(*others)}
    bench.fault()
    bench.until(lambda listed: listed == whole(held, free, *others), "all are whole")
    assert node.devices() == before
    assert bench.step()[0] == 2

    bench.fault(*loss)
    bench.until(lambda listed: listed.get(held) == ABSENT, "one is tainted again")
    assert isinstance(kubelet.unprepare(DRIVER, [claim])[claim.uid], values.Unprepared)
    agents.until(lambda: node.api.count("list", "resourceclaims") >= 3, "it asks who has it")
    assert bench.listed()[held] == ABSENT  # the claim still names it
    node.api.remove("resourceclaims", f"{agents.NAMESPACE}/c1")
    bench.until(lambda listed: listed == whole(*others), "it is out")
    assert bench.step()[0] == 2


def test_a_gpu_that_goes_while_the_agent_is_down(node: agents.Node) -> None:
    bench = Bench(node)
    kubelet = node.kubelet()
    kubelet.wait_registered(DRIVER)
    held, free, *others = bench.listed()
    claim = node.claim("c1", held)
    assert isinstance(kubelet.prepare(DRIVER, [claim])[claim.uid], values.Prepared)
    assert bench.agent.terminate() == 0
    bench.fault_at_once(*unplugged(held, free))
    bench.agent = node.start(*RARELY, mock=bench.machine)
    bench.until(lambda listed: listed == {held: ABSENT, **whole(*others)}, "one is tainted, one is out")
    bench.fault()
    bench.until(lambda listed: listed == whole(held, free, *others), "all are whole")
    kubelet.wait_registered(DRIVER)
    assert isinstance(kubelet.unprepare(DRIVER, [claim])[claim.uid], values.Unprepared)
    assert bench.step()[0] == 2


def test_a_gpu_that_goes_while_its_prepare_is_under_way(node: agents.Node) -> None:
    bench = Bench(node)
    kubelet = node.kubelet()
    kubelet.wait_registered(DRIVER)
    held = next(iter(bench.listed()))
    claim = node.claim("c1", held)
    hang = node.api.faults.inject(apiserver_faults.Hang(), verb="get", resource="resourceclaims")
    asked = node.api.count("get", "resourceclaims")
    with futures.ThreadPoolExecutor(1) as pool:
        answer = pool.submit(lambda: kubelet.prepare(DRIVER, [claim])[claim.uid])
        agents.until(lambda: node.api.count("get", "resourceclaims") > asked, "the Prepare asks for its claim")
        bench.fault(*unplugged(held))
        bench.until(lambda listed: listed[held] == ABSENT, "it is tainted, as the claim has it")
        hang.remove()
        refused = answer.result(40)
    assert isinstance(refused, values.Failed)
    assert held in refused.message
    assert node.cdi_files() == []
    bench.fault()
    bench.until(lambda listed: listed[held] == [], "it is whole")
    assert isinstance(kubelet.prepare(DRIVER, [claim])[claim.uid], values.Prepared)
    assert bench.step()[0] == 2


def flap(bench: Bench, moved: Sequence[Fault], down: Sequence[Fault]) -> None:
    for _ in range(2):
        bench.fault_at_once(*down)
        bench.fault_at_once(*moved)
        bench.fault_at_once(*moved, *down)
        bench.fault_at_once()


def nic_names(devices: Sequence[dict[str, Any]]) -> dict[str, str]:
    """Device -> the NIC beside it."""
    return {device["name"]: device["attributes"]["nic"]["string"] for device in devices}


def test_nics_that_flap_and_move_lead_to_nothing(node: agents.Node) -> None:
    bench = Bench(node, machine="dgx-h100")
    before = node.devices()
    assert all("nic" in device["attributes"] for device in before)
    moved = of_nics(bench.machine, Kind.NETDEV_MOVED, Kind.RDMA_MOVED)
    flap(bench, moved, of_nics(bench.machine, Kind.LINK_DOWN))
    bench.settle()
    assert bench.count('nearfield_uevents_total{result="ignored"}') > 0
    assert bench.count('nearfield_uevents_total{result="heeded"}') > 1  # of which one comes from `settle`
    # What comes last is seen, and by one probe and one write: those before it have led to none.
    bench.fault(*moved, *unplugged(before[0]["name"]))
    node.wait_for_devices(7)
    assert bench.step() == (1, 1)
    assert nic_names(node.devices()) == nic_names(before[1:])


@pytest.mark.parametrize("kinds", [(Kind.NETDEV_MOVED, Kind.RDMA_MOVED), (Kind.RDMA_MOVED,)])
def test_the_names_of_nics_outlast_a_restart_while_they_are_away(node: agents.Node, kinds: tuple[Kind, ...]) -> None:
    bench = Bench(node, machine="dgx-h100")
    before = node.devices()
    bench.fault(*of_nics(bench.machine, *kinds))
    bench.restart()
    assert node.devices() == before
    bench.fault()
    bench.restart()
    assert node.devices() == before
    assert bench.step()[0] == 0


def test_a_name_that_a_nic_did_not_have_is_published(node: agents.Node) -> None:
    """As where the RDMA driver is loaded after the agent has started."""
    bench = Bench(node, machine="dgx-h100")
    before = node.devices()
    assert bench.agent.terminate() == 0
    for body in node.slices():
        node.api.remove("resourceslices", body["metadata"]["name"])
    for path in node.state_dir.glob("record*"):
        path.unlink()
    bench.fault_at_once(*of_nics(bench.machine, Kind.NETDEV_MOVED, Kind.RDMA_MOVED))
    bench.agent = node.start(*RARELY, mock=bench.machine)
    node.wait_for_devices(8)
    assert not any("nic" in device["attributes"] for device in node.devices())
    bench.step()
    bench.fault()
    agents.until(lambda: node.devices() == before, "the names")
    assert bench.step()[0] == 1


def test_of_two_instances_that_hear_one_writes(node: agents.Node) -> None:
    old = node.start(*RARELY, "--pod-uid", "11111111-1111-1111-1111-111111111111")
    kubelet = node.kubelet()
    kubelet.wait_registered(DRIVER)
    first = node.wait_for_devices(8)[0]["name"]
    new = node.start(*RARELY, "--pod-uid", "22222222-2222-2222-2222-222222222222")
    kubelet.wait_registered(DRIVER, instances=2)
    agents.until(new.ready, "the new one ready")
    writes = node.api.writes("resourceslices")
    faults.apply(node.mock_dir, unplugged(first))
    node.wait_for_devices(7)
    agents.until(
        lambda: all("nearfield_probe_duration_seconds_count 2.0" in agent.get("/metrics")[1] for agent in (old, new)),
        "both have looked",
    )
    faults.apply(node.mock_dir, [])
    node.wait_for_devices(8)
    assert node.api.writes("resourceslices") == writes + 2


def test_where_nothing_can_be_heard_the_look_of_every_interval_finds_it(node: agents.Node) -> None:
    bench = Bench(node)
    assert bench.agent.terminate() == 0
    folder = node.mock_dir / ueventsocket.FOLDER
    folder.rmdir()
    folder.write_bytes(b"")
    agent = node.start()
    agents.until(lambda: "by the look of every interval" in agent.said(), "a word about it")
    names = list(bench.listed())
    bench.fault_at_once(*unplugged(names[0]))
    node.wait_for_devices(7)
    assert agent.said().count("by the look of every interval") == 1


def an_hour_later(now: live.Live) -> live.Live:
    """The time of the faults, moved on; the machine itself looks at it every second."""
    return replace(now, faults=tuple(replace(placed, since=placed.since - 3600.0) for placed in now.faults))


def test_a_machine_with_a_gpu_that_is_plugged_in_later(node: agents.Node) -> None:
    target = zoo.load("l40s-8-pcie")
    gpus = target.nvml.gpus if target.nvml is not None else ()
    late = fault.Fault(kind=Kind.FALLEN_OFF, target=gpus[2].pci, until_s=3600.0)
    document: Any = recording.to_json(target)
    document["faults"] = [{"kind": late.kind, "target": str(late.target), "untilS": late.until_s}]
    path = node.directory / "late.json"
    path.write_bytes(recording.dump(recording.from_json(document, name="late")))
    node.start(*RARELY, mock=str(path))
    node.wait_for_devices(7)
    live.LiveFile(node.mock_dir).update(an_hour_later)
    node.wait_for_devices(8)
    assert node.api.writes("resourceslices") == 2
