# SPDX-License-Identifier: Apache-2.0
"""Claims for MIG instances that are made for them, asked as kubelet asks, with a hardware of files. Aspects: what is made and said,
who overlaps whom, several GPUs at once, what an admin does, what fails, what an earlier call left, putting back.
"""

from __future__ import annotations

import functools
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from discovery import work
from discovery.address import PciAddress
from discovery.errors import WorkError
from driver import values
from driver.prepare import ledger, plan
from tests.fakes import cdi_rules, preparing
from tests.fakes.preparing import ADDRESSES, NAMES, Agent, part_name, ref

ONE, TWO, THREE, FOUR = 19, 14, 9, 5
"""Profile ids of 1g, 2g, 3g, 4g."""


def divided(path: Path, **more: Any) -> Agent:
    """An agent whose GPUs are divided at need."""
    made = Agent(path, **{"wait_s": 0.05, **more})
    made.index.divide()
    return made.start()


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[Agent]:
    made = divided(tmp_path)
    yield made
    made.stop()


def in_thread(does: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    answers: list[Any] = []
    thread = threading.Thread(target=lambda: answers.append(does()), daemon=True)
    thread.start()
    return thread, answers


def state_of(agent: Agent, claim: values.ClaimRef) -> ledger.ClaimState | None:
    entry = agent.record.get(claim.uid)
    return None if entry is None else entry.state


def spec_of(agent: Agent, claim: values.ClaimRef) -> Any:
    return json.loads((agent.directory.path / agent.dialect.claim_file(claim.uid)).read_bytes())


def test_an_instance_is_made_and_the_container_gets_its_nodes(agent: Agent) -> None:
    name = part_name(0, THREE, 4)
    claim = agent.api.allocate(ref(1), name)
    began: list[tuple[ledger.ClaimState | None, dict[tuple[int, int], str]]] = []
    agent.hardware.before_commit = lambda gpu: began.append((state_of(agent, claim), agent.hardware.instances(gpu)))
    answer = agent.prepare(claim)
    assert [device.device for device in answer.devices] == [name]
    assert agent.hardware.instances(ADDRESSES[0]) == {(THREE, 4): "agent"}
    assert (began, agent.hardware.calls) == ([(None, {})], [("create", ADDRESSES[0])])
    entry = agent.record.get(claim.uid)
    assert entry is not None
    assert [(part.profile_id, part.start) for part in entry.partitions] == [(THREE, 4)]
    seen = agent.hardware.seen(ADDRESSES[0], entry.partitions[0])
    assert seen is not None
    assert (entry.devices[0].uuid, entry.devices[0].caps) == (seen.uuid, seen.nodes)
    spec = spec_of(agent, claim)
    assert cdi_rules.violations(json.dumps(spec).encode()) == []
    edits = spec["devices"][0]["containerEdits"]
    assert [node["path"] for node in edits["deviceNodes"]] == ["/dev/nvidia0", *(cap.path for cap in seen.nodes)]
    assert edits["env"][0].endswith(f"={seen.uuid}")
    assert agent.unprepare(claim) == values.Unprepared()
    assert agent.hardware.instances(ADDRESSES[0]) == {}
    assert agent.hardware.calls[1:] == [("destroy", ADDRESSES[0])]
    assert (agent.record.rows(), agent.claim_files()) == ((), set())


def test_the_row_stands_before_the_first_instance_and_says_where_it_will_be(agent: Agent) -> None:
    claim = agent.api.allocate(ref(1), part_name(0, ONE, 3))
    agent.hardware.failing["create"] = WorkError("broken", kind=work.Kind.TIMEOUT, retryable=False)
    agent.prepare(claim)
    entry = agent.record.get(claim.uid)
    assert entry is not None
    assert (entry.state, entry.devices[0].uuid) == (ledger.ClaimState.STARTED, "")
    assert entry.partitions == (agent.index.devices[part_name(0, ONE, 3)].partition,)  # type: ignore[union-attr]


@pytest.mark.parametrize("order", [(ONE, FOUR), (FOUR, ONE)])
def test_two_claims_on_one_gpu_at_the_same_time(agent: Agent, order: tuple[int, int]) -> None:
    starts = {ONE: 6, FOUR: 0}
    claims = [
        agent.api.allocate(ref(number), part_name(0, profile, starts[profile])) for number, profile in enumerate(order)
    ]
    started = [in_thread(functools.partial(agent.prepare, claim)) for claim in claims]
    for thread, _ in started:
        thread.join(30)
    assert all(isinstance(answer[0], values.Prepared) for _, answer in started)
    assert set(agent.hardware.instances(ADDRESSES[0])) == {(ONE, 6), (FOUR, 0)}
    agent.unprepare(*claims)
    assert agent.hardware.instances(ADDRESSES[0]) == {}


def test_seven_claims_in_one_call_fill_a_gpu_and_the_eighth_is_told_who_is_there(agent: Agent) -> None:
    claims = [agent.api.allocate(ref(number), part_name(0, ONE, number)) for number in range(7)]
    answers = agent.prepare(*claims)
    assert all(isinstance(answer, values.Prepared) for answer in answers.values())
    answer = agent.prepare(agent.api.allocate(ref(8), part_name(0, TWO, 4)))
    assert isinstance(answer, values.Failed)
    assert (
        f"{part_name(0, TWO, 4)} overlaps device {part_name(0, ONE, 4)}, which is held by {claims[4]}" in answer.message
    )


def test_a_gpu_and_its_parts_keep_each_other_out(agent: Agent) -> None:
    part, whole = agent.api.allocate(ref(1), part_name(0, TWO, 2)), agent.api.allocate(ref(2), NAMES[0])
    agent.prepare(part)
    answer = agent.prepare(whole)
    assert f"device {NAMES[0]} overlaps device {part_name(0, TWO, 2)}, which is held by {part}" in answer.message
    assert ("whole", ADDRESSES[0]) not in agent.hardware.calls
    agent.unprepare(part)
    assert agent.hardware.divided(ADDRESSES[0]), "the mode stays as it is until it is in the way"
    assert isinstance(agent.prepare(whole), values.Prepared)
    assert not agent.hardware.divided(ADDRESSES[0])
    assert agent.hardware.calls.count(("whole", ADDRESSES[0])) == 1
    answer = agent.prepare(part)
    assert f"overlaps device {NAMES[0]}, which is held by {whole}" in answer.message


def test_a_claim_that_overlaps_itself_is_refused_at_once(tmp_path: Path) -> None:
    agent = divided(tmp_path, wait_s=3600)
    answer = agent.prepare(agent.api.allocate(ref(1), part_name(0, FOUR, 0), part_name(0, TWO, 2)), seconds=7200)
    assert "overlap" in answer.message
    assert (agent.hardware.calls, agent.record.rows()) == ([], ())
    agent.stop()


def test_gpus_that_are_given_out_whole_cost_nothing_more(tmp_path: Path) -> None:
    agent = Agent(tmp_path).start()
    claim = agent.api.allocate(ref(1), NAMES[0])
    agent.prepare(claim)
    agent.unprepare(claim)
    assert agent.hardware.calls == []
    agent.stop()


def test_several_profiles_and_gpus_in_one_claim_begin_together(agent: Agent) -> None:
    names = [part_name(0, ONE, 0), part_name(0, THREE, 4), part_name(1, FOUR, 0), NAMES[2]]
    claim = agent.api.allocate(ref(1), *names)
    commits: list[ledger.ClaimState | None] = []
    agent.hardware.before_commit = lambda _: commits.append(state_of(agent, claim))
    answer = agent.prepare(claim)
    assert [device.device for device in answer.devices] == names
    assert commits == [None, None]
    assert sorted(agent.hardware.calls) == [
        ("create", ADDRESSES[0]),
        ("create", ADDRESSES[1]),
        ("whole", ADDRESSES[2]),
    ]
    assert agent.prepare(claim) == answer
    agent.unprepare(claim)
    assert [agent.hardware.instances(place) for place in ADDRESSES[:3]] == [{}, {}, {}]


def test_where_one_gpu_cannot_begin_none_does(agent: Agent) -> None:
    agent.hardware.admin_makes(ADDRESSES[1], ONE, 0)
    claim = agent.api.allocate(ref(1), part_name(0, ONE, 0), part_name(1, FOUR, 0), part_name(2, TWO, 0))
    answer = agent.prepare(claim)
    assert f"GPU {ADDRESSES[1]}: GPU instance 7" in answer.message
    assert agent.record.rows() == ()
    assert [agent.hardware.instances(place) for place in ADDRESSES[:3]] == [{}, {(ONE, 0): "admin"}, {}]


@pytest.mark.parametrize("profile", [ONE, TWO])
def test_a_place_that_an_admin_has_taken_fails_at_once_with_its_name(tmp_path: Path, profile: int) -> None:
    agent = divided(tmp_path, wait_s=3600)
    agent.hardware.admin_makes(ADDRESSES[0], ONE, 0)
    answer = agent.prepare(agent.api.allocate(ref(1), part_name(0, profile, 0)), seconds=7200)
    assert "GPU instance 7" in answer.message
    agent.unprepare(ref(1))
    assert agent.hardware.instances(ADDRESSES[0]) == {(ONE, 0): "admin"}
    assert (agent.record.rows(), agent.claim_files()) == ((), set())
    agent.stop()


def test_an_ampere_is_never_switched(tmp_path: Path) -> None:
    agent = divided(tmp_path, wait_s=3600)
    agent.index.divide(toggle=False)
    answer = agent.prepare(agent.api.allocate(ref(1), part_name(0, ONE, 0)), seconds=7200)
    assert "MIG is off" in answer.message
    assert agent.record.rows() == (), "what was begun is undone"
    agent.stop()


def test_programs_that_use_the_gpu_are_waited_for(tmp_path: Path) -> None:
    agent = divided(tmp_path, wait_s=3600, pauses_s=(0.01,))
    claim = agent.api.allocate(ref(1), part_name(0, ONE, 0))
    agent.hardware.failing["create"] = WorkError("pid 77 uses it", kind=work.Kind.IN_USE, retryable=True)
    thread, answers = in_thread(lambda: agent.prepare(claim, seconds=7200))
    while len(agent.hardware.calls) < 3:
        thread.join(0.005)
    assert state_of(agent, claim) is ledger.ClaimState.STARTED
    del agent.hardware.failing["create"]
    thread.join(30)
    assert isinstance(answers[0], values.Prepared)
    agent.stop()


def test_what_fails_for_good_is_undone_so_that_nobody_elses_instance_is_taken_for_it(agent: Agent) -> None:
    claim = agent.api.allocate(ref(1), part_name(0, ONE, 0), part_name(1, ONE, 0))
    agent.hardware.failing["create"] = WorkError("no room", kind=work.Kind.INSUFFICIENT_RESOURCES, retryable=False)
    assert "no room" in agent.prepare(claim).message
    assert agent.record.rows() == ()
    agent.hardware.failing.clear()
    agent.hardware.admin_makes(ADDRESSES[0], ONE, 0)
    assert "GPU instance 7" in agent.prepare(claim).message
    agent.unprepare(claim)
    assert agent.hardware.instances(ADDRESSES[0]) == {(ONE, 0): "admin"}


def test_after_a_hang_the_next_call_goes_on_from_what_is_there(agent: Agent) -> None:
    claim = agent.api.allocate(ref(1), part_name(0, ONE, 0))
    agent.hardware.hung.add("create")
    assert "no answer" in agent.prepare(claim, seconds=1).message
    assert state_of(agent, claim) is ledger.ClaimState.STARTED
    assert "held by" in agent.prepare(agent.api.allocate(ref(2), NAMES[0])).message
    agent.hardware.hung.clear()
    agent.hardware.admin_makes(ADDRESSES[0], ONE, 0)  # what the call that hung has made after all
    assert isinstance(agent.prepare(claim), values.Prepared)
    agent.unprepare(claim)
    assert agent.hardware.instances(ADDRESSES[0]) == {}


def test_what_was_begun_for_another_allocation_is_removed_first(agent: Agent) -> None:
    claim = agent.api.allocate(ref(1), part_name(0, ONE, 0))
    agent.hardware.hung.add("create")
    agent.prepare(claim, seconds=1)
    agent.hardware.hung.clear()
    agent.hardware.admin_makes(ADDRESSES[0], ONE, 0)
    agent.api.allocate(claim, part_name(1, TWO, 2))
    assert isinstance(agent.prepare(claim), values.Prepared)
    assert [agent.hardware.instances(place) for place in ADDRESSES[:2]] == [{}, {(TWO, 2): "agent"}]
    assert agent.record.held_devices() == {part_name(1, TWO, 2)}


def test_a_hang_on_one_gpu_holds_up_no_other(tmp_path: Path) -> None:
    agent = divided(tmp_path, wait_s=3600)
    stuck = agent.api.allocate(ref(1), part_name(0, ONE, 0))
    gate = threading.Event()

    def held_up(gpu: PciAddress) -> None:
        if gpu == ADDRESSES[0]:
            gate.wait(60)

    agent.hardware.before_commit = held_up
    thread, answers = in_thread(lambda: agent.prepare(stuck, seconds=7200))
    while not agent.hardware.calls:
        thread.join(0.005)
    assert isinstance(agent.prepare(agent.api.allocate(ref(2), part_name(1, ONE, 0))), values.Prepared)
    assert isinstance(agent.prepare(agent.api.allocate(ref(3), NAMES[2])), values.Prepared)
    gate.set()
    thread.join(30)
    assert isinstance(answers[0], values.Prepared)
    agent.stop()


def test_a_repeat_is_the_same_answer_and_touches_nothing(agent: Agent, tmp_path: Path) -> None:
    claim = agent.api.allocate(ref(1), part_name(0, ONE, 0))
    answer = agent.prepare(claim)
    agent.api.down(is_down=True)
    assert agent.prepare(claim) == answer
    agent.stop()
    second = divided(tmp_path)
    assert second.prepare(claim) == answer
    assert second.hardware.calls == []
    second.stop()


def test_an_instance_that_vanished_is_made_again_without_the_api_server(agent: Agent) -> None:
    claim = agent.api.allocate(ref(1), part_name(0, ONE, 0), part_name(1, ONE, 3))
    answer = agent.prepare(claim)
    before = agent.record.get(claim.uid)
    agent.hardware.admin_removes(ADDRESSES[0])
    agent.api.down(is_down=True)
    assert agent.prepare(claim) == answer
    after = agent.record.get(claim.uid)
    assert before is not None
    assert after is not None
    assert agent.hardware.instances(ADDRESSES[0]) == {(ONE, 0): "agent"}
    assert before.devices[0].uuid != after.devices[0].uuid
    assert after.devices[0].uuid in json.dumps(spec_of(agent, claim))
    assert [(part.gpu, part.start) for part in after.partitions] == [(ADDRESSES[0], 0), (ADDRESSES[1], 3)]
    assert agent.prepare(claim) == answer
    agent.unprepare(claim)
    assert [agent.hardware.instances(place) for place in ADDRESSES[:2]] == [{}, {}]


def test_an_instance_that_vanished_is_refused_where_its_place_is_taken(agent: Agent) -> None:
    claim = agent.api.allocate(ref(1), part_name(0, ONE, 0))
    agent.prepare(claim)
    agent.hardware.admin_removes(ADDRESSES[0])
    agent.hardware.admin_makes(ADDRESSES[0], FOUR, 0)
    assert "profile 5" in agent.prepare(claim).message
    assert state_of(agent, claim) is ledger.ClaimState.COMPLETED
    agent.unprepare(claim)
    assert agent.hardware.instances(ADDRESSES[0]) == {(FOUR, 0): "admin"}


def test_after_a_reboot_nothing_is_removed_and_a_claim_is_prepared_again(tmp_path: Path) -> None:
    first = divided(tmp_path)
    claim, gone = first.api.allocate(ref(1), part_name(0, ONE, 0)), first.api.allocate(ref(2), part_name(1, ONE, 0))
    first.prepare(claim)
    first.prepare(gone)
    first.stop()
    first.hardware.reboot()
    first.hardware.admin_makes(ADDRESSES[1], ONE, 0)
    second = divided(tmp_path, boot_id="another boot")
    assert second.unprepare(gone) == values.Unprepared()
    assert second.hardware.calls == []
    assert second.hardware.instances(ADDRESSES[1]) == {(ONE, 0): "admin"}
    assert isinstance(second.prepare(claim), values.Prepared)
    assert second.hardware.instances(ADDRESSES[0]) == {(ONE, 0): "agent"}
    second.stop()


def test_after_a_reboot_what_was_begun_before_is_nobodys(tmp_path: Path) -> None:
    first = divided(tmp_path)
    claim = first.api.allocate(ref(1), part_name(0, ONE, 0))
    first.hardware.hung.add("create")
    first.prepare(claim, seconds=1)
    first.stop()
    first.hardware.reboot()
    first.hardware.admin_makes(ADDRESSES[0], ONE, 0)
    second = divided(tmp_path, boot_id="another boot")
    assert "GPU instance 7" in second.prepare(claim).message
    second.unprepare(claim)
    assert second.hardware.instances(ADDRESSES[0]) == {(ONE, 0): "admin"}
    assert second.record.rows() == ()
    second.stop()


def test_admin_access_sees_an_instance_that_is_there_and_makes_none(agent: Agent) -> None:
    watcher = ref(9)
    agent.api.put(watcher, preparing.claim(watcher, [preparing.result(part_name(0, ONE, 0), adminAccess=True)]))
    assert "admin access makes none" in agent.prepare(watcher).message
    user = agent.api.allocate(ref(1), part_name(0, ONE, 0))
    agent.prepare(user)
    assert isinstance(agent.prepare(watcher), values.Prepared)
    entries = [agent.record.get(claim.uid) for claim in (user, watcher)]
    assert entries[0] is not None
    assert entries[1] is not None
    assert (entries[1].devices, entries[1].partitions) == (entries[0].devices, ())
    agent.unprepare(watcher)
    assert agent.hardware.instances(ADDRESSES[0]) == {(ONE, 0): "agent"}


def test_an_instance_that_somebody_made_is_used_and_left_as_it_is(agent: Agent) -> None:
    agent.hardware.admin_makes(ADDRESSES[0], ONE, 0)
    name = part_name(0, ONE, 0)
    dynamic = agent.index.devices[name]
    assert isinstance(dynamic, plan.PartitionDevice)
    seen = agent.hardware.seen(ADDRESSES[0], dynamic.partition)
    static = plan.PartitionDevice(
        name=name, gpu=dynamic.gpu, partition=dynamic.partition, place=dynamic.place, instance=seen
    )
    agent.index.devices[name] = static
    claim = agent.api.allocate(ref(1), name)
    answer = agent.prepare(claim)
    assert isinstance(answer, values.Prepared)
    assert agent.prepare(claim) == answer
    agent.unprepare(claim)
    assert agent.hardware.calls == []
    assert agent.hardware.instances(ADDRESSES[0]) == {(ONE, 0): "admin"}


def test_an_unprepare_answers_while_the_hardware_hangs_and_it_is_put_back_later(tmp_path: Path) -> None:
    agent = divided(tmp_path, wait_s=3600)
    claim = agent.api.allocate(ref(1), part_name(0, FOUR, 0))
    agent.prepare(claim)
    agent.hardware.hung.add("destroy")
    assert agent.unprepare(claim, seconds=1) == values.Unprepared()
    assert state_of(agent, claim) is ledger.ClaimState.RELEASING
    assert agent.claim_files() == set()
    next_one = agent.api.allocate(ref(2), part_name(0, TWO, 2))
    agent.executor._wait_s = 0.1
    refused = agent.prepare(next_one)
    agent.executor._wait_s = 3600
    assert f"{part_name(0, FOUR, 0)}, which is still being put back after {claim}" in refused.message
    assert isinstance(agent.prepare(agent.api.allocate(ref(3), part_name(0, THREE, 4))), values.Prepared)
    threading.Thread(target=agent.releaser.run, args=(agent.executor.wake,), daemon=True).start()
    thread, answers = in_thread(lambda: agent.prepare(next_one, seconds=7200))
    thread.join(0.2)
    assert thread.is_alive()
    agent.hardware.hung.clear()
    thread.join(30)
    assert isinstance(answers[0], values.Prepared)
    assert set(agent.hardware.instances(ADDRESSES[0])) == {(TWO, 2), (THREE, 4)}
    assert state_of(agent, claim) is None
    agent.stop()


def test_what_is_left_to_put_back_is_found_by_the_next_agent(tmp_path: Path) -> None:
    first = divided(tmp_path)
    claims = [first.api.allocate(ref(number), part_name(number, ONE, 0)) for number in range(2)]
    for claim in claims:
        first.prepare(claim)
    first.hardware.failing["destroy"] = WorkError("in use", kind=work.Kind.IN_USE, retryable=True)
    assert first.unprepare(*claims) == {claim.uid: values.Unprepared() for claim in claims}
    first.stop()
    second = divided(tmp_path)
    woken = threading.Event()
    threading.Thread(target=second.releaser.run, args=(woken.set,), daemon=True).start()
    assert woken.wait(30)
    while second.record.releasing():
        threading.Event().wait(0.01)
    assert [second.hardware.instances(place) for place in ADDRESSES[:2]] == [{}, {}]
    assert second.record.rows() == ()
    second.stop()


def test_a_row_of_another_boot_that_was_to_be_put_back_is_forgotten(tmp_path: Path) -> None:
    first = divided(tmp_path)
    claim = first.api.allocate(ref(1), part_name(0, ONE, 0))
    first.prepare(claim)
    first.hardware.failing["destroy"] = WorkError("lost", kind=work.Kind.LOST, retryable=False)
    first.unprepare(claim)
    first.stop()
    second = divided(tmp_path, boot_id="another boot")
    threading.Thread(target=second.releaser.run, args=(lambda: None,), daemon=True).start()
    while second.record.rows():
        threading.Event().wait(0.01)
    assert second.hardware.calls == []
    second.stop()


def test_a_claim_that_comes_back_while_it_is_put_back_gets_an_instance_of_its_own(agent: Agent) -> None:
    claim = agent.api.allocate(ref(1), part_name(0, ONE, 0))
    answer = agent.prepare(claim)
    agent.hardware.failing["destroy"] = WorkError("in use", kind=work.Kind.IN_USE, retryable=True)
    agent.unprepare(claim)
    assert "in use" in agent.prepare(claim).message
    assert state_of(agent, claim) is ledger.ClaimState.RELEASING
    agent.hardware.failing.clear()
    agent.hardware.calls.clear()
    assert agent.prepare(claim) == answer
    assert agent.hardware.calls == [("destroy", ADDRESSES[0]), ("create", ADDRESSES[0])]
    assert agent.unprepare(claim) == values.Unprepared()
    assert agent.hardware.instances(ADDRESSES[0]) == {}


def test_a_claim_that_was_begun_and_is_gone_is_collected(tmp_path: Path) -> None:
    now = [0.0]
    agent = divided(tmp_path, clock=lambda: now[0])
    claim = agent.api.allocate(ref(1), part_name(0, ONE, 0))
    agent.hardware.hung.add("create")
    agent.prepare(claim, seconds=1)
    agent.hardware.hung.clear()
    agent.hardware.admin_makes(ADDRESSES[0], ONE, 0)
    agent.api.delete(claim)
    agent.collector.collect()
    now[0] += 61
    agent.collector.confirm()
    assert agent.reports.collected == [claim]
    assert agent.hardware.instances(ADDRESSES[0]) == {}
    assert agent.record.rows() == ()
    agent.stop()


def test_whose_an_instance_is_can_be_told_for_every_snapshot(agent: Agent) -> None:
    name = part_name(0, ONE, 0)
    claim = agent.api.allocate(ref(1), name, NAMES[1])
    assert agent.own.names(0.0) == frozenset()
    agent.prepare(claim)
    assert agent.own.names(1e12) == {name}
    agent.unprepare(claim)
    assert agent.own.names(0.0) == {name}
    assert not agent.own.names(1e12)


def test_a_lost_record_is_made_of_the_files_and_parts_stay_with_their_claims(tmp_path: Path) -> None:
    agent = divided(tmp_path)
    claim = agent.api.allocate(ref(1), part_name(0, TWO, 0))
    answer = agent.prepare(claim)
    agent.stop()
    agent.record.path.write_bytes(b"garbage" * 2000)
    second = divided(tmp_path)
    assert second.prepare(claim) == answer
    assert "held by" in second.prepare(second.api.allocate(ref(2), NAMES[0])).message
    second.unprepare(claim)
    assert second.hardware.instances(ADDRESSES[0]) == {}
    second.stop()
