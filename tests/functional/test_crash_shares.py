# SPDX-License-Identifier: Apache-2.0
"""A real process is killed (SIGKILL) at every named point of the life of a claim that has shares by MPS. Whatever is left, the next
agent goes on from it: the claim is prepared again or is gone, what was set for it goes with it, its sharers keep theirs.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from driver.prepare import crashpoints, ledger, shareuse
from driver.prepare.crashpoints import Point
from driver.sharing import shares
from tests.fakes import crashing, preparing
from tests.fakes.preparing import NAMES, Agent, ref, share, share_id

BEGUN = (Point.MIG_BEFORE_STARTED, Point.MIG_AFTER_STARTED)
"""A started row is one, whatever it is for."""

WHILE_PREPARED = (
    *(name for name in crashpoints.NAMES if name.startswith("prepare.")),
    *BEGUN,
    Point.SHARES_APPLIED,
)
WHILE_UNDONE = (Point.SHARES_BEFORE_UNDO, Point.SHARES_UNDONE)
WHILE_UNPREPARED = (*(name for name in crashpoints.NAMES if name.startswith("unprepare.")), *WHILE_UNDONE)
WHILE_LEFT = (Point.MIG_BEFORE_RELEASING, Point.MIG_AFTER_RELEASING)


class Node(crashing.Node):
    """The folders of a node, somebody who shares a GPU, and the processes on it."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, shared=True)
        self.claim = self.api.allocate_shares(
            ref(1), share(NAMES[0], share_id(1)), share(NAMES[0], share_id(2)), share(NAMES[1], share_id(3))
        )
        self.bystander = self.api.allocate_shares(ref(2), share(NAMES[0], share_id(4)))
        first = self.process()
        assert "devices" in first.ask("prepare", self.bystander)[self.bystander.uid]
        first.close()

    def agent(self) -> Agent:
        """The next agent, here."""
        agent = Agent(self.path, wait_s=0.05)
        agent.index.share(memory=shares.Memory.MPS, compute=shares.Compute.MPS)
        return agent.start()

    def check(self, agent: Agent) -> None:
        """What must hold after a start, whatever happened before it."""
        entries = agent.record.rows()
        assert {device for entry in entries for device in entry.holds} == agent.record.held_devices()
        for name in agent.record.held_devices():
            room = preparing.sharing().room
            assert shareuse.fits(room, [use for entry in entries for use in ledger.uses_of(entry, name)])
        self.check_files(agent)
        there = agent.enforcer.there()
        assert set(there) <= {entry.claim.uid for entry in entries}, "something is set that no claim knows"
        assert {entry.claim.uid for entry in entries if entry.state is ledger.ClaimState.COMPLETED} <= set(there)
        assert set(there[self.bystander.uid]["shares"]) == {share_id(4)}

    def end(self, agent: Agent) -> None:
        """Nothing is left of the claim, and its room can be had."""
        self.unprepare(agent)
        self.check(agent)
        assert agent.prepared_uids() == set(agent.enforcer.there()) == {self.bystander.uid}
        big = agent.api.allocate_shares(ref(3), share(NAMES[0], share_id(5), memory="60Gi", compute="75"))
        assert hasattr(agent.prepare(big), "devices")
        assert hasattr(agent.prepare(agent.api.allocate(ref(4), NAMES[1])), "devices")
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
        *itertools.product(
            (*BEGUN, Point.SHARES_APPLIED, Point.PREPARE_AFTER_CDI_FILE), ["unprepared", "allocated anew"]
        ),
    ],
)
def test_a_crash_while_a_claim_is_prepared(node: Node, point: str, then: str) -> None:
    node.dies_preparing(point)

    agent = node.agent()
    node.check(agent)
    if then == "allocated anew" and node.claim.uid not in agent.prepared_uids():
        then = "prepared again"
    if then == "allocated anew" and agent.record.get(node.claim.uid).state is ledger.ClaimState.STARTED:  # type: ignore[union-attr]
        agent.api.allocate_shares(node.claim, share(NAMES[2], share_id(9)))
        assert [device.device for device in agent.prepare(node.claim).devices] == [NAMES[2]]
        assert set(agent.enforcer.there()[node.claim.uid]["shares"]) == {share_id(9)}
        assert [call.name for call in agent.enforcer.calls] == ["undo", "apply"]
        node.check(agent)
    if then == "prepared again":
        answer = agent.prepare(node.claim)
        assert [(d.device, d.share_id) for d in answer.devices] == [
            (NAMES[0], share_id(1)),
            (NAMES[0], share_id(2)),
            (NAMES[1], share_id(3)),
        ]
        assert agent.prepare(node.claim) == answer
        node.check(agent)
        assert set(agent.enforcer.there()[node.claim.uid]["shares"]) == {share_id(1), share_id(2), share_id(3)}
        rival = agent.api.allocate_shares(ref(5), share(NAMES[0], share_id(6), compute="30"))
        assert "80.5Gi" in agent.prepare(rival).message
        assert "held by" in agent.prepare(agent.api.allocate(ref(6), NAMES[0])).message
    node.end(agent)


