# SPDX-License-Identifier: Apache-2.0
"""GPUs that are handed out in shares, and the shares that claims have of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from driver import values
from driver.observe import sharers
from driver.sharing import rules, shares

GIB = 1 << 30

SHARES = shares.Shares(
    memory_step=GIB, compute_step=5, max_sharers=8, memory=shares.Memory.CGROUP, compute=shares.Compute.MPS
)
ENFORCEMENT = shares.Enforcement(memory=shares.Memory.CGROUP, compute=shares.Compute.MPS)
TURNS = shares.Enforcement(memory=shares.Memory.NONE, compute=shares.Compute.TIMESLICE)


def policy(
    *, mode: rules.Mode = rules.Mode.SHARES, enforcement: shares.Enforcement = ENFORCEMENT, **changes: Any
) -> rules.Policy:
    """One that shares, with some fields of its shares changed."""
    return rules.Policy(mode=mode, shares=replace(SHARES, **changes), enforcement=enforcement)


def use(device: str, number: int, *, gib: float, compute: int | None = None, **more: Any) -> sharers.Use:
    """The share of the claim with this number."""
    claim = values.ClaimRef(uid=values.ClaimUid(f"u-{number}"), namespace="team", name=f"claim-{number}")
    memory = int(gib * GIB)
    return sharers.Use(device=device, claim=claim, share_id=f"share-{number}", memory=memory, compute=compute, **more)
