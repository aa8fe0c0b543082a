# SPDX-License-Identifier: Apache-2.0
"""Pauses and write budgets, with a clock of our own."""

from __future__ import annotations

from driver.publish import pacing


def test_pauses_double_to_the_most_and_begin_anew_when_it_works() -> None:
    backoff = pacing.Backoff(first_s=1.0, most_s=4.0)
    for most in (1.0, 2.0, 4.0, 4.0):
        assert 0.75 * most <= backoff.failed() <= most
    backoff.passed()
    assert backoff.failed() <= 1.0


def test_a_budget_lets_a_burst_pass_and_then_a_trickle_that_never_ends() -> None:
    now = 0.0
    budget = pacing.WriteBudget(burst=3, refill_s=10.0, clock=lambda: now)
    for _ in range(3):
        assert budget.wait_s() == 0
        budget.spend()
    for _ in range(5):
        assert 9.9 < budget.wait_s() <= 10.0
        now += 10.0
        assert budget.wait_s() == 0
        budget.spend()
    now += 1000.0
    for _ in range(3):
        assert budget.wait_s() == 0
        budget.spend()
    assert budget.wait_s() > 0


def test_what_is_urgent_may_go_into_debt_but_not_without_end() -> None:
    now = 0.0
    budget = pacing.WriteBudget(burst=3, refill_s=10.0, clock=lambda: now)
    for _ in range(6):
        assert budget.wait_s(urgent=True) == 0
        budget.spend()
    assert 9.9 < budget.wait_s(urgent=True) <= 10.0
    assert 39.9 < budget.wait_s() <= 40.0


def test_a_change_of_several_slices_may_leave_a_debt() -> None:
    now = 0.0
    budget = pacing.WriteBudget(burst=1, refill_s=10.0, clock=lambda: now)
    for _ in range(4):
        budget.spend()
    assert 39.9 < budget.wait_s() <= 40.0
