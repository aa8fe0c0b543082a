# SPDX-License-Identifier: Apache-2.0
"""The kernel's two spellings of a set of numbers: lists (`0-3,8`) and masks (`ff,00000001`), see lib/vsprintf.c."""

from __future__ import annotations

from collections.abc import Iterable

MOST = 1 << 14
"""More CPUs or nodes than any kernel is built for."""


def parse(text: str) -> tuple[int, ...]:
    """The numbers of a list, ascending. ValueError that names the text."""
    numbers: set[int] = set()
    for part in text.strip().split(",") if text.strip() else ():
        first, dash, last = part.partition("-")
        if not (first.isdecimal() and (last.isdecimal() if dash else not last)):
            raise ValueError(f"{text!r} is no list of numbers such as 0-3,8")
        low, high = int(first), int(last or first)
        if not low <= high < MOST:
            raise ValueError(f"{part!r} in {text!r} is no range of numbers below {MOST}")
        numbers.update(range(low, high + 1))
    return tuple(sorted(numbers))


def spell(numbers: Iterable[int]) -> str:
    """The list of some numbers."""
    parts: list[str] = []
    run: list[int] = []
    for number in [*sorted(set(numbers)), -1]:
        if run and number != run[-1] + 1:
            parts.append(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}")
            run = []
        run.append(number)
    return ",".join(parts)


def mask(numbers: Iterable[int], *, possible: int) -> str:
    """The mask of some numbers, as wide as the kernel writes it for `possible` of them."""
    bits = sum(1 << number for number in set(numbers))
    words = max(1, (possible + 31) // 32)
    spelt = [f"{bits >> 32 * word & 0xFFFFFFFF:08x}" for word in reversed(range(words))]
    first = possible - 32 * (words - 1)
    spelt[0] = spelt[0][-((first + 3) // 4) :]
    return ",".join(spelt)
