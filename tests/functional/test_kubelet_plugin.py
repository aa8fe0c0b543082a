# SPDX-License-Identifier: Apache-2.0
"""The DRA service on its real socket, called through the generated stubs of kubelet's protocol.

- both versions give the same answer, but for share ids, which v1beta1 has no place for
- exactly one entry for every UID asked for, whatever happens to a claim; a repeat gives the same bytes
- a claim's failure, an exception, a missing, strange or unspeakable answer: that claim's error, never the RPC's
- odd requests: empty, duplicate, hostile UIDs and names
- the preparer sees the deadline, the end of the caller, and the log context of its call
- many calls at once; a Prepare that waits keeps no Unprepare out
"""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc
import pytest

from driver import values
from driver.kubelet import plugin, server
from driver.standin import kubelet_client
from proto.dra.v1 import api_pb2 as dra_v1
from proto.dra.v1beta1 import api_pb2 as dra_v1beta1
from tests.fakes import kubelet_side

DRIVER = "gpu.nearfield.dev"


class Agent:
    """A KubeletServer with fakes behind it, and a client on its socket."""

    def __init__(self, root: Path) -> None:
        self.preparer = kubelet_side.FakePreparer()
        self.calls = kubelet_side.Calls()
        self.server = server.KubeletServer(
            driver_name=DRIVER,
            registry_dir=root / "plugins_registry",
            plugin_dir=root / "plugins" / DRIVER,
            pod_uid=None,
            preparer=self.preparer,
            health=kubelet_side.FakeHealth(),
            observer=self.calls,
        )
        self.server.start()
        self.client = kubelet_client.DraClient(self.server.paths.service)

    def close(self) -> None:
        self.client.close()
        self.server.stop()


@pytest.fixture
def agent() -> Iterator[Agent]:
    with kubelet_side.short_directory() as root:
        agent = Agent(root)
        yield agent
        agent.close()


SHARE = "0b5c7a4e-0000-4000-8000-000000000000"
VERSIONS: tuple[kubelet_client.Version, ...] = ("v1", "v1beta1")


@pytest.mark.parametrize("version", VERSIONS)
def test_prepare_and_unprepare(agent: Agent, version: kubelet_client.Version) -> None:
    claims = [kubelet_side.claim(1), kubelet_side.claim(2)]
    assert agent.client.prepare(claims, version=version) == {ref.uid: kubelet_side.prepared(ref) for ref in claims}
    assert agent.client.unprepare(claims, version=version) == {ref.uid: values.Unprepared() for ref in claims}
    assert [(seen.operation, seen.refs) for seen in agent.preparer.seen] == [
        ("prepare", tuple(claims)),
        ("unprepare", tuple(claims)),
    ]
    assert agent.calls.rpcs == [("NodePrepareResources", True), ("NodeUnprepareResources", True)]


def test_share_ids_are_for_v1_alone(agent: Agent) -> None:
    claim = kubelet_side.claim(1)
    with_share = kubelet_side.prepared(claim, share_id=SHARE)
    agent.preparer.answers[claim.uid] = with_share
    assert agent.client.prepare([claim]) == {claim.uid: with_share}
    assert agent.client.prepare([claim], version="v1beta1") == {claim.uid: kubelet_side.prepared(claim)}
    request = dra_v1beta1.NodePrepareResourcesRequest(
        claims=[dra_v1beta1.Claim(namespace=claim.namespace, uid=claim.uid, name=claim.name)]
    )
    with grpc.insecure_channel(f"unix:{agent.server.paths.service}") as channel:
        raw: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(
            f"/{plugin.SERVICE_V1BETA1}/{plugin.PREPARE}"
        )
        assert SHARE.encode() not in raw(request.SerializeToString())


