# SPDX-License-Identifier: Apache-2.0
"""What there is of a device for its shares: of a whole GPU, and of a MIG instance. Pure."""

from __future__ import annotations

from discovery import mig, model
from driver.sharing import rules, shares


def whole(gpu: model.Gpu, policy: rules.Policy) -> shares.Terms | None:
    """The terms on which a whole GPU is shared. None where its policy shares no whole GPU, its memory is not known, or there is less than
    two steps of it.
    """
    if policy.mode is not rules.Mode.SHARES or gpu.memory_bytes is None:
        return None
    return _terms(policy, memory_bytes=gpu.memory_bytes, compute=shares.COMPUTE_WHOLE)


def part(gpu: model.Gpu, profile: mig.MigProfile, policy: rules.Policy) -> shares.Terms | None:
    """The terms on which a MIG instance of a profile is shared. Its compute is what it has of the multiprocessors of the whole GPU,
    rounded down. None as for `whole`.
    """
    if policy.mode is not rules.Mode.MIG_STATIC or not gpu.multiprocessors:
        return None
    return _terms(policy, memory_bytes=profile.memory_bytes, compute=percent(profile, gpu.multiprocessors))


def percent(profile: mig.MigProfile, multiprocessors: int) -> int:
    """What an instance has of the multiprocessors of a GPU with so many, rounded down."""
    return shares.COMPUTE_WHOLE * profile.multiprocessors // multiprocessors


def _terms(policy: rules.Policy, *, memory_bytes: int, compute: int) -> shares.Terms | None:
    if policy.shares is None or policy.enforcement is None:
        return None
    return shares.terms(policy.shares, policy.enforcement, memory_bytes=memory_bytes, compute=compute)
