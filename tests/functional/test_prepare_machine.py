# SPDX-License-Identifier: Apache-2.0
"""Claims for MIG instances on a mock machine, worked for by real worker processes. Aspects: what is on the GPUs is what is in the
record; kill -9 of the agent while the hardware is at work, and at every point in between; a library that hangs, dies or fails.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from discovery.errors import DocumentError
from discovery.mock import fault, faults
from discovery.mock import mig as admin
from driver import values
from driver.prepare import ledger
from driver.prepare.crashpoints import Point
from tests.fakes import mockmachine, prepare_process, preparing
from tests.fakes.mockmachine import GPU0, GPU1
from tests.fakes.preparing import ref

DRIVER = 'driver: {version: 580.95.05, cuda: "13.0"}'
CREATE, DESTROY = "nvmlDeviceCreateGpuInstanceWithPlacement", "nvmlGpuInstanceDestroy"


def name_of(gpu: Any, profile: str, profile_id: int, start: int) -> str:
    return values.partition_device_name(gpu, profile=profile, profile_id=profile_id, start=start)


THREE = name_of(GPU0, "3g.40gb", 9, 4)
TWO = name_of(GPU0, "2g.20gb", 14, 0)
ONE = name_of(GPU1, "1g.10gb", 19, 2)
WHOLE = values.gpu_device_name(GPU0)


class Node:
    """A node with the machine, and the processes on it."""

    def __init__(self, path: Path, *, seconds: float) -> None:
        self.path = path
        self.machine = path / "machine"
        times = f"{DRIVER[:-1]}, migTimes: {{create: {seconds}, destroy: {seconds}, mode: {seconds}}}}}"
        mockmachine.rendered(self.machine, (DRIVER, times))
        self.api = preparing.ClaimFolder(path / "claims")
        self._processes: list[prepare_process.PrepareProcess] = []
        self._agents: list[preparing.Agent] = []

    def process(self, *, crash_at: str | None = None) -> prepare_process.PrepareProcess:
        made = prepare_process.PrepareProcess(self.path, crash_at=crash_at)
        self._processes.append(made)
        assert made.started()
        return made

    def agent(self, *, wait_s: float = 30.0) -> preparing.Agent:
        made = preparing.Agent(self.path, wait_s=wait_s, machine=self.machine).start()
        self._agents.append(made)
        return made

    def instances(self) -> dict[str, list[tuple[int, int]]]:
        """(profile, start) by GPU, of those with MIG enabled."""
        return {
            str(gpu): sorted((one.profile_id, one.placement.start) for one in found)
            for gpu, found in admin.instances(self.machine).items()
            if found
        }

    def break_(self, kind: fault.Kind, function: str, **more: Any) -> None:
        faults.apply(self.machine, [fault.Fault(kind=kind, function=function, **more)])

    def heal(self) -> None:
        faults.apply(self.machine, [])

    def close(self) -> None:
        self.heal()
        for process in self._processes:
            process.close()
        for agent in self._agents:
            agent.stop()


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    made = Node(tmp_path, seconds=0)
    yield made
    made.close()


@pytest.fixture
def slow(tmp_path: Path) -> Iterator[Node]:
    """The hardware takes its time."""
    made = Node(tmp_path, seconds=0.4)
    yield made
    made.close()


def test_from_whole_to_parts_and_back(node: Node) -> None:
    agent = node.agent()
    whole, parts = node.api.allocate(ref(1), WHOLE), node.api.allocate(ref(2), THREE, TWO, ONE)
    assert isinstance(agent.prepare(whole), values.Prepared)
    agent.unprepare(whole)
    answer = agent.prepare(parts)
    assert isinstance(answer, values.Prepared), answer
    assert node.instances() == {str(GPU0): [(9, 4), (14, 0)], str(GPU1): [(19, 2)]}
    entry = agent.record.get(parts.uid)
    assert entry is not None
    assert all(device.uuid.startswith("MIG-") and len(device.caps) == 2 for device in entry.devices)
    assert len({device.uuid for device in entry.devices}) == 3
    agent.unprepare(parts)
    assert node.instances() == {}
    assert isinstance(agent.prepare(whole), values.Prepared)
    assert admin.instances(node.machine)[GPU0] is None


def test_an_admins_instance_is_named_and_stays(node: Node) -> None:
    admin.admin_mode(node.machine, GPU0, True)
    admin.admin_create(node.machine, GPU0, "1g.10gb", 5)
    agent = node.agent(wait_s=3600)
    claim = node.api.allocate(ref(1), THREE)
    answer = agent.prepare(claim, seconds=7200)
    assert isinstance(answer, values.Failed)
    assert "1g.10gb" in answer.message
    assert "MIG-" in answer.message
    assert isinstance(agent.prepare(node.api.allocate(ref(2), TWO)), values.Prepared)
    agent.unprepare(claim, ref(2))
    assert node.instances() == {str(GPU0): [(19, 5)]}


@pytest.mark.parametrize(
    "point", [Point.MIG_AFTER_STARTED, Point.MIG_MADE, Point.PREPARE_AFTER_CDI_FILE, Point.PREPARE_AFTER_COMMIT]
)
def test_a_crash_of_the_agent_while_it_prepares(node: Node, point: Point) -> None:
    claim = node.api.allocate(ref(1), THREE, ONE)
    crashing = node.process(crash_at=point)
    assert crashing.ask("prepare", claim) is None
    assert crashing.died()
    agent = node.agent(wait_s=0.0)
    assert "held by" in agent.prepare(node.api.allocate(ref(2), WHOLE)).message
    agent.executor._wait_s = 30.0
    assert isinstance(agent.prepare(claim), values.Prepared)
    assert node.instances() == {str(GPU0): [(9, 4)], str(GPU1): [(19, 2)]}
    agent.unprepare(claim)
    assert (node.instances(), agent.record.rows()) == ({}, ())


@pytest.mark.parametrize(
    ("after_s", "then"),
    [
        (0.0, "prepared again"),
        (0.3, "unprepared"),
        (0.5, "prepared again"),
        (0.8, "unprepared"),
        (1.0, "prepared again"),
    ],
)
def test_killed_while_the_hardware_is_at_work(slow: Node, after_s: float, then: str) -> None:
    claim = slow.api.allocate(ref(1), THREE, ONE)
    process = slow.process()
    process.send("prepare", claim)
    threading.Event().wait(after_s)
    process.kill()
    agent = slow.agent()
    if then == "prepared again":
        assert isinstance(agent.prepare(claim), values.Prepared)
        assert slow.instances() == {str(GPU0): [(9, 4)], str(GPU1): [(19, 2)]}
    assert isinstance(agent.unprepare(claim), values.Unprepared)
    assert (slow.instances(), agent.record.rows()) == ({}, ())


def test_killed_while_the_hardware_puts_back(slow: Node) -> None:
    claim = slow.api.allocate(ref(1), THREE, TWO)
    process = slow.process()
    assert "devices" in process.ask("prepare", claim)[claim.uid]
    process.send("unprepare", claim)
    threading.Event().wait(0.3)
    process.kill()
    agent = slow.agent()
    assert isinstance(agent.unprepare(claim), values.Unprepared)
    assert (slow.instances(), agent.record.rows()) == ({}, ())


def test_a_library_that_hangs_in_a_removal_holds_up_neither_kubelet_nor_other_gpus(node: Node) -> None:
    agent = node.agent(wait_s=30.0)
    claim = node.api.allocate(ref(1), THREE)
    agent.prepare(claim)
    node.break_(fault.Kind.NVML_HANG, DESTROY)
    assert agent.unprepare(claim, seconds=1.5) == values.Unprepared()
    entry = agent.record.get(claim.uid)
    assert entry is not None
    assert entry.state is ledger.ClaimState.RELEASING
    assert isinstance(agent.prepare(node.api.allocate(ref(2), ONE)), values.Prepared)
    agent.executor._wait_s = 0.2
    assert "still being put back" in agent.prepare(node.api.allocate(ref(3), WHOLE)).message
    agent.stop()
    node.heal()
    second = node.agent(wait_s=30.0)
    threading.Thread(target=second.releaser.run, args=(second.executor.wake,), daemon=True).start()
    assert isinstance(second.prepare(ref(3)), values.Prepared)
    assert node.instances() == {str(GPU1): [(19, 2)]}


@pytest.mark.parametrize("kind", [fault.Kind.NVML_HANG, fault.Kind.NVML_CRASH])
def test_an_instance_that_was_made_and_nobody_was_told_is_found_or_removed(node: Node, kind: fault.Kind) -> None:
    agent = node.agent(wait_s=0.05)
    claim = node.api.allocate(ref(1), THREE)
    node.break_(kind, CREATE, after=True)
    answer = agent.prepare(claim, seconds=3.0)
    assert isinstance(answer, values.Failed), answer
    node.heal()
    assert isinstance(agent.prepare(claim), values.Prepared)
    assert node.instances() == {str(GPU0): [(9, 4)]}
    agent.unprepare(claim)
    assert (node.instances(), agent.record.rows()) == ({}, ())


def test_an_error_of_the_library_is_said_and_nothing_stays(node: Node) -> None:
    agent = node.agent(wait_s=0.05)
    claim = node.api.allocate(ref(1), TWO)
    node.break_(fault.Kind.NVML_ERROR, "nvmlGpuInstanceCreateComputeInstance", error=999)
    assert "Unknown Error" in agent.prepare(claim).message
    assert (node.instances(), agent.record.rows()) == ({}, ())


NO_ROOM, IN_USE = 23, 19
"""NVML_ERROR_INSUFFICIENT_RESOURCES, NVML_ERROR_IN_USE"""


@pytest.mark.parametrize("devices", [(ONE,), (ONE, THREE)])
def test_what_an_admin_makes_right_after_the_look_is_his(
    node: Node, monkeypatch: pytest.MonkeyPatch, devices: tuple[str, ...]
) -> None:
    """The row stands, and before the agent's own call somebody makes the very same instance: his it is, and stays."""
    agent = node.agent(wait_s=0.0)
    claim = node.api.allocate(ref(1), *devices)
    admin.admin_mode(node.machine, GPU1, on=True)
    put = agent.record.put

    def first_then_the_admin(planned: Any, **more: Any) -> None:
        put(planned, **more)
        if planned.entry.state is ledger.ClaimState.STARTED and not node.instances():
            admin.admin_create(node.machine, GPU1, "1g.10gb", 2)

    monkeypatch.setattr(agent.record, "put", first_then_the_admin)
    answer = agent.prepare(claim)
    assert isinstance(answer, values.Failed)
    assert "is occupied by GPU instance 9 (1g.10gb" in answer.message
    assert agent.record.rows() == ()
    assert node.instances() == {str(GPU1): [(19, 2)]}, "the admin's, and nothing of the claim's"
    assert agent.unprepare(claim) == values.Unprepared()
    assert node.instances() == {str(GPU1): [(19, 2)]}


