# SPDX-License-Identifier: Apache-2.0
"""A publisher of GPUs that can be divided, over real HTTP.

Aspects: what stands on the server; instances that come and go are no write; foreign instances with and without somebody in
the way, a claim that was faster, a LIST that fails; existing instances that vanish while a claim has them; a policy that
changes; servers that keep no counters from the start, from an upgrade or a downgrade on, with a part in use; counters that
the real reply lacks; restarts and reconnects.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import pytest

from discovery import mig, model
from driver import values
from driver.publish import aim, counters, held, pacing, wanted
from driver.sharing.rules import EXCLUSIVE, Fallback, Mode, Policy
from driver.standin import apiserver_faults
from tests.fakes import migtables, publishing
from tests.fakes.migtables import ON, gpu, instance
from tests.fakes.publishing import NODE, Running, running, until

DYNAMIC = Policy(mode=Mode.MIG_DYNAMIC)
STATIC = Policy(mode=Mode.MIG_STATIC)
WHOLE = "gpu-0000-1b-00-0"
OTHER = "gpu-0000-43-00-0"
BIG = f"{WHOLE}-mig-3g-40gb-9-4"
MEDIA = f"{WHOLE}-mig-1g-10gb-me-20-0"
FULL = counters.totals(migtables.H100)


def offering(*gpus: model.Gpu, how: Policy = DYNAMIC, ours: Collection[str] = ()) -> wanted.Wanted:
    """The first GPU by this policy, the others exclusively."""
    policies = {gpus[0].address: how}
    return wanted.from_snapshot(publishing.snapshot(*gpus), options=publishing.OPTIONS, policies=policies, ours=ours)


NOW = offering(gpu(0x1B), gpu(0x43))


def totals(made: Running) -> dict[str, dict[str, int]]:
    return {
        entry["name"]: {name: int(counter["value"]) for name, counter in entry["counters"].items()}
        for body in made.slices()
        for entry in body["spec"].get("sharedCounters", [])
    }


def consuming(made: Running) -> list[str]:
    return [
        device["name"]
        for body in made.slices()
        for device in body["spec"].get("devices", [])
        if device.get("consumesCounters")
    ]


def foreign(*there: mig.MigInstance) -> wanted.Wanted:
    return offering(gpu(0x1B, mig_mode=ON, mig_instances=there), gpu(0x43))


def test_partitions_stand_beside_their_counters() -> None:
    with running(NOW) as made:
        made.settled()
        devices, shared = made.slices()
        assert len(devices["spec"]["devices"]) == 27
        assert "sharedCounters" not in devices["spec"]
        assert "devices" not in shared["spec"]
        assert totals(made) == {WHOLE: FULL}
        assert (made.codes(), made.publisher.state().reason) == ([], None)
        assert made.writes() == 2
        assert made.server.count("create", "resourceslices", dry_run=True) == 2


def test_a_restart_and_a_reconnect_write_nothing() -> None:
    with running(NOW) as made:
        made.settled()
        made.restart()
        made.settled()
        made.reconnect()
        assert (made.writes(), made.store.saves) == (2, 1)


def test_twenty_instances_of_ours_come_and_go_without_a_write() -> None:
    name = f"{WHOLE}-mig-1g-10gb-19"
    with running(NOW) as made:
        made.settled()
        for turn in range(20):
            start = turn % 7
            # The mode follows the claims: on with the first instance, off some time after the last.
            there = gpu(0x1B, mig_mode=ON, mig_instances=(instance(turn, start),))
            made.agent.held = {f"{name}-{start}"}
            made.want(offering(there, gpu(0x43), ours={f"{name}-{start}"}))
            made.looks()
            made.agent.held = ()
            made.publisher.released()
            made.want(offering(gpu(0x1B), gpu(0x43)))
            made.looks()
        made.settled()
        assert (made.writes(), made.store.saves) == (2, 1)
        assert made.server.count("list", "resourceclaims") == 0


def test_a_foreign_instance_takes_its_part_and_gives_it_back() -> None:
    with running(NOW) as made:
        made.settled()
        made.restart(clock=lambda: 0.0)  # claims are not looked for again because of the time
        made.settled()
        made.want(foreign(instance(2, 4, 9, size=4)))
        until(lambda: totals(made)[WHOLE]["memory-slice-4"] == 0)
        made.settled()
        assert WHOLE not in made.listed()
        assert BIG not in made.listed()
        assert f"{WHOLE}-mig-3g-40gb-9-0" in made.listed()
        assert made.codes() == ["mig-instance-foreign"]
        assert made.server.count("list", "resourceclaims") == 1
        made.want(NOW)
        until(lambda: totals(made) == {WHOLE: FULL} and BIG in made.listed())


def test_no_counter_goes_below_what_a_claim_has() -> None:
    with running(NOW) as made:
        made.settled()
        made.hold(MEDIA)
        made.want(foreign(instance(2, 6, 20)))
        until(lambda: f"{MEDIA}!" in made.listed())
        made.settled()
        assert totals(made)[WHOLE]["ofa-engines"] == 1
        assert totals(made)[WHOLE]["memory-slice-6"] == 0
        made.server.remove("resourceclaims", "default/c")
        made.restart()
        until(lambda: totals(made)[WHOLE]["ofa-engines"] == 0)
        made.settled()
        assert [device for device in made.listed() if device.endswith("!")] == []


def test_what_is_prepared_counts_as_in_use() -> None:
    with running(NOW) as made:
        made.settled()
        made.agent.held = {MEDIA}
        made.want(foreign(instance(2, 6, 20)))
        until(lambda: f"{MEDIA}!" in made.listed())
        made.settled()
        assert totals(made)[WHOLE]["ofa-engines"] == 1
        made.agent.held = ()
        made.publisher.released()
        until(lambda: totals(made)[WHOLE]["ofa-engines"] == 0)


def test_a_claim_that_was_faster_than_the_write_raises_the_counter_again() -> None:
    moment = [0.0]
    with running(NOW) as made:
        made.settled()
        made.restart(clock=lambda: moment[0])
        made.settled()
        # Allocated while the counters went down: three engines of seven copies are taken by an instance of an admin.
        made.want(foreign(instance(2, 4, 9, size=4)))
        until(lambda: totals(made)[WHOLE]["memory-slice-4"] == 0)
        made.settled()
        lowered = totals(made)[WHOLE]["copy-engines"]
        made.hold(f"{WHOLE}-mig-4g-40gb-5-0", "one")
        made.hold(f"{WHOLE}-mig-2g-20gb-14-0", "two")
        moment[0] += held.FREE_FOR_S + 1.0
        made.publisher.notify()
        until(lambda: totals(made)[WHOLE]["copy-engines"] == lowered + 1)
        assert totals(made)[WHOLE]["memory-slice-0"] == 2
        made.settled()
        moment[0] += aim.LOWERED_FOR_S * 10
        made.server.remove("resourceclaims", "default/two")
        made.publisher.notify()
        until(lambda: totals(made)[WHOLE]["copy-engines"] == lowered)


def test_no_claim_is_looked_for_once_a_lowered_counter_has_settled() -> None:
    moment = [0.0]
    with running(NOW) as made:
        made.settled()
        made.restart(clock=lambda: moment[0])
        made.settled()
        made.want(foreign(instance(2, 4, 9, size=4)))
        until(lambda: totals(made)[WHOLE]["memory-slice-4"] == 0)
        made.settled()
        moment[0] += aim.LOWERED_FOR_S + 1.0
        made.looks()
        lists = made.server.count("list", "resourceclaims")
        for _ in range(5):
            moment[0] += 700.0
            made.looks()
        assert made.server.count("list", "resourceclaims") == lists


def test_no_counter_goes_down_while_nobody_can_tell_who_has_what() -> None:
    with running(NOW) as made:
        made.settled()
        fault = made.server.faults.inject(apiserver_faults.Refuse(403, "Forbidden"), resource="resourceclaims")
        made.want(foreign(instance(2, 4, 9, size=4)))
        until(lambda: "claims-not-listed" in made.codes())
        made.settled()
        assert totals(made) == {WHOLE: FULL}
        assert f"{BIG}!" in made.listed()
        fault.remove()
        until(lambda: totals(made)[WHOLE]["memory-slice-4"] == 0)
        made.settled()
        assert BIG not in made.listed()


THERE = (instance(1, 0), instance(2, 4, 9, size=4))


def static(*there: mig.MigInstance) -> wanted.Wanted:
    return offering(gpu(0x1B, mig_mode=ON, mig_instances=there), gpu(0x43), how=STATIC)


def test_existing_instances_come_and_go_by_one_write_each() -> None:
    with running(static(*THERE)) as made:
        made.settled()
        small = f"{WHOLE}-mig-1g-10gb-19-0"
        assert made.listed() == [OTHER, small, BIG]
        made.want(static(THERE[0]))
        until(lambda: made.listed() == [OTHER, small])
        made.settled()
        made.want(static(*THERE))
        until(lambda: made.listed() == [OTHER, small, BIG])
        made.settled()
        assert made.writes() == 3
        assert made.server.count("create", "resourceslices", dry_run=True) == 0


def test_an_instance_that_vanishes_while_a_claim_has_it_stays_tainted_until_it_is_free() -> None:
    with running(static(*THERE)) as made:
        made.settled()
        made.agent.held = {BIG}
        told: list[frozenset[str]] = []
        made.restart(listed=lambda: told.append(made.publisher.state().vanished))
        made.settled()
        made.want(static(THERE[0]))
        until(lambda: f"{BIG}!" in made.listed())
        made.settled()
        assert made.publisher.state().vanished == {BIG}
        # Kubelet hears of it at once.
        until(lambda: {BIG} in told)
        made.agent.held = ()
        made.publisher.released()
        until(lambda: made.listed() == [OTHER, f"{WHOLE}-mig-1g-10gb-19-0"])
        made.settled()
        assert made.publisher.state().vanished == frozenset()


def test_a_whole_gpu_is_not_given_away_beside_a_part_that_a_claim_has() -> None:
    """The policy waits for that by the record; an allocation that it could not see is found here."""
    with running(NOW) as made:
        made.settled()
        made.hold(BIG)
        made.want(offering(gpu(0x1B), gpu(0x43), how=EXCLUSIVE))
        until(lambda: made.listed() == [WHOLE, BIG + "!", OTHER] or made.listed() == [WHOLE, OTHER, BIG + "!"])
        made.settled()
        assert sorted(consuming(made)) == [WHOLE, BIG]
        assert totals(made) == {WHOLE: FULL}
        made.server.remove("resourceclaims", "default/c")
        made.restart()
        until(lambda: made.listed() == [WHOLE, OTHER])
        made.settled()
        assert (consuming(made), totals(made)) == ([], {})


def test_who_has_devices_is_told_to_who_decides_on_policies() -> None:
    asked: list[Collection[str]] = []

    def decide(_held: aim.Holders) -> wanted.Wanted:
        asked.append(_held(frozenset({BIG, MEDIA, WHOLE})))
        return NOW

    with running(NOW) as made:
        made.settled()
        made.hold(BIG)
        made.agent.held = {MEDIA}
        made.agent.wanted_now = decide  # type: ignore[method-assign]
        made.restart()
        until(lambda: made.publisher.state().ok)
        assert set(asked[-1]) == {BIG, MEDIA}
        # Who does not write asks nobody.
        made.agent.leads = False
        made.publisher.notify()
        until(lambda: set(asked[-1]) == {BIG, MEDIA, WHOLE})


def test_a_change_that_waits_is_looked_at_when_a_claim_ends() -> None:
    waits = [False]
    with running(NOW) as made:
        made.restart(waits=lambda: waits[0])
        made.settled()
        looks = made.agent.asked
        made.publisher.released()
        waits[0] = True
        made.publisher.released()
        until(lambda: made.agent.asked > looks)


@pytest.mark.parametrize("options", [{"version": "1.35"}, {"feature_gates": {"DRAPartitionableDevices": False}}])
@pytest.mark.parametrize("fallback", list(Fallback))
def test_where_the_server_keeps_no_counters_gpus_are_whole_or_not_there(
    options: dict[str, Any], fallback: Fallback
) -> None:
    how = Policy(mode=Mode.MIG_DYNAMIC, fallback=fallback)
    with running(offering(gpu(0x1B), gpu(0x43), how=how), **options) as made:
        made.settled()
        assert made.listed() == ([WHOLE, OTHER] if fallback is Fallback.WHOLE else [OTHER])
        assert (consuming(made), totals(made)) == ([], {})
        state = made.publisher.state()
        assert (state.ok, made.codes()) == (True, ["counters-not-kept"])
        assert f"{WHOLE} ({'whole' if fallback is Fallback.WHOLE else 'not at all'})" in (state.reason or "")
        assert made.told.events == [("CountersNotKept", state.reason)]
        assert made.told.writes == [("create", "success")]
        made.restart()
        made.settled()
        made.reconnect()
        assert (made.writes(), made.store.saves) == (1, 1)


def test_existing_instances_need_no_counters() -> None:
    with running(static(*THERE), version="1.35") as made:
        made.settled()
        assert made.listed() == [OTHER, f"{WHOLE}-mig-1g-10gb-19-0", BIG]
        assert (made.codes(), made.publisher.state().reason) == ([], None)


def test_a_server_that_keeps_counters_from_now_on_gets_partitions() -> None:
    with running(NOW, feature_gates={"DRAPartitionableDevices": False}) as made:
        made.settled()
        made.turn("DRAPartitionableDevices", on=True)
        until(lambda: totals(made) == {WHOLE: FULL})
        made.settled()
        assert len(consuming(made)) == 26
        assert (made.codes(), made.publisher.state().reason) == ([], None)


def test_a_server_that_keeps_none_from_now_on_is_noticed_without_a_write() -> None:
    """What is stored keeps its fields there, and its scheduler does not look at them."""
    with running(NOW) as made:
        made.settled()
        made.turn("DRAPartitionableDevices", on=False)
        until(lambda: made.listed() == [WHOLE, OTHER])
        made.settled()
        assert (consuming(made), totals(made), made.codes()) == ([], {}, ["counters-not-kept"])


def test_without_counters_nothing_is_offered_of_a_gpu_of_which_a_part_is_in_use() -> None:
    with running(NOW) as made:
        made.settled()
        made.agent.held = {BIG}
        made.turn("DRAPartitionableDevices", on=False)
        until(lambda: made.listed() == [OTHER])
        made.settled()
        made.restart()
        made.settled()
        made.looks()
        assert made.listed() == [OTHER]
        # Its health is still told.
        assert made.publisher.state().addresses.keys() == {OTHER, BIG}
        made.agent.held = ()
        made.publisher.released()
        until(lambda: made.listed() == [WHOLE, OTHER])


def strip(body: dict[str, Any]) -> None:
    body["spec"].pop("sharedCounters", None)
    for device in body["spec"].get("devices", []):
        device.pop("consumesCounters", None)


def test_counters_that_the_real_reply_lacks_cost_the_slice() -> None:
    with running(wanted.Undecided(reason="not yet")) as made:
        made.server.faults.inject(apiserver_faults.Mutate(strip), verb="create", dry_run=False)
        made.want(NOW)
        until(lambda: made.listed() == [WHOLE, OTHER])
        made.settled()
        assert made.told.writes[0] == ("create", "success")
        assert made.server.count("delete", "resourceslices") == 1
        assert (consuming(made), made.codes()) == ([], ["counters-not-kept"])
        assert made.publisher.state().slices == 1


def halve(body: dict[str, Any]) -> None:
    for entry in body["spec"].get("sharedCounters", []):
        entry["counters"]["multiprocessors"]["value"] = "66"


def test_counters_that_somebody_changes_on_the_way_are_as_bad() -> None:
    with running(wanted.Undecided(reason="not yet")) as made:
        made.server.faults.inject(apiserver_faults.Mutate(halve), verb="create")
        made.want(NOW)
        until(lambda: made.listed() == [WHOLE, OTHER])
        made.settled()
        assert (consuming(made), made.codes()) == ([], ["counters-not-kept"])


def test_counters_that_somebody_edits_are_put_right() -> None:
    with running(NOW) as made:
        made.settled()
        (name,) = (body["metadata"]["name"] for body in made.slices() if body["spec"].get("sharedCounters"))
        made.server.edit("resourceslices", name, halve)
        until(lambda: totals(made) == {WHOLE: FULL})
        made.server.remove("resourceslices", name)
        until(lambda: totals(made) == {WHOLE: FULL})
        made.settled()
        generations = {body["spec"]["pool"]["generation"] for body in made.slices()}
        assert len(generations) == 1


def test_a_gpu_that_is_lost_keeps_the_counters_of_what_is_in_use() -> None:
    with running(NOW) as made:
        made.settled()
        made.agent.held = {BIG}
        made.want(publishing.offering(gpu(0x43)))
        until(lambda: made.listed() == [f"{BIG}!", OTHER] or made.listed() == [OTHER, f"{BIG}!"])
        made.settled()
        assert totals(made) == {WHOLE: FULL}
        assert consuming(made) == [BIG]
        made.restart(timing=pacing.Timing())
        made.settled()
        assert totals(made) == {WHOLE: FULL}
        made.want(NOW)
        until(lambda: len(consuming(made)) == 26)


def test_another_driver_with_the_same_gpu_stops_partitions_too() -> None:
    with running(offering(gpu(0x1B))) as made:
        made.settled()
        attributes = {"resource.kubernetes.io/pciBusID": {"string": "0000:1b:00.0"}}
        spec = {
            "driver": "gpu.nvidia.com",
            "nodeName": NODE,
            "pool": {"name": NODE, "generation": 1, "resourceSliceCount": 1},
            "devices": [{"name": "gpu-0-mig-1g10gb-19-0", "attributes": attributes}],
        }
        made.server.seed("resourceslices", {"metadata": {"name": "foreign"}, "spec": spec})
        until(lambda: len(made.slices()) == 1)
        made.settled()
        assert made.codes() == ["offered-by-another"]


def test_sixteen_gpus_are_taken_by_the_server() -> None:
    gpus = tuple(gpu(bus) for bus in range(0x10, 0x20))
    policies = {each.address: DYNAMIC for each in gpus}
    now = wanted.from_snapshot(publishing.snapshot(*gpus), options=publishing.OPTIONS, policies=policies)
    with running(now) as made:
        until(lambda: made.publisher.state().ok, timeout_s=50)
        assert (len(made.slices()), len(made.listed()), len(totals(made))) == (9, 416, 16)
        assert {values.gpu_of(name) for name in made.listed()} == set(totals(made))
        assert made.publisher.state().reason is None
