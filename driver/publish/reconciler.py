# SPDX-License-Identifier: Apache-2.0
"""One look at everything: what should stand on the server (`aim`), what does, and the writes between. No thread of its own.

- What is published is in the record first, so that a device that vanishes is remembered over a restart (`absent`).
- Nothing is sent that our own validator objects to, and no write is made without leadership.
- A repair is due at once, and slows down only against somebody who undoes it again and again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from discovery import model
from discovery.address import PciAddress
from driver import errors
from driver.publish import absent, aim, devices, limits, mirror, node, notices, pacing, slices, wanted, writer
from driver.sharing import rules

logger = logging.getLogger(__name__)

_STALE = frozenset(
    {
        errors.ApiReason.CONFLICT,
        errors.ApiReason.NOT_FOUND,
        errors.ApiReason.ALREADY_EXISTS,
        errors.ApiReason.GONE,
    }
)
"""Answers that say that the server is not as we knew it."""

_TAKEN_TWICE = 2


class PublishedStore(Protocol):
    """Where it is kept what was published. Both calls may raise RecordError."""

    def load_published(self) -> Mapping[str, Any]:
        """What was saved last, empty at first."""

    def save_published(self, published: Mapping[str, Any]) -> None:
        """Keep it durably."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Questions:
    """What is asked of the rest of the agent at every look. `wanted_now` is told whom to ask who has some published devices, as
    a policy changes only where nobody has. It and `holders` may raise RecordError.
    """

    wanted_now: Callable[[aim.Holders], wanted.Wanted]
    may_write: Callable[[], bool]
    holders: Callable[[], Collection[str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishState:
    """What is known of the slices on the server.

    `ok`: they are as they should be, also where that is "none": then, and where it is False, `reason` says why.
    `devices`: what is listed, or would be, absent devices included, and those that somebody has and this server cannot keep.
    """

    ok: bool = False
    reason: str | None = None
    devices: tuple[devices.Device, ...] = ()
    slices: int = 0
    generation: int = 0
    findings: tuple[model.Finding, ...] = ()

    @property
    def vanished(self) -> frozenset[str]:
        """Names of the MIG instances that somebody made and that are not there any more."""
        return frozenset(
            device.name for device in self.devices if device.absent and device.mode is rules.Mode.MIG_STATIC
        )

    @property
    def addresses(self) -> Mapping[str, PciAddress]:
        """Device name -> address."""
        return {device.name: device.address for device in self.devices}


Looked = tuple[PublishState, float | None]
"""How things stand, and in how many seconds to look again at the latest; None: when something changes."""


class Reconciler:
    """Looks and writes for one pool, on the one thread that calls `look`."""

    def __init__(
        self,
        *,
        place: slices.Place,
        questions: Questions,
        known: mirror.Mirror,
        facts: node.NodeFacts,
        aiming: aim.Aiming,
        writing: writer.Writer,
        budget: pacing.WriteBudget,
        store: PublishedStore,
        telling: notices.Notices,
        timing: pacing.Timing,
        clock: Callable[[], float],
    ) -> None:
        self._place = place
        self._ask = questions
        self._mirror = known
        self._facts = facts
        self._aiming = aiming
        self._writing = writing
        self._budget = budget
        self._store = store
        self._telling = telling
        self._timing = timing
        self._clock = clock
        self._last = PublishState()
        self._published: absent.Published | None = None
        self._saved: Mapping[str, Any] = {}
        self._seen_generation = 0
        self._salt = 0
        self._names_taken = 0
        self._written: aim.Aim | None = None
        self._blocked_until = 0.0
        self._soon = pacing.Backoff(first_s=0.05, most_s=5.0)
        self._later = pacing.Backoff(first_s=1.0, most_s=60.0)

    def unblock(self) -> None:
        """Try again at the next look, whatever failed before. From any thread."""
        self._blocked_until = 0.0

    def troubled(self, reason: str) -> PublishState:
        """The last state, with trouble."""
        self._last = replace(self._last, ok=False, reason=reason)
        return self._last

    def look(self) -> Looked:
        """Compare and write once. Raises RecordError."""
        view = self._mirror.view()
        leads = view is not None and self._ask.may_write()
        now = self._ask.wanted_now(self._aiming.begin() if leads else _everything)
        if isinstance(now, wanted.Undecided):
            # What stood there before the start is still offered, and kubelet is to hear that its health is not known.
            self._last = replace(self._last, devices=tuple(self._load().values()))
            return self.troubled(now.reason), None
        if view is None:
            self._last = replace(self._last, devices=wanted.offered(now), findings=wanted.findings(now))
            return self.troubled(self._mirror.trouble or "The API server has not been reached yet"), None
        ours = [body for body in view.slices if slices.is_ours(body, place=self._place)]
        self._seen_generation = max(self._seen_generation, self._writing.generation, slices.highest_generation(ours))
        if not leads:
            return self._look_on(now, ours)
        if (blocked_s := self._blocked_until - self._clock()) > 0:
            return self._last, blocked_s
        try:
            return self._pursue(self._aiming.look(now, view, self._load()), ours)
        except (writer.LostLeadershipError, writer.FieldsLostError):
            return self._last, 0
        except errors.ApiError as error:
            return self._failed(error)

    def _look_on(self, now: wanted.Wanted, ours: Sequence[mirror.Body]) -> Looked:
        """Another instance writes, and may be of a newer version with more to say: right is what is whole."""
        highest = slices.highest_generation(ours)
        newest = [body for body in ours if slices.generation_of(body) == highest]
        whole = {body["spec"]["pool"].get("resourceSliceCount") for body in newest} == {len(newest)}
        self._last = PublishState(
            ok=whole or isinstance(now, wanted.Withheld),
            reason="Another instance of the agent publishes for this node",
            devices=wanted.offered(now),
            slices=len(newest),
            generation=highest,
            findings=wanted.findings(now),
        )
        return self._last, self._timing.unled_look_s

    def _pursue(self, goal: aim.Aim, ours: list[mirror.Body]) -> Looked:
        """Write what is missing on the server. Raises what the writer raises, and RecordError."""
        plan = self._plan(goal, ours)
        if any(isinstance(action, slices.Create) for action in plan.actions):
            # A Node that was created anew has another UID, and the garbage collector deletes what belongs to the old one.
            self._facts.read()
            plan = self._plan(goal, ours)
        self._last = replace(
            self._last,
            devices=(*(goal.listed or ()), *goal.hidden),
            findings=tuple(goal.findings),
            generation=self._seen_generation,
        )
        self._writing.rehearse_vital(plan)
        if not plan.actions:
            return self._settled(goal, len(plan.result), ours), goal.again_s
        wrong = limits.violations(plan.result)
        if wrong:
            shown = "; ".join(wrong[:3])
            return self.troubled(f"The slices were not sent, the API would refuse them: {shown}"), None
        # News of our own (a device is lost, another driver offers it too) does not wait for what somebody else made of the old.
        news = self._written is None or goal.listed != self._written.listed
        if (wait_s := self._budget.wait_s(urgent=news)) > 0:
            reason = (
                f"The ResourceSlices of driver {self._place.driver_name} were written too often of late; the next change waits"
                if news
                else f"Somebody changes the ResourceSlices of driver {self._place.driver_name} again and again; "
                "look for another publisher of this driver on this node"
            )
            return self.troubled(reason), wait_s
        self._writing.rehearse(plan)
        self._save({**(self._published or {}), **_present(goal.listed)})
        self._writing.run(plan)
        self._written = goal
        self._names_taken = 0
        return self._last, 0

    def _plan(self, goal: aim.Aim, ours: list[mirror.Body]) -> slices.Plan:
        return slices.plan(
            goal.listed,
            ours,
            place=replace(self._place, node_uid=self._facts.uid()),
            seen_generation=self._seen_generation,
            salt=self._salt,
            accepts=self._writing.accepts,
            leave=self._writing.left,
        )

    def _settled(self, goal: aim.Aim, count: int, ours: Sequence[mirror.Body]) -> PublishState:
        """Everything stands as it should."""
        self._soon.passed()
        self._later.passed()
        self._save(_present((*(goal.listed or ()), *goal.hidden)))
        findings = list(goal.findings)
        if altered := self._writing.altered:
            message = f"The server stores fields otherwise than they were sent: {', '.join(altered[:5])}"
            findings.append(self._telling.finding("slices-altered", message))
        findings += self._strays(ours)
        self._last = replace(self._last, ok=True, reason=goal.reason, slices=count, findings=tuple(findings))
        return self._last

    def _strays(self, ours: Sequence[mirror.Body]) -> list[model.Finding]:
        """Slices of other pools on this node that bear our driver's name and are not ours to delete. Their devices may be
        given to pods, which then cannot start: somebody has to hear of it.
        """
        names = sorted(body["metadata"]["name"] for body in ours if body["metadata"].get("uid") in self._writing.left)
        if not names:
            self._telling.over("ForeignSlices")
            return []
        message = (
            f"ResourceSlice {', '.join(names)} offers devices of driver {self._place.driver_name} on this node in a pool of"
            " another name, which nobody prepares; the agent may not delete it: delete it, and find out who made it"
        )
        self._telling.tell("ForeignSlices", message)
        return [self._telling.finding("foreign-slices", message)]

    def _failed(self, error: errors.ApiError) -> Looked:
        """A call failed: say why, and when to try again."""
        stale = error.reason in _STALE
        pause_s = (self._soon if stale or error.retryable else self._later).failed()
        self._blocked_until = self._clock() + pause_s
        if error.reason is errors.ApiReason.ALREADY_EXISTS:
            self._names_taken += 1
        if self._names_taken >= _TAKEN_TWICE:
            # Not a slice of ours that we had not seen: an object of another node or driver bears our name.
            self._salt, self._names_taken = self._salt + 1, 0
        if stale:
            try:
                self._mirror.refresh()
            except errors.ApiError as again:
                logger.debug("%s", again)
        return self.troubled(str(error)), pause_s

    def _load(self) -> absent.Published:
        if self._published is None:
            self._saved = self._store.load_published()
            self._published, wrong = absent.from_json(self._saved)
            for message in wrong:
                logger.warning("The record of what was published has an entry that is left out: %s", message)
        return self._published

    def _save(self, published: absent.Published) -> None:
        """Into the record, if it is anything new."""
        body = absent.to_json(published)
        if body != self._saved:
            self._store.save_published(body)
            self._saved = body
        self._published = published


def _everything(names: frozenset[str]) -> Collection[str]:
    """Who has what cannot be told now."""
    return names


def _present(listed: Sequence[devices.Device] | None) -> dict[str, devices.Device]:
    """As they are kept in the record: a device is absent or not by what is read, never by what was written."""
    return {device.name: replace(device, absent=False) for device in listed or ()}
