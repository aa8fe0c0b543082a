# SPDX-License-Identifier: Apache-2.0
"""Devices that vanish: who stays listed, where, and what is kept of them.

Aspects: held and not held; place in the order; coming back; names of NICs that moved away; the record's form, whole and
damaged; what a claim holds.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from driver.publish import absent, devices
from tests.fakes import publishing


def device(bus: int, **attributes: devices.AttributeValue) -> devices.Device:
    always: dict[str, devices.AttributeValue] = {"type": "gpu", "version": devices.Version("1.2.3")}
    return devices.Device(
        name=f"gpu-{bus}",
        address=publishing.at(bus),
        attributes=always | attributes,
        capacity={"memory": (80 << 30) + bus, "compute": 100},
    )


def published(*buses: int) -> dict[str, devices.Device]:
    return {f"gpu-{bus}": device(bus) for bus in buses}


def listed(merged: tuple[devices.Device, ...]) -> list[str]:
    return [f"{device.name}{'!' if device.absent else ''}" for device in merged]


@pytest.mark.parametrize(
    ("ready", "held_names", "expected"),
    [
        ([1, 2, 3], [], ["gpu-1", "gpu-2", "gpu-3"]),
        ([1, 3], [], ["gpu-1", "gpu-3"]),
        ([1, 3], ["gpu-2"], ["gpu-1", "gpu-2!", "gpu-3"]),
        ([2, 3], ["gpu-1"], ["gpu-1!", "gpu-2", "gpu-3"]),
        ([1], ["gpu-2", "gpu-3"], ["gpu-1", "gpu-2!", "gpu-3!"]),
        ([], ["gpu-3", "gpu-1"], ["gpu-1!", "gpu-3!"]),
        ([4, 1], ["gpu-3"], ["gpu-4", "gpu-1", "gpu-3!"]),
    ],
)
def test_a_missing_device_that_is_held_keeps_its_place(
    ready: list[int], held_names: list[str], expected: list[str]
) -> None:
    merged = absent.merge([device(bus) for bus in ready], published(1, 2, 3), held=held_names)
    assert listed(merged) == expected


def test_only_what_was_published_can_be_missing() -> None:
    assert absent.missing([device(1), device(4)], published(1, 2)) == {"gpu-2"}


def test_a_nic_that_moved_into_a_pod_keeps_the_name_it_had() -> None:
    before = device(1, nic="mlx5_0", nicPciBusID="0000:18:00.0")
    gone = device(1, nicPciBusID="0000:18:00.0")
    other = device(1, nicPciBusID="0000:19:00.0")
    named = device(1, nic="mlx5_9", nicPciBusID="0000:18:00.0")
    assert absent.remember(gone, before) == before
    assert absent.remember(other, before) == other
    assert absent.remember(named, before) == named
    assert absent.remember(gone, None) == gone
    assert absent.merge([gone], {"gpu-1": before}, held=()) == (before,)


def test_an_interface_that_is_left_does_not_take_the_name_of_the_rdma_device_that_moved() -> None:
    rdma = replace(device(1, nic="mlx5_0", nicPciBusID="0000:18:00.0"), nic_is_rdma=True)
    interface = device(1, nic="eth2", nicPciBusID="0000:18:00.0")
    elsewhere = device(1, nic="eth2", nicPciBusID="0000:19:00.0")
    another = replace(device(1, nic="mlx5_9", nicPciBusID="0000:18:00.0"), nic_is_rdma=True)
    assert absent.remember(interface, rdma) == rdma
    assert absent.remember(elsewhere, rdma) == elsewhere
    assert absent.remember(another, rdma) == another
    assert absent.remember(rdma, interface) == rdma
    again, wrong = absent.from_json(absent.to_json({"gpu-1": absent.remember(interface, rdma)}))
    assert (again, wrong) == ({"gpu-1": rdma}, ())


VALUES: st.SearchStrategy[devices.AttributeValue] = st.one_of(
    st.booleans(),
    st.integers(),
    st.text(),
    st.just(devices.Version("1.0.0")),
    st.lists(st.integers(), min_size=1, max_size=3).map(tuple),
    st.lists(st.text(), min_size=1, max_size=3).map(tuple),
)


@given(st.lists(st.dictionaries(st.text(max_size=5), VALUES, max_size=4), max_size=4))
def test_what_was_published_comes_back_from_the_record_in_order(
    attributes: list[dict[str, devices.AttributeValue]],
) -> None:
    kept = {
        f"gpu-{bus}": devices.Device(
            name=f"gpu-{bus}", address=publishing.at(bus), attributes=values, capacity={"memory": bus << 30}
        )
        for bus, values in reversed(list(enumerate(attributes)))
    }
    body = absent.to_json(kept)
    read, wrong = absent.from_json(dict(sorted(body.items())))
    assert (list(read.items()), wrong) == (list(kept.items()), ())


GOOD: dict[str, Any] = {"address": "0000:01:00.0", "attributes": {"a": {"int": 1}}, "capacity": {"c": {"value": "1"}}}


@pytest.mark.parametrize(
    "entry",
    [
        None,
        [],
        {},
        GOOD | {"address": "nowhere"},
        GOOD | {"attributes": {"a": {}}},
        GOOD | {"attributes": {"a": {"int": "1"}}},
        GOOD | {"attributes": {"a": {"ints": []}}},
        GOOD | {"attributes": []},
        GOOD | {"capacity": {"c": {"value": "lots"}}},
        GOOD | {"capacity": {"c": 1}},
    ],
)
def test_a_damaged_entry_is_left_out_and_hides_no_other(entry: Any) -> None:
    read, wrong = absent.from_json({"bad": entry, "good": GOOD})
    assert list(read) == ["good"]
    assert len(wrong) == 1
    assert "bad" in wrong[0]


def claim(*results: Any) -> dict[str, Any]:
    return {"status": {"allocation": {"devices": {"results": list(results)}}}}


def result(name: str, **more: Any) -> dict[str, Any]:
    return {"driver": "gpu.nearfield.dev", "pool": "n1", "device": name} | more


def test_a_claim_holds_what_its_allocation_names_here() -> None:
    body = claim(result("a"), result("b", pool="n2"), result("c", driver="x"), result("d", adminAccess=True), None, "e")
    assert absent.held_by(body, driver_name="gpu.nearfield.dev", pool="n1") == {"a"}


@pytest.mark.parametrize(
    "body",
    [{}, {"status": None}, {"status": {"allocation": 7}}, {"status": {"allocation": {"devices": {"results": {}}}}}],
)
def test_a_claim_without_an_allocation_holds_nothing(body: dict[str, Any]) -> None:
    assert absent.held_by(body, driver_name="gpu.nearfield.dev", pool="n1") == frozenset()
