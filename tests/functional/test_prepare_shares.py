# SPDX-License-Identifier: Apache-2.0
"""The prepare room with GPUs that are given out in shares. Aspects: cost, answers, room, what is set and put back, failures, whole
claims beside shares, restarts, reboots, lost records, instances, random sequences.
"""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from discovery import mig, work
from discovery.errors import WorkError
from driver import values
from driver.prepare import ledger, locks, plan, shareuse, store
from driver.sharing import shares
from tests.fakes import preparing
from tests.fakes.preparing import NAMES, Agent, ref, share, share_id

MPS = {"memory": shares.Memory.MPS, "compute": shares.Compute.MPS}
BUSY = WorkError("the driver is busy", kind=work.Kind.FAILED, retryable=False)
PASSING = WorkError("no supervisor answers", kind=work.Kind.FAILED, retryable=True)


class CountingRecord(store.Store):
    """Counts the rows that are written."""

    puts = 0

    def put(self, *arguments: Any, **more: Any) -> None:
        self.puts += 1
        super().put(*arguments, **more)


class CountingAgent(Agent):
    record_type = CountingRecord


def started(node: Path, *, boot_id: str = preparing.BOOT_ID, **how: Any) -> CountingAgent:
    agent = CountingAgent(node, boot_id=boot_id, wait_s=0.3)
    agent.index.share(**how)
    agent.start()
    return agent


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[CountingAgent]:
    made = started(tmp_path)
    yield made
    made.stop()


def test_a_share_by_cgroup_costs_what_a_gpu_costs_and_one_call(agent: CountingAgent) -> None:
    assert isinstance(agent.record, CountingRecord)
    claim = agent.api.allocate_shares(ref(1), share(NAMES[0], share_id(1)), share(NAMES[0], share_id(2)))
    answer = agent.prepare(claim)
    assert [(d.device, d.share_id) for d in answer.devices] == [(NAMES[0], share_id(1)), (NAMES[0], share_id(2))]
    assert len({d.cdi_device_ids for d in answer.devices}) == 2
    assert (agent.api.reads, agent.record.puts, len(agent.enforcer.calls)) == (1, 1, 1)
    agent.api.down(is_down=True)
    assert agent.prepare(claim) == answer
    assert (agent.api.reads, agent.record.puts, len(agent.enforcer.calls)) == (1, 1, 1)
    there = agent.enforcer.there()[claim.uid]
    assert there["pods"] == [preparing.pod(1)["uid"]]
    assert there["shares"] == {share_id(number): [NAMES[0], "GPU-0", 20 << 30, 25] for number in (1, 2)}
    assert isinstance(agent.unprepare(claim), values.Unprepared)
    assert (agent.enforcer.there(), agent.prepared_uids(), agent.claim_files()) == ({}, set(), set())


def test_what_nothing_holds_costs_no_call_at_all(tmp_path: Path) -> None:
    agent = started(tmp_path, memory=shares.Memory.NONE)
    claim = agent.api.allocate_shares(ref(1), share(NAMES[0], share_id(1)))
    agent.prepare(claim)
    agent.unprepare(claim)
    assert agent.enforcer.calls == []
    agent.stop()


def test_a_share_by_mps_begins_with_a_row(tmp_path: Path) -> None:
    agent = started(tmp_path, **MPS)
    assert isinstance(agent.record, CountingRecord)
    agent.prepare(agent.api.allocate_shares(ref(1), share(NAMES[0], share_id(1))))
    assert (agent.record.puts, len(agent.enforcer.calls)) == (2, 1)
    agent.stop()


def test_four_quarters_fit_and_a_fifth_waits_for_one_to_go(agent: CountingAgent) -> None:
    claims = [agent.api.allocate_shares(ref(number), share(NAMES[0], share_id(number))) for number in range(1, 6)]
    for number, claim in enumerate(claims[:4]):
        assert hasattr(agent.prepare(claim), "devices")
        assert agent.enforcer.calls[-1].others == frozenset(other.uid for other in claims[:number])
    refused = agent.prepare(claims[4])
    for words in ("80.5Gi of memory, 100 percent", "4 shares", str(claims[0]), NAMES[0]):
        assert words in refused.message
    assert claims[4].uid not in agent.enforcer.there()

    answers: list[Any] = []
    agent.executor._wait_s = 40.0
    waiting = threading.Thread(target=lambda: answers.append(agent.prepare(claims[4])))
    waiting.start()
    agent.unprepare(claims[1])
    waiting.join(50)
    assert [device.share_id for device in answers[0].devices] == [share_id(5)]
    assert agent.prepared_uids() == {claim.uid for claim in claims} - {claims[1].uid}


