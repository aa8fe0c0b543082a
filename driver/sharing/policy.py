# SPDX-License-Identifier: Apache-2.0
"""Which policy each GPU of a node has by the rules of its admin, and what of the rules has no effect here. Pure.

One configuration serves a fleet of different nodes. So a rule that is for none of the GPUs here, and a mode that a GPU has not,
are Findings and no errors; a GPU that cannot be shared as its rule says is handed out whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from discovery import mig, model
from discovery.address import PciAddress
from driver.sharing import abilities, globs, sharable
from driver.sharing.rules import EXCLUSIVE, Match, Mode, Policy, Rule

_Maker = Callable[[str, model.Severity, str], model.Finding]
_MIG_MODES = frozenset({Mode.MIG_STATIC, Mode.MIG_DYNAMIC})
_NOTHING: Mapping[PciAddress, sharable.Published] = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """The policy of every GPU of a Snapshot. `waiting`: GPUs whose policy is not yet the one that the rules say, with the
    devices of each that somebody holds.
    """

    policies: Mapping[PciAddress, Policy]
    findings: tuple[model.Finding, ...] = ()
    waiting: Mapping[PciAddress, frozenset[str]] = field(default_factory=dict)


def resolve(
    rules: Sequence[Rule],
    gpus: Sequence[model.Gpu],
    *,
    can: abilities.Can = abilities.unknown,
    published: Mapping[PciAddress, sharable.Published] = _NOTHING,
) -> Resolved:
    """What the rules say of these GPUs, whoever holds them. `can`: what of shares can be enforced here, asked of the GPUs alone that
    are to be shared. `published`: under what their shares are published, which counts where an ability is away for a moment.
    """
    policies = {gpu.address: EXCLUSIVE for gpu in gpus}
    findings: list[model.Finding] = []
    left = sorted(gpus, key=lambda gpu: gpu.address)
    for index, rule in enumerate(rules):
        taken = [gpu for gpu in left if _matches(rule.match, gpu)][: rule.match.count]
        if not taken and not any(_may_match(rule.match, gpu) for gpu in left):
            findings.append(_unused(index, rule, gpus))
        left = [gpu for gpu in left if gpu not in taken]
        for gpu in taken:
            possible = _possible(rule, gpu)
            findings += _odd(rule, gpu)
            if possible.mode is rule.mode and rule.shares is not None:
                possible, odd = sharable.shared(rule, gpu, can(gpu), published=published.get(gpu.address))
                findings += odd
            policies[gpu.address] = possible
    return Resolved(policies=policies, findings=tuple(findings))


def offered_profiles(policy: Policy, gpu: model.Gpu) -> tuple[mig.MigProfile, ...]:
    """The profiles of which partitions are made of the GPU; none in a mode that makes none."""
    return tuple(profile for profile in gpu.mig_profiles if offers_profile(policy, profile.name))


def offers_profile(policy: Policy, name: str) -> bool:
    """Whether partitions of the profile of this name are made."""
    if policy.mode is not Mode.MIG_DYNAMIC:
        return False
    return not policy.profiles or any(globs.matches(pattern, name) for pattern in policy.profiles)


def _matches(match: Match, gpu: model.Gpu) -> bool:
    """Whether all that is given holds. What is not known of a GPU holds for nothing."""
    return (
        (match.address is None or match.address == gpu.address)
        and (match.uuid is None or (gpu.uuid is not None and match.uuid.casefold() == gpu.uuid.casefold()))
        and (match.product is None or (gpu.product is not None and globs.matches(match.product, gpu.product)))
        and (match.numa_node is None or match.numa_node == gpu.pci.numa_node)
    )


def _may_match(match: Match, gpu: model.Gpu) -> bool:
    """Whether the rule may be for this GPU once NVML tells its UUID and product."""
    return (
        (match.address is None or match.address == gpu.address)
        and (match.numa_node is None or match.numa_node == gpu.pci.numa_node)
        and ((match.uuid is not None and gpu.uuid is None) or (match.product is not None and gpu.product is None))
    )


def _possible(rule: Rule, gpu: model.Gpu) -> Policy:
    """What a rule makes of a GPU. One that cannot be read now keeps what its rule says for when it can."""
    if _has_no_mig(rule, gpu):
        return EXCLUSIVE
    return Policy(mode=rule.mode, fallback=rule.fallback, profiles=rule.profiles)


def _has_no_mig(rule: Rule, gpu: model.Gpu) -> bool:
    return rule.mode in _MIG_MODES and gpu.state is model.GpuState.READY and gpu.mig_mode is None


def _unused(index: int, rule: Rule, gpus: Sequence[model.Gpu]) -> model.Finding:
    if any(_matches(rule.match, gpu) for gpu in gpus):
        why = "every GPU of this node that it matches is taken by a rule before it"
    else:
        why = "no GPU of this node matches it"
    return model.Finding(
        code="sharing-rule-unused",
        severity=model.Severity.INFO,
        subject=f"sharing[{index}]",
        message=f"The rule ({rule.mode}) has no effect here: {why}",
    )


def _odd(rule: Rule, gpu: model.Gpu) -> Iterator[model.Finding]:
    """What a person should know of a GPU under its rule."""
    if gpu.state is not model.GpuState.READY or rule.mode not in _MIG_MODES:
        return

    def finding(code: str, severity: model.Severity, message: str) -> model.Finding:
        return model.Finding(code=code, severity=severity, subject=str(gpu.address), message=message)

    product = gpu.product or "this GPU"
    if gpu.mig_mode is None:
        yield finding(
            "sharing-not-possible",
            model.Severity.WARNING,
            f"The configuration asks for {rule.mode}, and {product} has no MIG: it is offered whole",
        )
    elif rule.mode is Mode.MIG_STATIC:
        if not gpu.mig_mode.current:
            yield finding(
                "mig-disabled",
                model.Severity.WARNING,
                "Nothing of this GPU is offered: the configuration asks for mig-static, and MIG is off. Enable it when the"
                f" GPU is free (nvidia-smi -i {gpu.address} -mig 1{_reset(gpu)}) and create instances"
                " (nvidia-smi mig -cgi ... -C), or take the GPU out of the rule",
            )
        elif gpu.mig_instances == ():
            yield finding(
                "mig-no-instances",
                model.Severity.WARNING,
                "Nothing of this GPU is offered: the configuration asks for mig-static, MIG is on, and there is no MIG"
                f" instance. Create some (nvidia-smi mig -i {gpu.address} -cgi ... -C), or have the agent make them"
                " (mode: mig-dynamic)",
            )
    else:
        yield from _odd_dynamic(rule, gpu, finding)


def _odd_dynamic(rule: Rule, gpu: model.Gpu, finding: _Maker) -> Iterator[model.Finding]:
    assert gpu.mig_mode is not None
    if gpu.mig_profiles and not offered_profiles(Policy(mode=rule.mode, profiles=rule.profiles), gpu):
        names = ", ".join(profile.name for profile in gpu.mig_profiles)
        yield finding(
            "sharing-profiles-unknown",
            model.Severity.WARNING,
            f"None of the profiles {', '.join(rule.profiles)} of the configuration is one of this GPU, which has {names}:"
            " no part of it is offered",
        )
    if mig.toggle_of(gpu.architecture) is mig.Toggle.NEVER:
        now = (
            "MIG is on, so parts of this GPU are offered and never the whole"
            if gpu.mig_mode.current
            else "MIG is off, so this GPU is offered whole and no part of it"
        )
        yield finding(
            "mig-mode-fixed",
            model.Severity.INFO,
            f"{now}: the MIG mode of architecture {gpu.architecture or 'unknown'} is not changed by the agent, as it takes a"
            f" reset. To change it, drain the node (nvidia-smi -i {gpu.address} -mig {int(not gpu.mig_mode.current)}"
            f"{_reset(gpu)})",
        )


def _reset(gpu: model.Gpu) -> str:
    """What else it takes to change the MIG mode by hand."""
    if mig.toggle_of(gpu.architecture) is mig.Toggle.AT_NEED:
        return ""
    return f", then nvidia-smi -i {gpu.address} --gpu-reset"
