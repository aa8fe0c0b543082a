# SPDX-License-Identifier: Apache-2.0
"""From a rule with shares to the policy of a GPU.

- the strongest enforcement that can be had, with the values of the rule
- what cannot be had leaves the GPU, or its instances, to one claim, with the reasons
- more sharers than MPS serves are cut; a step of which two are too much is no share
- what is published stays while an ability is away for a moment, and goes when it is away for good
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from discovery import model
from driver.sharing import abilities, policy, sharable
from driver.sharing.abilities import Abilities
from driver.sharing.rules import EXCLUSIVE, Fallback, Match, Mode, Policy, Rule
from driver.sharing.shares import Compute, Enforcement, Memory, Shares
from tests.fakes import divided, publishing

GIB = 1 << 30
SHARES = Shares(memory_step=GIB, compute_step=5, max_sharers=8, memory=Memory.CGROUP, compute=Compute.MPS)
ANY = replace(SHARES, memory=Memory.NONE, compute=Compute.NONE)
ALL = Abilities(mps_clients=60)
BEST = Enforcement(memory=Memory.CGROUP, compute=Compute.MPS)
GPU = publishing.gpu(1)


def rule(shares: Shares = SHARES, mode: Mode = Mode.SHARES, fallback: Fallback = Fallback.WHOLE) -> Rule:
    return Rule(mode=mode, shares=shares, fallback=fallback)


def resolved(given_rule: Rule, gpu: model.Gpu = GPU, can: Abilities = ALL) -> tuple[Policy, list[model.Finding]]:
    found = policy.resolve([given_rule], [gpu], can=lambda _gpu: can)
    return found.policies[gpu.address], list(found.findings)


def test_shares_come_with_what_enforces_them() -> None:
    assert resolved(rule(fallback=Fallback.NONE)) == (
        Policy(mode=Mode.SHARES, fallback=Fallback.NONE, shares=SHARES, enforcement=BEST),
        [],
    )
    found, _ = resolved(rule(ANY), can=abilities.without("nothing here"))
    assert found.enforcement == Enforcement(memory=Memory.NONE, compute=Compute.NONE)


def test_where_nobody_looked_only_advice_is_given() -> None:
    found = policy.resolve([rule()], [GPU])
    assert found.policies == {GPU.address: EXCLUSIVE}
    assert policy.resolve([rule(ANY)], [GPU]).policies[GPU.address].mode is Mode.SHARES


def test_what_cannot_be_had_leaves_the_gpu_to_one_claim() -> None:
    can = Abilities(memory={Memory.CGROUP: "cgroup v1"}, compute={Compute.MPS: "no supervisor"})
    found, (finding,) = resolved(rule(), can=can)
    assert found == EXCLUSIVE
    assert (finding.code, finding.severity, finding.subject) == (
        "sharing-not-possible",
        model.Severity.WARNING,
        str(GPU.address),
    )
    assert "memory by cgroup: cgroup v1; compute by mps: no supervisor. The GPU is handed out" in finding.message


def test_what_cannot_be_had_leaves_each_instance_to_one_claim() -> None:
    gpu = divided.gpu(1, divided.instance(19, 0))
    can = Abilities(memory={Memory.CGROUP: "not for MIG"})
    found, (finding,) = resolved(rule(mode=Mode.MIG_STATIC, fallback=Fallback.NONE), gpu, can)
    assert found == Policy(mode=Mode.MIG_STATIC, fallback=Fallback.NONE)
    assert "memory by cgroup: not for MIG. Each instance is handed out" in finding.message


def test_instances_are_shared_as_well() -> None:
    gpu = divided.gpu(1, divided.instance(19, 0))
    found, findings = resolved(rule(mode=Mode.MIG_STATIC), gpu)
    assert found == Policy(mode=Mode.MIG_STATIC, shares=SHARES, enforcement=BEST)
    assert findings == []


def test_instances_that_are_not_there_are_said_before_anything_else() -> None:
    without_mig, (finding,) = resolved(rule(mode=Mode.MIG_STATIC))
    assert (without_mig, finding.code) == (EXCLUSIVE, "sharing-not-possible")
    assert "has no MIG" in finding.message
    for can in (ALL, abilities.without("nothing here")):
        off, (finding,) = resolved(rule(mode=Mode.MIG_STATIC), divided.gpu(1, enabled=False), can)
        assert (off, finding.code) == (Policy(mode=Mode.MIG_STATIC), "mig-disabled")


def test_a_gpu_with_mig_on_is_not_shared_whole() -> None:
    found, (finding,) = resolved(rule(), divided.gpu(1))
    assert found == EXCLUSIVE
    assert "MIG is on" in finding.message
    assert "nvidia-smi -i 0000:01:00.0 -mig 0" in finding.message
    assert resolved(rule(), divided.gpu(1, enabled=False))[0].mode is Mode.SHARES


def test_two_steps_must_fit() -> None:
    found, (finding,) = resolved(rule(replace(SHARES, memory_step=64 * GIB)))
    assert (found, finding.code) == (EXCLUSIVE, "sharing-not-possible")
    assert "two steps of 64Gi are more than its memory (81559Mi)" in finding.message
    assert resolved(rule(replace(SHARES, memory_step=32 * GIB)))[0].mode is Mode.SHARES


@pytest.mark.parametrize(
    ("enforcement", "cut"),
    [
        (Enforcement(memory=Memory.CGROUP, compute=Compute.MPS), True),
        (Enforcement(memory=Memory.CGROUP, compute=Compute.COOPERATIVE), True),
        (Enforcement(memory=Memory.MPS, compute=Compute.TIMESLICE), True),
        (Enforcement(memory=Memory.CGROUP, compute=Compute.TIMESLICE), False),
        (Enforcement(memory=Memory.NONE, compute=Compute.NONE), False),
    ],
)
def test_mps_serves_so_many_and_no_more(enforcement: Enforcement, *, cut: bool) -> None:
    can = Abilities(
        memory={level: "no" for level in Memory if level not in (enforcement.memory, Memory.NONE)},
        compute={level: "no" for level in Compute if level not in (enforcement.compute, Compute.NONE)},
        mps_clients=48,
    )
    found, findings = resolved(rule(replace(ANY, max_sharers=100)), can=can)
    assert found.enforcement == enforcement
    assert found.shares is not None
    assert found.shares.max_sharers == (48 if cut else 100)
    assert [(finding.code, finding.severity) for finding in findings] == [("sharers-cut", model.Severity.INFO)] * cut
    assert resolved(rule(replace(ANY, max_sharers=48)), can=can)[1] == []


LOST = publishing.gpu(1, state=model.GpuState.LOST, memory_bytes=None, multiprocessors=None)
AWAY = replace(abilities.without("away", passing=True), mps_clients=48)


def kept(shares: Shares, can: Abilities, published: sharable.Published, gpu: model.Gpu = GPU) -> Policy:
    found = policy.resolve([rule(shares)], [gpu], can=lambda _gpu: can, published={gpu.address: published})
    assert found.findings == ()
    return found.policies[gpu.address]


def test_a_gpu_that_fails_keeps_the_shares_that_are_published() -> None:
    published = sharable.Published(shares=SHARES, enforcement=BEST)
    assert kept(SHARES, AWAY, published, LOST) == Policy(mode=Mode.SHARES, shares=SHARES, enforcement=BEST)
    # Of one of which nothing is published nothing is said.
    assert resolved(rule(), LOST, AWAY) == (EXCLUSIVE, [])


def test_the_number_of_sharers_stays_with_the_rest() -> None:
    many = replace(SHARES, max_sharers=100)
    published = sharable.Published(shares=replace(many, max_sharers=60), enforcement=BEST)
    found = policy.resolve([rule(many)], [GPU], can=lambda _gpu: AWAY, published={GPU.address: published})
    assert found.policies[GPU.address].shares == published.shares
    assert kept(replace(many, max_sharers=50), AWAY, published).shares == replace(many, max_sharers=50)


def test_a_weaker_one_that_is_published_goes_with_its_rule() -> None:
    weak = sharable.Published(shares=ANY, enforcement=Enforcement(memory=Memory.NONE, compute=Compute.COOPERATIVE))
    found = policy.resolve([rule()], [GPU], can=lambda _gpu: AWAY, published={GPU.address: weak})
    assert found.policies[GPU.address] == EXCLUSIVE


def test_what_is_away_for_good_goes() -> None:
    published = sharable.Published(shares=ANY, enforcement=BEST)
    gone = Abilities(
        memory={Memory.CGROUP: "old driver"}, compute={Compute.MPS: "away"}, passing_compute=frozenset({Compute.MPS})
    )
    assert kept(ANY, gone, published).enforcement == Enforcement(memory=Memory.MPS, compute=Compute.COOPERATIVE)
    away = replace(gone, memory={})
    assert kept(ANY, away, published).enforcement == BEST
    assert kept(ANY, replace(away, passing_compute=frozenset()), published).enforcement == Enforcement(
        memory=Memory.CGROUP, compute=Compute.COOPERATIVE
    )


def test_what_comes_is_used_though_something_else_was_published() -> None:
    weak = sharable.Published(shares=ANY, enforcement=Enforcement(memory=Memory.NONE, compute=Compute.NONE))
    assert kept(ANY, ALL, weak).enforcement == BEST


def test_a_rule_for_one_asks_about_one() -> None:
    asked: list[model.Gpu] = []

    def can(gpu: model.Gpu) -> Abilities:
        asked.append(gpu)
        return ALL

    gpus = [publishing.gpu(bus) for bus in (1, 2, 3)]
    policy.resolve([Rule(match=Match(count=1), mode=Mode.SHARES, shares=SHARES)], gpus, can=can)
    assert asked == gpus[:1]


MEMORY = st.sampled_from(Memory)
COMPUTE = st.sampled_from(Compute)


@st.composite
def some_abilities(draw: st.DrawFn) -> Abilities:
    memory = draw(st.sets(MEMORY.filter(lambda level: level is not Memory.NONE)))
    compute = draw(st.sets(COMPUTE.filter(lambda level: level is not Compute.NONE)))
    return Abilities(
        memory=dict.fromkeys(memory, "no"),
        compute=dict.fromkeys(compute, "no"),
        passing_memory=frozenset(level for level in memory if draw(st.booleans())),
        passing_compute=frozenset(level for level in compute if draw(st.booleans())),
    )


@given(
    can=some_abilities(),
    least=st.tuples(MEMORY, COMPUTE),
    before=st.none() | st.builds(Enforcement, memory=MEMORY, compute=COMPUTE),
)
def test_never_weaker_than_the_rule_and_never_more_than_is_true(
    can: Abilities, least: tuple[Memory, Compute], before: Enforcement | None
) -> None:
    shares = replace(SHARES, memory=least[0], compute=least[1])
    published = {} if before is None else {GPU.address: sharable.Published(shares=shares, enforcement=before)}
    found = policy.resolve([rule(shares)], [GPU], can=lambda _gpu: can, published=published)
    got = found.policies[GPU.address]
    assert (got.mode is Mode.SHARES) == (got.shares is not None) == (got.enforcement is not None)
    if got.enforcement is None:
        assert [finding.code for finding in found.findings] == ["sharing-not-possible"]
        return
    memory, compute = got.enforcement.memory, got.enforcement.compute
    assert list(Memory).index(memory) <= list(Memory).index(least[0])
    assert list(Compute).index(compute) <= list(Compute).index(least[1])
    if got.enforcement != before:
        assert memory not in can.memory
        assert compute not in can.compute
        assert all(level in can.memory for level in list(Memory)[: list(Memory).index(memory)])
        assert all(level in can.compute for level in list(Compute)[: list(Compute).index(compute)])
    else:
        assert memory not in can.memory or memory in can.passing_memory
        assert compute not in can.compute or compute in can.passing_compute
