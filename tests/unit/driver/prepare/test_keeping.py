# SPDX-License-Identifier: Apache-2.0
"""keeping: what is set for shares stays as the rows say, with a real record, real CDI files and real locks.

Aspects: a start after anything; a minute later; pods that join; what people are told; two instances; nothing where nothing is shared.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from discovery import limits
from discovery.limits import ComputeMode
from driver.prepare import (
    cdi,
    cdidir,
    cgroups,
    enforcing,
    gpusettings,
    joining,
    keeping,
    ledger,
    locks,
    modes,
    plan,
    settling,
    store,
)
from driver.sharing.shares import Compute, Enforcement, Memory, TimeSlice
from tests.fakes import keeping as fakes
from tests.fakes import preparing
from tests.fakes.keeping import GIB, GPU, OTHER, share
from tests.fakes.publishing import until

ROOT = Path(__file__).parents[4]
MPS = Enforcement(memory=Memory.MPS, compute=Compute.MPS)
TURNS = Enforcement(memory=Memory.CGROUP, compute=Compute.TIMESLICE)


class Watch:
    """A watch that tells nothing until it is closed."""

    def __init__(self) -> None:
        self._closed = threading.Event()

    def __iter__(self) -> Iterator[tuple[str, dict[str, object]]]:
        self._closed.wait()
        return iter(())

    def close(self) -> None:
        self._closed.set()


class Api:
    """An API server on which nothing happens."""

    def __init__(self) -> None:
        self.watched: list[str] = []

    def watch_claim(self, namespace: str, name: str, *, timeout_s: float) -> Watch:
        assert namespace
        assert timeout_s > 0
        self.watched.append(name)
        return Watch()


class Node:
    """A node that outlives its agents."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.limiting = fakes.Limiting()
        self.supervisor = fakes.Supervisor()
        self.slices = fakes.Slices()
        self.tree = fakes.PodTree(folder / "cgroup")
        self.gpus = {gpu: keeping.Gpu(uuid=fakes.uuid_of(gpu)) for gpu in (GPU, OTHER)}
        self.agents: list[Agent] = []

    def agent(self) -> Agent:
        """Another agent, in the place of the one before."""
        if self.agents:
            self.agents.pop().end()
        self.agents.append(Agent(self))
        return self.agents[-1]


