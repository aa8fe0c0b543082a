# SPDX-License-Identifier: Apache-2.0
"""Text for messages and logs: always valid UTF-8, never above its bound, unchanged where nothing is wrong with it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from driver.kubelet import wire


@given(st.text(st.characters(), max_size=60), st.integers(min_value=3, max_value=80))
def test_any_text_becomes_utf8_within_its_bound(value: str, bound: int) -> None:
    data = wire.text(value, max_bytes=bound).encode()
    assert len(data) <= bound


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=20))
def test_text_that_fits_is_left_as_it_is(value: str) -> None:
    assert wire.text(value, max_bytes=80) == value


def test_cut_never_splits_a_character() -> None:
    assert wire.text("é" * 10, max_bytes=10) == "ééé..."
    assert wire.text("é" * 5, max_bytes=10) == "é" * 5


def test_what_is_no_character_is_replaced() -> None:
    assert wire.text("/sys/\udcff", max_bytes=100) == "/sys/?"


def test_line() -> None:
    assert wire.line("one\n  two\ttwo\r\n") == "one two two"
