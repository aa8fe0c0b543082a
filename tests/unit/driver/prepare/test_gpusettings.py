# SPDX-License-Identifier: Apache-2.0
"""gpusettings: what was set before is kept for this boot, and whatever else lies there is nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from discovery import address
from discovery.limits import ComputeMode
from driver.prepare import gpusettings
from driver.prepare.gpusettings import NOTHING, Found
from driver.sharing.shares import TimeSlice

GPU = address.parse("0000:1b:00.0")
FAR = address.parse("10000:00:00.0")


def settings(state: Path, boot_id: str = "boot") -> gpusettings.GpuSettings:
    return gpusettings.GpuSettings(state, boot_id=boot_id)


@pytest.mark.parametrize(
    "found",
    [
        Found(compute_mode=ComputeMode.PROHIBITED),
        Found(time_slice=TimeSlice.LONG),
        Found(compute_mode=ComputeMode.DEFAULT, time_slice=TimeSlice.DEFAULT, time_slice_set=TimeSlice.SHORT),
    ],
)
def test_what_is_kept_is_found_by_the_next_agent(tmp_path: Path, found: Found) -> None:
    settings(tmp_path).put(GPU, found)
    assert settings(tmp_path).get(GPU) == found
    assert settings(tmp_path).gpus() == (GPU,)


def test_nothing_is_forgotten(tmp_path: Path) -> None:
    kept = settings(tmp_path)
    assert kept.get(GPU) == NOTHING
    assert kept.gpus() == ()
    kept.put(GPU, NOTHING)
    kept.put(FAR, Found(time_slice=TimeSlice.LONG))
    kept.put(GPU, Found(compute_mode=ComputeMode.DEFAULT))
    assert kept.gpus() == (GPU, FAR)
    kept.put(GPU, NOTHING)
    assert kept.gpus() == (FAR,)
    assert kept.get(GPU) == NOTHING


def test_what_was_of_another_boot_is_gone(tmp_path: Path) -> None:
    settings(tmp_path, "before").put(GPU, Found(compute_mode=ComputeMode.PROHIBITED))
    assert settings(tmp_path, "after").get(GPU) == NOTHING


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        "[" * 3000,
        '{"bootID": "boot", "computeMode": "fast", "timeSlice": {}}',
        '{"computeMode": "default"}',
    ],
)
def test_what_cannot_be_read_is_nothing(tmp_path: Path, text: str) -> None:
    kept = settings(tmp_path)
    kept.put(GPU, Found(compute_mode=ComputeMode.PROHIBITED))
    (tmp_path / "settings" / f"{GPU}.json").write_text(text)
    assert kept.get(GPU) == NOTHING


def test_files_of_others_are_no_gpus(tmp_path: Path) -> None:
    kept = settings(tmp_path)
    kept.put(GPU, Found(compute_mode=ComputeMode.PROHIBITED))
    for name in (".x.json.tmp", "readme", "..json"):
        (tmp_path / "settings" / name).write_text("{}")
    assert kept.gpus() == (GPU,)
