# SPDX-License-Identifier: Apache-2.0
"""Machines that are put together oddly, by the real probe: domains of VMD, devices on their way out, drivers of all kinds,
virtual functions, devices of several functions, conventional bridges, functions without a place, switches of two levels.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from discovery import check, model, paths, probe
from discovery.address import HostBridge, PciAddress, parse
from discovery.model import LinkLimit, PathClass, PortType
from discovery.options import ProbeOptions
from tests.fakes import pcitree
from tests.fakes.nvmllib import FakeLibrary
from tests.fakes.pcitree import DOWNSTREAM, GPU, NIC, NVME, ROOT, UPSTREAM

RP = "pci0000:15/0000:15:01.0"
SWITCH = f"{RP}/0000:16:00.0"
GPU_AT, NIC_AT = f"{SWITCH}/0000:17:00.0/0000:18:00.0", f"{SWITCH}/0000:17:01.0/0000:19:00.0"
X16 = {
    "max_link_width": "16",
    "current_link_width": "16",
    "max_link_speed": "32.0 GT/s PCIe",
    "current_link_speed": "32.0 GT/s PCIe",
}


@pytest.fixture
def tree(tmp_path: Path) -> pcitree.Tree:
    """One socket, and a GPU and a NIC on one switch whose ports say everything."""
    tree = pcitree.Tree(tmp_path)
    tree.cpus("0-3")
    tree.write("proc/meminfo", "MemTotal: 4 kB\nMemFree: 1 kB")
    tree.write("proc/1/net/dev", "Inter-|   Receive\n face |bytes    packets")
    for path, port, access in (
        (RP, ROOT, 0x1D), (SWITCH, UPSTREAM, None), (f"{SWITCH}/0000:17:00.0", DOWNSTREAM, 0), (f"{SWITCH}/0000:17:01.0", DOWNSTREAM, 0),
    ):  # fmt: skip
        tree.bridge(path, port, **X16, config=pcitree.config(port, extended=True, access=access))
    tree.function(GPU_AT, driver="nvidia", **GPU, **X16)
    tree.function(NIC_AT, driver="mlx5_core", **NIC, **X16)
    return tree


def look(tree: pcitree.Tree) -> model.Snapshot:
    snapshot = probe.Machine(
        files=tree.files(),
        dev=tree.dev,
        library=FakeLibrary(),
        origin=model.Origin.RECORDING,
        options=ProbeOptions(),
        clock=lambda: 0.0,
    ).probe()
    assert check.violations(snapshot) == ()
    assert "contradiction" not in {finding.code for finding in snapshot.findings}
    return snapshot


def path(snapshot: model.Snapshot, a: str, b: str) -> model.Path:
    pair = tuple(sorted((parse(a), parse(b))))
    return next(path for path in paths.between_all(snapshot) if (path.a, path.b) == pair)


def test_a_switch_whose_ports_say_everything(tree: pcitree.Tree) -> None:
    snapshot = look(tree)
    assert [(bridge.port_type, bridge.redirects) for bridge in snapshot.bridges] == [
        (PortType.ROOT, True), (PortType.UPSTREAM, False), (PortType.DOWNSTREAM, False), (PortType.DOWNSTREAM, False),
    ]  # fmt: skip
    (gpu,) = snapshot.gpus
    assert (gpu.pci.switches, gpu.pci.switch_source) == ((parse("0000:16:00.0"),), model.Provenance.SYSFS)
    assert gpu.pci.narrowest == LinkLimit(at=gpu.address, width=16, speed_gts=32.0)
    between = path(snapshot, "0000:18:00.0", "0000:19:00.0")
    assert (between.path_class, between.direct) == (PathClass.PIX, True)


def test_a_port_that_redirects_is_seen_and_said(tree: pcitree.Tree) -> None:
    tree.write(f"sys/devices/{SWITCH}/0000:17:01.0/config", pcitree.config(DOWNSTREAM, extended=True, access=0x1D))
    snapshot = look(tree)
    between = path(snapshot, "0000:18:00.0", "0000:19:00.0")
    assert (between.path_class, between.direct) == (PathClass.PIX, False)
    (finding,) = (finding for finding in snapshot.findings if finding.code == "peer-to-peer-redirected")
    assert finding.subject == "0000:16:00.0"
    assert "pci=disable_acs_redir=0000:17:01.0 " in finding.message


def test_without_privilege_nothing_is_said_of_redirects(tree: pcitree.Tree) -> None:
    for place in (RP, SWITCH, f"{SWITCH}/0000:17:00.0", f"{SWITCH}/0000:17:01.0"):
        config = tree.sys / "devices" / place / "config"
        config.write_bytes(config.read_bytes()[:64])
    snapshot = look(tree)
    assert {bridge.redirects for bridge in snapshot.bridges} == {None}
    assert path(snapshot, "0000:18:00.0", "0000:19:00.0").direct is None
    assert snapshot.gpus[0].pci.switch == parse("0000:16:00.0")


def test_a_narrow_link_above_a_switch_is_one_finding(tree: pcitree.Tree) -> None:
    tree.write(f"sys/devices/{SWITCH}/current_link_width", "8")
    snapshot = look(tree)
    assert [(finding.code, finding.subject) for finding in snapshot.findings if finding.code.startswith("pcie-")] == [
        ("pcie-link-narrow", "0000:16:00.0")
    ]
    assert snapshot.nics[0].pci.narrowest == LinkLimit(at=parse("0000:16:00.0"), width=8, speed_gts=32.0)


@pytest.mark.parametrize("domain", ["10000", "10001", "ffffffff"])
def test_behind_vmd_a_domain_of_its_own_begins(tree: pcitree.Tree, domain: str) -> None:
    below = f"pci0000:00/0000:00:0e.0/pci{domain}:e0"
    tree.function("pci0000:00/0000:00:0e.0", vendor="0x8086", device="0x28c0", **{"class": "0x010400"})
    tree.bridge(f"{below}/{domain}:e0:06.0", ROOT, **X16)
    tree.bridge(f"{below}/{domain}:e0:07.0", ROOT, **X16)
    tree.function(f"{below}/{domain}:e0:06.0/{domain}:e1:00.0", driver="nvme", **NVME, **X16)
    tree.function(f"{below}/{domain}:e0:07.0/{domain}:e2:00.0", driver="nvme", **{**NVME, "numa_node": "-1"})
    snapshot = look(tree)
    first, second = snapshot.nvmes
    assert (first.pci.host_bridge, first.pci.pcie_root) == (HostBridge(f"pci{domain}:e0"), None)
    assert first.pci.bridges == (parse(f"{domain}:e0:06.0"),)
    assert first.pci.narrowest == LinkLimit(at=first.address, width=16, speed_gts=32.0)
    between = path(snapshot, f"{domain}:e1:00.0", f"{domain}:e2:00.0")
    assert (between.path_class, between.direct) == (PathClass.PHB, False)
    assert path(snapshot, f"{domain}:e1:00.0", "0000:18:00.0").path_class is PathClass.NODE
    assert path(snapshot, f"{domain}:e2:00.0", "0000:18:00.0").path_class is PathClass.UNKNOWN
    assert second.pci.numa_node is None


def empty(place: Path) -> None:
    for entry in place.iterdir():
        if not entry.is_dir() or entry.is_symlink():
            entry.unlink()


def test_devices_on_their_way_out_take_nothing_with_them(tree: pcitree.Tree) -> None:
    """A function whose attributes are gone, one that the bus still links to, and a switch that no longer answers."""
    before = look(tree)
    tree.function(f"{RP}/0000:20:00.0", driver="nvidia", **GPU)
    empty(tree.sys / f"devices/{RP}/0000:20:00.0")
    tree.link("sys/bus/pci/devices/0000:21:00.0", f"devices/{RP}/0000:21:00.0")
    snapshot = look(tree)
    assert snapshot.gpus == before.gpus
    assert snapshot.findings == before.findings
    for place in (SWITCH, f"{SWITCH}/0000:17:00.0", f"{SWITCH}/0000:17:01.0"):
        tree.write(f"sys/devices/{place}/config", b"\xff" * 4096)
        for attribute in ("current_link_width", "max_link_width"):
            tree.write(f"sys/devices/{place}/{attribute}", "255")
    for attribute in ("current_link_width", "max_link_width"):
        tree.write(f"sys/devices/{GPU_AT}/{attribute}", "255")
    snapshot = look(tree)
    (gpu,) = snapshot.gpus
    assert [(bridge.port_type_inferred, bridge.redirects) for bridge in snapshot.bridges[1:]] == [(True, None)] * 3
    assert gpu.pci.switch == parse("0000:16:00.0")
    assert gpu.pci.narrowest is None
    assert gpu.pci.link == model.PcieLink(max_speed_gts=32.0, current_speed_gts=32.0)
    assert path(snapshot, "0000:18:00.0", "0000:19:00.0").direct is None


def test_a_bridge_of_which_nothing_is_left_leaves_the_rest(tree: pcitree.Tree) -> None:
    empty(tree.sys / "devices" / SWITCH)
    snapshot = look(tree)
    assert [str(bridge.pci.address) for bridge in snapshot.bridges] == ["0000:15:01.0", "0000:17:00.0", "0000:17:01.0"]
    (gpu,) = snapshot.gpus
    assert gpu.pci.bridges == tuple(parse(f"0000:{name}") for name in ("15:01.0", "16:00.0", "17:00.0"))
    assert (gpu.pci.switch, gpu.pci.switches, gpu.pci.switch_source, gpu.pci.narrowest) == (None, (), None, None)
    assert path(snapshot, "0000:18:00.0", "0000:19:00.0").direct is None
    assert ("pci-identity", "0000:16:00.0") in {(finding.code, finding.subject) for finding in snapshot.findings}


@pytest.mark.parametrize("code", ["0x030000", "0x030200"])
@pytest.mark.parametrize(
    ("driver", "state"),
    [
        ("nouveau", model.GpuState.FOREIGN_DRIVER),
        ("vfio-pci", model.GpuState.VFIO),
        (None, model.GpuState.NO_DRIVER),
    ],
)
def test_whatever_has_a_gpu_its_place_is_known(
    tree: pcitree.Tree, driver: str | None, state: model.GpuState, code: str
) -> None:
    (tree.sys / "devices" / GPU_AT / "driver").unlink()
    tree.write(f"sys/devices/{GPU_AT}/class", code)
    if driver is not None:
        tree.link(f"sys/devices/{GPU_AT}/driver", f"bus/pci/drivers/{driver}")  # which leads nowhere in this tree
    (gpu,) = look(tree).gpus
    assert (gpu.state, gpu.pci.driver, gpu.pci.switch) == (state, driver, parse("0000:16:00.0"))
    assert gpu.nic is not None
    assert (gpu.nic.address, gpu.nic.distance) == (parse("0000:19:00.0"), PathClass.PIX)


@pytest.mark.parametrize("target", ["", "/", "../..", "x" * 200])
def test_a_driver_link_that_is_none_is_no_driver_of_ours(tree: pcitree.Tree, target: str) -> None:
    link = tree.sys / "devices" / GPU_AT / "driver"
    link.unlink()
    if target:
        link.symlink_to(target)
    (gpu,) = look(tree).gpus
    assert gpu.state is not model.GpuState.READY


def test_virtual_functions_and_functions_of_one_card_are_of_one_place(tree: pcitree.Tree) -> None:
    tree.write(f"sys/devices/{NIC_AT}/current_link_width", "4")
    second, virtual = (NIC_AT.replace("19:00.0", f"19:00.{number}") for number in (1, 2))
    tree.function(second, driver="mlx5_core", **NIC, **{**X16, "current_link_width": "4"})
    tree.function(virtual, driver="vfio-pci", **{**NIC, "device": "0x101e"})
    tree.link(f"sys/devices/{virtual}/physfn", f"devices/{NIC_AT}")
    tree.link(f"sys/devices/{NIC_AT}/virtfn0", f"devices/{virtual}")
    snapshot = look(tree)
    assert [nic.pci.physical_function for nic in snapshot.nics] == [None, None, parse("0000:19:00.0")]
    assert {
        (path.a, path.b) for path in paths.between_all(snapshot) if parse("0000:19:00.2") in (path.a, path.b)
    } == set()
    between = path(snapshot, "0000:19:00.0", "0000:19:00.1")
    assert (between.path_class, between.direct) == (PathClass.PIX, None)
    narrow = [finding.subject for finding in snapshot.findings if finding.code == "pcie-link-narrow"]
    assert narrow == ["0000:19:00.0"]
    assert [gpu.nic and gpu.nic.ties for gpu in snapshot.gpus] == [(parse("0000:19:00.0"), parse("0000:19:00.1"))]


def test_behind_a_conventional_bridge(tree: pcitree.Tree) -> None:
    tree.bridge("pci0000:00/0000:00:1c.0", ROOT, **X16)
    tree.bridge("pci0000:00/0000:00:1c.0/0000:01:00.0", 7)  # PCI Express to PCI
    tree.bridge("pci0000:00/0000:00:1e.0", None)
    for place in (
        "0000:00:1c.0/0000:01:00.0/0000:02:01.0",
        "0000:00:1c.0/0000:01:00.0/0000:02:02.0",
        "0000:00:1e.0/0000:03:01.0",
    ):
        tree.function(f"pci0000:00/{place}", **NIC)
    snapshot = look(tree)
    for nic in snapshot.nics:
        if nic.pci.host_bridge == "pci0000:00":
            assert (nic.pci.narrowest, nic.pci.switches) == (None, ())
    between = path(snapshot, "0000:02:01.0", "0000:02:02.0")
    assert (between.path_class, between.direct) == (PathClass.PIX, None)
    assert path(snapshot, "0000:02:01.0", "0000:03:01.0").path_class is PathClass.PHB
    assert {bridge.pci.address: bridge.port_type for bridge in snapshot.bridges}[
        parse("0000:01:00.0")
    ] is PortType.PCIE_TO_PCI


def test_a_function_that_the_bus_lists_without_a_place_has_no_paths(tree: pcitree.Tree) -> None:
    for attribute, content in NVME.items():
        tree.write(f"sys/bus/pci/devices/0000:30:00.0/{attribute}", content)
    snapshot = look(tree)
    (nvme,) = snapshot.nvmes
    assert (nvme.pci.host_bridge, nvme.pci.bridges, nvme.pci.narrowest, nvme.pci.numa_node) == (None, (), None, 0)
    between = path(snapshot, "0000:18:00.0", "0000:30:00.0")
    assert (between.path_class, between.direct) == (PathClass.UNKNOWN, None)
    assert ("pci-path-unknown", "0000:30:00.0") in {(finding.code, finding.subject) for finding in snapshot.findings}


@pytest.mark.parametrize("restricted", [False, True])
def test_a_part_of_two_levels_is_one_switch_by_config_or_by_attributes(tree: pcitree.Tree, restricted: bool) -> None:
    outer = "pci0000:60/0000:60:01.0/0000:61:00.0"
    inner = f"{outer}/0000:62:00.0/0000:63:00.0"
    for place, port, subsystem in (
        ("pci0000:60/0000:60:01.0", ROOT, None), (outer, UPSTREAM, (0x1000, 0x002A)), (f"{outer}/0000:62:00.0", DOWNSTREAM, None),
        (f"{outer}/0000:62:01.0", DOWNSTREAM, None), (inner, UPSTREAM, (0x1000, 0x102A)), (f"{inner}/0000:64:00.0", DOWNSTREAM, None),
    ):  # fmt: skip
        config = pcitree.config(port, subsystem=subsystem, length=64 if restricted else None)
        ids = (
            {}
            if subsystem is None or not restricted
            else {"subsystem_vendor": "0x1000", "subsystem_device": f"0x{subsystem[1]:04x}"}
        )
        tree.bridge(place, port, config=config, **ids)
    tree.function(f"{inner}/0000:64:00.0/0000:65:00.0", **GPU)
    tree.function(f"{outer}/0000:62:01.0/0000:66:00.0", **NIC)
    snapshot = look(tree)
    gpu = snapshot.gpu(parse("0000:65:00.0"))
    assert gpu is not None
    nic = next(nic for nic in snapshot.nics if nic.address == PciAddress(0, 0x66, 0, 0))
    assert gpu.pci.switches == nic.pci.switches == (parse("0000:61:00.0"),)
    assert path(snapshot, "0000:65:00.0", "0000:66:00.0").path_class is PathClass.PXB  # as nvidia-smi says
