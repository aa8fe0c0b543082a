# SPDX-License-Identifier: Apache-2.0
"""What this node can enforce of the shares of one GPU, and which enforcement follows from that. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from driver.sharing.shares import Compute, Enforcement, Memory, Shares

Level = TypeVar("Level", Memory, Compute)


@dataclass(frozen=True, slots=True, kw_only=True)
class Abilities:
    """Of one GPU, or of its MIG instances. `memory` and `compute` say of every level but `none` why the node cannot do it,
    in a sentence that says what would help; a level without an entry can be done.
    """

    memory: Mapping[Memory, str] = field(default_factory=dict)
    compute: Mapping[Compute, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lacking:
    """Why shares cannot be kept apart as their policy wants: for each level that would do, why it cannot be had."""

    reasons: tuple[str, ...]


def enforcement(shares: Shares, can: Abilities) -> Enforcement | Lacking:
    """The strongest levels that the node can do, never weaker than those of the policy."""
    memory = _strongest(Memory, shares.memory, can.memory)
    compute = _strongest(Compute, shares.compute, can.compute)
    if memory is not None and compute is not None:
        return Enforcement(memory=memory, compute=compute)
    reasons: list[str] = []
    if memory is None:
        reasons += [f"memory by {level}: {can.memory[level]}" for level in _acceptable(Memory, shares.memory)]
    if compute is None:
        reasons += [f"compute by {level}: {can.compute[level]}" for level in _acceptable(Compute, shares.compute)]
    return Lacking(reasons=tuple(reasons))


def _strongest(levels: type[Level], least: Level, why_not: Mapping[Level, str]) -> Level | None:
    return next((level for level in _acceptable(levels, least) if level not in why_not), None)


def _acceptable(levels: type[Level], least: Level) -> tuple[Level, ...]:
    """The levels from the strongest down to the weakest that is acceptable."""
    ordered = tuple(levels)
    return ordered[: ordered.index(least) + 1]
