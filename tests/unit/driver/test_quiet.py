# SPDX-License-Identifier: Apache-2.0
"""When to look after hints: after quiet, at last while there is none, and never too often for long."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from driver import quiet

START = 1000.0


def test_without_a_hint_no_look_is_due() -> None:
    burst = quiet.Burst()
    assert burst.due() is None
    burst.looked(START)
    assert burst.due() is None


def test_a_burst_is_looked_after_once_when_it_has_ended() -> None:
    burst = quiet.Burst()
    assert [burst.hint(START + step / 10) for step in range(5)] == [True, False, False, False, False]
    assert burst.due() == START + 0.4 + quiet.QUIET_S
    burst.looked(START + 1)
    assert burst.due() is None
    assert burst.hint(START + 2)


def test_a_burst_without_an_end_is_cut() -> None:
    burst = quiet.Burst()
    for step in range(1000):
        burst.hint(START + step / 10)
    assert burst.due() == START + quiet.LONGEST_S


def looks(hints: list[float]) -> list[float]:
    """When a loop looks that does nothing else, for hints at these times."""
    burst = quiet.Burst()
    made: list[float] = []
    for at in [*sorted(hints), float("inf")]:
        while (due := burst.due()) is not None and due <= at:
            made.append(due)
            burst.looked(due)
        if at != float("inf"):
            burst.hint(at)
    return made


def test_ever_new_hints_lead_to_a_few_looks_and_then_to_a_trickle() -> None:
    made = looks([START + step for step in range(600)])
    assert len(made) <= quiet.LOOKS_AT_ONCE + 600 / quiet.LOOK_EVERY_S + 1
    gaps = [after - before for before, after in itertools.pairwise(made)]
    assert max(gaps) <= quiet.LOOK_EVERY_S + quiet.QUIET_S + 1e-6


def test_after_a_pause_looks_are_quick_again() -> None:
    made = looks([START + step for step in range(60)] + [START + 3600.0])
    assert made[-1] == START + 3600.0 + quiet.QUIET_S


@given(st.lists(st.floats(0, 100), min_size=1, max_size=200))
def test_every_hint_is_followed_by_a_look_in_time(hints: list[float]) -> None:
    made = looks(hints)
    most = quiet.LOOKS_AT_ONCE + (max(hints) + quiet.LONGEST_S - min(hints)) / quiet.LOOK_EVERY_S + 2
    assert len(made) <= most
    for hint in hints:
        after = min(look for look in made if look > hint)
        assert after - hint <= max(quiet.LONGEST_S, quiet.LOOK_EVERY_S) + quiet.QUIET_S + 1e-6