class Agent:
    """One agent. Its loops run where a test starts them."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.now_s = 0.0
        self.stop = threading.Event()
        self.leads = True
        self.api = Api()
        self.events = fakes.Events()
        state = node.folder / "state"
        state.mkdir(exist_ok=True)
        dialect = cdi.Dialect(driver=preparing.DRIVER, mock=True)
        self.files = cdidir.CdiDirectory(node.folder / "cdi", dialect=dialect)
        self.files.make()
        self.record = store.Store(state, boot_id=fakes.BOOT_ID, salvage=lambda: (), reports=preparing.Reports())
        assert self.record.open() is None
        pods = cgroups.Cgroups(node.tree.root)
        claim_locks = locks.Locks(state, stop=self.stop)
        gpu_modes = modes.Modes(
            node.limiting,
            node.slices,
            gpusettings.GpuSettings(state, boot_id=fakes.BOOT_ID),
            seen=node.limiting.modes.get,
        )
        self.enforcer = enforcing.Enforcer(node.limiting, node.supervisor, pods, gpu_modes)
        self.keeper = keeping.Keeper(
            keeping.Rows(self.record, boot_id=fakes.BOOT_ID),
            record=self.record,
            files=self.files,
            claim_locks=claim_locks,
            leads=lambda: self.leads,
            enforcer=self.enforcer,
            settler=settling.Settler(node.limiting, pods, gpu_modes),
            gpu_modes=gpu_modes,
            pods=pods,
            gpus=lambda: node.gpus,
            api=self.api,
            supervisor=node.supervisor,
            events=self.events,
            stop=self.stop,
            clock=lambda: self.now_s,
        )

    def prepare(self, entry: ledger.Entry) -> ledger.Entry:
        others = [row for row in self.record.sharing() if row.claim.uid != entry.claim.uid]
        self.enforcer.apply(entry, others, begun=False, timeout_s=30)
        self.put(entry)
        return entry

    def put(self, entry: ledger.Entry) -> None:
        """The row alone."""
        planned = plan.PreparePlan(entry=entry, columns=ledger.to_columns(entry))
        self.files.write_claim(entry, planned.columns)
        self.record.put(planned, previous=None, timeout_s=30)

    def forget(self, entry: ledger.Entry) -> None:
        """The row alone goes."""
        self.record.remove(entry, timeout_s=30)

    def look(self, *, later_s: float = 61.0) -> None:
        self.now_s += later_s
        self.keeper.look()

    def codes(self) -> list[str]:
        return [finding.code for finding in self.keeper.findings()]

    def end(self) -> None:
        self.stop.set()
        self.keeper._joining.follow({})
        self.record.close()


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    made = Node(tmp_path)
    yield made
    for agent in made.agents:
        agent.end()


def test_a_driver_that_was_reloaded_has_everything_again(node: Node) -> None:
    agent = node.agent()
    node.tree.add(1, 2)
    agent.prepare(share(1, pods=[1], by=TURNS, turn=TimeSlice.LONG))
    agent.prepare(share(2, gpu=OTHER, by=MPS))
    limited, placed = dict(node.limiting.limits), dict(node.supervisor.shares)
    node.limiting.limits.clear()
    node.limiting.modes.clear()
    node.slices.turns.clear()
    node.agent().look()
    assert node.limiting.limits == limited
    assert node.limiting.modes == {OTHER: ComputeMode.EXCLUSIVE_PROCESS}
    assert node.slices.turns == {fakes.uuid_of(GPU): TimeSlice.LONG}
    assert node.supervisor.shares == placed


def test_what_a_killed_agent_left_is_taken_away(node: Node) -> None:
    agent = node.agent()
    node.tree.add(1)
    node.gpus[GPU] = keeping.Gpu(uuid=fakes.uuid_of(GPU), limits_pods=True)
    node.limiting.modes[OTHER] = ComputeMode.PROHIBITED
    for entry in (share(1, pods=[1], by=TURNS, turn=TimeSlice.LONG), share(2, gpu=OTHER, by=MPS)):
        agent.enforcer.apply(entry, [], begun=False, timeout_s=30)
    assert node.limiting.of(GPU)
    again = node.agent()
    again.look()
    assert node.limiting.limits == {}
    assert node.limiting.modes == {OTHER: ComputeMode.PROHIBITED}
    assert node.slices.turns == {fakes.uuid_of(GPU): TimeSlice.DEFAULT}
    assert node.supervisor.shares == {}
    calls = len(node.limiting.calls)
    again.look()
    assert node.limiting.calls[calls:] == [("memory-use", GPU)]


def test_a_node_that_shares_nothing_is_not_touched(node: Node) -> None:
    agent = node.agent()
    for _ in range(3):
        agent.look()
    assert node.limiting.calls == []
    assert node.slices.calls == 0
    assert agent.keeper.seen() == ()
    assert agent.keeper.findings() == ()


def test_rows_of_another_boot_ask_for_nothing(node: Node) -> None:
    agent = node.agent()
    node.tree.add(1)
    agent.put(replace(share(1, pods=[1]), boot_id="before"))
    agent.look()
    assert node.limiting.limits == {}


def test_use_is_read_every_minute_and_forgotten_with_the_last_share(node: Node) -> None:
    agent = node.agent()
    node.tree.add(1)
    entry = agent.prepare(share(1, memory=4 * GIB, pods=[1]))
    node.limiting.used[fakes.Place(GPU, str(node.tree.path(1)))] = GIB
    agent.look()
    (seen,) = agent.keeper.seen()
    assert (seen.device, seen.pod, seen.claims, seen.used, seen.limit) == (
        entry.holds[0],
        fakes.pod_uid(1),
        (entry.claim.uid,),
        GIB,
        4 * GIB,
    )
    node.limiting.used.clear()
    agent.look(later_s=3)
    assert agent.keeper.seen() == (seen,)
    agent.look()
    assert agent.keeper.seen()[0].used is None
    agent.forget(entry)
    agent.look()
    assert agent.keeper.seen() == ()
    assert node.limiting.limits == {}


def test_a_gpu_that_is_lost_is_a_finding_and_keeps_no_other_from_being_looked_after(node: Node) -> None:
    agent = node.agent()
    node.tree.add(1)
    agent.prepare(share(1, pods=[1]))
    agent.prepare(share(2, gpu=OTHER, pods=[1]))
    node.limiting.limits.clear()
    with fakes.failing(node.limiting, GPU):
        agent.look()
        assert [(each.code, each.subject) for each in agent.keeper.findings()] == [("share-limit-lost", str(GPU))]
    assert node.limiting.of(OTHER)
    agent.look(later_s=2)
    assert agent.codes() == ["share-limit-lost"]
    agent.look(later_s=2)
    assert agent.codes() == []
    assert node.limiting.of(GPU)


def test_a_gpu_that_a_prepare_is_at_work_with_is_left_to_it(node: Node) -> None:
    agent = node.agent()
    node.tree.add(1)
    agent.prepare(share(1, pods=[1]))
    node.limiting.limits.clear()
    other = locks.Locks(node.folder / "state", stop=threading.Event())
    with other.gpus((GPU,), patience=locks.Deadline(1)):
        agent.look()
        assert node.limiting.limits == {}
    agent.look()
    assert node.limiting.of(GPU)


def test_one_that_does_not_lead_does_nothing_and_takes_over(node: Node) -> None:
    agent = node.agent()
    node.tree.add(1)
    agent.prepare(share(1, pods=[1]))
    node.limiting.limits.clear()
    agent.leads = False
    agent.look()
    assert node.limiting.limits == {}
    assert agent.api.watched == []
    agent.leads = True
    agent.look()
    assert node.limiting.of(GPU)
    until(lambda: agent.api.watched == ["claim-1"])


def test_a_pod_that_joins_has_the_limit_over_restarts_and_loses_it_with_the_claim(node: Node) -> None:
    agent = node.agent()
    node.tree.add(1, 2, 3)
    entry = agent.prepare(share(1, memory=4 * GIB, pods=[1]))
    agent.prepare(share(2, memory=GIB, pods=[2]))
    agent.look()
    pod = joining.Pod(name="late", uid=fakes.pod_uid(2))
    assert agent.keeper.there(pod)
    assert not agent.keeper.has(entry.claim, pod)
    assert agent.keeper.join(entry.claim, pod)
    assert agent.keeper.has(entry.claim, pod)
    found = {name: hard for name, (_, hard) in node.limiting.of(GPU).items()}
    assert found == {f"pod{fakes.pod_uid(1)}": 4 * GIB, f"pod{fakes.pod_uid(2)}": 5 * GIB}
    told = [(about, reason) for about, reason, _ in agent.events.told]
    assert (entry.claim, "ShareJoined") in told
    assert ("late", "ShareJoined") in told
    agent.look()
    assert agent.codes() == ["share-joined"]
    row = agent.record.get(entry.claim.uid)
    assert row is not None
    assert row.pods == (fakes.pod_uid(1), fakes.pod_uid(2))
    assert agent.files.verify_claim(row)

    node.limiting.limits.clear()
    again = node.agent()
    again.look()
    assert {name: hard for name, (_, hard) in node.limiting.of(GPU).items()} == found
    assert again.codes() == ["share-joined"]
    again.enforcer.undo(row, [each for each in again.record.sharing() if each != row], timeout_s=30)
    assert list(node.limiting.of(GPU)) == [f"pod{fakes.pod_uid(2)}"]
    again.forget(row)
    again.look()
    assert {hard for _, hard in node.limiting.of(GPU).values()} == {GIB}
    assert again.codes() == []


def test_a_claim_that_a_group_of_pods_uses_is_a_finding_while_it_does(node: Node) -> None:
    agent = node.agent()
    node.tree.add(1)
    entry = agent.prepare(share(1, pods=[1]))
    agent.look()
    agent.keeper.others(entry.claim, ("podgroups gang",))
    assert agent.codes() == ["share-joined"]
    agent.look()
    assert agent.codes() == ["share-joined"]
    agent.keeper.others(entry.claim, ())
    assert agent.codes() == []


def test_a_pod_that_cannot_be_limited_yet_is_tried_again(node: Node) -> None:
    agent = node.agent()
    node.tree.add(1, 2)
    entry = agent.prepare(share(1, pods=[1]))
    pod = joining.Pod(name="late", uid=fakes.pod_uid(2))
    with fakes.failing(node.limiting, GPU):
        assert not agent.keeper.join(entry.claim, pod)
    assert agent.events.told == []
    assert agent.keeper.join(entry.claim, pod)
    assert len(node.limiting.of(GPU)) == 2


def test_a_pod_that_joins_a_claim_that_is_gone_or_has_no_limit_needs_nothing(node: Node) -> None:
    agent = node.agent()
    node.tree.add(1)
    pod = joining.Pod(name="late", uid=fakes.pod_uid(1))
    whole = agent.prepare(share(1, gpu=OTHER, whole=True))
    for claim in (share(2).claim, whole.claim):
        assert agent.keeper.has(claim, pod)
        assert agent.keeper.join(claim, pod)
    assert node.limiting.limits == {}
    assert agent.events.told == []


def test_shares_that_are_advice_are_told_once(node: Node) -> None:
    advice = Enforcement(memory=Memory.NONE, compute=Compute.NONE)
    agent = node.agent()
    agent.prepare(share(1, by=advice))
    agent.look()
    new = agent.prepare(share(2, by=advice))
    agent.look(later_s=1)
    agent.look(later_s=1)
    assert [(about, reason) for about, reason, _ in agent.events.told] == [(new.claim, "ShareAdvisory")]


def test_it_runs_and_ends(node: Node) -> None:
    agent = node.agent()
    node.tree.add(1)
    before = set(threading.enumerate())
    thread = threading.Thread(target=agent.keeper.run)
    thread.start()
    agent.prepare(share(1, pods=[1], by=Enforcement(memory=Memory.CGROUP, compute=Compute.MPS)))
    agent.keeper.wake()
    until(lambda: agent.api.watched == ["claim-1"])
    node.supervisor.restart()
    until(lambda: node.supervisor.shares)
    agent.stop.set()
    agent.keeper.wake()
    thread.join(40)
    assert not thread.is_alive()
    until(lambda: not [each for each in set(threading.enumerate()) - before if each.name in ("joining", "claim-watch")])


def test_a_limit_of_no_pod_of_ours_is_not_looked_at(node: Node) -> None:
    agent = node.agent()
    (node.tree.root / "system.slice").mkdir()
    place = fakes.Place(GPU, str(node.tree.root / "system.slice"))
    node.limiting.limits[place] = limits.MemoryLimit(soft=0, hard=GIB)
    node.tree.add(1)
    agent.prepare(share(1, pods=[1]))
    agent.look()
    assert place in node.limiting.limits


def test_every_code_is_explained() -> None:
    sources = "".join(
        (ROOT / f"driver/prepare/{name}.py").read_text(encoding="utf-8") for name in ("keeping", "mpscare")
    )
    codes = re.findall(r'_finding\(\s*"([a-z-]+)"', sources)
    page = (ROOT / "docs/findings.md").read_text(encoding="utf-8")
    section = page.partition("## About shares that are prepared")[2].partition("\n## ")[0]
    assert re.findall(r"^\| `([a-z-]+)` \|", section, re.MULTILINE) == sorted(set(codes)) != []
