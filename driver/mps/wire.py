# SPDX-License-Identifier: Apache-2.0
"""The protocol between the agent and the MPS supervisor: JSON frames (discovery.frames) over a unix socket. Pure.

A conversation begins with `hello`, in which the client says the versions that it speaks and the supervisor takes the newest that it
speaks as well; then come any number of requests, one at a time, each with one answer. Whoever does not understand says so:

    -> {"request": "hello", "versions": [1]}          <- {"ok": {"version": 1, "ability": {...}}}
    -> {"request": "place", "share": {...}, "timeout": 5.0}        <- {"ok": null}
    -> {"request": "remove", "device": "...", "shareID": "...", "timeout": 5.0}   <- {"ok": null}
    -> {"request": "status"}                          <- {"ok": {"instance": "...", "change": 3, "daemons": [...]}}
    -> {"request": "wait", "instance": "...", "change": 3, "timeout": 60.0}       <- as status, once it is another
    a refusal                                         <- {"error": {"message": "...", "retryable": true}}

Within a version fields may be added to answers, which a client that does not know them ignores; to requests only what may be
ignored. Anything else is another version.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from driver.mps.shares import Protocol, Share
from driver.mps.values import Ability, Daemon, DaemonState, Status

VERSIONS: tuple[int, ...] = (1,)
"""Those that are spoken here, in no order."""

TEXT_MAX = 4096
"""No name, id or message is longer."""

TIMEOUT_MAX_S = 600.0


class WireError(Exception):
    """A message that is not what the protocol says; the text says what is wrong with it."""


def agreed(versions: Any) -> int | None:
    """The newest version that both sides speak, None where there is none."""
    if not isinstance(versions, list):
        return None
    return max((version for version in versions if type(version) is int and version in VERSIONS), default=None)


def share_json(share: Share) -> dict[str, Any]:
    """A share, as it is asked for."""
    return {
        "device": share.device,
        "uuid": share.uuid,
        "shareID": share.share_id,
        "protocol": share.protocol.value,
        "memory": share.memory,
        "compute": share.compute,
        "belowNormal": share.below_normal,
    }


def read_share(document: Any) -> Share:
    """Raises WireError."""
    fields = _mapping(document, "share")
    try:
        protocol = Protocol(_text(fields, "protocol"))
    except ValueError:
        raise WireError(f"protocol {fields['protocol']!r} is not one of {', '.join(Protocol)}") from None
    return Share(
        device=_text(fields, "device"),
        uuid=_text(fields, "uuid"),
        share_id=_text(fields, "shareID"),
        protocol=protocol,
        memory=_count(fields, "memory"),
        compute=_count(fields, "compute"),
        below_normal=_flag(fields, "belowNormal"),
    )


def read_text(request: Mapping[str, Any], name: str) -> str:
    """A field of a request that must be a text. Raises WireError."""
    return _text(request, name)


def read_timeout(request: Mapping[str, Any]) -> float:
    """How long the client waits for the answer. Raises WireError."""
    seconds = _seconds(request.get("timeout"))
    if seconds is None or seconds < 0:
        raise WireError(f"timeout {request.get('timeout')!r} is no time in seconds")
    return min(seconds, TIMEOUT_MAX_S)


def ability_json(ability: Ability) -> dict[str, Any]:
    """What the supervisor can do."""
    return {
        "instance": ability.instance,
        "program": ability.program,
        "version": ability.version,
        "protocols": sorted(protocol.value for protocol in ability.protocols),
        "reasons": {protocol.value: text for protocol, text in sorted(ability.reasons.items())},
    }


def read_ability(document: Any) -> Ability:
    """Protocols that are not known here are left out. Raises WireError."""
    fields = _mapping(document, "ability")
    spoken = fields.get("protocols")
    reasons = _mapping(fields.get("reasons"), "reasons")
    if not isinstance(spoken, list):
        raise WireError("protocols is no list")
    known = {protocol.value for protocol in Protocol}
    return Ability(
        instance=_text(fields, "instance"),
        program=_optional_text(fields, "program"),
        version=_optional_text(fields, "version"),
        protocols=frozenset(Protocol(name) for name in spoken if isinstance(name, str) and name in known),
        reasons={Protocol(name): _text(reasons, name) for name in reasons if name in known},
    )


def status_json(status: Status) -> dict[str, Any]:
    """All daemons."""
    return {
        "instance": status.instance,
        "change": status.change,
        "daemons": [
            {
                "device": daemon.device,
                "uuid": daemon.uuid,
                "protocol": daemon.protocol.value,
                "state": daemon.state.value,
                "restarts": daemon.restarts,
                "since": round(daemon.since_s, 3),
                "shares": list(daemon.shares),
                "clients": daemon.clients,
                "error": daemon.error,
            }
            for daemon in status.daemons.values()
        ],
    }


def read_status(document: Any) -> Status:
    """Raises WireError."""
    fields = _mapping(document, "status")
    daemons = fields.get("daemons")
    if not isinstance(daemons, list):
        raise WireError("daemons is no list")
    read = [_daemon(_mapping(daemon, "daemon")) for daemon in daemons]
    return Status(
        instance=_text(fields, "instance"),
        change=_required_count(fields, "change"),
        daemons={daemon.device: daemon for daemon in read},
    )


def read_change(request: Mapping[str, Any]) -> tuple[str, int] | None:
    """Which state of affairs the client has seen, None: none yet. Raises WireError."""
    if request.get("instance") is None:
        return None
    return _text(request, "instance"), _required_count(request, "change")


def error_json(message: str, *, retryable: bool) -> dict[str, Any]:
    """A refusal."""
    return {"error": {"message": message[:TEXT_MAX], "retryable": retryable}}


def read_error(answer: Mapping[str, Any]) -> tuple[str, bool] | None:
    """Message and whether the same request may succeed later; None where the answer is no refusal. Raises WireError."""
    if "error" not in answer:
        if "ok" not in answer:
            raise WireError("an answer that is neither ok nor an error")
        return None
    fields = _mapping(answer["error"], "error")
    return _text(fields, "message"), _flag(fields, "retryable")


def read_message(document: Any) -> Mapping[str, Any]:
    """Any message is an object. Raises WireError."""
    return _mapping(document, "message")


def _daemon(fields: Mapping[str, Any]) -> Daemon:
    shares = fields.get("shares")
    since = _seconds(fields.get("since"))
    if not isinstance(shares, list) or not all(isinstance(share, str) for share in shares):
        raise WireError("shares is no list of share ids")
    if since is None:
        raise WireError(f"since {fields.get('since')!r} is no time in seconds")
    try:
        protocol, state = Protocol(_text(fields, "protocol")), DaemonState(_text(fields, "state"))
    except ValueError as error:
        raise WireError(str(error)) from None
    return Daemon(
        device=_text(fields, "device"),
        uuid=_text(fields, "uuid"),
        protocol=protocol,
        state=state,
        restarts=_required_count(fields, "restarts"),
        since_s=since,
        shares=tuple(shares),
        clients=_count(fields, "clients"),
        error=_optional_text(fields, "error"),
    )


def _seconds(value: Any) -> float | None:
    """A number that JSON may have: of any size, and with Python's reader none at all (NaN)."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:
        return None


def _mapping(value: Any, what: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise WireError(f"{what} is no object")
    return value


def _text(fields: Mapping[str, Any], name: str) -> str:
    value = fields.get(name)
    if not isinstance(value, str) or not value or len(value) > TEXT_MAX:
        raise WireError(f"{name} is no text of 1 to {TEXT_MAX} characters")
    return value


def _optional_text(fields: Mapping[str, Any], name: str) -> str | None:
    return None if fields.get(name) is None else _text(fields, name)


def _count(fields: Mapping[str, Any], name: str) -> int | None:
    return None if fields.get(name) is None else _required_count(fields, name)


def _required_count(fields: Mapping[str, Any], name: str) -> int:
    value = fields.get(name)
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise WireError(f"{name} is no number of 0 or more")
    return value


def _flag(fields: Mapping[str, Any], name: str) -> bool:
    value = fields.get(name)
    if type(value) is not bool:
        raise WireError(f"{name} is not true or false")
    return value
