# SPDX-License-Identifier: Apache-2.0
"""claims: what is read of a ResourceClaim, and what is refused. Aspects: allocation, other drivers, names, shares,
configuration, hostile input.
"""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from driver.errors import ClaimError
from driver.prepare import claimconfig, claims, ledger
from tests.fakes import preparing

REF = preparing.ref(1)
GPU = preparing.NAMES[0]
OTHER = "dra.net"


def parse(document: Any) -> claims.Allocation:
    return claims.parse_allocation(document, ref=REF, driver=preparing.DRIVER, pool=preparing.POOL)


def opaque(
    parameters: Any, *, driver: str = preparing.DRIVER, requests: Any = None, source: str = "FromClaim"
) -> dict[str, Any]:
    return {"source": source, "requests": requests, "opaque": {"driver": driver, "parameters": parameters}}


def test_results_of_this_driver_are_read_in_order_and_others_are_ignored() -> None:
    document = preparing.claim(
        REF,
        [
            preparing.result("nic-0", request="nic", driver=OTHER, pool="elsewhere"),
            preparing.result(preparing.NAMES[1], request="pair/near"),
            preparing.result(
                GPU,
                request="share",
                shareID="6b4d7f0a-5b2e-4d51-9c9f-0d3f3f6e8f11",
                consumedCapacity={"memory": "20Gi", "compute": "25"},
            ),
            preparing.result(GPU, request="watch", adminAccess=True),
        ],
    )
    assert parse(document) == claims.Allocation(
        claim=REF,
        results=(
            ledger.Result(request="pair/near", pool=preparing.POOL, device=preparing.NAMES[1]),
            ledger.Result(
                request="share",
                pool=preparing.POOL,
                device=GPU,
                share_id="6b4d7f0a-5b2e-4d51-9c9f-0d3f3f6e8f11",
                consumed_capacity={"memory": "20Gi", "compute": "25"},
            ),
            ledger.Result(request="watch", pool=preparing.POOL, device=GPU, admin=True),
        ),
        unasked=frozenset({"gpu"}),
    )


SHARE = preparing.share(GPU, preparing.share_id(1))


def shared(
    *, reserved: Any = None, requests: Any = None, results: Any = (SHARE,), config: Any = ()
) -> claims.Allocation:
    document = preparing.claim(REF, results, config=config)
    if reserved is not None:
        document["status"]["reservedFor"] = reserved
    if requests is not None:
        document["spec"]["devices"]["requests"] = requests
    return parse(document)


def test_for_whom_a_share_is_reserved_is_read() -> None:
    group = {"apiGroup": "scheduling.k8s.io", "resource": "podgroups", "name": "crew", "uid": "77-a"}
    odd = {"apiGroup": "example.com", "resource": "pods", "name": "odd", "uid": "88-b"}
    found = shared(reserved=[preparing.pod(1), group, odd]).consumers
    assert [(consumer.kind, consumer.name, consumer.pod) for consumer in found] == [
        ("pods", "pod-1", True),
        ("podgroups", "crew", False),
        ("pods", "odd", False),
    ]
    assert found[0].uid == preparing.pod(1)["uid"]
    assert shared().consumers == ()


@pytest.mark.parametrize(
    "reserved",
    [
        {"pods": []},
        [7],
        [{"resource": "pods", "name": "a"}],
        [{**preparing.pod(1), "uid": "../../../etc"}],
        [{**preparing.pod(1), "uid": "a/b"}],
        [{**preparing.pod(1), "name": ""}],
        [{**preparing.pod(1), "resource": 5}],
        [preparing.pod(1)] * 257,
    ],
)
def test_hostile_reservations_of_a_share_are_refused(reserved: Any) -> None:
    with pytest.raises(ClaimError):
        shared(reserved=reserved)
    # What is not shared does not ask for whom it is.
    assert shared(reserved=reserved, results=[preparing.result(GPU)]).consumers == ()
    assert shared(reserved=reserved, results=[{**SHARE, "adminAccess": True}]).consumers == ()


def test_which_requests_named_no_amount_of_compute_is_read() -> None:
    def asking(**requests: str) -> dict[str, Any]:
        return {"deviceClassName": "share", "capacity": {"requests": requests}}

    found = shared(
        requests=[
            {"name": "a", "exactly": asking(memory="20Gi", compute="25")},
            {"name": "b", "exactly": asking(memory="20Gi")},
            {"name": "c", "exactly": {"deviceClassName": "share"}},
            {
                "name": "d",
                "firstAvailable": [{"name": "x", **asking(compute="5")}, {"name": "y", **asking(memory="1Gi")}],
            },
        ]
    )
    assert found.unasked == {"b", "c", "d/y"}


@pytest.mark.parametrize("requests", [7, [7], [{"name": 7}], [{"name": "a", "exactly": []}], [{"name": "a"}] * 33])
def test_hostile_requests_of_a_share_are_refused(requests: Any) -> None:
    with pytest.raises(ClaimError):
        shared(requests=requests)
    assert shared(requests=requests, results=[preparing.result(GPU)]).unasked == frozenset()


