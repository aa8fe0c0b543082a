# SPDX-License-Identifier: Apache-2.0
"""Machines with MIG: what the probe sees of their GPUs, and what is offered of these by a policy."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from discovery import model
from driver.publish import devices
from driver.sharing import rules
from tests.machines.attributes import DIVIDED
from tests.machines.test_zoo_faulty import base_of

Seen = Mapping[str, model.Snapshot]

INSTANCES = {
    "a30-4-mig": {
        "0000:17:00.0": None,
        "0000:65:00.0": ["1g.6gb@0", "1g.6gb@1", "1g.6gb@2", "1g.6gb+me@3"],
        "0000:ca:00.0": ["1g.6gb@0", "1g.6gb@1", "2g.12gb@2"],
        "0000:e3:00.0": [],
    },
    "dgx-h100-mig": {
        "0000:1b:00.0": None,
        "0000:43:00.0": None,
        "0000:52:00.0": [*(f"1g.10gb@{start}" for start in range(6)), "1g.10gb+me@6"],
        "0000:61:00.0": ["3g.40gb@0", "2g.20gb@4", "1g.20gb@6"],
        "0000:9d:00.0": ["4g.40gb@0", "3g.40gb@4 in parts"],
        "0000:c3:00.0": ["7g.80gb@0"],
        "0000:d1:00.0": ["2g.20gb@0", "2g.20gb@2 in parts"],
        "0000:df:00.0": [],
    },
}
"""What is on each GPU, by its first memory slice; None where MIG is off. In parts: without a compute instance that takes all."""

STATIC = {
    "a30-4-mig": [
        ("gpu-0000-65-00-0-mig-1g-6gb-14-0", "5952Mi", 14),
        ("gpu-0000-65-00-0-mig-1g-6gb-14-1", "5952Mi", 14),
        ("gpu-0000-65-00-0-mig-1g-6gb-14-2", "5952Mi", 14),
        ("gpu-0000-65-00-0-mig-1g-6gb-me-21-3", "5952Mi", 14),
        ("gpu-0000-ca-00-0-mig-1g-6gb-14-0", "5952Mi", 14),
        ("gpu-0000-ca-00-0-mig-1g-6gb-14-1", "5952Mi", 14),
        ("gpu-0000-ca-00-0-mig-2g-12gb-5-2", "11968Mi", 28),
    ],
    "dgx-h100-mig": [
        *((f"gpu-0000-52-00-0-mig-1g-10gb-19-{start}", "9984Mi", 16) for start in range(6)),
        ("gpu-0000-52-00-0-mig-1g-10gb-me-20-6", "9984Mi", 16),
        ("gpu-0000-61-00-0-mig-1g-20gb-15-6", "20096Mi", 26),
        ("gpu-0000-61-00-0-mig-2g-20gb-14-4", "20096Mi", 32),
        ("gpu-0000-61-00-0-mig-3g-40gb-9-0", "40448Mi", 60),
        ("gpu-0000-9d-00-0-mig-4g-40gb-5-0", "40448Mi", 64),
        ("gpu-0000-c3-00-0-mig-7g-80gb-0-0", "81152Mi", 132),
        ("gpu-0000-d1-00-0-mig-2g-20gb-14-0", "20096Mi", 32),
    ],
}
"""What mig-static offers: name, memory and multiprocessors of each instance that a compute instance takes all of."""


def _spelled(gpu: model.Gpu) -> list[str] | None:
    if gpu.mig_instances is None:
        return None
    names = {profile.id: profile.name for profile in gpu.mig_profiles}
    return [
        f"{names[instance.profile_id]}@{instance.placement.start}{'' if instance.whole else ' in parts'}"
        for instance in sorted(gpu.mig_instances, key=lambda instance: instance.placement.start)
    ]


def test_every_machine_with_mig_stands_here() -> None:
    assert INSTANCES.keys() == STATIC.keys() == set(DIVIDED)


@pytest.mark.parametrize("name", DIVIDED)
def test_the_instances_are_these(name: str, seen: Seen) -> None:
    assert {str(gpu.address): _spelled(gpu) for gpu in seen[name].gpus} == INSTANCES[name]
    for gpu in seen[name].gpus:
        on = INSTANCES[name][str(gpu.address)] is not None
        assert gpu.mig_mode is not None
        assert (gpu.mig_mode.current, gpu.mig_mode.pending) == (on, on)


@pytest.mark.parametrize("name", DIVIDED)
def test_the_profiles_are_those_of_the_gpus_without_mig(name: str, seen: Seen) -> None:
    bases = {gpu.address: gpu.mig_profiles for gpu in seen[base_of(name)].gpus}
    assert {gpu.address: gpu.mig_profiles for gpu in seen[name].gpus} == bases
    assert all(bases.values())


@pytest.mark.parametrize("name", DIVIDED)
def test_every_instance_has_files_and_a_uuid_of_its_own(name: str, seen: Seen) -> None:
    instances = [instance for gpu in seen[name].gpus for instance in gpu.mig_instances or ()]
    whole = [instance for instance in instances if instance.whole]
    assert len(whole) == len(STATIC[name])
    assert len({instance.uuid for instance in whole}) == len(whole)
    assert len({node.path for instance in whole for node in instance.nodes}) == 2 * len(whole)
    assert not any(instance.nodes for instance in instances if not instance.whole)


@pytest.mark.parametrize("name", DIVIDED)
def test_mig_static_offers_what_is_there(name: str, seen: Seen) -> None:
    policies = {gpu.address: rules.Policy(mode=rules.Mode.MIG_STATIC) for gpu in seen[name].gpus}
    options = devices.PublishOptions(driver_name="gpu.nearfield.dev")
    offered = devices.build_devices(seen[name], options=options, policies=policies)
    found = [
        (device.name, f"{device.capacity['memory'] >> 20}Mi", device.capacity["multiprocessors"]) for device in offered
    ]
    assert sorted(found) == STATIC[name]