@pytest.mark.parametrize("error", [NO_ROOM, IN_USE])
def test_what_an_admin_makes_while_a_refused_claim_waits_is_his(node: Node, error: int) -> None:
    """After a refusal nothing of the claim is there, so the next attempt takes nothing for its own."""
    agent = node.agent(wait_s=0.0)
    claim = node.api.allocate(ref(1), ONE)
    node.break_(fault.Kind.NVML_ERROR, CREATE, target=GPU1, error=error)
    assert isinstance(agent.prepare(claim), values.Failed)
    agent.stop()
    agent = node.agent(wait_s=30.0)
    answers: list[Any] = []
    thread = threading.Thread(target=lambda: answers.append(agent.prepare(claim)), daemon=True)
    reads = agent.api.reads
    thread.start()
    while agent.api.reads - reads < 2:
        thread.join(0.01)
    while True:
        try:
            admin.admin_create(node.machine, GPU1, "1g.10gb", 2)
        except DocumentError:
            thread.join(0.01)
        else:
            break
    node.heal()
    thread.join(30)
    assert isinstance(answers[0], values.Failed)
    assert "occupied" in answers[0].message
    agent.unprepare(claim)
    assert node.instances() == {str(GPU1): [(19, 2)]}


@pytest.mark.parametrize("after", [False, True])
def test_an_error_that_does_not_say_whether_anything_was_made_leaves_nothing(node: Node, *, after: bool) -> None:
    agent = node.agent(wait_s=0.0)
    claim = node.api.allocate(ref(1), ONE, THREE)
    node.break_(fault.Kind.NVML_ERROR, CREATE, target=GPU1, error=999, after=after)
    assert isinstance(agent.prepare(claim), values.Failed)
    assert (agent.record.rows(), node.instances()) == ((), {})
    node.heal()
    assert isinstance(agent.prepare(claim), values.Prepared)