def test_each_result_has_the_strictest_of_the_configuration_that_is_for_it() -> None:
    def config(percent: int, **more: Any) -> dict[str, Any]:
        parameters = {"apiVersion": claimconfig.API_VERSION, "kind": claimconfig.KIND, "compute": {"limit": percent}}
        return opaque(parameters, **more)

    results = [
        preparing.share(GPU, preparing.share_id(1), request="a"),
        preparing.share(GPU, preparing.share_id(2), request="b/x"),
        preparing.share(GPU, preparing.share_id(3), request="c"),
    ]
    found = shared(
        results=results,
        config=[
            config(20, source="FromClass"),
            config(10, requests=["a"]),
            config(15, requests=["b"]),
            config(5, requests=["b/y"]),
            config(30, requests=["c"]),
            opaque({"anything": 1}, driver=OTHER),
        ],
    )
    assert [found.config(number).compute_limit for number in range(3)] == [10, 15, 20]
    assert shared().config(0) == claimconfig.NOTHING


def _without(document: dict[str, Any], *path: str) -> dict[str, Any]:
    changed = copy.deepcopy(document)
    place = changed
    for key in path[:-1]:
        place = place[key]
    del place[path[-1]]
    return changed


def _with(value: Any, *path: str | int) -> dict[str, Any]:
    changed: Any = preparing.claim(REF, [preparing.result(GPU)])
    place = changed
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return changed  # type: ignore[no-any-return]


RESULTS = ("status", "allocation", "devices", "results")


@pytest.mark.parametrize(
    ("document", "expected"),
    [
        (_with("other-uid", "metadata", "uid"), "was deleted and made again with UID 'other-uid'"),
        (_with(None, "metadata", "uid"), "metadata.uid is missing, not text"),
        (_with(None, "metadata"), "metadata is missing, not an object"),
        (_with(None, "status"), "is not allocated"),
        (_with({}, "status"), "is not allocated"),
        (_with(None, "status", "allocation"), "is not allocated"),
        (_with("yes", "status", "allocation"), "status.allocation is 'yes', not an object"),
        (_with({}, "status", "allocation"), "allocates no device of driver gpu.nearfield.dev"),
        (_with(None, *RESULTS), "allocates no device of driver gpu.nearfield.dev"),
        (_with([], *RESULTS), "allocates no device of driver gpu.nearfield.dev"),
        (_with([preparing.result(GPU, driver=OTHER)], *RESULTS), "allocates no device of driver gpu.nearfield.dev"),
        (_with([preparing.result(GPU)] * 33, *RESULTS), "results is a list, not a list of at most 32"),
        (_with({"0": 1}, *RESULTS), "status.allocation.devices.results is an object, not a list"),
        (_with(7, *RESULTS, 0), "status.allocation.devices.results[0] is a number, not an object"),
        (_with([None], *RESULTS), "status.allocation.devices.results[0].driver is missing, not text"),
        (_with("node-2", *RESULTS, 0, "pool"), "of pool 'node-2', but this node has only pool 'node-1'"),
        (_with("", *RESULTS, 0, "device"), "device is '', not text"),
        (_with("gpu\n0", *RESULTS, 0, "device"), r"device is 'gpu\n0', not a name"),
        (_with("g" * 300, *RESULTS, 0, "request"), "not a name"),
        (_with("../../etc/x", *RESULTS, 0, "shareID"), "shareID is '../../etc/x', not a UUID"),
        (_with("yes", *RESULTS, 0, "adminAccess"), "adminAccess is 'yes', not a boolean"),
        (_with({"memory": 20}, *RESULTS, 0, "consumedCapacity"), "not an object of quantities"),
        ([], "the object is a list, not an object"),
        (None, "metadata is missing, not an object"),
    ],
)
def test_what_cannot_be_prepared_is_said_and_names_the_claim(document: Any, expected: str) -> None:
    with pytest.raises(ClaimError) as caught:
        parse(document)
    assert expected in str(caught.value)
    assert str(REF) in str(caught.value)
    assert not caught.value.retryable


@pytest.mark.parametrize("requests", [None, [], ["gpu"], ["x", "gpu"]])
def test_configuration_for_us_is_refused_with_its_kind(requests: Any) -> None:
    parameters = {"apiVersion": "resource.nvidia.com/v1beta1", "kind": "GpuConfig", "sharing": {}}
    document = preparing.claim(
        REF, [preparing.result(GPU)], config=[opaque(parameters, requests=requests, source="FromClass")]
    )
    with pytest.raises(ClaimError) as caught:
        parse(document)
    message = str(caught.value)
    assert 'apiVersion "resource.nvidia.com/v1beta1" and kind "GpuConfig"' in message
    assert "status.allocation.devices.config[0].opaque.parameters" in message
    assert "(from its DeviceClass)" in message


