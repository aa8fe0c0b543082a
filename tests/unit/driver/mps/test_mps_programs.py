# SPDX-License-Identifier: Apache-2.0
"""Programs of a driver root: found, run where they find what they need, and asked what they can do."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from driver.mps import launch, programs, running
from driver.mps.shares import Protocol
from driver.prepare import rootfs
from tests.fakes import driver_roots
from tests.fakes.publishing import until

NAME = programs.CONTROL
HELP = """#!{python} -IS
# {comment}
import sys
print({text!r} if "-h" in sys.argv else "615.71.09")
"""


def elf(interpreter: bytes | None) -> bytes:
    """A program of nothing but the name of its loader."""
    header = struct.pack("<16sHHIQQQIHHHHHH", b"\x7fELF\x02\x01\x01", 3, 62, 1, 0, 64, 0, 0, 64, 56, 1, 64, 0, 0)
    segment = struct.pack("<IIQQQQQQ", 3 if interpreter else 1, 4, 120, 0, 0, len(interpreter or b"") + 1, 0, 1)
    return header + segment + (interpreter or b"") + b"\0"


def root_with(folder: Path, data: bytes, *, inside: str = f"/usr/bin/{NAME}", mode: int = 0o755) -> rootfs.DriverRoot:
    driver_roots.file(folder, inside, data)
    (folder / inside.lstrip("/")).chmod(mode)
    return rootfs.DriverRoot(Path("/"), mount=folder)


def found(root: rootfs.DriverRoot) -> programs.Program:
    program = programs.find(root, NAME)
    assert program is not None
    return program


def test_a_program_whose_loader_is_there_runs_inside_of_its_root(tmp_path: Path) -> None:
    root = root_with(tmp_path, elf(b"/lib64/ld-linux-x86-64.so.2"))
    driver_roots.file(tmp_path, "/lib64/ld-linux-x86-64.so.2")
    program = found(root)
    assert program.root == tmp_path
    assert "LD_LIBRARY_PATH" not in program.environment
    command = program.command("-v")
    assert command[-2:] == [f"/usr/bin/{NAME}", "-v"]
    assert launch.__file__ in command


@pytest.mark.parametrize(
    "data", [elf(b"/lib64/ld-linux-x86-64.so.2"), elf(None), b"#!/bin/sh\n", b"", b"#!", b"\x7fELF\x02\x01"]
)
def test_a_root_of_nothing_but_the_driver_lends_its_libraries(tmp_path: Path, data: bytes) -> None:
    root = root_with(tmp_path, data)
    driver_roots.file(tmp_path, "/lib64/libcuda.so.1")
    program = found(root)
    assert program.root is None
    assert program.environment["LD_LIBRARY_PATH"] == str(tmp_path / "lib64")
    assert program.command("-v") == [str(tmp_path / "usr/bin" / NAME), "-v"]


def test_the_root_of_the_agent_itself_is_no_other(tmp_path: Path) -> None:
    program = programs.find(rootfs.DriverRoot(Path("/"), mount=Path("/")), Path(sys.executable).resolve().name)
    if program is not None:
        assert (program.root, program.environment["PATH"].split(":")[0]) == (None, "/usr/sbin")
    assert programs.find(rootfs.DriverRoot(Path("/"), mount=tmp_path), NAME) is None


def test_links_are_followed_inside_and_what_may_not_run_is_none(tmp_path: Path) -> None:
    root = root_with(tmp_path, b"#!/bin/sh\n", inside="/opt/nvidia/control")
    driver_roots.link(tmp_path, f"/usr/bin/{NAME}", "/opt/nvidia/control")
    assert found(root).path == "/opt/nvidia/control"
    (tmp_path / "opt/nvidia/control").chmod(0o644)
    assert programs.find(root, NAME) is None


def asked(folder: Path, text: str, comment: str = "") -> programs.Control:
    script = HELP.format(python=sys.executable, text=text, comment=comment)
    return programs.look(found(root_with(folder, script.encode())))


def test_mps_v3_is_known_by_its_modules_and_its_option_for_all_users(tmp_path: Path) -> None:
    able = asked(tmp_path, "-m, --multiuser  Modules: server, namespace", "-multiuser-server")
    assert able.protocols == frozenset(Protocol)
    assert able.multiuser == {Protocol.V3: "--multiuser", Protocol.LEGACY: "-multiuser-server"}
    assert able.version == "615.71.09"
    # NVIDIA's guide spells it so.
    assert asked(tmp_path, "--multiuser-server server namespace").multiuser[Protocol.V3] == "--multiuser-server"


def test_legacy_help_is_no_mps_v3(tmp_path: Path) -> None:
    able = asked(tmp_path, "usage: -d starts the server daemon")
    assert able.protocols == {Protocol.LEGACY}
    assert able.multiuser == {}
    assert "update the driver" in able.reasons[Protocol.V3]


def test_a_program_that_hangs_or_does_not_start_is_bounded(tmp_path: Path) -> None:
    root = root_with(tmp_path, b"#!/bin/sh\nsleep 60\n")
    able = programs.look(found(root), timeout_s=0.3)
    assert "did not tell whether it knows MPS v3: no answer within" in able.reasons[Protocol.V3]
    assert able.version is None
    broken = programs.look(found(root_with(tmp_path, b"no program")), timeout_s=30)
    assert "cannot be started" in broken.reasons[Protocol.V3]


def test_what_a_program_says_is_bounded_and_shown_on_one_line() -> None:
    script = "import sys; sys.stdout.write('x' * 3_000_000); sys.stderr.write('a\\nb\\x1b[31m\\n'); sys.exit(3)"
    told = running.run([sys.executable, "-IS", "-c", script], environment={}, timeout_s=30)
    assert (told.status, len(told.out), told.words) == (3, running.OUTPUT_MAX, "a | b?[31m")


def test_a_program_gets_its_input_and_need_not_read_it() -> None:
    told = running.run([sys.executable, "-IS", "-c", "print(input())"], environment={}, timeout_s=30, given="quit\n")
    assert told.out == "quit\n"
    told = running.run([sys.executable, "-IS", "-c", "pass"], environment={}, timeout_s=30, given="quit\n" * 1000)
    assert told.status == 0


def test_what_a_program_started_ends_with_it_when_its_time_is_over(tmp_path: Path) -> None:
    number = tmp_path / "pid"
    with pytest.raises(running.RunningError, match="no answer within 5 s"):
        running.run(["/bin/sh", "-c", f"sleep 600 & echo $! > {number}; wait"], environment={}, timeout_s=5)
    state = Path(f"/proc/{int(number.read_text())}/stat")

    def has_ended() -> bool:
        try:
            return state.read_text().rpartition(")")[2].split()[0] in "ZX"
        except (FileNotFoundError, ProcessLookupError):
            return True

    until(has_ended)


def test_the_launcher_becomes_the_program_or_says_why_not() -> None:
    def started(wanted: str, *command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-IS", launch.__file__, wanted, *command], capture_output=True, text=True, check=False
        )

    done = started(f'{{"parent": {os.getpid()}}}', sys.executable, "-IS", "-c", "print(7)")
    assert (done.returncode, done.stdout) == (0, "7\n")
    assert started('{"parent": 1}', sys.executable, "-c", "").returncode == launch.FAILED
    done = started("{}", "/no/such/program")
    assert (done.returncode, done.stderr) == (
        launch.FAILED,
        "/no/such/program cannot be started: No such file or directory\n",
    )
