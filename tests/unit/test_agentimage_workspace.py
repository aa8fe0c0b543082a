# SPDX-License-Identifier: Apache-2.0
"""The folder of a build: gone however the build ends, never another build's; and the key of a build's inputs."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hack.agentimage import build, context, workspace
from hack.agentimage.errors import ImageError

ROOT = Path(__file__).parent.parent.parent

HOLDER = """
import signal, sys, time
from pathlib import Path
from hack.agentimage import workspace
signal.signal(signal.SIGHUP, signal.{hangup})
workspace.end_by_exception_when_told_to()
with workspace.temporary(Path(sys.argv[1])) as folder:
    (folder / "something").touch()
    print(folder, flush=True)
    time.sleep(600)
"""


class Holder:
    """Another process with a build's folder."""

    def __init__(self, kept: Path, *, hangup: signal.Handlers = signal.SIG_DFL) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", HOLDER.format(hangup=hangup.name), kept],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        self.folder = Path(self.process.stdout.readline().strip())

    def end(self, number: signal.Signals) -> None:
        self.process.send_signal(number)
        self.process.communicate(timeout=30)


def test_folder_is_there_and_then_gone(tmp_path: Path) -> None:
    with workspace.temporary(tmp_path) as folder:
        (folder / "deep").mkdir()
        assert folder.parent == tmp_path
    assert not folder.exists()


def test_folder_goes_when_the_build_fails(tmp_path: Path) -> None:
    with pytest.raises(ImageError), workspace.temporary(tmp_path) as folder:
        raise ImageError("no")
    assert not folder.exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_folder_goes_when_the_build_is_told_to_end(tmp_path: Path, number: signal.Signals) -> None:
    holder = Holder(tmp_path)
    assert (holder.folder / "something").exists()
    holder.end(number)
    assert not holder.folder.exists()


def test_a_build_under_nohup_outlives_its_terminal(tmp_path: Path) -> None:
    holder = Holder(tmp_path, hangup=signal.SIG_IGN)
    holder.process.send_signal(signal.SIGHUP)
    holder.end(signal.SIGTERM)
    assert holder.process.returncode == 128 + signal.SIGTERM
    assert not holder.folder.exists()


def test_folder_of_a_killed_build_goes_with_the_next_and_that_of_a_running_one_stays(tmp_path: Path) -> None:
    killed, running = Holder(tmp_path), Holder(tmp_path)
    killed.end(signal.SIGKILL)
    assert killed.folder.exists()
    with workspace.temporary(tmp_path):
        assert not killed.folder.exists()
        assert (running.folder / "something").exists()
    running.end(signal.SIGTERM)


def test_newest_archives_are_kept(tmp_path: Path) -> None:
    for age in range(6):
        path = tmp_path / f"agent-{age}.tar"
        path.touch()
        os.utime(path, (1_000_000 - age, 1_000_000 - age))
    workspace.keep_newest(tmp_path, "agent-*.tar", 4)
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"agent-{age}.tar" for age in range(4)]


def test_a_failing_step_says_which_program_failed() -> None:
    with pytest.raises(ImageError, match=r"^sh failed with status 7: some reason$"):
        workspace.run(["sh", "-c", "echo some reason >&2; exit 7"], quiet=True)


def test_a_missing_program_is_an_error_of_the_system() -> None:
    with pytest.raises(FileNotFoundError):
        workspace.run(["no-such-program-here"])


def test_cache_is_where_it_is_said_to_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.delenv("NEARFIELD_CACHE", raising=False)
    assert workspace.images() == tmp_path / "xdg/nearfield/images"
    monkeypatch.setenv("NEARFIELD_CACHE", str(tmp_path / "own"))
    assert workspace.images() == tmp_path / "own/images"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A tree with a file for each input of a build."""
    root = tmp_path / "tree"
    for name in context.INPUTS:
        path = root / name if name.suffix or name.name in {"LICENSE", "Containerfile"} else root / name / "module.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(str(name))
    return root


def key(tree: Path, target: Path) -> str:
    found = context.copy(tree, target)
    shutil.rmtree(target)
    return found


def test_key_changes_with_content_and_names_and_nothing_else(tree: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    before = key(tree, target)
    (tree / "driver/__pycache__").mkdir()
    (tree / "driver/__pycache__/module.cpython-311.pyc").touch()
    (tree / "tests").mkdir()
    os.utime(tree / "driver/module.py", (1, 1))
    assert key(tree, target) == before
    (tree / "driver/module.py").rename(tree / "driver/other.py")
    renamed = key(tree, target)
    (tree / "driver/other.py").write_text("changed")
    assert len({before, renamed, key(tree, target)}) == 3


def test_copy_has_the_inputs_and_no_byte_code(tree: Path, tmp_path: Path) -> None:
    (tree / "driver/__pycache__").mkdir()
    (tree / "driver/__pycache__/module.cpython-311.pyc").touch()
    context.copy(tree, tmp_path / "target")
    assert not list((tmp_path / "target").rglob("*.pyc"))
    assert (tmp_path / "target/deploy/Containerfile").read_text() == "deploy/Containerfile"


def test_a_tree_that_lacks_an_input_is_told(tree: Path, tmp_path: Path) -> None:
    (tree / "LICENSE").unlink()
    with pytest.raises(ImageError, match="has no LICENSE"):
        context.copy(tree, tmp_path / "target")


def test_archive_is_copied_whole(tmp_path: Path) -> None:
    source, target = tmp_path / "source.tar", tmp_path / "new/target.tar"
    source.write_bytes(b"archive")
    build.copy(source, target)
    assert target.read_bytes() == b"archive"
    assert [path.name for path in target.parent.iterdir()] == ["target.tar"]
