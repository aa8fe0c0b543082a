# SPDX-License-Identifier: Apache-2.0
"""What the benchmark reads and makes on a real node, but for the node.

- writes by program: stored ones, Events too; not dry ones, reads, refused ones, other programs' or half a line
- samples are summed by their labels, whatever others they have; 0 where there is none
- pods: with a claim from a template, without, and one that no scheduler places
- a class and a template for each driver; the service account may do what drivers do, and no more
- the time of pods is that of the last; one that the API server held up is tried again, and its time is not counted
- without a real node, its parts are refused
"""

from __future__ import annotations

import json
import urllib.parse
from collections.abc import Callable
from typing import Any, cast

import pytest

from hack.bench import __main__ as command
from hack.bench import apiserver, audit, claims, drivers, exposition, realnode, workloads

METRICS = """\
# HELP apiserver_request_total requests
# TYPE apiserver_request_total counter
apiserver_request_total{code="200",dry_run="",resource="resourceslices",verb="PUT"} 3
apiserver_request_total{code="409",dry_run="",resource="resourceslices",verb="PUT"} 1
apiserver_request_total{code="200",dry_run="All",resource="resourceslices",verb="PUT"} 7
apiserver_request_total{code="200",dry_run="",resource="leases",verb="PUT"} 90
apiserver_request_total_other 5
# TYPE dra_grpc_operations_duration_seconds histogram
dra_grpc_operations_duration_seconds_bucket{driver_name="d",le="+Inf"} 2
dra_grpc_operations_duration_seconds_sum{driver_name="d"} 0.25
dra_grpc_operations_duration_seconds_count{driver_name="d"} 2
"""


def _event(**changes: object) -> str:
    event: dict[str, Any] = {
        "stage": "ResponseComplete",
        "userAgent": "nearfield/0.1",
        "verb": "create",
        "requestURI": "/apis/resource.k8s.io/v1/resourceslices",
        "responseStatus": {"code": 201},
    }
    return json.dumps({**event, **changes})


@pytest.mark.parametrize(
    ("line", "count"),
    [
        (_event(), 1),
        (_event(verb="deletecollection", responseStatus={"code": 200}), 1),
        (_event(requestURI="/api/v1/namespaces/default/events"), 1),
        (_event(userAgent="gopeer-1f/v0.0.0 (linux/amd64)"), 1),
        (_event(userAgent="kubelet/v1.37.2"), 0),
        (_event(requestURI="/apis/resource.k8s.io/v1/resourceslices?dryRun=All&x=y"), 0),
        (_event(responseStatus={"code": 409}), 0),
        (_event(verb="get"), 0),
        (_event(stage="RequestReceived"), 0),
        (_event()[:40], 0),
        ("", 0),
    ],
)
def test_writes_of_programs(line: str, count: int) -> None:
    assert audit.count_writes([line], programs=("nearfield/", "gopeer")) == count


def test_samples_are_summed_by_their_labels() -> None:
    sample = "apiserver_request_total"
    assert exposition.total(METRICS, sample, resource="resourceslices", verb="PUT", dry_run="") == 4
    assert exposition.total(METRICS, sample, resource="resourceslices") == 11
    assert exposition.total(METRICS, sample, resource="pods") == 0
    assert exposition.total(METRICS, "dra_grpc_operations_duration_seconds_sum", driver_name="d") == 0.25
    assert exposition.total(METRICS, "dra_grpc_operations_duration_seconds_count", driver_name="d") == 2
    assert exposition.total("", sample) == 0


def test_a_pod_with_a_claim() -> None:
    pod = workloads.pod("p", node="n", template="t")
    (container,) = pod["spec"]["containers"]
    assert pod["spec"]["resourceClaims"] == [{"name": claims.REQUEST, "resourceClaimTemplateName": "t"}]
    assert container["resources"] == {"claims": [{"name": claims.REQUEST}]}
    assert pod["spec"]["nodeSelector"] == {"kubernetes.io/hostname": "n"}


