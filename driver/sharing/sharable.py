# SPDX-License-Identifier: Apache-2.0
"""What becomes of a rule that shares a GPU, or its MIG instances, by what this node can enforce. Pure.

What cannot be shared as its rule says is handed out to one claim at a time: the whole GPU, or each of its instances.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from discovery import model
from driver import quantity
from driver.sharing import abilities, measures
from driver.sharing.abilities import Abilities, Lacking
from driver.sharing.rules import EXCLUSIVE, Mode, Policy, Rule
from driver.sharing.shares import Enforcement, Shares


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """Under what the shares of a GPU are published."""

    shares: Shares
    enforcement: Enforcement


def shared(
    rule: Rule, gpu: model.Gpu, can: Abilities, *, published: Published | None = None
) -> tuple[Policy, tuple[model.Finding, ...]]:
    """The policy of a GPU by a rule with `shares`, and what a person should know of it. Of a GPU that cannot be read now nothing is
    said. What its shares are published under stays while it cannot be had for reasons that may pass by themselves.
    """
    assert rule.shares is not None
    if rule.mode is Mode.MIG_STATIC and gpu.mig_mode is not None and not gpu.mig_mode.current:
        return _alone(rule), ()  # There is no instance, which is said, and what holds for one is not known.
    found = _enforcement(rule, gpu, can)
    clients = can.mps_clients
    if published is not None and abilities.outlasts(published.enforcement, rule.shares, can):
        found = published.enforcement
        clients = max(clients, published.shares.max_sharers)
    if isinstance(found, Lacking):
        said = (_not_possible(rule, gpu, found.reasons),) if gpu.state is model.GpuState.READY else ()
        return _alone(rule), said
    within, cut = _within(rule.shares, found, clients)
    policy = Policy(mode=rule.mode, fallback=rule.fallback, shares=within, enforcement=found)
    if rule.mode is Mode.SHARES and gpu.memory_bytes is not None and measures.whole(gpu, policy) is None:
        return _alone(rule), (_not_possible(rule, gpu, (_too_small(gpu.memory_bytes, rule.shares),)),)
    return policy, (_cut(gpu, rule.shares, within),) if cut else ()


def _enforcement(rule: Rule, gpu: model.Gpu, can: Abilities) -> Enforcement | Lacking:
    assert rule.shares is not None
    if rule.mode is Mode.SHARES and gpu.mig_mode is not None and gpu.mig_mode.current:
        turn_off = f"nvidia-smi -i {gpu.address} -mig 0"
        return Lacking(reasons=(f"MIG is on, and only a whole GPU is shared by this mode: turn it off ({turn_off})",))
    return abilities.enforcement(rule.shares, can)


def _alone(rule: Rule) -> Policy:
    """How it is when nothing is shared."""
    return EXCLUSIVE if rule.mode is Mode.SHARES else Policy(mode=rule.mode, fallback=rule.fallback)


def _within(shares: Shares, enforcement: Enforcement, clients: int) -> tuple[Shares, bool]:
    """The shares with no more sharers than MPS has clients, where it has a part in them."""
    by_mps = enforcement.by_mps or enforcement.by_legacy_mps
    if not by_mps or shares.max_sharers <= clients:
        return shares, False
    return replace(shares, max_sharers=clients), True


def _too_small(memory_bytes: int, shares: Shares) -> str:
    step, memory = quantity.format_bytes(shares.memory_step), quantity.format_bytes(memory_bytes)
    return f"two steps of {step} are more than its memory ({memory}): give the rule a smaller memoryStep"


def _not_possible(rule: Rule, gpu: model.Gpu, reasons: Iterable[str]) -> model.Finding:
    what = "shares of its MIG instances" if rule.mode is Mode.MIG_STATIC else "shares of it"
    who = "Each instance" if rule.mode is Mode.MIG_STATIC else "The GPU"
    return model.Finding(
        code="sharing-not-possible",
        severity=model.Severity.WARNING,
        subject=str(gpu.address),
        message=f"The configuration asks for {what}, which cannot be had: {'; '.join(reasons)}. {who} is handed out to one claim"
        " at a time",
    )


def _cut(gpu: model.Gpu, wanted: Shares, within: Shares) -> model.Finding:
    return model.Finding(
        code="sharers-cut",
        severity=model.Severity.INFO,
        subject=str(gpu.address),
        message=f"maxSharers is {wanted.max_sharers}, and MPS serves {within.max_sharers} programs on one device with this driver:"
        f" so many claims may share it",
    )
