# SPDX-License-Identifier: Apache-2.0
"""The word for what a mock machine was rendered from: same documents, other documents, unreadable, half rendered, another boot."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from discovery.mock import fault, faults, live, stamp

MACHINE = "workstation-rtx"


def render(machine: str, directory: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-X", "importtime", "-m", "discovery.mock", machine, str(directory)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_machine_that_stands_is_not_read_again_and_keeps_its_faults(tmp_path: Path) -> None:
    first = render(MACHINE, tmp_path)
    assert first.returncode == 0
    assert "pydantic" in first.stderr
    faults.apply(tmp_path, [fault.Fault(kind=fault.Kind.NVML_HANG)])
    again = render(MACHINE, tmp_path)
    assert again.returncode == 0
    assert "pydantic" not in again.stderr
    assert [placed.fault.kind for placed in faults.current(tmp_path)] == [fault.Kind.NVML_HANG]


def test_machine_that_was_rendered_before_the_node_was_booted_has_lost_its_faults_and_instances(tmp_path: Path) -> None:
    assert render(MACHINE, tmp_path).returncode == 0
    faults.apply(tmp_path, [fault.Fault(kind=fault.Kind.NVML_HANG)])
    (tmp_path / stamp.BOOT_FILE).write_text("11111111-2222-3333-4444-555555555555\n")
    assert render(MACHINE, tmp_path).returncode == 0
    assert faults.current(tmp_path) == ()
    assert not stamp.outlived(tmp_path)


def test_changed_document_is_another_machine(tmp_path: Path) -> None:
    document = tmp_path / "machine.yaml"
    document.write_text("a")
    before = stamp.of(str(document))
    document.write_text("b")
    assert before is not None
    assert stamp.of(str(document)) not in (None, before)


def test_what_cannot_be_read_has_no_word(tmp_path: Path) -> None:
    assert stamp.of(str(tmp_path / "nothing.yaml")) is None
    assert not stamp.stands(tmp_path, None)


def test_half_rendered_machine_does_not_stand(tmp_path: Path) -> None:
    word = stamp.of(MACHINE)
    assert word is not None
    stamp.put(tmp_path, word)
    assert not stamp.stands(tmp_path, word)
    (tmp_path / live.FILE).write_text("{}")
    assert stamp.stands(tmp_path, word)
    assert not stamp.stands(tmp_path, "another")
