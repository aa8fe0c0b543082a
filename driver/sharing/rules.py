# SPDX-License-Identifier: Apache-2.0
"""The rules by which GPUs are shared, as an admin gives them in section `sharing` of the configuration file. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from discovery.address import PciAddress
from driver.sharing.shares import Enforcement, Shares


class Mode(StrEnum):
    """What is handed out of a GPU."""

    EXCLUSIVE = "exclusive"
    """The whole GPU."""
    MIG_STATIC = "mig-static"
    """The MIG instances that somebody made."""
    MIG_DYNAMIC = "mig-dynamic"
    """The whole GPU, or MIG instances that the agent makes for a claim and removes after it."""
    SHARES = "shares"
    """Shares of the whole GPU, measured in memory and compute. The instances of a mig-static GPU may be shared, too."""


class Fallback(StrEnum):
    """What is offered of a GPU where the API server drops the fields that its mode needs."""

    WHOLE = "whole"
    NONE = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """The GPUs that a rule is for: all that is given must hold, nothing given is every GPU. `product` is a pattern with `*`, `?`
    and `[...]`. `count`: only the first so many by address, of those that no earlier rule took.
    """

    address: PciAddress | None = None
    uuid: str | None = None
    product: str | None = None
    numa_node: int | None = None
    count: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One rule; the first that matches a GPU wins. `profiles`: patterns of the names of MIG profiles that are offered of
    a mig-dynamic GPU; empty: all. `shares`: there in mode shares, and for a mig-static GPU whose instances are shared.
    """

    match: Match = field(default_factory=Match)
    mode: Mode = Mode.EXCLUSIVE
    fallback: Fallback = Fallback.WHOLE
    profiles: tuple[str, ...] = ()
    shares: Shares | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """How one GPU is shared. `shares` and `enforcement`, what keeps the shares apart on this node, are there together."""

    mode: Mode = Mode.EXCLUSIVE
    fallback: Fallback = Fallback.WHOLE
    profiles: tuple[str, ...] = ()
    shares: Shares | None = None
    enforcement: Enforcement | None = None


EXCLUSIVE = Policy()
"""That of a GPU without a rule."""
