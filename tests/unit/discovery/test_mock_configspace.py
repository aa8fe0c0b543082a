# SPDX-License-Identifier: Apache-2.0
"""Configuration space of mock functions, read as the specification says and as the prober does."""

from __future__ import annotations

import pytest

from discovery import model, pcie
from discovery.mock import configspace
from discovery.mock.recording import Tree
from tests.fakes import mockmachine, pcitree


def _config(pci: object, *changes: tuple[str, str]) -> bytes:
    tree = Tree(mockmachine.parsed(*changes).files)
    config = tree.files[f"{tree.function(pci)}/config"]
    assert isinstance(config, bytes)
    return config


def _word(config: bytes, offset: int, size: int = 2) -> int:
    return int.from_bytes(config[offset : offset + size], "little")


@pytest.mark.parametrize(
    ("pci", "buses"),
    [
        ("0000:15:01.0", (0x15, 0x16, 0x1A)),
        ("0000:16:00.0", (0x16, 0x17, 0x1A)),
        ("0000:17:01.0", (0x17, 0x19, 0x19)),
        ("0000:80:01.0", (0x80, 0x81, 0x81)),
    ],
)
def test_bridges_have_true_bus_numbers(pci: str, buses: tuple[int, int, int]) -> None:
    config = _config(pci)
    assert config[0x0E] & 0x7F == 1
    assert tuple(config[0x18:0x1B]) == buses


@pytest.mark.parametrize(
    ("pci", "port"),
    [
        ("0000:15:01.0", model.PortType.ROOT),
        ("0000:16:00.0", model.PortType.UPSTREAM),
        ("0000:17:00.0", model.PortType.DOWNSTREAM),
    ],
)
def test_the_prober_reads_the_port_types(pci: str, port: model.PortType) -> None:
    assert pcie.read_bridge(pcitree.reader(_config(pci))).port is port


def test_an_endpoint_says_who_it_is() -> None:
    config = _config(mockmachine.GPU0)
    assert len(config) == configspace.SIZE
    assert (_word(config, 0), _word(config, 2), _word(config, 0x2C), _word(config, 0x2E)) == (
        0x10DE,
        0x2330,
        0x10DE,
        0x16C1,
    )
    assert _word(config, 8, 4) == 0x030200A1
    assert config[0x0E] == 0


def test_the_link_is_what_sysfs_says() -> None:
    """A Gen 4 x4 drive behind a Gen 5 x16 port: the drive's own limits, and what both can do."""
    drive, port = _config(mockmachine.NVME), _config("0000:80:01.0")
    express = drive.index(b"\x10\x00", 0x60)
    assert _word(drive, express + 0x0C, 4) & 0x3FF == 4 << 4 | 4
    assert _word(drive, express + 0x12) & 0x3FF == 4 << 4 | 4
    assert _word(port, express + 0x0C, 4) & 0x3FF == 16 << 4 | 5
    assert _word(port, express + 0x12) & 0x3FF == 4 << 4 | 4


def test_a_device_of_several_functions_says_so() -> None:
    config = _config(mockmachine.NIC, ("connectx-7-400g-ib", "connectx-7-200g-dual"))
    assert config[0x0E] == 0x80


def test_ports_say_what_they_redirect() -> None:
    """Root ports and downstream ports have access control services; the host says what they do, a slot otherwise."""
    redirecting = (
        "rootPort: intel-sapphire-rapids-root-port",
        "rootPort: intel-sapphire-rapids-root-port, acsRedirect: true",
    )
    but_one = ("{nic: connectx-7-400g-ib}", "{nic: connectx-7-400g-ib, acsRedirect: false}")
    ports = ("0000:15:01.0", "0000:17:00.0", "0000:17:02.0")
    for changes, expected in (
        ((), (False,) * 3),
        ((redirecting,), (True,) * 3),
        ((redirecting, but_one), (True, True, False)),
    ):
        configs = [_config(pci, *changes) for pci in ports]
        assert {len(config) for config in configs} == {configspace.EXTENDED_SIZE}
        assert tuple(pcie.read_bridge(pcitree.reader(config)).redirects for config in configs) == expected
    assert len(_config("0000:16:00.0")) == configspace.SIZE


def test_the_subsystem_of_a_bridge_is_where_the_prober_looks() -> None:
    assert pcie.read_bridge(pcitree.reader(_config("0000:16:00.0"))).subsystem == (0x1000, 0x100B)
    assert pcie.read_bridge(pcitree.reader(_config("0000:15:01.0"))).subsystem is None
