# SPDX-License-Identifier: Apache-2.0
"""What was published, from the record, for who decides on policies.

- wholes, parts made at need and static ones are told apart, with the identity of their GPU
- what is given out in shares is so under its policy, also an instance that is too small for two steps
- what cannot be read is left out; what is saved is told of
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import pytest

from driver.app import sharing, standing
from driver.prepare import plan
from driver.publish import absent, devices
from driver.sharing import abilities, effective, shares
from driver.sharing.rules import Mode, Policy, Rule
from tests.fakes import divided, publishing


def published(mode: Mode) -> dict[str, Any]:
    """What the publisher keeps of a GPU with an instance, in a mode."""
    gpu = divided.gpu(1, divided.instance(19, 0))
    offer = devices.build_offer(
        publishing.snapshot(gpu), options=publishing.OPTIONS, policies={gpu.address: Policy(mode=mode)}
    )
    return absent.to_json({device.name: device for device in offer.devices})


def test_parts_that_somebody_made_are_static() -> None:
    (part,) = standing.read(published(Mode.MIG_STATIC))
    assert part == effective.Standing(
        name="gpu-0000-01-00-0-mig-1g-10gb-19-0",
        address=publishing.at(1),
        mode=Mode.MIG_STATIC,
        profile="1g.10gb",
        uuid="GPU-00000001-0000-0000-0000-000000000000",
        product="NVIDIA H100 80GB HBM3",
    )


def test_parts_that_are_made_at_need_are_dynamic_and_so_is_their_whole() -> None:
    gpu = divided.gpu(1, enabled=False)
    offer = devices.build_offer(
        publishing.snapshot(gpu), options=publishing.OPTIONS, policies={gpu.address: Policy(mode=Mode.MIG_DYNAMIC)}
    )
    found = standing.read(absent.to_json({device.name: device for device in offer.devices}))
    assert {device.mode for device in found} == {Mode.MIG_DYNAMIC}
    assert {device.profile for device in found} == {None, *(profile.name for profile in divided.H100)}
    assert {device.uuid for device in found} == {gpu.uuid}


def test_what_older_versions_published_is_whole_and_exclusive() -> None:
    gpu = publishing.gpu(2)
    offer = devices.build_offer(publishing.snapshot(gpu), options=publishing.OPTIONS)
    body = absent.to_json({device.name: device for device in offer.devices})
    assert "mode" not in body["gpu-0000-02-00-0"]
    (whole,) = standing.read({**body, "gpu-1": {"address": 7}, "gpu-2": None})
    assert (whole.name, whole.mode, whole.profile) == ("gpu-0000-02-00-0", Mode.EXCLUSIVE, None)


@pytest.mark.parametrize("compute_step", [5, 25])
def test_what_is_shared_is_so_by_its_policy(compute_step: int) -> None:
    """An instance of 12 percent has no two steps of 25, and its policy is the same."""
    division = shares.Shares(
        memory_step=1 << 30,
        compute_step=compute_step,
        max_sharers=8,
        memory=shares.Memory.NONE,
        compute=shares.Compute.NONE,
    )
    enforcement = shares.Enforcement(memory=shares.Memory.COOPERATIVE, compute=shares.Compute.NONE)
    gpus = {Mode.SHARES: publishing.gpu(1), Mode.MIG_STATIC: divided.gpu(2, divided.instance(19, 0))}
    offer = devices.build_offer(
        publishing.snapshot(*gpus.values()),
        options=publishing.OPTIONS,
        policies={
            gpu.address: Policy(mode=mode, shares=division, enforcement=enforcement) for mode, gpu in gpus.items()
        },
    )
    found = standing.read(absent.to_json({device.name: device for device in offer.devices}))
    assert {device.mode for device in found} == gpus.keys()
    assert {(device.shares, device.enforcement) for device in found} == {(division, enforcement)}


class Record:
    def __init__(self, body: Mapping[str, Any]) -> None:
        self.body = body

    def load_published(self) -> Mapping[str, Any]:
        return self.body

    def save_published(self, published: Mapping[str, Any], /) -> None:
        self.body = published

    def holders(self, names: Collection[str], /) -> Sequence[plan.Holder]:
        assert names
        return ()


def test_what_is_saved_counts_from_then_on() -> None:
    record = Record(published(Mode.MIG_STATIC))
    policies = sharing.build(record, [Rule()], can=lambda _snapshot: abilities.unknown)
    snapshot = publishing.snapshot(divided.gpu(1, divided.instance(19, 0)))
    assert policies.policies(snapshot)[publishing.at(1)].mode is Mode.MIG_STATIC
    sharing.Remembered(record, saved=policies.published_anew).save_published({})
    assert policies.policies(snapshot)[publishing.at(1)].mode is Mode.EXCLUSIVE
    assert sharing.Remembered(record, saved=policies.published_anew).load_published() == {}
