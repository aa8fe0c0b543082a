# SPDX-License-Identifier: Apache-2.0
"""Whether somebody else offers our GPUs: other drivers' slices, and NVIDIA's device plugin."""

from __future__ import annotations

from typing import Any

import pytest

from driver.publish import coexistence
from tests.fakes import publishing

OURS = {publishing.at(0x1B)}
Body = dict[str, Any]


def foreign(name: str, value: Any) -> Body:
    spec = {
        "driver": "gpu.nvidia.com",
        "pool": {"name": "n1"},
        "devices": [{"name": "gpu-0", "attributes": {name: value}}],
    }
    return {"spec": spec}


def node(**allocatable: str) -> Body:
    return {
        "status": {
            "allocatable": {name.replace("__", "/").replace("_", "."): value for name, value in allocatable.items()}
        }
    }


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("resource.kubernetes.io/pciBusID", "0000:1b:00.0"),
        ("resource.kubernetes.io/pciBusID", "0000:1B:00.0"),
        ("pcieBusID", "00000000:1B:00.0"),
        ("other.example.com/pciAddress", "0000:1b:00.0"),
    ],
)
def test_a_driver_that_publishes_our_address_is_named(name: str, text: str) -> None:
    found = coexistence.other_driver([foreign(name, {"string": text})], ours=OURS)
    assert found == "driver gpu.nvidia.com publishes GPU 0000:1b:00.0 of this node too (device gpu-0 of pool n1)"


@pytest.mark.parametrize(
    "body",
    [
        foreign("resource.kubernetes.io/pciBusID", {"string": "0000:18:00.0"}),
        foreign("resource.kubernetes.io/pcieRoot", {"string": "0000:1b:00.0"}),
        foreign("resource.kubernetes.io/pciBusID", {"string": "nonsense"}),
        foreign("resource.kubernetes.io/pciBusID", {"int": 7}),
        foreign("resource.kubernetes.io/pciBusID", None),
        {"spec": {"devices": None}},
        {"spec": {"devices": [None, {"attributes": []}]}},
        {},
    ],
)
def test_other_devices_are_no_conflict(body: Body) -> None:
    assert coexistence.other_driver([body], ours=OURS) is None


@pytest.mark.parametrize("name", ["nvidia_com__gpu", "nvidia_com__mig-1g.10gb", "nvidia_com__gpu.shared"])
def test_the_device_plugin_is_a_conflict(name: str) -> None:
    found = coexistence.device_plugin(node(**{name: "8"}))
    assert found is not None
    assert "device plugin" in found


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"status": None},
        {"status": {"allocatable": []}},
        node(nvidia_com__gpu="0"),
        node(nvidia_com__gpu="many"),
        node(nvidia_com__hostdev="2"),
        node(amd_com__gpu="8"),
    ],
)
def test_a_node_without_it_is_none(body: Body) -> None:
    assert coexistence.device_plugin(body) is None
