# SPDX-License-Identifier: Apache-2.0
"""joining: pods that a claim is reserved for after it was prepared, over a real watch of the stand-in API server.

Aspects: before and after the pod's cgroup is there; pods that leave again; servers that are away; other consumers and odd answers.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from driver import values
from driver.errors import RecordError
from driver.kube import access, client
from driver.prepare import joining
from driver.standin import apiserver
from tests.fakes.publishing import until

CLAIM = values.ClaimRef(uid=values.ClaimUid("0a1b"), namespace="ml", name="c")
T = 30.0


class Joins:
    """What a node says of pods, and what was done."""

    def __init__(self) -> None:
        self.has_limits: set[str] = {"first"}
        self.cgroups: set[str] = set()
        self.joined: list[str] = []
        self.fails = 0
        self.told: list[tuple[str, ...]] = []
        self.looked = 0

    def has(self, claim: values.ClaimRef, pod: joining.Pod) -> bool:
        assert claim == CLAIM
        return pod.uid in self.has_limits

    def there(self, pod: joining.Pod) -> bool:
        self.looked += 1
        return pod.uid in self.cgroups

    def join(self, claim: values.ClaimRef, pod: joining.Pod) -> bool:
        assert claim == CLAIM
        self.has_limits.add(pod.uid)  # the row comes first
        if self.fails:
            self.fails -= 1
            return False
        self.joined.append(pod.uid)
        return True

    def others(self, claim: values.ClaimRef, consumers: tuple[str, ...]) -> None:
        assert claim == CLAIM
        self.told.append(consumers)


def pods(*uids: str) -> list[dict[str, Any]]:
    return [{"resource": "pods", "name": f"pod-{uid}", "uid": uid} for uid in uids]


class Node:
    """A Joining between a server and a node."""

    def __init__(self, server: apiserver.ApiServer) -> None:
        self.server = server
        self.stop = threading.Event()
        self.joins = Joins()
        self.kube = client.KubeClient(access.Access(server=server.url, token=server.token), user_agent="tests/0")
        self.joining = joining.Joining(self.kube, self.joins, stop=self.stop, look_s=0.005, pauses_s=(0.01,))
        self.threads = [threading.Thread(target=self.joining.run)]
        self.threads[0].start()
        server.seed(
            "resourceclaims",
            {"metadata": {"name": "c", "namespace": "ml", "uid": CLAIM.uid}, "status": {"reservedFor": pods("first")}},
        )

    def follow(self) -> None:
        self.joining.follow({CLAIM.uid: CLAIM})
        until(lambda: self.server.count("watch", "resourceclaims"))

    def reserve(self, *consumers: dict[str, Any]) -> None:
        self.server.edit("resourceclaims", "ml/c", lambda body: body.update(status={"reservedFor": list(consumers)}))

    def end(self) -> None:
        self.joining.follow({})
        self.stop.set()
        self.joining.wake()
        self.threads[0].join(T)
        assert not self.threads[0].is_alive()
        until(lambda: not [thread for thread in threading.enumerate() if thread.name == "claim-watch"])
        self.kube.close()


@pytest.fixture
def node() -> Iterator[Node]:
    with apiserver.ApiServer() as server:
        made = Node(server)
        yield made
        made.end()


def test_a_pod_that_joins_gets_the_limit_when_its_cgroup_comes(node: Node) -> None:
    node.follow()
    node.reserve(*pods("first", "second"))
    until(lambda: node.joins.looked > 3)
    assert node.joins.joined == []
    node.joins.cgroups.add("second")
    until(lambda: node.joins.joined == ["second"])
    node.reserve(*pods("second"))
    node.reserve(*pods("first", "second"))
    node.joins.cgroups.add("third")
    node.reserve(*pods("third"))
    until(lambda: node.joins.joined == ["second", "third"])


def test_a_pod_that_joined_before_the_watch_began_is_seen_and_a_failure_is_tried_again(node: Node) -> None:
    node.reserve(*pods("first", "second"))
    node.joins.cgroups.add("second")
    node.joins.fails = 3
    node.follow()
    until(lambda: node.joins.joined == ["second"])


def test_a_pod_that_is_in_the_row_and_has_no_limit_yet_is_not_forgotten(node: Node) -> None:
    node.joins.fails = 1_000_000
    node.joins.cgroups.add("second")
    node.follow()
    node.reserve(*pods("first", "second"))
    until(lambda: "second" in node.joins.has_limits)
    node.reserve(*pods("first", "second", "third"))
    until(lambda: (CLAIM.uid, "third") in node.joining._expected)
    node.joins.fails = 0
    until(lambda: node.joins.joined == ["second"])


def test_a_pod_that_leaves_before_it_came_is_not_waited_for(node: Node) -> None:
    node.follow()
    node.reserve(*pods("first", "second"))
    until(lambda: node.joins.looked)
    node.reserve(*pods("first"))
    until(lambda: not node.joining._expected)
    node.joins.cgroups |= {"second", "third"}
    node.reserve(*pods("first", "third"))
    until(lambda: node.joins.joined == ["third"])


def test_a_claim_that_is_not_followed_any_more_is_not_watched(node: Node) -> None:
    node.follow()
    node.joining.follow({})
    until(lambda: not [thread for thread in threading.enumerate() if thread.name == "claim-watch"])
    node.joins.cgroups |= {"second", "third"}
    node.reserve(*pods("first", "second"))
    node.reserve(*pods("first", "third"))
    node.joining.follow({CLAIM.uid: CLAIM})
    until(lambda: node.joins.joined == ["third"])
    assert node.joining.problem is None


class Recorded:
    """A real watch, and whether it was closed."""

    def __init__(self, watch: joining.Watch) -> None:
        self.watch = watch
        self.closed = False

    def __iter__(self) -> Iterator[tuple[str, Mapping[str, Any]]]:
        return iter(self.watch)

    def close(self) -> None:
        self.closed = True
        self.watch.close()


def test_a_watch_that_is_given_up_is_closed(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    watches: list[Recorded] = []
    watch_claim = node.kube.watch_claim

    def watched(namespace: str, name: str, *, timeout_s: float) -> joining.Watch:
        watches.append(Recorded(watch_claim(namespace, name, timeout_s=timeout_s)))
        return watches[-1]

    def has(*_: object) -> bool:
        if len(watches) == 1:
            raise RecordError("the row cannot be read")
        return True

    monkeypatch.setattr(node.kube, "watch_claim", watched)
    monkeypatch.setattr(node.joins, "has", has)
    node.follow()
    until(lambda: len(watches) == 2 and node.joining.problem is None)
    assert [watch.closed for watch in watches] == [True, False]


def test_a_server_that_is_away_is_a_problem_until_it_is_back(node: Node) -> None:
    node.follow()
    node.server.stop()
    until(lambda: "not seen" in (node.joining.problem or ""))
    node.server.start()
    node.reserve(*pods("first", "second"))
    node.joins.cgroups.add("second")
    until(lambda: node.joins.joined == ["second"])
    assert node.joining.problem is None


def test_consumers_that_are_no_pods_are_told(node: Node) -> None:
    node.reserve({"apiGroup": "scheduling.k8s.io", "resource": "podgroups", "name": "gang", "uid": "g"})
    node.follow()
    until(lambda: node.joins.told == [("podgroups gang",)])
    node.reserve(*pods("first"))
    until(lambda: node.joins.told == [("podgroups gang",), ()])


@pytest.mark.parametrize(
    "claim",
    [
        None,
        [],
        {},
        {"metadata": {"uid": "another"}, "status": {"reservedFor": pods("x")}},
        {"metadata": "text"},
    ],
)
def test_another_claim_and_what_cannot_be_read_say_nothing(claim: object) -> None:
    assert joining.consumers(claim, uid=CLAIM.uid) is None


@pytest.mark.parametrize(
    ("reserved", "found"),
    [
        (None, ()),
        ("pods", ()),
        ([None, 7, "x"], ()),
        ([*pods("a"), {"resource": "pods", "name": ["x"], "uid": None}, {}], ("a",)),
        (pods("a" * 9999), ("a" * 253,)),
        (pods(*(str(number) for number in range(1000))), tuple(str(number) for number in range(256))),
    ],
)
def test_a_list_of_consumers_may_be_anything(reserved: object, found: tuple[str, ...]) -> None:
    told = joining.consumers({"metadata": {"uid": CLAIM.uid}, "status": {"reservedFor": reserved}}, uid=CLAIM.uid)
    assert told is not None
    assert tuple(pod.uid for pod in told.pods) == found
