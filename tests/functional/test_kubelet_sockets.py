# SPDX-License-Identifier: Apache-2.0
"""Life of the sockets, with real servers and real processes.

- start serves the service socket; the registration socket appears when announced; stop removes what is ours
- mode 0600, absolute paths, odd directory names, a path too long
- a live socket is never taken over, a dead one is; a killed process is succeeded by the next
- two instances with pod UIDs side by side; the survivor cleans up after a killed sibling
- a socket that is lost is made again, also with its directory, and kubelet's connection outlives it
- stop is quick, may be repeated, may come first, and ends what waits
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import grpc
import pytest

from driver import values
from driver.errors import SocketError
from driver.kubelet import server, sockets
from driver.standin import kubelet_client
from proto.dra.v1 import api_pb2 as dra_v1
from tests.fakes import kubelet_side

ROOT = Path(__file__).parent.parent.parent
DRIVER = "gpu.nearfield.dev"
CLAIM = kubelet_side.claim(1)
PATIENCE_S = 60.0


@pytest.fixture
def root() -> Iterator[Path]:
    with kubelet_side.short_directory() as path:
        yield path


def build(
    root: Path,
    *,
    pod_uid: str | None = None,
    driver: str = DRIVER,
    preparer: kubelet_side.FakePreparer | None = None,
    lock_timeout_s: float = PATIENCE_S,
) -> server.KubeletServer:
    return server.KubeletServer(
        driver_name=driver,
        registry_dir=root / "plugins_registry",
        plugin_dir=root / "plugins" / driver,
        pod_uid=pod_uid,
        preparer=preparer or kubelet_side.FakePreparer(),
        health=kubelet_side.FakeHealth(kubelet_side.healthy()),
        observer=kubelet_side.Calls(),
        lock_timeout_s=lock_timeout_s,
        watch_interval_s=0.02,
    )


@contextlib.contextmanager
def running(root: Path, *, pod_uid: str | None = None) -> Iterator[server.KubeletServer]:
    kubelet = build(root, pod_uid=pod_uid)
    kubelet.start()
    kubelet.registration()
    try:
        yield kubelet
    finally:
        kubelet.stop()


@contextlib.contextmanager
def process(
    root: Path, *, pod_uid: str | None = None, patience_s: float = PATIENCE_S
) -> Iterator[subprocess.Popen[str]]:
    command = [
        *(sys.executable, "-m", "tests.fakes.kubelet_process", str(root), str(patience_s)),
        *([pod_uid] if pod_uid else []),
    ]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        try:
            yield child
        finally:
            child.kill()


def serving(child: subprocess.Popen[str]) -> bool:
    assert child.stdout is not None
    return child.stdout.readline() == "registered\n"


def sockets_below(root: Path) -> set[str]:
    return {str(path.relative_to(root)) for path in root.rglob("*") if path.is_socket()}


def prepares(path: Path) -> bool:
    client = kubelet_client.DraClient(path)
    try:
        return client.prepare([CLAIM]) == {CLAIM.uid: kubelet_side.prepared(CLAIM)}
    finally:
        client.close()


def eventually(condition: Callable[[], bool]) -> bool:
    pause = threading.Event()
    for _ in range(3000):
        if condition():
            return True
        pause.wait(0.01)
    return False


def test_life_of_the_sockets(root: Path) -> None:
    kubelet = build(root)
    assert sockets_below(root) == set()
    kubelet.start()
    assert prepares(kubelet.paths.service)
    assert not kubelet.paths.registration.exists()
    kubelet.registration()
    assert kubelet.paths.registration == root / "plugins_registry/gpu.nearfield.dev-reg.sock"
    assert sockets_below(root) == {"plugins_registry/gpu.nearfield.dev-reg.sock", "plugins/gpu.nearfield.dev/dra.sock"}
    for path in (kubelet.paths.registration, kubelet.paths.service):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    kubelet.stop()
    kubelet.stop()
    assert [path for path in root.rglob("*") if not path.is_dir()] == []


def test_stop_before_start_and_between_start_and_registration(root: Path) -> None:
    kubelet = build(root)
    kubelet.stop()
    kubelet = build(root)
    kubelet.start()
    kubelet.stop()
    assert [path for path in root.rglob("*") if not path.is_dir()] == []


def test_directory_with_characters_that_mean_something_in_a_uri(root: Path) -> None:
    odd = root / "a b%41#c?d"
    with running(odd) as kubelet:
        assert prepares(kubelet.paths.service)
    assert {path.name for path in root.iterdir()} == {odd.name}


def test_nothing_is_left_when_only_one_of_the_two_can_be_bound(root: Path) -> None:
    kubelet = build(root)
    in_the_way = sockets.bind_path(kubelet.paths.registration)
    in_the_way.mkdir(parents=True)
    with pytest.raises(SocketError, match="Nothing can be bound"):
        kubelet.start()
    assert [path for path in root.rglob("*") if not path.is_dir()] == []


def test_path_too_long_is_said_before_anything_is_touched(root: Path) -> None:
    deep = root / ("d" * 100)
    with pytest.raises(SocketError, match=r"107.*--kubelet-dir"):
        build(deep)
    assert list(root.iterdir()) == []


@pytest.mark.parametrize("driver", [DRIVER, "d" * 60])
def test_every_form_of_the_names_can_be_bound(root: Path, driver: str) -> None:
    kubelet = build(root, driver=driver, pod_uid="7f2c1d0e-5a6b-4c3d-8e9f-0a1b2c3d4e5f")
    kubelet.start()
    kubelet.registration()
    assert prepares(kubelet.paths.service)
    kubelet.stop()


def test_live_instance_is_never_taken_over(root: Path) -> None:
    with running(root) as kubelet:
        second = build(root, lock_timeout_s=0.0)
        with pytest.raises(SocketError, match="belongs to another running instance"):
            second.start()
        second.stop()
        assert prepares(kubelet.paths.service)
        assert kubelet.paths.registration.is_socket()


@pytest.mark.parametrize("which", ["service", "registration"])
def test_live_socket_of_a_stranger_is_never_taken_over(root: Path, which: str) -> None:
    kubelet = build(root)
    path: Path = getattr(kubelet.paths, which)
    path.parent.mkdir(parents=True)
    with kubelet_side.listening(path):
        with pytest.raises(SocketError, match=f"{path.name} is served by a live process"):
            kubelet.start()
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(path))
    assert sockets_below(root) == {str(path.relative_to(root))}
    assert not kubelet.paths.lock.exists()


def test_stranger_who_comes_between_start_and_registration_is_not_taken_over(root: Path) -> None:
    kubelet = build(root)
    kubelet.start()
    with kubelet_side.listening(kubelet.paths.registration):
        theirs = kubelet.paths.registration.stat().st_ino
        with pytest.raises(SocketError, match="is served by a live process"):
            kubelet.registration()
        kubelet.stop()
        assert kubelet.paths.registration.stat().st_ino == theirs


def test_file_in_the_place_of_a_socket_is_not_overwritten(root: Path) -> None:
    kubelet = build(root)
    kubelet.paths.service.parent.mkdir(parents=True)
    kubelet.paths.service.write_text("precious")
    with pytest.raises(SocketError, match="exists and is no socket"):
        kubelet.start()
    assert kubelet.paths.service.read_text() == "precious"


def test_killed_process_is_succeeded(root: Path) -> None:
    with process(root) as child:
        assert serving(child)
        child.kill()
        child.wait()
    assert len(sockets_below(root)) == 2
    with running(root) as kubelet:
        assert prepares(kubelet.paths.service)
        assert len(sockets_below(root)) == 2


def test_second_process_of_the_same_name_ends_with_the_reason(root: Path) -> None:
    with process(root) as first:
        assert serving(first)
        with process(root, patience_s=0.2) as second:
            _, errors = second.communicate(timeout=PATIENCE_S)
            assert second.returncode == 1
            assert "belongs to another running instance" in errors
        assert prepares(root / "plugins" / DRIVER / "dra.sock")


def test_sigterm_ends_a_process_with_its_sockets(root: Path) -> None:
    with process(root) as child:
        assert serving(child)
        child.send_signal(signal.SIGTERM)
        assert child.wait(PATIENCE_S) == 0
        assert child.stderr is not None
        assert child.stderr.read() == ""
    assert sockets_below(root) == set()


def test_two_instances_side_by_side(root: Path) -> None:
    with process(root, pod_uid="pod-a") as first, running(root, pod_uid="pod-b") as second:
        assert serving(first)
        assert sockets_below(root) == {
            f"plugins_registry/{DRIVER}-pod-a-reg.sock",
            f"plugins_registry/{DRIVER}-pod-b-reg.sock",
            f"plugins/{DRIVER}/dra-pod-a.sock",
            f"plugins/{DRIVER}/dra-pod-b.sock",
        }
        assert prepares(root / "plugins" / DRIVER / "dra-pod-a.sock")
        assert prepares(second.paths.service)
        first.send_signal(signal.SIGTERM)
        assert first.wait(PATIENCE_S) == 0
        assert {Path(name).name for name in sockets_below(root)} == {f"{DRIVER}-pod-b-reg.sock", "dra-pod-b.sock"}
        assert prepares(second.paths.service)


def test_running_instance_cleans_up_after_a_killed_sibling(root: Path) -> None:
    with process(root, pod_uid="pod-a") as first, running(root, pod_uid="pod-b") as second:
        assert serving(first)
        first.kill()
        first.wait()
        ours = {str(path.relative_to(root)) for path in (second.paths.service, second.paths.registration)}
        assert eventually(lambda: sockets_below(root) == ours)
        assert eventually(lambda: not second.paths.lock.with_name("dra-pod-a.sock.lock").exists())
        assert prepares(second.paths.service)


def test_start_cleans_up_after_one_of_another_name(root: Path) -> None:
    with process(root) as first:
        assert serving(first)
        first.kill()
        first.wait()
    kubelet = build(root, pod_uid="pod-b")
    kubelet.start()
    assert [path.name for path in root.rglob("[!.]*.sock")] == ["dra-pod-b.sock"]
    kubelet.stop()


@pytest.mark.parametrize("which", ["service", "registration"])
def test_lost_socket_is_made_again_as_often_as_need_be(root: Path, which: str) -> None:
    with running(root) as kubelet:
        path: Path = getattr(kubelet.paths, which)
        for _ in range(5):
            lost = path.stat().st_ino
            with path_kept(path):
                path.unlink()
                assert eventually(path.is_socket)
                assert path.stat().st_ino != lost
            assert prepares(kubelet.paths.service)
        assert len(kubelet._endpoint._retired) <= 2  # servers of lost sockets do not pile up
    assert sockets_below(root) == set()


@contextlib.contextmanager
def path_kept(path: Path) -> Iterator[None]:
    """Keep the inode of a file that will be removed, as its number might be given to the next file."""
    descriptor = os.open(path, os.O_PATH)
    try:
        yield
    finally:
        os.close(descriptor)


def test_lost_directories_are_made_again(root: Path) -> None:
    with running(root) as kubelet:
        for directory in ("plugins", "plugins_registry"):
            # Whole, at one moment: what is taken away piece by piece is made again piece by piece.
            shutil.rmtree((root / directory).rename(root / "gone"))
        assert eventually(lambda: kubelet.paths.service.is_socket() and kubelet.paths.registration.is_socket())
        assert eventually(kubelet.paths.lock.exists)
        assert prepares(kubelet.paths.service)


def lose(path: Path) -> None:
    """Remove a socket, and wait until it is there again."""
    path.unlink()
    assert eventually(path.is_socket)


def test_connection_outlives_the_file(root: Path) -> None:
    entered, go_on = threading.Event(), threading.Event()

    def work(refs: Sequence[values.ClaimRef], call: values.Call) -> None:
        entered.set()
        assert go_on.wait(PATIENCE_S)

    preparer = kubelet_side.FakePreparer(work=work)
    kubelet = build(root, preparer=preparer)
    kubelet.start()
    lose(kubelet.paths.service)
    client = kubelet_client.DraClient(kubelet.paths.service)
    pending = client.v1.NodePrepareResources.future(
        dra_v1.NodePrepareResourcesRequest(claims=[dra_v1.Claim(namespace="n", uid="u", name="c")])
    )
    assert entered.wait(PATIENCE_S)
    lose(kubelet.paths.service)
    lose(kubelet.paths.service)
    go_on.set()
    assert list(pending.result(PATIENCE_S).claims) == ["u"]
    assert prepares(kubelet.paths.service)
    assert client.prepare([CLAIM]) == {CLAIM.uid: kubelet_side.prepared(CLAIM)}
    client.close()
    kubelet.stop()


def test_socket_that_somebody_else_put_there_is_left_to_them(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    with running(root) as kubelet, kubelet_side.listening(root / "theirs"):
        theirs = (root / "theirs").rename(kubelet.paths.service).stat().st_ino
        assert eventually(lambda: "served by a live process" in kubelet.status().error)
        assert not kubelet.status().registered
    assert kubelet.paths.service.stat().st_ino == theirs
    assert sum("served by a live process" in record.getMessage() for record in caplog.records) == 1


def test_trouble_that_passes_is_over(root: Path) -> None:
    directory, other, kept = root / "plugins" / DRIVER, root / "other", root / "kept"
    kept.mkdir()
    directory.parent.mkdir()
    directory.symlink_to(kept)
    with running(root) as kubelet:
        # In its place at one moment, and not after one in which a folder could be made there.
        other.write_text("in the way")
        other.replace(directory)
        assert eventually(lambda: "not in order" in kubelet.status().error)
        other.symlink_to(kept)
        other.replace(directory)
        assert eventually(lambda: "not in order" not in kubelet.status().error)
        assert prepares(kubelet.paths.service)


def test_stop_cancels_calls_that_do_not_end(root: Path) -> None:
    entered, over = threading.Event(), threading.Event()

    def work(refs: Sequence[values.ClaimRef], call: values.Call) -> None:
        entered.set()
        pause = threading.Event()
        while not call.over():
            pause.wait(0.01)
        over.set()

    kubelet = build(root, preparer=kubelet_side.FakePreparer(work=work))
    kubelet.start()
    client = kubelet_client.DraClient(kubelet.paths.service)
    pending = client.v1.NodePrepareResources.future(
        dra_v1.NodePrepareResourcesRequest(claims=[dra_v1.Claim(namespace="n", uid="u", name="c")])
    )
    assert entered.wait(PATIENCE_S)
    kubelet.stop(grace_s=0.05)
    assert over.wait(PATIENCE_S)
    with pytest.raises(grpc.RpcError):
        pending.result(PATIENCE_S)
    client.close()
