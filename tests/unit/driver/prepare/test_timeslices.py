# SPDX-License-Identifier: Apache-2.0
"""timeslices: nvidia-smi of the driver root is asked in its own words, and what it says when it fails is passed on."""

from __future__ import annotations

from pathlib import Path

import pytest

from discovery.errors import WorkError
from driver.prepare import rootfs, timeslices
from driver.sharing.shares import TimeSlice

UUID = "GPU-00000000-0000-0000-0000-000000000001"
T = 30.0


def turns(mount: Path, script: str | None) -> timeslices.TimeSlices:
    """Those of a driver root whose nvidia-smi is a script."""
    (mount / "usr" / "bin").mkdir(parents=True)
    if script is not None:
        program = mount / "usr" / "bin" / "nvidia-smi"
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
    return timeslices.TimeSlices(rootfs.DriverRoot(Path("/run/nvidia/driver"), mount=mount))


@pytest.mark.parametrize(("turn", "number"), list(zip(TimeSlice, range(4), strict=True)))
def test_a_turn_is_set_by_its_number(tmp_path: Path, turn: TimeSlice, number: int) -> None:
    told = tmp_path / "told"
    found = turns(tmp_path / "root", f'echo "$@" >> {told}')
    assert found.problem() is None
    found.set(UUID, turn, timeout_s=T)
    assert told.read_text() == f"compute-policy -i {UUID} --set-timeslice={number}\n"


@pytest.mark.parametrize(
    ("said", "turn"),
    [
        ("| GPU compute policies: |\\n| 0  Timeslice  Default |", TimeSlice.DEFAULT),
        ("GPU 0: time slice LONG", TimeSlice.LONG),
        ("", None),
        ("Shortly", None),
        ("short medium", None),
        ("0x7f", None),
    ],
)
def test_a_turn_is_read_where_one_known_word_is_told(tmp_path: Path, said: str, turn: TimeSlice | None) -> None:
    assert turns(tmp_path, f"printf '{said}'").get(UUID, timeout_s=T) is turn


def test_what_nvidia_smi_says_is_in_the_message(tmp_path: Path) -> None:
    found = turns(tmp_path, 'echo "Insufficient Permissions" >&2; exit 4')
    with pytest.raises(WorkError, match=r"nvidia-smi compute-policy .*status 4: Insufficient Permissions"):
        found.set(UUID, TimeSlice.LONG, timeout_s=T)


def test_an_nvidia_smi_that_hangs_is_killed(tmp_path: Path) -> None:
    with pytest.raises(WorkError, match="no answer within") as caught:
        turns(tmp_path, "sleep 600").set(UUID, TimeSlice.LONG, timeout_s=0.2)
    assert caught.value.retryable


def test_without_nvidia_smi_it_says_what_would_help(tmp_path: Path) -> None:
    found = turns(tmp_path, None)
    assert "--driver-root" in (found.problem() or "")
    with pytest.raises(WorkError, match="install the driver's utilities"):
        found.get(UUID, timeout_s=T)
    mock = timeslices.TimeSlices(None)
    assert "mock machine" in (mock.problem() or "")
    with pytest.raises(WorkError, match="mock machine"):
        mock.set(UUID, TimeSlice.LONG, timeout_s=T)
