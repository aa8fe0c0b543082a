# SPDX-License-Identifier: Apache-2.0
"""The Node as publishing knows it: read less and less often, sooner where that matters, remembered while the server is away,
missed when it is gone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from driver import errors
from driver.publish import node


class Api:
    def __init__(self) -> None:
        self.body: dict[str, Any] = {"metadata": {"uid": "u1"}}
        self.error: errors.ApiError | None = None
        self.reads = 0

    def get_node(self, name: str, *, timeout_s: float) -> Mapping[str, Any]:
        assert (name, timeout_s > 0) == ("n1", True)
        self.reads += 1
        if self.error is not None:
            raise self.error
        return self.body


class Facts:
    def __init__(self) -> None:
        self.api = Api()
        self.now = 1000.0
        self.facts = node.NodeFacts(self.api, name="n1", clock=lambda: self.now)


AWAY = errors.ApiError("away", reason=errors.ApiReason.UNAVAILABLE)


def test_it_is_read_less_and_less_often() -> None:
    known = Facts()
    assert known.facts.due_s() == 0
    pauses = []
    for _ in range(7):
        known.facts.look()
        pauses.append(known.facts.due_s())
        known.now += pauses[-1]
    assert (pauses, known.api.reads) == ([15, 30, 60, 120, 240, 300, 300], 7)


def test_it_is_not_read_before_it_is_due() -> None:
    known = Facts()
    assert known.facts.uid() == "u1"
    known.api.body = {"metadata": {"uid": "u2"}}
    known.now += 14
    assert (known.facts.uid(), known.facts.due_s(), known.api.reads) == ("u1", 1.0, 1)
    known.now += 1
    assert (known.facts.uid(), known.api.reads) == ("u2", 2)


def test_where_it_keeps_us_from_publishing_it_is_read_every_minute() -> None:
    known = Facts()
    for _ in range(7):
        known.facts.read()
    assert known.facts.due_s() == 300
    known.facts.hurry()
    assert known.facts.due_s() == 60
    known.now += 50
    known.facts.hurry()
    assert known.facts.due_s() == 10
    known.now += 10
    known.facts.look()
    assert known.facts.due_s() == 60


def test_the_last_reading_serves_while_the_server_is_away() -> None:
    known = Facts()
    known.facts.look()
    known.now += 15
    known.api.error = AWAY
    assert (known.facts.uid(), known.facts.due_s()) == ("u1", 60.0)
    known.now += 60
    known.api.error = errors.ApiError("no", reason=errors.ApiReason.FORBIDDEN)
    with pytest.raises(errors.ApiError, match="no"):
        known.facts.look()


def test_without_any_reading_the_error_is_told() -> None:
    known = Facts()
    known.api.error = AWAY
    with pytest.raises(errors.ApiError, match="away"):
        known.facts.look()


def test_a_node_that_is_gone_is_not_remembered_and_waited_for() -> None:
    known = Facts()
    known.facts.look()
    known.api.error = errors.ApiError("not found", reason=errors.ApiReason.NOT_FOUND, status=404)
    with pytest.raises(errors.ApiError, match="--node-name must be its name") as caught:
        known.facts.read()
    assert caught.value.retryable
    with pytest.raises(errors.ApiError):
        known.facts.look()


@pytest.mark.parametrize("body", [{}, {"metadata": None}, {"metadata": {"uid": ""}}, {"metadata": {"uid": 7}}])
def test_a_node_without_a_uid_owns_nothing(body: dict[str, Any]) -> None:
    known = Facts()
    known.api.body = body
    with pytest.raises(errors.ApiError, match="no UID"):
        known.facts.uid()


def test_an_answer_that_is_no_node_is_not_remembered() -> None:
    known = Facts()
    known.api.body = {"kind": "Status", "metadata": {}}
    with pytest.raises(errors.ApiError) as caught:
        known.facts.look()
    assert caught.value.retryable
    known.api.body = {"metadata": {"uid": "u1"}}
    assert known.facts.uid() == "u1"
