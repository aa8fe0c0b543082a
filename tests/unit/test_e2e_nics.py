# SPDX-License-Identifier: Apache-2.0
"""The NICs that the scenarios claim beside GPUs are offered as dranet offers them, on every machine of the zoo.

Names and types are those of pkg/apis/attributes.go and pkg/inventory/db.go of kubernetes-sigs/dranet, written down here apart from
the driver of the scenarios: what is built on a name that dranet has not would hold in tests only.
"""

from __future__ import annotations

import pytest

from discovery.mock import render, zoo
from tests.e2e.kit.api import Json
from tests.e2e.nicdriver import inventory

TYPES = {
    "dra.net/pciAddress": "string",
    "dra.net/pciSubsystem": "string",
    "dra.net/pciVendor": "string",
    "dra.net/numaNode": "int",
    "dra.net/ifName": "string",
    "dra.net/mac": "string",
    "dra.net/mtu": "int",
    "dra.net/encapsulation": "string",
    "dra.net/state": "string",
    "dra.net/type": "string",
    "dra.net/ebpf": "bool",
    "dra.net/sriov": "bool",
    "dra.net/sriovVfs": "int",
    "dra.net/isSriovVf": "bool",
    "dra.net/virtual": "bool",
    "dra.net/rdma": "bool",
    "dra.net/rdmaDevice": "string",
    "resource.kubernetes.io/pcieRoot": "string",
    "resource.kubernetes.io/numaNode": "int",
}
ALWAYS = {"dra.net/pciAddress", "dra.net/rdma"}


@pytest.fixture(scope="module", params=zoo.names())
def offered(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Json]:
    """The NICs of a machine."""
    return inventory.devices(
        render.render(zoo.load(request.param), tmp_path_factory.mktemp("nics") / "machine").directory
    )


def test_attributes_have_the_names_and_types_of_dranet(offered: list[Json]) -> None:
    assert offered
    for device in offered:
        said = {name: kind for name, value in device["attributes"].items() for kind in value}
        assert said.keys() >= ALWAYS, device
        assert said == {name: TYPES.get(name) for name in said}, device
        # An RDMA device without an interface has its name in the place of the interface's.
        assert not {"dra.net/ifName", "dra.net/rdmaDevice"} <= said.keys(), device


def test_a_device_is_named_after_its_address(offered: list[Json]) -> None:
    addresses = [device["attributes"]["dra.net/pciAddress"]["string"] for device in offered]
    assert len(set(addresses)) == len(offered)
    assert [inventory.address_of(device["name"]) for device in offered] == addresses
