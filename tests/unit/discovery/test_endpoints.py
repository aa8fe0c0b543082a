# SPDX-License-Identifier: Apache-2.0
"""RDMA devices that are not one port of one NIC: made of software, without an interface, with several ports, on functions that
are no network controllers.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from discovery import endpoints, findings, model, nvml, probe
from discovery.address import PciAddress, parse
from discovery.options import ProbeOptions
from tests.fakes import pcitree
from tests.fakes.nvmllib import FakeLibrary

NIC = "pci0000:00/0000:00:03.0"
WHERE = parse("0000:00:03.0")


@pytest.fixture
def tree(tmp_path: Path) -> pcitree.Tree:
    tree = pcitree.Tree(tmp_path)
    tree.cpus("0-3")
    tree.write("proc/meminfo", "MemTotal: 4 kB\nMemFree: 1 kB")
    tree.write("proc/1/net/dev", "Inter-|   Receive\n face |bytes    packets")
    return tree


def rdma(tree: pcitree.Tree) -> dict[PciAddress, list[model.RdmaDevice]]:
    found = findings.Findings()
    devices = endpoints.class_devices(tree.files(), endpoints.RDMA, found)
    read = {where: list(map(endpoints.rdma_device, there)) for where, there in devices.items()}
    assert found.result() == ()
    return read


def nics(tree: pcitree.Tree) -> tuple[model.Nic, ...]:
    snapshot = probe.probe(
        sysfs=tree.files(),
        dev=tree.dev,
        library=FakeLibrary(),
        origin=model.Origin.RECORDING,
        options=ProbeOptions(),
        clock=lambda: 0.0,
    )
    assert {finding.code for finding in snapshot.findings} <= {"no-gpu"}
    with nvml.Nvml(FakeLibrary()):
        return snapshot.nics


def test_rdma_made_of_software_disturbs_nothing(tree: pcitree.Tree) -> None:
    tree.function(NIC, driver="ice", **pcitree.NIC)
    tree.class_device("infiniband", "virtual/infiniband/siw0")
    tree.write("sys/devices/virtual/infiniband/siw0/node_type", "4: RNIC")
    tree.class_device("infiniband", "virtual/infiniband/rxe0")
    tree.write("sys/devices/virtual/infiniband/rxe0/parent", "eth0")
    assert rdma(tree) == {}
    (nic,) = nics(tree)
    assert (nic.address, nic.name, nic.rdma_devices) == (WHERE, None, ())


def test_software_that_an_older_kernel_shows_below_a_nic_is_none_of_its_devices(tree: pcitree.Tree) -> None:
    tree.function(NIC, driver="mlx5_core", **pcitree.NIC)
    for name in ("mlx5_0", "a_soft_one"):
        tree.class_device("infiniband", f"{NIC}/infiniband/{name}")
    tree.write(f"sys/devices/{NIC}/infiniband/a_soft_one/parent", "eth0")
    assert [device.name for device in rdma(tree)[WHERE]] == ["mlx5_0"]
    assert [nic.name for nic in nics(tree)] == ["mlx5_0"]


@pytest.mark.parametrize("class_code", ["0x020000", "0x00ff00"])
def test_a_function_with_an_rdma_device_alone_is_a_nic(tree: pcitree.Tree, class_code: str) -> None:
    """Amazon's EFA is a network controller without an interface, Alibaba's eRDMA no network controller at all."""
    tree.function(NIC, driver="efa", **{**pcitree.NIC, "class": class_code})
    tree.class_device("infiniband", f"{NIC}/infiniband/rdmap0s3")
    tree.write(f"sys/devices/{NIC}/infiniband/rdmap0s3/ports/1/link_layer", "Unknown")
    (nic,) = nics(tree)
    assert (nic.name, nic.interfaces, nic.management) == ("rdmap0s3", (), False)
    assert nic.rdma_devices[0].ports == (model.RdmaPort(port=1, link_layer="Unknown"),)


def test_several_ports_are_read_each_for_itself(tree: pcitree.Tree) -> None:
    tree.class_device("infiniband", f"{NIC}/infiniband/mlx4_0")
    ports = f"sys/devices/{NIC}/infiniband/mlx4_0/ports"
    for port, state, physical, layer, rate in (
        (1, "4: ACTIVE", "5: LinkUp", "InfiniBand", "56 Gb/sec (4X FDR)"),
        (2, "1: DOWN", "3: Disabled", "Ethernet", "2.5 Gb/sec (1X SDR)"),
        (10, "3: ARMED", "2: Polling", "InfiniBand", "0 Gb/sec"),
    ):
        for name, content in (("state", state), ("phys_state", physical), ("link_layer", layer), ("rate", rate)):
            tree.write(f"{ports}/{port}/{name}", content)
    tree.write(f"{ports}/11/rate", "as much as you like")
    assert rdma(tree)[WHERE] == [
        model.RdmaDevice(
            name="mlx4_0",
            ports=(
                model.RdmaPort(
                    port=1, state="ACTIVE", physical_state="LinkUp", link_layer="InfiniBand", rate_mbps=56_000
                ),
                model.RdmaPort(port=2, state="DOWN", physical_state="Disabled", link_layer="Ethernet", rate_mbps=2_500),
                model.RdmaPort(port=10, state="ARMED", physical_state="Polling", link_layer="InfiniBand"),
                model.RdmaPort(port=11),
            ),
        )
    ]
