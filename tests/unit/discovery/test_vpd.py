# SPDX-License-Identifier: Apache-2.0
"""Vital product data: what is read, and that whatever contradicts itself names nothing."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from discovery import vpd
from discovery.mock import vital

CARD = vital.build(
    "NVIDIA ConnectX-8", {"PN": "900-9X81Q", "SN": "MT2521600001", "V3": "2c60caffaa17ef1180009c63c0d5edf6"}
)
AT_READ_ONLY = CARD.index(b"\x90")


def test_what_tells_a_card_from_others() -> None:
    assert vpd.parse(CARD) == vpd.Vpd(serial="MT2521600001", unique="2c60caffaa17ef1180009c63c0d5edf6")
    assert vpd.parse(CARD + b"\xff" * 100) == vpd.parse(CARD)  # what is behind the end tag is nobody's


@pytest.mark.parametrize("fields", [{}, {"SN": ""}, {"SN": "  \0"}, {"PN": "x"}])
def test_what_a_card_does_not_say_is_none(fields: dict[str, str]) -> None:
    assert vpd.parse(vital.build("", fields)) == vpd.Vpd()


def test_areas_that_are_not_asked_for_are_passed_over() -> None:
    writable = b"\x91\x05\x00YA\x02ab"
    assert vpd.parse(CARD[:-1] + writable + CARD[-1:]) == vpd.parse(CARD)


def spoiled(at: int, byte: int) -> bytes:
    return CARD[:at] + bytes((byte,)) + CARD[at + 1 :]


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"", "no end tag"),
        (CARD[:-1], "no end tag"),
        (b"\x78", "no read-only area"),
        (b"\x82", "ends inside a tag"),
        (b"\x82\x01", "ends inside a tag"),
        (b"\x82\xff\xff", "leaves it"),
        (b"\x00" * 64, "none may be"),
        (b"\xff" * 64, "leaves it"),
        (b"\x90\x00\x00\x78", "no checksum"),
        (b"\x90\x02\x00SN\x78", "no checksum"),
        (b"\x90\x03\x00SN\x09\x78", "leaves the read-only area"),
        (b"\x90\x03\x00RV\x00\x78", "wrong checksum"),
        (spoiled(AT_READ_ONLY + 8, 0x40), "wrong checksum"),
        (spoiled(AT_READ_ONLY + 3, 0x20), "no keyword"),
        (CARD[:-1] + CARD[AT_READ_ONLY:], "two read-only areas"),
        (CARD + b"\0" * vpd.MAX_BYTES, "longer than"),
    ],
)
def test_what_contradicts_itself_names_nothing(data: bytes, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        vpd.parse(data)


def test_a_field_that_is_there_twice_names_nothing() -> None:
    once = vital.build("", {"SN": "one"})
    twice = bytearray(once[:-5] + b"SN\x03two" + once[-5:])
    twice[twice.index(b"\x90") + 1] += 6
    twice[-2] = -sum(twice[:-2]) & 0xFF
    with pytest.raises(ValueError, match="twice"):
        vpd.parse(bytes(twice))


@pytest.mark.parametrize("value", ["tab\there", "bell\x07", "höher"])
def test_a_field_that_is_no_text_names_nothing(value: str) -> None:
    with pytest.raises(ValueError, match="no text"):
        vpd.parse(vital.build("", {"V3": value}))


@given(st.binary(max_size=200), st.integers(0, len(CARD)))
def test_any_bytes_are_data_or_a_value_error(data: bytes, at: int) -> None:
    for candidate in (data, CARD[:at] + data, data + CARD[at:]):
        try:
            told = vpd.parse(candidate)
        except ValueError:
            continue
        assert told in (vpd.Vpd(), vpd.parse(CARD)) or candidate != CARD


@given(st.integers(0, len(CARD) - 2), st.integers(1, 255))
def test_one_wrong_byte_never_gives_another_card(at: int, difference: int) -> None:
    """The checksum covers every byte up to its own."""
    with pytest.raises(ValueError, match=r"^(has|is|ends) "):
        vpd.parse(spoiled(at, CARD[at] ^ difference))
