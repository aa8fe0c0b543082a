# SPDX-License-Identifier: Apache-2.0
"""enforcing, modes and duties: what is set for the shares of claims, and what is put back after them.

Aspects: limits of one pod add up over its claims, one GPU at a time; the last one of MPS, and of turns, restores what was there
before, whoever that is and however often a call is repeated or cut off; pods, GPUs and supervisors that are gone; nothing is left.
"""

from __future__ import annotations

import itertools
import socket
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from discovery import limits, work
from discovery.errors import WorkError
from discovery.limits import ComputeMode
from discovery.mig import MigPlacement
from driver.errors import MpsError
from driver.mps import client
from driver.prepare import cgroups, enforcing, gpusettings, ledger, modes
from driver.sharing.shares import Compute, Enforcement, Memory, TimeSlice
from tests.fakes import keeping
from tests.fakes.keeping import GIB, GPU, OTHER, share

T = 30.0
MPS = Enforcement(memory=Memory.MPS, compute=Compute.MPS)
CGROUP_MPS = Enforcement(memory=Memory.CGROUP, compute=Compute.MPS)
COOPERATIVE = Enforcement(memory=Memory.COOPERATIVE, compute=Compute.COOPERATIVE)
TURNS = Enforcement(memory=Memory.CGROUP, compute=Compute.TIMESLICE)
NONE = Enforcement(memory=Memory.NONE, compute=Compute.NONE)
TIMEOUT = work.Kind.TIMEOUT


class Node:
    """A node whose state outlives its agents."""

    def __init__(self, folder: Path) -> None:
        self.state = folder / "state"
        self.state.mkdir()
        self.limiting = keeping.Limiting()
        self.supervisor = keeping.Supervisor()
        self.slices = keeping.Slices()
        self.pods = keeping.PodTree(folder / "cgroup")
        self.rows: dict[str, ledger.Entry] = {}
        self.begin()

    def begin(self, boot_id: str = keeping.BOOT_ID) -> None:
        """Another agent."""
        self.settings = gpusettings.GpuSettings(self.state, boot_id=boot_id)
        self.modes = modes.Modes(self.limiting, self.slices, self.settings, seen=self.limiting.modes.get)
        self.enforcer = enforcing.Enforcer(self.limiting, self.supervisor, cgroups.Cgroups(self.pods.root), self.modes)

    def others(self, entry: ledger.Entry) -> list[ledger.Entry]:
        return [row for uid, row in self.rows.items() if uid != entry.claim.uid]

    def prepare(self, entry: ledger.Entry, *, begun: bool = False) -> None:
        self.enforcer.apply(entry, self.others(entry), begun=begun, timeout_s=T)
        self.rows[entry.claim.uid] = entry

    def unprepare(self, entry: ledger.Entry) -> None:
        self.enforcer.undo(entry, self.others(entry), timeout_s=T)
        del self.rows[entry.claim.uid]

    def limited(self) -> dict[str, tuple[int, int | None]]:
        return {name.removeprefix("pod"): found for name, found in self.limiting.of(GPU).items()}


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


def test_the_pod_of_a_share_gets_its_limit_and_loses_it(node: Node) -> None:
    node.pods.add(1, 2)
    node.prepare(share(1, memory=4 * GIB, pods=[1]))
    node.prepare(share(2, memory=6 * GIB, soft=GIB, pods=[2]))
    assert node.limited() == {
        keeping.pod_uid(1): (4 * GIB, 4 * GIB),
        keeping.pod_uid(2): (GIB, 6 * GIB),
    }
    node.unprepare(share(1, pods=[1]))
    assert list(node.limited()) == [keeping.pod_uid(2)]
    assert node.limiting.calls == [("limit-memory", GPU)] * 3


def test_shares_of_one_pod_add_up_for_each_gpu_apart(node: Node) -> None:
    node.pods.add(1)
    first, second = share(1, memory=4 * GIB, pods=[1]), share(2, memory=6 * GIB, soft=0, pods=[1])
    for entry in (first, second, share(3, gpu=OTHER, memory=GIB, pods=[1])):
        node.prepare(entry)
    assert node.limited() == {keeping.pod_uid(1): (4 * GIB, 10 * GIB)}
    assert list(node.limiting.of(OTHER).values()) == [(GIB, GIB)]
    node.unprepare(first)
    assert node.limited() == {keeping.pod_uid(1): (0, 6 * GIB)}
    node.unprepare(second)
    assert node.limited() == {}


def test_a_share_that_has_all_of_the_memory_and_one_that_nothing_keeps_set_nothing(node: Node) -> None:
    for entry in (share(1, pods=[1], whole=True), share(2, by=NONE)):
        node.prepare(entry)
        node.unprepare(entry)
    assert node.limiting.calls == []