def test_claims_that_race_for_a_gpu_never_get_more_than_there_is(agent: CountingAgent) -> None:
    claims = [
        agent.api.allocate_shares(ref(number), share(NAMES[0], share_id(number), memory="30Gi", compute="5"))
        for number in range(1, 7)
    ]
    whole = agent.api.allocate(ref(7), NAMES[0])
    agent.executor._wait_s = 0.0
    answers = agent.prepare(*claims, whole)
    got = {uid for uid, answer in answers.items() if isinstance(answer, values.Prepared)}
    assert got == {whole.uid} or (len(got) == 2 and whole.uid not in got)
    assert agent.prepared_uids() == got
    assert set(agent.enforcer.there()) == got - {whole.uid}


def test_of_sharers_that_leave_together_one_is_the_last(agent: CountingAgent) -> None:
    claims = [agent.api.allocate_shares(ref(number), share(NAMES[0], share_id(number))) for number in range(1, 5)]
    agent.prepare(*claims)
    assert sorted(len(call.others) for call in agent.enforcer.calls) == [0, 1, 2, 3]
    agent.enforcer.calls.clear()
    agent.unprepare(*claims)
    assert sorted(len(call.others) for call in agent.enforcer.calls) == [0, 1, 2, 3]
    assert {call.name for call in agent.enforcer.calls} == {"undo"}


def test_shares_and_whole_claims_keep_each_other_out(agent: CountingAgent) -> None:
    sharer = agent.api.allocate_shares(ref(1), share(NAMES[0], share_id(1)))
    whole = agent.api.allocate(ref(2), NAMES[0])
    assert hasattr(agent.prepare(sharer), "devices")
    assert f"held by {sharer}" in agent.prepare(whole).message
    agent.unprepare(sharer)
    assert hasattr(agent.prepare(whole), "devices")
    assert f"held by {whole}" in agent.prepare(sharer).message
    watch = agent.api.allocate_shares(ref(3), preparing.result(NAMES[0], adminAccess=True))
    assert hasattr(agent.prepare(watch), "devices")
    assert len(agent.enforcer.calls) == 2


def test_what_cannot_be_set_fails_the_claim_and_leaves_nothing_of_it(tmp_path: Path) -> None:
    for number, how in enumerate(({}, MPS)):
        agent = started(tmp_path / str(number), **how)
        claim = agent.api.allocate_shares(ref(1), share(NAMES[0], share_id(1)))
        agent.enforcer.failing["apply"] = BUSY
        assert "the driver is busy" in agent.prepare(claim).message
        assert agent.prepared_uids() == set()
        assert agent.claim_files() == set()
        if how:
            assert agent.enforcer.there() == {}
        agent.enforcer.failing.clear()
        assert hasattr(agent.prepare(claim), "devices")
        agent.stop()


def test_what_may_pass_is_waited_for_and_gone_on_from(tmp_path: Path) -> None:
    agent = started(tmp_path, **MPS)
    claim = agent.api.allocate_shares(ref(1), share(NAMES[0], share_id(1)))
    agent.enforcer.failing["apply"] = PASSING
    agent.executor._wait_s = 40.0
    answers: list[Any] = []
    waiting = threading.Thread(target=lambda: answers.append(agent.prepare(claim)))
    waiting.start()
    while len(agent.enforcer.calls) < 2:
        threading.Event().wait(0.01)
    agent.enforcer.failing.clear()
    agent.executor.wake()
    waiting.join(50)
    assert hasattr(answers[0], "devices")
    assert [call.begun for call in agent.enforcer.calls][:2] == [False, True]
    assert {call.name for call in agent.enforcer.calls} == {"apply"}
    agent.stop()


def test_a_hung_call_leaves_its_row_to_go_on_from(tmp_path: Path) -> None:
    agent = started(tmp_path, **MPS)
    claim = agent.api.allocate_shares(ref(1), share(NAMES[0], share_id(1)))
    agent.enforcer.failing["apply"] = WorkError("no answer", kind=work.Kind.TIMEOUT, retryable=False)
    assert "no answer" in agent.prepare(claim).message
    entry = agent.record.get(claim.uid)
    assert entry is not None
    assert entry.state is ledger.ClaimState.STARTED
    agent.enforcer.failing.clear()
    assert hasattr(agent.prepare(claim), "devices")
    assert agent.enforcer.calls[-1].begun
    agent.stop()