def test_repeat_gives_the_same_bytes(agent: Agent) -> None:
    with grpc.insecure_channel(f"unix:{agent.server.paths.service}") as channel:
        raw: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(f"/{plugin.SERVICE_V1}/{plugin.PREPARE}")
        claims = [kubelet_side.claim(number) for number in range(20)]
        request = dra_v1.NodePrepareResourcesRequest(
            claims=[dra_v1.Claim(namespace=c.namespace, uid=c.uid, name=c.name) for c in claims]
        ).SerializeToString()
        answers = {raw(request) for _ in range(5)}
    assert len(answers) == 1
    uids = [ref.uid.encode() for ref in claims]
    (answer,) = answers
    assert [answer.index(uid) for uid in uids] == sorted(answer.index(uid) for uid in uids)


def test_one_bad_claim_does_not_touch_the_good_one(agent: Agent, caplog: pytest.LogCaptureFixture) -> None:
    good, bad = kubelet_side.claim(1), kubelet_side.claim(2)
    agent.preparer.answers[bad.uid] = values.Failed(
        message="GPU gpu-0000-1b-00-0 is held by ResourceClaim team-b/other"
    )
    with caplog.at_level(logging.WARNING):
        answer = agent.client.prepare([bad, good])
    assert answer == {bad.uid: agent.preparer.answers[bad.uid], good.uid: kubelet_side.prepared(good)}
    assert caplog.records == []  # the preparer says it, once
    assert agent.calls.rpcs == [("NodePrepareResources", False)]


def test_failed_unprepare(agent: Agent) -> None:
    good, bad = kubelet_side.claim(1), kubelet_side.claim(2)
    agent.preparer.answers[bad.uid] = values.Failed(message="the record cannot be written")
    assert agent.client.unprepare([good, bad]) == {
        good.uid: values.Unprepared(),
        bad.uid: values.Failed(message="the record cannot be written"),
    }


def test_empty_reason_is_still_an_error(agent: Agent) -> None:
    claim = kubelet_side.claim(1)
    agent.preparer.answers[claim.uid] = values.Failed(message="")
    answer = agent.client.prepare([claim])[claim.uid]
    assert isinstance(answer, values.Failed)


def test_reason_is_bounded_and_made_speakable(agent: Agent) -> None:
    claim = kubelet_side.claim(1)
    agent.preparer.answers[claim.uid] = values.Failed(message="\udcff" + "é" * 10_000)
    answer = agent.client.prepare([claim])[claim.uid]
    assert isinstance(answer, values.Failed)
    assert answer.message.startswith("?é")
    assert len(answer.message.encode()) <= plugin.ERROR_MAX_BYTES


@pytest.mark.parametrize("operation", ["prepare", "unprepare"])
def test_exception_becomes_the_error_of_the_claims_with_its_traceback_in_the_log(
    agent: Agent, caplog: pytest.LogCaptureFixture, operation: str
) -> None:
    def work(refs: Sequence[values.ClaimRef], call: values.Call) -> None:
        raise ZeroDivisionError("the unexpected")

    agent.preparer.work = work
    claims = [kubelet_side.claim(1), kubelet_side.claim(2)]
    answer: Mapping[values.ClaimUid, Any] = getattr(agent.client, operation)(claims)
    assert set(answer) == {claim.uid for claim in claims}
    assert all("ZeroDivisionError: the unexpected" in failed.message for failed in answer.values())
    assert "request_id 1" in answer[claims[0].uid].message
    (record,) = [record for record in caplog.records if record.exc_info]
    assert record.exc_info is not None
    assert record.exc_info[0] is ZeroDivisionError


def test_claim_without_answer_and_answer_without_claim(agent: Agent) -> None:
    first, second, foreign = kubelet_side.claim(1), kubelet_side.claim(2), kubelet_side.claim(3)

    agent.preparer.forgotten = {second.uid}
    agent.preparer.unasked = {foreign.uid: kubelet_side.prepared(foreign)}
    answer = agent.client.prepare([first, second])
    assert set(answer) == {first.uid, second.uid}
    assert answer[first.uid] == kubelet_side.prepared(first)
    failed = answer[second.uid]
    assert isinstance(failed, values.Failed)
    assert "Internal error in the driver: TypeError: None is no answer to NodePrepareResources" in failed.message


