# SPDX-License-Identifier: Apache-2.0
"""What somebody has stays on the terms it was published with.

Aspects: memory, policy and enforcement that change, with and without somebody who has the device; alone becomes shared and
back; a whole GPU that was dynamic; what has no shares is nobody's business here; a server that keeps no shares: what is at
risk there, and what is hidden, also without a record and when the device is lost.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from driver.publish import absent, devices, unchanged
from driver.sharing import shares
from driver.sharing.rules import EXCLUSIVE, Mode, Policy
from tests.fakes import migtables, publishing

GIB = 1 << 30
SHARES = shares.Shares(
    memory_step=GIB, compute_step=5, max_sharers=8, memory=shares.Memory.NONE, compute=shares.Compute.NONE
)
BY_CGROUP = shares.Enforcement(memory=shares.Memory.CGROUP, compute=shares.Compute.MPS)
SHARED = Policy(mode=Mode.SHARES, shares=SHARES, enforcement=BY_CGROUP)
WEAKER = replace(SHARED, enforcement=replace(BY_CGROUP, memory=shares.Memory.MPS))
FEWER = replace(SHARED, shares=replace(SHARES, max_sharers=4))
GPU = publishing.gpu(0x1B)
NAME = "gpu-0000-1b-00-0"


def device(how: Policy, **changes: Any) -> devices.Device:
    gpu = replace(GPU, **changes)
    (made,) = devices.build_devices(publishing.snapshot(gpu), options=publishing.OPTIONS, policies={gpu.address: how})
    return made


BEFORE = device(SHARED)
ALONE = device(EXCLUSIVE)
CHANGES = {
    "memory": (BEFORE, device(SHARED, memory_bytes=80 * GIB)),
    "enforcement": (BEFORE, device(WEAKER)),
    "sharers": (BEFORE, device(FEWER)),
    "now alone": (BEFORE, ALONE),
    "now shared": (ALONE, BEFORE),
}


@pytest.mark.parametrize(("before", "now"), CHANGES.values(), ids=CHANGES.keys())
def test_it_stays_as_it_was_while_somebody_has_it(before: devices.Device, now: devices.Device) -> None:
    published = {NAME: before}
    assert unchanged.differing([now], published) == {NAME}
    assert unchanged.keep([now], published, held={NAME}) == ((before,), (NAME,))
    assert unchanged.keep([now], published, held=()) == ((now,), ())


def test_what_else_it_says_is_said_as_it_is_now() -> None:
    now = device(SHARED, memory_bytes=80 * GIB, product="Another")
    ((kept,), _) = unchanged.keep([now], {NAME: BEFORE}, held={NAME})
    assert kept == replace(BEFORE, attributes={**BEFORE.attributes, "productName": "Another"})


def test_a_gpu_that_was_dynamic_keeps_its_counters() -> None:
    gpu = migtables.gpu(0x1B)
    before = devices.build_devices(
        publishing.snapshot(gpu),
        options=publishing.OPTIONS,
        policies={gpu.address: Policy(mode=Mode.MIG_DYNAMIC)},
    )[0]
    ((kept,), _) = unchanged.keep([BEFORE], {NAME: before}, held={NAME})
    assert (kept.consumes, kept.mode, kept.terms) == (before.consumes, Mode.MIG_DYNAMIC, None)


def test_nothing_is_kept_that_is_as_it_was_or_is_not_shared() -> None:
    more = device(EXCLUSIVE, memory_bytes=80 * GIB)
    assert unchanged.differing([BEFORE], {NAME: BEFORE}) == frozenset()
    assert unchanged.differing([more], {NAME: ALONE}) == frozenset()
    assert unchanged.differing([BEFORE], {}) == frozenset()


@pytest.mark.parametrize(
    ("ready", "sharing", "published", "names"),
    [
        ((ALONE,), (BEFORE,), {NAME: BEFORE}, {NAME}),
        ((ALONE,), (BEFORE,), {NAME: ALONE}, set()),
        ((ALONE,), (BEFORE,), {}, {NAME}),
        ((), (BEFORE,), {NAME: BEFORE}, {NAME}),
        ((), (BEFORE,), {}, set()),
        ((), (), {NAME: BEFORE}, {NAME}),
        ((ALONE,), (), {}, set()),
    ],
)
def test_of_what_a_claim_may_have_a_share(
    ready: tuple[devices.Device, ...],
    sharing: tuple[devices.Device, ...],
    published: absent.Published,
    names: set[str],
) -> None:
    assert unchanged.at_risk(ready, sharing, published) == names


@pytest.mark.parametrize("listed", [ALONE, replace(BEFORE, absent=True)])
@pytest.mark.parametrize("published", [{NAME: BEFORE}, {}])
def test_what_somebody_has_a_share_of_is_hidden(listed: devices.Device, published: absent.Published) -> None:
    assert unchanged.hide([listed], [BEFORE], published, held={NAME}) == ((), (BEFORE,))
    assert unchanged.hide([listed], [BEFORE], published, held=()) == ((listed,), ())


def test_what_somebody_has_alone_is_not_hidden() -> None:
    assert unchanged.hide([ALONE], [BEFORE], {NAME: ALONE}, held={NAME}) == ((ALONE,), ())
