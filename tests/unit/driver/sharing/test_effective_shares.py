# SPDX-License-Identifier: Apache-2.0
"""The policies of GPUs that are handed out in shares, while somebody has one.

- no value of a policy, no level and no mode changes under a share, over restarts too
- what the node can do may come, go and come back; a free GPU follows at once, one in use when it is free
- what is only away for a moment changes nothing
- who prepares sees what is published, whatever the node can do now
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from discovery import model
from driver import values
from driver.sharing import abilities, effective, policy
from driver.sharing.abilities import Abilities
from driver.sharing.rules import EXCLUSIVE, Mode, Policy, Rule
from driver.sharing.shares import Compute, Enforcement, Memory, Shares, TimeSlice
from tests.fakes import divided, publishing

GIB = 1 << 30
SHARES = Shares(memory_step=GIB, compute_step=5, max_sharers=8, memory=Memory.COOPERATIVE, compute=Compute.TIMESLICE)
STRICT = replace(SHARES, memory=Memory.CGROUP, compute=Compute.MPS)
BEST = Enforcement(memory=Memory.CGROUP, compute=Compute.MPS)
ALL = Abilities()
NO_MPS = Abilities(
    memory=dict.fromkeys([Memory.MPS, Memory.COOPERATIVE], "no supervisor"),
    compute=dict.fromkeys([Compute.MPS, Compute.COOPERATIVE], "no supervisor"),
)
MPS_AWAY = replace(
    NO_MPS,
    passing_memory=frozenset({Memory.MPS, Memory.COOPERATIVE}),
    passing_compute=frozenset({Compute.MPS, Compute.COOPERATIVE}),
)
NOTHING = abilities.without("nothing here")
GPU = divided.gpu(1, enabled=False)
SNAPSHOT = publishing.snapshot(GPU)
WHOLE = values.gpu_device_name(GPU.address)
PART = values.partition_device_name(GPU.address, profile="1g.10gb", profile_id=19, start=0)
BY_BEST = Policy(mode=Mode.SHARES, shares=SHARES, enforcement=BEST)


def sharing(shares: Shares = SHARES, mode: Mode = Mode.SHARES) -> Rule:
    return Rule(mode=mode, shares=shares)


class Node:
    """A GPU, what is published of it and who has it, and an agent that is started anew at will."""

    def __init__(self, *rules: Rule, can: Abilities = ALL) -> None:
        self.can = can
        self.published: list[effective.Standing] = []
        self.held: set[str] = set()
        self.policies = self._agent(rules)

    def _agent(self, rules: Iterable[Rule]) -> effective.Effective:
        return effective.Effective(
            tuple(rules), standing=lambda: list(self.published), can=lambda _snapshot: lambda _gpu: self.can
        )

    def restart(self, *rules: Rule) -> None:
        self.policies = self._agent(rules or self.policies.rules)

    def able(self, can: Abilities) -> None:
        self.can = can
        self.policies.abilities_changed()

    def look(self, snapshot: model.Snapshot = SNAPSHOT) -> policy.Resolved:
        def held(names: frozenset[str]) -> Collection[str]:
            return names & self.held

        return self.policies.look(snapshot, held=held)

    def publish(self, snapshot: model.Snapshot = SNAPSHOT) -> Policy:
        """Look, and have it published."""
        found = self.look(snapshot).policies[GPU.address]
        name = PART if found.mode is Mode.MIG_STATIC else WHOLE
        self.published = [
            effective.Standing(
                name=name,
                address=GPU.address,
                mode=found.mode,
                profile="1g.10gb" if name is PART else None,
                uuid=GPU.uuid,
                product=GPU.product,
                shares=found.shares,
                enforcement=found.enforcement,
            )
        ]
        self.policies.published_anew()
        return found

    def codes(self) -> list[str]:
        return [finding.code for finding in self.look().findings]


CHANGES = [
    [sharing(replace(SHARES, memory_step=2 * GIB))],
    [sharing(replace(SHARES, compute_step=10))],
    [sharing(replace(SHARES, max_sharers=4))],
    [sharing(replace(SHARES, default_compute=50))],
    [sharing(replace(SHARES, time_slice=TimeSlice.LONG))],
    [sharing(STRICT)],
    [Rule(mode=Mode.EXCLUSIVE)],
    [Rule(mode=Mode.MIG_DYNAMIC)],
    [Rule(mode=Mode.MIG_STATIC)],
    [sharing(mode=Mode.MIG_STATIC)],
    [Rule()],
]


@pytest.mark.parametrize("rules", CHANGES)
@pytest.mark.parametrize("restarted", [False, True])
def test_no_change_comes_under_a_share(rules: list[Rule], *, restarted: bool) -> None:
    node = Node(sharing())
    assert node.publish() == BY_BEST
    node.held = {WHOLE}
    if restarted:
        node.restart(*rules)
    else:
        node.policies.set_rules(rules)
    assert node.publish() == BY_BEST
    assert node.policies.policies(SNAPSHOT)[GPU.address] == BY_BEST
    assert "sharing-waits" in node.codes()
    assert node.policies.waiting == {GPU.address}
    node.held = set()
    after = node.publish()
    assert after != BY_BEST
    assert after.mode is rules[0].mode
    # MIG is off, so there is no instance to share.
    assert after.shares == (None if after.mode is Mode.MIG_STATIC else rules[0].shares)
    assert not node.policies.waiting


def test_shares_begin_when_nobody_has_the_whole() -> None:
    node = Node()
    assert node.publish() == EXCLUSIVE
    node.held = {WHOLE}
    node.policies.set_rules([sharing()])
    (finding,) = node.look().findings
    assert finding.message == (
        f"Shared by policy exclusive until nobody has {WHOLE} (allocated to a claim); then by shares (steps of 1Gi and 5 percent,"
        " 8 sharers, memory by cgroup, compute by mps), as the configuration says and this node can do"
    )
    assert node.publish() == EXCLUSIVE
    node.held = set()
    assert node.publish() == BY_BEST


def test_what_differs_is_in_the_message() -> None:
    node = Node(sharing())
    node.publish()
    node.held = {WHOLE}
    node.policies.set_rules([sharing(replace(SHARES, default_compute=20, time_slice=TimeSlice.SHORT))])
    (finding,) = node.look().findings
    assert "steps of 1Gi and 5 percent, 8 sharers, memory" in finding.message
    assert (
        "steps of 1Gi and 5 percent, 20 percent unasked, 8 sharers, memory by cgroup, compute by mps, short turns"
        in finding.message
    )


@pytest.mark.parametrize("restarted", [False, True])
def test_an_ability_that_goes_waits_for_the_last_share(*, restarted: bool) -> None:
    node = Node(sharing())
    node.publish()
    node.held = {WHOLE}
    node.able(NO_MPS)
    if restarted:
        node.restart()
    assert node.publish() == BY_BEST
    assert node.codes() == ["sharing-waits"]
    node.held = set()
    turns = Enforcement(memory=Memory.CGROUP, compute=Compute.TIMESLICE)
    assert node.publish() == replace(BY_BEST, enforcement=turns)
    # And one that comes is used when the GPU is free.
    node.held = {WHOLE}
    node.able(ALL)
    assert node.publish().enforcement == turns
    node.held = set()
    assert node.publish() == BY_BEST


def test_shares_that_cannot_be_kept_apart_any_more_end_with_the_last_one() -> None:
    node = Node(sharing(STRICT))
    node.publish()
    node.held = {WHOLE}
    node.able(NOTHING)
    assert node.publish().enforcement == BEST
    assert set(node.codes()) == {"sharing-not-possible", "sharing-waits"}
    node.held = set()
    assert node.publish() == EXCLUSIVE
    assert node.codes() == ["sharing-not-possible"]
    node.able(ALL)
    assert node.publish().mode is Mode.SHARES


@pytest.mark.parametrize("restarted", [False, True])
def test_a_supervisor_that_is_away_for_a_moment_changes_nothing(*, restarted: bool) -> None:
    """Also where nobody has the GPU, and after a start of the node, when agent and supervisor come up together."""
    node = Node(sharing(STRICT))
    node.publish()
    node.able(MPS_AWAY)
    if restarted:
        node.restart()
    assert node.publish() == Policy(mode=Mode.SHARES, shares=STRICT, enforcement=BEST)
    assert node.codes() == []
    node.able(NO_MPS)
    assert node.publish() == EXCLUSIVE
    # Nothing is promised of one that was not there.
    node.able(MPS_AWAY)
    assert node.publish() == EXCLUSIVE


@pytest.mark.parametrize("restarted", [False, True])
def test_a_gpu_that_fails_keeps_its_shares(*, restarted: bool) -> None:
    node = Node(sharing(STRICT))
    node.publish()
    lost = publishing.snapshot(
        publishing.gpu(1, state=model.GpuState.LOST, uuid=None, product=None, memory_bytes=None, mig_mode=None)
    )
    node.able(abilities.without("lost", passing=True))
    if restarted:
        node.restart()
    assert node.look(lost).policies[GPU.address].enforcement == BEST
    assert node.look(lost).findings == ()


def test_who_prepares_sees_what_is_published_whatever_the_node_can_do() -> None:
    node = Node(sharing(STRICT))
    node.publish()
    assert node.policies.policies(SNAPSHOT)[GPU.address].enforcement == BEST
    node.able(NOTHING)
    assert node.policies.policies(SNAPSHOT)[GPU.address].enforcement == BEST
    node.publish()
    assert node.policies.policies(SNAPSHOT)[GPU.address] == EXCLUSIVE


def test_what_the_node_can_do_now_is_asked_again_when_it_has_changed() -> None:
    node = Node(sharing(STRICT), can=NOTHING)
    assert node.policies.policies(SNAPSHOT)[GPU.address] == EXCLUSIVE
    node.able(ALL)
    assert node.policies.policies(SNAPSHOT)[GPU.address].enforcement == BEST


def test_where_the_server_keeps_no_shares_the_whole_is_what_stays() -> None:
    """There the publisher has the GPU published as an exclusive one; with a better server, shares begin when it is free."""
    node = Node(sharing())
    assert node.look().policies[GPU.address] == BY_BEST
    node.published = [
        effective.Standing(name=WHOLE, address=GPU.address, mode=Mode.EXCLUSIVE, uuid=GPU.uuid, product=GPU.product)
    ]
    node.policies.published_anew()
    assert node.policies.policies(SNAPSHOT)[GPU.address] == EXCLUSIVE
    node.held = {WHOLE}
    assert node.look().policies[GPU.address] == EXCLUSIVE
    node.held = set()
    assert node.look().policies[GPU.address] == BY_BEST


def test_shared_instances_change_together() -> None:
    gpu = divided.gpu(1, divided.instance(19, 0), divided.instance(9, 4))
    snapshot = publishing.snapshot(gpu)
    node = Node(sharing(mode=Mode.MIG_STATIC), can=NO_MPS)
    loose = replace(SHARES, memory=Memory.NONE)
    other = values.partition_device_name(GPU.address, profile="3g.40gb", profile_id=9, start=4)
    node.policies.set_rules([sharing(loose, Mode.MIG_STATIC)])
    node.publish(snapshot)
    node.published.append(replace(node.published[0], name=other, profile="3g.40gb"))
    node.policies.published_anew()
    before = node.look(snapshot).policies[GPU.address]
    node.held = {other}
    node.policies.set_rules([sharing(replace(loose, max_sharers=2), Mode.MIG_STATIC)])
    assert node.look(snapshot).policies[GPU.address] == before
    node.held = set()
    assert node.look(snapshot).policies[GPU.address] != before


def test_mig_that_was_left_on_is_turned_off_before_a_gpu_is_shared() -> None:
    node = Node(Rule(mode=Mode.MIG_DYNAMIC))
    node.publish()
    on = publishing.snapshot(divided.gpu(1))
    node.policies.set_rules([sharing()])
    found = node.look(on)
    assert found.policies[GPU.address].mode is Mode.MIG_DYNAMIC
    assert {finding.code for finding in found.findings} == {"mig-mode-left-on", "sharing-not-possible"}
    assert node.publish() == BY_BEST


RULES = st.sampled_from([[], [sharing()], *CHANGES])
ABLE = st.sampled_from([ALL, NO_MPS, MPS_AWAY, NOTHING, abilities.without("lost", passing=True)])
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("rules"), RULES),
        st.tuples(st.just("restart"), RULES),
        st.tuples(st.just("able"), ABLE),
        st.tuples(st.just("take"), st.none()),
        st.tuples(st.just("free"), st.none()),
        st.tuples(st.just("publish"), st.none()),
    ),
    max_size=25,
)


@given(STEPS)
def test_whatever_happens_nothing_changes_under_who_has_it(steps: list[tuple[str, object]]) -> None:
    node = Node(sharing())
    node.publish()
    under: effective.Standing | None = None
    for what, with_what in steps:
        match what, with_what:
            case "rules", list(rules):
                node.policies.set_rules(rules)
            case "restart", list(rules):
                node.policies = effective.Effective(
                    rules, standing=lambda: list(node.published), can=lambda _snapshot: lambda _gpu: node.can
                )
            case "able", Abilities() as can:
                node.able(can)
            case "take", None:
                under = under or node.published[0]
                node.held = {under.name}
            case "free", None:
                under, node.held = None, set()
            case _:
                node.publish()
                if under is not None:
                    assert node.published[0] == under
        prepared = node.policies.policies(SNAPSHOT)[GPU.address]
        now = node.published[0]
        assert (prepared.mode, prepared.shares, prepared.enforcement) == (now.mode, now.shares, now.enforcement)