@pytest.mark.parametrize(
    ("point", "then"), list(itertools.product(WHILE_UNPREPARED, ["prepared again", "unprepared again"]))
)
def test_a_crash_while_a_claim_is_unprepared(node: Node, point: str, then: str) -> None:
    node.dies_unpreparing(point)

    agent = node.agent()
    if point not in {Point.SHARES_UNDONE, Point.UNPREPARE_BEFORE_COMMIT}:
        node.check(agent)
    if then == "prepared again":
        assert hasattr(agent.prepare(node.claim), "devices")
        node.check(agent)
    node.end(agent)


@pytest.mark.parametrize("point", WHILE_LEFT)
@pytest.mark.parametrize("then", ["unprepared again", "prepared again", "left alone"])
def test_a_crash_while_a_claim_is_left_to_be_put_back(node: Node, point: str, then: str) -> None:
    node.dies_unpreparing(point, left=True)

    agent = node.agent()
    if then == "prepared again":
        assert hasattr(agent.prepare(node.claim), "devices")
    if then == "left alone":
        threading.Thread(target=agent.releaser.run, args=(agent.executor.wake,), daemon=True).start()
    node.end(agent)


@pytest.mark.parametrize("point", WHILE_UNDONE)
def test_a_crash_while_a_failed_prepare_is_undone(node: Node, point: str) -> None:
    node.dies_undoing(point, works=point == Point.SHARES_UNDONE)
    agent = node.agent()
    node.check(agent)
    assert hasattr(agent.prepare(node.claim), "devices")
    node.end(agent)


def test_every_point_is_tested() -> None:
    mine = {name for name in crashpoints.NAMES if name.startswith("shares.")}
    assert mine <= {*WHILE_PREPARED, *WHILE_UNPREPARED}


@pytest.mark.parametrize("round_number", range(2))
def test_killed_at_any_moment_under_load(node: Node, round_number: int) -> None:
    claims = [
        node.api.allocate_shares(ref(10 + number), share(NAMES[number % 3], share_id(10 + number), compute="5"))
        for number in range(12)
    ]
    process = node.process()
    for claim in claims:
        process.send("prepare", claim)
        process.send("unprepare", claim)
        process.send("prepare", claim)
    for _ in range(5 + 9 * round_number):
        assert process.answer() is not None
    process.kill()

    agent = node.agent()
    for claim in claims:
        agent.prepare(claim)
    node.check(agent)
    agent.unprepare(*claims)
    assert agent.prepared_uids() == set(agent.enforcer.there()) == {node.bystander.uid}
    node.end(agent)


@pytest.mark.parametrize("point", [name for name in crashpoints.NAMES if name.startswith("recover.")])
def test_a_crash_while_a_lost_record_is_made_of_the_files(node: Node, point: str) -> None:
    first = node.process()
    assert "devices" in first.ask("prepare", node.claim)[node.claim.uid]
    first.close()
    (node.path / "state" / "record.db").write_bytes(b"damaged" * 5000)
    assert node.process(crash_at=point, starts=False).died()
    agent = node.agent()
    assert agent.prepared_uids() == {node.claim.uid, node.bystander.uid}
    node.check(agent)
    assert (
        "80.5Gi" in agent.prepare(agent.api.allocate_shares(ref(5), share(NAMES[0], share_id(6), compute="30"))).message
    )
    node.end(agent)