def test_a_pod_without_a_claim() -> None:
    pod = workloads.pod("p", node=None, template=None, scheduler="none")
    assert "resourceClaims" not in pod["spec"]
    assert "nodeSelector" not in pod["spec"]
    assert pod["spec"]["schedulerName"] == "none"


def test_what_a_run_needs_on_the_server() -> None:
    made: dict[str, list[dict[str, Any]]] = {}
    for collection, body in realnode.objects():
        made.setdefault(collection.rpartition("/")[2], []).append(body)
    names = {kind: [body["metadata"]["name"] for body in bodies] for kind, bodies in made.items()}
    subjects = [workloads.class_name(subject) for subject in (drivers.AGENT, drivers.PEER)]
    assert names["deviceclasses"] == subjects
    assert names["resourceclaimtemplates"] == subjects
    role = next(body for body in made["clusterroles"] if body["metadata"]["name"] == workloads.ACCOUNT)
    verbs = {(resource, verb) for rule in role["rules"] for resource in rule["resources"] for verb in rule["verbs"]}
    assert ("resourceclaims", "get") in verbs
    assert not {("resourceclaims", "update"), ("pods", "get"), ("secrets", "get")} & verbs
    assert made["namespaces"][0]["metadata"]["labels"] == {"resource.kubernetes.io/admin-access": "true"}


def test_parts_of_a_real_node_need_one(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.main(["--only", "pods"])
    assert "pods, impossible, rest need --real" in capsys.readouterr().err


class _Watch:
    """Plays events; None stands for a time in which none comes."""

    def __init__(self, *played: apiserver.Event | None) -> None:
        self._played = list(played)

    def wait(self, wanted: Callable[[apiserver.Event], bool], *, timeout_s: float) -> apiserver.Event | None:
        """Until one is wanted, or the silence."""
        assert timeout_s > 0
        while (event := self._played.pop(0)) is not None:
            if wanted(event):
                return event
        return None


class _Bench:
    """A server whose pods have these messages in their events."""

    def __init__(self, messages: dict[str, str]) -> None:
        self.server = self
        self.changed: list[str] = []
        self._messages = messages

    def call(self, method: str, path: str, body: object = None) -> dict[str, Any]:
        """The events of a pod, or its change."""
        if method == "PATCH":
            assert body
            self.changed.append(path.rpartition("/")[2])
            return {}
        name = urllib.parse.parse_qs(path.partition("?")[2])["fieldSelector"][0].partition("=")[2]
        return {"items": [{"message": self._messages[name]}] if name in self._messages else []}


def _pod_event(name: str, at: float, phase: str = "Running", kind: str = "MODIFIED") -> apiserver.Event:
    return apiserver.Event(at=at, kind=kind, object={"metadata": {"name": name}, "status": {"phase": phase}})


def _await(bench: _Bench, watch: _Watch) -> float | None:
    return workloads.await_running(cast("Any", bench), cast("Any", watch), ["a", "b"])


def test_the_last_pod_counts() -> None:
    watch = _Watch(
        _pod_event("b", 1.0),
        _pod_event("a", 2.0, "Pending"),
        _pod_event("other", 3.0),
        _pod_event("b", 4.0),
        _pod_event("a", 5.0),
    )
    assert _await(_Bench({}), watch) == 5.0


def test_a_slow_pod_counts() -> None:
    bench = _Bench({"a": "Back-off pulling image"})
    assert _await(bench, _Watch(_pod_event("b", 1.0), None, _pod_event("a", 9.0))) == 9.0
    assert bench.changed == []


def test_a_pod_that_was_refused_its_claim_does_not_count_and_is_tried_again() -> None:
    bench = _Bench({"a": 'cannot get resource "resourceclaims": node: no relationship found between node x and this'})
    assert _await(bench, _Watch(_pod_event("b", 1.0), None, _pod_event("a", 9.0))) is None
    assert bench.changed == ["a"]