def test_answer_that_no_message_can_hold_is_that_claims_error(agent: Agent) -> None:
    good, bad = kubelet_side.claim(1), kubelet_side.claim(2)
    good_device = kubelet_side.prepared(bad).devices[0]
    devices = (good_device, dataclasses.replace(good_device, pool="\udcff"))
    agent.preparer.answers[bad.uid] = values.Prepared(devices=devices)
    answer = agent.client.v1.NodePrepareResources(
        dra_v1.NodePrepareResourcesRequest(
            claims=[dra_v1.Claim(namespace=c.namespace, uid=c.uid, name=c.name) for c in (bad, good)]
        )
    ).claims
    assert "UnicodeEncodeError" in answer[bad.uid].error
    assert list(answer[bad.uid].devices) == []
    assert (answer[good.uid].error, len(answer[good.uid].devices)) == ("", 2)


def test_empty_request(agent: Agent) -> None:
    assert agent.client.prepare([]) == {}
    assert agent.client.unprepare([]) == {}
    assert agent.preparer.seen == []


def test_claim_named_twice_is_one_claim(agent: Agent) -> None:
    claim = dra_v1.Claim(namespace="n", uid="u", name="c")
    answer = agent.client.v1.NodePrepareResources(dra_v1.NodePrepareResourcesRequest(claims=[claim, claim]))
    assert list(answer.claims) == ["u"]
    assert answer.claims["u"].error == ""
    assert len(agent.preparer.seen[0].refs) == 1


def test_uid_with_two_names_is_refused(agent: Agent) -> None:
    claims = [dra_v1.Claim(namespace="n", uid="u", name=name) for name in ("c", "d", "c")]
    answer = agent.client.v1.NodePrepareResources(dra_v1.NodePrepareResourcesRequest(claims=claims))
    assert "UID u stands for both ResourceClaim n/c (UID u) and ResourceClaim n/d (UID u)" in answer.claims["u"].error
    assert agent.preparer.seen == []


HOSTILE = ["", ".", "..", "../../etc/passwd", "a/b", "a\nb", "a\0b", "-rf", "x" * 129, "ü", " ", "%2e%2e"]


@pytest.mark.parametrize("uid", HOSTILE)
def test_hostile_uid_reaches_nobody(agent: Agent, uid: str) -> None:
    claims = [dra_v1.Claim(namespace="n", uid=uid, name="c"), dra_v1.Claim(namespace="n", uid="good", name="c")]
    prepare = agent.client.v1.NodePrepareResources(dra_v1.NodePrepareResourcesRequest(claims=claims))
    unprepare = agent.client.v1beta1.NodeUnprepareResources(
        dra_v1beta1.NodeUnprepareResourcesRequest(
            claims=[dra_v1beta1.Claim(namespace=c.namespace, uid=c.uid, name=c.name) for c in claims]
        )
    )
    assert set(prepare.claims) == set(unprepare.claims) == {uid, "good"}
    assert "Claim UID" in prepare.claims[uid].error
    assert "Claim UID" in unprepare.claims[uid].error
    assert not prepare.claims["good"].error
    assert not unprepare.claims["good"].error
    assert [[ref.uid for ref in seen.refs] for seen in agent.preparer.seen] == [["good"], ["good"]]


@pytest.mark.parametrize(
    ("namespace", "name"),
    [("", "c"), ("n", ""), ("n", "../c"), ("n/x", "c"), ("N", "c"), ("n" * 64, "c"), ("n", "c" * 254), ("n", "c\n")],
)
def test_names_that_the_api_server_never_gives_are_refused(agent: Agent, namespace: str, name: str) -> None:
    claims = [dra_v1.Claim(namespace=namespace, uid="u", name=name)]
    answer = agent.client.v1.NodePrepareResources(dra_v1.NodePrepareResourcesRequest(claims=claims))
    assert "cannot be those of a ResourceClaim" in answer.claims["u"].error
    assert len(answer.claims["u"].error) < 500
    assert agent.preparer.seen == []


