# SPDX-License-Identifier: Apache-2.0
"""A publisher whose attributes are lists, against servers that keep them and servers that do not.

Aspects: kept; refused, found by a dry run before anything is written; a restart and a reconnect write nothing; a server that
learns it later; a refusal for another reason is no reason to leave lists out.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from driver.publish import attributes, wanted
from driver.standin import apiserver, apiserver_faults
from tests.fakes import publishing
from tests.fakes.publishing import NODE, Running, until

LISTS = replace(publishing.OPTIONS, numa_list=True, pcie_switches=True)
SWITCHES = (publishing.at(0x19), publishing.at(0x15))
GPU = publishing.gpu(0x1B, pci={"switch": SWITCHES[0], "switches": SWITCHES, "numa_node": 1})


@contextlib.contextmanager
def running(**options: Any) -> Iterator[Running]:
    with apiserver.ApiServer(**options) as server:
        server.seed("nodes", {"metadata": {"name": NODE}})
        made = Running(server, wanted.from_snapshot(publishing.snapshot(GPU), options=LISTS))
        made.start()
        try:
            yield made
        finally:
            made.close()


def said(made: Running) -> dict[str, Any]:
    (device,) = made.spec()["devices"]
    return dict(device["attributes"])


def test_a_server_that_keeps_lists_has_them() -> None:
    with running(feature_gates={"DRAListTypeAttributes": True}) as made:
        made.settled()
        assert said(made)[attributes.NUMA_NODE] == {"ints": [1]}
        assert said(made)[attributes.PCIE_SWITCHES] == {"strings": ["0000:19:00.0", "0000:15:00.0"]}
        assert (made.publisher.state().findings, made.publisher.state().reason) == ((), None)
        assert made.server.count("create", "resourceslices", dry_run=True) == 1


@pytest.mark.parametrize("version", ["1.35", "1.37"])
def test_where_the_server_keeps_none_the_gpu_is_offered_without(version: str) -> None:
    with running(version=version) as made:
        made.settled()
        assert said(made)[attributes.NUMA_NODE] == {"int": 1}
        assert said(made)[attributes.PCIE_SWITCH] == {"string": "0000:19:00.0"}
        assert attributes.PCIE_SWITCHES not in said(made)
        state = made.publisher.state()
        assert [finding.code for finding in state.findings] == ["lists-not-kept"]
        assert "DRAListTypeAttributes" in (state.reason or "")
        assert made.told.writes == [("create", "success")]
        made.restart()
        made.settled()
        watches = made.server.count("watch", "resourceslices")
        made.server.cut()
        until(lambda: made.server.count("watch", "resourceslices") > watches)
        made.settled()
        assert (made.writes(), made.store.saves) == (1, 1)


def test_a_server_that_keeps_lists_from_now_on_gets_them() -> None:
    with running() as made:
        made.settled()
        made.server.stop()
        made.server.turn("DRAListTypeAttributes", on=True)
        made.server.start()
        until(lambda: said(made)[attributes.NUMA_NODE] == {"ints": [1]})
        made.settled()
        assert made.publisher.state().findings == ()


def test_a_refusal_for_another_reason_leaves_no_list_out() -> None:
    with running(feature_gates={"DRAListTypeAttributes": True}) as made:
        made.settled()
        refusal = made.server.faults.inject(apiserver_faults.Refuse(422, "Invalid", "quota is used up"), verb="create")
        made.restart()
        made.server.remove("resourceslices", made.only_name())
        until(lambda: "quota is used up" in (made.publisher.state().reason or ""))
        assert made.slices() == []
        refusal.remove()
        made.settled()
        assert said(made)[attributes.NUMA_NODE] == {"ints": [1]}
