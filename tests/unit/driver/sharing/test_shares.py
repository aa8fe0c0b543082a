# SPDX-License-Identifier: Apache-2.0
"""The terms of shares: what is a multiple of a step, and what the API would not take."""

from __future__ import annotations

from dataclasses import replace

import pytest

from driver.sharing import abilities, shares
from driver.sharing.shares import Capacity, Compute, Enforcement, Memory

GIB = 1 << 30
SHARES = shares.Shares(
    memory_step=GIB, compute_step=5, max_sharers=8, memory=Memory.COOPERATIVE, compute=Compute.TIMESLICE
)
BY_MPS = Enforcement(memory=Memory.CGROUP, compute=Compute.MPS)


def test_terms_of_a_gpu_whose_memory_is_no_multiple_of_the_step() -> None:
    offered = shares.terms(SHARES, BY_MPS, memory_bytes=81559 << 20, compute=100)
    assert offered is not None
    assert offered.memory == Capacity(value=81559 << 20, default=79 * GIB, step=GIB, most=79 * GIB)
    assert offered.compute == Capacity(value=100, default=100, step=5, most=100)
    assert offered.sharers == 8


def test_terms_of_a_mig_instance_have_its_part_of_the_gpu() -> None:
    offered = shares.terms(replace(SHARES, default_compute=60), BY_MPS, memory_bytes=10 * GIB, compute=14)
    assert offered is not None
    assert offered.compute == Capacity(value=14, default=10, step=5, most=10)


def test_a_number_is_what_is_charged_for_memory_alone() -> None:
    offered = shares.terms(replace(SHARES, default_compute=10), BY_MPS, memory_bytes=80 * GIB, compute=100)
    assert offered is not None
    assert offered.compute == Capacity(value=100, default=10, step=5, most=100)


def test_shares_that_take_turns_have_no_percentage() -> None:
    turns = Enforcement(memory=Memory.NONE, compute=Compute.TIMESLICE)
    offered = shares.terms(SHARES, turns, memory_bytes=80 * GIB, compute=100)
    assert offered is not None
    assert offered.compute is None


@pytest.mark.parametrize(("memory_bytes", "compute"), [(2 * GIB - 1, 100), (80 * GIB, 9)])
def test_there_must_be_room_for_two_steps(memory_bytes: int, compute: int) -> None:
    assert shares.terms(SHARES, BY_MPS, memory_bytes=memory_bytes, compute=compute) is None
    assert shares.terms(SHARES, BY_MPS, memory_bytes=2 * GIB, compute=10) is not None


def test_the_strongest_that_can_be_done_is_used() -> None:
    assert abilities.enforcement(SHARES, abilities.Abilities()) == BY_MPS
    weaker = abilities.Abilities(memory={Memory.CGROUP: "old driver"}, compute={Compute.MPS: "no supervisor"})
    assert abilities.enforcement(SHARES, weaker) == Enforcement(memory=Memory.MPS, compute=Compute.COOPERATIVE)


def test_nothing_weaker_than_the_policy_is_used() -> None:
    strict = replace(SHARES, memory=Memory.MPS, compute=Compute.NONE)
    nothing = abilities.Abilities(
        memory=dict.fromkeys([Memory.CGROUP, Memory.MPS, Memory.COOPERATIVE], "no"),
        compute=dict.fromkeys([Compute.MPS, Compute.COOPERATIVE, Compute.TIMESLICE], "never"),
    )
    assert abilities.enforcement(strict, nothing) == abilities.Lacking(reasons=("memory by cgroup or mps: no",))
    named = replace(nothing, memory={Memory.CGROUP: "old", Memory.MPS: "away"})
    assert abilities.enforcement(replace(strict, compute=Compute.MPS), named) == abilities.Lacking(
        reasons=("memory by cgroup: old", "memory by mps: away", "compute by mps: never")
    )
    advisory = replace(strict, memory=Memory.NONE)
    assert abilities.enforcement(advisory, nothing) == Enforcement(memory=Memory.NONE, compute=Compute.NONE)
