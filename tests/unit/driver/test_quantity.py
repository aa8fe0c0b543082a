# SPDX-License-Identifier: Apache-2.0
"""Quantities: every suffix, canonical bytes, and text that is none."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from driver import quantity


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("80Gi", 80 << 30),
        ("1Ei", 1 << 60),
        ("1E", 10**18),
        ("1E3", 1000),
        ("1e-3", Fraction(1, 1000)),
        ("1500m", Fraction(3, 2)),
        ("2n", Fraction(2, 10**9)),
        ("-.5", Fraction(-1, 2)),
        ("5.", 5),
        ("+7k", 7000),
        (12, 12),
        (0.5, Fraction(1, 2)),
    ],
)
def test_a_quantity_is_its_number(text: object, value: Fraction | int) -> None:
    assert quantity.parse(text) == value


@pytest.mark.parametrize("text", ["", "+", "1 Gi", "1Zi", "1e9999", "9" * 65, "Gi", "0x10", None, True, [], "\uff11"])
def test_what_is_none_is_refused(text: object) -> None:
    with pytest.raises(ValueError, match="quantity"):
        quantity.parse(text)


@given(st.integers(min_value=0, max_value=2**70))
def test_bytes_come_back_from_their_canonical_spelling(value: int) -> None:
    assert quantity.parse(quantity.format_bytes(value)) == value


def test_bytes_are_spelled_as_people_read_them() -> None:
    assert [quantity.format_bytes(n) for n in (0, 1000, 1024, 81559 << 20, 80 << 30)] == [
        "0",
        "1000",
        "1Ki",
        "81559Mi",
        "80Gi",
    ]
