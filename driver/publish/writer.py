# SPDX-License-Identifier: Apache-2.0
"""Carries out the writes of a plan, and finds out what the server does not keep.

Fields whose feature is off at the server vanish without a word, so a slice with taints, counters, shares or lists for attributes
is sent with dryRun=All first, on every connection anew (behind one address there may be servers of two versions), and every
real reply is compared with what was sent. Of an attribute that loses its list nothing is left, and the server refuses the slice
for that. Without counters one GPU would be given away many times, and without shares to one claim what others have a share
of: they are asked for even if nothing has to be written, and a slice that has lost them is deleted at once. A difference that is no lost taint is taken note of and accepted: writing it
again would not help, and would go on for ever.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from driver import errors
from driver.publish import mirror, pacing, slices, wire

logger = logging.getLogger(__name__)

TIMEOUT_S = 10.0


class WriteApi(Protocol):
    """What writes slices. Every call raises ApiError."""

    def create_slice(self, body: Mapping[str, Any], *, dry_run: bool, timeout_s: float) -> dict[str, Any]:
        """Create one; what was or would be stored."""

    def replace_slice(self, body: Mapping[str, Any], *, dry_run: bool, timeout_s: float) -> dict[str, Any]:
        """Replace one; what was or would be stored."""

    def delete_slice(self, name: str, *, uid: str, resource_version: str | None, timeout_s: float) -> None:
        """Delete one."""


class WriteObserver(Protocol):
    """Who counts writes."""

    def slice_write(self, verb: str, *, result: str) -> None:
        """`verb` create, update or delete; `result` success or error."""


class LostLeadershipError(Exception):
    """Another instance of the agent writes now."""


class FieldsLostError(Exception):
    """The server keeps no taints, counters, shares or lists: what should be listed has to be thought over."""


@dataclass(frozen=True, slots=True)
class Accepted:
    """What was sent for a slice and the different thing the server made of it."""

    sent: dict[str, Any]
    stored: dict[str, Any]
    fields: tuple[str, ...]


class Writer:
    """Writes for one pool. One thread."""

    def __init__(
        self,
        api: WriteApi,
        known: mirror.Mirror,
        *,
        may_write: Callable[[], bool],
        budget: pacing.WriteBudget,
        observer: WriteObserver,
    ) -> None:
        self._api = api
        self._mirror = known
        self._may_write = may_write
        self._budget = budget
        self._observer = observer
        self.generation = 0
        """The highest pool generation that the server has stored for us, also where it was deleted before we looked."""
        self._connection = 0
        self._taints: bool | None = None
        self._lists: bool | None = None
        self._counters: bool | None = None
        self._shares: bool | None = None
        self._accepted: dict[str, Accepted] = {}
        self._left: dict[str, str] = {}

    @property
    def left(self) -> Mapping[str, str]:
        """UIDs of slices of other pools that the server behind this connection does not let us delete, and its answer."""
        return self._left

    def keeps_taints(self, connection: int) -> bool | None:
        """Whether the server behind a connection keeps taints; None: not yet tried."""
        self.meet(connection)
        return self._taints

    def keeps_lists(self, connection: int) -> bool | None:
        """Whether the server behind a connection keeps attributes that are lists; None: not yet tried."""
        self.meet(connection)
        return self._lists

    def keeps_counters(self, connection: int) -> bool | None:
        """Whether the server behind a connection keeps counters and what consumes them; None: not yet tried."""
        self.meet(connection)
        return self._counters

    def keeps_shares(self, connection: int) -> bool | None:
        """Whether the server behind a connection keeps what a device is given out in shares by; None: not yet tried."""
        self.meet(connection)
        return self._shares

    def meet(self, connection: int) -> None:
        """Forget what was learnt about the server behind another connection."""
        if connection != self._connection:
            self._connection, self._left = connection, {}
            self._taints = self._lists = self._counters = self._shares = None

    @property
    def altered(self) -> tuple[str, ...]:
        """Fields that the server stores otherwise than they were sent, each with its slice's name."""
        return tuple(f"{name}: {field}" for name, entry in sorted(self._accepted.items()) for field in entry.fields)

    def accepts(self, wanted: Mapping[str, Any], stored: Mapping[str, Any]) -> bool:
        """Whether this is a difference that the server made of the very same slice, and would make again."""
        entry = self._accepted.get(str(stored["metadata"].get("name")))
        return entry is not None and wire.equal(wanted["spec"], entry.sent) and wire.equal(stored["spec"], entry.stored)

    def run(self, plan: slices.Plan) -> None:
        """Do all writes of a plan in order, after `rehearse`.

        Raises ApiError as soon as one fails (a slice of another pool that may not be deleted is `left`), LostLeadershipError
        before a write that is not ours to make any more, FieldsLostError when the server turns out to keep no taints, counters or shares.
        What was done stands in the mirror.
        """
        for action in plan.actions:
            if not self._may_write():
                raise LostLeadershipError
            self._budget.spend()
            verb = {slices.Delete: "delete", slices.Replace: "update", slices.Create: "create"}[type(action)]
            try:
                self._write(action)
            except errors.ApiError as error:
                self._observer.slice_write(verb, result="error")
                if isinstance(action, slices.Delete) and action.stray and error.reason is errors.ApiReason.FORBIDDEN:
                    self._left[action.uid] = str(error)
                    continue
                raise
            except FieldsLostError:
                self._observer.slice_write(verb, result="success")
                raise
            self._observer.slice_write(verb, result="success")
        names = {body["metadata"]["name"] for body in plan.result}
        self._accepted = {name: entry for name, entry in self._accepted.items() if name in names}

    def rehearse(self, plan: slices.Plan) -> None:
        """Find out by a dry run whether the server keeps what a plan needs and no write of this connection has shown yet.

        Raises FieldsLostError where it does not, ApiError where it cannot be told.
        """
        for action in plan.actions:
            if isinstance(action, slices.Delete):
                continue
            tainted, listing = _tainted(action.body), _listing(action.body)
            if (tainted and self._taints is None) or (listing and self._lists is None):
                self._rehearse(action, tainted=tainted, listing=listing)

    def rehearse_vital(self, plan: slices.Plan) -> None:
        """Find out by dry runs whether the server behind this connection keeps the counters and shares of slices that stand there
        or are to.

        Raises FieldsLostError where it does not, ApiError where it cannot be told.
        """
        if self._counters is None:
            for counted in (_consumes, _has_counters):
                if (kept := self._kept(plan, counted, _lost_counters)) is not None:
                    self._counters = kept
                    if not kept:
                        raise FieldsLostError
        if self._shares is None and (kept := self._kept(plan, _is_shared, _lost_shares)) is not None:
            self._shares = kept
            if not kept:
                raise FieldsLostError

    def _kept(
        self,
        plan: slices.Plan,
        uses: Callable[[Mapping[str, Any]], bool],
        lost: Callable[[Mapping[str, Any], Mapping[str, Any]], bool],
    ) -> bool | None:
        """Whether the server keeps what one slice of a plan uses; None where none does."""
        body = next((body for body in plan.result if uses(body)), None)
        if body is None:
            return None
        sent = slices.rehearsal(body)
        return not lost(sent, self._send(slices.Create(sent), dry_run=True))

    def _rehearse(self, action: slices.Replace | slices.Create, *, tainted: bool, listing: frozenset[str]) -> None:
        try:
            reply = self._send(action, dry_run=True)
        except errors.ApiError as error:
            refused = error.reason is errors.ApiReason.INVALID and any(
                f"attributes[{name}]" in str(error) for name in listing
            )
            if not refused:
                raise
            self._lists = False
            raise FieldsLostError from error
        if listing:
            self._lists = True
        if tainted:
            self._taints = not _lost_taints(action.body, reply)
            if not self._taints:
                raise FieldsLostError

    def _write(self, action: slices.Action) -> None:
        if isinstance(action, slices.Delete):
            self._delete(action)
            return
        stored = self._send(action, dry_run=False)
        self.generation = max(self.generation, slices.generation_of(stored))
        self._mirror.wrote(stored)
        name = stored["metadata"]["name"]
        spec = action.body["spec"]
        content = (
            f"{len(spec['sharedCounters'])} counter sets"
            if spec.get("sharedCounters")
            else f"{len(spec.get('devices') or [])} devices"
        )
        done = "created" if isinstance(action, slices.Create) else "updated"
        logger.info("ResourceSlice %s %s: %s, generation %s", name, done, content, slices.generation_of(action.body))
        lost = slices.lost_fields(action.body, stored)
        uncounted, unshared = _lost_counters(action.body, stored), _lost_shares(action.body, stored)
        if uncounted or unshared:
            self._counters = False if uncounted else self._counters
            self._shares = False if unshared else self._shares
            logger.warning("ResourceSlice %s lost its %s and is deleted", name, "counters" if uncounted else "shares")
            metadata = stored["metadata"]
            self._delete(slices.Delete(name, metadata.get("uid", ""), metadata.get("resourceVersion", "")))
            raise FieldsLostError
        if not lost:
            self._accepted.pop(name, None)
        elif _lost_taints(action.body, stored):
            self._taints = False
            raise FieldsLostError
        else:
            self._accepted[name] = Accepted(action.body["spec"], stored["spec"], lost)

    def _delete(self, action: slices.Delete) -> None:
        try:
            self._api.delete_slice(
                action.name, uid=action.uid, resource_version=action.resource_version or None, timeout_s=TIMEOUT_S
            )
        except errors.ApiError as error:
            if error.reason is not errors.ApiReason.NOT_FOUND:
                raise
        self._mirror.deleted(action.uid)
        logger.info("ResourceSlice %s deleted", action.name)

    def _send(self, action: slices.Replace | slices.Create, *, dry_run: bool) -> dict[str, Any]:
        send = self._api.create_slice if isinstance(action, slices.Create) else self._api.replace_slice
        reply = send(action.body, dry_run=dry_run, timeout_s=TIMEOUT_S)
        if not isinstance(reply.get("metadata"), dict) or not isinstance(reply.get("spec"), dict):
            raise errors.ApiError(
                f"The API server answered the write of ResourceSlice {action.body['metadata']['name']} with something else",
                reason=errors.ApiReason.OTHER,
            )
        return reply


