# SPDX-License-Identifier: Apache-2.0
"""From rules to policies.

- the first rule that matches wins; conditions all hold; count takes by address what is left
- a mode that a GPU has not leaves it exclusive; what nothing comes of is said, and nothing else is
- which profiles are offered
- every GPU has one policy, whatever the rules and the order of GPUs
"""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from discovery import model
from driver.sharing import policy
from driver.sharing.rules import EXCLUSIVE, Fallback, Match, Mode, Policy, Rule
from tests.fakes import divided, publishing

DYNAMIC = Policy(mode=Mode.MIG_DYNAMIC)
STATIC = Policy(mode=Mode.MIG_STATIC)


def modes(*rules: Rule, gpus: list[model.Gpu]) -> list[Mode]:
    found = policy.resolve(rules, gpus).policies
    return [found[gpu.address].mode for gpu in gpus]


def codes(*rules: Rule, gpus: list[model.Gpu]) -> list[tuple[str, str, str]]:
    return [(found.code, found.severity.value, found.subject) for found in policy.resolve(rules, gpus).findings]


def dynamic(**match: Any) -> Rule:
    return Rule(match=Match(**match), mode=Mode.MIG_DYNAMIC)


def static(**match: Any) -> Rule:
    return Rule(match=Match(**match), mode=Mode.MIG_STATIC)


def test_without_a_rule_a_gpu_is_exclusive() -> None:
    gpus = [divided.gpu(1, enabled=False), publishing.gpu(2)]
    assert policy.resolve((), gpus) == policy.Resolved(policies={gpu.address: EXCLUSIVE for gpu in gpus})


def test_the_first_rule_that_matches_wins() -> None:
    gpus = [divided.gpu(bus, enabled=False) for bus in (1, 2, 3)]
    rules = (static(address=publishing.at(2)), dynamic(product="*H100*"), Rule(mode=Mode.EXCLUSIVE))
    assert modes(*rules, gpus=gpus) == [Mode.MIG_DYNAMIC, Mode.MIG_STATIC, Mode.MIG_DYNAMIC]


@pytest.mark.parametrize(
    ("match", "matched"),
    [
        ({}, True),
        ({"address": publishing.at(1)}, True),
        ({"address": publishing.at(2)}, False),
        ({"uuid": "GPU-00000001-0000-0000-0000-000000000000"}, True),
        ({"uuid": "GPU-00000002-0000-0000-0000-000000000000"}, False),
        ({"product": "*H100*"}, True),
        ({"product": "H100"}, False),
        ({"numa_node": 0}, True),
        ({"numa_node": 1}, False),
        ({"product": "*H100*", "numa_node": 1}, False),
        ({"product": "*H100*", "numa_node": 0, "address": publishing.at(1), "count": 1}, True),
    ],
)
def test_all_that_is_given_must_hold(match: dict[str, Any], *, matched: bool) -> None:
    assert modes(dynamic(**match), gpus=[divided.gpu(1, enabled=False)]) == [
        Mode.MIG_DYNAMIC if matched else Mode.EXCLUSIVE
    ]


def test_what_is_unknown_of_a_gpu_holds_for_nothing() -> None:
    dead = publishing.gpu(1, state=model.GpuState.LOST, product=None, uuid=None, pci={"numa_node": None})
    for match in ({"product": "*"}, {"uuid": "GPU-00000001-0000-0000-0000-000000000000"}, {"numa_node": 0}):
        assert modes(static(**match), gpus=[dead]) == [Mode.EXCLUSIVE]


def test_count_takes_the_first_by_address_of_those_that_are_left() -> None:
    gpus = [divided.gpu(bus, enabled=False) for bus in (5, 3, 1, 4, 2)]
    rules = (static(address=publishing.at(1)), dynamic(product="*H100*", count=2), static(count=1))
    assert modes(*rules, gpus=gpus) == [
        Mode.EXCLUSIVE,
        Mode.MIG_DYNAMIC,
        Mode.MIG_STATIC,
        Mode.MIG_STATIC,
        Mode.MIG_DYNAMIC,
    ]


def test_fallback_and_profiles_are_those_of_the_rule() -> None:
    rule = Rule(mode=Mode.MIG_DYNAMIC, fallback=Fallback.NONE, profiles=("1g.*",))
    (found,) = policy.resolve((rule,), [divided.gpu(1)]).policies.values()
    assert found == Policy(mode=Mode.MIG_DYNAMIC, fallback=Fallback.NONE, profiles=("1g.*",))


def test_a_gpu_without_mig_stays_exclusive_and_that_is_said() -> None:
    l40s = publishing.gpu(1, product="NVIDIA L40S")
    for rule in (static(), dynamic()):
        resolved = policy.resolve((rule,), [l40s])
        assert resolved.policies == {l40s.address: EXCLUSIVE}
        (finding,) = resolved.findings
        assert (finding.code, finding.severity) == ("sharing-not-possible", model.Severity.WARNING)
        assert rule.mode in finding.message
        assert "NVIDIA L40S has no MIG" in finding.message


def test_a_gpu_that_cannot_be_read_keeps_its_rule_and_is_not_judged() -> None:
    lost = publishing.gpu(1, state=model.GpuState.LOST, product=None)
    assert modes(dynamic(), gpus=[lost]) == [Mode.MIG_DYNAMIC]
    assert codes(dynamic(), gpus=[lost]) == []


