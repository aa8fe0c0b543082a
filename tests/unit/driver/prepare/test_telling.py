# SPDX-License-Identifier: Apache-2.0
"""telling: what people read about their shares, once a claim."""

from __future__ import annotations

from dataclasses import replace

import pytest

from driver.prepare import ledger, telling
from driver.prepare.joining import Pod
from driver.sharing.shares import Compute, Enforcement, Memory
from tests.fakes import keeping
from tests.fakes.keeping import GIB, OTHER, share

MPS = Enforcement(memory=Memory.MPS, compute=Compute.MPS)


def two(one: ledger.Entry, other: ledger.Entry) -> ledger.Entry:
    """A claim with the shares of two."""
    return replace(
        one,
        devices=(*one.devices, *other.devices),
        results=(*one.results, replace(other.results[0], request="more")),
        cdi_ids=(*one.cdi_ids, *other.cdi_ids),
    )


@pytest.mark.parametrize(
    ("memory", "compute", "said"),
    [
        (Memory.NONE, Compute.NONE, "4Gi of memory and 25 percent of the compute of device gpu-0000-1b-00-0"),
        (Memory.NONE, Compute.MPS, "4Gi of memory of device gpu-0000-1b-00-0"),
        (Memory.CGROUP, Compute.NONE, "25 percent of the compute of device gpu-0000-1b-00-0"),
        (Memory.NONE, Compute.TIMESLICE, "4Gi of memory of device"),
        (Memory.CGROUP, Compute.TIMESLICE, None),
        (Memory.MPS, Compute.MPS, None),
        (Memory.COOPERATIVE, Compute.COOPERATIVE, None),
    ],
)
def test_what_nothing_keeps_a_claim_to_is_advice(memory: Memory, compute: Compute, said: str | None) -> None:
    levels = Enforcement(memory=memory, compute=compute)
    advice = telling.advisory(share(1, by=levels))
    assert (advice is None) if said is None else (said in (advice or ""))
    assert telling.advisory(share(1, by=levels, whole=True)) is None


def test_several_shares_by_mps_are_for_several_containers() -> None:
    assert telling.several_mps(share(1, by=MPS)) is None
    assert telling.several_mps(two(share(1), share(1, gpu=OTHER))) is None
    said = telling.several_mps(two(share(1, by=MPS), share(1, by=MPS, gpu=OTHER)))
    assert said is not None
    assert "gpu (gpu-0000-1b-00-0), more (gpu-0000-3d-00-0)" in said


def test_a_claim_is_told_once_and_one_that_was_there_before_not_again() -> None:
    events = keeping.Events()
    told = telling.Telling(events)
    advice = Enforcement(memory=Memory.NONE, compute=Compute.NONE)
    old, new = share(1, by=advice), share(2, by=advice)
    told.tell([old], first=True)
    told.tell([old, new], first=False)
    told.tell([old, new], first=False)
    assert [(claim, reason) for claim, reason, _ in events.told] == [(new.claim, "ShareAdvisory")]
    told.tell([], first=False)
    told.tell([new], first=False)
    assert len(events.told) == 2


def test_other_consumers_are_told_once() -> None:
    events = keeping.Events()
    told = telling.Telling(events)
    row = share(1, by=MPS)
    told.tell([row], first=False)
    for _ in range(2):
        told.reserved(row.claim, ("podgroups gang",))
    assert [(claim, reason) for claim, reason, _ in events.told] == [(row.claim, "ShareJoined")]


def test_claims_that_others_than_pods_use_are_known_as_long_as_they_do() -> None:
    told = telling.Telling(keeping.Events())
    one, two = share(1, pods=[1]), share(2, pods=[2])
    told.tell([one, two], first=False)
    told.reserved(one.claim, ("podgroups gang",))
    told.reserved(two.claim, ("podgroups crew",))
    (first, said), (second, _) = told.unlimited()
    assert (first, second) == (one.claim, two.claim)
    assert "reserved for podgroups gang as well: pods that are not named in status.reservedFor get no limit" in said
    told.reserved(one.claim, ())
    told.tell([one], first=False)
    assert told.unlimited() == ()


def test_a_pod_that_joined_is_told_with_what_it_may_use() -> None:
    row = share(1, memory=20 * GIB, pods=[1, 2])
    said = telling.joins(row, Pod(name="p", uid="u"))
    assert "Pod p has joined ResourceClaim team-a/claim-1" in said
    assert "20Gi of gpu-0000-1b-00-0" in said
    assert "its 2 pods" in said
    assert "2 pods use" in telling.joined(row, row.pods)
