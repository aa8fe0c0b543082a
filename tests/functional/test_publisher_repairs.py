# SPDX-License-Identifier: Apache-2.0
"""The publisher against an API server over real HTTP: first publication, repairs, reconnects, silence.

Aspects: the first slice and its owner; silence when nothing changed, after a restart too; edited, deleted, twice
deleted and wiped slices; own writes cause no others; 410, silent watches, server restarts, new tokens; lost answers and
conflicts; a fight; two slices; leadership.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator
from typing import Any

import pytest

from driver import errors
from driver.publish import aim, pacing, publisher, wanted
from driver.standin import apiserver, apiserver_faults
from tests.fakes import publishing
from tests.fakes.publishing import NODE, Running, until

GPUS = tuple(publishing.gpu(bus) for bus in (0x1B, 0x43, 0x52, 0x61))


@pytest.fixture
def server() -> Iterator[apiserver.ApiServer]:
    with apiserver.ApiServer() as serving:
        serving.seed("nodes", {"metadata": {"name": NODE}})
        yield serving


@pytest.fixture
def running(server: apiserver.ApiServer) -> Iterator[Running]:
    made = Running(server, publishing.offering(*GPUS))
    yield made
    made.close()


@pytest.fixture
def settled(running: Running) -> Running:
    running.start()
    running.settled()
    return running


def test_all_gpus_are_published_once_and_belong_to_the_node(settled: Running) -> None:
    (body,) = settled.slices()
    owner = settled.server.objects("nodes")[0]["metadata"]["uid"]
    assert [device["name"] for device in body["spec"]["devices"]] == [
        "gpu-0000-1b-00-0",
        "gpu-0000-43-00-0",
        "gpu-0000-52-00-0",
        "gpu-0000-61-00-0",
    ]
    assert body["spec"]["nodeName"] == NODE
    assert body["spec"]["pool"] == {"name": NODE, "generation": 1, "resourceSliceCount": 1}
    assert body["metadata"]["ownerReferences"] == [
        {"apiVersion": "v1", "kind": "Node", "name": NODE, "uid": owner, "controller": True}
    ]
    state = settled.publisher.state()
    assert (state.ok, state.reason, state.slices, state.generation) == (True, None, 1, 1)
    assert list(state.addresses) == [device["name"] for device in body["spec"]["devices"]]
    assert settled.told.writes == [("create", "success")]


def test_what_is_published_is_in_the_record_first(running: Running) -> None:
    stood: list[int] = []
    running.store.saving = lambda: stood.append(len(running.slices()))
    running.start()
    running.settled()
    assert stood == [0]
    running.change(*GPUS[:3])
    until(lambda: len(running.listed()) == 3)
    running.settled()
    assert list(running.store.published) == running.listed()


def test_a_node_without_gpus_has_one_empty_slice(running: Running) -> None:
    running.agent.now = publishing.offering()
    running.start()
    running.settled()
    assert running.spec()["pool"]["resourceSliceCount"] == 1
    assert "devices" not in running.spec()


def test_nothing_is_written_when_nothing_changed_and_after_a_restart(settled: Running) -> None:
    settled.looks()
    settled.server.seed("nodes", {"metadata": {"name": "other"}})
    settled.restart()
    settled.settled()
    settled.looks()
    assert settled.writes() == 1
    assert settled.server.count("create", "resourceslices", dry_run=True) == 0
    assert settled.store.saves == 1


def test_a_change_of_one_gpu_is_one_write_and_keeps_the_generation(settled: Running) -> None:
    settled.change(*GPUS[:3], publishing.gpu(0x61, product="NVIDIA H200"))
    until(lambda: settled.writes() == 2)
    settled.settled()
    assert settled.spec()["pool"]["generation"] == 1


def edit(body: dict[str, Any]) -> None:
    del body["spec"]["devices"][0]


def test_an_edited_slice_is_put_right(settled: Running) -> None:
    right = settled.spec()
    settled.server.edit("resourceslices", settled.only_name(), edit)
    until(lambda: settled.spec() == right)
    settled.looks()
    assert settled.writes() == 3


def test_a_deleted_slice_is_back_at_once(settled: Running) -> None:
    name = settled.only_name()
    settled.server.remove("resourceslices", name)
    until(settled.slices)
    assert settled.only_name() == name
    assert settled.spec()["pool"]["generation"] == 2


def test_a_slice_deleted_again_and_again_comes_back_every_time(settled: Running) -> None:
    for round_number in range(1, 8):
        settled.server.remove("resourceslices", settled.only_name())
        until(settled.slices)
        assert settled.spec()["pool"]["generation"] == 1 + round_number


def test_a_slice_deleted_before_the_answer_to_its_creation_came_is_back(settled: Running) -> None:
    late = settled.server.faults.inject(apiserver_faults.DelayAnswer(0.5), verb="create", times=1)
    settled.server.remove("resourceslices", settled.only_name())
    until(settled.slices)
    settled.server.remove("resourceslices", settled.only_name())
    until(lambda: settled.slices() and settled.publisher.state().ok)
    late.remove()
    assert settled.spec()["pool"]["generation"] == 3


def test_kubelet_wiping_in_the_background_while_it_starts_is_outlived(settled: Running) -> None:
    for _ in range(4):
        settled.kube.delete_slices(node_name=NODE, driver=None, timeout_s=30)
        until(settled.slices)
    settled.settled()
    assert len(settled.listed()) == 4


def test_a_stray_slice_of_our_driver_is_deleted(settled: Running) -> None:
    (body,) = settled.slices()
    body["metadata"] = {"name": "stray"}
    settled.server.seed("resourceslices", body)
    until(lambda: len(settled.slices()) == 1)
    assert settled.only_name() != "stray"


def test_slices_of_other_drivers_and_nodes_are_left_alone(settled: Running) -> None:
    (body,) = settled.slices()
    for name, change in (
        ("other-driver", {"driver": "nic.example.com", "devices": []}),
        ("other-node", {"nodeName": "n9"}),
    ):
        foreign = copy.deepcopy(body)
        foreign["metadata"] = {"name": name}
        foreign["spec"] |= change
        settled.server.seed("resourceslices", foreign)
    settled.looks()
    assert len(settled.slices()) == 3


def test_a_new_node_object_owns_the_slices_anew(settled: Running) -> None:
    settled.server.remove("nodes", NODE)
    settled.server.seed("nodes", {"metadata": {"name": NODE}})
    assert settled.server.collect_garbage() == 1
    until(settled.slices)
    settled.settled()
    assert settled.server.collect_garbage() == 0


def test_without_a_node_object_it_says_so_and_waits(running: Running) -> None:
    running.server.remove("nodes", NODE)
    running.start()
    until(lambda: "--node-name must be its name" in (running.publisher.state().reason or ""))
    assert running.slices() == []
    running.server.seed("nodes", {"metadata": {"name": NODE}})
    running.settled()


def test_a_compacted_history_is_outlived(settled: Running) -> None:
    settled.server.compact("resourceslices")
    settled.server.remove("resourceslices", settled.only_name())
    until(settled.slices)


def test_a_watch_that_falls_silent_is_noticed(running: Running) -> None:
    running.publisher = running.make(timing=pacing.Timing(silence_s=0.5))
    running.start()
    running.settled()
    running.server.faults.silent_watches = True
    running.server.remove("resourceslices", running.only_name())
    until(running.slices)


def test_connections_that_break_are_made_again(settled: Running) -> None:
    settled.server.cut()
    settled.server.remove("resourceslices", settled.only_name())
    until(settled.slices)


def test_a_server_that_was_away_finds_everything_right_again(settled: Running) -> None:
    settled.server.stop()
    settled.server.remove("resourceslices", settled.only_name())
    settled.change(*GPUS[:2])
    until(lambda: "refused" in (settled.publisher.state().reason or ""))
    assert not settled.publisher.state().ok
    settled.server.start()
    until(lambda: settled.listed() == ["gpu-0000-1b-00-0", "gpu-0000-43-00-0"])
    settled.settled()


def test_a_server_that_restarts_costs_no_write(settled: Running) -> None:
    lists = settled.server.count("list", "resourceslices")
    settled.server.stop()
    settled.server.start()
    until(lambda: settled.server.count("list", "resourceslices") > lists)
    settled.looks()
    assert settled.writes() == 1


def test_before_the_server_can_be_reached_it_says_so(running: Running) -> None:
    running.server.stop()
    running.start()
    until(lambda: "refused" in (running.publisher.state().reason or ""))
    assert not running.publisher.state().ok
    running.server.start()
    running.settled()


@pytest.mark.parametrize("verb", ["create", "update", "delete"])
def test_a_write_whose_answer_is_lost_is_not_made_twice(settled: Running, verb: str) -> None:
    settled.server.faults.inject(apiserver_faults.LoseAnswer(), verb=verb, resource="resourceslices", times=1)
    before = settled.writes()
    if verb == "create":
        settled.server.remove("resourceslices", settled.only_name())
        before += 1
    elif verb == "update":
        settled.change(*GPUS[:2])
    else:
        settled.agent.now = wanted.Withheld(reason="because")
        settled.publisher.notify()
    until(lambda: settled.publisher.state().ok and settled.writes() == before + 1)
    settled.looks()
    assert settled.writes() == before + 1


def test_a_conflict_is_resolved_by_looking_again(settled: Running) -> None:
    settled.server.faults.inject(apiserver_faults.Refuse(409, "Conflict"), verb="update", times=2)
    settled.change(*GPUS[:2])
    until(lambda: len(settled.listed()) == 2)
    settled.settled()


def test_a_name_that_somebody_else_has_taken_is_given_up(running: Running) -> None:
    running.start()
    running.settled()
    name = running.only_name()
    running.publisher.stop(timeout_s=30)
    running.server.edit("resourceslices", name, lambda body: body["spec"].update(nodeName="n9"))
    running.restart()
    running.settled()
    assert len(running.slices()) == 2
    assert len({body["spec"]["nodeName"] for body in running.slices()}) == 2


@pytest.mark.parametrize(
    ("code", "kind"), [(403, "Forbidden"), (422, "Invalid"), (429, "TooManyRequests"), (500, "InternalError")]
)
def test_a_refused_write_is_said_and_tried_again(running: Running, code: int, kind: str) -> None:
    refusal = running.server.faults.inject(apiserver_faults.Refuse(code, kind, "no, because"), verb="create")
    running.start()
    until(lambda: "no, because" in (running.publisher.state().reason or ""))
    assert not running.publisher.state().ok
    assert running.told.writes[0] == ("create", "error")
    refusal.remove()
    running.settled()


def test_a_refusal_that_lasts_is_not_asked_for_at_full_speed(running: Running) -> None:
    running.server.faults.inject(apiserver_faults.Refuse(403, "Forbidden"), verb="create")
    running.start()
    until(lambda: running.told.writes)
    for index in range(12):
        # Other drivers' slices come and go meanwhile, and wake the publisher each time.
        looked = running.agent.asked
        spec = {"driver": "nic.example.com", "nodeName": NODE}
        running.server.seed("resourceslices", {"metadata": {"name": f"nic-{index}"}, "spec": spec})
        until(functools.partial(running.asked, looked + 1))
    assert len(running.told.writes) < 10


def test_a_hostile_editor_is_answered_for_ever_but_not_at_full_speed(settled: Running) -> None:
    moment = [0.0]
    settled.restart(timing=pacing.Timing(writes_at_once=5, write_every_s=0.25), clock=lambda: moment[0])
    settled.settled()
    right = settled.spec()
    for _ in range(5):
        settled.server.edit("resourceslices", settled.only_name(), edit)
        until(lambda: settled.spec() == right)
    for _ in range(4):
        until(lambda: settled.publisher.state().ok)
        settled.server.edit("resourceslices", settled.only_name(), edit)
        until(lambda: "again and again" in (settled.publisher.state().reason or ""))
        assert not settled.publisher.state().ok
        assert settled.spec() != right
        moment[0] += 0.25
        until(lambda: settled.spec() == right)
    settled.settled()


def test_news_of_our_own_does_not_wait_for_a_hostile_editor_to_rest(settled: Running) -> None:
    settled.restart(timing=pacing.Timing(writes_at_once=2, write_every_s=3600))
    settled.settled()
    right = settled.spec()
    for _ in range(2):
        settled.server.edit("resourceslices", settled.only_name(), edit)
        until(lambda: settled.spec() == right)
    settled.server.edit("resourceslices", settled.only_name(), edit)
    until(lambda: "again and again" in (settled.publisher.state().reason or ""))
    settled.change(publishing.gpu(0x77))
    until(lambda: settled.listed() == ["gpu-0000-77-00-0"])


def generations(running: Running) -> list[int]:
    return [body["spec"]["pool"]["generation"] for body in running.slices()]


def test_a_change_of_two_slices_raises_the_generation_of_all(running: Running) -> None:
    many = [
        publishing.gpu(bus % 256, pci={"address": publishing.at(bus % 256, domain=bus // 256)}) for bus in range(130)
    ]
    running.agent.now = publishing.offering(*many)
    running.start()
    running.settled()
    assert [len(body["spec"]["devices"]) for body in running.slices()] == [64, 64, 2]
    running.change(*many[1:129])
    until(lambda: {body["spec"]["pool"]["generation"] for body in running.slices()} == {2})
    assert [len(body["spec"]["devices"]) for body in running.slices()] == [64, 64]
    for body in running.slices():
        running.server.remove("resourceslices", body["metadata"]["name"])
    until(lambda: len(running.slices()) == 2 and min(generations(running)) == max(generations(running)) > 2)
    assert {body["spec"]["pool"]["resourceSliceCount"] for body in running.slices()} == {2}


def test_an_instance_that_does_not_lead_writes_nothing_and_is_ready_when_all_is_there(settled: Running) -> None:
    settled.agent.leads = False
    settled.restart(timing=pacing.Timing(unled_look_s=0.05))
    settled.change(*GPUS[:2])
    until(lambda: settled.publisher.state().reason == "Another instance of the agent publishes for this node")
    assert settled.publisher.state().ok
    settled.server.remove("resourceslices", settled.only_name())
    until(lambda: not settled.publisher.state().ok)
    assert settled.slices() == []
    settled.agent.leads = True
    until(settled.slices)
    assert len(settled.listed()) == 2


def test_leadership_is_asked_for_before_each_write(running: Running) -> None:
    many = [
        publishing.gpu(bus % 256, pci={"address": publishing.at(bus % 256, domain=bus // 256)}) for bus in range(130)
    ]
    running.agent.now = publishing.offering(*many)
    answers = iter([True, True, True])
    running.agent.may_write = lambda: next(answers, False)  # type: ignore[method-assign]
    running.publisher = running.make()
    running.start()
    until(lambda: len(running.told.writes) == 2)
    running.looks()
    assert len(running.slices()) == 2


def test_other_devices_are_told_of_once(running: Running) -> None:
    told: list[object] = []
    running.publisher = running.make(listed=lambda: told.append(running.publisher.state().addresses))
    running.start()
    running.settled()
    running.looks()
    running.change(*GPUS[:1])
    until(lambda: len(told) == 2)
    running.settled()
    running.looks()
    assert [len(addresses) for addresses in told if isinstance(addresses, dict)] == [len(GPUS), 1]


def test_nothing_is_written_while_the_node_has_not_been_read(running: Running) -> None:
    running.agent.now = wanted.Undecided(reason="not read yet")
    running.start()
    until(lambda: running.publisher.state().reason == "not read yet")
    assert (running.writes(), running.publisher.state().ok) == (0, False)
    running.change(*GPUS)
    running.settled()


def test_a_record_that_cannot_be_used_stops_publication_with_its_reason(running: Running) -> None:
    running.publisher = running.make(timing=pacing.Timing(record_again_s=0.05))
    running.store.fault = errors.RecordError("the disk is full")
    running.start()
    until(lambda: running.publisher.state().reason == "the disk is full")
    assert running.slices() == []
    running.store.fault = None
    running.settled()


def test_a_slice_the_api_would_refuse_is_not_sent(running: Running) -> None:
    running.publisher = publisher.Publisher(
        driver_name="d" * 64,
        node_name=NODE,
        wanted_now=running.agent.wanted_now,
        may_write=running.agent.may_write,
        holders=running.agent.holders,
        store=running.store,
        events=running.told,
        observer=running.told,
    )
    running.start()
    until(lambda: "would refuse them" in (running.publisher.state().reason or ""))
    assert running.server.count("create", "resourceslices") == 0


def test_a_field_that_the_server_changes_is_taken_note_of_once(running: Running) -> None:
    def relabel(body: dict[str, Any]) -> None:
        if body.get("kind") == "ResourceSlice":
            body["spec"]["devices"][0]["attributes"]["productName"] = {"string": "by webhook"}

    running.server.faults.inject(apiserver_faults.Mutate(relabel), resource="resourceslices")
    running.start()
    running.settled()
    running.looks()
    assert running.writes() == 1
    (finding,) = running.publisher.state().findings
    assert finding.code == "slices-altered"
    assert "productName" in finding.message
    running.server.edit("resourceslices", running.only_name(), edit)
    until(lambda: len(running.listed()) == 4)
    running.settled()


def test_an_error_of_our_own_ends_nothing(running: Running, caplog: pytest.LogCaptureFixture) -> None:
    def broken(_held: aim.Holders) -> wanted.Wanted:
        raise KeyError("a bug")

    running.agent.wanted_now = broken  # type: ignore[method-assign]
    running.publisher = running.make()
    running.start()
    until(lambda: "see the log" in (running.publisher.state().reason or ""))
    assert "a bug" in caplog.text


def foreign_pool(name: str) -> dict[str, Any]:
    """A slice of our driver on our node in a pool that is not ours."""
    body = {"driver": publishing.DRIVER, "nodeName": NODE, "devices": [{"name": "gpu-of-nobody"}]}
    pool = {"name": "other", "generation": 7, "resourceSliceCount": 1}
    return {"metadata": {"name": name}, "spec": {**body, "pool": pool}}


def test_a_slice_of_another_pool_of_this_node_is_deleted(running: Running) -> None:
    running.server.seed("resourceslices", foreign_pool("stray"))
    running.start()
    running.settled()
    assert running.spec()["pool"] == {"name": NODE, "generation": 8, "resourceSliceCount": 1}
    assert running.told.writes == [("create", "success"), ("delete", "success")]


def test_publishing_does_not_wait_for_a_slice_that_may_not_be_deleted(running: Running) -> None:
    running.server.seed("resourceslices", foreign_pool("stray"))
    running.server.faults.inject(apiserver_faults.Refuse(403, "Forbidden", "not your pool"), verb="delete")
    running.start()
    running.settled()
    running.looks()
    assert {body["spec"]["pool"]["name"] for body in running.slices()} == {NODE, "other"}
    assert running.told.writes == [("create", "success"), ("delete", "error")]
    (finding,) = running.publisher.state().findings
    assert (finding.code, "stray" in finding.message) == ("foreign-slices", True)
    assert [reason for reason, _ in running.told.events] == ["ForeignSlices"]

    running.server.remove("resourceslices", "stray")
    until(lambda: not running.publisher.state().findings)


def test_after_a_reconnect_a_slice_of_another_pool_is_tried_again(running: Running) -> None:
    running.server.seed("resourceslices", foreign_pool("stray"))
    refusal = running.server.faults.inject(apiserver_faults.Refuse(403, "Forbidden", "not yours"), verb="delete")
    running.start()
    until(lambda: running.publisher.state().findings)
    refusal.remove()
    running.server.cut()
    until(lambda: len(running.slices()) == 1)
