# SPDX-License-Identifier: Apache-2.0
"""The processes of a cluster, as far as they need no root.

- the record: finds a process by number and start, not another one that has got the number
- the gate: a component whose starter is killed before its number is on record does not come up
- locks: who waits is told; a program that outlives its killed command holds the lock on
- images and hollow nodes: made of files
"""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest

from hack.realnode import hollow, images, layout, locks, processes
from hack.realnode.errors import ClusterError
from hack.realnode.layout import Layout
from tests.fakes.programs import Programs

ROOT = Path(__file__).parent.parent.parent.parent


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Layout:
    """A cluster's folders, in a folder of the test."""
    monkeypatch.setattr(layout, "ROOT", tmp_path)
    found = Layout("a")
    found.pids.mkdir(parents=True)
    return found


def test_a_process_is_found_by_number_and_start(place: Layout) -> None:
    started = Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]
    (place.pids / "etcd").write_text(f"{os.getpid()} {started}")
    (place.pids / "kubelet").write_text(f"{os.getpid()} {int(started) + 1}")
    (place.pids / "containerd").write_text("")
    assert processes.pid(place, "etcd") == os.getpid()
    assert processes.pid(place, "kubelet") is None
    assert processes.pid(place, "containerd") is None
    assert processes.pid(place, "kube-scheduler") is None
    assert processes.recorded(place) == ("containerd", "etcd", "kubelet")


def test_the_end_of_a_component_is_waited_for(place: Layout) -> None:
    with subprocess.Popen(["sleep", "1000"]) as sleeper:
        started = Path(f"/proc/{sleeper.pid}/stat").read_text().rpartition(")")[2].split()[19]
        (place.pids / "etcd").write_text(f"{sleeper.pid} {started}")
        processes.end(place, "etcd")
        assert sleeper.wait() == -signal.SIGTERM
    assert processes.recorded(place) == ()
    processes.end(place, "etcd")  # again: nothing to do


def test_who_drains_is_not_there_any_more_and_holds_up_its_successor(place: Layout) -> None:
    slow = 'trap \'read -r go <"$0"; exit 0\' TERM; echo up >"$0"; while :; do sleep 0.01; done'
    fifo = place.pids.parent / "fifo"
    os.mkfifo(fifo)
    with subprocess.Popen(["sh", "-c", slow, str(fifo)]) as old:
        assert fifo.read_text() == "up\n"
        started = Path(f"/proc/{old.pid}/stat").read_text().rpartition(")")[2].split()[19]
        (place.pids / "etcd").write_text(f"{old.pid} {started}")
        stopping = threading.Thread(target=processes.end, args=(place, "etcd"))
        stopping.start()
        while processes.pid(place, "etcd") is not None:
            stopping.join(0.01)
        assert processes.recorded(place) == ()
        successor = threading.Thread(target=processes.wait_ended, args=(place, "etcd"))
        successor.start()
        successor.join(0.05)
        assert successor.is_alive()
        fifo.write_text("go\n")
        successor.join()
        stopping.join()
        assert old.wait() == 0
    processes.wait_ended(place, "etcd")  # nobody drains: nothing to wait for


def test_the_gate_opens_for_one_word_only(tmp_path: Path) -> None:
    for word, came in ((b"", False), (b"go\n", True)):
        subprocess.run(["sh", "-c", processes.GATE, "sh", "touch", str(tmp_path / "came")], input=word, check=False)
        assert (tmp_path / "came").exists() is came


def test_a_file_is_written_whole(tmp_path: Path) -> None:
    processes.write(tmp_path / "x", "one", mode=0o600)
    processes.write(tmp_path / "x", "two", mode=0o600)
    assert (tmp_path / "x").read_text() == "two"
    assert (tmp_path / "x").stat().st_mode & 0o777 == 0o600
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def test_who_waits_for_a_lock_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lock = tmp_path / "folder" / "lock"
    order = []

    def second() -> None:
        with locks.held(lock):
            order.append("second")

    with locks.held(lock):
        thread = threading.Thread(target=second)
        thread.start()
        while "Waiting" not in capsys.readouterr().err:
            thread.join(0.01)
        order.append("first")
    thread.join()
    assert order == ["first", "second"]


def test_a_program_that_outlives_its_killed_command_holds_the_lock(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    script = f"""
        from pathlib import Path
        from hack.realnode import locks
        with locks.held(Path({str(tmp_path / "lock")!r})):
            locks.run(["sh", "-c", "echo up >{fifo}; read -r go <{fifo}"])
    """
    with subprocess.Popen([sys.executable, "-c", textwrap.dedent(script)], cwd=ROOT) as command:
        assert fifo.read_text() == "up\n"
        command.kill()
    with (tmp_path / "lock").open() as lock:
        with pytest.raises(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        fifo.write_text("go\n")
        fcntl.flock(lock, fcntl.LOCK_EX)


def test_a_program_that_is_not_there_or_fails_is_named() -> None:
    with pytest.raises(ClusterError, match="/no/such cannot be run: No such file"):
        locks.output(["/no/such"])
    with pytest.raises(ClusterError, match=r"sh -c .*: out of order"):
        locks.output(["sh", "-c", "echo out of order >&2; exit 3"])
    assert locks.output(["cat"], stdin=b"words") == "words"


def test_an_image_comes_from_the_engine_that_has_it(programs: Programs, tmp_path: Path) -> None:
    for engine, script in {
        "docker": "exit 1",
        "podman": '[ "$1 $2 $3" = "image exists here:1" ] && exit; [ "$1" = save ] && echo "$@" >"${3#--output=}"',
    }.items():
        programs.write(engine, script)
    archive = images.exported("here:1", tmp_path / "image.tar")
    assert archive.read_text() == f"save --format=docker-archive --output={archive} here:1\n"
    with pytest.raises(ClusterError, match=r"away:1 is no file, and docker, podman.* has no image of that name"):
        images.exported("away:1", tmp_path / "image.tar")


def test_a_folder_is_no_image(place: Layout, tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing.tar"):
        with pytest.raises(ClusterError, match="is no archive of an image"):
            images.load(place, path, binaries=tmp_path)


def test_hollow_nodes_are_numbered_from_one(place: Layout) -> None:
    assert hollow.nodes(place) == ()
    assert hollow.component_names(place) == ()
    hollow.add(place, ["dgx-h100", "l40s-8-pcie"])
    (new,) = hollow.add(place, ["gb200-tray"])
    assert (new.number, new.machine, new.agent, new.address) == (3, "gb200-tray", "agent-3", "192.0.2.4")
    assert [node.machine for node in hollow.nodes(place)] == ["dgx-h100", "l40s-8-pcie", "gb200-tray"]
    assert place.hollow_name(3) == "a-3"
    assert hollow.component_names(place) == ("agent-1", "agent-2", "agent-3", hollow.KUBELETS)
    with pytest.raises(ClusterError, match="at most"):
        hollow.add(place, ["dgx-h100"] * hollow.NODES_MAX)
