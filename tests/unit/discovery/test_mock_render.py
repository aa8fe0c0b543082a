# SPDX-License-Identifier: Apache-2.0
"""Rendering.

- what is on disk is what the Recording says
- the same machine again keeps its state; another one replaces it; an unfinished one is done again
- no directory of anybody else is touched
"""

from __future__ import annotations

from pathlib import Path

import pytest

from discovery.errors import DocumentError
from discovery.mock import __main__ as command
from discovery.mock import fault, faults, live, recording, render
from tests.fakes import mockmachine


def test_every_file_is_on_disk_as_recorded(tmp_path: Path) -> None:
    machine = mockmachine.parsed()
    tree = render.render(machine, tmp_path / "machine")
    on_disk = mockmachine.snapshot_of_files(tree.directory)
    assert on_disk == {
        path: entry.target if isinstance(entry, recording.Link) else entry.encode() if isinstance(entry, str) else entry
        for path, entry in machine.files.items()
    }
    assert (tree.sys, tree.proc, tree.dev) == tuple(tmp_path / "machine" / name for name in ("sys", "proc", "dev"))


def test_every_link_leads_somewhere(tmp_path: Path) -> None:
    mockmachine.rendered(tmp_path)
    links = [path for path in tmp_path.rglob("*") if path.is_symlink()]
    assert links
    assert [path for path in links if not path.exists()] == []


def test_a_machine_without_devices_has_its_directories(tmp_path: Path) -> None:
    tree = render.render(recording.Recording(name="empty", files={}), tmp_path)
    assert list((tree.sys / "bus/pci/devices").iterdir()) == []
    assert list((tree.sys / "class/net").iterdir()) == []


def test_the_same_machine_again_keeps_its_state(tmp_path: Path) -> None:
    tree = mockmachine.rendered(tmp_path)
    faults.apply(tmp_path, [fault.Fault(kind=fault.Kind.NUMA_UNKNOWN)])
    mockmachine.rendered(tmp_path)
    assert len(faults.current(tmp_path)) == 1
    assert (mockmachine.directory_of(tree, mockmachine.GPU0) / "numa_node").read_text() == "-1\n"


def test_another_machine_replaces_it(tmp_path: Path) -> None:
    tree = mockmachine.rendered(tmp_path)
    faults.apply(tmp_path, [fault.Fault(kind=fault.Kind.NUMA_UNKNOWN)])
    mockmachine.rendered(tmp_path, ("{nvme: samsung-pm9a3}", "{nvme: samsung-pm1733}"))
    assert faults.current(tmp_path) == ()
    assert (mockmachine.directory_of(tree, mockmachine.NVME) / "device").read_text() == "0xa824\n"
    assert (mockmachine.directory_of(tree, mockmachine.GPU0) / "numa_node").read_text() == "0\n"


def test_a_machine_that_was_not_finished_is_done_again(tmp_path: Path) -> None:
    mockmachine.rendered(tmp_path)
    (tmp_path / live.FILE).unlink()
    (tmp_path / "sys/half").write_text("x")
    mockmachine.rendered(tmp_path)
    assert not (tmp_path / "sys/half").exists()
    assert live.LiveFile(tmp_path).read().nvml is not None


def test_files_of_somebody_else_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("x")
    with pytest.raises(DocumentError, match="holds files that are no mock machine"):
        mockmachine.rendered(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(DocumentError, match="cannot write the mock machine small"):
        mockmachine.rendered(tmp_path / "file")


def test_faults_of_the_document_count_from_the_rendering(tmp_path: Path) -> None:
    machine = mockmachine.parsed(("nvlink:", "faults: [{kind: fallen-off, target: gpu1, at: 5}]\nnvlink:"))
    tree = render.render(machine, tmp_path, clock=lambda: 1000.0)
    (placed,) = faults.current(tmp_path)
    assert (placed.begins, placed.ends) == (1005.0, None)
    assert mockmachine.directory_of(tree, mockmachine.GPU1).exists()


def test_the_command_renders(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "small.json"
    source.write_bytes(recording.dump(mockmachine.parsed()))
    assert command.main([str(source), str(tmp_path / "out")]) == 0
    assert (tmp_path / "out/sys/bus/pci/devices" / str(mockmachine.GPU0)).exists()
    assert command.main(["no-such-machine", str(tmp_path / "out2")]) == 2
    assert "neither a machine of the zoo (a30-4-mig, a30-4-pcie, " in capsys.readouterr().err
    assert command.main([]) == 2
