# SPDX-License-Identifier: Apache-2.0
"""What should stand on the server, from what the node wants, what somebody has, and what the server can keep.

- Beside another driver that offers our GPUs nothing is offered; what a claim holds stays listed, as absent.
- A counter goes down only as far as nobody has what it loses (`shared`). Claims that are allocated while that is written are
  looked for once more, and the counter goes up again for them.
- What somebody has a share of, or has alone, stays on the terms that it was published with (`unchanged`).
- A server that keeps no counters is offered no partitions, and of a GPU that could be divided the whole or nothing; one that keeps
  no shares gets what would be shared alone or not at all, and nothing of a device while somebody has a share of it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace

from discovery import model
from driver import errors, values
from driver.publish import (
    absent,
    devices,
    held,
    mirror,
    node,
    notices,
    rivals,
    shared,
    slices,
    unchanged,
    wanted,
    writer,
)

logger = logging.getLogger(__name__)

LOWERED_FOR_S = 30.0
"""How long after a counter went down claims are looked for that came before it."""

Holders = Callable[[frozenset[str]], Collection[str]]
"""Which of some published devices somebody has; who cannot tell says all."""


@dataclass(slots=True)
class Aim:
    """What should stand on the server: `listed` None for no slice at all."""

    ready: tuple[devices.Device, ...] = ()
    listed: tuple[devices.Device, ...] | None = None
    hidden: tuple[devices.Device, ...] = ()
    """Devices that somebody has and that this server cannot keep."""
    reason: str | None = None
    findings: list[model.Finding] = field(default_factory=list)
    again_s: float | None = None
    """When to look again even if nothing changes."""

    def lacks(self, finding: model.Finding) -> None:
        """The slices cannot be as they should."""
        self.findings.append(finding)
        self.reason = self.reason or finding.message


class Aiming:
    """Of one pool. One thread."""

    def __init__(
        self,
        *,
        place: slices.Place,
        recorded: Callable[[], Collection[str]],
        holding: held.HeldDevices,
        changing: held.HeldDevices,
        facts: node.NodeFacts,
        in_the_way: rivals.Rivals | None,
        writing: writer.Writer,
        telling: notices.Notices,
        clock: Callable[[], float],
    ) -> None:
        """`recorded`: names of the devices that the record of prepared claims names; may raise RecordError. `holding` and
        `changing` both look for claims, each for its own reason and in its own time.
        """
        self._place = place
        self._recorded = recorded
        self._holding = holding
        self._changing = changing
        self._facts = facts
        self._rivals = in_the_way
        self._writing = writing
        self._telling = telling
        self._clock = clock
        self._lowered: dict[str, float] = {}
        self._change = held.Held(names=frozenset())
        self.watching = False
        """Whether, at the last look, it mattered who has which device: one is missing, or a counter goes down."""

    def begin(self) -> Holders:
        """Before it is asked what is wanted: who has devices that a change of policy would take away."""
        self._change = held.Held(names=frozenset())
        return self._who_has

    def _who_has(self, names: frozenset[str]) -> Collection[str]:
        self._change = self._changing.look(names, self._in_the_record(names))
        return self._change.names

    def look(self, now: wanted.Wanted, view: mirror.View, published: absent.Published) -> Aim:
        """What should stand on the server. Raises ApiError."""
        aim = Aim(ready=wanted.offered(now), findings=list(wanted.findings(now)))
        if isinstance(now, wanted.Withheld):
            aim.reason = now.reason
        if (reason := self._in_the_way(aim, view, published)) is not None:
            aim.ready, aim.reason = (), reason
        self._writing.meet(view.connection)
        sharing = self._without_shares(aim, now, view)
        counted = self._writing.keeps_counters(view.connection) is not False
        if not counted:
            self._fall_back(aim)
        full = now.offer.full if isinstance(now, wanted.Offering) else {}
        missing = absent.missing(aim.ready, published)
        lowered = shared.lowered(aim.ready, published, full)
        watched = shared.members({*lowered, *self._recently()}, aim.ready, published.values())
        watched |= (
            unchanged.differing(aim.ready, published)
            if sharing is None
            else unchanged.at_risk(aim.ready, sharing, published)
        )
        self.watching = bool(missing or watched)
        looked = self._holding.look(missing | watched, self._in_the_record(missing | watched))
        for trouble in dict.fromkeys((looked.trouble, self._change.trouble)):
            if trouble is not None:
                aim.findings.append(self._telling.finding("claims-not-listed", trouble))
        listed = absent.merge(aim.ready, published, held=looked.names)
        if sharing is None:
            listed = self._on_terms(aim, listed, published, looked.names)
        else:
            listed, aim.hidden = unchanged.hide(listed, sharing, published, held=looked.names)
            self._tell_of_shares(aim, sharing)
        sure = looked.trouble is None
        listed = shared.settle(listed, used=looked.names if sure else (), least=None if sure else lowered)
        settled = shared.totals_of(listed)
        self._lowered |= {
            name: self._clock() + LOWERED_FOR_S for name, before in lowered.items() if settled.get(name) != before
        }
        if not counted:
            listed, back = shared.without_counters(listed)
            aim.hidden += back
        aim.listed = listed if listed or aim.reason is None else None
        self._without_taints(aim, looked.names & missing, view)
        self._without_lists(aim, view)
        aim.again_s = soonest(
            looked.again_s,
            self._change.again_s,
            held.FREE_FOR_S + 1.0 if self._lowered else None,
            self._facts.due_s(),
            self._rivals.again_s() if self._rivals is not None else None,
        )
        return aim

    def _in_the_record(self, names: Collection[str]) -> Collection[str]:
        if not names:
            return ()
        try:
            return self._recorded()
        except errors.RecordError as error:
            logger.debug("Everything that is asked for counts as held: %s", error)
            return names

    def _recently(self) -> Collection[str]:
        """The counter sets that went down a moment ago."""
        now = self._clock()
        self._lowered = {name: until for name, until in self._lowered.items() if until > now}
        return self._lowered

    def _in_the_way(self, aim: Aim, view: mirror.View, published: absent.Published) -> str | None:
        """Why nothing may be published beside who else offers our GPUs."""
        if self._rivals is None:
            return None
        foreign = [body for body in view.slices if not slices.is_ours(body, place=self._place)]
        reason = self._rivals.look(foreign, ours={device.address for device in (*aim.ready, *published.values())})
        if reason is None:
            self._telling.over("NotPublished")
            return None
        aim.findings.append(self._telling.finding("offered-by-another", reason))
        self._telling.tell("NotPublished", reason)
        return reason

    def _fall_back(self, aim: Aim) -> None:
        """Offer what needs no counters."""
        ready = devices.without_counters(aim.ready)
        if ready == aim.ready:
            self._telling.over("CountersNotKept")
            return
        split = sorted({values.gpu_of(device.name) for device in aim.ready if device.consumes is not None})
        whole = {device.name for device in ready}
        said = [f"{name} ({'whole' if name in whole else 'not at all'})" for name in split]
        aim.ready = ready
        message = (
            f"This API server keeps no counters, so no partition is offered of {', '.join(said)}; turn on "
            "DRAPartitionableDevices, in the scheduler too, or give these GPUs another mode"
        )
        aim.lacks(self._telling.finding("counters-not-kept", message))
        self._telling.tell("CountersNotKept", message)

    def _without_shares(self, aim: Aim, now: wanted.Wanted, view: mirror.View) -> tuple[devices.Device, ...] | None:
        """Offer what needs no shares where the server keeps none; what would be offered elsewhere. None where it keeps them."""
        if (kept := self._writing.keeps_shares(view.connection)) is not False:
            if kept:
                self._telling.over("SharesNotKept")
            return None
        if not aim.ready or not isinstance(now, wanted.Offering) or now.offer.unshared is None:
            return ()
        aim.ready = now.offer.unshared
        return now.offer.devices

    def _tell_of_shares(self, aim: Aim, sharing: Collection[devices.Device]) -> None:
        """That the server keeps no shares, where that changes anything."""
        back = {values.gpu_of(device.name) for device in aim.hidden}
        split = back | {values.gpu_of(device.name) for device in sharing if device.terms is not None}
        if not split:
            self._telling.over("SharesNotKept")
            return
        alone = {values.gpu_of(device.name) for device in aim.ready} - back
        said = [
            f"{name} is offered {'to one claim' if name in alone else 'not at all'}"
            + (" while a claim has a share of it" if name in back else "")
            for name in sorted(split)
        ]
        message = (
            f"This API server keeps no shares, so {', '.join(said)}; turn on DRAConsumableCapacity, in the scheduler too, or give"
            " these GPUs another mode"
        )
        aim.lacks(self._telling.finding("shares-not-kept", message))
        self._telling.tell("SharesNotKept", message)

    def _on_terms(
        self,
        aim: Aim,
        listed: tuple[devices.Device, ...],
        published: absent.Published,
        names: Collection[str],
    ) -> tuple[devices.Device, ...]:
        """What somebody has stays on the terms that it was published with."""
        listed, kept = unchanged.keep(listed, published, held=names)
        if kept:
            message = f"{', '.join(kept)}: offered on the terms that were published before, until nobody has it"
            aim.findings.append(self._telling.finding("shares-kept", message, severity=model.Severity.INFO))
        return listed

    def _without_taints(self, aim: Aim, names: Collection[str], view: mirror.View) -> None:
        if not (aim.listed and names) or self._writing.keeps_taints(view.connection) is not False:
            return
        aim.listed = tuple(replace(device, absent=False) for device in aim.listed)
        message = (
            f"This API server keeps no device taints, so {', '.join(sorted(names))} stays offered while a claim has it; "
            "turn on DRADeviceTaints, or drain the node"
        )
        self._telling.tell("TaintsNotKept", message)
        aim.lacks(self._telling.finding("taints-not-kept", message))

    def _without_lists(self, aim: Aim, view: mirror.View) -> None:
        if not aim.listed or self._writing.keeps_lists(view.connection) is not False:
            return
        scalars = tuple(devices.without_lists(device) for device in aim.listed)
        if scalars == aim.listed:
            return
        aim.listed = scalars
        message = (
            "This API server takes no lists for attributes, so numaNode is published as one number and pcieSwitches "
            "not at all; turn on DRAListTypeAttributes, or take them out of the configuration file"
        )
        aim.lacks(self._telling.finding("lists-not-kept", message))


def soonest(*pauses: float | None) -> float | None:
    """The shortest of some pauses, None where there is none."""
    return min((max(0.0, pause) for pause in pauses if pause is not None), default=None)
