# SPDX-License-Identifier: Apache-2.0
"""Who holds missing devices: when claims are listed, and when again.

Aspects: the record suffices; a claim found, asked again soon and then less and less often; a claim that goes soon after its
release; nobody; a LIST that fails.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from driver import errors
from driver.publish import held

DRIVER, POOL, LOST = "gpu.nearfield.dev", "n1", "gpu-0000-1b-00-0"


class Holding:
    """A HeldDevices with a server and a clock that the test sets."""

    def __init__(self) -> None:
        self.now = 0.0
        self.allocated: tuple[str, ...] = ()
        self.error: errors.ApiError | None = None
        self.lists = 0
        self.devices = held.HeldDevices(self, driver_name=DRIVER, pool=POOL, clock=lambda: self.now)

    def list_claims(self, *, timeout_s: float, keep: Callable[[dict[str, Any]], bool]) -> list[dict[str, Any]]:
        assert timeout_s > 0
        self.lists += 1
        if self.error is not None:
            raise self.error
        results = [{"driver": DRIVER, "pool": POOL, "device": name} for name in self.allocated]
        claim = {"status": {"allocation": {"devices": {"results": results}}}}
        return [claim] if keep(claim) else []

    def look(self, *recorded: str) -> held.Held:
        return self.devices.look({LOST}, set(recorded))


def test_what_the_record_names_needs_no_list() -> None:
    holding = Holding()
    assert holding.look(LOST) == held.Held(names=frozenset({LOST}), again_s=held.RECORD_AGAIN_S)
    assert holding.lists == 0


def test_what_nobody_has_is_free_at_once() -> None:
    holding = Holding()
    assert holding.look() == held.Held(names=frozenset())
    assert holding.lists == 1


def test_an_allocated_device_is_asked_for_soon_and_then_less_and_less_often() -> None:
    holding = Holding()
    holding.allocated = (LOST,)
    pauses = []
    for _ in range(10):
        found = holding.look()
        assert found.names == {LOST}
        assert found.again_s is not None
        pauses.append(found.again_s)
        holding.now += found.again_s
    assert (pauses, holding.lists) == ([3, 6, 12, 24, 48, 96, 192, 384, 600, 600], 10)


def test_a_claim_that_goes_after_its_release_frees_the_device_within_seconds() -> None:
    holding = Holding()
    holding.allocated = (LOST,)
    holding.look(LOST)
    holding.now += 3600
    # Unprepared; the control plane still has the claim.
    assert holding.look().again_s == held.FIRST_AGAIN_S
    holding.now += held.FIRST_AGAIN_S
    holding.allocated = ()
    assert holding.look().names == frozenset()


def test_a_list_that_fails_frees_nothing() -> None:
    holding = Holding()
    holding.error = errors.ApiError("away", reason=errors.ApiReason.UNAVAILABLE)
    found = holding.look()
    assert found.names == {LOST}
    assert found.trouble is not None
    assert "away" in found.trouble
    assert found.again_s is not None
    holding.now += found.again_s
    holding.error = None
    assert holding.look() == held.Held(names=frozenset())
