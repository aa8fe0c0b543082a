# SPDX-License-Identifier: Apache-2.0
"""What the MPS supervisor says of itself and of its daemons. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from driver.mps.shares import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class Ability:
    """What the supervisor can do. `instance` names its life: after a restart it has another, and nothing of what it was asked for
    before. `program` is nvidia-cuda-mps-control as the supervisor finds it, `version` what that says of itself; None: not there,
    or it does not say. `reasons` has a sentence for every protocol that is not in `protocols`, which says what would help.
    """

    instance: str
    program: str | None = None
    version: str | None = None
    protocols: frozenset[Protocol] = frozenset()
    reasons: Mapping[Protocol, str] = field(default_factory=dict)


class DaemonState(StrEnum):
    """How it is with the daemon of a device."""

    STARTING = "starting"
    RUNNING = "running"
    """All its shares are in place."""
    WAITING = "waiting"
    """It ended, or did not start; another try comes by itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Daemon:
    """The daemon of one device. `restarts`: how often it was started again after an end that nobody asked for; `since_s`: how long it
    has been in its state; `shares`: the share ids that it is to have; `clients`: programs that are connected, None: not known;
    `error`: why it is not running, or what was wrong the last time.
    """

    device: str
    uuid: str
    protocol: Protocol
    state: DaemonState
    restarts: int = 0
    since_s: float = 0.0
    shares: tuple[str, ...] = ()
    clients: int | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """All daemons, by device. `change` grows within an instance whenever a daemon starts, ends or fails, or a share comes or goes."""

    instance: str
    change: int
    daemons: Mapping[str, Daemon] = field(default_factory=dict)
