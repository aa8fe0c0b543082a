# SPDX-License-Identifier: Apache-2.0
"""Patterns of names.

- they match what fnmatch says, where both accept a pattern
- brackets that are broken are errors
- what covers a pattern matches all that it matches; the cases that matter are seen
- hostile patterns end
"""

from __future__ import annotations

import fnmatch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from driver.sharing import globs

PRODUCT = "NVIDIA H100 80GB HBM3"

PATTERNS = st.lists(
    st.sampled_from(("*", "?", "a", "b", ".", "[ab]", "[!a]", "[a-c]", "[]]", "[!]-]", "[a-]", "[.+]")), max_size=7
).map("".join)
TEXTS = st.text("ab.c]-+", max_size=8)


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        ("*H100*", PRODUCT),
        ("NVIDIA H?00 *", PRODUCT),
        ("NVIDIA [AH]100 80GB*", PRODUCT),
        (PRODUCT, PRODUCT),
        ("*", ""),
        ("1g.*", "1g.10gb+me"),
        ("[!3-7]g.*", "2g.20gb"),
        ("[[]a]", "[a]"),
    ],
)
def test_what_is_said_matches(pattern: str, text: str) -> None:
    assert globs.matches(pattern, text)


@pytest.mark.parametrize(
    ("pattern", "text"),
    [("*H200*", PRODUCT), ("H100", PRODUCT), ("*h100*", PRODUCT), ("?", ""), ("1g.10gb", "1g.10gb+me"), ("", "a")],
)
def test_anything_else_does_not(pattern: str, text: str) -> None:
    assert not globs.matches(pattern, text)


@pytest.mark.parametrize(
    ("pattern", "said"),
    [
        ("a[bc", r"the \[ at character 2 is never closed"),
        ("[", "never closed"),
        ("[]", "never closed"),
        ("[!]", "never closed"),
        ("[z-a]", "z-a has its ends the wrong way round"),
    ],
)
def test_a_broken_bracket_is_an_error(pattern: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        globs.check(pattern)


@given(PATTERNS, TEXTS)
def test_it_agrees_with_fnmatch(pattern: str, text: str) -> None:
    assert globs.matches(pattern, text) == fnmatch.fnmatchcase(text, pattern)


@given(PATTERNS, PATTERNS, TEXTS)
def test_what_covers_a_pattern_matches_all_that_it_matches(broad: str, narrow: str, text: str) -> None:
    if globs.covers(broad, narrow) and globs.matches(narrow, text):
        assert globs.matches(broad, text)


@given(PATTERNS)
def test_a_pattern_covers_itself_and_the_star_covers_it(pattern: str) -> None:
    assert globs.covers(pattern, pattern)
    assert globs.covers("*", pattern)
    assert globs.covers(f"*{pattern}*", pattern)


@pytest.mark.parametrize(
    ("broad", "narrow"),
    [
        ("*H*", "*H100*"),
        ("NVIDIA *", "NVIDIA H100*"),
        ("*[AH]100*", "*H100*"),
        ("*[A-Z]100*", "*[AH]100*"),
        ("?*", "*?"),
        ("*?*?*", "??*"),
        ("**", "*"),
        ("*100*", "*A100*80GB*"),
    ],
)
def test_a_broader_pattern_is_seen(broad: str, narrow: str) -> None:
    assert globs.covers(broad, narrow)
    assert not globs.covers(narrow, broad) or (broad, narrow) in {("?*", "*?"), ("*?*?*", "??*"), ("**", "*")}


@pytest.mark.parametrize(
    ("broad", "narrow"), [("*H100", "*H100*"), ("?", "*"), ("[!a]", "?"), ("a*b", "a*"), ("", "*")]
)
def test_what_is_not_broader_covers_nothing(broad: str, narrow: str) -> None:
    assert not globs.covers(broad, narrow)


def test_hostile_patterns_end() -> None:
    """Each takes a search that tries every way to lay it longer than anybody waits."""
    assert not globs.matches("*a" * 48 + "b", "a" * 96)
    assert not globs.covers("*a" * 48 + "b", "a*" * 48)
    assert globs.matches("[" + "a-z" * 30 + "]*", "a")
