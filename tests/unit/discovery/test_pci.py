# SPDX-License-Identifier: Apache-2.0
"""PCI functions from sysfs: which count, where they stand, bridges and their ports, and trees with something wrong."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from discovery import endpoints, errors, findings, model, network, pci, sysfs
from discovery.address import HostBridge, PciAddress, parse
from tests.fakes import pcitree
from tests.fakes.pcitree import DOWNSTREAM, GPU, NIC, NVME, ROOT, UPSTREAM

ROOT_PORT = "pci0000:15/0000:15:01.0"
SWITCH = f"{ROOT_PORT}/0000:16:00.0"
GPU_PATH = f"{SWITCH}/0000:17:00.0/0000:18:00.0"
NIC_PATH = f"{SWITCH}/0000:17:01.0/0000:19:00.0"


@pytest.fixture
def tree(tmp_path: Path) -> pcitree.Tree:
    tree = pcitree.Tree(tmp_path)
    for path, port in (
        (ROOT_PORT, ROOT),
        (SWITCH, UPSTREAM),
        (f"{SWITCH}/0000:17:00.0", DOWNSTREAM),
        (f"{SWITCH}/0000:17:01.0", DOWNSTREAM),
    ):
        tree.bridge(path, port)
    return tree


def find(tree: pcitree.Tree, *rdma: str) -> tuple[tuple[pci.Function, ...], list[tuple[str, str]]]:
    found = findings.Findings()
    functions = pci.functions(tree.files(), map(parse, rdma), found)
    return functions, [(finding.code, finding.subject) for finding in found.result()]


def locate(
    tree: pcitree.Tree,
) -> tuple[list[model.PciFunction | None], tuple[model.Bridge, ...], list[tuple[str, str]]]:
    found = findings.Findings()
    locator = pci.Locator(tree.files(), found)
    described = [locator.describe(function) for function in pci.functions(tree.files(), (), found)]
    return described, locator.bridges(), [(finding.code, finding.subject) for finding in found.result()]


def test_what_counts_and_as_what(tree: pcitree.Tree) -> None:
    tree.function("pci0000:00/0000:00:01.0", **{**GPU, "class": "0x030000"})
    tree.function("pci0000:00/0000:00:02.0", **GPU)
    tree.function("pci0000:00/0000:00:02.1", **{**GPU, "class": "0x040300"})  # its audio function
    tree.function("pci0000:00/0000:00:03.0", **{**GPU, "class": "0x068000"})
    tree.function("pci0000:00/0000:00:04.0", **NIC)
    tree.function("pci0000:00/0000:00:05.0", **{**NIC, "class": "0x020700"})
    tree.function(
        "pci0000:00/0000:00:06.0", **{**NIC, "vendor": "0x1ded", "class": "0x00ff00"}
    )  # RDMA without class 02
    tree.function("pci0000:00/0000:00:07.0", **NVME)
    tree.function("pci0000:00/0000:00:08.0", **{**GPU, "vendor": "0x1002"})  # another vendor's GPU
    tree.function("pci0000:00/0000:00:09.0", **{**NIC, "class": "0x0c0600"})  # InfiniBand, its RDMA device in a pod
    functions, noted = find(tree, "0000:00:06.0")
    assert [(function.address.device, function.kind.value) for function in functions] == [
        (1, "GPU"), (2, "GPU"), (3, "NVSwitch"), (4, "NIC"), (5, "NIC"), (6, "NIC"), (7, "NVMe"),
        (9, "NIC"),
    ]  # fmt: skip
    assert noted == []


def test_a_function_in_its_place(tree: pcitree.Tree) -> None:
    tree.function(
        GPU_PATH,
        **GPU,
        driver="nvidia",
        subsystem_vendor="0x10de",
        subsystem_device="0x16c1",
        max_link_width="16",
        current_link_width="8",
        max_link_speed="32.0 GT/s PCIe",
        current_link_speed="2.5 GT/s PCIe",
    )
    tree.link(f"sys/devices/{GPU_PATH}/iommu_group", "kernel/iommu_groups/42")
    tree.write("sys/kernel/iommu_groups/42/type", "DMA-FQ")
    (function,), bridges, noted = locate(tree)
    chain = tuple(parse(f"0000:{name}") for name in ("15:01.0", "16:00.0", "17:00.0"))
    assert function == model.PciFunction(
        address=parse("0000:18:00.0"),
        vendor_id=0x10DE,
        device_id=0x2330,
        class_code=0x030200,
        subsystem_vendor_id=0x10DE,
        subsystem_device_id=0x16C1,
        host_bridge=HostBridge("pci0000:15"),
        pcie_root=HostBridge("pci0000:15"),
        bridges=chain,
        numa_node=0,
        numa_source=model.Provenance.SYSFS,
        cpus=(0, 1, 2, 3),
        iommu_group=42,
        iommu_type="DMA-FQ",
        driver="nvidia",
        link=model.PcieLink(max_width=16, current_width=8, max_speed_gts=32.0, current_speed_gts=2.5),
    )
    assert [(bridge.pci.address, bridge.port_type, bridge.port_type_inferred) for bridge in bridges] == [
        (chain[0], model.PortType.ROOT, False),
        (chain[1], model.PortType.UPSTREAM, False),
        (chain[2], model.PortType.DOWNSTREAM, False),
    ]
    assert noted == []


def test_only_bridges_above_something_are_read(tree: pcitree.Tree) -> None:
    tree.function(NIC_PATH, **NIC)
    _, bridges, _ = locate(tree)
    assert [str(bridge.pci.address) for bridge in bridges] == ["0000:15:01.0", "0000:16:00.0", "0000:17:01.0"]
    assert [bridge.pci.switch for bridge in bridges] == [None, None, parse("0000:16:00.0")]


def test_without_privilege_port_types_are_inferred_and_it_is_said_once(tree: pcitree.Tree) -> None:
    for path in (ROOT_PORT, SWITCH, f"{SWITCH}/0000:17:00.0"):
        tree.write(f"sys/devices/{path}/config", pcitree.config(5, length=64))
    tree.function(GPU_PATH, **GPU)
    _, bridges, noted = locate(tree)
    assert [(bridge.port_type, bridge.port_type_inferred) for bridge in bridges] == [
        (model.PortType.ROOT, True),
        (model.PortType.UPSTREAM, True),
        (model.PortType.DOWNSTREAM, True),
    ]
    assert noted == [("pci-config-restricted", "sysfs")]


def test_a_bridge_that_no_longer_answers_keeps_its_identity_by_the_kernel(tree: pcitree.Tree) -> None:
    tree.write(f"sys/devices/{SWITCH}/config", b"\xff" * 256)
    tree.function(GPU_PATH, **GPU)
    _, bridges, noted = locate(tree)
    assert bridges[1].pci.vendor_id == 0x1000
    assert (bridges[1].port_type, bridges[1].port_type_inferred) == (model.PortType.UPSTREAM, True)
    assert noted == [("pci-config-unreadable", "0000:16:00.0")]


def test_a_conventional_bridge_has_no_port_type(tree: pcitree.Tree) -> None:
    tree.bridge("pci0000:00/0000:00:1e.0", None)
    tree.function("pci0000:00/0000:00:1e.0/0000:01:00.0", **NIC)
    _, bridges, noted = locate(tree)
    assert [(bridge.port_type, bridge.port_type_inferred) for bridge in bridges] == [(None, False)]
    assert noted == []


@pytest.mark.parametrize("node", ["-1", None, "1024", "99999999999"])
def test_an_unknown_numa_node_is_none_and_so_are_its_cpus(tree: pcitree.Tree, node: str | None) -> None:
    tree.function(GPU_PATH, **{**GPU, "numa_node": node, "local_cpulist": "0-255"})
    (function,), _, _ = locate(tree)
    assert function is not None
    assert (function.numa_node, function.numa_source, function.cpus) == (None, None, None)


@pytest.mark.parametrize(
    ("width", "speed"), [("0", "Unknown"), ("255", "Unknown speed"), (None, None), ("63", "fast"), ("-1", "")]
)
def test_an_unknown_link_is_none(tree: pcitree.Tree, width: str | None, speed: str | None) -> None:
    tree.function(GPU_PATH, **GPU, max_link_width=width, max_link_speed=speed)
    (function,), _, _ = locate(tree)
    assert function is not None
    assert function.link is None


def test_virtual_functions_of_gpus_are_left_out_and_of_nics_name_their_physical_function(tree: pcitree.Tree) -> None:
    tree.function(GPU_PATH, **GPU)
    virtual = GPU_PATH.replace("18:00.0", "18:00.4")
    tree.function(virtual, **GPU)
    tree.link(f"sys/devices/{virtual}/physfn", f"devices/{GPU_PATH}")
    tree.function(NIC_PATH, **NIC)
    nic = NIC_PATH.replace("19:00.0", "19:00.2")
    tree.function(nic, **NIC)
    tree.link(f"sys/devices/{nic}/physfn", f"devices/{NIC_PATH}")
    described, _, noted = locate(tree)
    assert [(str(f.address), f.physical_function) for f in described if f is not None] == [
        ("0000:18:00.0", None),
        ("0000:19:00.0", None),
        ("0000:19:00.2", parse("0000:19:00.0")),
    ]
    assert noted == [("gpu-virtual-functions", "0000:18:00.0")]


def test_a_function_that_the_bus_does_not_place_keeps_its_facts(tree: pcitree.Tree) -> None:
    for attribute, content in GPU.items():
        tree.write(f"sys/bus/pci/devices/0000:01:00.0/{attribute}", content)
    (function,), _, noted = locate(tree)
    assert function is not None
    assert (function.device_id, function.host_bridge, function.numa_node) == (0x2330, None, 0)
    assert noted == [("pci-path-unknown", "0000:01:00.0")]


def test_a_link_that_leaves_sysfs_is_not_followed(tree: pcitree.Tree, tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    (tree.sys / "bus/pci/devices/0000:01:00.0").symlink_to(tmp_path / "outside")
    assert find(tree) == ((), [])


@pytest.mark.parametrize("name", ["0000:1B:00.0", "nonsense", "0000:1b:20.0", "0000:1b:00.0.x"])
def test_a_name_that_is_no_address_is_a_finding(tree: pcitree.Tree, name: str) -> None:
    (tree.sys / "bus/pci/devices" / name).mkdir()
    tree.function(GPU_PATH, **GPU)
    functions, noted = find(tree)
    assert [str(function.address) for function in functions] == ["0000:18:00.0"]
    assert noted == [("sysfs-malformed", name)]


def test_one_broken_function_hides_no_other(tree: pcitree.Tree) -> None:
    tree.function(GPU_PATH, **GPU)
    tree.function("pci0000:00/0000:00:01.0", **{**GPU, "class": "what"})
    tree.function("pci0000:00/0000:00:02.0", **{**GPU, "vendor": "0x99999"})
    tree.function("pci0000:00/0000:00:03.0", **{**GPU, "device": None})
    tree.link("sys/bus/pci/devices/0000:00:04.0", "devices/pci0000:00/0000:00:04.0")  # on its way out
    described, _, noted = locate(tree)
    assert [f.address for f in described if f is not None] == [PciAddress(0, 0x18, 0, 0)]
    assert noted == [
        ("pci-identity", "0000:00:03.0"),
        ("sysfs-malformed", "0000:00:01.0"),
        ("sysfs-malformed", "0000:00:02.0"),
    ]


class Closed(sysfs.Sysfs):
    """Of which some files may not be read."""

    closed: tuple[str, ...] = ()

    def read(self, path: str, *, limit: int = sysfs.MAX_FILE_BYTES) -> bytes | None:
        if path.endswith(self.closed):
            raise errors.SourceError("sysfs", "eacces", f"/{path} cannot be read: Permission denied")
        return super().read(path, limit=limit)


def test_no_gpu_and_a_function_that_cannot_be_read_is_no_machine_without_gpus(tree: pcitree.Tree) -> None:
    tree.function(NIC_PATH, **NIC)
    files = Closed(sys=tree.sys, proc=tree.proc)
    files.closed = ("0000:15:01.0/class",)
    with pytest.raises(
        errors.ProbeError, match=r"1 PCI functions.*15:01.0/class cannot be read.*the right to read /sys"
    ):
        pci.functions(files, (), findings.Findings())
    tree.function(GPU_PATH, **GPU)
    found = findings.Findings()
    assert [function.kind for function in pci.functions(files, (), found)] == [pci.Kind.GPU, pci.Kind.NIC]
    assert found.result() != ()


def test_functions_that_cannot_be_listed_end_the_look(tree: pcitree.Tree) -> None:
    class Unlisted(sysfs.Sysfs):
        def names(self, path: str) -> tuple[str, ...]:
            raise errors.SourceError("sysfs", "eio", f"/{path} cannot be read: Input/output error")

    with pytest.raises(errors.ProbeError, match=r"cannot be listed: /sys/bus/pci/devices"):
        pci.functions(Unlisted(sys=tree.sys, proc=tree.proc), (), findings.Findings())


def test_a_link_that_is_no_text_costs_its_function_only(tree: pcitree.Tree) -> None:
    tree.function(GPU_PATH, **GPU)
    other = GPU_PATH.replace("18:00.0", "18:00.4")
    tree.function(other, **GPU)
    os.symlink(b"\xff\xfe", os.fsencode(tree.sys / "devices" / other / "physfn"))  # noqa: PTH211 - bytes
    functions, noted = find(tree)
    assert [str(function.address) for function in functions] == ["0000:18:00.0"]
    assert noted == [("sysfs-malformed", "0000:18:00.4")]


def test_devices_of_a_class_find_their_function_through_a_bus_in_between(tree: pcitree.Tree) -> None:
    tree.function("pci0000:00/0000:00:03.0", **NIC)
    tree.class_device("net", "pci0000:00/0000:00:03.0/virtio2/net/eth0")
    tree.class_device("net", "virtual/net/lo")
    found = findings.Findings()
    devices = endpoints.class_devices(tree.files(), "net", found)
    assert {str(where): [device.name for device in there] for where, there in devices.items()} == {
        "0000:00:03.0": ["eth0"]
    }


def test_interfaces_and_rdma_devices(tree: pcitree.Tree) -> None:
    tree.class_device("net", f"{NIC_PATH}/net/eth0")
    tree.class_device("infiniband", f"{NIC_PATH}/infiniband/mlx5_0")
    for name, content in (("operstate", "up"), ("speed", "400000"), ("type", "1"), ("mtu", "9000")):
        tree.write(f"sys/devices/{NIC_PATH}/net/eth0/{name}", content)
    port = f"sys/devices/{NIC_PATH}/infiniband/mlx5_0/ports"
    for name, content in (
        ("state", "4: ACTIVE"), ("phys_state", "5: LinkUp"), ("link_layer", "Ethernet"), ("rate", "400 Gb/sec (4X NDR)"),
    ):  # fmt: skip
        tree.write(f"{port}/1/{name}", content)
    tree.write(f"{port}/2/state", "nonsense")
    tree.write(f"{port}/x/state", "4: ACTIVE")
    found = findings.Findings()
    (net,) = endpoints.class_devices(tree.files(), "net", found)[parse("0000:19:00.0")]
    (rdma,) = endpoints.class_devices(tree.files(), "infiniband", found)[parse("0000:19:00.0")]
    assert endpoints.interface(net, network.Stack(tree.files(), found)) == model.NetworkInterface(
        name="eth0", operstate="up", speed_mbps=400_000, link_type=1, mtu=9000
    )
    assert endpoints.rdma_device(rdma) == model.RdmaDevice(
        name="mlx5_0",
        ports=(
            model.RdmaPort(port=1, state="ACTIVE", physical_state="LinkUp", link_layer="Ethernet", rate_mbps=400_000),
            model.RdmaPort(port=2),
        ),
    )
    tree.write(f"sys/devices/{NIC_PATH}/net/eth0/speed", "-1")
    assert endpoints.interface(net, network.Stack(tree.files(), found)).speed_mbps is None