def test_what_cannot_be_put_back_holds_its_room_until_it_is(tmp_path: Path) -> None:
    for number, how in enumerate(({}, MPS)):
        agent = started(tmp_path / str(number), **how)
        claim = agent.api.allocate_shares(ref(1), share(NAMES[0], share_id(1), memory="60Gi"))
        other = agent.api.allocate_shares(ref(2), share(NAMES[0], share_id(2), memory="40Gi"))
        assert hasattr(agent.prepare(claim), "devices")
        agent.enforcer.failing["undo"] = BUSY
        assert isinstance(agent.unprepare(claim), values.Unprepared)
        assert agent.record.releasing() == (claim.uid,)
        assert agent.claim_files() == set()
        assert str(claim) in agent.prepare(other).message
        agent.enforcer.failing.clear()
        agent.executor._wait_s = 40.0
        threading.Thread(target=agent.releaser.run, args=(agent.executor.wake,), daemon=True).start()
        assert hasattr(agent.prepare(other), "devices")
        assert agent.prepared_uids() == set(agent.enforcer.there()) == {other.uid}
        agent.stop()


def test_a_claim_that_is_still_put_back_is_prepared_anew(tmp_path: Path) -> None:
    agent = started(tmp_path, **MPS)
    claim = agent.api.allocate_shares(ref(1), share(NAMES[0], share_id(1)))
    agent.prepare(claim)
    agent.enforcer.failing["undo"] = BUSY
    agent.unprepare(claim)
    agent.enforcer.failing.clear()
    agent.api.allocate_shares(claim, share(NAMES[1], share_id(2)))
    assert [device.device for device in agent.prepare(claim).devices] == [NAMES[1]]
    assert [call.name for call in agent.enforcer.calls] == ["apply", "undo", "undo", "apply"]
    assert set(agent.enforcer.there()[claim.uid]["shares"]) == {share_id(2)}
    agent.stop()


def test_the_next_agent_sets_what_it_answers_for(tmp_path: Path) -> None:
    first = started(tmp_path)
    claim = first.api.allocate_shares(ref(1), share(NAMES[0], share_id(1)))
    other = first.api.allocate_shares(ref(2), share(NAMES[0], share_id(2)))
    answer = first.prepare(claim)
    first.prepare(other)
    first.stop()
    second = started(tmp_path)
    second.enforcer.forget()
    second.api.down(is_down=True)
    assert second.prepare(claim) == answer
    assert second.prepare(claim) == answer
    assert [(call.name, call.begun, call.others) for call in second.enforcer.calls] == [
        ("apply", True, frozenset({other.uid}))
    ]
    assert set(second.enforcer.there()) == {claim.uid}
    second.enforcer.failing["apply"] = BUSY
    assert "the driver is busy" in second.prepare(other).message
    assert second.prepared_uids() == {claim.uid, other.uid}
    second.stop()


def test_after_a_reboot_rows_hold_nothing_and_are_prepared_again(tmp_path: Path) -> None:
    first = started(tmp_path, **MPS)
    claim = first.api.allocate_shares(ref(1), share(NAMES[0], share_id(1), memory="70Gi", compute="70"))
    assert hasattr(first.prepare(claim), "devices")
    first.stop()
    second = started(tmp_path, boot_id="later", **MPS)
    second.enforcer.forget()
    other = second.api.allocate_shares(ref(2), share(NAMES[0], share_id(2), memory="70Gi", compute="70"))
    assert hasattr(second.prepare(other), "devices")
    assert str(other) in second.prepare(claim).message
    assert isinstance(second.unprepare(claim), values.Unprepared)
    assert [call.name for call in second.enforcer.calls] == ["apply"]
    assert second.prepared_uids() == {other.uid}
    second.stop()


def test_a_claim_for_several_pods_is_refused_where_a_cgroup_holds_it(agent: CountingAgent) -> None:
    pods = [preparing.pod(number) for number in (1, 2)]
    claim = agent.api.allocate_shares(ref(1), share(NAMES[0], share_id(1)), pods=pods)
    message = agent.prepare(claim).message
    assert "'pod-1', 'pod-2'" in message
    assert "ResourceClaimTemplate" in message
    assert (agent.enforcer.calls, agent.prepared_uids()) == ([], set())


