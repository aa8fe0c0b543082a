# SPDX-License-Identifier: Apache-2.0
"""A real process is killed (SIGKILL) at every named point of prepare, unprepare and recovery, and the next one goes on from
what is left: the same claim prepares or unprepares cleanly, no device is in two claims, no CDI file is without a row.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from driver.prepare import crashpoints, store
from tests.fakes import cdi_rules, prepare_process, preparing
from tests.fakes.preparing import NAMES, Agent, ref

PREPARING = tuple(name for name in crashpoints.NAMES if name.startswith("prepare."))
UNPREPARING = tuple(name for name in crashpoints.NAMES if name.startswith("unprepare."))
DIVIDING = tuple(name for name in crashpoints.NAMES if name.startswith("mig."))
"""Those of claims that have GPUs divided: test_crash_mig.py."""

SHARING = tuple(name for name in crashpoints.NAMES if name.startswith("shares."))
"""Those of claims that have shares: test_crash_shares.py."""

RECOVERING = tuple(name for name in crashpoints.NAMES if name.startswith("recover."))


class Node:
    """The folders of a node, and the processes on it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.api = preparing.ClaimFolder(path / "claims")
        self._processes: list[prepare_process.PrepareProcess] = []

    def process(self, *, crash_at: str | None = None) -> prepare_process.PrepareProcess:
        """One more agent."""
        made = prepare_process.PrepareProcess(self.path, crash_at=crash_at)
        self._processes.append(made)
        return made

    def close(self) -> None:
        for process in self._processes:
            process.close()

    def check(self, agent: Agent) -> None:
        """What must hold after a start, whatever happened before it."""
        entries = agent.record.rows()
        holds = list(itertools.chain.from_iterable(entry.holds for entry in entries))
        assert len(holds) == len(set(holds)), "a device in two claims"
        assert set(holds) == agent.record.held_devices()
        files = {agent.dialect.claim_file(entry.claim.uid) for entry in entries}
        assert agent.claim_files() <= files, "a file without a row"
        agent.collector.look_after()
        assert agent.claim_files() == files
        for name in files:
            assert cdi_rules.violations((agent.directory.path / name).read_bytes()) == []
        assert agent.directory.with_metadata() == {entry.claim.uid for entry in entries}
        assert all(agent.metadata.folder(entry) is not None for entry in entries)


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    made = Node(tmp_path)
    yield made
    made.close()


def prepared(answer: Any, uid: str) -> bool:
    return "devices" in answer[uid]


@pytest.mark.parametrize("point", PREPARING)
@pytest.mark.parametrize("then", ["prepared again", "unprepared"])
def test_a_crash_while_a_claim_is_prepared(node: Node, point: str, then: str) -> None:
    claim, other = node.api.allocate(ref(1), NAMES[0], NAMES[1]), node.api.allocate(ref(2), NAMES[1])
    bystander = node.api.allocate(ref(3), NAMES[2])
    first = node.process(crash_at=None)
    assert first.started()
    assert prepared(first.ask("prepare", bystander), bystander.uid)
    first.close()
    crashing = node.process(crash_at=point)
    assert crashing.started()
    assert crashing.ask("prepare", claim) is None
    assert crashing.died()

    agent = Agent(node.path, wait_s=0.05).start()
    node.check(agent)
    assert bystander.uid in agent.prepared_uids()
    if then == "prepared again":
        answer = agent.prepare(claim)
        assert [device.device for device in answer.devices] == list(NAMES[:2])
        assert agent.prepare(claim) == answer
        assert "held by" in agent.prepare(other).message
    assert not isinstance(agent.unprepare(claim), str)
    assert agent.prepared_uids() == {bystander.uid}
    node.check(agent)
    assert hasattr(agent.prepare(other), "devices")
    node.check(agent)
    agent.stop()


@pytest.mark.parametrize("point", UNPREPARING)
@pytest.mark.parametrize("then", ["unprepared again", "prepared again"])
def test_a_crash_while_a_claim_is_unprepared(node: Node, point: str, then: str) -> None:
    claim, other = node.api.allocate(ref(1), NAMES[0]), node.api.allocate(ref(2), NAMES[0])
    crashing = node.process(crash_at=point)
    assert crashing.started()
    before = crashing.ask("prepare", claim)
    assert prepared(before, claim.uid)
    assert crashing.ask("unprepare", claim) is None
    assert crashing.died()

    agent = Agent(node.path, wait_s=0.05).start()
    node.check(agent)
    if then == "prepared again":
        assert [device.device for device in agent.prepare(claim).devices] == [NAMES[0]]
        node.check(agent)
    agent.unprepare(claim)
    assert agent.prepared_uids() == set()
    node.check(agent)
    assert hasattr(agent.prepare(other), "devices")
    agent.stop()


@pytest.mark.parametrize("point", RECOVERING)
def test_a_crash_while_a_damaged_record_is_replaced(node: Node, point: str) -> None:
    claims = [node.api.allocate(ref(number), NAMES[number]) for number in range(3)]
    first = node.process()
    assert first.started()
    assert all(prepared(first.ask("prepare", claim), claim.uid) for claim in claims)
    first.close()
    record = node.path / "state" / store.FILE_NAME
    damaged = b"damaged" * 5000
    record.write_bytes(damaged)
    crashing = node.process(crash_at=point)
    assert not crashing.started()
    assert crashing.died()

    agent = Agent(node.path).start()
    assert agent.prepared_uids() == {claim.uid for claim in claims}
    node.check(agent)
    aside = [path for path in record.parent.iterdir() if path.name.startswith(f"{store.FILE_NAME}.damaged")]
    assert [path.read_bytes() for path in aside] == [damaged]
    agent.stop()


def test_every_point_is_tested() -> None:
    assert sorted(PREPARING + UNPREPARING + RECOVERING + DIVIDING + SHARING) == sorted(crashpoints.NAMES)


@pytest.mark.parametrize("round_number", range(3))
def test_killed_at_any_moment_under_load(node: Node, round_number: int) -> None:
    claims = [node.api.allocate(ref(number), NAMES[number % 8]) for number in range(16)]
    process = node.process()
    assert process.started()
    for claim in claims[round_number:]:
        process.send("prepare", claim)
        process.send("unprepare", claims[round_number])
    for _ in range(4 + 5 * round_number):
        assert process.answer() is not None
    process.kill()

    agent = Agent(node.path, wait_s=0.01).start()
    node.check(agent)
    for claim in claims:
        agent.prepare(claim)
    node.check(agent)
    agent.unprepare(*claims)
    assert agent.prepared_uids() == set()
    assert agent.claim_files() == set()
    agent.stop()
