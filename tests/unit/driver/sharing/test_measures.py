# SPDX-License-Identifier: Apache-2.0
"""measures: what there is of a device for its shares. Aspects: a whole GPU, an instance, what is not shared."""

from __future__ import annotations

from dataclasses import replace

import pytest

from discovery import address, mig, model
from driver.sharing import measures, rules, shares

GIB = 1 << 30
LEVELS = shares.Enforcement(memory=shares.Memory.NONE, compute=shares.Compute.NONE)
SHARES = shares.Shares(
    memory_step=GIB, compute_step=5, max_sharers=8, memory=shares.Memory.NONE, compute=shares.Compute.NONE
)
POLICY = rules.Policy(mode=rules.Mode.SHARES, shares=SHARES, enforcement=LEVELS)
STATIC = replace(POLICY, mode=rules.Mode.MIG_STATIC)
GPU = model.Gpu(
    pci=model.PciFunction(
        address=address.PciAddress(0, 0x1B, 0, 0), vendor_id=0x10DE, device_id=0x2330, class_code=0x030200
    ),
    state=model.GpuState.READY,
    memory_bytes=85_520_809_984,
    multiprocessors=132,
)
PROFILE = mig.MigProfile(
    id=19,
    number=0,
    compute_number=0,
    name="1g.10gb",
    slices=1,
    memory_bytes=10_468_982_784,
    multiprocessors=16,
    instances=7,
)


def test_a_whole_gpu_is_shared_by_steps_below_what_there_is() -> None:
    assert measures.whole(GPU, POLICY) == shares.Terms(
        memory=shares.Capacity(value=85_520_809_984, default=79 * GIB, step=GIB, most=79 * GIB),
        compute=shares.Capacity(value=100, default=100, step=5, most=100),
        sharers=8,
    )


def test_an_instance_has_the_compute_that_it_has_of_the_whole_gpu() -> None:
    assert measures.part(GPU, PROFILE, STATIC) == shares.Terms(
        memory=shares.Capacity(value=10_468_982_784, default=9 * GIB, step=GIB, most=9 * GIB),
        compute=shares.Capacity(value=12, default=10, step=5, most=10),
        sharers=8,
    )


@pytest.mark.parametrize(
    "policy", [rules.EXCLUSIVE, STATIC, replace(POLICY, shares=None), replace(POLICY, enforcement=None)]
)
def test_a_gpu_of_another_policy_is_not_shared(policy: rules.Policy) -> None:
    assert measures.whole(GPU, policy) is None


@pytest.mark.parametrize("policy", [rules.EXCLUSIVE, POLICY, rules.Policy(mode=rules.Mode.MIG_STATIC)])
def test_an_instance_of_another_policy_is_not_shared(policy: rules.Policy) -> None:
    assert measures.part(GPU, PROFILE, policy) is None


def test_what_is_not_known_is_not_shared() -> None:
    assert measures.whole(replace(GPU, memory_bytes=None), POLICY) is None
    assert measures.part(replace(GPU, multiprocessors=None), PROFILE, STATIC) is None
