# SPDX-License-Identifier: Apache-2.0
"""The SONAME of a shared library, from its dynamic section (System V ABI, chapter 5; 64-bit little-endian ELF).

The name under which programs look for a library does not follow from its file name: libnvidia-nvvm.so.580.65.06 is
libnvidia-nvvm.so.4, libnvidia-glcore.so.580.65.06 is itself. A link to it may be missing, as ldconfig makes those.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path

_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_PROGRAM = struct.Struct("<IIQQQQQQ")
_DYNAMIC = struct.Struct("<qQ")

_MAGIC_64_LE = b"\x7fELF\x02\x01"
_PT_LOAD, _PT_DYNAMIC = 1, 2
_DT_NULL, _DT_STRTAB, _DT_SONAME = 0, 5, 14
_PROGRAMS_MAX = 64
_DYNAMIC_MAX_BYTES = 64 << 10
_NAME_MAX_BYTES = 255


def read_soname(path: Path) -> str | None:
    """The SONAME, None where the file has none or is no such library. Raises OSError where it cannot be read."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return _soname(fd)
    finally:
        os.close(fd)


def _soname(fd: int) -> str | None:
    header = os.pread(fd, _HEADER.size, 0)
    if len(header) < _HEADER.size or not header.startswith(_MAGIC_64_LE):
        return None
    fields = _HEADER.unpack(header)
    offset, size, count = fields[5], fields[9], fields[10]
    if size != _PROGRAM.size or count > _PROGRAMS_MAX:
        return None
    table = _read(fd, offset, size * count)
    programs = [_PROGRAM.unpack_from(table, place) for place in range(0, len(table) - size + 1, size)]
    dynamic = next((program for program in programs if program[0] == _PT_DYNAMIC), None)
    if dynamic is None:
        return None
    section = _read(fd, dynamic[2], min(dynamic[5], _DYNAMIC_MAX_BYTES))
    entries: dict[int, int] = {}
    for tag, value in _DYNAMIC.iter_unpack(section[: len(section) // _DYNAMIC.size * _DYNAMIC.size]):
        if tag == _DT_NULL:
            break
        entries.setdefault(tag, value)
    if _DT_SONAME not in entries or _DT_STRTAB not in entries:
        return None
    strings = entries[_DT_STRTAB]
    for kind, _, in_file, in_memory, _, file_size, _, _ in programs:
        if kind == _PT_LOAD and in_memory <= strings < in_memory + file_size:
            text = _read(fd, in_file + strings - in_memory + entries[_DT_SONAME], _NAME_MAX_BYTES + 1)
            name, end, _ = text.partition(b"\0")
            return name.decode() if end and name.isascii() and name and b"/" not in name else None
    return None


def _read(fd: int, offset: int, length: int) -> bytes:
    """Bytes of the file; fewer or none where a made-up offset points out of it."""
    return os.pread(fd, length, offset) if 0 <= offset < 1 << 62 else b""
