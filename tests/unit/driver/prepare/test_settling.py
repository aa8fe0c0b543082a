# SPDX-License-Identifier: Apache-2.0
"""settling: a GPU is brought into the state that the rows ask for, whatever became of it."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from discovery import limits
from discovery.errors import WorkError
from discovery.limits import ComputeMode
from driver.prepare import cgroups, gpusettings, ledger, modes, settling
from driver.sharing.shares import Compute, Enforcement, Memory, TimeSlice
from tests.fakes import keeping
from tests.fakes.keeping import GIB, GPU, OTHER, share

T = 30.0
MPS = Enforcement(memory=Memory.MPS, compute=Compute.MPS)
TURNS = Enforcement(memory=Memory.CGROUP, compute=Compute.TIMESLICE)
UUID = keeping.uuid_of(GPU)


class Node:
    """What a Settler works on."""

    def __init__(self, folder: Path) -> None:
        self.limiting = keeping.Limiting()
        self.slices = keeping.Slices()
        self.tree = keeping.PodTree(folder / "cgroup")
        self.pods = cgroups.Cgroups(self.tree.root)
        settings = gpusettings.GpuSettings(folder, boot_id=keeping.BOOT_ID)
        self.modes = modes.Modes(self.limiting, self.slices, settings, seen=self.limiting.modes.get)
        self.settler = settling.Settler(self.limiting, self.pods, self.modes, clock=lambda: 17.0)

    def limits(self, *rows: ledger.Entry) -> tuple[settling.Seen, ...]:
        return self.settler.settle_limits(GPU, rows, timeout_s=T)

    def settle_modes(self, *rows: ledger.Entry, uuid: str | None = UUID, again: bool = False) -> None:
        self.settler.settle_modes(GPU, uuid, rows, again=again, timeout_s=T)

    def found(self) -> dict[str, tuple[int, int | None]]:
        return {name.removeprefix("pod"): found for name, found in self.limiting.of(GPU).items()}


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


def test_limits_that_are_gone_or_changed_are_set_again_and_what_no_row_asks_for_goes(
    node: Node, caplog: pytest.LogCaptureFixture
) -> None:
    node.tree.add(1, 2, 3, 4)
    kept, gone, changed, left = (keeping.Place(GPU, str(node.tree.path(pod))) for pod in (1, 2, 3, 4))
    node.limiting.limits = {
        kept: limits.MemoryLimit(soft=GIB, hard=GIB),
        changed: limits.MemoryLimit(soft=0, hard=9 * GIB),
        left: limits.MemoryLimit(soft=2 * GIB, hard=2 * GIB),
    }
    node.limiting.used[kept] = 5
    with caplog.at_level(logging.WARNING):
        seen = node.limits(*(share(pod, memory=pod * GIB, pods=[pod]) for pod in (1, 2, 3)), share(9, pods=[9]))
    assert node.found() == {keeping.pod_uid(pod): (pod * GIB, pod * GIB) for pod in (1, 2, 3)}
    assert gone in node.limiting.limits
    assert len(caplog.messages) == 3
    assert {(each.pod, each.used, each.limit, each.read_at) for each in seen} == {
        (keeping.pod_uid(1), 5, GIB, 17.0),
        (keeping.pod_uid(2), None, 2 * GIB, 17.0),
        (keeping.pod_uid(3), None, 3 * GIB, 17.0),
    }
    assert {each.device for each in seen} == {share(1).holds[0]}


def test_a_limit_that_an_admin_set_above_all_pods_is_nobodys_to_take_away(node: Node) -> None:
    node.tree.add(1, 2)
    admins = limits.MemoryLimit(soft=0, hard=9 * GIB)
    above = keeping.Place(GPU, str(node.tree.path(1).parent))
    node.limiting.limits = {above: admins} | {keeping.Place(GPU, str(node.tree.path(pod))): admins for pod in (1, 2)}
    node.limits(share(1, memory=GIB, pods=[1]))
    assert node.limiting.limits[above] == admins
    assert node.found()[keeping.pod_uid(1)] == (GIB, GIB)
    assert node.found()[keeping.pod_uid(2)] == (0, 9 * GIB)
    assert [name for name, _ in node.limiting.calls] == ["memory-use", "limit-memory"]


def test_what_is_as_it_should_be_is_not_touched(node: Node) -> None:
    node.tree.add(1)
    place = keeping.Place(GPU, str(node.tree.path(1)))
    node.limiting.limits[place] = limits.MemoryLimit(soft=4 * GIB + 4096, hard=4 * GIB + 4096)
    (seen,) = node.limits(share(1, memory=GIB, pods=[1]), share(2, memory=3 * GIB, pods=[1]))
    assert seen.claims == (share(1).claim.uid, share(2).claim.uid)
    assert node.limiting.calls == [("memory-use", GPU)]
    assert node.limits(share(3, gpu=OTHER, pods=[1])) == ()
    assert node.found() == {}


def test_a_node_with_many_pods_is_asked_in_parts_and_those_with_shares_come_first(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settling, "ASKED_AT_ONCE", 3)
    node.tree.add(*range(1, 9))
    left = keeping.Place(GPU, str(node.tree.path(1)))
    node.limiting.limits[left] = limits.MemoryLimit(soft=GIB, hard=GIB)
    (seen,) = node.limits(share(8, memory=GIB, pods=[8]))
    assert seen.pod == keeping.pod_uid(8)
    assert node.found() == {keeping.pod_uid(8): (GIB, GIB)}
    assert [name for name, _ in node.limiting.calls] == ["memory-use", "limit-memory", "memory-use", "memory-use"]


def test_without_pods_nothing_is_asked(node: Node) -> None:
    assert node.limits(share(1, pods=[1])) == ()
    assert node.limiting.calls == []


def test_a_mode_that_somebody_changed_is_set_again_and_restored_at_the_end(
    node: Node, caplog: pytest.LogCaptureFixture
) -> None:
    node.limiting.modes[GPU] = ComputeMode.PROHIBITED
    row = share(1, by=MPS)
    node.modes.one_process(GPU, begun=False, timeout_s=T)
    node.limiting.modes[GPU] = ComputeMode.DEFAULT
    with caplog.at_level(logging.WARNING):
        node.settle_modes(row)
        node.settle_modes(row)
    assert node.limiting.modes[GPU] is ComputeMode.EXCLUSIVE_PROCESS
    assert len(caplog.messages) == 1
    node.settle_modes()
    assert node.limiting.modes[GPU] is ComputeMode.PROHIBITED
    calls = len(node.limiting.calls)
    node.settle_modes()
    assert len(node.limiting.calls) == calls
    assert node.modes.gpus() == ()


def test_turns_are_set_again_where_a_driver_may_have_forgotten_them(node: Node) -> None:
    node.slices.turns[UUID] = TimeSlice.SHORT
    row = share(1, by=TURNS, turn=TimeSlice.LONG)
    node.settle_modes(row)
    node.slices.turns[UUID] = TimeSlice.DEFAULT
    node.settle_modes(row)
    assert node.slices.turns[UUID] is TimeSlice.DEFAULT
    for _ in range(2):
        node.settle_modes(row, again=True)
        assert node.slices.turns[UUID] is TimeSlice.LONG
    node.settle_modes()
    assert node.slices.turns[UUID] is TimeSlice.SHORT


def test_turns_of_a_gpu_that_cannot_be_named_are_restored_later(node: Node) -> None:
    node.slices.turns[UUID] = TimeSlice.SHORT
    node.settle_modes(share(1, by=TURNS, turn=TimeSlice.LONG))
    node.settle_modes(uuid=None)
    assert node.slices.turns[UUID] is TimeSlice.LONG
    assert node.modes.gpus() == (GPU,)
    node.settle_modes()
    assert node.slices.turns[UUID] is TimeSlice.SHORT
    assert node.modes.gpus() == ()


def test_a_gpu_that_is_lost_is_an_error(node: Node) -> None:
    node.tree.add(1)
    with keeping.failing(node.limiting, GPU):
        with pytest.raises(WorkError):
            node.limits(share(1, pods=[1]))
        with pytest.raises(WorkError):
            node.settle_modes(share(1, by=MPS))