def test_a_lost_record_is_made_of_the_files_of_all_sharers(tmp_path: Path) -> None:
    first = started(tmp_path)
    claims = [first.api.allocate_shares(ref(number), share(NAMES[0], share_id(number))) for number in range(1, 5)]
    answers = {claim.uid: first.prepare(claim) for claim in claims}
    first.stop()
    (tmp_path / "state" / store.FILE_NAME).unlink()
    second = started(tmp_path)
    assert second.prepared_uids() == {claim.uid for claim in claims}
    assert {claim.uid: second.prepare(claim) for claim in claims} == answers
    assert second.api.reads == 0
    assert "100 percent" in second.prepare(second.api.allocate_shares(ref(9), share(NAMES[0], share_id(9)))).message
    second.stop()


def test_two_agents_on_a_node_know_of_each_others_shares(tmp_path: Path) -> None:
    first, second = started(tmp_path), started(tmp_path)
    one = first.api.allocate_shares(ref(1), share(NAMES[0], share_id(1), memory="60Gi"))
    two = first.api.allocate_shares(ref(2), share(NAMES[0], share_id(2), memory="60Gi"))
    assert hasattr(first.prepare(one), "devices")
    assert str(one) in second.prepare(two).message
    assert isinstance(second.unprepare(one), values.Unprepared)
    assert hasattr(first.prepare(two), "devices")
    assert set(first.enforcer.there()) == {two.uid}
    first.stop()
    second.stop()


def test_shares_in_one_container_have_variables_of_their_own(tmp_path: Path) -> None:
    agent = started(tmp_path, **MPS)
    claims = [
        agent.api.allocate_shares(ref(number), share(NAMES[0], share_id(number)), share(NAMES[1], share_id(9 + number)))
        for number in (1, 2)
    ]
    seen: dict[str, str] = {}
    folders = set()
    for claim in claims:
        agent.prepare(claim)
        spec = json.loads((agent.directory.path / agent.dialect.claim_file(claim.uid)).read_bytes())
        for device in spec["devices"]:
            name, _, uuid = device["containerEdits"]["env"][0].partition("=")
            assert name not in seen
            seen[name] = uuid
            folders.add(device["containerEdits"]["mounts"][0]["hostPath"])
    assert sorted(seen.values()) == ["GPU-0", "GPU-0", "GPU-1", "GPU-1"]
    assert len(folders) == 4
    agent.stop()


CAPS = tuple(mig.CapabilityNode(path=f"/dev/nvidia-caps/nvidia-cap{n}", major=237, minor=n) for n in (66, 67))


def static(agent: Agent, uuid: str) -> str:
    """Have somebody make an instance that is shared by MPS; its device name."""
    agent.index.divide()
    agent.index.share(memory=shares.Memory.MPS, compute=shares.Compute.MPS)
    name = preparing.part_name(0, 9, 4)
    device = agent.index.devices[name]
    assert isinstance(device, plan.PartitionDevice)
    made = mig.MigInstance(
        gpu_instance=1, profile_id=9, placement=device.place, compute_instance=0, uuid=uuid, nodes=CAPS
    )
    agent.index.devices[name] = replace(device, dynamic=False, instance=made)
    return name


def test_an_instance_that_somebody_has_made_again_is_set_again(tmp_path: Path) -> None:
    agent = started(tmp_path)
    name = static(agent, "MIG-1")
    claims = [
        agent.api.allocate_shares(ref(number), share(name, share_id(number), memory="4Gi", compute="5"))
        for number in (1, 2)
    ]
    for claim in claims:
        assert hasattr(agent.prepare(claim), "devices")
    assert agent.enforcer.there()[claims[0].uid]["shares"] == {share_id(1): [name, "MIG-1", 4 << 30, 35]}
    static(agent, "MIG-2")
    assert hasattr(agent.prepare(claims[0]), "devices")
    assert agent.enforcer.there()[claims[0].uid]["shares"] == {share_id(1): [name, "MIG-2", 4 << 30, 35]}
    assert agent.enforcer.calls[-1].others == frozenset({claims[1].uid})
    kept = agent.record.get(claims[0].uid)
    assert kept is not None
    assert kept.devices[0].room == ledger.Room(memory=(10 << 30) + (1 << 29), compute=14, sharers=8)
    third = agent.api.allocate_shares(ref(3), share(name, share_id(3), memory="4Gi", compute="5"))
    assert "10.5Gi of memory, 14 percent" in agent.prepare(third).message
    assert f"held by {claims[0]}" in agent.prepare(agent.api.allocate(ref(4), NAMES[0])).message
    agent.stop()


