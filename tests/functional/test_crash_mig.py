# SPDX-License-Identifier: Apache-2.0
"""A real process is killed (SIGKILL) at every named point of the life of a claim for which MIG instances are made. Whatever is left,
the next agent goes on from it: the claim is prepared again or is gone, no instance is left over, none of an admin's is touched.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from driver.prepare import crashpoints, ledger
from driver.prepare.crashpoints import Point
from tests.fakes import crashing
from tests.fakes.preparing import ADDRESSES, NAMES, Agent, part_name, ref

WHILE_MADE = (Point.MIG_BEFORE_STARTED, Point.MIG_AFTER_STARTED, Point.MIG_MADE)
WHILE_PREPARED = (*(name for name in crashpoints.NAMES if name.startswith("prepare.")), *WHILE_MADE)
WHILE_UNDONE = (Point.MIG_BEFORE_REMOVAL, Point.MIG_REMOVED)
WHILE_UNPREPARED = (*(name for name in crashpoints.NAMES if name.startswith("unprepare.")), *WHILE_UNDONE)
WHILE_LEFT = (Point.MIG_BEFORE_RELEASING, Point.MIG_AFTER_RELEASING)
PARTS = (part_name(0, 9, 4), part_name(1, 19, 0))
ADMINS = {(19, 6): "admin"}


class Node(crashing.Node):
    """The folders of a node, an admin's instance on its second GPU, and the processes on it."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, divided=True)
        self.claim = self.api.allocate(ref(1), *PARTS)
        self.bystander = self.api.allocate(ref(2), part_name(0, 14, 0))
        first = self.process()
        agent = Agent(path)
        agent.hardware.admin_makes(ADDRESSES[1], 19, 6)
        assert "devices" in first.ask("prepare", self.bystander)[self.bystander.uid]
        first.close()

    def agent(self) -> Agent:
        """The next agent, here."""
        agent = Agent(self.path, wait_s=0.05)
        agent.index.divide()
        return agent.start()

    def check(self, agent: Agent) -> None:
        """What must hold after a start, whatever happened before it."""
        entries = agent.record.rows()
        held = list(itertools.chain.from_iterable(entry.devices_held() for entry in entries))
        assert not any(ledger.overlap(one, other) for one, other in itertools.combinations(held, 2))
        assert {device.name for device in held} == agent.record.held_devices()
        self.check_files(agent)
        meant = {(part.gpu, part.profile_id, part.start) for entry in entries for part in entry.partitions}
        there = {
            (place, profile, start)
            for place in ADDRESSES
            for (profile, start), owner in agent.hardware.instances(place).items()
            if owner == "agent"
        }
        assert there <= meant, "an instance that no claim knows"
        assert agent.hardware.instances(ADDRESSES[0])[14, 0] == "agent", "the bystander's"
        assert agent.hardware.instances(ADDRESSES[1])[19, 6] == "admin"

    def end(self, agent: Agent) -> None:
        """Nothing is left of the claim, and its places can be had."""
        self.unprepare(agent)
        self.check(agent)
        assert agent.prepared_uids() == {self.bystander.uid}
        assert agent.hardware.instances(ADDRESSES[0]) == {(14, 0): "agent"}
        assert agent.hardware.instances(ADDRESSES[1]) == ADMINS
        other = agent.api.allocate(ref(3), part_name(0, 19, 4), part_name(1, 14, 0))
        assert hasattr(agent.prepare(other), "devices")
        agent.unprepare(self.bystander)
        assert hasattr(agent.prepare(agent.api.allocate(ref(4), NAMES[2])), "devices")
        agent.stop()


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    made = Node(tmp_path)
    yield made
    made.close()


@pytest.mark.parametrize(
    ("point", "then"),
    [
        *((point, "prepared again") for point in WHILE_PREPARED),
        *itertools.product(WHILE_MADE, ["unprepared", "allocated anew"]),
    ],
)
def test_a_crash_while_a_claim_is_prepared(node: Node, point: str, then: str) -> None:
    node.dies_preparing(point)

    agent = node.agent()
    node.check(agent)
    if then == "allocated anew":
        agent.api.allocate(node.claim, part_name(2, 5, 0))
        assert [device.device for device in agent.prepare(node.claim).devices] == [part_name(2, 5, 0)]
        assert agent.hardware.instances(ADDRESSES[1]) == ADMINS
        node.check(agent)
    if then == "prepared again":
        answer = agent.prepare(node.claim)
        assert [device.device for device in answer.devices] == list(PARTS)
        assert agent.prepare(node.claim) == answer
        node.check(agent)
        rival = agent.api.allocate(ref(5), NAMES[0])
        assert "held by" in agent.prepare(rival).message
        assert agent.hardware.instances(ADDRESSES[0]) == {(14, 0): "agent", (9, 4): "agent"}
    node.end(agent)


@pytest.mark.parametrize(
    ("point", "then"),
    [
        *((point, "prepared again") for point in WHILE_UNPREPARED),
        *((point, "unprepared again") for point in WHILE_UNDONE),
    ],
)
def test_a_crash_while_a_claim_is_unprepared(node: Node, point: str, then: str) -> None:
    node.dies_unpreparing(point)

    agent = node.agent()
    node.check(agent)
    if then == "prepared again":
        assert [device.device for device in agent.prepare(node.claim).devices] == list(PARTS)
        node.check(agent)
        assert agent.hardware.instances(ADDRESSES[0]) == {(14, 0): "agent", (9, 4): "agent"}
    node.end(agent)


@pytest.mark.parametrize("point", WHILE_LEFT)
@pytest.mark.parametrize("then", ["unprepared again", "prepared again", "left alone"])
def test_a_crash_while_a_claim_is_left_to_be_put_back(node: Node, point: str, then: str) -> None:
    node.dies_unpreparing(point, left=True)

    agent = node.agent()
    node.check(agent)
    if then == "prepared again":
        assert [device.device for device in agent.prepare(node.claim).devices] == list(PARTS)
        node.check(agent)
    if then == "left alone":
        threading.Thread(target=agent.releaser.run, args=(agent.executor.wake,), daemon=True).start()
    node.end(agent)


@pytest.mark.parametrize("point", WHILE_UNDONE)
def test_a_crash_while_a_failed_prepare_is_undone(node: Node, point: str) -> None:
    node.dies_undoing(point, works=point == Point.MIG_REMOVED)
    agent = node.agent()
    node.check(agent)
    assert hasattr(agent.prepare(node.claim), "devices")
    node.end(agent)


def test_every_point_is_tested() -> None:
    mine = {name for name in crashpoints.NAMES if name.startswith("mig.")}
    assert mine <= {*WHILE_PREPARED, *WHILE_UNPREPARED, *WHILE_LEFT}


@pytest.mark.parametrize("round_number", range(3))
def test_killed_at_any_moment_under_load(node: Node, round_number: int) -> None:
    names = [part_name(2 + number % 2, 19, number // 2) for number in range(12)]
    claims = [node.api.allocate(ref(20 + number), name) for number, name in enumerate(names)]
    process = node.process()
    for claim in claims[round_number:]:
        process.send("prepare", claim)
        process.send("unprepare", claims[round_number])
    for _ in range(3 + 5 * round_number):
        assert process.answer() is not None
    process.kill()

    agent = node.agent()
    node.check(agent)
    answers = agent.prepare(*claims)
    assert all(hasattr(answer, "devices") for answer in answers.values()), answers
    node.check(agent)
    agent.unprepare(*claims)
    assert [agent.hardware.instances(place) for place in ADDRESSES[2:4]] == [{}, {}]
    node.end(agent)
