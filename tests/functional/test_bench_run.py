# SPDX-License-Identifier: Apache-2.0
"""The benchmark against a real agent, as little of it as there can be.

- a part measures, judges, and says that the Go driver was left out where there is none
- claims beside the measured ones stay prepared, so the agent holds what the level says
- a driver that does not start is an error with its last words, and nothing of it stays
"""

from __future__ import annotations

import dataclasses
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from hack.bench import bench, drivers, peer, standin
from hack.bench.errors import BenchError
from hack.bench.parts import prepare

OPTIONS = dataclasses.replace(bench.QUICK, rounds=1, gap_s=0, levels=(0, 9))
NO_PEER = peer.Peer(binary=None, missing="the Go driver: not in this test")


@pytest.fixture
def setting() -> Iterator[bench.Bench]:
    directory = Path(tempfile.mkdtemp(prefix="nfb-"))
    with standin.StandIn(directory / "api") as server:
        (directory / "part").mkdir()
        yield bench.Bench(OPTIONS, directory / "part", server, NO_PEER)
    shutil.rmtree(directory)


def test_a_part_measures_and_judges(setting: bench.Bench) -> None:
    part = prepare.run(setting)
    assert part.left_out == ("the Go driver: not in this test",)
    measured = {(series.name, series.subject): series.values for series in part.series}
    assert all(len(values) == 1 and values[0] > 0 for values in measured.values())
    assert {("prepare, 0 prepared", "agent"), ("floor, 9 prepared", "floor")} <= set(measured)
    judged = {figure.what: figure for figure in part.figures}
    assert judged["API calls of 10 repeats of a completed claim"].measured == 0
    assert judged["prepare against its floor, 9 prepared"].met is not None
    cdi = next(setting.directory.glob("agent-*/cdi"))
    assert len(list(cdi.glob("gpu.nearfield.dev_*.json"))) == 9


def test_a_driver_that_does_not_start_is_said(setting: bench.Bench) -> None:
    spec = setting.agent("--mock=no-such-machine")
    with pytest.raises(BenchError, match=r"(?s)ended with 2.*no-such-machine"):
        drivers.Ready(spec, setting.server)
