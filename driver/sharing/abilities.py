# SPDX-License-Identifier: Apache-2.0
"""What this node can enforce of the shares of one GPU, and which enforcement follows from that. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from discovery import model
from driver.sharing.shares import Compute, Enforcement, Memory, Shares

Level = TypeVar("Level", Memory, Compute)

MPS_CLIENTS = 48
"""How many CUDA contexts the server of MPS has on one device, from Volta on, up to CUDA 13.0 (MPS documentation, Client-Server
Connection Limits). Every sharer needs one at least.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Abilities:
    """Of one GPU, or of its MIG instances. `memory` and `compute` say of every level but `none` why the node cannot do it,
    in a sentence that says what would help; a level without an entry can be done. `passing_memory`, `passing_compute`: those of
    them whose reason may pass without anybody doing anything. `mps_clients`: how many sharers MPS can serve.
    """

    memory: Mapping[Memory, str] = field(default_factory=dict)
    compute: Mapping[Compute, str] = field(default_factory=dict)
    passing_memory: frozenset[Memory] = frozenset()
    passing_compute: frozenset[Compute] = frozenset()
    mps_clients: int = MPS_CLIENTS


Can = Callable[[model.Gpu], Abilities]
"""What this node can enforce of the shares of a GPU as it is now, divided by MIG or not."""


def without(reason: str, *, passing: bool = False) -> Abilities:
    """A GPU of which nothing can be enforced, for one reason."""
    memory: dict[Memory, str] = {level: reason for level in Memory if level is not Memory.NONE}
    compute: dict[Compute, str] = {level: reason for level in Compute if level is not Compute.NONE}
    return Abilities(
        memory=memory,
        compute=compute,
        passing_memory=frozenset(memory if passing else ()),
        passing_compute=frozenset(compute if passing else ()),
    )


def unknown(_gpu: model.Gpu) -> Abilities:
    """What can be enforced where nobody looked."""
    return without("what this node can do is not known here")


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
    return Lacking(
        reasons=(
            *(_reasons("memory", _acceptable(Memory, shares.memory), can.memory) if memory is None else ()),
            *(_reasons("compute", _acceptable(Compute, shares.compute), can.compute) if compute is None else ()),
        )
    )


def _reasons(what: str, levels: Iterable[Level], why_not: Mapping[Level, str]) -> Iterator[str]:
    """A sentence for each reason, with all levels that it keeps away."""
    by_reason: dict[str, list[str]] = {}
    for level in levels:
        by_reason.setdefault(why_not[level], []).append(level)
    for reason, kept_away in by_reason.items():
        yield f"{what} by {' or '.join(kept_away)}: {reason}"


def outlasts(held: Enforcement, shares: Shares, can: Abilities) -> bool:
    """Whether an enforcement that is in use would be acceptable, and cannot be had now for reasons alone that may pass by themselves."""
    if held.memory not in _acceptable(Memory, shares.memory) or held.compute not in _acceptable(
        Compute, shares.compute
    ):
        return False
    memory, compute = held.memory in can.memory, held.compute in can.compute
    return (
        (memory or compute)
        and (not memory or held.memory in can.passing_memory)
        and (not compute or held.compute in can.passing_compute)
    )


def _strongest(levels: type[Level], least: Level, why_not: Mapping[Level, str]) -> Level | None:
    return next((level for level in _acceptable(levels, least) if level not in why_not), None)


def _acceptable(levels: type[Level], least: Level) -> tuple[Level, ...]:
    """The levels from the strongest down to the weakest that is acceptable."""
    ordered = tuple(levels)
    return ordered[: ordered.index(least) + 1]
