# SPDX-License-Identifier: Apache-2.0
"""The validator of ResourceSlices.

Aspects: a good pool passes; each limit at its edge and one beyond; strict versions; devices beside counters; request
policies; what is unchanged on update; what the API lets pass and the scheduler does not; pools; any JSON at all.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from driver.publish import limits, syntax

Body = dict[str, Any]


def device(name: str = "gpu-0", **more: Any) -> Body:
    return {"name": name, "attributes": {"type": {"string": "gpu"}}, "capacity": {"memory": {"value": "80Gi"}}, **more}


def a_slice(*devices: Body, name: str = "00000-x", pool: Body | None = None, **spec: Any) -> Body:
    return {
        "metadata": {"name": name},
        "spec": {
            "driver": "gpu.nearfield.dev",
            "nodeName": "n1",
            "pool": {"name": "n1", "generation": 1, "resourceSliceCount": 1} | (pool or {}),
            **({"devices": list(devices)} if devices else {}),
            **spec,
        },
    }


def attributes(count: int) -> Body:
    return {f"a{index}": {"int": index} for index in range(count)}


def shareable(policy: Body, value: str = "100") -> Body:
    return device(allowMultipleAllocations=True, capacity={"c": {"value": value, "requestPolicy": policy}})


def ranged(**bounds: Any) -> Body:
    default = bounds.pop("default", "10")
    return {"default": default, "validRange": {"min": "10", "max": "100", "step": "10"} | bounds}


def counters(count: int = 1) -> Body:
    return {f"c{index}": {"value": "1"} for index in range(count)}


TAINT = {"key": "gpu.nearfield.dev/absent", "effect": "NoSchedule"}
CONSUMES = [{"counterSet": "set", "counters": counters()}]

GOOD: dict[str, Body] = {
    "no devices": a_slice(),
    "a device": a_slice(device()),
    "128 devices": a_slice(*(device(f"gpu-{index}") for index in range(128))),
    "64 devices, one tainted": a_slice(
        *(device(f"gpu-{index}", **({"taints": [TAINT]} if index == 63 else {})) for index in range(64))
    ),
    "31 attributes and a capacity": a_slice(device(attributes=attributes(31))),
    "a value of 64 bytes": a_slice(device(attributes={"a": {"string": "ä" * 32}})),
    "48 values": a_slice(device(attributes={"a": {"ints": list(range(48))}})),
    "a long list and qualified names": a_slice(
        device(attributes={"resource.kubernetes.io/pcieRoot": {"string": "pci0000:00"}})
    ),
    "16 taints": a_slice(device(taints=[TAINT] * 16)),
    "8 counter sets of 32": a_slice(
        sharedCounters=[{"name": f"s{index}", "counters": counters(32)} for index in range(8)]
    ),
    "a policy of a range": a_slice(shareable(ranged())),
    "a policy of values": a_slice(shareable({"default": "2", "validValues": ["1", "2", "3"]})),
    "an empty policy": a_slice(shareable({})),
    "a negative minimum without steps": a_slice(shareable({"default": "0", "validRange": {"min": "-1"}})),
    "fractions are rounded up without the gate": a_slice(shareable(ranged(min="9500m"))),
    "a generated name": a_slice(device()) | {"metadata": {"generateName": "00000-Any"}},
}


@pytest.mark.parametrize("name", GOOD)
def test_what_the_api_accepts_passes(name: str) -> None:
    assert limits.slice_violations(GOOD[name]) == ()


BAD: dict[str, tuple[Body, str]] = {
    "129 devices": (a_slice(*(device(f"gpu-{index}") for index in range(129))), "at most 128"),
    "65 devices, one tainted": (
        a_slice(*(device(f"gpu-{index}", **({"taints": [TAINT]} if index == 7 else {})) for index in range(65))),
        "at most 64",
    ),
    "65 devices, one with counters": (
        a_slice(*(device(f"gpu-{index}") for index in range(64)), device("gpu-64", consumesCounters=CONSUMES)),
        "at most 64",
    ),
    "65 devices, one with a list": (
        a_slice(*(device(f"gpu-{index}") for index in range(64)), device("gpu-64", attributes={"a": {"ints": [1]}})),
        "at most 64",
    ),
    "the same device twice": (a_slice(device(), device()), "Duplicate value"),
    "a device name with a dot": (a_slice(device("gpu.0")), "DNS label"),
    "a device name of 64": (a_slice(device("g" * 64)), "DNS label"),
    "32 attributes and a capacity": (a_slice(device(attributes=attributes(32))), "must not exceed 32"),
    "49 values": (a_slice(device(attributes={"a": {"ints": list(range(49))}})), "must not exceed 48"),
    "a value of 65 bytes": (a_slice(device(attributes={"a": {"string": "ä" * 32 + "x"}})), "64 bytes"),
    "an attribute without a value": (a_slice(device(attributes={"a": {}})), "exactly one value"),
    "an attribute with two": (a_slice(device(attributes={"a": {"int": 1, "string": "x"}})), "exactly one value"),
    "an empty list": (a_slice(device(attributes={"a": {"ints": []}})), "not empty"),
    "a number as text": (a_slice(device(attributes={"a": {"int": "1"}})), "must be an integer"),
    "a boolean as number": (a_slice(device(attributes={"a": {"int": True}})), "must be an integer"),
    "a number above 64 bits": (a_slice(device(attributes={"a": {"int": 2**63}})), "64 bits"),
    "leading zeros in a version": (a_slice(device(attributes={"a": {"version": "580.65.06"}})), "semver"),
    "a version of two parts": (a_slice(device(attributes={"a": {"version": "12.4"}})), "semver"),
    "a version with a v": (a_slice(device(attributes={"a": {"version": "v1.2.3"}})), "semver"),
    "a name of 33": (a_slice(device(attributes={"a" * 33: {"int": 1}})), "C identifier"),
    "a name with a dash": (a_slice(device(attributes={"a-b": {"int": 1}})), "C identifier"),
    "an empty domain": (a_slice(device(attributes={"/a": {"int": 1}})), "the domain"),
    "a domain of 64": (a_slice(device(attributes={"d" * 64 + "/a": {"int": 1}})), "the domain"),
    "17 taints": (a_slice(device(taints=[TAINT] * 17)), "at most 16"),
    "a taint without effect": (a_slice(device(taints=[{"key": "a"}])), "effect"),
    "a taint key that is no label": (a_slice(device(taints=[TAINT | {"key": "a b"}])), "label name"),
    "a taint value that is no label": (a_slice(device(taints=[TAINT | {"value": "a b"}])), "label value"),
    "devices and counters": (a_slice(device(), sharedCounters=[{"name": "s", "counters": counters()}]), "only one of"),
    "no devices and counters": (
        a_slice(sharedCounters=[{"name": "s", "counters": counters()}], devices=[]),
        "only one of",
    ),
    "9 counter sets": (
        a_slice(sharedCounters=[{"name": f"s{n}", "counters": counters()} for n in range(9)]),
        "at most 8",
    ),
    "33 counters": (a_slice(sharedCounters=[{"name": "s", "counters": counters(33)}]), "at most 32"),
    "a set without counters": (a_slice(sharedCounters=[{"name": "s", "counters": {}}]), "Required"),
    "three consumptions": (
        a_slice(device(consumesCounters=[CONSUMES[0] | {"counterSet": f"s{n}"} for n in range(3)])),
        "at most 2",
    ),
    "a policy on a device for one": (a_slice(device(capacity={"c": {"value": "1", "requestPolicy": {}}})), "Forbidden"),
    "a capacity that is no quantity": (a_slice(device(capacity={"c": {"value": "lots"}})), "not a quantity"),
    "a range and values": (
        a_slice(shareable({"default": "1", "validValues": ["1"], "validRange": {"min": "1"}})),
        "at the same time",
    ),
    "no default": (a_slice(shareable({"validRange": {"min": "1"}})), "required"),
    "no minimum": (a_slice(shareable({"default": "1", "validRange": {"max": "1"}})), "required"),
    "a default off the steps": (a_slice(shareable(ranged(default="15"))), "multiple"),
    "a maximum off the steps": (a_slice(shareable(ranged(max="95"))), "multiple"),
    "a maximum above the value": (a_slice(shareable(ranged(max="110"))), "max"),
    "one step above the value": (a_slice(shareable(ranged(min="95", max="95", default="95"))), "one step"),
    "a step of nothing": (a_slice(shareable(ranged(step="0"))), "greater than zero"),
    "a negative minimum with steps": (a_slice(shareable(ranged(min="-10"))), "between 0"),
    "values out of order": (a_slice(shareable({"default": "1", "validValues": ["2", "1"]})), "ascending"),
    "11 values": (a_slice(shareable({"default": "1", "validValues": [str(n) for n in range(1, 12)]})), "at most 10"),
    "a default that is no value": (a_slice(shareable({"default": "3", "validValues": ["1", "2"]})), "not valid"),
    "one binding condition of the pair": (a_slice(device(bindingConditions=["a"])), "need each other"),
    "no slices in the pool": (a_slice(pool={"resourceSliceCount": 0}), "at least 1"),
    "a negative generation": (a_slice(pool={"generation": -1}), "at least 0"),
    "a pool name with upper case": (a_slice(pool={"name": "N1"}), "spec.pool.name"),
    "no driver": (a_slice(driver=None), "spec.driver"),
    "a driver name of 64": (a_slice(driver="d" * 64), "spec.driver"),
    "no node": (a_slice(nodeName=None), "exactly one of"),
    "two places": (a_slice(allNodes=True), "exactly one of"),
    "a node on a device": (a_slice(device(nodeName="n1")), "perDeviceNodeSelection"),
    "an object name with upper case": (a_slice(name="X"), "metadata.name"),
    "an owner without UID": (
        a_slice() | {"metadata": {"name": "x", "ownerReferences": [{"apiVersion": "v1", "kind": "Node", "name": "n"}]}},
        "uid",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_what_the_api_refuses_is_found(name: str) -> None:
    body, words = BAD[name]
    assert any(words in violation for violation in limits.slice_violations(body)), limits.slice_violations(body)


def test_identity_does_not_change_and_unchanged_capacity_is_not_looked_at_again() -> None:
    old = a_slice(device(capacity={"c": {"value": "lots"}}, taints=[{"key": "a b"}]))
    assert limits.slice_violations(copy.deepcopy(old), old=old) == ()
    changed = copy.deepcopy(old)
    changed["spec"]["nodeName"] = "n2"
    changed["spec"]["devices"][0]["capacity"]["d"] = {"value": "1"}
    found = limits.slice_violations(changed, old=old)
    assert [violation.partition(":")[0] for violation in found] == [
        "spec.nodeName",
        "spec.devices[0].capacity[c].value",
    ]


def test_fractions_count_with_the_gate() -> None:
    body = a_slice(shareable(ranged(min="9500m")))
    assert any("multiple" in violation for violation in limits.slice_violations(body, fractions=True))


@pytest.mark.parametrize(
    ("attribute", "words"),
    [
        ({"a/b/c": {"int": 1}}, "more than one slash"),
        ({"gpu.nearfield.dev/type": {"string": "gpu"}}, "own domain"),
        ({"a": {"version": f"{2**64}.0.0"}}, "64 bits"),
    ],
)
def test_what_the_api_lets_pass_and_should_not_be_sent(attribute: Body, words: str) -> None:
    body = a_slice(device(attributes=attribute))
    assert limits.slice_violations(body) == ()
    assert any(words in violation for violation in limits.violations([body]))


def pool(*bodies: Body) -> list[Body]:
    return [
        body | {"spec": body["spec"] | {"pool": body["spec"]["pool"] | {"resourceSliceCount": len(bodies)}}}
        for body in bodies
    ]


def test_a_pool_of_devices_and_their_counters_passes() -> None:
    devices = a_slice(device(consumesCounters=CONSUMES))
    assert (
        limits.violations(
            pool(devices, a_slice(name="00001-x", sharedCounters=[{"name": "set", "counters": counters()}]))
        )
        == ()
    )


@pytest.mark.parametrize(
    ("bodies", "words"),
    [
        ([a_slice(device(consumesCounters=CONSUMES))], "no slice has"),
        (pool(a_slice(device()), a_slice(device(), name="00001-x")), "there twice"),
        ([a_slice(device()), a_slice(device("gpu-1"), name="00001-x")], "has 2 slices"),
        (
            pool(a_slice(device()), a_slice(device("gpu-1"), name="00001-x", pool={"generation": 2})),
            "generation differs",
        ),
    ],
)
def test_a_pool_the_scheduler_would_not_use_is_found(bodies: list[Body], words: str) -> None:
    assert any(words in violation for violation in limits.violations(bodies)), limits.violations(bodies)


def below_zero(*, shared: str, consumed: str) -> list[Body]:
    devices = a_slice(device(consumesCounters=[{"counterSet": "set", "counters": {"c": {"value": consumed}}}]))
    sets = [{"name": "set", "counters": {"c": {"value": shared}}}]
    return pool(devices, a_slice(name="00001-x", sharedCounters=sets))


@pytest.mark.parametrize(
    ("shared", "consumed", "words"),
    [("-1", "1", "counter set set: counter c is below zero"), ("1", "-1m", "device gpu-0: counter c is below zero")],
)
def test_a_counter_below_zero_is_never_sent(shared: str, consumed: str, words: str) -> None:
    bodies = below_zero(shared=shared, consumed=consumed)
    assert [violation for body in bodies for violation in limits.slice_violations(body)] == []
    assert limits.violations(bodies) == (words,)
    assert limits.violations(below_zero(shared="0", consumed="0")) == ()


@pytest.mark.parametrize("name", ["verdicts-1.37.2.json", "verdicts-counters-1.37.2.json"])
def test_upstream_judges_the_same(name: str) -> None:
    """Slices with random flaws and the verdict of ValidateResourceSlice in kubernetes v1.37.2, gates at their defaults."""
    cases = json.loads((Path(__file__).parent / name).read_text())
    wrong = [body for accepted, body in cases if (limits.slice_violations(body) == ()) is not accepted]
    assert wrong == []
    assert {accepted for accepted, _ in cases} == {True, False}


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
DEVICE_KEYS = [
    "name",
    "attributes",
    "capacity",
    "taints",
    "consumesCounters",
    "allowMultipleAllocations",
    "bindingConditions",
]


@settings(max_examples=80, deadline=None)
@given(
    st.dictionaries(st.sampled_from(["devices", "pool", "driver", "sharedCounters", "nodeSelector", "allNodes"]), JSON),
    st.lists(st.dictionaries(st.sampled_from(DEVICE_KEYS), JSON | st.just({"value": JSON}), max_size=4), max_size=2),
    JSON,
)
def test_any_json_is_judged_and_never_breaks_the_validator(spec: Body, devices: list[Body], metadata: Any) -> None:
    for body in ({"metadata": metadata, "spec": spec}, a_slice(*devices), spec, metadata):
        assert isinstance(limits.slice_violations(body), tuple)
        assert isinstance(limits.violations([body]), tuple)


@given(st.from_regex(r"[0-9]{1,3}\.[0-9]{1,3}\.[0-9]{1,3}", fullmatch=True))
def test_a_version_is_strict_when_no_part_has_leading_zeros(text: str) -> None:
    assert syntax.is_semver(text) is all(part == str(int(part)) for part in text.split("."))
