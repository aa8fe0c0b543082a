# SPDX-License-Identifier: Apache-2.0
"""Vital product data: what a card says of itself, as the kernel shows it in `vpd` (PCI Local Bus specification 3.0, appendix I).
Pure, and strict: data that contradict themselves name nothing.
"""

from __future__ import annotations

import string
from dataclasses import dataclass

MAX_BYTES = 1 << 15
"""What its address register can reach."""

_LARGE = 0x80
_READ_ONLY = 0x90
_END = 0x0F
_TEXT = frozenset(string.printable.encode()) - frozenset(b"\t\n\r\x0b\x0c")
_KEYWORD = frozenset((string.ascii_uppercase + string.digits).encode())


@dataclass(frozen=True, slots=True, kw_only=True)
class Vpd:
    """What tells a card from others: the serial number of its board, and on NVIDIA's NICs the UUID in vendor field V3, which
    all functions of one NIC have and those of another on the same board have not.
    """

    serial: str | None = None
    unique: str | None = None


def parse(data: bytes) -> Vpd:
    """The read-only fields. Raises ValueError, which says what is wrong with them: a length that leaves the data, a list
    without end, no checksum or a wrong one, a field twice, or one that is no text.
    """
    if len(data) > MAX_BYTES:
        raise ValueError(f"is longer than {MAX_BYTES} bytes")
    fields: dict[bytes, bytes] | None = None
    at = 0
    while True:
        if at >= len(data):
            raise ValueError("has no end tag")
        tag = data[at]
        if not tag & _LARGE:
            if tag >> 3 != _END:
                raise ValueError(f"has tag {tag:#04x} where none may be")
            break
        start = at + 3
        if start > len(data):
            raise ValueError("ends inside a tag")
        at = start + int.from_bytes(data[at + 1 : start], "little")
        if at > len(data):
            raise ValueError(f"has a length of tag {tag:#04x} that leaves it")
        if tag == _READ_ONLY:
            if fields is not None:
                raise ValueError("has two read-only areas")
            fields = _fields(data, start, at)
    if fields is None:
        raise ValueError("has no read-only area")
    return Vpd(serial=_text(fields, b"SN"), unique=_text(fields, b"V3"))


def _fields(data: bytes, at: int, end: int) -> dict[bytes, bytes]:
    """The fields up to RV, whose first byte makes the sum of all bytes up to it 0."""
    fields: dict[bytes, bytes] = {}
    while at + 3 <= end:
        keyword, value = data[at : at + 2], at + 3
        at = value + data[at + 2]
        if at > end:
            raise ValueError("has a field that leaves the read-only area")
        if not _KEYWORD.issuperset(keyword) or keyword in fields:
            raise ValueError(f"has field {keyword!r}, which is no keyword or is there twice")
        if keyword == b"RV":
            if value == at or sum(data[: value + 1]) & 0xFF:
                raise ValueError("has a wrong checksum")
            return fields
        fields[keyword] = data[value:at]
    raise ValueError("has no checksum")


def _text(fields: dict[bytes, bytes], keyword: bytes) -> str | None:
    value = fields.get(keyword, b"").rstrip(b"\0 ").lstrip(b" ")
    if not _TEXT.issuperset(value):
        raise ValueError(f"has a field {keyword.decode()} that is no text")
    return value.decode() or None
