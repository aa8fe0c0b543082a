# SPDX-License-Identifier: Apache-2.0
"""The chain of a function from its path, port types from configuration space or by place, and the switches of a chain."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from discovery import pcie
from discovery.address import HostBridge, PciAddress, parse
from discovery.model import Bridge, PciFunction, PortType
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
    assert read(pcitree.config(number)).port is port


def read(config: bytes) -> pcie.Registers:
    return pcie.read_bridge(pcitree.reader(config))


def test_why_configuration_space_tells_nothing() -> None:
    looping = bytearray(pcitree.config(5))
    looping[0x41] = 0x40
    outside = bytearray(pcitree.config(5))
    outside[0x34] = 0x10
    assert read(pcitree.config(5, length=64)).port is pcie.ConfigGap.RESTRICTED
    assert read(pcitree.config(None)).port is pcie.ConfigGap.CONVENTIONAL
    assert read(b"\xff" * 256).port is pcie.ConfigGap.DEAD
    assert read(b"").port is pcie.ConfigGap.MALFORMED
    assert read(bytes(looping)).port is pcie.ConfigGap.MALFORMED
    assert read(bytes(outside)).port is pcie.ConfigGap.MALFORMED


@given(st.binary(max_size=300), st.binary(max_size=3900))
def test_any_bytes_are_registers(head: bytes, tail: bytes) -> None:
    read(head)
    registers = read(pcitree.config(6) + tail)
    assert registers.port is PortType.DOWNSTREAM
    assert registers.identity == (0x1000, 0xC030, 0x060400)


def test_the_identity_in_configuration_space() -> None:
    assert read(pcitree.config(4)).identity == (0x1000, 0xC030, 0x060400)
    assert read(b"\xff" * 64).identity is None
    assert read(b"short").identity is None


def test_the_subsystem_of_a_bridge_is_a_capability() -> None:
    assert read(pcitree.config(5, subsystem=(0x1000, 0xA00B))).subsystem == (0x1000, 0xA00B)
    assert read(pcitree.config(5)).subsystem is None
    config = bytearray(pcitree.config(5, subsystem=(0x1000, 0xA00B)))
    config[0x41] = 0xFC  # at the very end, where its fields do not fit
    config[0xFC] = 0x0D
    assert read(bytes(config)).subsystem is None


@pytest.mark.parametrize(
    ("control", "redirects"),
    [
        (0x1D, True),  # what the kernel turns on
        (0x00, False),
        (0x19, False),  # completions only
        (0x04, True),
        (0x24, True),  # egress control, and all is redirected anyway
        (0x20, None),  # egress control: a vector decides
        (None, False),  # there is no such capability
    ],
)
@pytest.mark.parametrize("port", [4, 5, 6])
def test_access_control_tells_what_is_redirected(port: int, control: int | None, redirects: bool | None) -> None:
    assert read(pcitree.config(port, extended=True, access=control)).redirects is redirects


def test_where_access_control_is_not_readable_nothing_is_known() -> None:
    whole = pcitree.config(6, extended=True, access=0x1D)
    assert read(whole[:64]).redirects is None
    assert read(whole[:256]).redirects is None
    assert read(whole[:0x144]).redirects is None
    assert read(pcitree.config(None)).redirects is False
    assert read(b"\xff" * 4096).redirects is None
    dead = bytearray(whole)
    dead[0x140:] = b"\xff" * (4096 - 0x140)
    assert read(bytes(dead)).redirects is None


@pytest.mark.parametrize("following", [0x100, 0x140, 0x080, 0xFFC, 0xFF8, 0x004])
def test_a_list_of_extended_capabilities_that_goes_nowhere_ends(following: int) -> None:
    config = bytearray(pcitree.config(6, extended=True, access=None))
    config[0x140:0x144] = (following << 20 | 0x10002).to_bytes(4, "little")
    assert read(bytes(config)).redirects is (False if following == 0xFF8 else None)


def test_few_words_of_configuration_space_are_asked_for() -> None:
    asked: list[tuple[int, int]] = []
    config = pcitree.config(6, extended=True, access=0x1D)

    def reader(offset: int, size: int) -> bytes:
        asked.append((offset, size))
        return config[offset : offset + size]

    pcie.read_bridge(reader)
    assert asked == [(0, 256), (0x100, 8), (0x140, 8)]


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


def chained(*parts: tuple[int, int, int] | None) -> dict[PciAddress, Bridge]:
    """A root port, and for each of `parts` a switch: device id, subsystem vendor and device; None for one of another maker."""
    bridges: dict[PciAddress, Bridge] = {}
    above: tuple[PciAddress, ...] = ()

    def add(port: PortType, part: tuple[int, int, int] | None) -> None:
        nonlocal above
        where = PciAddress(0, len(above) + 1, 0, 0)
        device, vendor, subsystem = part or (0x8796, 0x10B5, 0x8796)
        pci = PciFunction(
            address=where,
            vendor_id=0x10B5 if part is None else 0x1000,
            device_id=device,
            class_code=0x060400,
            subsystem_vendor_id=vendor,
            subsystem_device_id=subsystem,
            bridges=above,
        )
        bridges[where] = Bridge(pci=pci, port_type=port)
        above = (*above, where)

    add(PortType.ROOT, None)
    for part in parts:
        add(PortType.UPSTREAM, part)
        add(PortType.DOWNSTREAM, part)
    return bridges


GEN4 = (0xC010, 0x1000, 0xA01B)
GEN5_OUTER, GEN5_INNER = (0xC030, 0x1000, 0x001B), (0xC030, 0x1000, 0x101B)


@pytest.mark.parametrize(
    ("parts", "inner"),
    [
        ((GEN4, GEN4), [4]),
        ((GEN5_OUTER, GEN5_INNER), [4]),
        ((GEN5_INNER, GEN5_OUTER), []),  # what stands the other way round are two
        ((GEN5_OUTER, GEN5_OUTER), []),
        ((GEN4, GEN5_INNER), []),
        ((GEN4, GEN4, GEN4), [4]),  # a part has two levels, no more
        ((GEN4, GEN4, GEN4, GEN4), [4, 8]),
        ((GEN5_OUTER, GEN5_INNER, GEN5_OUTER, GEN5_INNER), [4, 8]),
        ((None, GEN4, GEN4), [6]),
        ((GEN4, None, GEN4), []),
        ((None, None), []),
        (((0xC010, 0x15D9, 0xA01B),) * 2, []),  # of another maker's board
        (((0xC012, 0x1000, 0xA01B),) * 2, []),  # a device of which nobody says so
        (((0xC030, 0x1000, 0x100B),), []),
    ],
)
def test_a_part_that_shows_two_levels_is_one_switch(
    parts: tuple[tuple[int, int, int] | None, ...], inner: list[int]
) -> None:
    bridges = chained(*parts)
    found = pcie.second_levels(bridges)
    assert sorted(where.bus for where in found) == inner
    ports = {where: bridge.port_type for where, bridge in bridges.items()}
    assert len(pcie.switches(tuple(bridges), ports, found)) == len(parts) - len(inner)


def test_a_second_level_whose_first_is_not_seen_is_a_switch() -> None:
    bridges = chained(GEN4, GEN4)
    del bridges[PciAddress(0, 2, 0, 0)]
    assert pcie.second_levels(bridges) == frozenset()
