# SPDX-License-Identifier: Apache-2.0
"""Which rules can never have an effect, as one before them takes every GPU that they match, whatever node it is. Pure.

Only what is certain from the two rules alone counts: that the earlier one takes all that it matches, and that each of its
conditions follows from those of the later one. An address, UUID or NUMA node follows from the same one, a pattern of products from
a narrower one. A `count` lets GPUs through to the rules behind it, so a rule with one hides nothing, unless it names one
GPU, by address or UUID: then there is nothing to let through. That several rules hide one together cannot be told from them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from driver.sharing import globs
from driver.sharing.rules import Match, Rule


def hidden(rules: Sequence[Rule]) -> Iterator[tuple[int, int]]:
    """Index of each rule that is hidden, and of the first rule that hides it."""
    for index, rule in enumerate(rules):
        for before in range(index):
            if _takes_all(rules[before].match) and _follows(rules[before].match, rule.match):
                yield index, before
                break


def _takes_all(match: Match) -> bool:
    return match.count is None or match.address is not None or match.uuid is not None


def _follows(broad: Match, narrow: Match) -> bool:
    """Whether all that `broad` asks for holds wherever all of `narrow` does."""
    return (
        (broad.address is None or broad.address == narrow.address)
        and (broad.uuid is None or (narrow.uuid is not None and broad.uuid.casefold() == narrow.uuid.casefold()))
        and (broad.numa_node is None or broad.numa_node == narrow.numa_node)
        and (broad.product is None or _product_follows(broad.product, narrow.product))
    )


def _product_follows(broad: str, narrow: str | None) -> bool:
    # No GPU is offered whose product is not known, so a pattern of every product asks for nothing.
    return globs.covers(broad, "*" if narrow is None else narrow)
