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


def claim(device: str) -> dict[str, Any]:
    result = {"driver": "gpu.nearfield.dev", "pool": "n1", "device": device}
    return {"status": {"allocation": {"devices": {"results": [result]}}}}


class Claims:
    """Lists claims, or fails; counts."""

    def __init__(self) -> None:
        self.claims: list[dict[str, Any]] = []
        self.error: errors.ApiError | None = None
        self.lists = 0

    def list_claims(self, *, timeout_s: float, keep: Callable[[dict[str, Any]], bool]) -> list[dict[str, Any]]:
        assert timeout_s > 0
        self.lists += 1
        if self.error is not None:
            raise self.error
        return [body for body in self.claims if keep(body)]


class Asked:
    def __init__(self) -> None:
        self.now = 1000.0
        self.claims = Claims()
        self.holding = held.HeldDevices(self.claims, driver_name="gpu.nearfield.dev", pool="n1", clock=lambda: self.now)

    def look(self, missing: str = "", recorded: str = "") -> tuple[str, float | None, int]:
        """Names held, when to ask again, LISTs so far."""
        looked = self.holding.look(missing.split(), recorded.split())
        return " ".join(sorted(looked.names)), looked.again_s, self.claims.lists


def test_nothing_missing_asks_nobody() -> None:
    assert Asked().look() == ("", None, 0)


def test_what_the_record_holds_needs_no_list() -> None:
    assert Asked().look("a", "a b") == ("a", 30.0, 0)


def test_what_nobody_holds_leaves_after_one_list() -> None:
    asked = Asked()
    assert asked.look("a b", "b") == ("b", 30.0, 1)


def test_what_a_claim_holds_stays_and_is_asked_for_soon_and_then_less_and_less_often() -> None:
    asked = Asked()
    asked.claims.claims = [claim("a")]
    pauses = []
    for _ in range(10):
        names, again_s, _lists = asked.look("a")
        assert (names, again_s is None) == ("a", False)
        pauses.append(again_s)
        asked.now += again_s or 0
    assert (pauses, asked.claims.lists) == ([3, 6, 12, 24, 48, 96, 192, 384, 600, 600], 10)
    asked.claims.claims = []
    assert asked.look("a") == ("", None, 11)


def test_between_two_lists_nobody_is_asked() -> None:
    asked = Asked()
    asked.claims.claims = [claim("a")]
    asked.look("a")
    asked.now += 2
    assert asked.look("a") == ("a", 1.0, 1)


def test_a_claim_that_goes_after_its_release_frees_the_device_within_seconds() -> None:
    asked = Asked()
    asked.claims.claims = [claim("a")]
    asked.look("a", "a")
    asked.now += 3600
    # Unprepared; the control plane still has the claim.
    assert asked.look("a") == ("a", 3.0, 1)
    asked.now += 3
    asked.claims.claims = []
    assert asked.look("a") == ("", None, 2)


def test_a_device_that_is_unprepared_is_asked_for_at_once() -> None:
    asked = Asked()
    asked.claims.claims = [claim("a")]
    assert asked.look("a b", "b") == ("a b", 3.0, 1)
    asked.now += 1
    assert asked.look("a b", "")[2] == 2


def test_that_nobody_holds_it_is_believed_for_seconds_only() -> None:
    asked = Asked()
    asked.look("a")
    asked.now += 1
    assert asked.look("a")[2] == 1
    asked.now += 11
    asked.claims.claims = [claim("a")]
    assert asked.look("a") == ("a", 6.0, 2)


def test_no_answer_means_held() -> None:
    asked = Asked()
    asked.claims.error = errors.ApiError("forbidden", reason=errors.ApiReason.FORBIDDEN, status=403)
    looked = asked.holding.look(["a"], [])
    assert looked.names == {"a"}
    assert looked.trouble is not None
    assert "forbidden" in looked.trouble
    assert 1.5 <= (looked.again_s or 0) <= 2.0
    asked.claims.error = None
    asked.now += 2
    assert asked.look("a") == ("", None, 2)
