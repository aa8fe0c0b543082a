# SPDX-License-Identifier: Apache-2.0
"""GPUs that vanish under a publisher, over real HTTP: taints, claims, restarts, servers without taints, other drivers.

Aspects: nobody holds it: one write; the record or a claim holds it: tainted until neither does; survives a restart; back
again; servers that keep no taints, found by a dry run or by the real reply; a fixed time of the taint; LISTs that fail;
coexistence with other drivers and with NVIDIA's device plugin; nothing readable.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from discovery import model
from driver import errors
from driver.publish import pacing, wanted
from driver.standin import apiserver, apiserver_faults
from tests.fakes import publishing
from tests.fakes.publishing import DRIVER, NODE, Running, until

GPUS = tuple(publishing.gpu(bus) for bus in (0x1B, 0x43, 0x52))
LOST = replace(GPUS[1], state=model.GpuState.LOST, state_reason="GPU is lost")
ALL = ["gpu-0000-1b-00-0", "gpu-0000-43-00-0", "gpu-0000-52-00-0"]
TAINTED = ["gpu-0000-1b-00-0", "gpu-0000-43-00-0!", "gpu-0000-52-00-0"]
WITHOUT = ["gpu-0000-1b-00-0", "gpu-0000-52-00-0"]


@contextlib.contextmanager
def published(**options: Any) -> Iterator[Running]:
    """A publisher that has published three GPUs."""
    with apiserver.ApiServer(**options) as server:
        server.seed("nodes", {"metadata": {"name": NODE}})
        running = Running(server, publishing.offering(*GPUS))
        running.start()
        running.settled()
        try:
            yield running
        finally:
            running.close()


@pytest.fixture
def running() -> Iterator[Running]:
    with published() as made:
        yield made


def hold(running: Running, name: str = "c", device: str = "gpu-0000-43-00-0") -> None:
    result = {"request": "gpu", "driver": DRIVER, "pool": NODE, "device": device}
    running.server.seed(
        "resourceclaims", {"metadata": {"name": name}, "status": {"allocation": {"devices": {"results": [result]}}}}
    )


def lose(running: Running) -> None:
    running.change(GPUS[0], LOST, GPUS[2])


def test_a_lost_gpu_that_nobody_has_leaves_with_one_write(running: Running) -> None:
    lose(running)
    until(lambda: running.listed() == WITHOUT)
    running.settled()
    running.looks()
    assert running.writes() == 2
    assert running.server.count("list", "resourceclaims") == 1
    assert running.spec()["pool"]["generation"] == 1


def test_a_lost_gpu_that_is_prepared_is_tainted_with_one_write_until_it_is_unprepared(running: Running) -> None:
    running.agent.held = {"gpu-0000-43-00-0"}
    lose(running)
    until(lambda: running.listed() == TAINTED)
    running.settled()
    running.looks()
    assert running.writes() == 2
    assert running.server.count("list", "resourceclaims") == 0
    (taint,) = running.spec()["devices"][1]["taints"]
    assert (taint["key"], taint["effect"]) == (f"{DRIVER}/absent", "NoSchedule")
    assert [device.absent for device in running.publisher.state().devices] == [False, True, False]
    running.agent.held = ()
    running.publisher.released()
    until(lambda: running.listed() == WITHOUT)


def test_a_claim_that_goes_after_its_unprepare_frees_the_device_soon(running: Running) -> None:
    hold(running)
    running.agent.held = {"gpu-0000-43-00-0"}
    lose(running)
    until(lambda: running.listed() == TAINTED)
    running.settled()
    # As on a node: kubelet unprepares first, and the control plane takes the allocation back afterwards.
    running.agent.held = ()
    running.publisher.released()
    until(lambda: running.server.count("list", "resourceclaims") >= 1)
    running.server.remove("resourceclaims", "default/c")
    until(lambda: running.listed() == WITHOUT)


def test_a_claim_that_is_released_is_no_reason_to_look_where_nothing_is_missing(running: Running) -> None:
    running.settled()
    looks = running.agent.asked
    for _ in range(20):
        running.publisher.released()
        threading.Event().wait(0.01)
    assert running.agent.asked == looks


def test_a_lost_gpu_that_a_claim_names_is_tainted_until_none_does(running: Running) -> None:
    hold(running)
    lose(running)
    until(lambda: running.listed() == TAINTED)
    running.settled()
    running.server.remove("resourceclaims", "default/c")
    running.restart()
    until(lambda: running.listed() == WITHOUT)


def test_a_held_device_is_remembered_over_a_restart_and_a_wipe(running: Running) -> None:
    running.agent.held = {"gpu-0000-43-00-0"}
    lose(running)
    until(lambda: running.listed() == TAINTED)
    running.settled()
    writes = running.writes()
    running.restart()
    running.settled()
    running.looks()
    assert (running.listed(), running.writes()) == (TAINTED, writes)
    running.publisher.stop(timeout_s=30)
    running.server.remove("resourceslices", running.only_name())
    running.restart()
    until(lambda: running.listed() == TAINTED)


def test_what_stood_before_a_start_is_known_until_the_hardware_has_been_read(running: Running) -> None:
    running.agent.now = wanted.Undecided(reason="not read yet")
    running.restart()
    until(lambda: running.publisher.state().reason == "not read yet")
    assert sorted(running.publisher.state().addresses) == ALL
    assert running.writes() == 1


def test_a_gpu_that_left_the_bus_is_remembered_with_all_it_said(running: Running) -> None:
    said = running.spec()["devices"][1]
    running.agent.held = {"gpu-0000-43-00-0"}
    running.change(GPUS[0], GPUS[2])
    until(lambda: running.listed() == TAINTED)
    kept = running.spec()["devices"][1]
    assert {key: kept[key] for key in ("name", "attributes", "capacity")} == said


def test_a_gpu_that_is_back_has_no_taint(running: Running) -> None:
    running.agent.held = {"gpu-0000-43-00-0"}
    lose(running)
    until(lambda: running.listed() == TAINTED)
    running.change(*GPUS)
    until(lambda: running.listed() == ALL)


def test_the_time_of_the_taint_stays_when_the_slice_is_written_again(running: Running) -> None:
    running.agent.held = {"gpu-0000-43-00-0"}
    lose(running)
    until(lambda: running.listed() == TAINTED)
    running.settled()

    def backdate(body: dict[str, Any]) -> None:
        body["spec"]["devices"][1]["taints"][0]["timeAdded"] = "2026-01-02T03:04:05Z"
        del body["spec"]["devices"][2]

    running.server.edit("resourceslices", running.only_name(), backdate)
    until(lambda: running.listed() == TAINTED)
    assert running.spec()["devices"][1]["taints"][0]["timeAdded"] == "2026-01-02T03:04:05Z"


def test_taints_are_tried_by_a_dry_run_once_a_connection(running: Running) -> None:
    running.agent.held = {"gpu-0000-43-00-0", "gpu-0000-52-00-0"}
    lose(running)
    until(lambda: running.listed() == TAINTED)
    running.change(GPUS[0], LOST)
    until(lambda: running.listed() == [TAINTED[0], TAINTED[1], "gpu-0000-52-00-0!"])
    assert running.server.count("update", "resourceslices", dry_run=True) == 1
    watches = running.server.count("watch", "resourceslices")
    running.server.cut()
    # The watch follows a list that has been taken in.
    until(lambda: running.server.count("watch", "resourceslices") > watches)
    running.change(GPUS[0], LOST, GPUS[2])
    until(lambda: running.listed() == TAINTED)
    assert running.server.count("update", "resourceslices", dry_run=True) == 2


@pytest.mark.parametrize("options", [{"version": "1.35"}, {"feature_gates": {"DRADeviceTaints": False}}])
def test_where_the_server_keeps_no_taints_a_held_device_stays_without_one(options: dict[str, Any]) -> None:
    with published(**options) as running:
        running.agent.held = {"gpu-0000-43-00-0"}
        lose(running)
        until(lambda: any(finding.code == "taints-not-kept" for finding in running.publisher.state().findings))
        running.settled()
        running.looks()
        assert (running.listed(), running.writes()) == (ALL, 1)
        state = running.publisher.state()
        assert state.ok
        assert "keeps no device taints" in (state.reason or "")
        assert [reason for reason, _ in running.told.events] == ["TaintsNotKept"]
        running.agent.held = ()
        running.publisher.notify()
        until(lambda: running.listed() == WITHOUT)
        running.settled()
        assert running.publisher.state().reason is None


def test_taints_that_the_real_reply_lacks_are_noticed_too(running: Running) -> None:
    def strip(body: dict[str, Any]) -> None:
        for device in body["spec"].get("devices", []):
            device.pop("taints", None)

    running.agent.held = {"gpu-0000-43-00-0"}
    running.server.faults.inject(apiserver_faults.Mutate(strip), verb="update", dry_run=False)
    lose(running)
    until(lambda: any(finding.code == "taints-not-kept" for finding in running.publisher.state().findings))
    running.settled()
    running.looks()
    assert running.listed() == ALL


def test_a_device_stays_while_nobody_can_tell_who_has_it(running: Running) -> None:
    fault = running.server.faults.inject(apiserver_faults.Refuse(403, "Forbidden"), resource="resourceclaims")
    lose(running)
    until(lambda: running.listed() == TAINTED)
    running.settled()
    assert [finding.code for finding in running.publisher.state().findings] == ["claims-not-listed"]
    fault.remove()
    until(lambda: running.listed() == WITHOUT)
    running.settled()
    assert running.publisher.state().findings == ()


def test_a_record_that_cannot_say_who_holds_what_counts_as_held(running: Running) -> None:
    def unreadable() -> list[str]:
        raise errors.RecordError("locked")

    running.agent.holders = unreadable  # type: ignore[method-assign]
    running.restart()
    lose(running)
    until(lambda: running.listed() == TAINTED)


def test_where_no_gpu_can_be_read_there_is_no_slice_but_for_what_is_held(running: Running) -> None:
    running.agent.held = {"gpu-0000-43-00-0"}
    running.change(*(replace(gpu, state=model.GpuState.NO_DRIVER) for gpu in GPUS))
    until(lambda: running.listed() == ["gpu-0000-43-00-0!"])
    running.settled()
    assert "None of the 3 NVIDIA GPUs" in (running.publisher.state().reason or "")
    running.agent.held = ()
    running.publisher.notify()
    until(lambda: running.slices() == [])
    running.settled()
    assert running.publisher.state().ok
    running.change(*GPUS)
    until(lambda: running.listed() == ALL)
    assert running.spec()["pool"]["generation"] == 2


def test_a_damaged_entry_of_the_record_hides_no_other(running: Running) -> None:
    running.store.published["gpu-0000-43-00-0"] = {"address": "nowhere"}
    running.agent.held = {"gpu-0000-43-00-0", "gpu-0000-52-00-0"}
    running.agent.now = publishing.offering(GPUS[0])
    running.restart()
    until(lambda: running.listed() == ["gpu-0000-1b-00-0", "gpu-0000-52-00-0!"])


def foreign(running: Running, *, address: str = "0000:1b:00.0") -> None:
    attributes = {"resource.kubernetes.io/pciBusID": {"string": address}}
    spec = {
        "driver": "gpu.nvidia.com",
        "nodeName": NODE,
        "pool": {"name": NODE, "generation": 1, "resourceSliceCount": 1},
        "devices": [{"name": "gpu-0", "attributes": attributes}],
    }
    running.server.seed("resourceslices", {"metadata": {"name": "foreign"}, "spec": spec})


def ours(running: Running) -> list[dict[str, Any]]:
    return [body for body in running.slices() if body["spec"]["driver"] == DRIVER]


def test_beside_another_driver_nothing_is_offered_and_the_node_says_so(running: Running) -> None:
    running.restart(timing=pacing.Timing(quiet_after_conflict_s=0.2))
    running.settled()
    foreign(running)
    until(lambda: ours(running) == [])
    running.settled()
    state = running.publisher.state()
    assert state.ok
    assert "driver gpu.nvidia.com publishes GPU 0000:1b:00.0 of this node too" in (state.reason or "")
    assert "--allow-coexistence" in (state.reason or "")
    assert running.told.events == [("NotPublished", state.reason)]
    assert [finding.code for finding in state.findings] == ["offered-by-another"]
    running.server.remove("resourceslices", "foreign")
    until(lambda: ours(running))
    running.settled()
    assert (running.publisher.state().reason, running.publisher.state().findings) == (None, ())


def test_another_driver_that_is_wiped_for_a_moment_keeps_us_silent(running: Running) -> None:
    foreign(running)
    until(lambda: ours(running) == [])
    running.server.remove("resourceslices", "foreign")
    running.looks()
    assert ours(running) == []
    assert "Nothing is published" in (running.publisher.state().reason or "")


def test_what_a_claim_has_stays_listed_beside_another_driver(running: Running) -> None:
    hold(running)
    foreign(running)
    until(lambda: [device["name"] for body in ours(running) for device in body["spec"]["devices"]] == [ALL[1]])
    assert ours(running)[0]["spec"]["devices"][0]["taints"]
    running.settled()


def test_beside_nvidias_device_plugin_nothing_is_offered() -> None:
    with apiserver.ApiServer() as server:
        server.seed("nodes", {"metadata": {"name": NODE}, "status": {"allocatable": {"nvidia.com/gpu": "8"}}})
        running = Running(server, publishing.offering(*GPUS))
        running.start()
        running.settled()
        assert running.slices() == []
        assert "device plugin" in (running.publisher.state().reason or "")
        running.restart(allow_coexistence=True)
        until(lambda: running.listed() == ALL)
        running.close()


def test_another_driver_with_other_devices_is_no_matter(running: Running) -> None:
    foreign(running, address="0000:18:00.0")
    running.looks()
    assert running.publisher.state().reason is None
    assert len(running.slices()) == 2


def test_withheld_devices_come_back_where_they_stood(running: Running) -> None:
    running.agent.held = set(ALL)
    running.agent.now = wanted.Withheld(reason="because")
    running.publisher.notify()
    until(lambda: running.listed() == [f"{name}!" for name in ALL])
    running.change(*GPUS)
    until(lambda: running.listed() == ALL)
