# SPDX-License-Identifier: Apache-2.0
"""Patterns of names, as a shell has them: `*` is any text, `?` any character, `[a-z]` one of a set, `[!a-z]` one of all others.
Upper and lower case differ. Pure.

Not the standard library's fnmatch, which takes a bracket that is never closed for a character, cannot say whether a pattern
takes in another, and searches for as long as a hostile pattern makes it.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

_Set = tuple[tuple[int, int], ...]
"""Code points, as ranges in order that do not touch; both ends belong to them."""

_Token = _Set | None
"""One character of a set; None is any text."""

_LAST = 0x10FFFF
_ANY: _Set = ((0, _LAST),)


def check(pattern: str) -> None:
    """Raise ValueError, which says what is wrong, for what is no pattern."""
    _parse(pattern)


def matches(pattern: str, text: str) -> bool:
    """Whether the whole text is what the pattern says."""
    return _takes_in(_parse(pattern), [((ord(char), ord(char)),) for char in text])


def covers(broad: str, narrow: str) -> bool:
    """Whether everything that `narrow` matches is surely matched by `broad`. False where that is not so, or where it
    takes more to see than to lay the one along the other.
    """
    return _takes_in(_parse(broad), _parse(narrow))


def _takes_in(broad: Sequence[_Token], narrow: Sequence[_Token]) -> bool:
    """Lay `narrow` along `broad`: a set takes a set that lies in it, any text takes anything, and only it takes any text."""
    at = along = 0
    star: int | None = None
    resume = 0
    while along < len(narrow):
        wanted = narrow[along]
        if at < len(broad) and broad[at] is None:
            star, resume = at, along
            at += 1
            continue
        token = broad[at] if at < len(broad) else None
        if token is not None and wanted is not None and _lies_in(wanted, token):
            at, along = at + 1, along + 1
        elif star is None:
            return False
        else:
            resume += 1
            at, along = star + 1, resume
    return all(token is None for token in broad[at:])


def _lies_in(inner: _Set, outer: _Set) -> bool:
    return all(any(low <= first and last <= high for low, high in outer) for first, last in inner)


@functools.lru_cache(maxsize=512)
def _parse(pattern: str) -> tuple[_Token, ...]:
    tokens: list[_Token] = []
    at = 0
    while at < len(pattern):
        char = pattern[at]
        at += 1
        if char == "*":
            tokens.append(None)
        elif char == "?":
            tokens.append(_ANY)
        elif char == "[":
            token, at = _set(pattern, at)
            tokens.append(token)
        else:
            tokens.append(((ord(char), ord(char)),))
    return tuple(_ordered(tokens))


def _set(pattern: str, at: int) -> tuple[_Set, int]:
    """The set whose bracket was opened before `at`, and where the pattern goes on."""
    opened = at - 1
    negated = pattern[at : at + 1] == "!"
    at += negated
    first = at
    ranges: list[tuple[int, int]] = []
    while at < len(pattern) and (pattern[at] != "]" or at == first):
        low = high = pattern[at]
        if pattern[at + 1 : at + 2] == "-" and pattern[at + 2 : at + 3] not in ("", "]"):
            high = pattern[at + 2]
            at += 2
        if high < low:
            raise ValueError(f"{pattern!r} is no pattern: {low}-{high} has its ends the wrong way round")
        ranges.append((ord(low), ord(high)))
        at += 1
    if at >= len(pattern):
        raise ValueError(
            f"{pattern!r} is no pattern: the [ at character {opened + 1} is never closed ([[] is a bracket)"
        )
    joined = _joined(ranges)
    return _others(joined) if negated else joined, at + 1


def _joined(ranges: list[tuple[int, int]]) -> _Set:
    joined: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if joined and low <= joined[-1][1] + 1:
            joined[-1] = (joined[-1][0], max(high, joined[-1][1]))
        else:
            joined.append((low, high))
    return tuple(joined)


def _others(ranges: _Set) -> _Set:
    edges = [-1, *(edge for low, high in ranges for edge in (low, high)), _LAST + 1]
    pairs = zip(edges[::2], edges[1::2], strict=True)
    return tuple((before + 1, after - 1) for before, after in pairs if before + 1 <= after - 1)


def _ordered(tokens: list[_Token]) -> list[_Token]:
    """`*` and `?` beside each other mean the same in any order, and two `*` as one."""
    ordered: list[_Token] = []
    star = False
    for token in tokens:
        if token is None:
            star = True
            continue
        if star and token != _ANY:
            ordered.append(None)
            star = False
        ordered.append(token)
    return [*ordered, None] if star else ordered
