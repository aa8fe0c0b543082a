# SPDX-License-Identifier: Apache-2.0
"""The policies that hold now.

- what is not published changes at once; what somebody holds keeps its policy until it is let go
- who holds is asked only when something would be taken away, and about that alone
- the same after a restart, from what is published alone
- a GPU that fails changes nobody's policy
- who prepares sees what is published, without asking anybody
- never, whatever happens in which order, does a GPU lose a policy under which a device of it is held
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from discovery import model
from driver import values
from driver.errors import RecordError
from driver.sharing import effective, policy
from driver.sharing.rules import EXCLUSIVE, Fallback, Match, Mode, Policy, Rule
from tests.fakes import divided, publishing

DYNAMIC = Policy(mode=Mode.MIG_DYNAMIC)
STATIC = Policy(mode=Mode.MIG_STATIC)
GPU = divided.gpu(1, enabled=False)
SNAPSHOT = publishing.snapshot(GPU)
WHOLE = values.gpu_device_name(GPU.address)
SMALL = values.partition_device_name(GPU.address, profile="1g.10gb", profile_id=19, start=0)
LARGE = values.partition_device_name(GPU.address, profile="3g.40gb", profile_id=9, start=4)


def standing(name: str, mode: Mode, profile: str | None = None) -> effective.Standing:
    return effective.Standing(
        name=name, address=GPU.address, mode=mode, profile=profile, uuid=GPU.uuid, product=GPU.product
    )


def as_published(mode: Mode) -> list[effective.Standing]:
    if mode is Mode.EXCLUSIVE:
        return [standing(WHOLE, mode)]
    parts = [standing(SMALL, mode, "1g.10gb"), standing(LARGE, mode, "3g.40gb")]
    return [standing(WHOLE, mode), *parts] if mode is Mode.MIG_DYNAMIC else parts


class World:
    """A record and claims, and the policies that are looked at."""

    def __init__(self, *rules: Rule, published: Iterable[effective.Standing] = ()) -> None:
        self.published = list(published)
        self.held: set[str] = set()
        self.asked: list[frozenset[str]] = []
        self.reads = 0
        self.policies = effective.Effective(rules, standing=self._standing, holders=self._holders)

    def _standing(self) -> Iterable[effective.Standing]:
        self.reads += 1
        return list(self.published)

    def _holders(self, names: Collection[str]) -> Mapping[str, str]:
        return {name: f"ResourceClaim ml/{name}" for name in names if name.endswith("-0")}

    def look(self, snapshot: model.Snapshot = SNAPSHOT) -> policy.Resolved:
        def held(names: frozenset[str]) -> Collection[str]:
            self.asked.append(names)
            return self.held

        return self.policies.look(snapshot, held=held)

    def now(self, snapshot: model.Snapshot = SNAPSHOT) -> Policy:
        return self.look(snapshot).policies[GPU.address]


def rule(mode: Mode, *profiles: str) -> Rule:
    return Rule(mode=mode, profiles=profiles)


def test_what_is_not_published_has_the_policy_of_the_rules_at_once() -> None:
    world = World(rule(Mode.MIG_DYNAMIC))
    assert world.now() == DYNAMIC
    world.policies.set_rules([rule(Mode.MIG_STATIC)])
    assert world.now() == STATIC
    world.policies.set_rules([])
    assert world.now() == EXCLUSIVE
    assert world.asked == []


@pytest.mark.parametrize("mode", Mode)
def test_nobody_is_asked_where_nothing_changes(mode: Mode) -> None:
    world = World(rule(mode), published=as_published(mode))
    world.held = {WHOLE, SMALL}
    assert world.now().mode is mode
    assert world.asked == []
    assert not world.policies.waiting


@pytest.mark.parametrize("before", Mode)
@pytest.mark.parametrize("after", Mode)
def test_a_change_waits_until_the_gpu_is_free(before: Mode, after: Mode) -> None:
    if before is after:
        return
    world = World(rule(before), published=as_published(before))
    assert world.now().mode is before
    world.policies.set_rules([rule(after)])
    world.held = {as_published(before)[-1].name}

    resolved = world.look()
    assert resolved.policies[GPU.address].mode is before
    assert resolved.waiting == {GPU.address: frozenset(world.held)}
    assert world.policies.waiting == {GPU.address}
    assert world.asked == [frozenset(device.name for device in as_published(before))]
    (finding,) = (found for found in resolved.findings if found.code == "sharing-waits")
    assert (finding.subject, finding.severity) == (str(GPU.address), model.Severity.INFO)
    assert f"policy {before} until nobody has {as_published(before)[-1].name}" in finding.message
    assert f"then by {after}" in finding.message

    world.held = set()
    resolved = world.look()
    assert resolved.policies[GPU.address].mode is after
    assert (resolved.waiting, world.policies.waiting) == ({}, frozenset())
    assert "sharing-waits" not in {found.code for found in resolved.findings}


@pytest.mark.parametrize("before", Mode)
@pytest.mark.parametrize("after", Mode)
def test_it_is_the_same_after_a_restart(before: Mode, after: Mode) -> None:
    """Only the record knows what was, and the configuration may have changed with the restart."""
    world = World(rule(after), published=as_published(before))
    world.held = {as_published(before)[-1].name}
    assert world.now().mode is before
    world.held = set()
    assert world.now().mode is after


def test_the_finding_names_claims_and_not_too_many_devices() -> None:
    names = [values.partition_device_name(GPU.address, profile="1g.10gb", profile_id=19, start=n) for n in range(7)]
    world = World(published=[standing(name, Mode.MIG_DYNAMIC, "1g.10gb") for name in names])
    world.held = set(names)
    (finding,) = world.look().findings
    assert f"{names[0]} (ResourceClaim ml/{names[0]}), {names[1]} (allocated to a claim)" in finding.message
    assert "and 2 more" in finding.message
    assert names[6] not in finding.message


def test_only_profiles_that_are_taken_away_are_waited_for() -> None:
    world = World(rule(Mode.MIG_DYNAMIC), published=as_published(Mode.MIG_DYNAMIC))
    world.held = {SMALL, WHOLE}
    world.policies.set_rules([rule(Mode.MIG_DYNAMIC, "1g.*")])
    assert world.now() == Policy(mode=Mode.MIG_DYNAMIC, profiles=("1g.*",))
    assert world.asked == [frozenset({LARGE})]
    world.held = {LARGE}
    # As it can be told from the record, or, where it was looked at before, as it was.
    restarted = World(rule(Mode.MIG_DYNAMIC, "1g.*"), published=world.published)
    restarted.held = world.held
    assert restarted.now() == Policy(mode=Mode.MIG_DYNAMIC, profiles=("1g.10gb", "3g.40gb"))
    world.policies.set_rules([rule(Mode.MIG_DYNAMIC, "2g.*")])
    world.held = {SMALL}
    assert world.now() == Policy(mode=Mode.MIG_DYNAMIC, profiles=("1g.*",))


def test_the_fallback_that_was_is_kept_with_the_policy() -> None:
    before = Rule(mode=Mode.MIG_DYNAMIC, fallback=Fallback.NONE)
    world = World(before, published=as_published(Mode.MIG_DYNAMIC))
    world.now()
    world.policies.set_rules([])
    world.held = {SMALL}
    assert world.now() == Policy(mode=Mode.MIG_DYNAMIC, fallback=Fallback.NONE)


def test_a_crash_between_two_policies_is_no_wait_where_the_new_one_is_held() -> None:
    """The record has the devices of both, as it is written before the slices are."""
    world = World(
        rule(Mode.EXCLUSIVE), published=[standing(WHOLE, Mode.EXCLUSIVE), *as_published(Mode.MIG_DYNAMIC)[1:]]
    )
    world.held = {WHOLE}
    assert world.now() == EXCLUSIVE
    world.held = {SMALL}
    assert world.now().mode is Mode.MIG_DYNAMIC


def test_mig_that_the_agent_left_on_keeps_nobody_from_the_whole() -> None:
    divided_now = publishing.snapshot(divided.gpu(1))
    whole_only = Policy(mode=Mode.MIG_DYNAMIC, profiles=("",))
    world = World(rule(Mode.EXCLUSIVE), published=as_published(Mode.MIG_DYNAMIC))
    world.held = {SMALL}
    assert policy.offered_profiles(world.now(divided_now), divided.gpu(1))
    world.held = set()
    resolved = world.look(divided_now)
    assert resolved.policies == {GPU.address: whole_only}
    assert policy.offered_profiles(whole_only, divided.gpu(1)) == ()
    assert [found.code for found in resolved.findings] == ["mig-mode-left-on"]
    # The whole alone is published, and prepared: that turns MIG off. It is the same after a restart, and with nobody to ask.
    world.published = [standing(WHOLE, Mode.MIG_DYNAMIC)]
    for held in ({WHOLE}, set[str]()):
        world.held = held
        again = World(rule(Mode.EXCLUSIVE), published=world.published)
        again.held = held
        assert world.now(divided_now) == again.now(divided_now) == whole_only
        assert again.policies.policies(divided_now)[GPU.address] == whole_only
    world.held = {WHOLE}
    assert world.now().mode is Mode.MIG_DYNAMIC
    world.held = set()
    assert world.now() == EXCLUSIVE
    # The MIG mode that somebody else turned on is not the agent's, and that of Ampere is never turned off.
    stranger = World(rule(Mode.EXCLUSIVE), published=as_published(Mode.EXCLUSIVE))
    assert stranger.now(divided_now) == EXCLUSIVE
    ampere = World(rule(Mode.EXCLUSIVE), published=as_published(Mode.MIG_DYNAMIC))
    assert ampere.now(publishing.snapshot(divided.gpu(1, architecture="Ampere"))) == EXCLUSIVE


def test_one_gpu_waits_alone() -> None:
    other = divided.gpu(2)
    world = World(rule(Mode.MIG_STATIC), published=[standing(WHOLE, Mode.EXCLUSIVE)])
    world.held = {WHOLE}
    resolved = world.look(publishing.snapshot(GPU, other))
    assert resolved.policies == {GPU.address: EXCLUSIVE, other.address: STATIC}
    assert set(resolved.waiting) == {GPU.address}


def test_a_gpu_that_fails_keeps_its_place_among_the_first() -> None:
    gpus = [divided.gpu(bus) for bus in (1, 2, 3)]
    first = [Rule(match=Match(product="*H100*", count=2), mode=Mode.MIG_DYNAMIC)]
    dead = publishing.gpu(1, state=model.GpuState.LOST, product=None, uuid=None)
    world = World(*first)
    healthy = world.look(publishing.snapshot(*gpus)).policies
    assert world.look(publishing.snapshot(dead, *gpus[1:])).policies == healthy
    # And after a restart, as long as the record has a device of it.
    again = World(*first, published=[standing(WHOLE, Mode.MIG_DYNAMIC)])
    assert again.look(publishing.snapshot(dead, *gpus[1:])).policies == healthy


def test_who_prepares_sees_what_is_published_and_asks_nobody() -> None:
    world = World(rule(Mode.EXCLUSIVE), published=as_published(Mode.MIG_DYNAMIC))
    assert world.policies.policies(SNAPSHOT)[GPU.address].mode is Mode.MIG_DYNAMIC
    assert world.policies.policies(SNAPSHOT)[GPU.address].mode is Mode.MIG_DYNAMIC
    assert (world.reads, world.asked) == (1, [])
    world.published = as_published(Mode.EXCLUSIVE)
    world.policies.published_anew()
    assert world.policies.policies(SNAPSHOT)[GPU.address] == EXCLUSIVE
    world.policies.set_rules([rule(Mode.MIG_STATIC)])
    world.published = []
    world.policies.published_anew()
    assert world.policies.policies(SNAPSHOT)[GPU.address] == STATIC
    other = publishing.snapshot(GPU, divided.gpu(2))
    assert len(world.policies.policies(other)) == 2
    assert world.reads == 3
    # Another instance of the agent has published: the next look sees it.
    world.published = as_published(Mode.MIG_DYNAMIC)
    world.held = {SMALL}
    world.look()
    assert world.policies.policies(SNAPSHOT)[GPU.address].mode is Mode.MIG_DYNAMIC


def test_a_record_that_cannot_be_read_is_no_answer() -> None:
    def broken() -> Iterable[effective.Standing]:
        raise RecordError("the record is locked", retryable=True)

    policies = effective.Effective([rule(Mode.MIG_STATIC)], standing=broken)
    with pytest.raises(RecordError):
        policies.look(SNAPSHOT, held=lambda names: names)
    with pytest.raises(RecordError):
        policies.policies(SNAPSHOT)


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("rule"), st.sampled_from(Mode)),
        st.tuples(st.just("take"), st.integers(0, 2)),
        st.tuples(st.just("free"), st.integers(0, 2)),
        st.tuples(st.just("restart"), st.none()),
        st.tuples(st.just("look"), st.none()),
    ),
    max_size=20,
)


@given(STEPS)
def test_a_gpu_never_loses_the_policy_of_a_device_that_is_held(steps: list[tuple[str, object]]) -> None:
    world = World(published=as_published(Mode.EXCLUSIVE))
    for what, with_what in steps:
        match what:
            case "rule":
                assert isinstance(with_what, Mode)
                world.policies.set_rules([rule(with_what)])
            case "take":
                assert isinstance(with_what, int)
                world.held |= {device.name for device in world.published[with_what : with_what + 1]}
            case "free":
                assert isinstance(with_what, int)
                world.held -= {(WHOLE, SMALL, LARGE)[with_what]}
            case "restart":
                held, rules = world.held, world.policies.rules
                world = World(*rules, published=world.published)
                world.held = held
            case _:
                mode = world.now().mode
                assert {device.mode for device in world.published if device.name in world.held} <= {mode}
                world.published = as_published(mode)
                assert world.held <= {device.name for device in world.published}
    world.held = set()
    wanted = world.policies.rules[0].mode if world.policies.rules else Mode.EXCLUSIVE
    assert world.now().mode is wanted
