# SPDX-License-Identifier: Apache-2.0
"""The chain of a function from its path, port types from configuration space or by place, and the switches of a chain."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from discovery import pcie
from discovery.address import HostBridge, parse
from discovery.model import PortType
from tests.fakes import pcitree


def chain(path: str) -> pcie.Chain:
    components = path.split("/")
    return pcie.parse_chain(parse(components[-1]), components)


def test_a_plain_chain() -> None:
    assert chain("pci0000:15/0000:15:01.0/0000:16:00.0/0000:17:00.0/0000:18:00.0") == pcie.Chain(
        host_bridge=HostBridge("pci0000:15"),
        pcie_root=HostBridge("pci0000:15"),
        bridges=(parse("0000:15:01.0"), parse("0000:16:00.0"), parse("0000:17:00.0")),
    )


def test_behind_vmd_the_second_host_bridge_counts_and_there_is_no_pcie_root() -> None:
    assert chain("pci0000:00/0000:00:0e.0/pci10000:e0/10000:e0:06.0/10000:e1:00.0") == pcie.Chain(
        host_bridge=HostBridge("pci10000:e0"), bridges=(parse("10000:e0:06.0"),)
    )


@pytest.mark.parametrize(
    "path",
    [
        "LNXSYSTM:00/LNXSYBUS:00/ACPI0004:00/VMBUS:00/47505500-0001/pci0001:00/0001:00:00.0",
        "platform/soc/40000000.pcie/pci0001:00/0001:00:00.0",
    ],
)
def test_below_vmbus_or_a_platform_device_there_is_a_host_bridge_but_no_pcie_root(path: str) -> None:
    assert chain(path) == pcie.Chain(host_bridge=HostBridge("pci0001:00"))


@pytest.mark.parametrize("path", ["pci0000:00/whatever/0000:01:00.0", "virtual/0000:01:00.0", "0000:01:00.0"])
def test_a_path_that_is_no_chain_tells_nothing(path: str) -> None:
    assert chain(path) == pcie.Chain()


def test_a_path_that_ends_elsewhere_tells_nothing() -> None:
    assert pcie.parse_chain(parse("0000:02:00.0"), ["pci0000:00", "0000:01:00.0"]) == pcie.Chain()
    assert pcie.parse_chain(parse("0000:02:00.0"), []) == pcie.Chain()


@pytest.mark.parametrize(
    ("number", "port"),
    [
        (4, PortType.ROOT),
        (5, PortType.UPSTREAM),
        (6, PortType.DOWNSTREAM),
        (7, PortType.PCIE_TO_PCI),
        (8, PortType.PCI_TO_PCIE),
        (9, pcie.ConfigGap.MALFORMED),
    ],
)
def test_the_capability_tells_the_port_type(number: int, port: PortType | pcie.ConfigGap) -> None:
    assert pcie.parse_port_type(pcitree.config(number)) is port


def test_why_configuration_space_tells_nothing() -> None:
    looping = bytearray(pcitree.config(5))
    looping[0x41] = 0x40
    outside = bytearray(pcitree.config(5))
    outside[0x34] = 0x10
    assert pcie.parse_port_type(pcitree.config(5, length=64)) is pcie.ConfigGap.RESTRICTED
    assert pcie.parse_port_type(pcitree.config(None)) is pcie.ConfigGap.CONVENTIONAL
    assert pcie.parse_port_type(b"\xff" * 256) is pcie.ConfigGap.DEAD
    assert pcie.parse_port_type(b"") is pcie.ConfigGap.MALFORMED
    assert pcie.parse_port_type(bytes(looping)) is pcie.ConfigGap.MALFORMED
    assert pcie.parse_port_type(bytes(outside)) is pcie.ConfigGap.MALFORMED


@given(st.binary(max_size=300))
def test_any_bytes_are_a_port_type_or_a_gap(config: bytes) -> None:
    assert isinstance(pcie.parse_port_type(config), PortType | pcie.ConfigGap)
    pcie.parse_identity(config)


def test_the_identity_in_configuration_space() -> None:
    assert pcie.parse_identity(pcitree.config(4)) == (0x1000, 0xC030, 0x060400)
    assert pcie.parse_identity(b"\xff" * 64) is None
    assert pcie.parse_identity(b"short") is None


A, B, C, D, E = (parse(f"0000:0{i}:00.0") for i in range(1, 6))


def test_without_any_type_a_root_port_and_pairs_are_inferred() -> None:
    assert pcie.infer_port_types((A, B, C, D, E), {}) == {
        A: PortType.ROOT,
        B: PortType.UPSTREAM,
        C: PortType.DOWNSTREAM,
        D: PortType.UPSTREAM,
        E: PortType.DOWNSTREAM,
    }


def test_a_known_type_sets_the_place_of_those_below() -> None:
    assert pcie.infer_port_types((A, B, C), {A: PortType.UPSTREAM}) == {B: PortType.DOWNSTREAM, C: PortType.UPSTREAM}


def test_below_a_conventional_bridge_nothing_is_inferred() -> None:
    assert pcie.infer_port_types((A, B, C), {B: None}) == {A: PortType.ROOT}
    assert pcie.infer_port_types((A, B), {A: PortType.PCIE_TO_PCI}) == {}


def test_switches_are_upstream_ports_innermost_first() -> None:
    ports = {A: PortType.ROOT, B: PortType.UPSTREAM, C: PortType.DOWNSTREAM, D: PortType.UPSTREAM, E: None}
    assert pcie.switches((A, B, C, D, E), ports) == (D, B)
    assert pcie.switches((A,), {}) == ()