def test_static_says_why_nothing_is_offered() -> None:
    off, empty, used = (divided.gpu(1, enabled=False), divided.gpu(2), divided.gpu(3, divided.instance(19, 0)))
    resolved = policy.resolve((static(),), [off, empty, used])
    assert set(resolved.policies.values()) == {STATIC}
    assert [(found.code, found.subject) for found in resolved.findings] == [
        ("mig-disabled", "0000:01:00.0"),
        ("mig-no-instances", "0000:02:00.0"),
    ]
    assert "nvidia-smi -i 0000:01:00.0 -mig 1)" in resolved.findings[0].message
    unread = dataclasses.replace(empty, mig_instances=None)
    assert codes(static(), gpus=[unread]) == []


def test_ampere_is_told_what_its_mode_means() -> None:
    on, off = (divided.gpu(bus, enabled=enabled, architecture="Ampere") for bus, enabled in ((1, True), (2, False)))
    found = policy.resolve((dynamic(),), [on, off]).findings
    assert [(each.code, each.severity) for each in found] == [("mig-mode-fixed", model.Severity.INFO)] * 2
    assert "MIG is on, so parts of this GPU are offered and never the whole" in found[0].message
    assert "nvidia-smi -i 0000:01:00.0 -mig 0, then nvidia-smi -i 0000:01:00.0 --gpu-reset" in found[0].message
    assert "MIG is off, so this GPU is offered whole and no part of it" in found[1].message
    assert "-mig 1, then" in found[1].message
    (disabled,) = policy.resolve((static(),), [off]).findings
    assert "--gpu-reset" in disabled.message
    assert codes(dynamic(), gpus=[divided.gpu(1), divided.gpu(2, enabled=False)]) == []


def test_a_rule_that_does_nothing_here_is_said_with_its_place() -> None:
    gpus = [divided.gpu(1, enabled=False)]
    rules = (dynamic(product="*A100*"), dynamic(count=1), static())
    found = policy.resolve(rules, gpus).findings
    assert [(each.code, each.severity, each.subject) for each in found] == [
        ("sharing-rule-unused", model.Severity.INFO, "sharing[0]"),
        ("sharing-rule-unused", model.Severity.INFO, "sharing[2]"),
    ]
    assert "no GPU of this node matches it" in found[0].message
    assert "every GPU of this node that it matches is taken by a rule before it" in found[1].message
    assert codes(dynamic(), gpus=[]) == [("sharing-rule-unused", "info", "sharing[0]")]


def test_a_rule_that_may_be_for_a_gpu_that_is_not_read_yet_is_not_called_unused() -> None:
    waking = publishing.gpu(1, state=model.GpuState.NO_DRIVER, product=None, uuid=None)
    assert codes(dynamic(product="*A100*"), gpus=[waking]) == []
    assert codes(dynamic(uuid="GPU-00000001-0000-0000-0000-000000000000"), gpus=[waking]) == []
    assert len(codes(dynamic(product="*A100*", numa_node=1), gpus=[waking])) == 1


def test_profiles_are_chosen_by_pattern() -> None:
    gpu = divided.gpu(1)

    def names(*patterns: str, mode: Mode = Mode.MIG_DYNAMIC) -> list[str]:
        return [profile.name for profile in policy.offered_profiles(Policy(mode=mode, profiles=patterns), gpu)]

    assert names() == [profile.name for profile in divided.H100]
    assert names("1g.*", "3g.40gb") == ["3g.40gb", "1g.20gb", "1g.10gb", "1g.10gb+me"]
    assert names("1g.10gb") == ["1g.10gb"]
    assert names(mode=Mode.MIG_STATIC) == names(mode=Mode.EXCLUSIVE) == []
    rule = Rule(mode=Mode.MIG_DYNAMIC, profiles=("1g.18gb", "9g"))
    (finding,) = policy.resolve((rule,), [gpu]).findings
    assert (finding.code, finding.severity) == ("sharing-profiles-unknown", model.Severity.WARNING)
    assert "1g.18gb, 9g" in finding.message
    assert "7g.80gb" in finding.message


@given(
    st.lists(
        st.builds(
            Rule,
            match=st.builds(
                Match,
                address=st.none() | st.integers(1, 6).map(publishing.at),
                product=st.none() | st.sampled_from(("*", "*H100*", "*A30*")),
                numa_node=st.none() | st.integers(0, 1),
                count=st.none() | st.integers(1, 3),
            ),
            mode=st.sampled_from(Mode),
        ),
        max_size=5,
    ),
    st.lists(st.tuples(st.booleans(), st.booleans(), st.integers(0, 1)), max_size=6),
    st.randoms(use_true_random=False),
)
def test_every_gpu_has_one_policy_whatever_the_order(
    rules: list[Rule], described: list[tuple[bool, bool, int]], chance: random.Random
) -> None:
    gpus = [
        divided.gpu(bus, enabled=enabled, pci={"numa_node": node}, **({} if known else {"product": None}))
        for bus, (known, enabled, node) in enumerate(described, start=1)
    ]
    resolved = policy.resolve(rules, gpus)
    assert set(resolved.policies) == {gpu.address for gpu in gpus}
    assert resolved.waiting == {}
    shuffled = chance.sample(gpus, len(gpus))
    assert policy.resolve(rules, shuffled).policies == resolved.policies
