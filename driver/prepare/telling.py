# SPDX-License-Identifier: Apache-2.0
"""What is said on claims, once each, about what keeps their shares apart and what does not."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from driver import quantity, values
from driver.prepare import ledger, mpscare
from driver.prepare.joining import Pod
from driver.sharing.shares import Compute, Memory

ADVISORY = "ShareAdvisory"
SEVERAL = "SeveralMpsShares"
JOINED = "ShareJoined"

_SHOWN = 4
_UNNAMED = (
    "pods that are not named in status.reservedFor get no limit of their GPU memory. Give each pod a claim of its own (a"
    " ResourceClaimTemplate)"
)


class Telling:
    """Remembers what was said. `tell` and `reserved` from any thread; never raise."""

    def __init__(self, events: mpscare.Events) -> None:
        self._events = events
        self._known: frozenset[str] = frozenset()
        self._reserved: set[tuple[str, str]] = set()
        self._others: dict[values.ClaimUid, tuple[values.ClaimRef, tuple[str, ...]]] = {}

    def tell(self, rows: Iterable[ledger.Entry], *, first: bool) -> None:
        """Say what there is to say on claims that were not there before. `first`: those that are there now were told of by the
        agent before this one.
        """
        found = {row.claim.uid: row for row in rows}
        for uid in found.keys() - self._known if not first else ():
            row = found[uid]
            advice = advisory(row)
            if advice is not None:
                self._events.claim(row.claim, reason=ADVISORY, message=advice)
            several = several_mps(row)
            if several is not None:
                self._events.claim(row.claim, reason=SEVERAL, message=several)
        self._known = frozenset(found)
        self._reserved = {key for key in self._reserved if key[0] in found}
        for gone in [uid for uid in tuple(self._others) if uid not in found]:
            self._others.pop(gone, None)

    def reserved(self, claim: values.ClaimRef, consumers: Sequence[str]) -> None:
        """Say that others than pods use a claim, whose pods it does not name; `consumers`: all of them, which may be none."""
        if consumers:
            self._others[claim.uid] = (claim, tuple(consumers))
        else:
            self._others.pop(claim.uid, None)
        for consumer in consumers:
            if (claim.uid, consumer) not in self._reserved:
                self._reserved.add((claim.uid, consumer))
                self._events.claim(
                    claim,
                    reason=JOINED,
                    message=f"It is reserved for {consumer} as well: {_UNNAMED}",
                )

    def unlimited(self) -> tuple[tuple[values.ClaimRef, str], ...]:
        """The claims that others than pods use, with what is to be said of each."""
        return tuple(
            (claim, f"{claim} is reserved for {', '.join(consumers[:_SHOWN])} as well: {_UNNAMED}")
            for claim, consumers in tuple(self._others.values())
        )


def advisory(entry: ledger.Entry) -> str | None:
    """What nothing keeps a claim to; None where something keeps it to all its shares."""
    lacking: dict[str, list[str]] = {}
    for device, result in entry.shared:
        use = result.share
        if use is None:
            continue
        if use.enforcement.memory is Memory.NONE and use.memory_limit is not None:
            lacking.setdefault(device.name, []).append(f"{quantity.format_bytes(use.memory_limit)} of memory")
        if use.enforcement.compute is Compute.NONE and use.compute_limit is not None:
            lacking.setdefault(device.name, []).append(f"{use.compute_limit} percent of the compute")
    if not lacking:
        return None
    said = "; ".join(f"{' and '.join(what)} of device {name}" for name, what in sorted(lacking.items()))
    return f"Nothing keeps its containers to {said}: by the sharing rule of this node the share is advice (memoryEnforcement, computeEnforcement)"


def several_mps(entry: ledger.Entry) -> str | None:
    """That a container with several of its MPS shares has one of them only; None where there is one."""
    named = [
        f"{result.request} ({device.name})"
        for device, result in entry.shared
        if result.share is not None and result.share.by_mps
    ]
    if len(named) < 2:
        return None
    more = f" and {len(named) - _SHOWN} more" if len(named) > _SHOWN else ""
    return (
        f"It has several shares by MPS: {', '.join(named[:_SHOWN])}{more}. A process reaches one MPS daemon and one share of it, so"
        " give each container one of these requests (resources.claims[].request); a container with several has the last of them"
    )


def joins(entry: ledger.Entry, pod: Pod) -> str:
    """That a pod has joined a claim."""
    return (
        f"Pod {pod.name} has joined {entry.claim} and has the same limit of GPU memory ({_limits(entry)}): its {len(entry.pods)} pods may"
        " each use as much, together more than the share. Give each pod a claim of its own (a ResourceClaimTemplate)"
    )


def joined(entry: ledger.Entry, pods: Collection[str]) -> str:
    """That several pods that are there use a claim."""
    return (
        f"{len(pods)} pods use {entry.claim}, each of which may use as much GPU memory as the share ({_limits(entry)}): together they may"
        " exceed it. Give each pod a claim of its own (a ResourceClaimTemplate)"
    )


def _limits(entry: ledger.Entry) -> str:
    return ", ".join(
        f"{quantity.format_bytes(result.share.memory_limit)} of {device.name}"
        for device, result in entry.shared
        if result.share is not None and result.share.cgroup_limit and result.share.memory_limit is not None
    )