def test_an_unprepare_that_cannot_have_its_gpu_is_done_behind(agent: CountingAgent) -> None:
    claim = agent.api.allocate_shares(ref(1), share(NAMES[0], share_id(1)))
    agent.prepare(claim)
    with agent.locks.gpus([preparing.ADDRESSES[0]], patience=locks.Deadline(5)):
        assert isinstance(agent.unprepare(claim, seconds=0.6), values.Unprepared)
        assert agent.record.releasing() == (claim.uid,)
        assert [call.name for call in agent.enforcer.calls] == ["apply"]
    agent.releaser._attempt(claim.uid)
    assert (agent.enforcer.there(), agent.prepared_uids()) == ({}, set())


ROUNDS = 140


@pytest.mark.parametrize("seed", range(3))
def test_whatever_happens_no_device_is_overdrawn_and_nothing_is_left(tmp_path: Path, seed: int) -> None:
    """Claims that a scheduler allocated without looking, in any order, with faults, restarts, reboots and lost records."""
    dice = random.Random(seed)
    how = MPS if seed % 2 else {}
    boots = 0
    agent = started(tmp_path, **how)
    agent.executor._wait_s = 0.0
    room = preparing.sharing().room

    def check() -> None:
        entries = agent.record.rows()
        mine = [entry for entry in entries if entry.boot_id == f"boot-{boots}" or not boots]
        for name in NAMES[:3]:
            held = [entry for entry in mine if name in entry.holds]
            assert shareuse.fits(room, [use for entry in held for use in ledger.uses_of(entry, name)])
            assert len(held) < 2 or all(name in entry.held_in_shares for entry in held)
        there = agent.enforcer.there()
        assert set(there) <= {entry.claim.uid for entry in mine if entry.enforced}
        for entry in mine:
            if entry.enforced and entry.state is ledger.ClaimState.COMPLETED:
                assert set(there[entry.claim.uid]["shares"]) == {result.share_id for _, result in entry.shared}

    for turn in range(ROUNDS):
        claim = ref(dice.randrange(1, 12))
        event = dice.random()
        if event < 0.5:
            if claim.uid not in agent.prepared_uids():
                if dice.random() < 0.2:
                    agent.api.allocate(claim, dice.choice(NAMES[:3]))
                else:
                    agent.api.allocate_shares(
                        claim,
                        *(
                            share(
                                dice.choice(NAMES[:3]),
                                share_id(turn * 4 + number),
                                memory=f"{dice.randrange(1, 45)}Gi",
                                compute=str(5 * dice.randrange(1, 12)),
                            )
                            for number in range(dice.randrange(1, 4))
                        ),
                    )
            agent.prepare(claim)
        elif event < 0.8:
            agent.unprepare(claim)
        elif event < 0.9:
            agent.enforcer.failing["undo"] = BUSY
            agent.unprepare(claim)
            agent.enforcer.failing.clear()
        elif event < 0.96:
            agent.stop()
            if dice.random() < 0.3:
                boots += 1
                agent.enforcer.forget()
            elif dice.random() < 0.3:
                leaving = agent_releasing(tmp_path)
                (tmp_path / "state" / store.FILE_NAME).unlink()
                for (
                    uid
                ) in leaving:  # nobody knows of it any more: whoever keeps shares in step sweeps what was set for it
                    agent.enforcer.drop(uid)
            agent = started(tmp_path, boot_id=f"boot-{boots}" if boots else preparing.BOOT_ID, **how)
            agent.executor._wait_s = 0.0
        else:
            for uid in agent.record.releasing():
                agent.releaser._attempt(uid)
        check()
    for number in range(1, 12):
        agent.unprepare(ref(number))
    assert (agent.prepared_uids(), agent.enforcer.there(), agent.claim_files()) == (set(), {}, set())
    assert agent.record.held_devices() == frozenset()
    agent.stop()


def agent_releasing(node: Path) -> list[str]:
    """The claims of a stopped agent that are still to be put back."""
    rows = store.read_rows(node / "state")
    return [entry.claim.uid for entry in rows if entry.state is not ledger.ClaimState.COMPLETED]
