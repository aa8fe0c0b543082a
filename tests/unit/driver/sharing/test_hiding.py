# SPDX-License-Identifier: Apache-2.0
"""Rules that can have no effect.

- each condition: a rule is hidden by one that asks for the same or less, and by no other
- a count hides nothing, unless the rule names one GPU
- what is called hidden takes no GPU on any machine
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from discovery import address
from driver.sharing import hiding, policy
from driver.sharing.rules import Match, Rule
from tests.fakes import publishing

ONE = address.parse("0000:01:00.0")
OTHER = address.parse("0000:02:00.0")
UUID = "GPU-00000000-0000-0000-0000-00000000000a"


def hidden(*matches: Match) -> list[tuple[int, int]]:
    return list(hiding.hidden([Rule(match=match) for match in matches]))


@pytest.mark.parametrize(
    ("broad", "narrow"),
    [
        (Match(), Match()),
        (Match(), Match(address=ONE)),
        (Match(), Match(count=1)),
        (Match(address=ONE), Match(address=ONE, product="*H100*")),
        (Match(uuid=UUID), Match(uuid=UUID.upper(), numa_node=0)),
        (Match(numa_node=0), Match(numa_node=0, count=4)),
        (Match(product="*H*"), Match(product="*H100*", numa_node=1)),
        (Match(product="*"), Match(address=ONE)),
        # There is one GPU at an address, whatever the count.
        (Match(address=ONE, count=1), Match(address=ONE)),
        (Match(uuid=UUID, count=3), Match(uuid=UUID)),
    ],
)
def test_a_rule_is_hidden_by_one_that_asks_for_no_more(broad: Match, narrow: Match) -> None:
    assert hidden(broad, narrow) == [(1, 0)]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (Match(address=ONE), Match(address=OTHER)),
        (Match(address=ONE), Match()),
        (Match(address=ONE), Match(uuid=UUID)),
        (Match(numa_node=0), Match(numa_node=1)),
        (Match(numa_node=0), Match(address=ONE)),
        (Match(product="*H100*"), Match(product="*H*")),
        (Match(product="*H100*"), Match(address=ONE)),
        (Match(product="*H100*", numa_node=0), Match(product="*H100*")),
        (Match(product="*H100*", count=4), Match(product="*H100*")),
        (Match(count=1), Match(address=ONE)),
        (Match(count=1024), Match(count=1024)),
    ],
)
def test_any_other_rule_stands(first: Match, second: Match) -> None:
    assert hidden(first, second) == []


def test_the_first_rule_that_hides_is_named() -> None:
    assert hidden(Match(count=1), Match(product="*"), Match(numa_node=0), Match()) == [(2, 1), (3, 1)]


MATCHES = st.builds(
    Match,
    address=st.none() | st.sampled_from((ONE, OTHER)),
    uuid=st.none() | st.sampled_from(("GPU-1", "GPU-2")),
    product=st.none() | st.sampled_from(("*", "*H100*", "*H*", "NVIDIA A30", "*[AH]*")),
    numa_node=st.none() | st.integers(0, 1),
    count=st.none() | st.integers(1, 2),
)
GPUS = st.lists(
    st.tuples(
        st.sampled_from((None, "NVIDIA H100 80GB HBM3", "NVIDIA A30", "Tesla T4")),
        st.integers(0, 1),
        st.sampled_from((None, "GPU-1", "GPU-2")),
    ),
    max_size=4,
)


@given(st.lists(MATCHES, min_size=2, max_size=4), GPUS)
def test_a_hidden_rule_has_an_effect_on_no_machine(
    matches: list[Match], described: list[tuple[str | None, int, str | None]]
) -> None:
    uuids = [uuid for _, _, uuid in described if uuid is not None]
    if len(set(uuids)) < len(uuids):
        return
    gpus = [
        publishing.gpu(bus, pci={"numa_node": numa}, product=product, uuid=uuid)
        for bus, (product, numa, uuid) in enumerate(described, start=1)
    ]
    rules = [Rule(match=match, profiles=(str(n),)) for n, match in enumerate(matches)]
    taken = policy.resolve(rules, [gpu for gpu in gpus if gpu.product is not None]).policies
    used = {how.profiles for how in taken.values()}
    assert not used & {(str(index),) for index, _ in hiding.hidden(rules)}
