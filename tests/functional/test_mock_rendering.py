# SPDX-License-Identifier: Apache-2.0
"""`python -m discovery.mock` as a process: it renders, says what is wrong, and ends with who started it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

COMMAND = (sys.executable, "-m", "discovery.mock")
MACHINE = "workstation-rtx"


def test_a_machine_is_rendered_while_standard_input_stays_open(tmp_path: Path) -> None:
    with subprocess.Popen(
        [*COMMAND, "--end-with-stdin", MACHINE, str(tmp_path / "mock")], stdin=subprocess.PIPE
    ) as process:
        assert process.wait(50) == 0
    assert (tmp_path / "mock" / "nvml.json").exists()


def test_rendering_ends_with_who_started_it(tmp_path: Path) -> None:
    # Gone before it begins: otherwise it may be done first.
    read, write = os.pipe()
    os.close(write)
    with subprocess.Popen([*COMMAND, "--end-with-stdin", MACHINE, str(tmp_path / "mock")], stdin=read) as process:
        os.close(read)
        assert process.wait(50) == 1
    assert not (tmp_path / "mock" / "recording.json").exists()


def test_without_the_option_standard_input_does_not_matter(tmp_path: Path) -> None:
    done = subprocess.run([*COMMAND, MACHINE, str(tmp_path / "mock")], stdin=subprocess.DEVNULL, check=False)
    assert done.returncode == 0


def test_a_machine_that_is_none_is_named(tmp_path: Path) -> None:
    done = subprocess.run(
        [*COMMAND, "no-such-machine", str(tmp_path)],
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "no-such-machine" in done.stderr
