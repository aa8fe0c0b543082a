# SPDX-License-Identifier: Apache-2.0
"""elf: the SONAME of a library. Aspects: real files, made-up files, broken files."""

from __future__ import annotations

import random
import struct
import sys
from pathlib import Path

import pytest

from driver.prepare import elf
from tests.fakes import driver_roots


def soname(tmp_path: Path, data: bytes) -> str | None:
    path = tmp_path / "lib.so"
    path.write_bytes(data)
    return elf.read_soname(path)


@pytest.mark.parametrize("machine", [62, 183])
def test_the_name_is_read(tmp_path: Path, machine: int) -> None:
    assert soname(tmp_path, driver_roots.library("libcuda.so.1", machine=machine)) == "libcuda.so.1"


def test_the_libraries_of_this_process_have_the_names_they_were_loaded_by() -> None:
    loaded = {Path(line.split()[-1]) for line in Path("/proc/self/maps").read_text().splitlines() if ".so" in line}
    names = {path: elf.read_soname(path) for path in loaded if path.name.startswith("libc.so")}
    assert names, "the C library is there"
    assert set(names.values()) == {"libc.so.6"}


@pytest.mark.parametrize(
    "data", [b"", b"#!/bin/sh\n", b"\x7fELF", b"\x7fELF\x01\x01" + bytes(200), b"\x7fELF\x02\x02" + bytes(200)]
)
def test_other_files_have_none(tmp_path: Path, data: bytes) -> None:
    assert soname(tmp_path, data) is None


def test_a_library_without_a_name_has_none(tmp_path: Path) -> None:
    assert soname(tmp_path, driver_roots.library(None)) is None


def test_a_program_has_none() -> None:
    assert elf.read_soname(Path(sys.executable)) is None


@pytest.mark.parametrize("name", ["../evil.so", "a/b", "x" * 300, ""])
def test_a_name_that_is_no_file_name_is_none(tmp_path: Path, name: str) -> None:
    assert soname(tmp_path, driver_roots.library(name)) is None


def test_broken_files_never_raise(tmp_path: Path) -> None:
    whole = driver_roots.library("libcuda.so.1")
    chance = random.Random(7)
    for length in range(0, len(whole), 13):
        soname(tmp_path, whole[:length])
    for _ in range(300):
        data = bytearray(whole)
        for _ in range(3):
            struct.pack_into("<Q", data, chance.randrange(0, 240), chance.choice([0, 1, 2**31, 2**63 - 1, 2**64 - 1]))
        soname(tmp_path, bytes(data))


def test_a_file_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No such file"):
        elf.read_soname(tmp_path / "none")
