# SPDX-License-Identifier: Apache-2.0
"""The prepare room with its real files and its real record, asked as kubelet asks. Aspects: answers, repeats, refusals,
waiting, side by side, unprepare, reboot, what cannot be written.
"""

from __future__ import annotations

import functools
import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from discovery import model
from driver import values
from driver.errors import ApiError, ApiReason
from driver.prepare import locks, plan, store
from tests.fakes import cdi_rules, preparing
from tests.fakes.preparing import NAMES, Agent, Rpc, ref


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[Agent]:
    made = Agent(tmp_path).start()
    yield made
    made.stop()


def in_thread(work: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    answers: list[Any] = []
    thread = threading.Thread(target=lambda: answers.append(work()), daemon=True)
    thread.start()
    return thread, answers


def waiting(agent: Agent, claim: values.ClaimRef) -> tuple[threading.Thread, list[Any]]:
    """Begin a Prepare and return once it waits: it has read its claim and did not end."""
    before = agent.api.reads
    thread, answers = in_thread(lambda: agent.prepare(claim))
    while agent.api.reads < before + 2 and thread.is_alive():
        thread.join(0.005)
    return thread, answers


def test_a_claim_is_answered_with_its_devices_and_everything_is_on_disk(agent: Agent) -> None:
    claim = agent.api.allocate(ref(1), *NAMES[:2])
    answer = agent.prepare(claim)
    assert answer == values.Prepared(
        devices=tuple(
            values.PreparedDevice(
                request_names=("gpu",),
                pool=preparing.POOL,
                device=name,
                cdi_device_ids=(f"gpu.nearfield.dev/claim={claim.uid}-{name}", "gpu.nearfield.dev/node=driver"),
            )
            for name in NAMES[:2]
        )
    )
    for path in agent.directory.path.iterdir():
        assert cdi_rules.violations(path.read_bytes()) == []
    assert agent.claim_files() == {agent.dialect.claim_file(claim.uid)}
    assert agent.prepared_uids() == {claim.uid}
    assert agent.reports.done == [("prepare", "done")]


def test_several_drivers_subrequests_shares_and_admin_access_in_one_claim(agent: Agent) -> None:
    share = "6b4d7f0a-5b2e-4d51-9c9f-0d3f3f6e8f11"
    agent.index.share()
    results = [
        preparing.result("nic-3", request="nic", driver="dra.net"),
        preparing.result(NAMES[0], request="fast/eight"),
        preparing.share(NAMES[1], share, request="part"),
        preparing.result(NAMES[0], request="look", adminAccess=True),
    ]
    devices = agent.prepare(agent.api.allocate_shares(ref(1), *results)).devices
    assert [(d.request_names, d.device, d.share_id) for d in devices] == [
        (("fast",), NAMES[0], None),
        (("part",), NAMES[1], share),
        (("look",), NAMES[0], None),
    ]
    assert devices[0].cdi_device_ids[0] != devices[1].cdi_device_ids[0]
    stored = agent.record.get(ref(1).uid)
    assert stored is not None
    assert stored.results[1].consumed_capacity == {"memory": "20Gi", "compute": "25", "shares": "1"}


def test_a_repeat_is_the_same_answer_without_the_api_server(agent: Agent, tmp_path: Path) -> None:
    claim = agent.api.allocate(ref(1), NAMES[0])
    answer = agent.prepare(claim)
    agent.api.down(is_down=True)
    reads = agent.api.reads
    assert agent.prepare(claim) == answer
    agent.stop()
    second = Agent(tmp_path).start()
    assert second.prepare(claim) == answer
    assert (agent.api.reads, second.api.reads) == (reads, 0)
    assert second.reports.done == [("prepare", "repeated")]
    second.stop()


def test_a_repeat_mends_its_cdi_file(agent: Agent) -> None:
    claim = agent.api.allocate(ref(1), NAMES[0])
    answer = agent.prepare(claim)
    path = agent.directory.path / agent.dialect.claim_file(claim.uid)
    content = path.read_bytes()
    for spoil in (path.unlink, lambda: path.write_text("{}")):
        spoil()
        assert agent.prepare(claim) == answer
        assert path.read_bytes() == content


def test_a_held_device_is_refused_and_the_holder_named(tmp_path: Path) -> None:
    agent = Agent(tmp_path, wait_s=0.1).start()
    first, second = agent.api.allocate(ref(1), NAMES[0]), agent.api.allocate(ref(2), NAMES[1], NAMES[0])
    agent.prepare(first)
    answer = agent.prepare(second)
    assert isinstance(answer, values.Failed)
    assert f"device {NAMES[0]} is held by {first}" in answer.message
    assert agent.reports.failed == [(second, answer.message)]
    assert agent.prepared_uids() == {first.uid}
    assert agent.claim_files() == {agent.dialect.claim_file(first.uid)}
    assert agent.record.held_devices() == {NAMES[0]}
    agent.stop()


def test_admin_access_is_given_beside_a_user_and_does_not_keep_the_next_one_out(agent: Agent) -> None:
    user, watcher = agent.api.allocate(ref(1), NAMES[0]), ref(2)
    agent.api.put(watcher, preparing.claim(watcher, [preparing.result(NAMES[0], adminAccess=True)]))
    assert isinstance(agent.prepare(user), values.Prepared)
    assert isinstance(agent.prepare(watcher), values.Prepared)
    agent.unprepare(user)
    assert isinstance(agent.prepare(agent.api.allocate(ref(3), NAMES[0])), values.Prepared)


@pytest.mark.parametrize(
    ("spoil", "expected"),
    [
        (lambda agent: agent.api.delete(ref(1)), "does not exist (any more)"),
        (
            lambda agent: agent.api.put(ref(1), preparing.claim(ref(2), [preparing.result(NAMES[0])])),
            "deleted and made again with UID",
        ),
        (lambda agent: agent.api.put(ref(1), {"metadata": {"uid": ref(1).uid}}), "is not allocated"),
        (lambda agent: agent.api.put(ref(1), ["x"]), "cannot be read"),
        (
            lambda agent: agent.api.put(ref(1), preparing.claim(ref(1), [preparing.result("gpu-9")])),
            "no GPU of this name is on this node",
        ),
        (
            lambda agent: agent.index.devices.update(
                {NAMES[0]: preparing.gpu(0, state=model.GpuState.LOST, reason="fell off the bus")}
            ),
            "fell off the bus",
        ),
    ],
)
def test_what_cannot_pass_fails_at_once_and_leaves_nothing(tmp_path: Path, spoil: Any, expected: str) -> None:
    agent = Agent(tmp_path, wait_s=3600).start()
    claim = agent.api.allocate(ref(1), NAMES[0])
    spoil(agent)
    answer = agent.prepare(claim, seconds=7200)
    assert isinstance(answer, values.Failed)
    assert expected in answer.message
    assert agent.prepared_uids() == set()
    assert agent.claim_files() == set()
    agent.stop()


def test_one_bad_claim_does_not_stop_the_good_one_beside_it(agent: Agent) -> None:
    good, bad = agent.api.allocate(ref(1), NAMES[0]), ref(2)
    answers = agent.executor.prepare([bad, good, good, bad], Rpc())
    assert answers.keys() == {good.uid, bad.uid}
    assert isinstance(answers[good.uid], values.Prepared)
    assert isinstance(answers[bad.uid], values.Failed)
    assert agent.executor.prepare([], Rpc()) == {}


@pytest.mark.parametrize("uid", ["", "../../../etc/passwd", "a/b", "x" * 500])
def test_a_uid_that_is_none_never_becomes_a_path(agent: Agent, uid: str) -> None:
    odd = values.ClaimRef(uid=values.ClaimUid(uid), namespace="n", name="c")
    agent.api.put(odd, preparing.claim(odd, [preparing.result(NAMES[0])]))
    assert isinstance(agent.prepare(odd), values.Failed)
    assert agent.unprepare(odd) == values.Unprepared()
    assert agent.claim_files() == set()


def test_a_claim_waits_for_a_device_that_is_still_being_released_and_has_it_at_once_then(tmp_path: Path) -> None:
    agent = Agent(tmp_path, wait_s=3600, pauses_s=(0.01, 3600)).start()
    first, second = agent.api.allocate(ref(1), NAMES[0]), agent.api.allocate(ref(2), NAMES[0])
    agent.prepare(first)
    call = Rpc(7200)
    thread, answers = in_thread(lambda: agent.executor.prepare([second], call)[second.uid])
    while agent.api.reads < 3:
        thread.join(0.005)
    thread.join(0.1)
    assert thread.is_alive()
    assert agent.unprepare(first) == values.Unprepared()
    thread.join(40)
    assert isinstance(answers[0], values.Prepared)
    agent.stop()


def test_a_claim_waits_for_the_api_server(tmp_path: Path) -> None:
    agent = Agent(tmp_path, wait_s=30).start()
    claim = agent.api.allocate(ref(1), NAMES[0])
    agent.api.down(is_down=True)
    thread, answers = waiting(agent, claim)
    assert thread.is_alive()
    agent.api.down(is_down=False)
    agent.executor.wake()
    thread.join(40)
    assert isinstance(answers[0], values.Prepared)
    agent.stop()


@pytest.mark.parametrize("repeat", [False, True])
def test_a_claim_waits_for_its_device_node_which_a_driver_makes_while_it_is_loaded(
    tmp_path: Path, repeat: bool
) -> None:
    agent = Agent(tmp_path, wait_s=3600).start()
    claim = agent.api.allocate(ref(1), NAMES[0])
    if repeat:
        agent.prepare(claim)
    node = tmp_path / "dev" / "nvidia0"
    node.unlink()
    thread, answers = in_thread(lambda: agent.prepare(claim, seconds=7200))
    thread.join(0.2)
    assert thread.is_alive()
    node.touch()
    agent.executor.wake()
    thread.join(40)
    assert isinstance(answers[0], values.Prepared)
    agent.stop()


def test_a_device_node_that_stays_away_is_named(tmp_path: Path) -> None:
    agent = Agent(tmp_path, wait_s=0.1).start()
    (tmp_path / "dev" / "nvidia0").unlink()
    answer = agent.prepare(agent.api.allocate(ref(1), NAMES[0]))
    assert isinstance(answer, values.Failed)
    assert "/dev/nvidia0 is missing on this node" in answer.message
    assert agent.prepared_uids() == set()
    assert agent.claim_files() == set()
    agent.stop()


@pytest.mark.parametrize(
    "before",
    [
        plan.NotThere(reason="not read yet", retryable=True),
        preparing.gpu(0, state=model.GpuState.NO_DRIVER, reason="its driver is being loaded"),
    ],
)
def test_a_claim_waits_for_the_reading_of_its_gpu_and_asks_for_it(
    tmp_path: Path, before: plan.GpuDevice | plan.NotThere
) -> None:
    agent = Agent(tmp_path, wait_s=30).start()
    claim = agent.api.allocate(ref(1), NAMES[0])
    agent.index.devices[NAMES[0]] = before
    thread, answers = waiting(agent, claim)
    assert thread.is_alive()
    assert agent.index.looks
    agent.index.devices[NAMES[0]] = preparing.gpu(0)
    agent.executor.wake()
    thread.join(40)
    assert isinstance(answers[0], values.Prepared)
    agent.stop()


def test_waiting_ends_before_the_deadline_with_the_reason(tmp_path: Path) -> None:
    agent = Agent(tmp_path, wait_s=3600, reserve_s=100).start()
    claim = agent.api.allocate(ref(1), NAMES[0])
    agent.api.down(is_down=True)
    answer = agent.prepare(claim, seconds=100.3)
    assert isinstance(answer, values.Failed)
    assert "the API server is not reached (waited" in answer.message
    agent.stop()


@pytest.mark.parametrize("how", ["cancelled", "stopped"])
def test_nobody_waits_for_a_call_that_is_over_or_in_an_agent_that_stops(tmp_path: Path, how: str) -> None:
    agent = Agent(tmp_path, wait_s=3600).start()
    claim = agent.api.allocate(ref(1), NAMES[0])
    agent.api.down(is_down=True)
    call = Rpc(7200)
    thread, answers = in_thread(lambda: agent.executor.prepare([claim], call))
    while not agent.api.reads:
        thread.join(0.005)
    if how == "cancelled":
        call.cancelled = True
    else:
        agent.stop_event.set()
    agent.executor.wake()
    thread.join(40)
    assert isinstance(answers[0][claim.uid], values.Failed)
    agent.stop()


def test_a_prepare_whose_call_is_over_when_its_turn_comes_does_nothing(agent: Agent) -> None:
    claim = agent.api.allocate(ref(1), NAMES[0])
    call = Rpc(30)
    with agent.locks.claim(claim.uid, patience=locks.Deadline(1)):
        thread, answers = in_thread(lambda: agent.executor.prepare([claim], call))
        thread.join(0.05)
        call.cancelled = True
    thread.join(40)
    assert isinstance(answers[0][claim.uid], values.Failed)
    assert agent.api.reads == 0
    assert agent.prepared_uids() == set()


def test_an_unprepare_waits_for_the_prepare_of_its_claim(tmp_path: Path) -> None:
    agent = Agent(tmp_path, wait_s=30).start()
    claim = agent.api.allocate(ref(1), NAMES[0])
    agent.api.down(is_down=True)
    preparing_thread, prepared = waiting(agent, claim)
    unpreparing_thread, unprepared = in_thread(lambda: agent.unprepare(claim))
    unpreparing_thread.join(0.1)
    assert unprepared == []
    agent.api.down(is_down=False)
    agent.executor.wake()
    preparing_thread.join(40)
    unpreparing_thread.join(40)
    assert isinstance(prepared[0], values.Prepared)
    assert unprepared == [values.Unprepared()]
    assert agent.prepared_uids() == set()
    assert agent.claim_files() == set()
    agent.stop()


def test_an_unprepare_that_cannot_get_its_turn_says_so(tmp_path: Path) -> None:
    agent = Agent(tmp_path).start()
    claim = agent.api.allocate(ref(1), NAMES[0])
    with agent.locks.claim(claim.uid, patience=locks.Deadline(1)):
        answer = agent.unprepare(claim, seconds=0.05)
    assert isinstance(answer, values.Failed)
    assert "still at work" in answer.message
    agent.stop()


def test_claims_on_other_devices_pass_by_one_that_waits(tmp_path: Path) -> None:
    agent = Agent(tmp_path, wait_s=30).start()
    agent.prepare(agent.api.allocate(ref(1), NAMES[0]))
    thread, _ = waiting(agent, agent.api.allocate(ref(2), NAMES[0], NAMES[1]))
    assert isinstance(agent.prepare(agent.api.allocate(ref(3), NAMES[1])), values.Prepared)
    assert thread.is_alive()
    agent.stop()


def test_eight_claims_at_once_in_one_call_and_in_eight(agent: Agent) -> None:
    claims = [agent.api.allocate(ref(number), name) for number, name in enumerate(NAMES)]
    answers = agent.prepare(*claims)
    assert all(isinstance(answer, values.Prepared) for answer in answers.values())
    assert agent.unprepare(*claims) == {claim.uid: values.Unprepared() for claim in claims}
    started = [in_thread(functools.partial(agent.prepare, claim)) for claim in claims]
    for thread, _ in started:
        thread.join(40)
    assert all(isinstance(answer[0], values.Prepared) for _, answer in started)
    assert agent.prepared_uids() == {claim.uid for claim in claims}


def test_many_claims_for_one_device_at_once_give_it_to_one(tmp_path: Path) -> None:
    agent = Agent(tmp_path, wait_s=0.2).start()
    claims = [agent.api.allocate(ref(number), NAMES[0]) for number in range(12)]
    answers = agent.prepare(*claims)
    prepared = [uid for uid, answer in answers.items() if isinstance(answer, values.Prepared)]
    assert len(prepared) == 1
    assert agent.prepared_uids() == set(prepared)
    assert agent.claim_files() == {agent.dialect.claim_file(prepared[0])}
    agent.stop()


def test_unprepare_frees_everything_twice_and_without_the_api_server(agent: Agent) -> None:
    claim = agent.api.allocate(ref(1), NAMES[0])
    agent.prepare(claim)
    agent.api.down(is_down=True)
    agent.index.devices.clear()
    for _ in range(2):
        assert agent.unprepare(claim) == values.Unprepared()
    assert agent.prepared_uids() == set()
    assert agent.claim_files() == set()
    assert agent.record.held_devices() == frozenset()
    assert agent.unprepare(ref(99), ref(98), ref(99)) == {
        ref(99).uid: values.Unprepared(),
        ref(98).uid: values.Unprepared(),
    }


def test_after_a_reboot_a_claim_is_prepared_again(tmp_path: Path) -> None:
    first = Agent(tmp_path).start()
    claim = first.api.allocate(ref(1), NAMES[0])
    answer = first.prepare(claim)
    first.stop()
    for path in first.directory.path.iterdir():
        path.unlink()
    first.directory.path.rmdir()
    second = Agent(tmp_path, boot_id="another boot").start()
    second.index.devices[NAMES[0]] = plan.GpuDevice(
        name=NAMES[0], address=preparing.ADDRESSES[0], state=model.GpuState.READY, uuid="GPU-0", minor=5
    )
    assert second.prepare(claim) == answer
    assert second.api.reads == 1
    spec = json.loads((second.directory.path / second.dialect.claim_file(claim.uid)).read_bytes())
    assert spec["devices"][0]["containerEdits"]["deviceNodes"][0]["path"] == "/dev/nvidia5"
    stored = second.record.get(claim.uid)
    assert stored is not None
    assert stored.boot_id == "another boot"
    second.stop()


def test_after_a_reboot_the_devices_of_claims_that_do_not_come_back_are_free(tmp_path: Path) -> None:
    first = Agent(tmp_path).start()
    old, new = first.api.allocate(ref(1), NAMES[0], NAMES[1]), first.api.allocate(ref(2), NAMES[0])
    first.prepare(old)
    first.stop()
    second = Agent(tmp_path, boot_id="another boot", wait_s=0.1).start()
    assert isinstance(second.prepare(new), values.Prepared)
    answer = second.prepare(old)
    assert isinstance(answer, values.Failed)
    assert str(new) in answer.message
    assert second.unprepare(old) == values.Unprepared()
    assert second.record.held_devices() == {NAMES[0]}
    second.stop()


def test_a_cdi_file_that_cannot_be_written_leaves_nothing_recorded(agent: Agent) -> None:
    claim = agent.api.allocate(ref(1), NAMES[0])
    path = agent.directory.path / agent.dialect.claim_file(claim.uid)
    path.mkdir()
    answer = agent.prepare(claim)
    assert isinstance(answer, values.Failed)
    assert f"its CDI file in {agent.directory.path} cannot be written" in answer.message
    assert agent.prepared_uids() == set()
    path.rmdir()
    assert isinstance(agent.prepare(claim), values.Prepared)


def test_a_record_that_cannot_be_used_refuses_with_the_reason_and_is_used_once_it_can(tmp_path: Path) -> None:
    state = tmp_path / "state"
    state.mkdir(mode=0o700)
    (state / store.FILE_NAME).mkdir()
    agent = Agent(tmp_path, wait_s=0.1).start()
    claim = agent.api.allocate(ref(1), NAMES[0])
    for answer in (agent.prepare(claim), agent.unprepare(claim)):
        assert isinstance(answer, values.Failed)
        assert str(state / store.FILE_NAME) in answer.message
    assert agent.claim_files() == set()
    (state / store.FILE_NAME).rmdir()
    assert isinstance(agent.prepare(claim), values.Prepared)
    agent.stop()


def test_a_record_that_is_destroyed_under_prepared_claims_costs_nobody_a_device(tmp_path: Path) -> None:
    agent = Agent(tmp_path, wait_s=5).start()
    first, second = agent.api.allocate(ref(1), NAMES[0]), agent.api.allocate(ref(2), NAMES[0])
    answer = agent.prepare(first)
    agent.stop()
    agent.record.path.write_bytes(b"not a database at all" * 400)
    restarted = Agent(tmp_path, wait_s=0.1).start()
    assert [claims for _, claims in restarted.reports.rebuilt] == [1]
    assert isinstance(restarted.prepare(second), values.Failed)
    assert restarted.prepare(first) == answer
    assert restarted.unprepare(first) == values.Unprepared()
    assert isinstance(restarted.prepare(second), values.Prepared)
    restarted.stop()


def test_a_state_folder_that_was_taken_away_is_said_and_the_agent_lives(agent: Agent, tmp_path: Path) -> None:
    claim = agent.api.allocate(ref(1), NAMES[0])
    (tmp_path / "state").rename(tmp_path / "taken")
    answer = agent.prepare(claim)
    assert isinstance(answer, values.Failed)
    assert str(tmp_path / "state") in answer.message
    (tmp_path / "taken").rename(tmp_path / "state")
    assert isinstance(agent.prepare(claim), values.Prepared)


class BrokenReader:
    """An API client that breaks its promise."""

    def get_claim(self, namespace: str, name: str, *, timeout_s: float) -> Any:
        raise ZeroDivisionError(f"{namespace}/{name}")


def test_an_error_of_our_own_is_one_claims_error(agent: Agent) -> None:
    agent.attempts._reader = BrokenReader()
    answer = agent.prepare(ref(1))
    assert isinstance(answer, values.Failed)
    assert "internal error (ZeroDivisionError)" in answer.message


class ForbiddingReader:
    """An API server whose RBAC forgot us, or that does not know us any more (401)."""

    def __init__(self, status: int) -> None:
        self.status = status

    def get_claim(self, namespace: str, name: str, *, timeout_s: float) -> Any:
        raise ApiError("it says no", reason=ApiReason.FORBIDDEN, status=self.status)


def test_missing_rights_are_said_with_the_right_that_is_missing(agent: Agent) -> None:
    agent.attempts._reader = ForbiddingReader(403)
    answer = agent.prepare(ref(1))
    assert isinstance(answer, values.Failed)
    assert "needs `get` on resourceclaims" in answer.message


def test_refused_credentials_are_not_called_missing_rights(agent: Agent) -> None:
    agent.attempts._reader = ForbiddingReader(401)
    answer = agent.prepare(ref(1))
    assert isinstance(answer, values.Failed)
    assert "cannot be read: it says no" in answer.message


def test_the_time_of_an_answer_is_measured_with_its_result(agent: Agent) -> None:
    began = time.monotonic()
    claim = agent.api.allocate(ref(1), NAMES[0])
    for _ in range(2):
        agent.prepare(claim)
    agent.unprepare(claim)
    agent.unprepare(claim)
    agent.prepare(ref(2))
    assert agent.reports.done == [
        ("prepare", "done"),
        ("prepare", "repeated"),
        ("unprepare", "done"),
        ("unprepare", "repeated"),
        ("prepare", "failed"),
    ]
    assert time.monotonic() >= began
