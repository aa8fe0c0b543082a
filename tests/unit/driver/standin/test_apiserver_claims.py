# SPDX-License-Identifier: Apache-2.0
"""What the stand-in API server checks of claims: requests, allocations, reservations, shares; what an older one drops; any JSON at all."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from driver.standin import apiserver_claims as claims
from driver.standin import apiserver_gates as gates

Body = dict[str, Any]

EXACT = {"deviceClassName": "gpu.nearfield.dev"}


def claim(*requests: Any) -> Body:
    return {"spec": {"devices": {"requests": list(requests)}}}


def request(name: str = "gpu", **more: Any) -> Body:
    return {"name": name, **(more or {"exactly": EXACT})}


GOOD = [
    {"spec": {"devices": {}}},
    claim(request()),
    claim(request("a"), request("b", firstAvailable=[{"name": "x", **EXACT}])),
    claim(*(request(f"r{index}") for index in range(32))),
]


@pytest.mark.parametrize("body", GOOD)
def test_a_good_claim_passes(body: Body) -> None:
    assert claims.claim_violations(body, None) == ()


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({}, "spec.devices"),
        ({"spec": {"devices": {"requests": {}}}}, "must be a list"),
        (claim(*(request(f"r{index}") for index in range(33))), "at most 32"),
        (claim(None), "must be an object"),
        (claim(request("Not_A_Label")), "DNS label"),
        (claim(request(), request()), "Duplicate"),
        (claim(request("a", exactly=EXACT, firstAvailable=[EXACT])), "exactly one of"),
        (claim(request("a", exactly=None)), "exactly one of"),
        (claim(request("a", exactly={})), "deviceClassName"),
        (claim(request("a", exactly=[])), "must be an object"),
        (claim(request("a", exactly=EXACT | {"capacity": []})), "capacity: must be an object"),
        (claim(request("a", exactly=EXACT | {"capacity": {"requests": []}})), "requests: must be an object"),
        (claim(request("a", exactly=EXACT | {"capacity": {"requests": {"memory": "x"}}})), "requests[memory]"),
        (claim(request("a", firstAvailable=[EXACT] * 9)), "at most 8"),
        (claim(request("a", firstAvailable=[{}])), "firstAvailable[0].deviceClassName"),
    ],
)
def test_a_wrong_claim_is_refused(body: Body, words: str) -> None:
    assert any(words in violation for violation in claims.claim_violations(body, None))


def test_the_spec_is_immutable() -> None:
    assert claims.claim_violations(claim(), claim()) == ()
    assert claims.claim_violations(claim(request()), claim()) == ("spec: field is immutable",)


CLAIM = claim(request(), request("many", firstAvailable=[{"name": "big", **EXACT}]))
RESULT = {"request": "gpu", "driver": "gpu.nearfield.dev", "pool": "n1", "device": "gpu-0"}


def status(*results: Any, config: Any = (), **more: Any) -> Body:
    return {"allocation": {"devices": {"results": list(results), "config": list(config)}}} | more


SHARE = "a671734a-e8e5-11e4-8fde-42010af09327"
POD = {"resource": "pods", "name": "p", "uid": "u"}


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"allocation": {}},
        status(RESULT, reservedFor=[POD]),
        status(RESULT | {"request": "many/big"}),
        status(RESULT | {"shareID": SHARE, "consumedCapacity": {"memory": "20Gi", "compute": "25"}}),
        status(RESULT, config=[{"source": "FromClaim", "opaque": {"driver": "d", "parameters": {"a": 1}}}]),
    ],
)
def test_a_good_status_passes(given: Body) -> None:
    assert claims.status_violations(CLAIM | {"status": given}, CLAIM) == ()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ([], "status"),
        ({"reservedFor": [POD]}, "Forbidden"),
        (status(reservedFor="x"), "must be a list"),
        (status(reservedFor=[{}]), "resource, name and uid"),
        (status(*[RESULT] * 33), "at most 32"),
        (status(None), "must be an object"),
        (status(RESULT | {"request": "other"}), "name of a request"),
        (status(RESULT | {"driver": None}), "driver"),
        (status(RESULT | {"pool": ""}), "pool"),
        (status(RESULT | {"device": "a.b"}), "device"),
        (status(RESULT | {"shareID": "A671734A-E8E5-11E4-8FDE-42010AF09327"}), "shareID"),
        (status(RESULT | {"shareID": 1}), "shareID"),
        (status(RESULT | {"consumedCapacity": []}), "must be an object"),
        (status(RESULT | {"consumedCapacity": {"memory": None}}), "consumedCapacity[memory]"),
        ({"allocation": {"devices": []}}, "must be an object"),
        (status(config=[{}] * 65), "at most 64"),
        (status(config=[{"source": "x"}]), "FromClass or FromClaim"),
        (status(config=[{"source": "FromClass"}]), "opaque"),
        (status(config=[{"source": "FromClass", "opaque": {"parameters": []}}]), "JSON object"),
        (status(config=[{"source": "FromClass", "opaque": {"parameters": {"a": "x" * 10241}}}]), "Too long"),
    ],
)
def test_a_wrong_status_is_refused(given: Any, words: str) -> None:
    found = claims.status_violations(CLAIM | {"status": given}, CLAIM)
    if given == []:
        assert found == ()
    else:
        assert any(words in violation for violation in found), found


def test_an_allocation_is_immutable_until_it_is_taken_away() -> None:
    allocated = CLAIM | {"status": status(RESULT)}
    other = CLAIM | {"status": status(RESULT | {"device": "gpu-1"})}
    assert claims.status_violations(other, allocated) == ("status.allocation: field is immutable",)
    assert claims.status_violations(allocated, allocated) == ()
    assert claims.status_violations(CLAIM | {"status": {}}, allocated) == ()


ASKED = {"requests": {"memory": "20Gi"}}
SHARING = claim(
    request(exactly=EXACT | {"capacity": ASKED}),
    request("many", firstAvailable=[{"name": "big", "capacity": ASKED, **EXACT}]),
)
SHARING["spec"]["devices"]["constraints"] = [{"requests": ["gpu"], "distinctAttribute": "gpu.nearfield.dev/uuid"}]
GIVEN = status(RESULT | {"shareID": SHARE, "consumedCapacity": {"memory": "20Gi"}}, devices=[{"shareID": SHARE}])


def without_portions(*, version: str) -> tuple[Body, Body]:
    """What a server of a version makes of a claim for a share, and of its status."""
    on = gates.gates(version, {})
    asked, given_one = copy.deepcopy(SHARING), copy.deepcopy(GIVEN)
    gates.drop_disabled_of_claim(asked["spec"], None, on)
    gates.drop_disabled_of_status(given_one, asked, on)
    return asked, given_one


def test_an_older_server_drops_what_a_claim_asks_and_has_of_a_device() -> None:
    assert without_portions(version="1.36") == (SHARING, GIVEN)
    asked, given_one = without_portions(version="1.35")
    bare = claim(request(), request("many", firstAvailable=[{"name": "big", **EXACT}]))
    bare["spec"]["devices"]["constraints"] = [{"requests": ["gpu"]}]
    assert asked == bare
    assert given_one == status(RESULT, devices=[{}])


@pytest.mark.parametrize(
    "old", [SHARING, CLAIM | {"status": status(RESULT | {"shareID": SHARE})}, CLAIM | {"status": GIVEN}]
)
def test_what_is_in_use_stays(old: Body) -> None:
    kept = copy.deepcopy(GIVEN)
    gates.drop_disabled_of_status(kept, old, gates.gates("1.35", {}))
    assert kept == GIVEN
    asked = copy.deepcopy(SHARING["spec"])
    gates.drop_disabled_of_claim(asked, SHARING["spec"], gates.gates("1.35", {}))
    assert asked == SHARING["spec"]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=100, deadline=None)
@given(JSON, JSON, st.lists(JSON, max_size=2), st.lists(JSON, max_size=2))
def test_any_json_is_judged(spec: Any, given_status: Any, requests: list[Any], results: list[Any]) -> None:
    for body in ({"spec": spec}, claim(*requests)):
        assert isinstance(claims.claim_violations(body, None), tuple)
    for given_one in (given_status, status(*results)):
        gates.drop_disabled_of_claim(spec, given_status, gates.gates("1.35", {}))
        gates.drop_disabled_of_status(given_one, {"spec": spec, "status": results}, gates.gates("1.35", {}))
        assert isinstance(claims.status_violations(CLAIM | {"status": given_one}, CLAIM), tuple)
