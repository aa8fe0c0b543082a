# SPDX-License-Identifier: Apache-2.0
"""A publisher of GPUs that are given out in shares, over real HTTP.

Aspects: what stands on the server; memory that changes while somebody has a share, and after; a shared GPU that is lost while
a claim has a share of it; servers that keep no shares from the start, from an upgrade or a downgrade on, with a share in use,
beside counters, without taints; shares that the real reply lacks, or that somebody changes on the way or edits; another
driver; restarts and reconnects.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from discovery import model
from driver.publish import wanted
from driver.sharing import shares
from driver.sharing.rules import Fallback, Mode, Policy
from driver.standin import apiserver_faults
from tests.fakes import migtables, publishing
from tests.fakes.publishing import NODE, Running, running, until

GIB = 1 << 30
SHARES = shares.Shares(
    memory_step=GIB, compute_step=5, max_sharers=8, memory=shares.Memory.NONE, compute=shares.Compute.NONE
)
BY_CGROUP = shares.Enforcement(memory=shares.Memory.CGROUP, compute=shares.Compute.MPS)
SHARED = Policy(mode=Mode.SHARES, shares=SHARES, enforcement=BY_CGROUP)
GPU = publishing.gpu(0x1B)
WHOLE = "gpu-0000-1b-00-0"
OTHER = "gpu-0000-43-00-0"
OFF = {"DRAConsumableCapacity": False}


def offering(*gpus: model.Gpu, how: Policy = SHARED) -> wanted.Wanted:
    """The first GPU by this policy, the others exclusively."""
    return wanted.from_snapshot(
        publishing.snapshot(*gpus), options=publishing.OPTIONS, policies={gpus[0].address: how} if gpus else {}
    )


NOW = offering(GPU, publishing.gpu(0x43))
EMPTY = wanted.from_snapshot(publishing.snapshot(), options=publishing.OPTIONS)


def entry(made: Running, name: str = WHOLE) -> dict[str, Any]:
    """A device as it stands on the server; nothing where it does not."""
    listed = (device for body in made.slices() for device in body["spec"].get("devices", []))
    return next((device for device in listed if device["name"] == name), {})


def memory(made: Running) -> Any:
    return entry(made).get("capacity", {}).get("memory", {}).get("value")


def sharing(made: Running) -> list[str]:
    return [
        device["name"]
        for body in made.slices()
        for device in body["spec"].get("devices", [])
        if device.get("allowMultipleAllocations")
    ]


def test_shares_stand_beside_gpus_for_one_claim() -> None:
    with running(NOW) as made:
        made.settled()
        assert (made.listed(), sharing(made)) == ([OTHER, WHOLE], [WHOLE])
        assert (made.codes(), made.publisher.state().reason) == ([], None)
        assert made.writes() == 1
        assert made.server.count("create", "resourceslices", dry_run=True) == 1
        made.restart()
        made.settled()
        made.reconnect()
        assert (made.writes(), made.store.saves) == (1, 1)


def test_who_publishes_no_shares_makes_no_dry_run() -> None:
    with running(offering(GPU, how=Policy())) as made:
        made.settled()
        assert made.server.count("create", "resourceslices", dry_run=True) == 0


@pytest.mark.parametrize("by", ["record", "claim"])
def test_memory_does_not_change_under_a_share(by: str) -> None:
    less = offering(replace(GPU, memory_bytes=70 * GIB), publishing.gpu(0x43))
    with running(NOW) as made:
        made.settled()
        if by == "record":
            made.agent.held = {WHOLE}
        else:
            made.hold(WHOLE, shareID="a671734a")
        made.want(less)
        made.settled()
        made.restart()
        made.settled()
        assert (memory(made), made.writes(), made.codes()) == ("81559Mi", 1, ["shares-kept"])
        assert entry(made)["capacity"]["memory"]["requestPolicy"]["validRange"]["max"] == "79Gi"
        made.agent.held = ()
        made.server.remove("resourceclaims", "default/c") if by == "claim" else None
        made.publisher.released()
        until(lambda: memory(made) == "70Gi")
        made.settled()
        assert made.codes() == []


def test_a_lost_gpu_keeps_its_shares_while_a_claim_has_one() -> None:
    with running(NOW) as made:
        made.settled()
        made.agent.held = {WHOLE}
        made.want(EMPTY)
        until(lambda: made.listed() == [f"{WHOLE}!"])
        made.restart()
        made.settled()
        assert sharing(made) == [WHOLE]
        assert entry(made)["capacity"]["shares"]["requestPolicy"] == {"default": "1", "validValues": ["1"]}
        made.want(NOW)
        until(lambda: made.listed() == [OTHER, WHOLE])
        made.want(EMPTY)
        made.agent.held = ()
        made.publisher.released()
        until(lambda: made.listed() == [])


@pytest.mark.parametrize("options", [{"version": "1.35"}, {"feature_gates": OFF}])
@pytest.mark.parametrize("fallback", list(Fallback))
def test_where_the_server_keeps_no_shares_gpus_are_for_one_claim_or_not_there(
    options: dict[str, Any], fallback: Fallback
) -> None:
    now = offering(GPU, publishing.gpu(0x43), how=replace(SHARED, fallback=fallback))
    with running(now, **options) as made:
        made.settled()
        alone = fallback is Fallback.WHOLE
        assert made.listed() == ([WHOLE, OTHER] if alone else [OTHER])
        state = made.publisher.state()
        assert (state.ok, made.codes(), sharing(made)) == (True, ["shares-not-kept"], [])
        assert f"{WHOLE} is offered {'to one claim' if alone else 'not at all'};" in (state.reason or "")
        assert made.told.events == [("SharesNotKept", state.reason)]
        assert made.told.writes == [("create", "success")]
        if alone:
            assert entry(made)["attributes"]["memoryEnforcement"] == {"string": "whole"}
            assert entry(made)["capacity"].keys() == {"memory", "compute", "multiprocessors"}
            assert "mode" not in made.store.published[WHOLE]
        made.restart()
        made.settled()
        made.reconnect()
        assert (made.writes(), made.store.saves, len(made.told.events)) == (1, 1, 2)


def test_shared_instances_are_for_one_claim_there() -> None:
    divided = migtables.gpu(0x1B, mig_mode=migtables.ON, mig_instances=(migtables.instance(1, 4, 9, size=4),))
    how = replace(SHARED, mode=Mode.MIG_STATIC)
    name = f"{WHOLE}-mig-3g-40gb-9-4"
    with running(offering(divided, how=how), feature_gates=OFF) as made:
        made.settled()
        assert (made.listed(), sharing(made)) == ([name], [])
        assert entry(made, name)["attributes"]["memoryEnforcement"] == {"string": "mig"}
        made.turn("DRAConsumableCapacity", on=True)
        until(lambda: sharing(made) == [name])


def test_a_server_that_keeps_neither_shares_nor_counters() -> None:
    how = {GPU.address: SHARED, migtables.gpu(0x43).address: Policy(mode=Mode.MIG_DYNAMIC)}
    now = wanted.from_snapshot(publishing.snapshot(GPU, migtables.gpu(0x43)), options=publishing.OPTIONS, policies=how)
    with running(now, version="1.35") as made:
        made.settled()
        assert (made.listed(), sorted(made.codes())) == ([WHOLE, OTHER], ["counters-not-kept", "shares-not-kept"])
    with running(now) as made:
        made.settled()
        assert (sharing(made), made.codes()) == ([WHOLE], [])


def test_a_server_that_keeps_shares_from_now_on_gets_them() -> None:
    with running(NOW, feature_gates=OFF) as made:
        made.settled()
        made.turn("DRAConsumableCapacity", on=True)
        until(lambda: sharing(made) == [WHOLE])
        made.settled()
        assert (made.listed(), made.codes(), made.publisher.state().reason) == ([OTHER, WHOLE], [], None)


def test_a_server_that_keeps_none_from_now_on_is_noticed_without_a_write() -> None:
    """What is stored keeps its fields there, and its scheduler does not look at them."""
    with running(NOW) as made:
        made.settled()
        made.turn("DRAConsumableCapacity", on=False)
        until(lambda: made.listed() == [WHOLE, OTHER])
        made.settled()
        assert (sharing(made), made.codes()) == ([], ["shares-not-kept"])


@pytest.mark.parametrize("lost", [False, True])
@pytest.mark.parametrize("by", ["record", "claim"])
def test_nothing_is_offered_of_a_gpu_while_a_claim_has_a_share_that_is_not_kept(by: str, *, lost: bool) -> None:
    """To the scheduler it would be free: it counts shares apart."""
    with running(NOW) as made:
        made.settled()
        if by == "record":
            made.agent.held = {WHOLE}
        else:
            made.hold(WHOLE, shareID="a671734a")
        if lost:
            made.agent.now = offering(publishing.gpu(0x43), how=Policy())
        made.turn("DRAConsumableCapacity", on=False)
        until(lambda: made.listed() == [OTHER])
        made.settled()
        made.restart()
        made.settled()
        made.looks()
        assert (made.listed(), made.codes()) == ([OTHER], ["shares-not-kept"])
        assert f"{WHOLE} is offered not at all while a claim has a share of it" in (made.publisher.state().reason or "")
        # Its health is still told, and its policy waits.
        assert made.publisher.state().addresses.keys() == {OTHER, WHOLE}
        assert made.store.published[WHOLE]["mode"] == "shares"
        made.agent.held = ()
        if by == "claim":
            made.server.remove("resourceclaims", "default/c")
        made.publisher.released()
        until(lambda: "shares" not in made.store.published.get(WHOLE, {}))
        made.settled()
        assert made.listed() == ([OTHER] if lost else [WHOLE, OTHER])


def test_a_claim_that_has_it_alone_there_keeps_it_listed() -> None:
    """By its policy: it was published without shares, and stays so while somebody has it."""
    with running(NOW, feature_gates=OFF) as made:
        made.settled()
        made.agent.held = {WHOLE}
        made.want(offering(GPU, publishing.gpu(0x43), how=Policy()))
        made.reconnect()
        made.restart()
        made.settled()
        assert (made.listed(), made.writes()) == ([WHOLE, OTHER], 1)
        made.turn("DRAConsumableCapacity", on=True)
        made.settled()
        made.agent.held = ()
        made.want(NOW)
        until(lambda: sharing(made) == [WHOLE])


def test_a_claim_of_which_the_record_does_not_know_may_have_a_share() -> None:
    """The record was lost: of a device that is offered for the first time nobody can tell."""
    with running(wanted.Undecided(reason="not yet"), feature_gates=OFF) as made:
        made.hold(WHOLE, shareID="a671734a")
        made.want(NOW)
        until(lambda: made.listed() == [OTHER])
        made.settled()
        made.server.remove("resourceclaims", "default/c")
        made.publisher.released()
        until(lambda: made.listed() == [WHOLE, OTHER])


def strip(body: dict[str, Any]) -> None:
    for device in body["spec"].get("devices", []):
        device.pop("allowMultipleAllocations", None)
        for capacity in device["capacity"].values():
            capacity.pop("requestPolicy", None)


def strip_policies(body: dict[str, Any]) -> None:
    for device in body["spec"].get("devices", []):
        device["capacity"].get("shares", {}).pop("requestPolicy", None)


def drop(body: dict[str, Any]) -> None:
    body["spec"]["devices"] = body["spec"]["devices"][:1]


def double(body: dict[str, Any]) -> None:
    for device in body["spec"].get("devices", []):
        if device.get("allowMultipleAllocations"):
            device["capacity"]["memory"]["value"] = "160Gi"


@pytest.mark.parametrize("fault", [strip, strip_policies, double])
@pytest.mark.parametrize("dry_run", [False, None])
def test_shares_that_the_reply_lacks_cost_the_slice(fault: Any, dry_run: bool | None) -> None:
    with running(wanted.Undecided(reason="not yet")) as made:
        made.server.faults.inject(apiserver_faults.Mutate(fault), verb="create", dry_run=dry_run)
        made.want(NOW)
        until(lambda: made.listed() == [WHOLE, OTHER])
        made.settled()
        assert made.server.count("delete", "resourceslices") == (1 if dry_run is False else 0)
        assert (sharing(made), made.codes()) == ([], ["shares-not-kept"])


def test_what_somebody_changes_of_others_costs_nothing() -> None:
    def rename(body: dict[str, Any]) -> None:
        for device in body["spec"].get("devices", []):
            device["attributes"]["productName"] = {"string": "changed"}

    with running(wanted.Undecided(reason="not yet")) as made:
        made.server.faults.inject(apiserver_faults.Mutate(rename), verb="create")
        made.want(NOW)
        made.settled()
        assert (sharing(made), made.codes()) == ([WHOLE], ["slices-altered"])


@pytest.mark.parametrize("fault", [strip, strip_policies, double, drop])
def test_shares_that_somebody_edits_are_put_right(fault: Any) -> None:
    with running(NOW) as made:
        made.settled()
        before = made.spec()["devices"]
        made.server.edit("resourceslices", made.only_name(), fault)
        until(lambda: made.spec()["devices"] == before)


def test_beside_another_driver_a_share_that_somebody_has_stays_listed() -> None:
    rival = {
        "metadata": {"name": "rival"},
        "spec": {
            "driver": "gpu.example.com",
            "nodeName": NODE,
            "pool": {"name": NODE, "generation": 1, "resourceSliceCount": 1},
            "devices": [
                {"name": "gpu-0", "attributes": {"resource.kubernetes.io/pciBusID": {"string": "0000:1b:00.0"}}}
            ],
        },
    }
    with running(NOW) as made:
        made.settled()
        made.agent.held = {WHOLE}
        made.server.seed("resourceslices", rival)
        until(lambda: sorted(made.listed()) == ["gpu-0", f"{WHOLE}!"])
        assert sharing(made) == [WHOLE]
