# SPDX-License-Identifier: Apache-2.0
"""`nearfield demo` as people run it: it says what is real, shows each step, and leaves nothing behind.

Aspects: the whole way; staying up; a machine that is not known; a machine without GPUs.
"""

from __future__ import annotations

import contextlib
import gzip
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from discovery.mock import recording

ROOT = Path(__file__).parents[2]
DEMO = (sys.executable, "-m", "driver.cli", "demo")

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def folder() -> Iterator[Path]:
    """Where the demo makes its folder: a short path, as sockets lie in it, and in memory where it can be."""
    memory = "/dev/shm"
    with tempfile.TemporaryDirectory(prefix="nf-", dir=memory if os.access(memory, os.W_OK) else None) as made:
        yield Path(made)


def _environment(folder: Path) -> dict[str, str]:
    """As people have it: Python keeps what it writes into a pipe until there is more."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    return kept | {"TMPDIR": str(folder)}


def demo(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [*DEMO, *arguments],
        cwd=ROOT,
        env=_environment(folder),
        capture_output=True,
        text=True,
        check=False,
    )
    assert list(folder.iterdir()) == []
    return done


def test_the_way_of_a_claim(folder: Path) -> None:
    done = demo(folder)
    assert done.returncode == 0, done.stdout + done.stderr
    headlines = ("The parts", "Registration", "ResourceSlices", "A claim", "The CDI file", "Metrics", "Unprepared")
    assert [line.startswith(headlines) for line in done.stdout.splitlines()].count(True) == len(headlines)
    assert done.stdout.count("a stand-in") == 2
    assert "nearfield run --node-name" in done.stdout
    assert "matchAttribute alignedPair: gpu-0000-1b-00-0, gpu-0000-43-00-0" in done.stdout
    assert "prepared: gpu-0000-43-00-0 -> gpu.nearfield.dev/claim=" in done.stdout
    assert '"hostPath": "/dev/null"' in done.stdout
    assert "nearfield_claims_prepared 1.0" in done.stdout
    assert "the CDI file is gone" in done.stdout


def test_it_stays_up_when_asked_and_ends_cleanly(folder: Path) -> None:
    with contextlib.ExitStack() as stack:
        process = stack.enter_context(
            subprocess.Popen(
                [*DEMO, "--mock", "workstation-rtx", "--keep"],
                cwd=ROOT,
                env=_environment(folder),
                stdout=subprocess.PIPE,
                text=True,
            )
        )
        stack.callback(process.terminate)
        assert process.stdout is not None
        seen = ""
        for line in process.stdout:
            seen += line
            if "kubectl --kubeconfig" in line:
                break
        assert "allocated, as the scheduler would: gpu-0000-01-00-0" in seen
        claims = re.search(r"nearfield (claims --state-dir \S+)", seen)
        assert claims is not None
        command = [sys.executable, "-m", "driver.cli", *claims.group(1).split()]
        shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        assert "gpu-0000-01-00-0" in shown.stdout
        process.send_signal(signal.SIGINT)
        assert "Unprepared" in process.stdout.read()
        assert process.wait() == 0
    assert list(folder.iterdir()) == []


def test_what_the_agent_says_is_told(folder: Path) -> None:
    done = demo(folder, "--mock", "dgx-h1000")
    assert done.returncode == 1
    assert "The agent ended with status 2" in done.stderr
    assert "dgx-h1000" in done.stderr


def test_a_machine_without_a_gpu_is_said_to_have_none(folder: Path, tmp_path: Path) -> None:
    machine = tmp_path / "plain.json.gz"
    files = {"proc/sys/kernel/random/boot_id": "7f5c6a4e-0000-4000-8000-000000000000\n"}
    machine.write_bytes(gzip.compress(recording.dump(recording.Recording(name="plain", files=files, nvml=None))))
    done = demo(folder, "--mock", str(machine))
    assert done.returncode == 1
    assert "This machine has no GPU to offer" in done.stderr
