# SPDX-License-Identifier: Apache-2.0
"""The recorder of Events.

Aspects: the object as the API wants it; the same thing again; what is said before an API is there; servers that are away
or refuse; a full queue; long messages and names; stopping.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from driver import errors, values
from driver.kube import events
from tests.fakes.publishing import until

CLAIM = values.ClaimRef(uid=values.ClaimUid("uid-1"), namespace="ml", name="train")


class Api:
    """Takes Events; `fails` are raised first, one a call."""

    def __init__(self) -> None:
        self.created: list[tuple[str, Mapping[str, Any]]] = []
        self.patched: list[tuple[str, str, Mapping[str, Any]]] = []
        self.fails: list[Exception] = []

    def create_event(self, namespace: str, body: Mapping[str, Any], *, timeout_s: float) -> Mapping[str, Any]:
        assert timeout_s > 0
        self._fail()
        self.created.append((namespace, body))
        return body

    def patch_event(
        self, namespace: str, name: str, patch: Mapping[str, Any], *, timeout_s: float
    ) -> Mapping[str, Any]:
        assert timeout_s > 0
        self._fail()
        self.patched.append((namespace, name, patch))
        return patch

    def _fail(self) -> None:
        if self.fails:
            raise self.fails.pop(0)


class Recording:
    """A recorder with a clock of ours."""

    def __init__(self) -> None:
        self.api = Api()
        self.counted: list[bool] = []
        self.now = dt.datetime(2026, 1, 2, 3, 4, 5, tzinfo=dt.UTC)
        self.recorder = events.EventRecorder(
            component="gpu.nearfield.dev", host="n1", observer=self, clock=lambda: self.now, retry_s=0.01
        )

    def event(self, *, ok: bool) -> None:
        self.counted.append(ok)

    def say(self, message: str = "no such device") -> None:
        self.recorder.claim(CLAIM, reason="PrepareFailed", message=message)

    def finish(self) -> None:
        self.recorder.stop(timeout_s=40)


@pytest.fixture
def recording() -> Iterator[Recording]:
    made = Recording()
    made.recorder.start(made.api)
    yield made
    made.finish()


def test_an_event_on_a_claim_is_found_where_people_look(recording: Recording) -> None:
    recording.say()
    recording.finish()
    ((namespace, body),) = recording.api.created
    name = body["metadata"]["name"]
    assert name.startswith("train.")
    assert (namespace, dict(body)) == (
        "ml",
        {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"name": name, "namespace": "ml"},
            "involvedObject": {
                "apiVersion": "resource.k8s.io/v1",
                "kind": "ResourceClaim",
                "namespace": "ml",
                "name": "train",
                "uid": "uid-1",
            },
            "reason": "PrepareFailed",
            "message": "no such device",
            "type": "Warning",
            "source": {"component": "gpu.nearfield.dev", "host": "n1"},
            "reportingComponent": "gpu.nearfield.dev",
            "reportingInstance": "n1",
            "firstTimestamp": "2026-01-02T03:04:05Z",
            "lastTimestamp": "2026-01-02T03:04:05Z",
            "count": 1,
        },
    )
    assert recording.counted == [True]


def test_an_event_on_the_node_lives_in_the_default_namespace(recording: Recording) -> None:
    recording.recorder.node(reason="NotPublished", message="because", warning=False)
    recording.finish()
    ((namespace, body),) = recording.api.created
    assert (namespace, body["type"]) == ("default", "Normal")
    assert body["involvedObject"] == {"apiVersion": "v1", "kind": "Node", "name": "n1", "uid": "n1"}


def test_an_event_on_a_pod_lies_beside_it(recording: Recording) -> None:
    recording.recorder.pod("ml", "train-0", "uid-2", reason="ShareJoined", message="together")
    recording.finish()
    ((namespace, body),) = recording.api.created
    assert namespace == body["metadata"]["namespace"] == "ml"
    assert body["involvedObject"] == {
        "apiVersion": "v1",
        "kind": "Pod",
        "namespace": "ml",
        "name": "train-0",
        "uid": "uid-2",
    }
    assert (body["reason"], body["message"], body["type"]) == ("ShareJoined", "together", "Warning")


def test_the_same_again_is_counted_up_and_not_at_full_speed(recording: Recording) -> None:
    for seconds in (0, 1, 1, 30, 1):
        recording.now += dt.timedelta(seconds=seconds)
        recording.say()
        until(recording.recorder.idle)
    recording.say("something else")
    recording.finish()
    assert [body["message"] for _, body in recording.api.created] == ["no such device", "something else"]
    ((namespace, name, patch),) = recording.api.patched
    assert (namespace, name) == ("ml", recording.api.created[0][1]["metadata"]["name"])
    assert patch == {"count": 4, "lastTimestamp": "2026-01-02T03:04:37Z"}


def test_the_same_much_later_is_a_new_event(recording: Recording) -> None:
    recording.say()
    until(recording.recorder.idle)
    recording.now += dt.timedelta(minutes=11)
    recording.say()
    recording.finish()
    assert len(recording.api.created) == 2


def test_an_event_that_has_expired_begins_anew(recording: Recording) -> None:
    recording.say()
    until(recording.recorder.idle)
    recording.now += dt.timedelta(minutes=1)
    recording.api.fails = [errors.ApiError("gone", reason=errors.ApiReason.NOT_FOUND, status=404)]
    recording.say()
    recording.finish()
    assert len(recording.api.created) == 2


def test_what_is_said_before_there_is_an_api_is_written_when_there_is() -> None:
    made = Recording()
    made.say()
    made.recorder.start(made.api)
    made.finish()
    assert len(made.api.created) == 1


def test_a_server_that_is_away_for_a_moment_loses_nothing(recording: Recording) -> None:
    recording.api.fails = [errors.ApiError("away", reason=errors.ApiReason.UNAVAILABLE)] * 2
    recording.say()
    recording.finish()
    assert (len(recording.api.created), recording.counted) == (1, [True])


@pytest.mark.parametrize(
    "fails",
    [
        [errors.ApiError("forbidden", reason=errors.ApiReason.FORBIDDEN, status=403)],
        [errors.ApiError("away", reason=errors.ApiReason.UNAVAILABLE)] * 3,
        [KeyError("a bug")],
    ],
)
def test_an_event_that_cannot_be_written_is_counted_and_holds_up_no_other(
    recording: Recording, fails: list[Exception]
) -> None:
    recording.api.fails = fails
    recording.say()
    recording.say("the next")
    recording.finish()
    assert [body["message"] for _, body in recording.api.created] == ["the next"]
    assert recording.counted == [False, True]


def test_a_full_queue_drops_and_never_blocks() -> None:
    made = Recording()
    for number in range(events.QUEUE + 3):
        made.say(str(number))
    assert made.counted == [False] * 3
    made.recorder.stop(timeout_s=0.1)


def test_long_texts_are_cut_between_characters(recording: Recording) -> None:
    recording.say("x" + "ä" * 1000)
    recording.recorder.claim(
        values.ClaimRef(uid=values.ClaimUid("u"), namespace="ml", name="n" * 253), reason="R", message="m"
    )
    recording.finish()
    first, second = (body for _, body in recording.api.created)
    assert first["message"].endswith("ä...")
    assert len(first["message"].encode()) <= 1024
    assert len(second["metadata"]["name"]) <= 253
