# SPDX-License-Identifier: Apache-2.0
"""Vital product data of a mock card, in the layout of the PCI Local Bus specification 3.0, appendix I, with the keywords of
NVIDIA's NICs as lspci prints them: SN the serial number of the board, V3 the UUID of the card, RV the checksum.
"""

from __future__ import annotations

from discovery.mock import identity

_NAME = 0x82
_READ_ONLY = 0x90
_END = 0x78


def data(machine: str, card: str, name: str) -> bytes:
    """The vital product data that all functions of a card show. `card` is any word: the same word is the same card."""
    serial = "MT" + identity.number_of(machine, "vpd", card, digits=11)
    unique = identity.uuid_of(machine, "vpd", card).replace("-", "")
    return build(name, {"SN": serial, "V3": unique})


def build(name: str, fields: dict[str, str]) -> bytes:
    """A name and read-only fields. The byte of RV makes the sum of everything up to it 0."""
    keywords = b"".join(_keyword(keyword, value.encode()) for keyword, value in fields.items())
    length = len(keywords) + len(_keyword("RV", b"\0"))
    head = _resource(_NAME, name.encode()) + bytes((_READ_ONLY, *length.to_bytes(2, "little"))) + keywords + b"RV\x01"
    return head + bytes((-sum(head) & 0xFF, _END))


def _resource(tag: int, content: bytes) -> bytes:
    return bytes((tag, *len(content).to_bytes(2, "little"))) + content


def _keyword(keyword: str, value: bytes) -> bytes:
    return keyword.encode() + bytes((len(value),)) + value