def _tainted(body: Mapping[str, Any]) -> bool:
    return any(device.get("taints") for device in body["spec"].get("devices") or [])


def _lost_taints(sent: Mapping[str, Any], stored: Mapping[str, Any]) -> bool:
    return _tainted(sent) and any(".taints" in field for field in slices.lost_fields(sent, stored))


def _consumes(body: Mapping[str, Any]) -> bool:
    return any(device.get("consumesCounters") for device in body["spec"].get("devices") or [])


def _has_counters(body: Mapping[str, Any]) -> bool:
    return bool(body["spec"].get("sharedCounters"))


def _lost_counters(sent: Mapping[str, Any], stored: Mapping[str, Any]) -> bool:
    """Whether what was stored counts otherwise than what was sent. It is as bad if somebody changed the numbers as if they are gone."""
    return (_consumes(sent) or _has_counters(sent)) and any(
        "consumesCounters" in field or field.startswith("sharedCounters") for field in slices.lost_fields(sent, stored)
    )


def _is_shared(body: Mapping[str, Any]) -> bool:
    return any(device.get("allowMultipleAllocations") for device in body["spec"].get("devices") or [])


def _lost_shares(sent: Mapping[str, Any], stored: Mapping[str, Any]) -> bool:
    """Whether a device is stored with other shares than were sent: by others than its own the scheduler gives away too much."""
    if not _is_shared(sent):
        return False
    shared = [index for index, device in enumerate(sent["spec"]["devices"]) if device.get("allowMultipleAllocations")]
    vital = tuple(f"devices[{index}].{field}" for index in shared for field in ("allowMultipleAllocations", "capacity"))
    whole = {"devices", *(f"devices[{index}]" for index in shared)}
    return any(field in whole or field.startswith(vital) for field in slices.lost_fields(sent, stored))


def _listing(body: Mapping[str, Any]) -> frozenset[str]:
    """The names of the attributes that are lists."""
    return frozenset(
        name
        for device in body["spec"].get("devices") or []
        for name, value in device.get("attributes", {}).items()
        if any(isinstance(held, list) for held in value.values())
    )