def test_a_pod_without_a_cgroup_is_refused_with_the_way_out(node: Node) -> None:
    with pytest.raises(WorkError, match=r"cgroup of pod .* is not below .*--cgroup-root") as caught:
        node.prepare(share(1, pods=[1]))
    assert not caught.value.retryable
    with pytest.raises(WorkError, match="reservedFor"):
        node.prepare(share(1))


def test_a_pod_that_is_gone_took_its_limit_with_it(node: Node) -> None:
    node.pods.add(1)
    entry = share(1, pods=[1])
    node.prepare(entry)
    node.pods.remove(1)
    with keeping.failing(node.limiting, GPU):
        node.unprepare(entry)


def test_a_pod_that_joined_outlives_the_first(node: Node) -> None:
    node.pods.add(2)
    node.prepare(share(1, pods=[1, 2]), begun=True)
    assert list(node.limited()) == [keeping.pod_uid(2)]
    node.pods.remove(2)
    with pytest.raises(WorkError, match="cgroup of pod"):
        node.prepare(share(1, pods=[1, 2]), begun=True)


def test_a_gpu_that_is_lost_keeps_nothing_else_in_place(node: Node) -> None:
    node.pods.add(1)
    entry = share(1, by=CGROUP_MPS, pods=[1])
    node.prepare(entry)
    with keeping.failing(node.limiting, GPU), pytest.raises(WorkError, match="lost"):
        node.unprepare(entry)
    assert node.supervisor.shares == {}
    node.unprepare(entry)
    assert node.limited() == {}


@pytest.mark.parametrize("levels", [MPS, CGROUP_MPS, COOPERATIVE])
@pytest.mark.parametrize("before", [ComputeMode.DEFAULT, ComputeMode.PROHIBITED, ComputeMode.EXCLUSIVE_PROCESS])
def test_the_last_client_of_mps_restores_the_compute_mode(node: Node, levels: Enforcement, before: ComputeMode) -> None:
    node.limiting.modes[GPU] = before
    node.pods.add(1, 2)
    first, second = share(1, by=levels, pods=[1]), share(2, by=levels, pods=[2])
    node.prepare(first)
    node.prepare(second)
    assert node.limiting.modes[GPU] is ComputeMode.EXCLUSIVE_PROCESS
    assert len(node.supervisor.shares) == 2
    node.unprepare(first)
    assert node.limiting.modes[GPU] is ComputeMode.EXCLUSIVE_PROCESS
    node.begin()
    node.unprepare(second)
    assert node.limiting.modes[GPU] is before
    assert node.supervisor.shares == {}
    assert node.modes.gpus() == ()


def test_a_call_that_was_cut_off_does_not_take_its_own_mode_for_what_was_there(node: Node) -> None:
    node.limiting.modes[GPU] = ComputeMode.PROHIBITED
    node.supervisor.refuse = MpsError("not yet", retryable=True)
    entry = share(1, by=MPS)
    with pytest.raises(WorkError, match="not yet") as caught:
        node.prepare(entry)
    assert caught.value.retryable
    node.begin()
    node.supervisor.refuse = None
    node.prepare(entry, begun=True)
    node.unprepare(entry)
    assert node.limiting.modes[GPU] is ComputeMode.PROHIBITED


@pytest.mark.parametrize("probed", [False, True])
def test_a_cut_off_call_whose_notes_are_lost_restores_the_default(node: Node, *, probed: bool) -> None:
    node.limiting.modes[GPU] = ComputeMode.EXCLUSIVE_PROCESS
    entry = share(1, by=MPS)
    if not probed:
        node.modes._seen = lambda _: None
    node.prepare(entry, begun=True)
    node.unprepare(entry)
    assert node.limiting.modes[GPU] is ComputeMode.DEFAULT


def test_a_supervisor_that_has_ended_took_its_shares_with_it_and_one_that_hangs_is_waited_for(node: Node) -> None:
    entry = share(1, by=MPS)
    node.prepare(entry)
    node.supervisor.refuse = MpsError("no answer", retryable=True)
    with pytest.raises(WorkError, match="no answer"):
        node.unprepare(entry)
    assert node.limiting.modes[GPU] is ComputeMode.EXCLUSIVE_PROCESS
    node.supervisor.down = True
    node.unprepare(entry)
    assert node.limiting.modes[GPU] is ComputeMode.DEFAULT


def test_the_real_client_tells_that_nobody_listens(node: Node, tmp_path: Path) -> None:
    entry = share(1, by=MPS)
    node.prepare(entry)
    enforcer = enforcing.Enforcer(
        node.limiting, client.Client(tmp_path / "none"), cgroups.Cgroups(node.pods.root), node.modes
    )
    with pytest.raises(WorkError, match="No MPS supervisor answers") as caught:
        enforcer.apply(entry, [], begun=True, timeout_s=T)
    assert caught.value.retryable
    enforcer.undo(entry, [], timeout_s=T)
    assert node.limiting.modes[GPU] is ComputeMode.DEFAULT
    left = tmp_path / "mps"
    left.mkdir()
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(left / "supervisor.sock"))
    enforcing.Enforcer(node.limiting, client.Client(left), cgroups.Cgroups(node.pods.root), node.modes).undo(
        entry, [], timeout_s=T
    )


