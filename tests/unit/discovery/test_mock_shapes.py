# SPDX-License-Identifier: Apache-2.0
"""Shapes of machines that few have: hot-plug slots, root buses without ports, NICs without interfaces, NICs of the virtio bus."""

from __future__ import annotations

import posixpath

import pytest

from discovery.errors import DocumentError
from discovery.mock import recording
from discovery.mock.recording import Tree
from tests.fakes import mockmachine

NIC = "{nic: connectx-7-400g-ib}"
ROOT_PORT = ", rootPort: intel-sapphire-rapids-root-port"


def link(machine: recording.Recording, path: str) -> str:
    end = Tree(machine.files).resolve(path)
    assert end is not None
    return end


def test_slots_are_named_after_the_bus_behind_their_port() -> None:
    machine = mockmachine.parsed((NIC, '{slot: "7", nic: connectx-7-400g-ib}, {slot: upper}'))
    slots = {path: text for path, text in machine.files.items() if path.startswith("sys/bus/pci/slots/")}
    assert slots == {
        "sys/bus/pci/slots/7/address": "0000:1a:00\n",
        "sys/bus/pci/slots/7/adapter": "1\n",
        "sys/bus/pci/slots/7/power": "1\n",
        "sys/bus/pci/slots/upper/address": "0000:1b:00\n",
        "sys/bus/pci/slots/upper/adapter": "0\n",
        "sys/bus/pci/slots/upper/power": "0\n",
    }


def test_a_slot_shows_in_the_capabilities_of_its_port() -> None:
    machine = mockmachine.parsed((NIC, '{slot: "7", nic: connectx-7-400g-ib}'))
    configs = [
        machine.files[link(machine, f"sys/bus/pci/devices/0000:17:0{number}.0") + "/config"] for number in (1, 2)
    ]
    without, with_slot = (_slot_capabilities(config) for config in configs)
    assert without == 0
    assert (with_slot & 0x62, with_slot >> 19) == (0x62, 7)  # power control, surprise removal, hot-plug; the number


def _slot_capabilities(config: object) -> int:
    assert isinstance(config, bytes)
    at = config[0x34]
    while config[at] != 0x10:
        at = config[at + 1]
    return int.from_bytes(config[at + 0x14 : at + 0x18], "little")


def test_two_slots_of_one_name_are_refused() -> None:
    with pytest.raises(DocumentError, match=r"small\.yaml:\d+: .*slot 7 is that of 0000:17:02\.0"):
        mockmachine.parsed((NIC, '{slot: "7", nic: connectx-7-400g-ib}, {slot: "7"}'))


def test_a_root_port_needs_a_product() -> None:
    with pytest.raises(
        DocumentError, match="no product for this root port: give `port` here, or `rootPort` of the host"
    ):
        mockmachine.parsed((ROOT_PORT, ""))
    machine = mockmachine.parsed(
        (ROOT_PORT, ""),
        ("- switch: broadcom-pex890xx", "- port: amd-genoa-root-port\n        switch: broadcom-pex890xx"),
        ("{nvme: samsung-pm9a3}", "{port: amd-genoa-root-port, nvme: samsung-pm9a3}"),
    )
    assert machine.files[link(machine, "sys/bus/pci/devices/0000:15:01.0") + "/vendor"] == "0x1022\n"


def test_a_nic_without_an_interface_has_an_rdma_device_named_by_its_place() -> None:
    machine = mockmachine.parsed((NIC, "{nic: efa-100g}"))
    here = link(machine, "sys/class/infiniband/rdmap26s0")
    assert posixpath.dirname(posixpath.dirname(here)) == link(machine, f"sys/bus/pci/devices/{mockmachine.NIC}")
    assert machine.files[f"{here}/ports/1/link_layer"] == "Unknown\n"
    assert machine.files[f"{here}/node_type"] == "7: unspecified\n"
    assert f"{here}/ports/1/gid_attrs/ndevs/0" not in machine.files
    assert list(Tree(machine.files).below("sys/class/net")) == ["sys/class/net/lo"]
    assert "dev/infiniband/uverbs0" in machine.files


def test_an_rdma_device_in_another_domain_says_so_in_its_name() -> None:
    machine = mockmachine.parsed(
        (NIC, "{nvme: samsung-pm9a3}"),
        ('  - root: "0000:80"', '  - root: "0001:80"'),
        ("ports: [{nvme: samsung-pm9a3}]\nnvlink", "ports: [{nic: efa-100g}]\nnvlink"),
    )
    assert "sys/class/infiniband/rdmaP1p129s0" in machine.files


def test_an_interface_of_the_virtio_bus_hangs_on_a_device_below_the_function() -> None:
    machine = mockmachine.parsed((NIC, "{nic: virtio-net, functions: [{interface: ens5}]}"))
    function = link(machine, f"sys/bus/pci/devices/{mockmachine.NIC}")
    assert link(machine, "sys/class/net/ens5") == f"{function}/virtio0/net/ens5"
    assert link(machine, f"{function}/virtio0/net/ens5/device") == f"{function}/virtio0"
    assert not [path for path in machine.files if "infiniband" in path]
