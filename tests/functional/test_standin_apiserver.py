# SPDX-License-Identifier: Apache-2.0
"""The stand-in API server over real HTTP, against what Kubernetes 1.35 to 1.37 do.

Aspects: create, generated names, conflicts, preconditions, immutability, no-op updates, dry runs, dropped fields by
version, defaults, lists and pages, selectors, watches, bookmarks, 410, WatchList, claims and their status, finalizers,
faults, restart, the process of its own.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import signal
import socket
import subprocess
import sys
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from driver.standin import apiserver, apiserver_faults

SLICES = "/apis/resource.k8s.io/v1/resourceslices"
CLAIMS = "/apis/resource.k8s.io/v1/namespaces/ml/resourceclaims"
NODES = "/api/v1/nodes"


class Raw:
    """A client that hides nothing: one kept connection, JSON in and out."""

    def __init__(self, server: apiserver.ApiServer, *, token: str | None = None) -> None:
        place = urllib.parse.urlsplit(server.url)
        self.connection = http.client.HTTPConnection(str(place.hostname), place.port, timeout=30)
        self._token = token if token is not None else server.token

    def __call__(self, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
        sent = {"Authorization": f"Bearer {self._token}", "Content-Type": "application/json"}
        sent |= {name.replace("_", "-"): value for name, value in headers.items()}
        self.connection.request(method, path, json.dumps(body) if body is not None else None, sent)
        answer = self.connection.getresponse()
        return answer.status, json.loads(answer.read())

    def ok(self, method: str, path: str, body: Any = None, **headers: str) -> Any:
        code, answer = self(method, path, body, **headers)
        assert code in {200, 201}, answer
        return answer

    def close(self) -> None:
        self.connection.close()


@contextlib.contextmanager
def serving(**options: Any) -> Iterator[tuple[apiserver.ApiServer, Raw]]:
    with apiserver.ApiServer(**options) as server:
        raw = Raw(server)
        try:
            yield server, raw
        finally:
            raw.close()


@pytest.fixture
def api() -> Iterator[tuple[apiserver.ApiServer, Raw]]:
    with serving() as pair:
        yield pair


def device(name: str = "gpu-0", **more: Any) -> dict[str, Any]:
    return {"name": name, "attributes": {"type": {"string": "gpu"}}, "capacity": {"memory": {"value": "80Gi"}}, **more}


def a_slice(name: str = "s0", *devices: dict[str, Any], node: str = "n1", **spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceSlice",
        "metadata": {"name": name},
        "spec": {
            "driver": "gpu.nearfield.dev",
            "nodeName": node,
            "pool": {"name": node, "generation": 1, "resourceSliceCount": 1},
            "devices": list(devices) or [device()],
            **spec,
        },
    }


@contextlib.contextmanager
def watching(server: apiserver.ApiServer, query: str, path: str = SLICES) -> Iterator[Iterator[dict[str, Any]]]:
    raw = Raw(server)
    raw.connection.request("GET", f"{path}?watch=1&{query}", None, {"Authorization": f"Bearer {server.token}"})
    answer = raw.connection.getresponse()
    assert answer.status == 200, answer.read()
    try:
        yield (json.loads(line) for line in iter(answer.readline, b""))
    finally:
        answer.close()
        raw.close()


def test_create_sets_what_the_server_owns_and_get_gives_the_same(api: tuple[apiserver.ApiServer, Raw]) -> None:
    _, raw = api
    created = raw.ok("POST", SLICES, a_slice())
    metadata = created["metadata"]
    assert metadata["generation"] == 1
    assert len(metadata["uid"]) == 36
    assert metadata["creationTimestamp"].endswith("Z")
    assert int(metadata["resourceVersion"]) > 0
    assert raw.ok("GET", f"{SLICES}/s0") == created


def test_a_name_is_taken_once_and_generated_names_never_collide(api: tuple[apiserver.ApiServer, Raw]) -> None:
    _, raw = api
    raw.ok("POST", SLICES, a_slice())
    code, answer = raw("POST", SLICES, a_slice())
    assert (code, answer["reason"]) == (409, "AlreadyExists")
    generated = a_slice()
    generated["metadata"] = {"generateName": "00000-" + "x" * 80}
    names = {raw.ok("POST", SLICES, generated)["metadata"]["name"] for _ in range(3)}
    assert len(names) == 3
    assert all(len(name) == 63 for name in names)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"spec": {}}, "spec.driver"),
        ({"metadata": {}}, "name or generateName is required"),
        ({"metadata": {"name": "Not_A_Name"}}, "metadata.name"),
    ],
)
def test_an_invalid_slice_is_refused_with_its_causes(
    api: tuple[apiserver.ApiServer, Raw], change: dict[str, Any], message: str
) -> None:
    _, raw = api
    code, answer = raw("POST", SLICES, a_slice() | change)
    assert (code, answer["reason"]) == (422, "Invalid")
    assert any(message in cause["message"] for cause in answer["details"]["causes"])


def test_an_empty_device_list_beside_counters_is_refused(api: tuple[apiserver.ApiServer, Raw]) -> None:
    _, raw = api
    body = a_slice(sharedCounters=[{"name": "c", "counters": {"m": {"value": "1"}}}])
    body["spec"]["devices"] = []
    assert raw("POST", SLICES, body)[0] == 422


@pytest.mark.parametrize("sent", [b"", b"[]", b"{", b'{"kind":"Pod"}', b"[" * 100_000])
def test_what_is_no_slice_is_a_bad_request(api: tuple[apiserver.ApiServer, Raw], sent: bytes) -> None:
    server, raw = api
    raw.connection.request("POST", SLICES, sent, {"Authorization": f"Bearer {server.token}"})
    answer = raw.connection.getresponse()
    answer.read()
    assert answer.status == 400


def test_update_needs_the_present_version_and_changes_nothing_else(api: tuple[apiserver.ApiServer, Raw]) -> None:
    server, raw = api
    created = raw.ok("POST", SLICES, a_slice())
    changed = json.loads(json.dumps(created))
    changed["spec"]["devices"][0]["name"] = "gpu-1"
    changed["metadata"]["creationTimestamp"] = "1999-01-01T00:00:00Z"
    updated = raw.ok("PUT", f"{SLICES}/s0", changed)
    assert updated["metadata"]["generation"] == 2
    assert updated["metadata"]["creationTimestamp"] == created["metadata"]["creationTimestamp"]
    code, answer = raw("PUT", f"{SLICES}/s0", changed)
    assert (code, answer["reason"]) == (409, "Conflict")
    assert raw("PUT", f"{SLICES}/s0", updated | {"metadata": updated["metadata"] | {"uid": "other"}})[0] == 409
    assert raw("PUT", f"{SLICES}/gone", updated | {"metadata": updated["metadata"] | {"name": "gone"}})[0] == 404
    assert raw("PUT", f"{SLICES}/other", updated)[0] == 400
    assert server.writes("resourceslices") == 2


def test_an_update_that_changes_nothing_is_no_write(api: tuple[apiserver.ApiServer, Raw]) -> None:
    server, raw = api
    created = raw.ok("POST", SLICES, a_slice())
    assert raw.ok("PUT", f"{SLICES}/s0", created) == created
    assert server.writes("resourceslices") == 1


@pytest.mark.parametrize("path", [("spec", "driver"), ("spec", "nodeName"), ("spec", "pool", "name")])
def test_identity_of_a_slice_is_immutable(api: tuple[apiserver.ApiServer, Raw], path: tuple[str, ...]) -> None:
    _, raw = api
    body = raw.ok("POST", SLICES, a_slice())
    holder = body
    for key in path[:-1]:
        holder = holder[key]
    holder[path[-1]] = "other"
    code, answer = raw("PUT", f"{SLICES}/s0", body)
    assert code == 422
    assert "immutable" in answer["message"]


def test_delete_looks_at_its_preconditions(api: tuple[apiserver.ApiServer, Raw]) -> None:
    _, raw = api
    created = raw.ok("POST", SLICES, a_slice())
    for wanted in ({"uid": "other"}, {"resourceVersion": "1"}):
        code, answer = raw("DELETE", f"{SLICES}/s0", {"preconditions": wanted})
        assert (code, answer["reason"]) == (409, "Conflict")
    good = {key: created["metadata"][key] for key in ("uid", "resourceVersion")}
    assert raw.ok("DELETE", f"{SLICES}/s0", {"preconditions": good})["metadata"]["uid"] == good["uid"]
    assert raw("DELETE", f"{SLICES}/s0")[0] == 404


def test_dry_runs_answer_as_if_and_store_nothing(api: tuple[apiserver.ApiServer, Raw]) -> None:
    server, raw = api
    assert raw.ok("POST", f"{SLICES}?dryRun=All", a_slice())["metadata"]["uid"]
    assert raw("GET", f"{SLICES}/s0")[0] == 404
    created = raw.ok("POST", SLICES, a_slice())
    changed = created | {"spec": created["spec"] | {"devices": [device("gpu-9")]}}
    assert raw.ok("PUT", f"{SLICES}/s0?dryRun=All", changed)["spec"]["devices"][0]["name"] == "gpu-9"
    assert raw("POST", f"{SLICES}?dryRun=All", a_slice())[0] == 409
    raw.ok("DELETE", f"{SLICES}/s0?dryRun=All")
    assert raw.ok("GET", f"{SLICES}/s0") == created
    assert raw("POST", f"{SLICES}?dryRun=Some", a_slice("s1"))[0] == 400
    assert server.writes("resourceslices") == 1
    assert server.count("create", "resourceslices", dry_run=True) == 2


TAINT = {"key": "gpu.nearfield.dev/absent", "effect": "NoSchedule"}


@pytest.mark.parametrize(("version", "kept"), [("1.35", False), ("1.36", True), ("1.37", True)])
def test_taints_vanish_where_their_gate_is_off(version: str, kept: bool) -> None:
    with serving(version=version) as (_, raw):
        stored = raw.ok("POST", SLICES, a_slice("s0", device(taints=[TAINT])))
        assert ("taints" in stored["spec"]["devices"][0]) is kept


def test_a_dropped_list_value_makes_the_attribute_invalid() -> None:
    listed = a_slice("s0", device(attributes={"resource.kubernetes.io/numaNode": {"ints": [0, 1]}}))
    with serving() as (_, raw):
        code, answer = raw("POST", SLICES, listed)
        assert code == 422
        assert "exactly one value must be specified" in answer["message"]
    with serving(feature_gates={"DRAListTypeAttributes": True}) as (_, raw):
        assert raw.ok("POST", SLICES, listed)


def test_a_feature_in_use_is_not_dropped_on_update() -> None:
    with serving(feature_gates={"DRADeviceTaints": False}) as (server, raw):
        raw.ok("POST", SLICES, a_slice())
        server.edit("resourceslices", "s0", lambda body: body["spec"]["devices"][0].update(taints=[TAINT]))
        body = raw.ok("GET", f"{SLICES}/s0")
        body["spec"]["devices"].append(device("gpu-1", taints=[TAINT]))
        assert "taints" in raw.ok("PUT", f"{SLICES}/s0", body)["spec"]["devices"][1]


def test_the_server_sets_time_added_and_spells_values_its_own_way(api: tuple[apiserver.ApiServer, Raw]) -> None:
    _, raw = api
    body = a_slice(
        "s0", device(taints=[TAINT], capacity={"memory": {"value": "85899345920"}, "x": {"value": "100000"}})
    )
    first = raw.ok("POST", SLICES, body)["spec"]["devices"][0]
    assert first["taints"][0]["timeAdded"].endswith("Z")
    assert first["capacity"] == {"memory": {"value": "85899345920"}, "x": {"value": "100k"}}
    kept = a_slice("s1", device(taints=[TAINT | {"timeAdded": "2026-01-02T05:04:05.7+02:00"}]))
    assert raw.ok("POST", SLICES, kept)["spec"]["devices"][0]["taints"][0]["timeAdded"] == "2026-01-02T03:04:05Z"


def test_the_limit_of_devices_depends_on_taints(api: tuple[apiserver.ApiServer, Raw]) -> None:
    _, raw = api
    many = [device(f"gpu-{index}") for index in range(128)]
    raw.ok("POST", SLICES, a_slice("s0", *many))
    assert raw("POST", SLICES, a_slice("s1", *many, device("gpu-128")))[0] == 422
    many[0] = device("gpu-0", taints=[TAINT])
    code, answer = raw("POST", SLICES, a_slice("s2", *many))
    assert code == 422
    assert "at most 64" in answer["message"]


def test_lists_select_by_field_and_come_in_pages_of_one_moment(api: tuple[apiserver.ApiServer, Raw]) -> None:
    _, raw = api
    for index in range(5):
        raw.ok("POST", SLICES, a_slice(f"s{index}", node="n1" if index else "n2"))
    listed = raw.ok("GET", f"{SLICES}?fieldSelector=spec.nodeName%3Dn1,spec.driver%3Dgpu.nearfield.dev")
    assert [item["metadata"]["name"] for item in listed["items"]] == ["s1", "s2", "s3", "s4"]
    assert listed["kind"] == "ResourceSliceList"
    first = raw.ok("GET", f"{SLICES}?limit=2")
    raw.ok("DELETE", f"{SLICES}/s4")
    names = [item["metadata"]["name"] for item in first["items"]]
    while token := first["metadata"].get("continue"):
        first = raw.ok("GET", f"{SLICES}?limit=2&continue={token}")
        names += [item["metadata"]["name"] for item in first["items"]]
    assert names == ["s0", "s1", "s2", "s3", "s4"]
    code, answer = raw("GET", f"{SLICES}?continue=stale")
    assert (code, answer["reason"]) == (410, "Expired")


@pytest.mark.parametrize(("version", "code"), [("1.36", 400), ("1.37", 200)])
def test_the_pool_name_is_selectable_from_1_37(version: str, code: int) -> None:
    with serving(version=version) as (_, raw):
        assert raw("GET", f"{SLICES}?fieldSelector=spec.pool.name%3Dn1")[0] == code
        assert raw("GET", f"{SLICES}?fieldSelector=spec.devices%3Dx")[0] == 400


def test_a_watch_tells_every_change_after_its_version(api: tuple[apiserver.ApiServer, Raw]) -> None:
    server, raw = api
    before = raw.ok("GET", SLICES)["metadata"]["resourceVersion"]
    created = raw.ok("POST", SLICES, a_slice())
    raw.ok("POST", SLICES, a_slice("s1", node="n2"))
    changed = raw.ok("PUT", f"{SLICES}/s0", created | {"spec": created["spec"] | {"devices": [device("gpu-1")]}})
    raw.ok("DELETE", f"{SLICES}/s0")
    with watching(server, f"resourceVersion={before}&fieldSelector=spec.nodeName%3Dn1") as events:
        seen = [next(events) for _ in range(3)]
    assert [event["type"] for event in seen] == ["ADDED", "MODIFIED", "DELETED"]
    assert [event["object"] for event in seen[:2]] == [created, changed]
    assert int(seen[2]["object"]["metadata"]["resourceVersion"]) > int(changed["metadata"]["resourceVersion"])


def test_a_watch_without_a_version_begins_with_what_is_there(api: tuple[apiserver.ApiServer, Raw]) -> None:
    server, raw = api
    raw.ok("POST", SLICES, a_slice())
    with watching(server, "") as events:
        assert next(events)["object"]["metadata"]["name"] == "s0"
        raw.ok("POST", SLICES, a_slice("s1"))
        assert next(events)["object"]["metadata"]["name"] == "s1"


def test_a_watch_list_says_when_the_present_state_is_complete(api: tuple[apiserver.ApiServer, Raw]) -> None:
    server, raw = api
    raw.ok("POST", SLICES, a_slice())
    query = "sendInitialEvents=true&resourceVersionMatch=NotOlderThan&allowWatchBookmarks=true"
    with watching(server, query) as events:
        assert [next(events)["type"], (mark := next(events))["type"]] == ["ADDED", "BOOKMARK"]
    assert mark["object"]["metadata"]["annotations"] == {"k8s.io/initial-events-end": "true"}


def test_bookmarks_carry_a_version_to_go_on_from_and_the_watch_ends_in_time() -> None:
    with serving(bookmark_interval_s=0.01) as (server, raw):
        raw.ok("POST", NODES, {"metadata": {"name": "n1"}})
        newest = raw.ok("GET", SLICES)["metadata"]["resourceVersion"]
        with watching(server, f"resourceVersion={newest}&allowWatchBookmarks=true&timeoutSeconds=1") as events:
            seen = list(events)
    assert {event["type"] for event in seen} == {"BOOKMARK"}
    assert seen[0]["object"]["metadata"]["resourceVersion"] == newest


def test_a_compacted_version_is_gone(api: tuple[apiserver.ApiServer, Raw]) -> None:
    server, raw = api
    old = raw.ok("POST", SLICES, a_slice())["metadata"]["resourceVersion"]
    server.compact("resourceslices")
    with watching(server, f"resourceVersion={old}") as events:
        event = next(events)
    assert (event["type"], event["object"]["code"], event["object"]["reason"]) == ("ERROR", 410, "Expired")


def test_a_version_from_the_future_is_refused(api: tuple[apiserver.ApiServer, Raw]) -> None:
    server, raw = api
    code, answer = raw("GET", f"{SLICES}?resourceVersion=999999")
    assert (code, answer["reason"]) == (504, "Timeout")
    with watching(server, "resourceVersion=999999") as events:
        assert next(events)["object"]["code"] == 504


def claim(**spec: Any) -> dict[str, Any]:
    request = {"name": "gpu", "exactly": {"deviceClassName": "gpu.nearfield.dev"}}
    return {"metadata": {"name": "c"}, "spec": {"devices": {"requests": [request]}, **spec}}


ALLOCATION = {
    "devices": {"results": [{"request": "gpu", "driver": "gpu.nearfield.dev", "pool": "n1", "device": "gpu-0"}]}
}


def test_the_status_of_a_claim_has_its_own_door(api: tuple[apiserver.ApiServer, Raw]) -> None:
    _, raw = api
    created = raw.ok("POST", CLAIMS, claim() | {"status": {"allocation": ALLOCATION}})
    assert created["status"] == {}
    assert created["spec"]["devices"]["requests"][0]["exactly"]["count"] == 1
    allocated = raw.ok("PUT", f"{CLAIMS}/c/status", created | {"status": {"allocation": ALLOCATION}, "spec": {}})
    assert allocated["spec"] == created["spec"]
    assert allocated["status"]["allocation"] == ALLOCATION
    other: dict[str, Any] = {"allocation": {"devices": {"results": []}}}
    assert raw("PUT", f"{CLAIMS}/c/status", allocated | {"status": other})[0] == 422
    assert raw("PUT", f"{CLAIMS}/c", allocated | {"spec": {"devices": {}}})[0] == 422
    assert raw.ok("PUT", f"{CLAIMS}/c/status", allocated | {"status": {}})["status"] == {}
    assert raw.ok("GET", "/apis/resource.k8s.io/v1/resourceclaims")["items"]


@pytest.mark.parametrize(
    "wrong",
    [
        {"allocation": {"devices": {"results": [ALLOCATION["devices"]["results"][0] | {"request": "other"}]}}},
        {"reservedFor": [{"resource": "pods", "name": "p", "uid": "u"}]},
    ],
)
def test_a_wrong_status_is_refused(api: tuple[apiserver.ApiServer, Raw], wrong: dict[str, Any]) -> None:
    _, raw = api
    created = raw.ok("POST", CLAIMS, claim())
    assert raw("PUT", f"{CLAIMS}/c/status", created | {"status": wrong})[0] == 422


def test_finalizers_delay_a_deletion(api: tuple[apiserver.ApiServer, Raw]) -> None:
    _, raw = api
    body = claim()
    body["metadata"]["finalizers"] = ["resource.kubernetes.io/delete-protection"]
    raw.ok("POST", CLAIMS, body)
    marked = raw.ok("DELETE", f"{CLAIMS}/c")
    assert marked["metadata"]["deletionTimestamp"]
    marked["metadata"]["finalizers"] = []
    raw.ok("PUT", f"{CLAIMS}/c", marked)
    assert raw("GET", f"{CLAIMS}/c")[0] == 404


def test_a_merge_patch_changes_what_it_names(api: tuple[apiserver.ApiServer, Raw]) -> None:
    _, raw = api
    raw.ok("POST", NODES, {"metadata": {"name": "n1", "labels": {"a": "1", "b": "2"}}})
    patch = {"metadata": {"labels": {"a": None, "c": "3"}}}
    patched = raw.ok("PATCH", f"{NODES}/n1", patch, Content_Type="application/merge-patch+json")
    assert patched["metadata"]["labels"] == {"b": "2", "c": "3"}
    assert raw("PATCH", f"{NODES}/n1", patch, Content_Type="application/json-patch+json")[0] == 415


def test_kubelet_can_wipe_the_slices_of_its_node(api: tuple[apiserver.ApiServer, Raw]) -> None:
    server, raw = api
    for name, node in (("a", "n1"), ("b", "n1"), ("c", "n2")):
        raw.ok("POST", SLICES, a_slice(name, node=node))
    raw.ok("DELETE", f"{SLICES}?fieldSelector=spec.nodeName%3Dn1")
    assert [body["metadata"]["name"] for body in server.objects("resourceslices")] == ["c"]


def test_garbage_goes_with_its_owner(api: tuple[apiserver.ApiServer, Raw]) -> None:
    server, raw = api
    node = raw.ok("POST", NODES, {"metadata": {"name": "n1"}})
    body = a_slice()
    owner = {"apiVersion": "v1", "kind": "Node", "name": "n1", "uid": node["metadata"]["uid"], "controller": True}
    body["metadata"]["ownerReferences"] = [owner]
    raw.ok("POST", SLICES, body)
    assert server.collect_garbage() == 0
    raw.ok("DELETE", f"{NODES}/n1")
    assert server.collect_garbage() == 1


def test_a_body_may_come_in_chunks_and_headers_may_be_odd(api: tuple[apiserver.ApiServer, Raw]) -> None:
    server, raw = api
    whole = json.dumps(a_slice()).encode()
    headers = {"Authorization": f"Bearer {server.token}", "Content-Type": "application/json; charset=utf-8"}
    raw.connection.request("POST", SLICES, iter([whole[:10], whole[10:]]), headers, encode_chunked=True)
    answer = raw.connection.getresponse()
    assert (answer.status, json.loads(answer.read())["metadata"]["name"]) == (201, "s0")


@pytest.mark.parametrize(
    "sent",
    [
        b"nonsense\r\n\r\n",
        b"GET / HTTP/1.0\r\n\r\n",
        b"GET / HTTP/1.1\r\nno colon\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * 200,
    ]
    + [b"POST / HTTP/1.1\r\nContent-Length: %b\r\n\r\n" % length for length in (b"-1", b"x", b"99999999999")]
    + [b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n"],
)
def test_what_is_no_http_is_hung_up_on(api: tuple[apiserver.ApiServer, Raw], sent: bytes) -> None:
    server, raw = api
    place = urllib.parse.urlsplit(server.url)
    with socket.create_connection((str(place.hostname), place.port), timeout=30) as connection:
        connection.sendall(sent)
        assert connection.recv(1) == b""
    assert raw.ok("GET", SLICES)["items"] == []


def test_without_the_token_nothing_is_told(api: tuple[apiserver.ApiServer, Raw]) -> None:
    server, _ = api
    stranger = Raw(server, token="wrong")
    assert stranger("GET", SLICES)[0] == 401
    stranger.close()


def test_faults_strike_the_calls_they_name_as_often_as_ordered(api: tuple[apiserver.ApiServer, Raw]) -> None:
    server, raw = api
    server.faults.inject(
        apiserver_faults.Refuse(503, "ServiceUnavailable"), verb="create", resource="resourceslices", times=1
    )
    assert raw("POST", SLICES, a_slice())[0] == 503
    assert raw("GET", SLICES)[0] == 200
    raw.ok("POST", SLICES, a_slice())
    server.faults.inject(apiserver_faults.LoseAnswer(), verb="delete", times=1)
    with pytest.raises(http.client.RemoteDisconnected):
        raw("DELETE", f"{SLICES}/s0")
    assert raw("GET", f"{SLICES}/s0")[0] == 404
    mutation = server.faults.inject(
        apiserver_faults.Mutate(lambda body: body["metadata"].update(labels={"by": "webhook"}))
    )
    assert raw.ok("POST", SLICES, a_slice())["metadata"]["labels"] == {"by": "webhook"}
    mutation.remove()
    assert "labels" not in raw.ok("POST", SLICES, a_slice("s1"))["metadata"]
    assert server.calls[-1] == apiserver_faults.ApiCall("create", "resourceslices")


def test_a_silent_watch_speaks_again_when_the_fault_ends(api: tuple[apiserver.ApiServer, Raw]) -> None:
    server, raw = api
    with watching(server, "") as events:
        server.faults.silent_watches = True
        raw.ok("POST", SLICES, a_slice())
        server.faults.silent_watches = False
        assert next(events)["type"] == "ADDED"


def test_a_restarted_server_has_its_port_and_its_objects(api: tuple[apiserver.ApiServer, Raw]) -> None:
    server, raw = api
    created = raw.ok("POST", SLICES, a_slice())
    url = server.url
    server.stop()
    raw.close()
    with pytest.raises(ConnectionRefusedError):
        raw("GET", SLICES)
    raw.close()
    server.start()
    assert server.url == url
    # As a real one: it serves before it knows who may do what.
    status, refusal = raw("GET", f"{SLICES}/s0")
    assert (status, refusal["reason"]) == (403, "Forbidden")
    server.learn_rights()
    assert raw.ok("GET", f"{SLICES}/s0") == created


def test_a_stopped_server_keeps_its_port_from_others() -> None:
    with apiserver.ApiServer() as server:
        port = urllib.parse.urlsplit(server.url).port
        server.stop()
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port))
        server.start()
        server.learn_rights()
        raw = Raw(server)
        assert raw.ok("GET", SLICES)["items"] == []
        raw.close()


def test_stopping_ends_every_watch_and_every_hanging_call(api: tuple[apiserver.ApiServer, Raw]) -> None:
    server, raw = api
    server.faults.inject(apiserver_faults.Hang(), verb="get")
    raw.connection.request("GET", f"{SLICES}/s0", None, {"Authorization": f"Bearer {server.token}"})
    with watching(server, "") as events:
        server.stop()
        with pytest.raises((http.client.IncompleteRead, ConnectionResetError, StopIteration)):
            next(events)


def test_kubectl_finds_its_way(api: tuple[apiserver.ApiServer, Raw]) -> None:
    _, raw = api
    assert raw.ok("GET", "/version")["minor"] == "37"
    assert raw.ok("GET", "/apis")["groups"][0]["name"] == "resource.k8s.io"
    names = {resource["name"] for resource in raw.ok("GET", "/apis/resource.k8s.io/v1")["resources"]}
    assert names == {"resourceslices", "resourceclaims"}
    assert raw("GET", "/apis/apps/v1/deployments")[0] == 404
    assert raw("PUT", SLICES, {})[0] == 405


def test_it_runs_as_a_process_of_its_own(tmp_path: Path) -> None:
    kubeconfig = tmp_path / "kubeconfig"
    command = [sys.executable, "-m", "driver.standin.apiserver", "--kubeconfig", str(kubeconfig), "--node", "n1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            hello = json.loads(process.stdout.readline())
            place = urllib.parse.urlsplit(hello["url"])
            connection = http.client.HTTPConnection(str(place.hostname), place.port, timeout=30)
            connection.request("GET", f"{NODES}/n1", None, {"Authorization": f"Bearer {hello['token']}"})
            assert json.loads(connection.getresponse().read())["metadata"]["name"] == "n1"
            connection.request("GET", "/standin/counters", None, {"Authorization": f"Bearer {hello['token']}"})
            assert json.loads(connection.getresponse().read())["requests"] == {"get nodes": 1}
            connection.close()
            assert json.loads(kubeconfig.read_text())["clusters"][0]["cluster"]["server"] == hello["url"]
        finally:
            process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=30) == 0
