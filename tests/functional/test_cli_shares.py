# SPDX-License-Identifier: Apache-2.0
"""`nearfield devices`, `slices` and `config` on GPUs that are given out in shares, as processes.

- what this node can enforce is looked at: the machine, the MPS supervisor, nvidia-smi of the driver root, the cgroups of pods
- where nothing is shared nobody is asked
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fakes import mps

ROOT = Path(__file__).parents[2]
HEAD = "apiVersion: config.nearfield.dev/v1alpha1\nkind: AgentConfig\nsharing:\n"
MACHINE = "l40s-8-shares"
TURNS = "- match: {count: 1}\n  mode: shares\n  shares: {memory: none, compute: timeslice, timeSlice: long}\n"


@pytest.fixture(name="beside")
def fixture_beside() -> Iterator[mps.Node]:
    """A node with the MPS programs, whose supervisor is not started."""
    with mps.node(start=False) as beside:
        yield beside


def nearfield(*arguments: str | Path) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "driver.cli", *arguments],
        cwd=ROOT,
        env=dict(os.environ),
        capture_output=True,
        text=True,
        check=False,
        timeout=50,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def enforced(config: Path, *more: str | Path) -> list[tuple[str, str]]:
    """Of each shared device, what keeps its memory and its compute."""
    listed = json.loads(nearfield("devices", "--mock", MACHINE, "--config", config, "-o", "json", *more))
    found: list[tuple[str, str]] = []
    for item in listed["items"]:
        attributes: dict[str, Any] = item["attributes"]
        if item.get("allowMultipleAllocations"):
            found.append((attributes["memoryEnforcement"]["string"], attributes["computeEnforcement"]["string"]))
    return found


def test_the_supervisor_of_this_node_is_asked(beside: mps.Node, tmp_path: Path) -> None:
    config = tmp_path / "agent.yaml"
    config.write_text(HEAD + "- mode: shares\n  shares: {memory: none, compute: none}\n", encoding="utf-8")
    assert enforced(config, "--mps-dir", beside.directory) == [("cgroup", "none")] * 8
    beside.start()
    assert enforced(config, "--mps-dir", beside.directory) == [("cgroup", "mps")] * 8
    shown = nearfield("slices", "--mock", MACHINE, "--config", config, "--mps-dir", beside.directory, "-o", "yaml")
    assert shown.count("allowMultipleAllocations: true") == 8


def test_nvidia_smi_of_the_driver_root_is_looked_for(beside: mps.Node, tmp_path: Path) -> None:
    config = tmp_path / "agent.yaml"
    config.write_text(HEAD + TURNS, encoding="utf-8")
    table = nearfield("devices", "--mock", MACHINE, "--config", config, "--mps-dir", beside.directory)
    assert "compute by mps or cooperative: no MPS supervisor answers" in table
    assert "compute by timeslice: a mock machine has no nvidia-smi" in table
    program = beside.root / "usr/bin/nvidia-smi"
    program.write_text("#!/bin/sh\nexit 1\n", encoding="utf-8")
    program.chmod(0o755)
    found = enforced(config, "--mps-dir", beside.directory, "--driver-root", beside.root)
    assert found == [("cgroup", "timeslice")]


def test_the_cgroups_of_pods_are_looked_for(beside: mps.Node, tmp_path: Path) -> None:
    config = tmp_path / "agent.yaml"
    config.write_text(HEAD + "- mode: shares\n  shares: {memory: cgroup, compute: none}\n", encoding="utf-8")
    arguments = ("--mps-dir", beside.directory, "--cgroup-root", tmp_path)
    table = nearfield("devices", "--mock", MACHINE, "--config", config, *arguments)
    assert f"memory by cgroup: there is no kubepods below {tmp_path}" in table
    (tmp_path / "kubepods.slice").mkdir()
    assert enforced(config, *arguments) == [("cgroup", "none")] * 8


def test_a_configuration_with_shares_is_checked_and_shown_whole(tmp_path: Path) -> None:
    config = tmp_path / "agent.yaml"
    config.write_text(HEAD + TURNS, encoding="utf-8")
    shown = nearfield("config", "check", config)
    for line in ('memoryStep: "1Gi"', "computeStep: 5", "defaultCompute: whole", "maxSharers: 8", "timeSlice: long"):
        assert line in shown
    again = tmp_path / "again.yaml"
    again.write_text(shown, encoding="utf-8")
    assert nearfield("config", "check", again) == shown


def test_nobody_is_asked_where_nothing_is_shared(tmp_path: Path) -> None:
    """A verb is typed many times, and what it does not need takes no time."""
    config = tmp_path / "agent.yaml"
    config.write_text(HEAD + "- mode: mig-dynamic\n", encoding="utf-8")
    code = (
        "import sys\nfrom driver.cli import main\n"
        "try:\n    main.main()\nfinally:\n"
        "    print([name for name in ('driver.mps.client', 'driver.prepare.timeslices') if name in sys.modules], file=sys.stderr)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "devices", "--mock", MACHINE, "--config", str(config)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=50,
    )
    assert done.stderr.splitlines()[-1] == "[]", done.stderr
