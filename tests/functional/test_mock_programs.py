# SPDX-License-Identifier: Apache-2.0
"""The stand-in for nvidia-smi in a driver root, run as a program: time slices are set, listed and kept; what the real one refuses is
refused with its exit status.
"""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from discovery.mock import faults, live, mpscontrol, programs, smi, state
from discovery.mock.fault import Fault, Kind
from tests.fakes import mockmachine
from tests.fakes.mockmachine import GPU0


class Root:
    """A driver root for a machine."""

    def __init__(self, folder: Path, *changes: tuple[str, str]) -> None:
        self.machine, self.folder = folder / "machine", folder / "driver root"
        mockmachine.rendered(self.machine, *changes)
        programs.write(self.folder, self.machine)

    def run(self, *arguments: str) -> tuple[int, str]:
        done = subprocess.run(
            [self.folder / "usr/bin/nvidia-smi", *arguments],
            capture_output=True,
            text=True,
            timeout=50,
            check=False,
            env={"PATH": "/usr/bin:/bin"},
            cwd="/",
        )
        assert done.stderr == ""
        return done.returncode, done.stdout

    def nvml(self) -> state.Nvml:
        nvml = live.LiveFile(self.machine).read().nvml
        assert nvml is not None
        return nvml


def test_a_time_slice_is_set_listed_and_kept(tmp_path: Path) -> None:
    root = Root(tmp_path)
    first, second = root.nvml().gpus
    assert first.uuid is not None
    assert root.run("compute-policy", "-i", first.uuid, "--set-timeslice=3")[0] == 0
    assert root.run("compute-policy", "-i", "1", "--set-timeslice", "1")[0] == 0
    assert [gpu.time_slice for gpu in root.nvml().gpus] == [3, 1]
    status, said = root.run("compute-policy", "--list")
    assert (status, [line.split(": ")[-1] for line in said.splitlines()]) == (0, ["Long", "Short"])
    assert root.run("compute-policy", "-i", str(first.pci), "--set-timeslice=0")[0] == 0
    assert "Default" in root.run("compute-policy", "-i", first.uuid, "--list")[1]
    assert root.run("-L")[1].count(str(second.uuid)) == 1


@pytest.mark.parametrize(
    ("arguments", "status"),
    [
        (["compute-policy", "-i", "GPU-00000000-0000-0000-0000-000000000000", "--set-timeslice=1"], smi.NOT_FOUND),
        (["compute-policy", "-i", "", "--set-timeslice=1"], smi.NOT_FOUND),
        (["compute-policy", "-i", "0", "--set-timeslice=4"], smi.INVALID_ARGUMENT),
        (["compute-policy", "-i", "0", "--set-timeslice=-1"], smi.INVALID_ARGUMENT),
        (["compute-policy", "-i", "0"], smi.INVALID_ARGUMENT),
        (["compute-policy", "-i", "0", "--list", "--set-timeslice=1"], smi.INVALID_ARGUMENT),
        (["other-command"], smi.INVALID_ARGUMENT),
        ([], smi.INVALID_ARGUMENT),
    ],
)
def test_what_is_refused(tmp_path: Path, arguments: Sequence[str], status: int) -> None:
    root = Root(tmp_path)
    answered, said = root.run(*arguments)
    assert answered == status
    assert said.strip()
    assert {gpu.time_slice for gpu in root.nvml().gpus} == {0}


def test_rights_mig_and_loss(tmp_path: Path) -> None:
    divided = ("{gpu: nvidia-h100-sxm5-80gb}, {gpu", "{gpu: nvidia-h100-sxm5-80gb, migMode: true}, {gpu")
    root = Root(tmp_path, divided)
    assert root.run("compute-policy", "-i", "0", "--set-timeslice=1")[0] == smi.NOT_AVAILABLE
    faults.apply(root.machine, [Fault(kind=Kind.GPU_LOST, target=GPU0)])
    assert root.run("compute-policy", "-i", "0", "--set-timeslice=1")[0] == smi.LOST
    faults.apply(root.machine, [])
    system = dataclasses.replace(root.nvml().system, privileged=False)
    live.LiveFile(root.machine).update(
        lambda now: dataclasses.replace(now, nvml=dataclasses.replace(root.nvml(), system=system))
    )
    assert root.run("compute-policy", "-i", "1", "--set-timeslice=1")[0] == smi.NO_PERMISSION
    faults.apply(root.machine, [Fault(kind=Kind.NO_DRIVER)])
    assert root.run("compute-policy", "--list")[0] == smi.NO_DRIVER


def test_the_command_writes_a_driver_root(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "discovery.mock.programs"]
    for _ in range(2):
        subprocess.run([*command, tmp_path / "root", tmp_path / "machine"], check=True, timeout=50)
    names = {str(path.relative_to(tmp_path / "root")) for path in (tmp_path / "root").rglob("*") if path.is_file()}
    of_mps = {f"usr/bin/{name}" for name in (mpscontrol.CONTROL, mpscontrol.SERVER, mpscontrol.SETTING)}
    assert names == programs.PROGRAMS.keys() | of_mps
    (tmp_path / "file").touch()
    for arguments in ([], [tmp_path / "file", tmp_path]):
        assert subprocess.run([*command, *arguments], check=False, timeout=50, capture_output=True).returncode == 2
