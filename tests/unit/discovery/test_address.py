# SPDX-License-Identifier: Apache-2.0
"""PCI addresses: one spelling out, the spellings of kernel and NVML in, order as the kernel numbers them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from discovery import address
from discovery.address import PciAddress

ADDRESSES = st.builds(
    PciAddress,
    domain=st.integers(0, 0xFFFFFFFF),
    bus=st.integers(0, 0xFF),
    device=st.integers(0, 0x1F),
    function=st.integers(0, 7),
)


@given(ADDRESSES)
def test_what_is_written_is_read_again(where: PciAddress) -> None:
    assert address.parse(str(where)) == where
    assert address.parse(str(where).upper()) == where


@given(ADDRESSES)
def test_nvml_spells_the_same_address(where: PciAddress) -> None:
    spelled = f"{where.domain:08X}:{where.bus:02X}:{where.device:02X}.{where.function:X}"
    assert address.parse(spelled) == where


@given(ADDRESSES, ADDRESSES)
def test_labels_tell_addresses_apart(a: PciAddress, b: PciAddress) -> None:
    assert (a.label == b.label) == (a == b)


@given(st.text())
def test_any_other_text_is_refused_by_name(text: str) -> None:
    with pytest.raises(ValueError, match="is not a PCI address"):
        address.parse(text + "x")


def test_domains_of_vmd_have_more_digits() -> None:
    assert str(address.parse("10000:e1:00.0")) == "10000:e1:00.0"
    assert address.parse("0000:01:00") == PciAddress(0, 1, 0, 0)


@pytest.mark.parametrize("text", ["pci0000:3a", "pci10000:e0"])
def test_host_bridges(text: str) -> None:
    assert address.parse_host_bridge(text) == text


@pytest.mark.parametrize("text", ["0000:3a", "pci0000:3A", "pci0000:3a:00.0", "pci000:3a", "pci_bus", ""])
def test_what_is_no_host_bridge(text: str) -> None:
    assert address.parse_host_bridge(text) is None
