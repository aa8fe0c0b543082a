# SPDX-License-Identifier: Apache-2.0
"""Which machine an agent replays.

Aspects: --mock alone; the label wins over it; no label; a label that names nothing; what is waited for; the end while waiting.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from discovery.mock import shelf, zoo
from driver import config, options
from driver.app import machine
from driver.errors import ApiError, ApiReason, ConfigError

KEY = "mock.nearfield.dev/machine"


class Nodes:
    """Answers what it was given, one after the other, and the last for ever."""

    def __init__(self, *answers: Mapping[str, Any] | ApiError) -> None:
        self._answers: Sequence[Mapping[str, Any] | ApiError] = answers
        self.asked: list[str] = []

    def get_node(self, name: str, *, timeout_s: float) -> Mapping[str, Any]:
        assert timeout_s > 0
        answer = self._answers[min(len(self.asked), len(self._answers) - 1)]
        self.asked.append(name)
        if isinstance(answer, ApiError):
            raise answer
        return answer


def settings(**texts: str) -> config.Settings:
    given = {"node_name": "n1", **texts}
    return options.build_settings({name: options.Given(text=text) for name, text in given.items()})


def labelled(value: str) -> dict[str, Any]:
    return {"metadata": {"name": "n1", "labels": {KEY: value, "other": "x"}}}


def choose(chosen: config.Settings, nodes: Nodes) -> tuple[str | None, list[str | None]]:
    said: list[str | None] = []
    found = machine.choose(chosen, nodes=nodes, stop=threading.Event(), waiting=said.append, retry_s=0)
    return found, said


def test_without_a_label_option_nobody_is_asked() -> None:
    nodes = Nodes()
    assert choose(settings(mock="dgx-h100"), nodes) == ("dgx-h100", [])
    assert choose(settings(mock="/etc/machine.yaml"), nodes) == ("/etc/machine.yaml", [])
    assert choose(settings(), nodes) == (None, [])
    assert nodes.asked == []


@pytest.mark.parametrize("name", shelf.names())
def test_the_label_wins_over_mock(name: str) -> None:
    nodes = Nodes(labelled(name))
    assert choose(settings(mock="l40s-8-pcie", mock_node_label=KEY), nodes)[0] == name
    assert choose(settings(mock_node_label=KEY), nodes)[0] == name
    assert nodes.asked == ["n1", "n1"]


@pytest.mark.parametrize(
    "node", [{}, {"metadata": None}, {"metadata": {"labels": []}}, {"metadata": {"labels": {"x": "y"}}}]
)
def test_where_there_is_no_label_mock_counts(node: dict[str, Any]) -> None:
    assert choose(settings(mock="/m.yaml", mock_node_label=KEY), Nodes(node))[0] == "/m.yaml"


def test_neither_label_nor_mock() -> None:
    with pytest.raises(ConfigError) as raised:
        choose(settings(mock_node_label=KEY), Nodes({"metadata": {"labels": {}}}))
    assert str(raised.value) == (
        f"Node n1 has no label {KEY} (--mock-node-label), and --mock is not given: label the Node with one of"
        f" {', '.join(zoo.names())}, or give --mock"
    )


@pytest.mark.parametrize("value", ["", "dgx-h200", "machine.yaml", "DGX-H100"])
def test_a_label_that_names_no_machine_says_which_there_are(value: str) -> None:
    with pytest.raises(ConfigError) as raised:
        choose(settings(mock="dgx-h100", mock_node_label=KEY), Nodes(labelled(value)))
    assert str(raised.value) == (
        f"Label {KEY}={value} of Node n1 (--mock-node-label) names no machine: there are {', '.join(zoo.names())}"
    )


@pytest.mark.parametrize("reason", [ApiReason.UNAVAILABLE, ApiReason.FORBIDDEN, ApiReason.NOT_FOUND, ApiReason.OTHER])
def test_a_node_that_cannot_be_read_is_waited_for_and_the_reason_is_said(
    reason: ApiReason, caplog: pytest.LogCaptureFixture
) -> None:
    refused = ApiError("GET Node n1 on https://api: no", reason=reason)
    found, said = choose(settings(mock_node_label=KEY), Nodes(refused, refused, labelled("dgx-h100")))
    why = f"Which machine to replay says label {KEY} of the Node, which cannot be read: GET Node n1 on https://api: no"
    assert (found, said) == ("dgx-h100", [why, why, None])
    assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == [why]


def test_the_end_while_waiting() -> None:
    stop = threading.Event()

    def end(_why: str | None) -> None:
        stop.set()

    refused = ApiError("away", reason=ApiReason.UNAVAILABLE)
    assert machine.choose(settings(mock_node_label=KEY), nodes=Nodes(refused), stop=stop, waiting=end) is None