@pytest.mark.parametrize("parameters", [None, "x", 1, [], {}, {"kind": 5}, {"apiVersion": {"deep": []}}])
def test_configuration_without_a_kind_is_refused(parameters: Any) -> None:
    with pytest.raises(ClaimError):
        parse(preparing.claim(REF, [preparing.result(GPU)], config=[opaque(parameters)]))


def test_configuration_that_is_not_for_our_results_is_left_to_whom_it_is_for() -> None:
    config = [
        opaque({"anything": 1}, driver=OTHER),
        opaque({"kind": "X"}, requests=["nic"]),
        opaque({"kind": "X"}, requests=["gpu/slow"]),  # a subrequest that was not chosen
        {"source": "FromClaim", "requests": []},
    ]
    document = preparing.claim(REF, [preparing.result(GPU, request="gpu/fast")], config=config)
    assert [result.request for result in parse(document).results] == ["gpu/fast"]


@pytest.mark.parametrize("requests", [["gpu"], ["gpu/fast"]])
def test_configuration_of_a_request_covers_its_subrequests(requests: list[str]) -> None:
    document = preparing.claim(
        REF, [preparing.result(GPU, request="gpu/fast")], config=[opaque({"kind": "X"}, requests=requests)]
    )
    with pytest.raises(ClaimError):
        parse(document)


def test_a_message_shows_a_part_of_hostile_text_only() -> None:
    with pytest.raises(ClaimError) as caught:
        parse(_with("\ud800" + "x" * 10_000, "metadata", "uid"))
    assert len(str(caught.value)) < 400
    str(caught.value).encode()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20) | st.just("x" * 10_000),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
PATHS = st.sampled_from(
    [
        ("metadata",),
        ("status",),
        ("status", "allocation"),
        ("status", "allocation", "devices"),
        RESULTS,
        ("status", "allocation", "devices", "config"),
        (*RESULTS, 0),
        *((*RESULTS, 0, field) for field in ("request", "driver", "pool", "device", "shareID", "adminAccess")),
        (*RESULTS, 0, "consumedCapacity"),
    ]
)


@pytest.mark.parametrize(
    "deep", [json.loads("[" * 900 + "]" * 900), json.loads('{"a":' * 900 + "1" + "}" * 900), 10**4000]
)
def test_deep_and_huge_json_is_a_claim_error(deep: Any) -> None:
    for path in (("metadata", "uid"), ("status",), (*RESULTS, 0), (*RESULTS, 0, "consumedCapacity")):
        with pytest.raises(ClaimError):
            parse(_with(deep, *path))
    with pytest.raises(ClaimError):
        parse(preparing.claim(REF, [preparing.result(GPU)], config=[opaque({"kind": deep, "deep": deep})]))


@settings(max_examples=100, deadline=None)
@given(document=JSON)
def test_any_json_is_an_allocation_or_a_claim_error(document: Any) -> None:
    with pytest.raises(ClaimError):
        parse(document)


@settings(max_examples=150, deadline=None)
@given(path=PATHS, value=JSON)
def test_any_json_in_any_place_of_a_claim_is_an_allocation_or_a_claim_error(
    path: tuple[str | int, ...], value: Any
) -> None:
    message = ""
    try:
        parse(_with(value, *path))
    except ClaimError as error:
        message = str(error)
    assert len(message.encode()) < 1000


@settings(max_examples=60, deadline=None)
@given(entry=JSON, parameters=JSON, requests=JSON)
def test_any_json_as_configuration_is_ignored_or_a_claim_error(entry: Any, parameters: Any, requests: Any) -> None:
    for config in ([entry], [opaque(parameters, requests=requests)], [{"opaque": entry}]):
        try:
            parse(preparing.claim(REF, [preparing.result(GPU)], config=config))
        except ClaimError as error:
            str(error).encode()


@pytest.mark.parametrize(
    ("document", "expected"),
    [
        (preparing.claim(REF, [preparing.result(GPU)]), None),
        (preparing.claim(preparing.ref(2), [preparing.result(GPU)]), "was replaced"),
        (_without(preparing.claim(REF, []), "status", "allocation"), "is not allocated any more"),
        (_without(preparing.claim(REF, []), "status"), "is not allocated any more"),
        (_with(None, "status"), "is not allocated any more"),
        (_with("odd", "status"), None),
        (None, None),
        ({}, None),
        ({"metadata": []}, None),
    ],
)
def test_what_means_that_a_claim_was_released(document: Any, expected: str | None) -> None:
    reason = claims.why_released(document, ref=REF)
    assert (reason or "").startswith(expected or "")
    assert (reason is None) == (expected is None)


@pytest.mark.parametrize("uid", ["", "..", "a/b", "a_b", "-a", "node spec", "é", "a" * 64, "a.json"])
def test_uids_that_could_mean_another_file_are_not_acceptable(uid: str) -> None:
    assert not claims.acceptable_uid(uid)