def test_bytes_that_are_no_request_are_an_rpc_error_and_the_next_call_is_served(agent: Agent) -> None:
    with grpc.insecure_channel(f"unix:{agent.server.paths.service}") as channel:
        raw: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(f"/{plugin.SERVICE_V1}/{plugin.PREPARE}")
        with pytest.raises(grpc.RpcError):
            raw(b"\xff\xff\xff")
    assert agent.client.prepare([kubelet_side.claim(1)])


def test_preparer_sees_deadline_and_log_context(agent: Agent) -> None:
    agent.client.prepare([kubelet_side.claim(1)], timeout_s=40)
    agent.client.unprepare([kubelet_side.claim(1)], timeout_s=4000)
    agent.client.v1.NodePrepareResources(
        dra_v1.NodePrepareResourcesRequest(claims=[dra_v1.Claim(namespace="n", uid="u", name="c")])
    )
    first, second, third = agent.preparer.seen
    assert 10 < first.remaining_s <= 40
    assert 10 < second.remaining_s <= plugin.KUBELET_DEADLINE_S
    assert 10 < third.remaining_s <= plugin.KUBELET_DEADLINE_S
    assert first.context == {"method": "NodePrepareResources", "request_id": "1"}
    assert second.context == {"method": "NodeUnprepareResources", "request_id": "2"}


def test_preparer_sees_that_the_caller_has_gone(agent: Agent) -> None:
    entered, over = threading.Event(), threading.Event()

    def work(refs: Sequence[values.ClaimRef], call: values.Call) -> None:
        entered.set()
        pause = threading.Event()
        while not call.over():
            pause.wait(0.01)
        over.set()

    agent.preparer.work = work
    pending = agent.client.v1.NodePrepareResources.future(
        dra_v1.NodePrepareResourcesRequest(claims=[dra_v1.Claim(namespace="n", uid="u", name="c")])
    )
    assert entered.wait(30)
    pending.cancel()
    assert over.wait(30)


def test_eight_calls_at_once(agent: Agent) -> None:
    together = threading.Barrier(8)
    agent.preparer.work = lambda _refs, _call: void(together.wait(30))
    with futures.ThreadPoolExecutor(8) as pool:
        claims = [kubelet_side.claim(number) for number in range(8)]
        answers = list(pool.map(lambda claim: agent.client.prepare([claim]), claims))
    assert answers == [{claim.uid: kubelet_side.prepared(claim)} for claim in claims]
    assert len({seen.context["request_id"] for seen in agent.preparer.seen}) == 8


def void(_value: object) -> None:
    """A call for its effect, where a lambda has a value."""


def test_prepares_that_wait_keep_no_unprepare_out(agent: Agent) -> None:
    waiting = 110  # one for each pod that a node takes by default
    all_in, free = threading.Semaphore(0), threading.Event()

    def work(refs: Sequence[values.ClaimRef], call: values.Call) -> None:
        if refs[0].name != "claim-999":
            all_in.release()
            assert free.wait(30)

    agent.preparer.work = work
    pending = [
        agent.client.v1.NodePrepareResources.future(
            dra_v1.NodePrepareResourcesRequest(claims=[dra_v1.Claim(namespace="n", uid=f"u{number}", name="c")])
        )
        for number in range(waiting)
    ]
    for _ in range(waiting):
        assert all_in.acquire(timeout=30)
    last = kubelet_side.claim(999)
    assert agent.client.unprepare([last]) == {last.uid: values.Unprepared()}
    free.set()
    assert [len(call.result().claims) for call in pending] == [1] * waiting
