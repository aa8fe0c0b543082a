# SPDX-License-Identifier: Apache-2.0
"""Desired slices, and the writes that lead to them.

Aspects: layout and bodies; names; nothing to do; one change keeps the generation, more raise it; deletions first;
counting on from the highest; times of taints carried over; foreign edits; other spellings of the same; names taken;
lost fields; any sequence of changes ends in a complete pool and then in silence.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from driver.publish import devices, limits, slices, syntax
from tests.fakes import publishing

PLACE = slices.Place(driver_name="gpu.nearfield.dev", node_name="node-1", node_uid="node-uid")
Body = dict[str, Any]


def device(number: int, *, absent: bool = False, product: str = "H100") -> devices.Device:
    return devices.Device(
        name=f"gpu-{number:04}",
        address=publishing.at(number % 256),
        attributes={"type": "gpu", "productName": product, "driverVersion": devices.Version("580.65.6")},
        capacity={"memory": 80 << 30, "compute": 100},
        absent=absent,
    )


def many(count: int) -> list[devices.Device]:
    return [device(number) for number in range(count)]


class Server:
    """Does what it is told, at once; counts."""

    def __init__(self) -> None:
        self.stored: dict[str, Body] = {}
        self.log: list[str] = []
        self.complete_between = True
        self._version = itertools.count(1)

    def standing(self) -> list[Body]:
        return [copy.deepcopy(self.stored[name]) for name in sorted(self.stored)]

    def do(self, plan: slices.Plan) -> None:
        for action in plan.actions:
            match action:
                case slices.Delete(name, uid, version, _):
                    found = self.stored.pop(name)["metadata"]
                    assert (found["uid"], found["resourceVersion"]) == (uid, version)
                    self.log.append("delete")
                case slices.Create(body):
                    assert body["metadata"]["name"] not in self.stored
                    self._store(body, uid=f"uid-{next(self._version)}")
                    self.log.append("create")
                case slices.Replace(body):
                    before = self.stored[body["metadata"]["name"]]["metadata"]
                    assert body["metadata"]["resourceVersion"] == before["resourceVersion"]
                    self._store(body, uid=before["uid"])
                    self.log.append("replace")

    def _store(self, body: Body, *, uid: str) -> None:
        stored = copy.deepcopy(body)
        stored["metadata"] |= {"uid": uid, "resourceVersion": str(next(self._version))}
        for entry in stored["spec"].get("devices", []):
            for taint in entry.get("taints", []):
                taint.setdefault("timeAdded", "2026-01-01T00:00:00Z")
        self.stored[stored["metadata"]["name"]] = stored

    def publish(self, offered: Sequence[devices.Device] | None, **more: Any) -> list[str]:
        self.log = []
        self.do(slices.plan(offered, self.standing(), place=PLACE, **more))
        return self.log

    def generations(self) -> set[int]:
        return {body["spec"]["pool"]["generation"] for body in self.standing()}


def test_a_slice_is_spelled_as_the_api_wants_it() -> None:
    (body,) = slices.build_slices([device(1, absent=True)], place=PLACE)
    name = body["metadata"].pop("name")
    assert name.startswith("00000-gpu.nearfield.dev-node-1-")
    assert body == {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceSlice",
        "metadata": {
            "ownerReferences": [
                {"apiVersion": "v1", "kind": "Node", "name": "node-1", "uid": "node-uid", "controller": True}
            ]
        },
        "spec": {
            "driver": "gpu.nearfield.dev",
            "nodeName": "node-1",
            "pool": {"name": "node-1", "generation": 1, "resourceSliceCount": 1},
            "devices": [
                {
                    "name": "gpu-0001",
                    "attributes": {
                        "driverVersion": {"version": "580.65.6"},
                        "productName": {"string": "H100"},
                        "type": {"string": "gpu"},
                    },
                    "capacity": {"compute": {"value": "100"}, "memory": {"value": "80Gi"}},
                    "taints": [{"key": "gpu.nearfield.dev/absent", "effect": "NoSchedule"}],
                }
            ],
        },
    }


@pytest.mark.parametrize(("count", "sizes"), [(0, [0]), (1, [1]), (64, [64]), (65, [64, 1]), (200, [64, 64, 64, 8])])
def test_slices_hold_64_devices_in_order(count: int, sizes: list[int]) -> None:
    bodies = slices.build_slices(many(count), place=PLACE)
    assert [len(body["spec"].get("devices", [])) for body in bodies] == sizes
    assert [entry["name"] for body in bodies for entry in body["spec"].get("devices", [])] == publishing.names(
        many(count)
    )
    assert [body["metadata"]["name"] for body in bodies] == sorted(body["metadata"]["name"] for body in bodies)
    assert limits.violations(bodies) == ()


def test_an_empty_pool_has_no_device_list_and_no_owner_where_the_node_is_unknown() -> None:
    (body,) = slices.build_slices((), place=replace(PLACE, node_uid=None))
    assert "devices" not in body["spec"]
    assert set(body["metadata"]) == {"name"}


NAME = st.from_regex(r"[a-z0-9]([a-z0-9.-]{0,60}[a-z0-9])?", fullmatch=True).filter(syntax.is_subdomain)


@given(NAME, st.lists(NAME, min_size=1, max_size=4), st.integers(0, 500))
def test_names_are_valid_and_tell_nodes_and_drivers_apart(driver: str, parts: list[str], index: int) -> None:
    node = ".".join(parts)
    name = slices.slice_name(index, place=slices.Place(driver_name=driver, node_name=node))
    assert syntax.is_subdomain(name)
    assert name.startswith(f"{index:05x}-")
    run_together = slices.Place(driver_name=f"{driver}-{parts[0]}", node_name=".".join(parts[1:]) or "x")
    assert name != slices.slice_name(index, place=run_together)
    assert name != slices.slice_name(index, place=slices.Place(driver_name=driver, node_name=node), salt=1)


def test_nothing_is_written_when_everything_stands() -> None:
    server = Server()
    assert server.publish(many(70)) == ["create", "create"]
    assert server.publish(many(70)) == []
    assert server.generations() == {1}


def test_one_changed_slice_keeps_the_generation() -> None:
    server = Server()
    server.publish(many(70))
    changed = [device(3, product="H200") if number == 3 else device(number) for number in range(70)]
    assert server.publish(changed) == ["replace"]
    assert server.generations() == {1}


def test_two_changed_slices_raise_it_everywhere() -> None:
    server = Server()
    server.publish(many(130))
    changed = [device(number, product="H200") if number in {3, 70} else device(number) for number in range(130)]
    assert server.publish(changed) == ["replace", "replace", "replace"]
    assert server.generations() == {2}


def test_a_new_slice_raises_it_and_is_written_last() -> None:
    server = Server()
    server.publish(many(64))
    assert server.publish(many(65)) == ["replace", "create"]
    assert server.generations() == {2}


def test_a_slice_too_many_goes_first_and_one_rewrite_keeps_the_generation() -> None:
    server = Server()
    server.publish(many(65))
    assert server.publish(many(64)) == ["delete", "replace"]
    assert server.generations() == {1}
    assert server.publish(None) == ["delete"]
    assert server.publish(None) == []


def test_generations_go_on_from_the_highest_ever_seen() -> None:
    server = Server()
    server.publish(many(1), seen_generation=41)
    assert server.generations() == {42}
    server.stored.clear()
    server.publish(many(1))
    assert server.generations() == {1}


def test_a_generation_nothing_can_follow_is_deleted() -> None:
    server = Server()
    server.publish(many(1))
    (body,) = server.stored.values()
    body["spec"]["pool"]["generation"] = 2**63 - 1
    assert server.publish(many(1)) == ["delete", "create"]
    assert server.generations() == {1}


def edit_product(body: Body) -> None:
    body["spec"]["devices"][0]["attributes"]["productName"] = {"string": "other"}


def drop_device(body: Body) -> None:
    del body["spec"]["devices"][0]


def reorder(body: Body) -> None:
    body["spec"]["devices"].reverse()


def add_taint(body: Body) -> None:
    body["spec"]["devices"][0]["taints"] = [{"key": "a", "effect": "NoExecute"}]


def drop_owner(body: Body) -> None:
    del body["metadata"]["ownerReferences"]


def other_count(body: Body) -> None:
    body["spec"]["pool"]["resourceSliceCount"] = 7


@pytest.mark.parametrize("edit", [edit_product, drop_device, reorder, add_taint, drop_owner, other_count])
def test_an_edited_slice_is_put_right_by_one_write(edit: Any) -> None:
    server = Server()
    server.publish(many(2))
    right = copy.deepcopy(server.standing()[0])
    edit(next(iter(server.stored.values())))
    assert server.publish(many(2)) == ["replace"]
    (stored,) = server.standing()
    stored["metadata"].pop("resourceVersion")
    right["metadata"].pop("resourceVersion")
    assert stored == right


def respell_quantities(body: Body) -> None:
    body["spec"]["devices"][0]["capacity"] = {"memory": {"value": "85899345920"}, "compute": {"value": "0.1k"}}


def respell_nothing(body: Body) -> None:
    body["spec"]["devices"][0] |= {"taints": [], "consumesCounters": None}
    body["spec"]["sharedCounters"] = None


def labels_of_others(body: Body) -> None:
    body["metadata"] |= {"labels": {"a": "b"}, "annotations": {"c": "d"}, "generation": 7, "managedFields": [{}]}


@pytest.mark.parametrize("edit", [respell_quantities, respell_nothing, labels_of_others])
def test_another_spelling_of_the_same_is_no_change(edit: Any) -> None:
    server = Server()
    server.publish(many(2))
    edit(next(iter(server.stored.values())))
    assert server.publish(many(2)) == []


def test_what_others_put_on_a_slice_stays_when_it_is_written() -> None:
    server = Server()
    server.publish(many(2))
    labels_of_others(next(iter(server.stored.values())))
    server.publish(many(1))
    (stored,) = server.standing()
    assert stored["metadata"]["labels"] == {"a": "b"}


def test_a_taint_keeps_the_time_it_was_added() -> None:
    server = Server()
    server.publish([device(0, absent=True), device(1)])
    taint = next(iter(server.stored.values()))["spec"]["devices"][0]["taints"][0]
    taint["timeAdded"] = "2026-01-02T03:04:05Z"
    assert server.publish([device(0, absent=True), device(1)]) == []
    assert server.publish([device(0, absent=True), device(1, product="H200")]) == ["replace"]
    (body,) = server.standing()
    assert body["spec"]["devices"][0]["taints"][0]["timeAdded"] == "2026-01-02T03:04:05Z"


def test_the_same_moment_may_be_spelled_otherwise() -> None:
    server = Server()
    server.publish([device(0, absent=True)])
    (body,) = server.standing()
    sent = copy.deepcopy(body)
    sent["spec"]["devices"][0]["taints"][0]["timeAdded"] = "2026-01-01T01:00:00.25+01:00"
    assert slices.lost_fields(sent, body) == ()


@pytest.mark.parametrize(
    "foreign",
    [
        {"metadata": {"name": "00000-random-x7k2p", "uid": "u", "resourceVersion": "9"}},
        {"metadata": {"name": "aaa", "uid": "u", "resourceVersion": "9"}},
    ],
)
def test_a_slice_of_ours_that_does_not_belong_is_deleted(foreign: Body) -> None:
    server = Server()
    server.publish(many(1))
    stray = copy.deepcopy(server.standing()[0]) | foreign
    stray["spec"]["pool"]["generation"] = 9
    server.stored[stray["metadata"]["name"]] = stray
    assert server.publish(many(1)) == ["delete", "replace"]
    assert server.generations() == {9}


def test_a_slice_of_an_older_pool_name_is_deleted() -> None:
    server = Server()
    server.publish(many(1))
    next(iter(server.stored.values()))["spec"]["pool"]["name"] = "other"
    assert server.publish(many(1)) == ["delete", "create"]


def test_with_a_salt_the_pool_has_other_names() -> None:
    server = Server()
    server.publish(many(1))
    before = set(server.stored)
    assert server.publish(many(1), salt=1) == ["delete", "create"]
    assert not before & set(server.stored)


def test_a_difference_that_the_server_makes_again_is_accepted() -> None:
    server = Server()
    server.publish(many(2))
    edit_product(next(iter(server.stored.values())))
    assert server.publish(many(2), accepts=lambda _wanted, _stored: True) == []


def test_lost_fields_are_named() -> None:
    (sent,) = slices.build_slices([device(0, absent=True), device(1)], place=PLACE)
    stored = copy.deepcopy(sent)
    del stored["spec"]["devices"][0]["taints"]
    stored["spec"]["devices"][1]["attributes"]["type"]["string"] = "x"
    stored["spec"]["new"] = 1
    assert slices.lost_fields(sent, stored) == ("devices[0].taints", "devices[1].attributes.type.string", "new")
    tainted = copy.deepcopy(sent)
    tainted["spec"]["devices"][0]["taints"][0]["timeAdded"] = "2026-01-01T00:00:00Z"
    assert slices.lost_fields(sent, tainted) == ()


@pytest.mark.parametrize(
    "body",
    [{}, {"spec": None}, {"spec": {"driver": "gpu.nearfield.dev"}}, {"spec": {"driver": "x", "nodeName": "node-1"}}],
)
def test_slices_of_others_are_not_ours(body: Body) -> None:
    assert not slices.is_ours(body, place=PLACE)


WISH = st.none() | st.lists(
    st.tuples(st.integers(0, 140), st.booleans(), st.sampled_from(["H100", "H200"])),
    max_size=140,
    unique_by=lambda it: it[0],
)
SABOTAGE = st.sampled_from(["none", "delete one", "delete all", "edit", "stray"])


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(WISH, SABOTAGE), max_size=5))
def test_any_history_ends_in_the_wanted_pool_and_then_in_silence(history: list[tuple[Any, str]]) -> None:
    server = Server()
    seen = 0
    for wish, sabotage in history:
        offered = (
            [device(number, absent=absent, product=product) for number, absent, product in wish]
            if wish is not None
            else None
        )
        server.publish(offered, seen_generation=seen)
        highest = slices.highest_generation(server.standing())
        assert not server.stored or highest >= seen
        seen = max(seen, highest)
        assert server.publish(offered, seen_generation=seen) == []
        assert limits.violations(server.standing()) == ()
        listed = [entry["name"] for body in server.standing() for entry in body["spec"].get("devices", [])]
        assert listed == publishing.names(offered or [])
        assert bool(server.stored) is (offered is not None)
        first = next(iter(server.stored), None)
        if first is not None and sabotage == "delete one":
            del server.stored[first]
        elif sabotage == "delete all":
            server.stored.clear()
        elif first is not None and sabotage == "edit":
            server.stored[first]["spec"]["pool"]["generation"] += 3
        elif first is not None and sabotage == "stray":
            stray = copy.deepcopy(server.stored[first])
            stray["metadata"] |= {"name": "zzz", "uid": "stray"}
            server.stored["zzz"] = stray


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
TAINTED = st.fixed_dictionaries({"name": ANYTHING, "taints": st.lists(ANYTHING | st.just({"key": "k"}), max_size=2)})


@settings(max_examples=100, deadline=None)
@given(
    st.fixed_dictionaries(
        {}, optional={"devices": ANYTHING | st.lists(TAINTED | ANYTHING, max_size=3), "pool": ANYTHING}
    ),
    st.fixed_dictionaries({}, optional={"ownerReferences": ANYTHING, "labels": ANYTHING}),
)
def test_whatever_stands_under_our_name_is_put_right(spec: Body, metadata: Body) -> None:
    server = Server()
    name = slices.slice_name(0, place=PLACE)
    identity = {"driver": PLACE.driver_name, "nodeName": PLACE.node_name}
    server.stored[name] = {
        "metadata": metadata | {"name": name, "uid": "u", "resourceVersion": "0"},
        "spec": spec | identity,
    }
    server.publish(many(2))
    assert server.publish(many(2)) == []
    assert [entry["name"] for entry in server.standing()[0]["spec"]["devices"]] == publishing.names(many(2))
