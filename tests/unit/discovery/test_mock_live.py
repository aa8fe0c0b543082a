# SPDX-License-Identifier: Apache-2.0
"""The file that changes in a rendered machine.

- it is one JSON document, whoever wrote it
- what a change left alone stays the same value
- a reader sees every change, however fast they follow each other
"""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

import pytest

from discovery.errors import DocumentError
from discovery.mock import live, state
from tests.fakes import mockmachine


@pytest.fixture
def file(tmp_path: Path) -> live.LiveFile:
    """The state of the small machine."""
    mockmachine.rendered_without_files(tmp_path)
    return live.LiveFile(tmp_path)


def _gpus(now: live.Live) -> tuple[state.Gpu, ...]:
    assert now.nvml is not None
    return now.nvml.gpus


def _warmer(now: live.Live) -> live.Live:
    assert now.nvml is not None
    first, *others = now.nvml.gpus
    first = dataclasses.replace(first, temperature_c=(first.temperature_c or 0) % 50 + 10)
    return dataclasses.replace(now, nvml=dataclasses.replace(now.nvml, gpus=(first, *others)))


def test_it_is_one_document(file: live.LiveFile, tmp_path: Path) -> None:
    before = file.read()
    document = json.loads((tmp_path / live.FILE).read_text())
    assert [gpu["pci"] for gpu in document["nvml"]["gpus"]] == ["0000:18:00.0", "0000:19:00.0"]
    (tmp_path / live.FILE).write_text(json.dumps(document, indent=4))
    assert live.LiveFile(tmp_path).read() == before
    (tmp_path / live.FILE).write_text(json.dumps(document))
    assert file.read() == before


def test_without_a_driver_or_without_gpus_it_reads_back(file: live.LiveFile, tmp_path: Path) -> None:
    for nvml in (None, state.Nvml(system=state.System())):
        written = file.update(lambda now, nvml=nvml: dataclasses.replace(now, nvml=nvml))  # type: ignore[misc]
        assert live.LiveFile(tmp_path).read() == written


def test_what_is_damaged_is_said(file: live.LiveFile, tmp_path: Path) -> None:
    text = (tmp_path / live.FILE).read_text()
    for damaged, said in (
        (text[:-2], "damaged"),
        (text.replace('"0000:19:00.0", "pciDeviceId"', '7, "pciDeviceId"'), r"nvml\.gpus\[1\]\.pci"),
        (text.replace('"seqnum": 0', '"seqnum": "x"'), "seqnum"),
    ):
        assert damaged != text
        (tmp_path / live.FILE).write_text(damaged)
        with pytest.raises(DocumentError, match=said):
            file.read()
    (tmp_path / live.FILE).write_text(text)
    assert len(_gpus(file.read())) == 2


def test_a_change_leaves_the_others_alone(file: live.LiveFile, tmp_path: Path) -> None:
    reader = live.LiveFile(tmp_path)
    before = _gpus(reader.read())
    file.update(_warmer)
    after = _gpus(reader.read())
    assert after[0] != before[0]
    assert after[1] is before[1]


def test_a_reader_sees_every_change(file: live.LiveFile, tmp_path: Path) -> None:
    """Of the same length, with the inode of the one before the last, within one tick of the clock of the file system."""
    reader = live.LiveFile(tmp_path)
    for _ in range(200):
        written = file.update(_warmer)
        assert reader.read() == written


def test_a_state_is_dated_after_the_one_it_replaces(file: live.LiveFile, tmp_path: Path) -> None:
    """Also where clocks tick too seldom, or were set back."""
    path = tmp_path / live.FILE
    ahead = path.stat().st_mtime_ns + 3_600 * 10**9
    os.utime(path, ns=(ahead, ahead))
    for _ in range(3):
        before = path.stat().st_mtime_ns
        file.update(_warmer)
        assert path.stat().st_mtime_ns > before >= ahead