def test_what_was_set_before_a_reboot_is_not_restored(node: Node) -> None:
    node.limiting.modes[GPU] = ComputeMode.PROHIBITED
    node.prepare(share(1, by=MPS))
    node.rows.clear()
    node.limiting.modes.clear()
    node.begin("after")
    entry = share(2, by=MPS)
    node.prepare(entry)
    node.unprepare(entry)
    assert node.limiting.modes[GPU] is ComputeMode.DEFAULT


def test_a_share_of_a_mig_instance_changes_no_mode_of_its_gpu(node: Node) -> None:
    whole = share(1, by=MPS)
    part = replace(whole, devices=(replace(whole.devices[0], place=MigPlacement(start=0, size=1)),))
    node.prepare(part)
    assert node.limiting.calls == []
    assert len(node.supervisor.shares) == 1
    node.unprepare(part)
    assert node.limiting.calls == []


@pytest.mark.parametrize("before", list(TimeSlice))
def test_turns_are_set_once_and_restored_by_the_last(node: Node, before: TimeSlice) -> None:
    uuid = keeping.uuid_of(GPU)
    node.slices.turns[uuid] = before
    node.pods.add(1, 2)
    first, second = (share(number, by=TURNS, turn=TimeSlice.SHORT, pods=[number]) for number in (1, 2))
    node.prepare(first)
    calls = node.slices.calls
    node.begin()
    node.prepare(second)
    assert node.slices.calls == calls
    assert node.slices.turns[uuid] is TimeSlice.SHORT
    node.unprepare(second)
    node.unprepare(first)
    assert node.slices.turns[uuid] is before
    assert node.modes.gpus() == ()


def test_turns_that_cannot_be_set_fail_the_claim_and_leave_nothing(node: Node) -> None:
    node.pods.add(1)
    entry = share(1, by=TURNS, turn=TimeSlice.LONG, pods=[1])
    node.slices.fail = WorkError("no nvidia-smi", kind=work.Kind.NOT_SUPPORTED, retryable=False)
    with pytest.raises(WorkError, match="no nvidia-smi"):
        node.prepare(entry)
    node.rows[entry.claim.uid] = entry
    node.unprepare(entry)
    assert node.limited() == {}


STEPS = st.lists(
    st.tuples(st.integers(0, 5), st.sampled_from(["prepare", "cut", "unprepare", "restart", "supervisor"])), max_size=24
)


@settings(max_examples=60, deadline=None)
@given(steps=STEPS, levels=st.sampled_from([MPS, CGROUP_MPS, TURNS, COOPERATIVE]))
def test_whatever_the_order_limits_are_what_rows_say_and_nothing_is_left(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[int, str]], levels: Enforcement
) -> None:
    node = Node(tmp_path_factory.mktemp("node"))
    node.pods.add(0, 1, 2)
    node.limiting.modes[GPU] = ComputeMode.PROHIBITED
    node.slices.turns[keeping.uuid_of(GPU)] = TimeSlice.MEDIUM
    entries = [
        share(number, memory=(number + 1) * GIB, by=levels, pods=[number % 3], turn=TimeSlice.LONG)
        for number in range(6)
    ]
    for number, step in itertools.chain(steps, ((number, "unprepare") for number in range(6))):
        entry = entries[number]
        known = entry.claim.uid in node.rows
        if step == "prepare":
            node.prepare(entry, begun=known)
        elif step == "cut" and not known:
            # It was killed before the row was completed; a started row is there.
            node.prepare(entry)
            node.begin()
        elif step == "unprepare" and known:
            node.unprepare(entry)
        elif step == "restart":
            node.begin()
        elif step == "supervisor":
            node.supervisor.restart()
        expected: dict[str, int] = {}
        for row in node.rows.values():
            if levels.memory is Memory.CGROUP:
                expected[row.pods[0]] = expected.get(row.pods[0], 0) + row.results[0].share.memory  # type: ignore[union-attr]
        assert node.limited() == {pod: (size, size) for pod, size in expected.items()}
    assert node.limiting.modes[GPU] is ComputeMode.PROHIBITED
    assert node.slices.turns[keeping.uuid_of(GPU)] is TimeSlice.MEDIUM
    assert node.supervisor.shares == {}
    assert node.modes.gpus() == ()
    assert limits.NO_LIMIT not in node.limiting.limits.values()
