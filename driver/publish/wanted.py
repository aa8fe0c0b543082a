# SPDX-License-Identifier: Apache-2.0
"""What the node wants to offer at this moment, as one of three answers. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from discovery import model
from driver.publish import devices


@dataclass(frozen=True, slots=True, kw_only=True)
class Offering:
    """Publish these devices; none at all is an empty pool, which tells autoscalers that the driver has looked."""

    offer: devices.Offer


@dataclass(frozen=True, slots=True, kw_only=True)
class Withheld:
    """Publish nothing: the right answer for now, and why."""

    reason: str
    findings: tuple[model.Finding, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Undecided:
    """Leave everything as it is: the node has not been read yet."""

    reason: str


Wanted = Offering | Withheld | Undecided


def from_snapshot(
    snapshot: model.Snapshot | None,
    *,
    options: devices.PublishOptions,
    why_not: str = "",
    policies: devices.Policies | None = None,
    ours: Collection[str] = (),
    findings: Sequence[model.Finding] = (),
) -> Wanted:
    """The answer that follows from a Snapshot; `why_not`: what keeps the node from being read where there is none. `findings`: what
    was odd about the policies. The others as `devices.build_offer` takes them.
    """
    if snapshot is None:
        return Undecided(reason=why_not or "The hardware of this node has not been read yet")
    offer = devices.build_offer(snapshot, options=options, policies=policies, ours=ours)
    offer = replace(offer, findings=(*findings, *offer.findings))
    if offer.devices or not snapshot.gpus:
        return Offering(offer=offer)
    states = Counter(gpu.state.value for gpu in snapshot.gpus)
    counted = ", ".join(f"{count} {state}" for state, count in sorted(states.items()))
    first = next((gpu.state_reason for gpu in snapshot.gpus if gpu.state_reason), None)
    odd = (finding.message for finding in offer.findings if finding.severity is not model.Severity.INFO)
    why = first or next(odd, "")
    return Withheld(
        reason=f"None of the {len(snapshot.gpus)} NVIDIA GPUs of this node can be offered ({counted})"
        + (f": {why}" if why else ""),
        findings=offer.findings,
    )


def offered(now: Wanted) -> tuple[devices.Device, ...]:
    """The devices of an answer."""
    return now.offer.devices if isinstance(now, Offering) else ()


def findings(now: Wanted) -> tuple[model.Finding, ...]:
    """What was odd about it."""
    match now:
        case Offering(offer=offer):
            return offer.findings
        case Withheld(findings=found):
            return found
        case _:
            return ()
