# SPDX-License-Identifier: Apache-2.0
"""What is looked at beside the driver, for who decides on policies.

- what the supervisor says counts, and what it does not say has a reason
- one that is away for a moment may be back, also after a start; one that is away for long is not there
- who asks before the first look gets nothing that would change what is published
- changes are told, and nothing else is
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from discovery import limits, model
from driver.app import means
from driver.mps import client, values
from driver.mps.shares import Protocol
from driver.sharing.shares import Compute, Memory
from tests.fakes import publishing

BOTH = values.Ability(instance="a", program="/usr/bin/nvidia-cuda-mps-control", protocols=frozenset(Protocol))
GPU = publishing.gpu(1, memory_limits=True, compute_mode=limits.ComputeMode.DEFAULT)
SNAPSHOT = publishing.snapshot(
    GPU,
    nvidia_driver=model.NvidiaDriver(version="615.10", cuda_version=(13, 4)),
    host=model.Host(cgroup=2),
)
PLACE = Path("/run/nearfield/mps")


class World:
    """A supervisor, nvidia-smi and a clock, and who looks at them."""

    def __init__(self) -> None:
        self.ability: values.Ability | None = BOTH
        self.turns: str | None = None
        self.pods: str | None = None
        self.now_s = 1000.0
        self.watched = means.Watched(
            directory=PLACE,
            ability=lambda: self.ability,
            time_slices=lambda: self.turns,
            pods=lambda: self.pods,
            clock=lambda: self.now_s,
        )

    def kept_away(self) -> set[Compute]:
        return set(self.watched.can(SNAPSHOT)(GPU).compute)


def test_what_the_supervisor_says_counts() -> None:
    world = World()
    assert world.watched.look()
    assert world.kept_away() == set()
    world.ability = replace(
        BOTH,
        protocols=frozenset({Protocol.LEGACY}),
        reasons={Protocol.V3: "nvidia-cuda-mps-control 580 is older than 615"},
    )
    assert world.watched.look()
    can = world.watched.can(SNAPSHOT)(GPU)
    assert can.compute == {Compute.MPS: "nvidia-cuda-mps-control 580 is older than 615"}
    assert not can.passing_compute
    world.ability = replace(BOTH, protocols=frozenset())
    world.watched.look()
    assert "does not speak v3" in world.watched.can(SNAPSHOT)(GPU).compute[Compute.MPS]
    world.turns = "nvidia-smi is not there"
    assert world.watched.look()
    assert world.watched.can(SNAPSHOT)(GPU).compute[Compute.TIMESLICE] == "nvidia-smi is not there"
    world.pods = "there is no kubepods"
    assert world.watched.look()
    assert world.watched.can(SNAPSHOT)(GPU).memory[Memory.CGROUP] == "there is no kubepods"
    assert not world.watched.look()


def test_one_that_is_away_for_a_moment_may_be_back() -> None:
    world = World()
    world.watched.look()
    world.ability = None
    assert world.watched.look()
    can = world.watched.can(SNAPSHOT)(GPU)
    assert can.passing_compute == {Compute.MPS, Compute.COOPERATIVE}
    assert can.passing_memory == {Memory.MPS, Memory.COOPERATIVE}
    assert f"no MPS supervisor answers in {PLACE}" in can.compute[Compute.MPS]
    world.now_s += means.AWAY_S - 1
    assert not world.watched.look()
    world.now_s += 1
    assert world.watched.look()
    assert not world.watched.can(SNAPSHOT)(GPU).passing_compute
    world.ability = BOTH
    assert world.watched.look()
    assert world.kept_away() == set()
    world.ability = None
    world.watched.look()
    assert world.watched.can(SNAPSHOT)(GPU).passing_compute


def test_one_that_is_not_there_yet_when_the_agent_starts_may_come() -> None:
    world = World()
    world.ability = None
    world.watched.look()
    assert world.watched.can(SNAPSHOT)(GPU).passing_compute
    world.now_s += means.AWAY_S
    assert world.watched.look()
    assert not world.watched.can(SNAPSHOT)(GPU).passing_compute


def test_before_the_first_look_nothing_is_gone_for_good() -> None:
    can = World().watched.can(SNAPSHOT)(GPU)
    assert set(can.compute) - can.passing_compute == set()
    assert set(can.memory) - can.passing_memory == set()


def test_where_no_supervisor_is_nothing_is_waited_for(tmp_path: Path) -> None:
    found = means.found(client.Client(tmp_path).ability(), directory=tmp_path, time_slices=None, pods=None)
    assert found.mps_v3 == found.mps_legacy
    assert f"no MPS supervisor answers in {tmp_path}" in str(found.mps_v3)
    assert not found.mps_passing


def test_changes_are_told_until_the_end() -> None:
    world = World()
    stop, told = threading.Event(), threading.Event()
    thread = threading.Thread(target=lambda: world.watched.run(stop, changed=told.set), daemon=True)
    thread.start()
    world.watched.wait(30)
    assert told.wait(30)
    assert world.kept_away() == set()
    stop.set()
    thread.join(30)
    assert not thread.is_alive()


def test_one_bad_look_is_not_the_last_one(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(means, "LOOK_S", 0.01)
    looks: Iterator[OSError | values.Ability] = iter([OSError("a folder that nobody thought of"), BOTH])
    world = World()
    stop = threading.Event()

    def ability() -> values.Ability | None:
        found = next(looks)
        if isinstance(found, OSError):
            raise found
        return found

    watched = means.Watched(
        directory=PLACE, ability=ability, time_slices=lambda: None, pods=lambda: None, clock=lambda: world.now_s
    )
    watched.run(stop, changed=stop.set)
    assert set(watched.can(SNAPSHOT)(GPU).compute) == set()
    assert "could not be looked at" in caplog.text
